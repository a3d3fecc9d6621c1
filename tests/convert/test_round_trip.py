"""Values, bit for bit or cast, and what lies beside them."""

import hashlib
import io
import json
import struct

import folders
import ml_dtypes
import numpy as np
import pytest
import tqdm
from safetensors import safe_open
from safetensors.numpy import load_file

import laneformer_jax as lf
from convert.convert import convert
from convert.source import find_source
from laneformer_jax import weights


def run(source, target, **options):
    return convert(find_source(str(source), None), target, **options)


def assert_same_bits(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        assert got[name].shape == value.shape, name
        assert got[name].tobytes() == value.tobytes(), name


def header(file):
    with file.open("rb") as stream:
        return json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))


@pytest.mark.parametrize("dtype", [*folders.DTYPES, "mixed"])
def test_every_bit_survives_the_way_to_orbax_and_back(tmp_path, dtype):
    tensors = folders.any_bits(dtype)
    source = folders.write(tmp_path / "source", tensors, shards=2)
    there = run(source, tmp_path / "orbax")
    back = run(tmp_path / "orbax", tmp_path / "safetensors")
    assert_same_bits(load_file(tmp_path / "safetensors" / "model.safetensors"), tensors)
    counted = {name: int((~np.isfinite(value.astype(np.float32))).sum()) for name, value in tensors.items()}
    assert there.overflowed == back.overflowed == {}
    published = {item.target: back.not_finite.get(item.source, 0) for item in back.plan.items}
    assert published == counted and sum(counted.values()) > 0
    assert there.not_finite == {name: count for name, count in counted.items() if count}


def test_exported_folder_has_the_entry_that_transformers_asks_for(tmp_path):
    run(folders.write(tmp_path / "source"), tmp_path / "orbax")
    run(tmp_path / "orbax", tmp_path / "safetensors")
    file = tmp_path / "safetensors" / "model.safetensors"
    assert header(file)["__metadata__"] == {"format": "pt"}
    with safe_open(file, "np") as opened:
        assert set(opened.keys()) == set(weights.parameter_names(folders.CONFIG))


def test_safetensors_to_safetensors_joins_shards_and_casts(tmp_path):
    tensors = folders.values()
    run(folders.write(tmp_path / "in", tensors, shards=3), tmp_path / "out", to="safetensors", dtype="bfloat16")
    cast = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    assert_same_bits(load_file(tmp_path / "out" / "model.safetensors"), cast)


def test_stray_safetensors_beside_an_index_are_left_alone(tmp_path):
    source = folders.write(tmp_path / "source", shards=2)
    (source / "consolidated.safetensors").write_bytes(b"no tensors")
    run(source, tmp_path / "out")
    assert not (tmp_path / "out" / "consolidated.safetensors").exists()


@pytest.mark.parametrize("spelling", ["torch_dtype", "dtype"])
def test_config_says_the_new_dtype_in_its_own_spelling(tmp_path, spelling):
    source = folders.write(tmp_path / "source", extra="kept")
    fields = json.loads((source / "config.json").read_text())
    fields[spelling] = fields.pop("torch_dtype")
    (source / "config.json").write_text(json.dumps(fields))
    run(source, tmp_path / "half", dtype="bfloat16")
    written = json.loads((tmp_path / "half" / "config.json").read_text())
    assert written == fields | {spelling: "bfloat16"}
    assert lf.load(tmp_path / "half").engine.dtype == "bfloat16"
    run(source, tmp_path / "kept")
    assert (tmp_path / "kept" / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_overflow_is_refused_with_every_tensor_named_unless_asked_for(tmp_path, to):
    tensors = folders.values()
    tensors["lm_head.weight"][[0, 9, 63], 0] = 65520, -1e9, 65519  # the last one rounds to 65504
    tensors["model.norm.weight"][3] = 1e38
    source = folders.write(tmp_path / "source", tensors)
    with pytest.raises(lf.LaneformerError) as error:
        run(source, tmp_path / "out", to=to, dtype="float16")
    assert str(error.value) == (
        "2 tensor(s) exceed float16: model.norm.weight: 1 values; lm_head.weight: 2 values; "
        "--allow-overflow writes infinities in their place"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    result = run(source, tmp_path / "out", to=to, dtype="float16", allow_overflow=True)
    assert result.overflowed == {"model.norm.weight": 1, "lm_head.weight": 2}
    assert result.not_finite == {}
    written, names = weights.open_source(tmp_path / "out", folders.CONFIG)
    head = next(name for name, path in names.items() if path == ("head", "weight"))
    column = written.read_slice(head, (slice(0, 64), slice(0, 1)))[[0, 9, 63], 0]
    assert column.tolist() == [np.inf, -np.inf, 65504]


def test_widening_is_exact(tmp_path):
    tensors = folders.values(dtype="bfloat16")
    run(folders.write(tmp_path / "source", tensors), tmp_path / "out", to="safetensors", dtype="float32")
    wide = {name: value.astype(np.float32) for name, value in tensors.items()}
    assert_same_bits(load_file(tmp_path / "out" / "model.safetensors"), wide)


def test_derived_tensors_and_a_tied_head_are_left_out(tmp_path):
    tied = folders.CONFIG.replace(tie_embeddings=True)
    extra = {"model.rope.inv_freq": np.zeros(2, np.float32), "lm_head.weight": np.zeros((64, 64), np.float32)}
    plan = run(folders.write(tmp_path / "source", folders.values(tied) | extra, tied), tmp_path / "out").plan
    assert plan.skipped == ("model.rope.inv_freq", "lm_head.weight")
    run(tmp_path / "out", tmp_path / "back")
    assert_same_bits(load_file(tmp_path / "back" / "model.safetensors"), folders.values(tied))


def test_everything_wrong_with_the_source_is_one_line_and_nothing_is_written(tmp_path):
    tensors = folders.values() | {"model.norm.bias": np.zeros(3, np.float32)}
    tensors["lm_head.weight"] = np.zeros((64, 63), np.float32)
    del tensors["model.tok_embeddings.weight"]
    with pytest.raises(lf.LaneformerError, match="^3 problem.*embeddings.* missing; .*bias is unexp.*; lm_head.*63"):
        run(folders.write(tmp_path / "source", tensors), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def lose_shard(source):
    (source / "model-1.safetensors").unlink()
    return "model-1.safetensors"


def leave_the_folder(source):
    index = source / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-1", "../model-1"))
    return "may lie outside the folder"


def cut_shard(source):
    shard = (source / "model-1.safetensors").resolve()
    shard.write_bytes(shard.read_bytes()[:-4])
    return "model-1.safetensors: is cut"


def pickle_only(source):
    (source / "model.safetensors.index.json").rename(source / "pytorch_model.bin")
    return "pytorch_model.bin"


@pytest.mark.parametrize("spoil", [lose_shard, leave_the_folder, cut_shard, pickle_only])
def test_faulty_files_are_named_before_anything_is_written(tmp_path, spoil):
    source = folders.write(tmp_path / "hub" / "source", shards=2)
    fault = spoil(source)
    with pytest.raises(lf.LaneformerError, match=fault):
        run(source, tmp_path / "work" / "out")
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_progress_counts_every_byte_of_the_result(tmp_path, monkeypatch, to):
    bars = []

    class Bar(tqdm.tqdm):
        def __init__(self, **options):
            super().__init__(**options | {"disable": False, "file": io.StringIO()})
            bars.append(self)

    monkeypatch.setattr("convert.convert.tqdm", Bar)
    plan = run(folders.write(tmp_path / "source"), tmp_path / "out", to=to, dtype="bfloat16").plan
    assert bars[0].n == bars[0].total == plan.nbytes == 2 * weights.parameter_count(folders.CONFIG)
    assert "B/s" in str(bars[0])


def test_manifest_and_the_files_that_go_with_the_weights(tmp_path):
    source = folders.write(tmp_path / "source", folders.any_bits("mixed"), shards=2)
    others = {"LICENSE.txt", "modeling.py", "generation_config.json", "tokenizer.model", "tokenizer_config.json"}
    for name in others | {"notes.txt", "pytorch_model.bin"}:
        (source / name).write_text(name)
    run(source, tmp_path / "orbax")
    run(tmp_path / "orbax", tmp_path / "back")
    carried = {"config.json"} | others
    for folder, weight in ((tmp_path / "orbax", "orbax"), (tmp_path / "back", "model.safetensors")):
        assert {path.name for path in folder.iterdir()} == carried | {weight, "manifest.json"}
        for name in carried:
            assert (folder / name).read_bytes() == (source / name).read_bytes()
    manifest = json.loads((tmp_path / "orbax" / "manifest.json").read_text())
    read = carried | {"model.safetensors.index.json", "model-0.safetensors", "model-1.safetensors"}
    hashes = {name: hashlib.sha256((source / name).read_bytes()).hexdigest() for name in read}
    assert manifest["source"] == {"folder": "source", "sha256": hashes}
    assert (manifest["format"], manifest["dtype"]) == ("laneformer orbax", "keep")
    assert manifest["dtypes"] == ["bfloat16", "float16", "float32"]
    assert manifest["parameters"] == weights.parameter_count(folders.CONFIG)
    assert {"jax", "orbax-checkpoint", "tensorstore"} <= manifest["versions"].keys()
    back = json.loads((tmp_path / "back" / "manifest.json").read_text())
    assert "orbax/_METADATA" in back["source"]["sha256"] and "orbax/embedding/0.0" in back["source"]["sha256"]
    assert str(tmp_path) not in json.dumps([manifest, back])
