"""The errors that a user can cause and mend."""


class LaneformerError(ValueError):
    """Bad input or an unusable file: one line that names the cause and the fix; the command line exits with 1."""


class UsageError(LaneformerError):
    """Arguments that can't be used together or at all; the command line exits with 2."""
