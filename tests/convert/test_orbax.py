"""Converted folders as Orbax checkpoints: read by `lf.load` and by Orbax itself, on any number of devices."""

import json
import shutil
import time
from pathlib import Path

import folders
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import laneformer_jax as lf
from convert.convert import convert
from convert.plan import make_plan
from convert.source import find_source
from laneformer_jax import weights
from laneformer_jax.orbax_io import OrbaxFolder
from parallel import make_mesh
from parallel.mesh import parameter_spec

CONFIG = folders.CONFIG.replace(num_layers=2)
DEVICES = [1, 2, 8]
SPLICES = [b"", b"0", b"9" * 20, b"-1", b"null", b'"', b"[", b"}", b"..", b"/", b"\\u0000", b"\xff", b"true", b" "]


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A folder of each format with the same weights."""
    folder = tmp_path_factory.mktemp("converted")
    source = folders.write(folder / "source", folders.values(CONFIG), CONFIG)
    convert(find_source(str(source), None), folder / "orbax")
    return folder


@pytest.fixture
def copied(converted, tmp_path):
    """A converted folder to spoil."""
    shutil.copytree(converted / "orbax", tmp_path / "copied")
    return tmp_path / "copied"


def flat(lm):
    return {path: leaf[...] for path, leaf in nnx.to_flat_state(lm.engine.state)}


def assert_equal(got, expected):
    assert got.keys() == expected.keys()
    for path, value in expected.items():
        assert got[path].dtype == value.dtype
        np.testing.assert_array_equal(np.asarray(got[path]), np.asarray(value), err_msg=str(path))


def assert_sharded(lm, devices):
    mesh = make_mesh(devices)
    for path, leaf in nnx.to_flat_state(nnx.state(weights.abstract_model(lm.config))):
        expected = NamedSharding(mesh, parameter_spec(leaf, mesh))
        assert flat(lm)[path].sharding.is_equivalent_to(expected, len(leaf.shape)), path


@pytest.mark.parametrize("devices", [None, *DEVICES])
def test_converted_folder_loads_as_its_source_does(converted, devices):
    mesh = None if devices is None else make_mesh(devices)
    lm = lf.load(converted / "orbax", mesh=mesh)
    assert_equal(flat(lm), flat(lf.load(converted / "source")))
    if devices is not None:
        assert_sharded(lm, devices)


def test_relative_path(converted, monkeypatch):
    monkeypatch.chdir(converted)
    convert(find_source("source", None), Path("again"))
    assert_equal(flat(lf.load("again")), flat(lf.load("source")))


@pytest.mark.parametrize("saved_on", DEVICES)
@pytest.mark.parametrize("wrapped", [False, True], ids=["values", "variables"])
def test_saved_by_orbax_on_some_devices_loads_on_any(converted, tmp_path, saved_on, wrapped):
    """As who has tuned a model in JAX saves it; it is exported too."""
    expected = flat(lf.load(converted / "source"))
    state = lf.load(converted / "source", mesh=make_mesh(saved_on)).engine.state
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "tuned" / "orbax", state if wrapped else nnx.to_pure_dict(state))
    shutil.copy(converted / "source" / "config.json", tmp_path / "tuned")
    for devices in DEVICES:
        lm = lf.load(tmp_path / "tuned", mesh=make_mesh(devices))
        assert_equal(flat(lm), expected)
        assert_sharded(lm, devices)
    convert(find_source(str(tmp_path / "tuned"), None), tmp_path / "published")
    assert_equal(flat(lf.load(tmp_path / "published")), expected)


def test_orbax_itself_restores_the_tree_as_it_is(converted):
    with ocp.PyTreeCheckpointer() as checkpointer:
        restored = checkpointer.restore(converted / "orbax" / "orbax")
    jax.tree.map(np.testing.assert_array_equal, restored, folders.leaves(CONFIG))
    assert jax.tree.structure(restored) == jax.tree.structure(folders.leaves(CONFIG))


@pytest.mark.parametrize("devices", DEVICES)
def test_orbax_itself_restores_onto_a_mesh(converted, devices):
    mesh = make_mesh(devices)
    abstract = dict(nnx.to_flat_state(nnx.state(weights.abstract_model(CONFIG))))
    tree = jax.tree.map(lambda leaf: leaf, folders.leaves(CONFIG))
    for path, leaf in abstract.items():
        *parents, last = map(str, path)
        node = tree
        for key in parents:
            node = node[key]
        node[last] = jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, parameter_spec(leaf, mesh))
        )
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(converted / "orbax" / "orbax", tree)
    jax.tree.map(np.testing.assert_array_equal, restored, folders.leaves(CONFIG))
    wq = restored["blocks"]["1"]["attention"]["wq"]["weight"]
    assert wq.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("lanes")), 3)


def bytes_read():
    """By TensorStore from files so far; its threads count shortly after they deliver."""
    before = None
    while True:
        found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
        now = found[0]["values"][0]["value"] if found else 0
        if now == before:
            return now
        before = now
        time.sleep(0.05)


def test_one_lane_or_two_are_all_that_is_read(converted):
    folder = OrbaxFolder.open(converted / "orbax" / "orbax")
    lane = 64 * 4 * 4
    for lanes in (1, 2):
        before = bytes_read()
        part = folder.read_slice("blocks.1.mlp.w2.weight", (slice(4, 4 + lanes), slice(None), slice(None)))
        assert part.nbytes == bytes_read() - before == lanes * lane


@pytest.mark.parametrize("devices", [2, 8])
def test_each_device_reads_what_it_holds_and_no_more(converted, devices):
    """Counted at the storage, device by device, over the whole model; and the plan's figure is the same."""
    source = converted / "orbax"
    folder, mesh, readers = OrbaxFolder.open(source / "orbax"), make_mesh(devices), []

    def place(variable, read):
        sharding = NamedSharding(mesh, parameter_spec(variable, mesh))
        readers.append((read, sharding.devices_indices_map(variable.shape)))
        return jnp.zeros(variable.shape, variable.dtype)

    weights.load(CONFIG, folder, place=place, names=weights.leaf_names(CONFIG))
    held = sum(item.device_bytes(devices) for item in make_plan(source).items)
    shards = [leaf.addressable_shards[0].data.nbytes for leaf in flat(lf.load(source, mesh=mesh)).values()]
    assert held == sum(shards) < 4 * weights.parameter_count(CONFIG)
    for device in mesh.devices.flat:
        before = bytes_read()
        for read, indices in readers:
            read(indices[device])
        assert bytes_read() - before == held


def rename(folder, old, new):
    """Renames a leaf in the tree and on the disk."""
    file = folder / "orbax" / "_METADATA"
    tree = json.loads(file.read_text())
    renamed = {}
    for key, fields in tree["tree_metadata"].items():
        if ".".join(entry["key"] for entry in fields["key_metadata"]) == old:
            fields["key_metadata"] = [{"key": part, "key_type": 2} for part in new.split(".")]
            key = str(tuple(new.split(".")))
        renamed[key] = fields
    file.write_text(json.dumps(tree | {"tree_metadata": renamed}))
    if (folder / "orbax" / old).exists() and "/" not in new:
        (folder / "orbax" / old).rename(folder / "orbax" / new)


def replace_leaf(folder, name, value):
    shutil.rmtree(folder / "orbax" / name)
    metadata = {"shape": value.shape, "dtype": value.dtype.str, "compressor": None}
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{folder / 'orbax' / name}/"},
        "metadata": metadata,
    }
    ts.open(spec, create=True).result().write(value).result()


def config_of(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def faults(folder):
    """The message of `lf.load`, with and without a mesh; both name the fault before the model is of use."""
    messages = set()
    for mesh in (None, make_mesh(8)):
        with pytest.raises(lf.LaneformerError) as error:
            lf.load(folder, mesh=mesh)
        messages.add(str(error.value))
    (message,) = messages
    assert "\n" not in message
    return message


def test_one_layer_less_than_the_config_asks_for(copied):
    config_of(copied, num_hidden_layers=3)
    message = faults(copied)
    assert message.startswith("9 problem(s) with the weights: blocks.2.attention_norm.scale is missing")


def test_one_layer_more_than_the_config_asks_for(copied):
    config_of(copied, num_hidden_layers=1)
    assert "blocks.1.mlp.w3.weight is unexpected" in faults(copied)


def test_renamed_leaf(copied):
    rename(copied, "blocks.0.mlp.w1.weight", "blocks.0.mlp.gate.weight")
    assert "blocks.0.mlp.w1.weight is missing; blocks.0.mlp.gate.weight is unexpected" in faults(copied)


def test_wrong_shape(copied):
    replace_leaf(copied, "head.weight", np.zeros((64, 32), np.float32))
    assert "head.weight has shape [64, 32], the config asks for [64, 64]" in faults(copied)


def test_wrong_dtype(copied):
    replace_leaf(copied, "head.weight", np.zeros((64, 64), np.int32))
    assert "head.weight has dtype int32" in faults(copied)


def test_leaf_or_chunk_that_is_gone_or_cut(copied):
    chunk = copied / "orbax" / "blocks.1.attention.wo.weight" / "5.0.0"
    data = chunk.read_bytes()
    chunk.unlink()
    assert "leaf blocks.1.attention.wo.weight cannot be read" in faults(copied)
    chunk.write_bytes(data[:-1])
    assert "leaf blocks.1.attention.wo.weight cannot be read" in faults(copied)
    chunk.write_bytes(data)
    (copied / "orbax" / "embedding" / ".zarray").unlink()
    assert "leaf embedding cannot be read" in faults(copied)


def test_half_a_checkpoint_is_no_checkpoint(copied):
    (copied / "orbax").rename(copied / "orbax.orbax-checkpoint-tmp")
    assert "no weights" in faults(copied)
    (copied / "orbax.orbax-checkpoint-tmp").rename(copied / "orbax")
    (copied / "orbax" / "_METADATA").unlink()
    assert "no complete Orbax checkpoint" in faults(copied)


@pytest.mark.parametrize("name", ["../../source", "a/b", "..", "embedding\0"])
def test_leaf_cannot_name_a_file_elsewhere(copied, name):
    file = copied / "orbax" / "_METADATA"
    tree = json.loads(file.read_text())
    tree["tree_metadata"]["('head', 'weight')"]["key_metadata"] = [{"key": name, "key_type": 2}]
    file.write_text(json.dumps(tree))
    assert "may lie outside the folder: refused" in faults(copied)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tree_metadata": {"a": 1}}', '{"tree_metadata": {"a": 1, "a": 2}}'])
def test_unusable_metadata(copied, text):
    (copied / "orbax" / "_METADATA").write_text(text)
    assert str(copied / "orbax") in faults(copied)


def test_chunks_larger_than_the_array_are_refused(copied):
    file = copied / "orbax" / "embedding" / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chunks": [1 << 40, 64]}))
    assert "leaf embedding has chunks [1099511627776, 64] beyond its shape [64, 64]" in faults(copied)


def test_mutated_files_read_as_they_are_or_give_one_line(copied):
    rng = np.random.default_rng(0)
    files = sorted(path for path in (copied / "orbax").rglob("*") if path.is_file())
    described = [path for path in files if path.name in ("_METADATA", ".zarray")]
    outcomes = {"read": 0, "refused": 0}
    for i in range(200):
        file = files[rng.integers(len(files))] if i % 8 == 0 else described[rng.integers(len(described))]
        data = file.read_bytes()
        mutated = bytearray(data)
        start = int(rng.integers(len(data)))
        mutated[start : start + rng.integers(3)] = SPLICES[rng.integers(len(SPLICES))]
        file.write_bytes(mutated)
        try:
            source, names = weights.open_source(copied, CONFIG)
            weights.check_names(CONFIG, source, names)
            for name in names:
                source.read_slice(name, tuple(slice(0, size) for size in source.entries[name].shape))
            outcomes["read"] += 1
        except lf.LaneformerError as error:
            assert "\n" not in str(error)
            outcomes["refused"] += 1
        file.write_bytes(data)
    assert min(outcomes.values()) > 10


def test_folder_with_both_kinds_of_weights_is_refused(copied, converted):
    shutil.copy(converted / "source" / "model.safetensors", copied)
    assert "has both safetensors and orbax/" in faults(copied)
