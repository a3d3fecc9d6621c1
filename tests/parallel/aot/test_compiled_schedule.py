"""What XLA's scheduler makes of the 2B model's decode step on eight H200s. Each program takes 10 to 60 s to compile."""

import json
from functools import cache

import pytest

from laneformer_jax.cli import main
from laneformer_jax.config import laneformer_2b
from parallel import engine
from parallel.report import Report, compile_report
from parallel.target import find_target

MODULES_A_LAYER = 2


@cache
def report(delay: int, pack: str) -> Report:
    """With `delay` in layers."""
    return compile_report(laneformer_2b().replace(delay=delay * MODULES_A_LAYER), find_target("h200x8"), pack)


def layers_behind(found: Report) -> list[float]:
    return [c.work_bytes / found.layer_bytes for c in found.layer_sums]


def test_without_delay_every_sum_is_exposed():
    found = report(0, "module")
    assert len(found.layer_sums) == 30
    assert all(c.exposed for c in found.collectives)
    assert max(layers_behind(found)) < 0.01


@pytest.mark.parametrize(("pack", "sums", "layers"), [("layer", 13, 1.0), ("module", 26, 1.5)])
def test_with_a_delay_of_two_layers_only_the_head_waits(pack, sums, layers):
    found = report(2, pack)
    assert len(found.layer_sums) == sums
    assert [c.source for c in found.collectives if c.exposed] == ["head", "choose"]
    assert min(layers_behind(found)) > layers


def test_a_packed_sum_carries_two_outputs():
    assert {c.bytes for c in report(2, "module").layer_sums} == {2 * 3072}
    assert {c.bytes for c in report(2, "layer").layer_sums} == {2 * 2 * 3072}


def test_memory_traffic_is_near_the_least_possible():
    found = report(2, "module")
    assert 1 <= found.moved_bytes / found.least_bytes < 1.05


def test_without_the_librarys_options_the_delay_is_undone(monkeypatch):
    """The planted fault: if this ever hides sums by itself, the options may go."""
    monkeypatch.setattr(engine, "compiler_options", lambda mesh: {})
    found = compile_report(laneformer_2b(), find_target("h200x8"))
    sums = [c for c in found.collectives if c.kind == "all-reduce"]
    assert len(sums) < 26
    assert max(c.bytes for c in sums) > 2 * 3072
    assert min(c.work_bytes for c in sums if c.source != "head") < found.layer_bytes / 2


def test_the_command_prints_json_and_draws(tmp_path, capsys):
    drawing = tmp_path / "token.png"
    arguments = ["--config", "laneformer_small", "--target", "h200x8", "--json", "--plot", str(drawing)]
    assert main(["schedule", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [c["source"] for c in found["collectives"]].count("head") == 1
    assert drawing.read_bytes().startswith(b"\x89PNG")
