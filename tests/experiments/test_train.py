"""The training loop: its loss, its exact resume, its evaluation, and the folder that it leaves."""

import argparse
import dataclasses
import functools
import json
import math
import os
import shutil
import signal
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import laneformer_jax as lf
from experiments import corpus, train_command
from experiments import train as training
from experiments.train import Settings, train
from laneformer_jax.config import PRESETS, LaneformerConfig, laneformer_small
from laneformer_jax.errors import LaneformerError
from laneformer_jax.model import Laneformer

TINY = laneformer_small().replace(
    vocab_size=400, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, intermediate_size=16,
    num_lanes=2, max_position_embeddings=32, delay=1, sliding_window=8, sliding_layers=(0,),
)  # fmt: skip
SETTINGS = Settings(config="tiny", steps=8, batch=2, seq_len=16, short_until=0.5, lr=1e-2, warmup=1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("source")
    package = Path(lf.__file__).parent
    for name in ("config.py", "model.py"):
        shutil.copy(package / name, folder / name)
    held_out = next(name for name in (f"m{i}.py" for i in range(1000)) if corpus.is_held_out(name))
    shutil.copy(package / "schedule.py", folder / held_out)
    return str(folder)


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(PRESETS, "tiny", lambda: TINY)
    with jax.numpy_dtype_promotion("standard"):  # Optax counts steps in int32 and raises floats to that power
        yield


@pytest.fixture
def settings(source: str) -> Settings:
    return dataclasses.replace(SETTINGS, corpus=source)


@functools.cache
def split(config: LaneformerConfig = TINY) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(Laneformer(config, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0)))


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "training/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int, act: Callable[[], None]) -> None:
    """Calls `act` while the step of that number is taken."""
    make = training.make_step

    def stopping(*args):
        step, taken = make(*args), 0

        def take(*state):
            nonlocal taken
            taken += 1
            if taken == steps:
                act()
            return step(*state)

        return take

    monkeypatch.setattr(training, "make_step", stopping)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_stopped_run_goes_on_bit_for_bit(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert train(settings, whole)
    assert not train(settings, broken, max_minutes=0)
    assert losses(broken) == []
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        stop_after(patch, 3, terminate)
        assert not train(settings, broken)
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(losses(broken)) == 3 and not (broken / "config.json").exists()
    assert train(settings, broken)
    assert losses(broken) == losses(whole)
    for name in ("model.safetensors", "config.json", "tokenizer.model"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()


def test_a_killed_run_repeats_what_no_checkpoint_holds(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Killed(Exception):
        pass

    def kill():
        raise Killed

    settings = dataclasses.replace(settings, short_until=0.0)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        stop_after(patch, 6, kill)
        train(settings, tmp_path / "out", save_every=3)
    first = losses(tmp_path / "out")
    assert len(first) == 5
    with monkeypatch.context() as patch:
        stop_after(patch, 1, terminate)
        assert not train(settings, tmp_path / "out", save_every=3)
    assert losses(tmp_path / "out") == first[:4]


def test_a_folder_of_another_run_or_of_something_else_is_refused(settings: Settings, tmp_path: Path):
    out = tmp_path / "out"
    train(settings, out, max_minutes=0)
    with pytest.raises(LaneformerError, match="lr 0.01, not 0.02: choose another --out"):
        train(dataclasses.replace(settings, lr=0.02), out)
    with pytest.raises(LaneformerError, match="already holds this run"):
        train(settings, out, resume=False)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(LaneformerError, match="has files of something else"):
        train(settings, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": "huge"}, "none of the presets"),
        ({"seq_len": 64}, "within 2..32, got 64"),
        ({"seq_len": 15}, "even"),
        ({"batch": 3}, "batch 3 must be a positive multiple of devices 2"),
        ({"devices": 0}, "multiple of devices 0"),
        ({"devices": 1000, "batch": 1000}, "1000 devices asked for"),
        ({"warmup": 8}, "steps 8 must be more than warmup 8"),
        ({"lr": math.nan}, "lr nan"),
        ({"seed": -1}, "seed"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: Settings, tmp_path: Path, change: dict, message: str):
    with pytest.raises(LaneformerError, match=message):
        train(dataclasses.replace(settings, **change), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_training_learns_and_its_folder_loads(settings: Settings, tmp_path: Path):
    steps = dataclasses.replace(settings, steps=60, batch=4, short_until=0.0)
    assert train(steps, tmp_path / "out")
    curve = losses(tmp_path / "out")
    facts = json.loads((tmp_path / "out/metrics.json").read_text())
    assert np.mean(curve[-10:]) < np.mean(curve[:5]) - 1
    assert facts["bits_per_byte"] < facts["unigram_bits_per_byte"]
    assert facts["bits_per_byte"] != facts["bits_per_byte_bfloat16"]
    assert facts["bits_per_byte"] == pytest.approx(facts["bits_per_byte_bfloat16"], rel=0.01)
    assert facts["tokens"] == 60 * 4 * 16 and facts["steps"] == 60
    assert facts["last_100_losses"] == pytest.approx(np.mean(curve))

    lm = lf.load(tmp_path / "out")
    assert lm.config == TINY
    assert lm.tokenizer is not None
    ids = lm.tokenizer.encode("def f(x):\n        return x")
    assert ids[0] == corpus.BOS and lm.tokenizer.decode(ids) == "def f(x):\n        return x"
    assert lm.generate("def", max_new_tokens=3).token_ids


def test_gradients_do_not_depend_on_the_number_of_devices():
    graph, params = split()
    ids = np.random.default_rng(0).integers(3, 400, (8, 17)).astype(np.int32)
    ids[0, 5:9] = corpus.BOS  # rows with fewer targets must not weigh more
    results = []
    for devices in (1, 2, 8):
        step = training.make_step(graph, training.make_optimizer(SETTINGS), training.data_mesh(devices))
        optimizer = training.make_optimizer(SETTINGS).init(params)
        copies = jax.tree.map(jnp.copy, (params, optimizer))
        _, (_, (adam, *_)), loss = step(*copies, ids)
        results.append((adam.mu, loss))
    for mu, loss in results[1:]:
        assert loss == pytest.approx(float(results[0][1]), rel=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-8), mu, results[0][0])


def test_loss_is_the_cross_entropy_of_all_targets_but_starts_of_documents():
    graph, params = split()
    ids = jnp.array([[1, 7, 9, 2, 1, 30], [5, 6, 7, 8, 9, 10]], jnp.int32)
    logits = np.asarray(nnx.merge(graph, params)(ids[:, :-1]), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = [-log_p[b, t, ids[b, t + 1]] for b in range(2) for t in range(5) if ids[b, t + 1] != corpus.BOS]
    total, count = training.token_losses(graph, params, ids)
    assert count == len(expected) == 9
    assert total == pytest.approx(sum(expected), rel=1e-5)


def test_halving_keeps_every_input_and_target():
    ids = np.arange(18).reshape(2, 9)
    assert training.halved(ids).tolist() == [
        [0, 1, 2, 3, 4],
        [4, 5, 6, 7, 8],
        [9, 10, 11, 12, 13],
        [13, 14, 15, 16, 17],
    ]


def test_only_norm_scales_are_spared_from_weight_decay():
    _, params = split(TINY.replace(lane_norm_scale=True))
    optimizer = training.make_optimizer(dataclasses.replace(SETTINGS, warmup=0))
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(optimizer.update)(zero, optimizer.init(params), params)
    for path, update in nnx.to_flat_state(updates):
        assert bool(jnp.any(update[...] != 0)) == (path[-1] != "scale"), path


def test_evaluation_of_a_uniform_model_is_known_exactly():
    graph, params = split()
    params = jax.tree_util.tree_map_with_path(
        lambda path, p: p if "'head'" not in jax.tree_util.keystr(path) else jnp.zeros_like(p), params
    )
    documents = [np.array([corpus.BOS, *range(10, 10 + n), corpus.EOS]) for n in (3, 20, 40)]
    bits = training.bits_per_byte(graph, params, np.concatenate(documents), length=16, size=100)
    assert bits == pytest.approx((3 + 20 + 40 + 3) * math.log2(400) / 100, rel=1e-6)


def test_evaluation_scores_rows_independently_and_does_not_count_padding():
    graph, params = split()
    tokens = np.random.default_rng(1).integers(3, 400, 25)
    parts = [training.bits_per_byte(graph, params, part, 16, 1) for part in (tokens[:17], tokens[16:])]
    assert training.bits_per_byte(graph, params, tokens, 16, 1) == pytest.approx(sum(parts), rel=1e-6)


def test_baselines_are_what_their_names_say():
    found = training.baselines(["aab"], ["ab"])
    assert found["unigram_bits_per_byte"] == pytest.approx(-(math.log2(3 / 259) + math.log2(2 / 259)) / 2)
    text = "def f(x):\n    return x\n" * 50
    deflated = zlib.compressobj(9, wbits=31)
    size = len(deflated.compress(text.encode()) + deflated.flush())
    assert training.baselines([text], [text])["gzip_bits_per_byte"] == pytest.approx(8 * size / len(text))


def test_command_shows_every_default_and_passes_every_option(monkeypatch: pytest.MonkeyPatch):
    parser = argparse.ArgumentParser()
    train_command.add_arguments(parser)
    shown = " ".join(parser.format_help().split())
    for field in dataclasses.fields(Settings):
        assert f"--{field.name.replace('_', '-')}" in shown
        assert f"(default: {field.default})" in shown
    called = []
    monkeypatch.setattr(train_command, "train", lambda *args, **kwargs: called.append((args, kwargs)))
    monkeypatch.setenv("XLA_FLAGS", "")
    train_command.run(parser.parse_args(["--out", "m", "--lr", "0.1", "--devices", "4", "--resume", "never"]))
    (settings, out), options = called[0]
    assert (settings, out) == (Settings(lr=0.1, devices=4), Path("m"))
    assert options == {"resume": False, "save_every": 200, "max_minutes": math.inf}
    assert os.environ["XLA_FLAGS"] == "--xla_force_host_platform_device_count=4"
