"""`load` and the model as its users see it: text in, text or logits out."""

import json
import operator
import reprlib
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from laneformer_jax import weights
from laneformer_jax.array_types import Array, Float
from laneformer_jax.config import LaneformerConfig, token_ids
from laneformer_jax.engine import Engine, round_up
from laneformer_jax.errors import LaneformerError, UsageError
from laneformer_jax.generation import (
    STREAM_BLOCKS,
    Clock,
    Completion,
    Request,
    Rows,
    Session,
    Timing,
    capacity_for,
)
from laneformer_jax.sampling import Sampling
from laneformer_jax.schedule import Pack
from laneformer_jax.text_stream import TextStream
from laneformer_jax.tokenizer import Tokenizer, load_tokenizer

DEFAULT_MODEL = Path(__file__).parent / "default_model"
DEFAULT_NEW_TOKENS = 256

Prompts = str | Sequence[str | Sequence[int]]


def load(
    path: str | Path | None = None,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    pack: Pack = "module",
    sum_dtype: str | None = None,
) -> "LanguageModel":
    """The language model of a checkpoint folder.

    Args:
        path: folder with `config.json` and the weights, safetensors as published or as `laneformer convert` leaves
            them; the embedded default model if None. On a mesh, every device reads its own lanes' bytes alone.
        dtype: "float32", "bfloat16" or "float16" for weights, cache and activations; the config's by default.
        mesh: a mesh with the axes "data" and "lanes" (`parallel.make_mesh`); one device if None.
        pack: what one sum between devices of the mesh carries, a module's output or a layer's two; the result is the
            same.
        sum_dtype: in which sums travel between devices; that of the activations by default.

    Raises:
        LaneformerError: the folder is not a Laneformer's, or its files are unusable; the message says what to do.
    """
    folder = DEFAULT_MODEL if path is None else Path(path)
    if not (folder / "config.json").is_file():
        raise LaneformerError(f"{folder} is not a model folder: it has no config.json")
    config = LaneformerConfig.from_file(folder / "config.json")
    if dtype is not None:
        config = config.replace(dtype=dtype)
    source, names = weights.open_source(folder, config)
    if mesh is None:
        engine = Engine(weights.load(config, source, names=names))
    else:
        from parallel.engine import MeshEngine, place_on

        placed = weights.load(config, source, place=place_on(mesh, config), names=names)
        engine = MeshEngine(placed, mesh, pack, sum_dtype)
    return LanguageModel(engine, load_tokenizer(folder), (*config.eos_token_ids, *_generation_eos(folder, config)))


def _generation_eos(folder: Path, config: LaneformerConfig) -> tuple[int, ...]:
    file = folder / "generation_config.json"
    if not file.is_file():
        return ()
    try:
        ids = token_ids(json.loads(file.read_text(encoding="utf-8")).get("eos_token_id"), "eos_token_id")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise LaneformerError(f"{file}: unusable ({error})") from error
    if any(token not in range(config.vocab_size) for token in ids):
        raise LaneformerError(f"{file}: eos_token_id {list(ids)} goes outside the vocabulary of {config.vocab_size}")
    return ids


class LanguageModel:
    """A Laneformer with its tokenizer; made by `load`.

    Attributes:
        config: the architecture.
        tokenizer: None where the folder has none; then prompts are token ids and completions have no text.
        eos: ids that end a completion.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, eos: Sequence[int]):
        self.engine, self.config, self.tokenizer = engine, engine.config, tokenizer
        own = [] if tokenizer is None or tokenizer.eos_id is None else [tokenizer.eos_id]
        self.eos = tuple(dict.fromkeys([*eos] or own))

    def logits(self, token_ids: Sequence[Sequence[int]] | np.ndarray | Array) -> Float[Array, "B T V"]:
        """Float32 logits of every position of rows of equal length, without a cache.

        Raises:
            LaneformerError: rows are empty, of unequal length, beyond the context or outside the vocabulary.
        """
        try:
            ids = np.asarray(token_ids)
        except ValueError as error:
            raise LaneformerError("token_ids must be rows of equal length") from error
        if ids.ndim != 2 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
            raise LaneformerError(f"token_ids must be whole numbers of shape [B, T], got {ids.dtype} {list(ids.shape)}")
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise LaneformerError(f"token_ids go outside the vocabulary of {self.config.vocab_size}")
        if ids.shape[1] > self.config.max_position_embeddings:
            raise LaneformerError(f"{ids.shape[1]} tokens exceed the context of {self.config.max_position_embeddings}")
        rows = round_up(len(ids), self.engine.row_multiple)
        padded = np.concatenate([ids, np.repeat(ids[-1:], rows - len(ids), axis=0)])
        return self.engine.logits(jnp.asarray(padded, jnp.int32))[: len(ids)]

    def generate(
        self,
        prompts: Prompts,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | Sequence[int] = 0,
        num_samples: int = 1,
        stop: str | Sequence[str] | None = None,
        stream: bool = False,
        session: Session | None = None,
    ) -> Any:
        """Continues prompts: one compiled program from the prompts to the last token.

        Args:
            prompts: one text, several, or rows of token ids; texts get a BOS if the tokenizer has one.
            max_new_tokens: limit of each completion; by default 256 or what the context leaves.
            temperature: 0 is greedy; see `Sampling` for the filters.
            top_k: keep the k most likely tokens.
            top_p: keep the most likely tokens up to this probability.
            min_p: keep tokens at least this likely relative to the best.
            seed: one for all prompts, or one each. A row's tokens depend on its own seed alone.
            num_samples: completions of each prompt, which share its prefill.
            stop: strings that end a completion and are not part of it.
            stream: yield the text of a single completion piece by piece instead; the generator returns the completion.
            session: cache to continue from and to leave behind.

        Returns:
            A `Completion` for one text, a list of them for several prompts; with `num_samples` above 1 a list of that
            many in the place of each. With `stream`, an iterator of str.

        Raises:
            UsageError: sampling values out of range, or arguments that do not go together.
            LaneformerError: the request does not fit the model.
        """
        single = isinstance(prompts, str)
        token_prompts = self._token_prompts(prompts)
        stops = _stop_strings(stop)
        if (stops or stream) and self.tokenizer is None:
            raise UsageError("stop strings and streaming need a tokenizer, which this model folder lacks")
        if session is not None and not (isinstance(session, Session) and session.engine is self.engine):
            raise UsageError("the session is none of this model: make it as Session(lm.engine)")
        context = self.config.max_position_embeddings if session is None else session.capacity
        request = Request(
            prompts=token_prompts,
            max_new_tokens=_limit(token_prompts, context) if max_new_tokens is None else max_new_tokens,
            sampling=Sampling(temperature, top_k, top_p, min_p),
            seeds=list(seed) if isinstance(seed, Sequence | np.ndarray) else [seed] * len(token_prompts),
            num_samples=num_samples,
            eos=self.eos,
            sampleable=None if self.tokenizer is None else self.tokenizer.size,
        )
        if stream and len(token_prompts) * request.num_samples != 1:
            raise UsageError("stream takes one prompt and one sample")
        session = session or Session(self.engine, len(token_prompts), capacity_for(self.config, request))
        session.check(request)
        writers = [
            _Writer(self.tokenizer, prompt, stops) for prompt in token_prompts for _ in range(request.num_samples)
        ]
        if stream:
            return self._stream(session, request, writers[0])
        clock = Clock()
        for rows in session.run(request, STREAM_BLOCKS if stops else (request.max_new_tokens,)):
            clock.lap(rows)
            for row, writer in enumerate(writers):
                writer.take(rows, row)
            if all(writer.finished for writer in writers):
                break
        completions = [writer.completion(clock.timing()) for writer in writers]
        if num_samples > 1:
            grouped = [completions[i : i + num_samples] for i in range(0, len(completions), num_samples)]
            return grouped[0] if single else grouped
        return completions[0] if single else completions

    def _stream(self, session: Session, request: Request, writer: "_Writer") -> Generator[str, None, Completion]:
        clock = Clock()
        for rows in session.run(request, STREAM_BLOCKS):
            clock.lap(rows)
            piece = writer.take(rows, 0)
            if piece:
                yield piece
            if writer.finished:
                break
        rest = writer.finish()
        if rest:
            yield rest
        return writer.completion(clock.timing())

    def _token_prompts(self, prompts: Prompts) -> list[list[int]]:
        items = [prompts] if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable) else list(prompts)
        if not items:
            raise UsageError("no prompts given")
        return [self._tokens(item) for item in items]

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            try:
                if isinstance(prompt, bytes):
                    raise TypeError("bytes are neither text nor token ids")
                return [operator.index(token) for token in prompt]
            except TypeError as error:
                shown = reprlib.repr(prompt)
                raise UsageError(f"a prompt must be a text or a list of token ids, got {shown}") from error
        if self.tokenizer is None:
            raise LaneformerError("this model folder has no tokenizer: give the prompt as token ids")
        if not prompt:
            raise LaneformerError("the prompt is empty: give at least one character")
        return self.tokenizer.encode(prompt)


def _stop_strings(stop: str | Iterable[str] | None) -> list[str]:
    stops = [stop] if isinstance(stop, str) or not isinstance(stop, Iterable | None) else list(stop or ())
    if not all(isinstance(string, str) and string for string in stops):
        raise UsageError(f"a stop string must not be empty nor anything but text, got {stops!r}")
    return stops


def _limit(prompts: list[list[int]], context: int) -> int:
    """At least one, so that a prompt which fills the context is refused with the numbers."""
    return max(1, min(DEFAULT_NEW_TOKENS, context - max(map(len, prompts))))


class _Writer:
    """Turns one row's ids into a completion as they come."""

    def __init__(self, tokenizer: Tokenizer | None, prompt: list[int], stop: Sequence[str]):
        self.stream = TextStream(tokenizer, prompt, stop) if tokenizer else None
        self.prompt_tokens = len(prompt)
        self.ids: list[int] = []
        self.pieces: list[str] = []
        self.ended = self.released = False

    @property
    def finished(self) -> bool:
        return self.ended or (self.stream is not None and self.stream.stopped)

    def take(self, rows: Rows, row: int) -> str:
        if self.finished:
            return ""
        before = len(self.pieces)
        for token in rows.ids[row][len(self.ids) :]:
            self.ids.append(token)
            if self.stream is not None:
                self.pieces.append(self.stream.push([token]))
                if self.stream.stopped:
                    break
        self.ended = rows.ended[row] and len(self.ids) == len(rows.ids[row])
        return "".join(self.pieces[before:])

    def finish(self) -> str:
        """Text that was held back; nothing the second time."""
        if self.stream is None or self.released:
            return ""
        self.released = True
        self.pieces.append(self.stream.finish())
        return self.pieces[-1]

    def completion(self, timing: Timing) -> Completion:
        self.finish()
        text = "".join(self.pieces) if self.stream else None
        return Completion(text, self.ids, "stop" if self.finished else "length", self.prompt_tokens, timing)
