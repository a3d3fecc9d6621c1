"""The host's side of generation: prompts to padded arrays, device programs in blocks, tokens to text."""

import dataclasses
from collections.abc import Iterable, Iterator
from numbers import Integral
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from laneformer_jax import decode
from laneformer_jax.cache import Cache
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.engine import CHUNK, Engine, bucket, round_up
from laneformer_jax.errors import LaneformerError, UsageError
from laneformer_jax.sampling import Sampling, row_keys

# One token first, for the shortest wait, then few at a time: between blocks the host shows text and seeks stop strings.
STREAM_BLOCKS = (1, 8)

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class Completion:
    """What the model wrote after one prompt.

    Attributes:
        text: decoded, without control tokens and cut before a stop string; None without a tokenizer.
        token_ids: generated ids without the end-of-sequence token.
        finish_reason: "stop" for an end-of-sequence token or a stop string, "length" for the token limit.
        prompt_tokens: length of the prompt.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int


@dataclasses.dataclass(frozen=True)
class Request:
    """Token prompts and how to continue them; `seeds` has one for each prompt."""

    prompts: list[list[int]]
    max_new_tokens: int
    sampling: Sampling
    seeds: list[int]
    num_samples: int = 1
    eos: tuple[int, ...] = ()
    sampleable: int | None = None


@dataclasses.dataclass
class Rows:
    """What the host sees between two blocks: each row's ids so far and whether it has met an end."""

    ids: list[list[int]]
    ended: list[bool]


class Session:
    """One cache that outlives a generation, so that the next turn of a conversation adds only what is new.

    Args:
        engine: that runs the programs.
        rows: prompts per generation.
        capacity: tokens of each row, a turn's answer included; the model's context by default.
    """

    def __init__(self, engine: Engine, rows: int = 1, capacity: int | None = None):
        self.engine, self.rows = engine, rows
        context = engine.config.max_position_embeddings
        self.capacity = min(capacity or context, context)
        self.cache: Cache | None = None
        self.cached: list[list[int]] = [[] for _ in range(rows)]

    def check(self, request: Request) -> None:
        """Refuses what this session cannot generate, with the numbers.

        Raises:
            LaneformerError: as `check_request`, or not one prompt for each row.
        """
        if len(request.prompts) != self.rows:
            raise UsageError(f"a session of {self.rows} row(s) got {len(request.prompts)} prompts")
        check_request(self.engine.config, request, self.capacity)

    def run(self, request: Request, blocks: Iterable[int]) -> Iterator[Rows]:
        """Generates in blocks; yields after each what there is, until every row has ended or the limit is reached.

        Args:
            request: prompts, whose beginning may be what this session holds already.
            blocks: tokens of each block; the last number is repeated.

        Raises:
            LaneformerError: as `check`, or logits are not finite.
        """
        self.check(request)
        prompts = self._pending(request.prompts)
        shape, prompt_array, lengths = self._pad(prompts, request)
        choice = _choice(request, self.engine.row_multiple)
        cache, self.cache = self.cache, None
        if cache is None:
            cache = self.engine.init_cache(prompt_array.shape[0], self.capacity)
        progress, limit = None, 0
        sizes = iter(blocks)
        size = request.max_new_tokens
        while True:
            size = next(sizes, size)
            limit = min(limit + size, request.max_new_tokens)
            if progress is None:
                progress = self.engine.start(shape, prompt_array, lengths, cache, choice, jnp.int32(limit))
            else:
                progress = self.engine.resume(shape, progress, choice, jnp.int32(limit))
            rows, done = self._read(progress, request, limit)
            if done and request.num_samples == 1:
                self._keep(request.prompts, rows, progress)
            yield rows
            if done:
                return

    def _pending(self, prompts: list[list[int]]) -> list[list[int]]:
        reusable = self.cache is not None and all(
            len(held) < len(prompt) and prompt[: len(held)] == held
            for held, prompt in zip(self.cached, prompts, strict=True)
        )
        if not reusable:
            self.cache = None
            return prompts
        return [prompt[len(held) :] for held, prompt in zip(self.cached, prompts, strict=True)]

    def _pad(self, prompts: list[list[int]], request: Request) -> tuple[decode.Shape, jax.Array, jax.Array]:
        longest = max(map(len, prompts))
        chunk = min(bucket(longest), CHUNK)
        rows = _fill_up(prompts, self.engine.row_multiple)
        lengths = np.array([len(prompt) for prompt in rows], np.int32)
        padded = np.zeros((len(rows), bucket(longest)), np.int32)
        for row, prompt in enumerate(rows):
            padded[row, : len(prompt)] = prompt
        shape = decode.Shape(self.capacity, chunk, request.num_samples, request.sampling.filters())
        return shape, jnp.asarray(padded), jnp.asarray(lengths)

    def _read(self, progress: decode.Progress, request: Request, limit: int) -> tuple[Rows, bool]:
        rows = len(request.prompts) * request.num_samples
        tokens, count, active, finite = self.engine.fetch(
            (progress.tokens, progress.count, progress.active, progress.finite)
        )
        if not finite[:rows].all():
            bad = np.flatnonzero(~finite[:rows]).tolist()
            raise LaneformerError(f"the logits of row(s) {bad} are not finite: the weights or their dtype are at fault")
        ids = [tokens[row, : count[row]].tolist() for row in range(rows)]
        ended = [not active[row] for row in range(rows)]
        return Rows(ids, ended), all(ended) or limit >= request.max_new_tokens

    def _keep(self, prompts: list[list[int]], rows: Rows, progress: decode.Progress) -> None:
        """The newest token of a row has not been through the model, so the cache ends before it."""
        self.cache = progress.cache
        lengths = self.engine.fetch(progress.cache.length)
        self.cached = [(p + ids)[:n] for p, ids, n in zip(prompts, rows.ids, lengths, strict=False)]


def capacity_for(config: LaneformerConfig, request: Request) -> int:
    """Tokens of a cache that holds the request and all others with prompts of its bucket, within the context."""
    needed = bucket(max(map(len, request.prompts))) + request.max_new_tokens
    return min(bucket(needed), config.max_position_embeddings)


def check_request(config: LaneformerConfig, request: Request, context: int) -> None:
    """Refuses what cannot be generated, with the numbers.

    Raises:
        LaneformerError: an empty prompt, an id outside the vocabulary, a seed that is not one, or more tokens than
            `context` holds.
    """
    if request.max_new_tokens < 1 or request.num_samples < 1:
        raise LaneformerError(
            f"max_new_tokens and num_samples must be at least 1, got {request.max_new_tokens}, {request.num_samples}"
        )
    for seed in request.seeds:
        if not (isinstance(seed, Integral) and 0 <= seed < 2**32):
            raise UsageError(f"a seed must be a whole number from 0 to {2**32 - 1}, got {seed!r}")
    for prompt in request.prompts:
        if not prompt:
            raise LaneformerError("the prompt is empty: give at least one token")
        if not all(0 <= token < config.vocab_size for token in prompt):
            raise LaneformerError(f"the prompt has token ids outside the vocabulary of {config.vocab_size}")
        if len(prompt) + request.max_new_tokens > context:
            raise LaneformerError(
                f"prompt of {len(prompt)} tokens and {request.max_new_tokens} new ones exceed the context of {context}:"
                f" shorten the prompt or ask for at most {max(context - len(prompt), 0)} new tokens"
            )


def _fill_up(rows: list[Any], multiple: int) -> list[Any]:
    """As many rows as a mesh needs: copies of the last one, which end when it ends."""
    return [*rows, *rows[-1:] * (round_up(len(rows), multiple) - len(rows))]


def _choice(request: Request, row_multiple: int) -> decode.Choice:
    eos = [*request.eos, *[-1] * (bucket(len(request.eos), 4) - len(request.eos))]
    return decode.Choice(
        keys=row_keys(_fill_up(request.seeds, row_multiple), request.num_samples),
        values=request.sampling.values(),
        sampleable=jnp.int32(request.sampleable or 2**31 - 1),
        eos=jnp.asarray(eos, jnp.int32),
    )
