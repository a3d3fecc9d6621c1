"""`laneformer convert` as people call it: one line and an exit code for everything that can be wrong."""

import shutil
import sys
from types import SimpleNamespace

import folders
import numpy as np
import pytest

from laneformer_jax import cli, weights
from laneformer_jax.safetensors_io import SafetensorsFile


@pytest.fixture
def source(tmp_path):
    return folders.write(tmp_path / "source")


@pytest.fixture
def call(capsys):
    """Runs the verb; gives the exit code, the standard output and the standard error."""

    def run(*arguments):
        try:
            code = cli.main(["convert", *map(str, arguments)])
        except SystemExit as error:
            code = error.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def refused(answer, *fragments, code=1):
    assert answer[0] == code
    assert answer[1] == ""
    assert answer[2].startswith("laneformer convert: ") and answer[2].count("\n") == 1
    for fragment in fragments:
        assert fragment in answer[2]


def test_there_and_back(source, tmp_path, call):
    code, out, err = call(source, tmp_path / "orbax")
    size = 4 * weights.parameter_count(folders.CONFIG)
    assert (code, out, err) == (0, f"{tmp_path / 'orbax'}: 12 tensors, {size:,} bytes of float32 as orbax\n", "")
    assert call(tmp_path / "orbax", tmp_path / "back", "--dtype", "bfloat16")[0] == 0
    assert (tmp_path / "back" / "model.safetensors").stat().st_size > size // 2


def test_dry_run_prints_the_whole_plan_from_headers_alone(tmp_path, call, monkeypatch):
    tensors = folders.values() | {"model.rope.inv_freq": np.zeros(4, np.float32)}
    source = folders.write(tmp_path / "source", tensors)
    monkeypatch.setattr(SafetensorsFile, "read", None)
    code, out, _ = call(source, tmp_path / "out", "--dry-run", "--dtype", "bfloat16", "--devices", 4)
    lines = out.splitlines()
    assert code == 0 and [path.name for path in tmp_path.iterdir()] == ["source"]
    words = lines[3].split()
    assert words[:2] == ["model.layers.0.attention.wk.weight", "blocks.0.attention.wk.weight"]
    assert " ".join(words[2:]) == "[8, 4, 64] float32 -> bfloat16 4,096 bytes"
    assert lines[12] == "model.rope.inv_freq  left out: it follows from the config"
    count = weights.parameter_count(folders.CONFIG)
    assert lines[13] == f"12 tensors, {count:,} parameters, {2 * count:,} bytes as orbax"
    whole = 64 * 64 + 3 * 64  # embedding and norm scales
    assert lines[14:] == [f"on each of 4 devices: {2 * (whole + (count - whole) // 4):,} bytes"]


def test_dry_run_refuses_devices_that_do_not_divide_the_lanes(source, call):
    answer = call(source, "out", "--dry-run", "--devices", 3)
    assert answer[0] == 1 and "3 devices do not divide the model's 8 lanes" in answer[2]


def test_overflow_and_values_that_are_not_finite_are_told(tmp_path, call):
    tensors = folders.values()
    tensors["lm_head.weight"][0, :3] = np.nan, -np.inf, 1e6
    source = folders.write(tmp_path / "source", tensors)
    refused(call(source, tmp_path / "out", "--dtype", "float16"), "lm_head.weight: 1 values", "--allow-overflow")
    code, _, err = call(source, tmp_path / "out", "--dtype", "float16", "--allow-overflow")
    assert (code, err.splitlines()) == (
        0,
        [
            "laneformer convert: lm_head.weight has 2 values that are not finite",
            "laneformer convert: lm_head.weight has 1 values that became infinite",
        ],
    )


def test_source_and_target_must_lie_apart(source, tmp_path, call, monkeypatch):
    refused(call(source, source, "--overwrite"), "is the source itself")
    (tmp_path / "link").symlink_to(source)
    refused(call(source, tmp_path / "link", "--overwrite"), "is the source itself")
    refused(call(source, source / "inside"), "within each other")
    refused(call(source, tmp_path, "--overwrite"), "within each other")
    shutil.copytree(source, tmp_path / "linked")
    (tmp_path / "linked" / "model.safetensors").unlink()
    (tmp_path / "linked" / "model.safetensors").symlink_to(source / "model.safetensors")
    refused(call(tmp_path / "linked", source, "--overwrite"), "within each other")
    monkeypatch.chdir(source)
    refused(call(".", "../source", "--overwrite"), "is the source itself")


def test_existing_target_is_refused_before_anything_is_read(source, tmp_path, call, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(SafetensorsFile, "read", None)
    refused(call(source, tmp_path / "out"), "exists", "--overwrite")


def test_unwritable_target(source, tmp_path, call):
    (tmp_path / "file").touch()
    refused(call(source, tmp_path / "file" / "out"), "out was not made", "file: File exists")


def test_too_little_room_is_refused_before_the_work(source, tmp_path, call, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    refused(call(source, tmp_path / "out"), "1,000 bytes free")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_options_that_do_not_go_together(source, call):
    refused(call(source, "out", "--devices", 8), "--dry-run", code=2)
    refused(call(source, "out", "--reference", "hub"), "--verify", code=2)
    refused(call(source, "out", "--verify", "--reference", "hub"), "--trust-remote-code", code=2)
    refused(call(source, "out", "--revision", "main"), "is a folder", code=2)


def test_no_folder_and_no_id(tmp_path, call):
    refused(call(tmp_path / "nothing", "out"), "neither a model folder nor an id of the hub")
    (tmp_path / "empty").mkdir()
    refused(call(tmp_path / "empty", "out"), "no config.json")


@pytest.fixture
def hub(monkeypatch):
    """Stands for the package huggingface_hub: what it gives, or raises, and what it was asked."""
    fake = SimpleNamespace(asked=None, answer=None)

    def snapshot_download(name, revision, allow_patterns):
        fake.asked = (name, revision, allow_patterns)
        if isinstance(fake.answer, Exception):
            raise fake.answer
        return str(fake.answer)

    fake.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    return fake


def test_id_of_the_hub_is_downloaded_and_its_commit_recorded(tmp_path, call, hub, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hub.answer = folders.write(tmp_path / "snapshots" / "0a1b2c", shards=2)
    assert call("owner/model", "out", "--revision", "v1")[0] == 0
    name, revision, patterns = hub.asked
    assert (name, revision) == ("owner/model", "v1")
    assert "*.safetensors" in patterns and not any(pattern.endswith((".bin", ".pt")) for pattern in patterns)
    manifest = (tmp_path / "out" / "manifest.json").read_text()
    assert '"hub": "owner/model",\n    "revision": "0a1b2c"' in manifest


def test_offline_says_what_to_do(call, hub):
    hub.answer = ConnectionError("no route\nto the host")
    refused(call("owner/model", "out"), "owner/model", "(no route)", "connection")


def test_without_the_client_it_says_what_to_install(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused(call("owner/model", "out"), "pip install 'laneformer-jax[hub]'")


def test_verify_without_pytorch_says_so_before_the_work(source, tmp_path, call, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    refused(call(source, tmp_path / "out", "--verify"), "pip install 'laneformer-jax[reference]'")
    assert not (tmp_path / "out").exists()
