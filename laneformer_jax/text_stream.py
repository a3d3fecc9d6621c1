"""Text of a completion as its tokens arrive: whole characters, and nothing of a stop string."""

from collections.abc import Sequence

from laneformer_jax.errors import LaneformerError
from laneformer_jax.tokenizer import Tokenizer


class TextStream:
    """Decodes one completion, as the continuation of its prompt.

    All that `push` and `finish` return, joined, is the text of the completion up to the first stop string, however
    the ids were divided: spaces and indents after the prompt are kept, and a character of several tokens comes whole.
    A push costs time proportional to its own tokens: no earlier one is decoded again.

    Args:
        prompt_ids: what the completion continues.
        stop: strings that end the text; the one that begins earliest counts. It isn't part of the text.

    Attributes:
        stopped: a stop string was found, and the text ends before it.

    Raises:
        LaneformerError: a stop string is empty.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str] = ()):
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in self._stop:
            raise LaneformerError("An empty stop string would end every text before it begins: leave it out.")
        self._detokenizer = tokenizer.detokenizer()
        self._detokenizer.push(prompt_ids)
        self._held = ""
        self.stopped = False

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens make certain: it can be shown, and later tokens won't change it."""
        return self._release(self._detokenizer.push(ids), final=False)

    def finish(self) -> str:
        """What was held back; a character that the end cut in half is shown as U+FFFD."""
        return self._release(self._detokenizer.push((), final=True), final=True)

    def _release(self, new: str, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        found = min((start for stop in self._stop if (start := text.find(stop)) >= 0), default=len(text))
        # A stop string that may still be completed wins over a found one if it began before it.
        certain = found if final else min(found, self._possible_stop(text))
        self.stopped = certain == found < len(text)
        self._held = "" if self.stopped else text[certain:]
        return text[:certain]

    def _possible_stop(self, text: str) -> int:
        """Where the earliest stop string begins of which the text's end may be the beginning; else the text's end."""
        longest = max(map(len, self._stop), default=1)
        starts = range(max(0, len(text) - longest + 1), len(text))
        return next((start for start in starts if any(stop.startswith(text[start:]) for stop in self._stop)), len(text))
