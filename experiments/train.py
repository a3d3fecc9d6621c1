"""Trains a Laneformer from scratch: data-parallel steps, checkpoints, exact resume, evaluation, export."""

import dataclasses
import functools
import gzip
import hashlib
import json
import math
import platform
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from experiments import corpus
from laneformer_jax.array_types import Array, Float, Int
from laneformer_jax.config import PRESETS, LaneformerConfig
from laneformer_jax.errors import LaneformerError
from laneformer_jax.model import Laneformer

BITS = 1 / math.log(2)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that decides a training run's result; the defaults make the embedded model.

    Attributes:
        config: name of a preset architecture.
        corpus: "stdlib" or a folder of text.
        steps: optimizer steps; the schedule ends there.
        batch: sequences a step, a multiple of `devices`.
        seq_len: tokens a sequence.
        short_until: fraction of the steps in which every sequence is halved, which makes attention cheaper.
        lr: peak learning rate, reached after `warmup` steps and taken to a twentieth by a cosine.
        warmup: steps of linear warmup.
        weight_decay: of matrices; norm scales have none.
        clip: largest norm of the gradient.
        seed: of weights and data order.
        devices: devices that share a batch; on a CPU, groups of threads.
    """

    config: str = "laneformer_small"
    corpus: str = corpus.STDLIB
    steps: int = 3600
    batch: int = 4
    seq_len: int = 512
    short_until: float = 0.8
    lr: float = 3e-3
    warmup: int = 150
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    devices: int = 2

    def model_config(self) -> LaneformerConfig:
        """The architecture.

        Raises:
            LaneformerError: no such preset, or settings that don't fit it or each other.
        """
        if self.config not in PRESETS:
            raise LaneformerError(f"config {self.config!r} is none of the presets {', '.join(PRESETS)}")
        config = PRESETS[self.config]()
        if not 2 <= self.seq_len <= config.max_position_embeddings or self.seq_len % 2:
            raise LaneformerError(
                f"seq_len must be even and within 2..{config.max_position_embeddings}, got {self.seq_len}"
            )
        if self.devices < 1 or self.batch < 1 or self.batch % self.devices:
            raise LaneformerError(f"batch {self.batch} must be a positive multiple of devices {self.devices}")
        if not 0 <= self.warmup < self.steps:
            raise LaneformerError(f"steps {self.steps} must be more than warmup {self.warmup}, which is at least 0")
        return config


def data_mesh(devices: int) -> Mesh:
    """A mesh ("data",) of that many devices; a CPU is split into them if JAX has not started yet.

    Raises:
        LaneformerError: JAX sees fewer.
    """
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:
        pass  # JAX runs already; what it has may be enough
    found = jax.devices()
    if len(found) < devices:
        raise LaneformerError(f"{devices} devices asked for, JAX has {len(found)}: lower --devices")
    return Mesh(np.array(found[:devices]), ("data",))


def token_losses(graph: nnx.GraphDef, params: nnx.State, ids: Int[Array, "B T"]) -> tuple[Array, Array]:
    """Sums over targets of -log p(target | earlier tokens of the row) in nats, and of 1.

    The start of a document is given, never a target: nothing could tell where it comes.
    """
    logits = nnx.merge(graph, params)(ids[:, :-1]).astype(jnp.float32)
    targets = ids[:, 1:]
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    counted = (targets != corpus.BOS).astype(jnp.float32)
    return jnp.sum(counted * (jax.nn.logsumexp(logits, axis=-1) - chosen)), jnp.sum(counted)


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """AdamW (b2 0.95) behind clipping, with linear warmup and a cosine to a twentieth of the peak."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, settings.lr, settings.warmup, settings.steps, end_value=settings.lr / 20
    )

    def decayed(params: nnx.State) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: "scale" not in jax.tree_util.keystr(path), params)

    return optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.adamw(schedule, b2=0.95, weight_decay=settings.weight_decay, mask=decayed),
    )


def make_step(graph: nnx.GraphDef, optimizer: optax.GradientTransformation, mesh: Mesh) -> Callable:
    """`(params, opt_state, ids [B, T + 1]) -> params, opt_state, loss in nats a target`, jitted, state donated.

    Every device takes its rows one by one: a row's activations fit a CPU's cache, and its memory is that of one row.
    """

    def gradients(params: nnx.State, ids: Int[Array, "B T"]):
        def one_row(total, row):
            losses = functools.partial(token_losses, graph)
            (loss, count), grads = jax.value_and_grad(losses, has_aux=True)(params, row[None])
            return jax.tree.map(jnp.add, total, (grads, loss, count)), None

        zero = jax.tree.map(jnp.zeros_like, params), jnp.float32(0), jnp.float32(0)
        total, _ = jax.lax.scan(one_row, zero, ids)
        return jax.lax.psum(total, "data")

    split, whole = PartitionSpec("data"), PartitionSpec()
    sharded = jax.shard_map(gradients, mesh=mesh, in_specs=(whole, split), out_specs=whole, check_vma=False)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: nnx.State, opt_state: Any, ids: Int[Array, "B T"]):
        grads, loss, count = sharded(params, ids)
        grads = jax.tree.map(lambda g: g / count, grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss / count

    return step


def halved(ids: np.ndarray) -> np.ndarray:
    """[B, T + 1] as [2B, T/2 + 1], with every target kept."""
    middle = ids.shape[1] // 2
    return np.stack([ids[:, : middle + 1], ids[:, middle:]], axis=1).reshape(-1, middle + 1)


def bits_per_byte(graph: nnx.GraphDef, params: nnx.State, tokens: np.ndarray, length: int, size: int) -> float:
    """Bits that the model needs for each of the `size` bytes of text behind `tokens`, documents' ends included.

    The stream of documents is cut into rows of `length`, each scored without what came before it.
    """
    rows = -(-(len(tokens) - 1) // length)
    padded = np.full(rows * length + 1, corpus.BOS, np.int32)
    padded[: len(tokens)] = tokens
    windows = np.lib.stride_tricks.sliding_window_view(padded, length + 1)[::length]

    @jax.jit
    def nats(params: nnx.State, windows: Int[Array, "N T"]) -> Float[Array, "N"]:
        return jax.lax.map(lambda row: token_losses(graph, params, row[None])[0], windows)

    return float(np.sum(np.asarray(nats(params, windows), np.float64))) * BITS / size


def baselines(training: Sequence[str], held_out: Sequence[str]) -> dict[str, float]:
    """Bits per byte of the held-out text under gzip -9 and under the byte frequencies of the training text."""
    fitted, text = Counter("".join(training).encode()), "".join(held_out).encode()
    total = sum(fitted.values()) + 256  # every byte is counted once more, so that none is impossible
    nats = -sum(count * math.log((fitted[byte] + 1) / total) for byte, count in Counter(text).items())
    return {
        "gzip_bits_per_byte": 8 * len(gzip.compress(text, 9)) / len(text),
        "unigram_bits_per_byte": nats * BITS / len(text),
    }


class Journal:
    """The metrics of a run, one JSON object a line, and the seconds that it took so far, also over resumes."""

    def __init__(self, path: Path, step: int):
        """Keeps the lines up to `step`: those after it belong to steps that will be taken again."""
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        kept = [line for line in lines if line["step"] <= step]
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))
        self.path = path
        self.seconds_before = kept[-1]["seconds"] if kept else 0.0
        self.tokens = kept[-1]["tokens"] if kept else 0
        self.started = time.monotonic()

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def write(self, **values: float) -> None:
        """Appends one line."""
        with self.path.open("a") as file:
            file.write(json.dumps({**values, "tokens": self.tokens, "seconds": round(self.seconds, 3)}) + "\n")


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """A list to which SIGTERM and SIGINT append themselves instead of ending the process."""
    received: list[int] = []
    signals = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda number, _: received.append(number)) for number in signals]
    try:
        yield received
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def claim(folder: Path, facts: dict[str, Any], resume: bool) -> None:
    """Writes what decides the run to `folder`/run.json, or checks that the run already there is the same.

    Raises:
        LaneformerError: another run is there, or the same one and `resume` is False.
    """
    path = folder / "run.json"
    if path.exists():
        there = json.loads(path.read_text())
        differing = [f"{k} {there.get(k)!r}, not {v!r}" for k, v in facts.items() if there.get(k) != v]
        if differing:
            raise LaneformerError(f"{folder} holds a run with {'; '.join(differing)}: choose another --out")
        if not resume:
            raise LaneformerError(f"{folder} already holds this run: choose another --out, or resume it")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=2) + "\n")


def train(
    settings: Settings, out: Path, *, resume: bool = True, save_every: int = 200, max_minutes: float = math.inf
) -> bool:
    """Trains to the last step, then evaluates and writes a model folder to `out`, which keeps the run in out/training.

    A resumed run takes the same steps on the same data as one that was never stopped. SIGTERM, SIGINT and
    `max_minutes` end it early at a checkpoint.

    Returns:
        Whether the run is complete.

    Raises:
        LaneformerError: settings that don't fit together, or another run is in `out`.
    """
    config = settings.model_config()
    mesh = data_mesh(settings.devices)
    texts = corpus.read_corpus(settings.corpus)
    folder = out.absolute() / "training"
    claim(folder, {**dataclasses.asdict(settings), "corpus_sha256": texts.sha256}, resume)
    tokenizer = corpus.train_tokenizer(texts.training, config.vocab_size)
    tokens = corpus.encode(texts.training, tokenizer)

    model = Laneformer(config, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(settings.seed))
    graph, params = nnx.split(model)
    optimizer = make_optimizer(settings)
    whole = NamedSharding(mesh, PartitionSpec())
    state = jax.device_put({"params": params, "optimizer": optimizer.init(params)}, whole)
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=save_every, max_to_keep=2, enable_async_checkpointing=False, cleanup_tmp_directories=True
    )
    with ocp.CheckpointManager(folder / "checkpoints", options=options) as checkpoints, stop_requests() as stops:
        step = checkpoints.latest_step() or 0
        if step:
            state = checkpoints.restore(step, args=ocp.args.StandardRestore(state))
        journal = Journal(folder / "metrics.jsonl", step)
        take = make_step(graph, optimizer, mesh)
        deadline = time.monotonic() + 60 * max_minutes
        with tqdm(total=settings.steps, initial=step, desc="train", unit="step", dynamic_ncols=True) as bar:
            while step < settings.steps and not stops and time.monotonic() < deadline:
                ids = corpus.batch(tokens, step, settings.batch, settings.seq_len, settings.seed)
                short = step < settings.short_until * settings.steps
                began = time.monotonic()
                params, opt_state, loss = take(state["params"], state["optimizer"], halved(ids) if short else ids)
                state, step = {"params": params, "optimizer": opt_state}, step + 1
                size = settings.batch * settings.seq_len
                journal.tokens += size
                journal.write(step=step, loss=float(loss))
                bar.update()
                bar.set_postfix(loss=f"{float(loss):.3f}", tokens_per_s=f"{size / (time.monotonic() - began):.0f}")
                checkpoints.save(step, args=ocp.args.StandardSave(state))
        if step not in checkpoints.all_steps():
            checkpoints.save(step, args=ocp.args.StandardSave(state), force=True)
    if step < settings.steps:
        print(f"stopped after step {step} of {settings.steps}; the same command goes on from there", file=sys.stderr)
        return False
    raise NotImplementedError
