import json

import goldens
import pytest

from laneformer_jax.cli import main


def test_the_table_has_one_line_a_module(capsys):
    assert main(["schedule", "--config", "laneformer_2b", "--pack", "layer"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 30
    assert lines[1].split() == "0 0 attention 2.828 x own output - -".split()
    assert lines[2].endswith("module 0 and 1")
    assert "module 1 " in lines[6]


def test_delays_in_layers_and_in_modules(capsys):
    assert main(["schedule", "--config", str(goldens.FOLDER / "eight_lanes"), "--delay-modules", "3", "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)
    assert [step["receive_from"] for step in steps[:5]] == [None, None, None, 0, 1]
    assert main(["schedule", "--delay", "0", "--json"]) == 0
    assert all(step["sum_now"] for step in json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--config", "no/such"], 1, "neither a preset"),
        (["--plot", "x.png"], 2, "need a --target"),
        (["--delay", "-1"], 1, "delay must be a whole number"),
    ],
)
def test_errors_name_the_fix_in_one_line(arguments, code, message, capsys):
    assert main(["schedule", *arguments]) == code
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_without_the_compiler_the_error_says_what_to_install(capsys, monkeypatch):
    def missing(*args, **kwargs):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", missing)
    assert main(["schedule", "--target", "h200x8"]) == 1
    error = capsys.readouterr().err
    assert "pip install 'laneformer-jax[aot]'" in error and error.count("\n") == 1
