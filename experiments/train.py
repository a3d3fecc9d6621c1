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
from laneformer_jax.weights import save_folder

BITS = 1 / math.log(2)


def _setting(default: Any, meaning: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": meaning})


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that decides a training run's result; the defaults make the embedded model."""

    config: str = _setting("laneformer_small", "preset architecture")
    corpus: str = _setting(corpus.STDLIB, "'stdlib', this Python's standard library, or a folder of text and code")
    steps: int = _setting(3600, "optimizer steps, at which the learning rate's schedule ends")
    batch: int = _setting(4, "sequences a step, a multiple of the devices")
    seq_len: int = _setting(512, "tokens a sequence")
    short_until: float = _setting(0.8, "share of the steps that train on halved sequences, where attention is cheaper")
    lr: float = _setting(3e-3, "peak learning rate, from which a cosine leads to a twentieth")
    warmup: int = _setting(150, "steps of linear warmup")
    weight_decay: float = _setting(0.1, "of matrices; norm scales have none")
    clip: float = _setting(1.0, "largest norm of a gradient")
    seed: int = _setting(0, "of the first weights and of the data's order")
    devices: int = _setting(2, "devices that share a batch; a CPU is split into that many")

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
            raise LaneformerError(
                f"steps {self.steps} must be more than warmup {self.warmup}, which is at least 0: lower --warmup"
            )
        if not (0 < self.lr < math.inf and 0 < self.clip < math.inf and 0 <= self.weight_decay < math.inf):
            raise LaneformerError(
                f"lr {self.lr} and clip {self.clip} must be positive and weight_decay {self.weight_decay} not negative"
            )
        if self.seed < 0:
            raise LaneformerError(f"seed must be at least 0, got {self.seed}")
        return config


def data_mesh(devices: int) -> Mesh:
    """A mesh ("data",) of that many devices.

    Raises:
        LaneformerError: JAX has fewer.
    """
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
        self.path, self.lines = path, [line for line in lines if line["step"] <= step]
        path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        last = self.lines[-1] if self.lines else {"tokens": 0, "seconds": 0.0}
        self.tokens, self.began = last["tokens"], time.monotonic() - last["seconds"]

    def write(self, step: int, loss: float, tokens: int) -> None:
        """Appends a step that took so many tokens."""
        self.tokens += tokens
        seconds = round(time.monotonic() - self.began, 3)
        self.lines.append({"step": step, "loss": loss, "tokens": self.tokens, "seconds": seconds})
        with self.path.open("a") as file:
            file.write(json.dumps(self.lines[-1]) + "\n")

    def facts(self) -> dict[str, float]:
        """The whole run: steps, tokens, seconds, and the mean loss of its last 100 steps in nats a token."""
        last = self.lines[-1]
        losses = [line["loss"] for line in self.lines[-100:]]
        totals = {"steps": last["step"], "tokens": last["tokens"], "seconds": last["seconds"]}
        return {**totals, "last_100_losses": sum(losses) / len(losses)}


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
        LaneformerError: another run is there, or the same one and `resume` is False, or files around it of no run.
    """
    path = folder / "run.json"
    if not path.exists() and folder.parent.exists() and any(folder.parent.iterdir()):
        raise LaneformerError(f"{folder.parent} has files of something else: choose another --out")
    if path.exists():
        there = json.loads(path.read_text())
        differing = [f"{k} {there.get(k)!r}, not {v!r}" for k, v in facts.items() if there.get(k) != v]
        if differing:
            raise LaneformerError(f"{folder} holds a run with {'; '.join(differing)}: choose another --out")
        if not resume:
            raise LaneformerError(f"{folder} already holds this run: choose another --out, or resume it")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=2) + "\n")


@dataclasses.dataclass(frozen=True)
class Task:
    """What a run trains and on what, made anew from the settings each time that it starts."""

    settings: Settings
    config: LaneformerConfig
    texts: corpus.Corpus
    tokenizer: bytes
    graph: nnx.GraphDef
    first_params: nnx.State

    @classmethod
    def make(cls, settings: Settings, texts: corpus.Corpus) -> "Task":
        """Trains the tokenizer and draws the first weights."""
        config = settings.model_config()
        tokenizer = corpus.train_tokenizer(texts.training, config.vocab_size)
        model = Laneformer(config, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(settings.seed))
        return cls(settings, config, texts, tokenizer, *nnx.split(model))


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
    settings.model_config()
    if save_every < 1:
        raise LaneformerError(f"save_every must be at least 1 step, got {save_every}")
    mesh = data_mesh(settings.devices)
    texts = corpus.read_corpus(settings.corpus)
    folder = out.absolute() / "training"
    claim(folder, {**dataclasses.asdict(settings), "corpus_sha256": texts.sha256}, resume)
    task = Task.make(settings, texts)
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=save_every, max_to_keep=2, enable_async_checkpointing=False, cleanup_tmp_directories=True
    )
    with ocp.CheckpointManager(folder / "checkpoints", options=options) as checkpoints, stop_requests() as stops:
        journal = Journal(folder / "metrics.jsonl", checkpoints.latest_step() or 0)
        deadline = time.monotonic() + 60 * max_minutes
        step, params = _loop(task, mesh, checkpoints, journal, lambda: bool(stops) or time.monotonic() > deadline)
    if step < settings.steps:
        print(f"stopped after step {step} of {settings.steps}; the same command goes on from there", file=sys.stderr)
        return False
    export(task, jax.device_get(params), journal, out)
    return True


def _loop(
    task: Task, mesh: Mesh, checkpoints: ocp.CheckpointManager, journal: Journal, stop: Callable[[], bool]
) -> tuple[int, nnx.State]:
    """Steps from the newest checkpoint to the end or to a request to stop; the last step taken is always saved."""
    settings = task.settings
    optimizer = make_optimizer(settings)
    take = make_step(task.graph, optimizer, mesh)
    tokens = corpus.encode(task.texts.training, task.tokenizer)
    first = {"params": task.first_params, "optimizer": optimizer.init(task.first_params)}
    state = jax.device_put(first, NamedSharding(mesh, PartitionSpec()))
    begin = checkpoints.latest_step() or 0
    if begin:
        state = checkpoints.restore(begin, args=ocp.args.StandardRestore(state))
    params, opt_state, step = state["params"], state["optimizer"], begin
    done = step == settings.steps or stop()
    with tqdm(total=settings.steps, initial=begin, desc="train", unit="step") as bar:
        while not done:
            ids = corpus.batch(tokens, step, settings.batch, settings.seq_len, settings.seed)
            short = step < settings.short_until * settings.steps
            began = time.monotonic()
            params, opt_state, loss = take(params, opt_state, halved(ids) if short else ids)
            loss, step = float(loss), step + 1
            size = settings.batch * settings.seq_len
            journal.write(step, loss, size)
            bar.set_postfix_str(f"loss {loss:.3f}, {size / (time.monotonic() - began):,.0f} tokens/s", refresh=False)
            bar.update()
            done = step == settings.steps or stop()
            if done or checkpoints.should_save(step):
                state = {"params": params, "optimizer": opt_state}
                checkpoints.save(step, args=ocp.args.StandardSave(state), force=True)
    return step, params


def export(task: Task, params: nnx.State, journal: Journal, out: Path) -> None:
    """Writes the trained model to `out` as a Hugging Face folder in bfloat16, with its evaluation in metrics.json."""
    texts, config, length = task.texts, task.config, task.settings.seq_len
    held_out = corpus.encode(texts.held_out, task.tokenizer)
    size = sum(len(text.encode()) for text in texts.held_out)
    print(f"evaluating on {size:,} bytes of held-out text", file=sys.stderr)
    rounded = jax.tree.map(lambda p: np.asarray(p).astype(jnp.bfloat16).astype(np.float32), params)
    facts = {
        "bits_per_byte": bits_per_byte(task.graph, params, held_out, length, size),
        "bits_per_byte_bfloat16": bits_per_byte(task.graph, rounded, held_out, length, size),
        **baselines(texts.training, texts.held_out),
        **journal.facts(),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "corpus_files": texts.files,
        "training_bytes": sum(len(text.encode()) for text in texts.training),
        "held_out_bytes": size,
        "held_out_tokens": len(held_out),
        "corpus_sha256": texts.sha256,
        "tokenizer_sha256": hashlib.sha256(task.tokenizer).hexdigest(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "settings": dataclasses.asdict(task.settings),
    }
    save_folder(nnx.merge(task.graph, params), out, "bfloat16")
    (out / "tokenizer.model").write_bytes(task.tokenizer)
    tokenizer_config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "legacy": False,
        "model_max_length": config.max_position_embeddings,
    }
    generation_config = {"bos_token_id": corpus.BOS, "eos_token_id": [corpus.EOS]}
    for name, fields in (
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation_config),
        ("metrics.json", facts),
    ):
        (out / name).write_text(json.dumps(fields, indent=2) + "\n")
