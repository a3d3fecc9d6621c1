"""The verbs of the command line that need nothing but this package."""
