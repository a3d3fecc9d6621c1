import json
import shutil
from pathlib import Path

import goldens
import numpy as np
import oracle
import pytest
import torch
from tolerances import LOGITS_FLOAT32

from experiments import reference
from laneformer_jax.config import LaneformerConfig, RopeScaling
from laneformer_jax.errors import LaneformerError
from laneformer_jax.safetensors_io import SafetensorsFile, SafetensorsWriter

BASE = LaneformerConfig(
    vocab_size=48,
    hidden_size=32,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    intermediate_size=32,
    num_lanes=2,
    max_position_embeddings=64,
    sliding_window=5,
    sliding_layers=(0, 2),
    dtype="float32",
)


@pytest.fixture(autouse=True)
def one_thread():
    """Goldens are too small to share out, and PyTorch's waiting threads starve other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seeded(config: LaneformerConfig, dtype: torch.dtype = torch.float64) -> reference.Laneformer:
    model = reference.Laneformer(config, dtype)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.normal_(1.0, 0.2) if name.endswith("scale") else parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model


def token_ids(config: LaneformerConfig, tokens: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(config.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(1))


class TestGoldens:
    @pytest.mark.parametrize("name", goldens.NAMES)
    def test_logits_with_and_without_a_cache(self, name: str):
        model, golden = reference.load(goldens.FOLDER / name), goldens.expected(name)
        ids = torch.from_numpy(golden.input_ids).long()
        cache = model.new_cache(2, goldens.PROMPT_TOKENS)
        pieces = [model(ids[:, start:stop], cache) for start, stop in ((0, 10), (10, 11), (11, 12), (12, 21))]
        for logits in (model(ids), torch.cat(pieces, 1)):
            assert logits.dtype == torch.float32
            np.testing.assert_allclose(logits, golden.logits, rtol=0, atol=LOGITS_FLOAT32)

    @pytest.mark.parametrize("name", goldens.NAMES)
    def test_greedy_tokens_with_and_without_a_cache(self, name: str):
        model, golden = reference.load(goldens.FOLDER / name), goldens.expected(name)
        prompts = torch.from_numpy(golden.input_ids).long()
        np.testing.assert_array_equal(model.generate(prompts, goldens.NEW_TOKENS), golden.greedy)
        np.testing.assert_array_equal(model.generate(prompts[:1], goldens.NEW_TOKENS), golden.greedy[:1])
        logits = model(torch.from_numpy(golden.greedy[:, :-1]).long())
        np.testing.assert_array_equal(
            logits[:, goldens.PROMPT_TOKENS - 1 :].argmax(-1), golden.greedy[:, goldens.PROMPT_TOKENS :]
        )

    # Units of the type's rounding, relative to the largest logit: the roundings of six layers add up to about 8.
    @pytest.mark.parametrize("dtype, rounding", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
    @pytest.mark.parametrize("name", goldens.NAMES)
    def test_half_precision_is_near(self, name: str, dtype: torch.dtype, rounding: float):
        model, golden = reference.load(goldens.FOLDER / name, dtype), goldens.expected(name)
        ids = torch.from_numpy(golden.input_ids).long()
        cache = model.new_cache(1, goldens.PROMPT_TOKENS)
        cached = torch.cat([model(token, cache) for token in ids[:1].split(1, dim=1)], 1)
        atol = 16 * rounding * np.abs(golden.logits).max()
        np.testing.assert_allclose(model(ids), golden.logits, rtol=0, atol=atol)
        np.testing.assert_allclose(cached, golden.logits[:1], rtol=0, atol=atol)

    def test_goldens_catch_a_window_that_is_off_by_one(self):
        model, golden = reference.load(goldens.FOLDER / "delay2_swa"), goldens.expected("delay2_swa")
        ids = torch.from_numpy(golden.input_ids).long()
        for layer in model.layers:
            layer.attention.window = None if layer.attention.window is None else 9
        model.config = model.config.replace(sliding_window=9)
        cache = model.new_cache(2, goldens.PROMPT_TOKENS)
        cached = torch.cat([model(token, cache) for token in ids.split(1, dim=1)], 1)
        for logits in (model(ids), cached):
            assert np.abs(logits.numpy() - golden.logits).max() > 100 * LOGITS_FLOAT32


VARIANTS = {
    "delay 0": {"delay": 0},
    "delay 0, silent": {"delay": 0, "attention_comm": False, "mlp_comm": False},
    "delay of one module": {"delay": 1},
    "delay of one module, attention silent": {"delay": 1, "attention_comm": False},
    "delay of three modules, early": {"delay": 3, "early_comm": True},
    "longer delay than the model": {"delay": 10},
    "MLPs silent": {"delay": 2, "mlp_comm": False},
    "attention silent, early": {"delay": 2, "attention_comm": False, "early_comm": True},
    "norm per lane": {"lane_norm_scale": True},
    "lane head": {"head": "lane"},
    "vocabulary split": {"head": "vocab_parallel", "lane_norm_scale": True},
    "lanes summed before the norm": {"pre_norm_lane_agg": True},
    "tied embeddings": {"tie_embeddings": True},
    "one lane, one KV head": {"num_lanes": 1, "num_kv_heads": 1},
    "window of 1": {"sliding_window": 1},
    # Wavelengths on both sides of, and between, the two bounds.
    "Llama 3 rotary": {
        "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 32),
        "rope_theta": 20.0,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
    },
}


class TestAgainstTheOracle:
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_float64_logits(self, variant: str):
        config = BASE.replace(**VARIANTS[variant])
        model, ids = seeded(config), token_ids(config, 17)
        weights = {name: target.numpy() for name, target in reference.checkpoint_tensors(model)}
        expected = oracle.forward(weights, config, ids[0].numpy())
        cache = model.new_cache(1, 17)
        cached = torch.cat(
            [model(ids[:, :9], cache), *(model(token, cache) for token in ids[:, 9:].split(1, dim=1))], 1
        )
        for logits in (model(ids), cached):
            assert logits.dtype == torch.float64
            # The angles are float32: at position 16, they are right to 1e-6 radians.
            np.testing.assert_allclose(logits[0], expected, rtol=0, atol=LOGITS_FLOAT32)


class TestExchangeModes:
    @pytest.mark.parametrize(
        "changes, expected",
        [
            ({"delay": 4}, "none none none none past past past past"),
            ({"delay": 4, "early_comm": True}, "present present present present past past past past"),
            ({"delay": 4, "attention_comm": False}, "none none none none none past none past"),
            ({"delay": 1, "attention_comm": False}, "none none past none past none past none"),
            ({"delay": 0, "mlp_comm": False}, "present none present none present none present none"),
        ],
    )
    def test_literal(self, changes: dict, expected: str):
        assert reference.exchange_modes(BASE.replace(**changes)) == expected.split()


class TestMask:
    def test_literal(self):
        first, mask = reference.attention_mask(start=2, tokens=3, window=2)
        assert first == 1
        assert mask is not None and mask.int().tolist() == [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
        first, mask = reference.attention_mask(start=1, tokens=2, window=None)
        assert first == 0
        assert mask is not None and mask.int().tolist() == [[1, 1, 0], [1, 1, 1]]

    def test_one_query_needs_none(self):
        assert reference.attention_mask(start=9, tokens=1, window=4) == (6, None)
        assert reference.attention_mask(start=9, tokens=1, window=None) == (0, None)
        assert reference.attention_mask(start=2, tokens=1, window=4) == (0, None)

    def test_unfilled_slots_have_no_effect(self):
        model, ids = seeded(BASE, torch.float32), token_ids(BASE, 12)
        cache = model.new_cache(1, 40)
        cache.keys.fill_(float("nan"))
        cache.values.fill_(float("nan"))
        cached = torch.cat([model(ids[:, :8], cache), model(ids[:, 8:9], cache), model(ids[:, 9:], cache)], 1)
        np.testing.assert_allclose(cached, model(ids), rtol=0, atol=LOGITS_FLOAT32)


class TestLimits:
    def test_context_and_cache_are_not_overrun(self):
        model = seeded(BASE, torch.float32)
        with pytest.raises(LaneformerError, match="65 tokens do not fit into 64 positions"):
            model(token_ids(BASE, 65))
        with pytest.raises(LaneformerError, match="cache of 65 slots exceeds the context of 64"):
            model.generate(token_ids(BASE, 60), 5)
        assert model.generate(token_ids(BASE, 60), 4).shape == (1, 64)
        cache = model.new_cache(1, 3)
        model(token_ids(BASE, 3), cache)
        with pytest.raises(LaneformerError, match="4 tokens do not fit into 3 positions"):
            model(token_ids(BASE, 1), cache)

    def test_onednn_is_left_as_it_was(self):
        model = seeded(BASE, torch.bfloat16)
        model.generate(token_ids(BASE, 3), 2)
        assert torch.backends.mkldnn.enabled
        with reference.native_kernels(True):
            assert not torch.backends.mkldnn.enabled
        assert torch.backends.mkldnn.enabled


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(goldens.FOLDER / "delay2_swa", tmp_path / "model"))


def rewrite(folder: Path, change) -> None:
    """Apply `change` to the folder's tensors, a dict by name."""
    file = SafetensorsFile.open(folder / "model.safetensors")
    tensors = {name: file.read(name) for name in file.entries}
    change(tensors)
    with SafetensorsWriter(file.path, {name: (array.dtype, array.shape) for name, array in tensors.items()}) as writer:
        for name, array in tensors.items():
            writer.write(name, array)


class TestLoading:
    @pytest.mark.parametrize(
        "change, expected",
        [
            (lambda t: t.pop("model.layers.3.attention.wk.weight"), "model.layers.3.attention.wk.weight is missing"),
            (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
            (
                lambda t: t.update({"lm_head.weight": t["lm_head.weight"].T}),
                r"is \[32, 96\], but the config asks for \[96, 32\]",
            ),
            (lambda t: t.update({"model.norm.weight": np.ones(32, np.int8)}), "model.norm.weight is int8"),
            (lambda t: t.update({"model.layers.6.w": np.zeros(1)}), "'model.layers.6.w' has no place in the model"),
        ],
    )
    def test_wrong_tensors(self, folder: Path, change, expected: str):
        rewrite(folder, change)
        with pytest.raises(LaneformerError, match=expected):
            reference.load(folder)

    def test_rotary_buffers_are_skipped(self, folder: Path):
        rewrite(folder, lambda tensors: tensors.update({"model.layers.0.attention.rotary.inv_freq": np.zeros(2)}))
        reference.load(folder)

    def test_tied_head(self, folder: Path):
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": True}))
        rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
        model = reference.load(folder)
        assert model.head is model.embeddings

    def test_dtype_is_the_configs_unless_given(self, folder: Path):
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(fields | {"torch_dtype": "bfloat16"}))
        assert {p.dtype for p in reference.load(folder).parameters()} == {torch.bfloat16}
        assert {p.dtype for p in reference.load(folder, torch.float64).parameters()} == {torch.float64}
