import dataclasses
import json

import goldens
import jax
import numpy as np
import pytest
import toy
from flax import nnx

import laneformer_jax as lf
from laneformer_jax.config import NEUTRAL_VALUES, PRESETS, LaneformerConfig, RopeScaling
from laneformer_jax.errors import LaneformerError
from laneformer_jax.weights import abstract_model

BASE = toy.BASE.replace(sliding_window=5, tie_embeddings=False)
LLAMA3 = RopeScaling(4.0, 1.0, 4.0, 16)
OLDER = {
    "model_type": "laneformer_tp",
    "architectures": ["LaneformerTPForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 64,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "rope_theta": 500000.0,
    "norm_eps": 1e-6,
    "num_lanes": 4,
    "broadcast_delay": 2,
    "use_comm": True,
    "use_early_comm": True,
    "lm_head_type": "lane",
    "pre_norm_lane_agg": False,
    "replicated_rmsn_scale": False,
    "tie_word_embeddings": False,
    "sliding_window": 8,
    "sliding_window_n_layers": 4,
    "unclamped_layers": [1],
    "bos_token_id": 1,
    "eos_token_id": [2, 5],
    "torch_dtype": "float16",
}
MEANING = LaneformerConfig(
    vocab_size=96,
    hidden_size=64,
    num_layers=6,
    num_heads=16,
    num_kv_heads=8,
    intermediate_size=64,
    num_lanes=4,
    max_position_embeddings=128,
    head_dim=4,
    delay=4,
    attention_comm=True,
    mlp_comm=True,
    early_comm=True,
    sliding_window=8,
    sliding_layers=(0, 2, 3),
    rope_theta=500000.0,
    rope_scaling=None,
    norm_eps=1e-6,
    head="lane",
    pre_norm_lane_agg=False,
    lane_norm_scale=True,
    tie_embeddings=False,
    dtype="float16",
    bos_token_id=1,
    eos_token_ids=(2, 5),
)


def read(remove=(), **fields):
    return LaneformerConfig.from_dict({k: v for k, v in (OLDER | fields).items() if k not in remove})


def test_older_spelling():
    assert read() == MEANING


def test_newer_spelling():
    newer = {
        "model_type": "laneformer",
        "swa_layers": [3, 0, 2],
        "use_attention_comm": True,
        "use_mlp_comm": True,
        "rms_norm_eps": 1e-6,
        "dtype": "torch.float16",
        "rope_parameters": {"rope_theta": 500000, "rope_type": "default"},
        "head_dim": 4,
        "layer_types": ["sliding_attention" if i in (0, 2, 3) else "full_attention" for i in range(6)],
    }
    gone = "sliding_window_n_layers unclamped_layers use_comm norm_eps torch_dtype rope_theta".split()
    assert read(gone, **newer) == MEANING


def test_fields_that_may_be_absent():
    optional = """use_comm use_early_comm lm_head_type pre_norm_lane_agg replicated_rmsn_scale tie_word_embeddings
        sliding_window sliding_window_n_layers unclamped_layers bos_token_id eos_token_id torch_dtype rope_theta
        norm_eps num_key_value_heads architectures"""
    assert read(optional.split()) == MEANING.replace(
        num_kv_heads=16,
        early_comm=False,
        sliding_window=None,
        sliding_layers=(),
        rope_theta=10000.0,
        norm_eps=1e-5,
        head="replicate",
        lane_norm_scale=False,
        dtype="float32",
        bos_token_id=None,
        eos_token_ids=(),
    )


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"sliding_window_n_layers": 0}, ()),
        ({"sliding_window_n_layers": -2, "unclamped_layers": None}, (4, 5)),
        ({"sliding_window_n_layers": -9}, (0, 2, 3, 4, 5)),
        ({"sliding_window_n_layers": 9, "unclamped_layers": []}, (0, 1, 2, 3, 4, 5)),
        ({"sliding_window_n_layers": None, "swa_layers": []}, ()),
        ({"sliding_window_n_layers": None, "swa_layers": [5, 5, 1]}, (1, 5)),
        ({"sliding_window": None}, ()),
    ],
)
def test_which_layers_slide(fields, layers):
    assert read(**fields).sliding_layers == layers


def test_window_of_a_layer():
    config = read()
    assert [config.window(layer) for layer in range(6)] == [8, None, 8, 8, None, None]


@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters", "both", "older_key"])
def test_llama3_scaling_in_every_spelling(form):
    values = {**dataclasses.asdict(LLAMA3), "rope_type": "llama3"}
    forms = {
        "rope_scaling": {"rope_scaling": values},
        "rope_parameters": {"rope_theta": None, "rope_parameters": {**values, "rope_theta": 500000.0}},
        "both": {"rope_scaling": values, "rope_parameters": {"rope_theta": 500000.0}},
        "older_key": {"rope_scaling": {**dataclasses.asdict(LLAMA3), "type": "llama3"}},
    }
    assert read(**forms[form]) == MEANING.replace(rope_scaling=LLAMA3)


@pytest.mark.parametrize("name", goldens.NAMES)
def test_published_files_survive_a_round_trip(name):
    config = LaneformerConfig.from_file(goldens.FOLDER / name / "config.json")
    again = LaneformerConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    fields = json.loads((goldens.FOLDER / name / "config.json").read_text())
    assert again.num_layers == fields["num_hidden_layers"] and again.delay == 2 * fields["broadcast_delay"]


# One other value of every field, with what it has to change: logits, shapes of parameters, or behaviour.
LOGITS = {
    "num_heads": {"num_heads": 8, "head_dim": 8},
    "delay": {"delay": 1},
    "attention_comm": {"attention_comm": False},
    "mlp_comm": {"mlp_comm": False},
    "early_comm": {"early_comm": True},
    "sliding_window": {"sliding_window": 6},
    "sliding_layers": {"sliding_layers": (1,)},
    "rope_theta": {"rope_theta": 100.0},
    "rope_scaling": {"rope_scaling": LLAMA3},
    "norm_eps": {"norm_eps": 1e-2},
    "pre_norm_lane_agg": {"pre_norm_lane_agg": True},
}
SHAPES = {
    "vocab_size": ({"vocab_size": 72}, ("embedding",), (72, 64)),
    "hidden_size": ({"hidden_size": 128, "head_dim": 8}, ("embedding",), (64, 128)),
    "head_dim": ({"hidden_size": 32, "head_dim": 2}, ("blocks", 0, "attention", "wk", "weight"), (8, 2, 32)),
    "num_kv_heads": ({"num_kv_heads": 16}, ("blocks", 0, "attention", "wk", "weight"), (8, 8, 64)),
    "intermediate_size": ({"intermediate_size": 48}, ("blocks", 0, "mlp", "w1", "weight"), (8, 6, 64)),
    "num_lanes": ({"num_lanes": 4}, ("blocks", 0, "mlp", "w1", "weight"), (4, 8, 64)),
    "num_layers": ({"num_layers": 3}, ("blocks", 2, "mlp", "w1", "weight"), (8, 4, 64)),
    "head": ({"head": "lane"}, ("head", "weight"), (64, 512)),
    "lane_norm_scale": ({"lane_norm_scale": True}, ("head", "norm", "scale"), (8, 64)),
    "tie_embeddings": ({"tie_embeddings": True}, ("head", "weight"), None),
}
# Shown by test_dtype_is_that_of_every_parameter, test_generation.py's tests of limits and of ends, and the round trip.
ELSEWHERE = {"dtype", "max_position_embeddings", "eos_token_ids", "bos_token_id"}


def test_no_field_is_without_a_test_of_its_effect():
    fields = {field.name for field in dataclasses.fields(LaneformerConfig)}
    assert fields == {*LOGITS, *SHAPES, *ELSEWHERE}


@pytest.mark.parametrize("field", LOGITS)
def test_field_changes_the_logits(field):
    changed = toy.logits(BASE.replace(**LOGITS[field]))
    assert np.abs(changed - toy.logits(BASE)).max() > 1e-3


@pytest.mark.parametrize("field", SHAPES)
def test_field_changes_the_shape_of_a_parameter(field):
    changes, path, shape = SHAPES[field]
    before, after = (
        {path: leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(abstract_model(config)))}
        for config in (BASE, BASE.replace(**changes))
    )
    assert after.get(path) == shape != before.get(path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_is_that_of_every_parameter(dtype):
    leaves = jax.tree.leaves(nnx.state(abstract_model(BASE.replace(dtype=dtype))))
    assert {leaf.dtype.name for leaf in leaves} == {dtype}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(LaneformerConfig)])
def test_every_field_survives_a_round_trip(field):
    others = {
        **{name: changes for name, changes in LOGITS.items()},
        **{name: changes for name, (changes, _, _) in SHAPES.items()},
        "dtype": {"dtype": "bfloat16"},
        "max_position_embeddings": {"max_position_embeddings": 65},
        "eos_token_ids": {"eos_token_ids": (7, 3)},
        "bos_token_id": {"bos_token_id": None},
    }
    config = BASE.replace(**others[field])
    assert getattr(config, field) != getattr(BASE, field)
    assert LaneformerConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_comm": True, "use_mlp_comm": False}, "'use_mlp_comm': False, 'use_comm': True"),
        ({"norm_eps": 1e-6, "rms_norm_eps": 1e-5}, "'norm_eps': 1e-06, 'rms_norm_eps': 1e-05"),
        ({"dtype": "float32"}, "'torch_dtype': 'float16', 'dtype': 'float32'"),
        ({"swa_layers": [0, 1]}, "contradict each other on which layers slide.*swa_layers"),
        ({"layer_types": ["full_attention"] * 6}, "contradict each other on which layers slide.*layer_types"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "'rope_theta': 500000.0, 'rope_parameters.rope_theta': 10000.0"),
        ({"broadcast_delay_modules": 3}, r"broadcast_delay 2 \(layers\) and 3 modules contradict"),
        (
            {
                "rope_scaling": {"rope_type": "llama3", **dataclasses.asdict(LLAMA3)},
                "rope_parameters": {"rope_type": "default"},
            },
            "contradict each other.*rope_scaling.*rope_parameters",
        ),
    ],
)
def test_contradictions_are_named(fields, message):
    with pytest.raises(LaneformerError, match=message):
        read(**fields)


def test_fields_that_agree_do_not_contradict():
    agreeing = {"rms_norm_eps": 1e-6, "dtype": "float16", "use_mlp_comm": True, "broadcast_delay_modules": 4}
    assert read(**agreeing) == MEANING


@pytest.mark.parametrize("name", NEUTRAL_VALUES)
def test_fields_of_other_architectures_are_refused_only_where_they_would_change_the_result(name):
    for neutral in NEUTRAL_VALUES[name]:
        assert read(**{name: neutral}) == MEANING
    with pytest.raises(LaneformerError, match=f"^{name} = 'gelu' is not supported: it would change the result$"):
        read(**{name: "gelu"})


def test_fields_without_effect_are_ignored():
    assert read(use_cache=True, transformers_version="5.0", initializer_range=0.02, attention_dropout=0.0) == MEANING


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not a Laneformer"),
        ({"model_type": None}, "model_type None is not a Laneformer"),
        ({"num_lanes": None}, "num_lanes is missing"),
        ({"broadcast_delay": None}, "broadcast_delay is missing"),
        ({"hidden_size": "64"}, "hidden_size must be of type int, got '64'"),
        ({"num_lanes": True}, "num_lanes must be of type int, got True"),
        ({"use_comm": 1}, "use_comm must be of type bool, got 1"),
        ({"lm_head_type": "mean"}, "lm_head_type must be replicate, lane or vocab_parallel, got 'mean'"),
        ({"torch_dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"num_lanes": 3}, "3 lanes do not divide num_heads 16"),
        ({"num_lanes": 16}, "16 lanes do not divide num_kv_heads 8"),
        ({"intermediate_size": 66}, "4 lanes do not divide intermediate_size 66"),
        ({"lm_head_type": "vocab_parallel", "vocab_size": 98}, "4 lanes do not divide vocab_size 98"),
        ({"num_key_value_heads": 12}, "num_kv_heads 12 does not divide num_heads 16"),
        ({"head_dim": 8}, "head_dim 8 x num_heads 16 is not hidden_size 64"),
        ({"hidden_size": 48}, "head_dim must be even for rotary pairs, got 3"),
        ({"hidden_size": 0}, "hidden_size must be a positive whole number, got 0"),
        ({"num_lanes": 0}, "num_lanes must be a positive whole number, got 0"),
        ({"broadcast_delay": -1}, "delay must be a whole number of modules >= 0, got -2"),
        ({"pre_norm_lane_agg": True}, "pre_norm_lane_agg goes with lm_head_type replicate only, got lane"),
        ({"tie_word_embeddings": True}, "tie_embeddings goes with lm_head_type replicate only, got lane"),
        ({"pre_norm_lane_agg": True, "lm_head_type": "replicate"}, "so replicated_rmsn_scale must be true"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        ({"swa_layers": [0, 6], "sliding_window_n_layers": None}, r"sliding layers \[0, 6\] are not all within 0..5"),
        ({"swa_layers": 3, "sliding_window_n_layers": None}, "swa_layers must be of type list, got 3"),
        ({"swa_layers": ["0"], "sliding_window_n_layers": None}, "swa_layers must list numbers of layers"),
        ({"unclamped_layers": 1}, "unclamped_layers must be of type list, got 1"),
        ({"layer_types": ["chunked_attention"] * 6}, "layer_types has 'chunked_attention'"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 6 layers"),
        ({"norm_eps": 0.0}, "norm_eps must be positive, got 0.0"),
        ({"rope_theta": float("nan")}, "rope_theta must be positive, got nan"),
        ({"rope_theta": "1e4"}, "rope_theta must be of type float, got '1e4'"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_parameters.rope_theta must be of type float, got '1e4'"),
        ({"rope_scaling": "llama3"}, "rope_scaling must be of type dict, got 'llama3'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling of type 'yarn' is not supported"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling of type None is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "lacks low_freq_factor, high_freq_factor, original"),
        (
            {"rope_scaling": {"rope_type": "llama3", **dataclasses.asdict(LLAMA3), "factor": "4"}},
            "rope_scaling: factor must be a number, got '4'",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **dataclasses.asdict(LLAMA3), "high_freq_factor": 0.5}},
            "rope_scaling: needs factor >= 1 and 0 < low_freq_factor < high_freq_factor, got 4.0, 1.0, 0.5",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **dataclasses.asdict(LLAMA3), "factor": 10**400}},
            "rope_scaling: factor must be a number, got 1000",
        ),
        ({"rope_theta": 10**400}, "rope_theta must be of type float, got 1000"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 1000, got 1000000000"),
        ({"eos_token_id": "2"}, "eos_token_id must be a token id or a list of them, got '2'"),
        ({"eos_token_id": 96}, "special token id 96 is outside the vocabulary of 96"),
        ({"bos_token_id": -1}, "special token id -1 is outside the vocabulary of 96"),
    ],
)
def test_unusable_values_are_named(fields, message):
    with pytest.raises(LaneformerError, match=message):
        read(**fields)


def test_replace_validates_again():
    with pytest.raises(LaneformerError, match="3 lanes do not divide num_heads 16"):
        MEANING.replace(num_lanes=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        MEANING.num_lanes = 2  # type: ignore[misc]


@pytest.mark.parametrize("n", [10**12, -(10**12)])
def test_more_sliding_layers_than_there_are_means_all_of_them(n):
    every = read(sliding_window_n_layers=n, unclamped_layers=[])
    assert every.sliding_layers == tuple(range(every.num_layers))


@pytest.mark.parametrize("content", ["", "{", "[1]", b"\xff\xfe", "[" * 100_000])
def test_file_that_holds_no_json_object_is_named(tmp_path, content):
    file = tmp_path / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(LaneformerError, match=f"{file}: (not readable as JSON|must hold a JSON object)"):
        LaneformerConfig.from_file(file)


def test_fault_in_a_file_is_named_with_the_file(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(OLDER | {"num_lanes": 5}))
    with pytest.raises(LaneformerError, match=f"{file}: config: 5 lanes do not divide num_heads 16"):
        LaneformerConfig.from_file(file)


def test_presets_are_what_the_design_says():
    assert PRESETS.keys() == {"laneformer_2b", "laneformer_small"}
    big = lf.laneformer_2b()
    assert (big.num_layers, big.num_lanes, big.num_heads, big.num_kv_heads, big.head_dim) == (15, 8, 32, 16, 96)
    assert (big.delay, big.early_comm, big.max_position_embeddings, big.vocab_size) == (4, False, 4096, 32000)
    assert [big.window(layer) for layer in (0, 9, 10, 14)] == [2048, 2048, None, None]
    small = lf.laneformer_small()
    assert (small.num_lanes, small.delay) == (8, 4) and small.sliding_layers
