"""The conversion benchmark, and the bound on memory that it shows, with a twentieth of the 2B model's weights."""

import re

import numpy as np

from experiments.bench_convert import make_checkpoint
from laneformer_jax import cli, laneformer_2b, weights
from laneformer_jax.safetensors_io import SafetensorsFolder

SMALL = laneformer_2b().replace(
    vocab_size=4096,
    hidden_size=1024,
    num_layers=6,
    intermediate_size=4096,
    head_dim=32,
    sliding_layers=(0,),
    dtype="bfloat16",
)


def test_checkpoint_is_seeded_finite_and_in_two_shards(tmp_path):
    config = SMALL.replace(num_layers=1)
    largest, total = make_checkpoint(config, tmp_path / "one")
    make_checkpoint(config, tmp_path / "other")
    one, other = SafetensorsFolder.open(tmp_path / "one"), SafetensorsFolder.open(tmp_path / "other")
    assert len(one.files) == 2
    assert total == 2 * weights.parameter_count(config) == sum(entry.nbytes for entry in one.entries.values())
    assert largest == max(entry.nbytes for entry in one.entries.values())
    for name in one.entries:
        value = one.read(name)
        np.testing.assert_array_equal(value, other.read(name))
        assert np.isfinite(value.astype(np.float32)).all() and np.unique(value).size > 100
    weights.check_names(config, one, weights.parameter_names(config))


def test_command_prints_figures_and_memory_stays_far_below_the_weights(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("experiments.bench_convert.laneformer_2b", lambda: SMALL)
    assert cli.main(["bench", "convert", "--folder", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    total, largest = (
        int(found.replace(",", "")) for found in re.search(r"([\d,]+) bytes, .* ([\d,]+)\n", out).groups()
    )
    assert total == 2 * weights.parameter_count(SMALL)
    for direction in ("source -> orbax", "orbax -> safetensors"):
        pattern = rf"{direction}: peak (\d+) MB above imports \(limit \d+\), [\d.]+ s, [\d.]+ times the flushed cp"
        peak = 1e6 * int(re.search(pattern, out)[1])
        assert peak < 2 * largest + 80e6 < total / 2
    assert list(tmp_path.iterdir()) == []
