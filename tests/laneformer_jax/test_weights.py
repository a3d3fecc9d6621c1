import json
import logging
import shutil

import goldens
import jax
import ml_dtypes
import numpy as np
import pytest
import toy
from flax import nnx
from safetensors.numpy import load_file, save_file

import laneformer_jax as lf
from laneformer_jax import weights
from laneformer_jax.safetensors_io import SafetensorsFolder

CONFIG = toy.BASE.replace(num_layers=1)
HEADS = {"replicate": "lm_head.weight", "vocab_parallel": "lm_head.weight", "lane": "lm_head.linear.weight"}


def write_folder(folder, tensors=None, config=CONFIG, **fields):
    """A checkpoint folder written without the package's writer."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict() | fields))
    named = {name: np.asarray(value, np.float32) for name, value in toy.named_weights(config).items()}
    save_file(named | (tensors or {}), folder / "model.safetensors")
    return folder


def drop(folder, *names):
    file = folder / "model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if name not in names}, file)
    return folder


def loaded(folder, config=CONFIG, **options):
    return weights.load(config, SafetensorsFolder.open(folder), **options)


def flat(model):
    return {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}


def assert_equal_models(model, expected):
    got, wanted = flat(model), flat(expected)
    assert got.keys() == wanted.keys()
    for path in wanted:
        assert got[path].dtype == wanted[path].dtype
        np.testing.assert_array_equal(got[path], wanted[path], err_msg=str(path))


@pytest.mark.parametrize("name", goldens.NAMES)
def test_names_and_shapes_are_those_of_the_published_layout(name):
    config = lf.LaneformerConfig.from_file(goldens.FOLDER / name / "config.json")
    published = {n: v.shape for n, v in load_file(goldens.FOLDER / name / "model.safetensors").items()}
    abstract = flat_shapes(config)
    assert {n: abstract[path] for n, path in weights.parameter_names(config).items()} == published
    assert weights.parameter_count(config) == sum(np.prod(shape) for shape in published.values())


def flat_shapes(config):
    return {path: leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(weights.abstract_model(config)))}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("lane_norm", [False, True])
def test_every_parameter_has_one_name_and_the_name_says_head_and_norm(head, lane_norm):
    config = CONFIG.replace(head=head, lane_norm_scale=lane_norm)
    names = weights.parameter_names(config)
    assert set(names.values()) == flat_shapes(config).keys()
    assert len(set(names.values())) == len(names) == 12
    assert HEADS[head] in names
    assert f"model.layers.0.ffn_norm.{'scale' if lane_norm else 'weight'}" in names


def test_every_value_arrives_in_its_place(tmp_path):
    config = CONFIG.replace(lane_norm_scale=True, head="lane", num_layers=2)
    folder = write_folder(tmp_path, config=config)
    assert_equal_models(loaded(folder, config), toy.model(config))


def test_saved_folder_loads_bit_for_bit_and_others_can_read_it(tmp_path):
    weights.save_folder(toy.model(CONFIG), tmp_path / "new" / "folder")
    assert lf.LaneformerConfig.from_file(tmp_path / "new/folder/config.json") == CONFIG
    assert_equal_models(loaded(tmp_path / "new" / "folder"), toy.model(CONFIG))
    tensors = load_file(tmp_path / "new" / "folder" / "model.safetensors")
    for name, value in toy.named_weights(CONFIG).items():
        np.testing.assert_array_equal(tensors[name], value.astype(np.float32))


def test_dtype_asked_for_is_rounded_to_nearest_and_read_back(tmp_path):
    weights.save_folder(toy.model(CONFIG), tmp_path, "bfloat16")
    config = lf.LaneformerConfig.from_file(tmp_path / "config.json")
    assert config == CONFIG.replace(dtype="bfloat16")
    exact, rounded = flat(toy.model(CONFIG)), flat(loaded(tmp_path, config))
    for path, value in exact.items():
        assert rounded[path].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(rounded[path], value.astype(ml_dtypes.bfloat16))
    widened = flat(loaded(tmp_path, config, dtype="float32"))
    assert all((widened[path] == rounded[path].astype(np.float32)).all() for path in exact)


def test_everything_wrong_is_listed_at_once(tmp_path):
    wrong = {
        "model.layers.0.attention.wq.weight": np.zeros((8, 64, 8), np.float32),
        "model.layers.0.feed_forward.w1.weight": np.zeros((8, 4, 64), np.int32),
        "model.layers.1.attention.wq.weight": np.zeros((8, 8, 64), np.float32),
        "model.layers.0.attention.wq.bias": np.zeros(8, np.float32),
    }
    folder = drop(write_folder(tmp_path, wrong), "model.norm.weight", "lm_head.weight")
    with pytest.raises(lf.LaneformerError) as error:
        loaded(folder)
    assert str(error.value).splitlines() == [str(error.value)]
    assert str(error.value).startswith("6 problem(s) with the weights: ")
    assert set(str(error.value).split(": ", 1)[1].split("; ")) == {
        "model.norm.weight is missing",
        "lm_head.weight is missing",
        "model.layers.1.attention.wq.weight is unexpected",
        "model.layers.0.attention.wq.bias is unexpected",
        "model.layers.0.attention.wq.weight has shape [8, 64, 8], the config asks for [8, 8, 64]",
        "model.layers.0.feed_forward.w1.weight has dtype int32, which is not a float type of weights",
    }


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_listed_at_once(tmp_path, value):
    bad = {name: toy.named_weights(CONFIG)[name].astype(np.float32) for name in ("model.norm.weight", "lm_head.weight")}
    for array in bad.values():
        array.flat[-1] = value
    with pytest.raises(lf.LaneformerError) as error:
        loaded(write_folder(tmp_path, bad))
    assert str(error.value) == (
        "2 problem(s) with the weights: model.norm.weight has values that are not finite in float32; "
        "lm_head.weight has values that are not finite in float32"
    )


def test_values_beyond_float16_are_reported_on_the_way_in_and_out(tmp_path):
    embedding = toy.named_weights(CONFIG)["model.tok_embeddings.weight"].astype(np.float32)
    embedding[5, 7] = 65520  # the least that rounds to infinity; 65519 is 65504
    folder = write_folder(tmp_path / "in", {"model.tok_embeddings.weight": embedding})
    model = loaded(folder)
    message = "1 problem.*model.tok_embeddings.weight has values that are not finite in float16"
    with pytest.raises(lf.LaneformerError, match=message):
        loaded(folder, dtype="float16")
    with pytest.raises(lf.LaneformerError, match=message):
        weights.save_folder(model, tmp_path / "out", "float16")
    assert list((tmp_path / "out").iterdir()) == []
    embedding[5, 7] = 65519
    write_folder(folder, {"model.tok_embeddings.weight": embedding})
    assert np.asarray(loaded(folder, dtype="float16").embedding)[5, 7] == 65504


def test_tied_head_may_be_absent_or_there_and_an_untied_one_may_not(tmp_path, caplog):
    tied = CONFIG.replace(tie_embeddings=True)
    folder = write_folder(tmp_path, config=tied)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert_equal_models(loaded(folder, tied), toy.model(tied))
    assert not caplog.records
    write_folder(folder, {"lm_head.weight": np.zeros((64, 64), np.float32)}, tied)
    assert_equal_models(loaded(folder, tied), toy.model(tied))
    assert caplog.messages == ["skipped 1 tensor(s) that follow from the config: lm_head.weight"]
    drop(folder, "lm_head.weight")
    with pytest.raises(lf.LaneformerError, match="1 problem.*lm_head.weight is missing"):
        loaded(folder, CONFIG)


def test_derived_buffers_are_skipped_with_a_note(tmp_path, caplog):
    buffers = {
        "model.layers.0.attention.rotary_emb.inv_freq": np.zeros(2, np.float32),
        "model.rope.freqs": np.zeros(2, np.float32),
        "model.freqs_cis": np.zeros((64, 2), np.float32),
    }
    with caplog.at_level(logging.WARNING):
        assert_equal_models(loaded(write_folder(tmp_path, buffers)), toy.model(CONFIG))
    assert caplog.messages == [f"skipped 3 tensor(s) that follow from the config: {', '.join(sorted(buffers))}"]


def test_config_s_sizes_are_checked_against_the_tensors(tmp_path):
    folder = write_folder(tmp_path, intermediate_size=48)
    with pytest.raises(lf.LaneformerError, match=r"w2.weight has shape \[8, 64, 4\], the config asks for \[8, 64, 6\]"):
        lf.load(folder)


def test_checkpoint_in_shards_loads_as_one(tmp_path):
    """Stray files beside the index are not read."""
    golden = goldens.FOLDER / "delay2_swa"
    shutil.copy(golden / "config.json", tmp_path)
    tensors = load_file(golden / "model.safetensors")
    names = sorted(tensors)
    shard_of = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for shard in set(shard_of.values()):
        save_file({name: tensors[name] for name in names if shard_of[name] == shard}, tmp_path / shard)
    save_file({name: tensors[name] * 0 for name in names}, tmp_path / "consolidated.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
    config = lf.LaneformerConfig.from_file(tmp_path / "config.json")
    assert_equal_models(loaded(tmp_path, config), loaded(golden, config))


def test_abstract_model_holds_shapes_in_place_of_arrays():
    leaves = jax.tree.leaves(nnx.state(weights.abstract_model(CONFIG, "float16")))
    assert len(leaves) == 12
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) and leaf.dtype == np.float16 for leaf in leaves)
