"""The architecture of one Laneformer, read from and written to a Hugging Face `config.json`."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from laneformer_jax.errors import LaneformerError

HeadKind = Literal["replicate", "lane", "vocab_parallel"]
DTYPES = ("float32", "bfloat16", "float16")
MODEL_TYPES = ("laneformer", "laneformer_tp")
# A config comes from strangers: what lies beyond these would only fill the memory or never end.
LARGEST, MAX_LAYERS = 2**63, 1000

# Fields of related architectures that would change the result, with the values under which they do not.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "quantization_config": (None,),
    "use_qk_norm": (False, None),
    "num_experts": (None, 0, 1),
}


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretch of the rotary wavelengths (see `rotary.inverse_frequencies`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self):
        for name, value in vars(self).items():
            if not isinstance(value, int | float) or not abs(value) < LARGEST:
                raise LaneformerError(f"rope_scaling: {name} must be a number, got {value!r}")
        if self.factor < 1 or not 0 < self.low_freq_factor < self.high_freq_factor:
            raise LaneformerError(
                "rope_scaling: needs factor >= 1 and 0 < low_freq_factor < high_freq_factor, got "
                f"{self.factor}, {self.low_freq_factor}, {self.high_freq_factor}"
            )
        if self.original_max_position_embeddings < 1:
            raise LaneformerError("rope_scaling: original_max_position_embeddings must be positive")


@dataclass(frozen=True)
class LaneformerConfig:
    """Everything that decides a Laneformer's result; validated when made.

    `delay` counts modules (attention and MLP alternate), so it is twice a checkpoint's `broadcast_delay`; an odd delay
    hands attention outputs to MLP modules. `sliding_layers` are the layers that see the last `sliding_window` tokens.

    Raises:
        LaneformerError: a value is out of range or two values do not fit together.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    num_lanes: int
    max_position_embeddings: int
    head_dim: int = 0  # 0: hidden_size / num_heads
    delay: int = 4
    attention_comm: bool = True
    mlp_comm: bool = True
    early_comm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    head: HeadKind = "replicate"
    pre_norm_lane_agg: bool = False
    lane_norm_scale: bool = False
    tie_embeddings: bool = False
    dtype: str = "bfloat16"
    bos_token_id: int | None = 1
    eos_token_ids: tuple[int, ...] = (2,)

    def __post_init__(self):
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // max(self.num_heads, 1))
        object.__setattr__(self, "sliding_layers", tuple(sorted(set(self.sliding_layers))))
        for problem in _problems(self):
            raise LaneformerError(f"config: {problem}")

    def window(self, layer: int) -> int | None:
        """Number of tokens, itself included, that a query of `layer` sees; None is all of them."""
        return self.sliding_window if layer in self.sliding_layers else None

    def replace(self, **changes: Any) -> "LaneformerConfig":
        """This config with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "LaneformerConfig":
        """The config that a Hugging Face `config.json` means, in either published spelling (design: the checkpoint).

        Raises:
            LaneformerError: a field that changes the result has a value that is not supported, is missing, or
                contradicts another; the message names the field.
        """
        return _Reader(fields).config()

    @classmethod
    def from_file(cls, path: Path) -> "LaneformerConfig":
        """`from_dict` of a JSON file.

        Raises:
            LaneformerError: as `from_dict`, or the file cannot be read as a JSON object.
        """
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise LaneformerError(f"{path}: not readable as JSON ({error})") from error
        if not isinstance(fields, dict):
            raise LaneformerError(f"{path}: must hold a JSON object")
        try:
            return cls.from_dict(fields)
        except LaneformerError as error:
            raise LaneformerError(f"{path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The fields of a `config.json` in the newer spelling, from which `from_dict` makes an equal config."""
        if self.delay % 2:
            delay = {"broadcast_delay_modules": self.delay}
        else:
            delay = {"broadcast_delay": self.delay // 2}
        scaling = self.rope_scaling and {"rope_type": "llama3", **dataclasses.asdict(self.rope_scaling)}
        return {
            "model_type": "laneformer",
            "architectures": ["LaneformerForCausalLM"],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "num_lanes": self.num_lanes,
            **delay,
            "use_attention_comm": self.attention_comm,
            "use_mlp_comm": self.mlp_comm,
            "use_early_comm": self.early_comm,
            "sliding_window": self.sliding_window,
            "swa_layers": list(self.sliding_layers),
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "norm_eps": self.norm_eps,
            "lm_head_type": self.head,
            "pre_norm_lane_agg": self.pre_norm_lane_agg,
            "replicated_rmsn_scale": not self.lane_norm_scale,
            "tie_word_embeddings": self.tie_embeddings,
            "torch_dtype": self.dtype,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids),
        }


def _problems(c: LaneformerConfig):
    sizes = (
        "vocab_size hidden_size num_layers num_heads num_kv_heads intermediate_size num_lanes max_position_embeddings "
        "head_dim"
    )
    for name in sizes.split():
        value = getattr(c, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield f"{name} must be a positive whole number, got {value!r}"
    if not isinstance(c.delay, int) or c.delay < 0:
        yield f"delay must be a whole number of modules >= 0, got {c.delay!r}"
    for name in ("num_heads", "num_kv_heads", "intermediate_size"):
        if getattr(c, name) % c.num_lanes:
            yield f"{c.num_lanes} lanes do not divide {name} {getattr(c, name)}"
    if c.num_heads % c.num_kv_heads:
        yield f"num_kv_heads {c.num_kv_heads} does not divide num_heads {c.num_heads}"
    if c.head_dim * c.num_heads != c.hidden_size:
        yield f"head_dim {c.head_dim} x num_heads {c.num_heads} is not hidden_size {c.hidden_size}"
    if c.head_dim % 2:
        yield f"head_dim must be even for rotary pairs, got {c.head_dim}"
    if c.head not in ("replicate", "lane", "vocab_parallel"):
        yield f"lm_head_type must be replicate, lane or vocab_parallel, got {c.head!r}"
    if c.head == "vocab_parallel" and c.vocab_size % c.num_lanes:
        yield f"{c.num_lanes} lanes do not divide vocab_size {c.vocab_size}, as the vocab_parallel head needs"
    for name in ("pre_norm_lane_agg", "tie_embeddings"):
        if getattr(c, name) and c.head != "replicate":
            yield f"{name} goes with lm_head_type replicate only, got {c.head}"
    if c.pre_norm_lane_agg and c.lane_norm_scale:
        yield "pre_norm_lane_agg has one norm for all lanes, so replicated_rmsn_scale must be true"
    if c.sliding_layers and (c.sliding_window is None or c.sliding_window < 1):
        yield f"layers {list(c.sliding_layers)} slide, so sliding_window must be at least 1, got {c.sliding_window}"
    if any(layer not in range(c.num_layers) for layer in c.sliding_layers):
        yield f"sliding layers {list(c.sliding_layers)} are not all within 0..{c.num_layers - 1}"
    if c.dtype not in DTYPES:
        yield f"dtype must be one of {', '.join(DTYPES)}, got {c.dtype!r}"
    if not (c.norm_eps > 0 and math.isfinite(c.norm_eps)):
        yield f"norm_eps must be positive, got {c.norm_eps}"
    if not (c.rope_theta > 0 and math.isfinite(c.rope_theta)):
        yield f"rope_theta must be positive, got {c.rope_theta}"
    for token in (*c.eos_token_ids, *([] if c.bos_token_id is None else [c.bos_token_id])):
        if token not in range(c.vocab_size):
            yield f"special token id {token} is outside the vocabulary of {c.vocab_size}"


class _Reader:
    """One pass over the fields of a `config.json`; every getter names the field in its error."""

    def __init__(self, fields: Mapping[str, Any]):
        self.fields = fields

    def config(self) -> LaneformerConfig:
        model_type = self.fields.get("model_type")
        if model_type not in MODEL_TYPES:
            raise LaneformerError(f"model_type {model_type!r} is not a Laneformer ({' or '.join(MODEL_TYPES)})")
        for name, neutral in NEUTRAL_VALUES.items():
            if name in self.fields and self.fields[name] not in neutral:
                raise LaneformerError(f"{name} = {self.fields[name]!r} is not supported: it would change the result")
        layers = self.one_of("num_hidden_layers", kind=int)
        if layers > MAX_LAYERS:
            raise LaneformerError(f"num_hidden_layers must be at most {MAX_LAYERS}, got {layers}")
        theta, scaling = self.rope()
        window = self.one_of("sliding_window", kind=int, default=None)
        return LaneformerConfig(
            vocab_size=self.one_of("vocab_size", kind=int),
            hidden_size=self.one_of("hidden_size", kind=int),
            num_layers=layers,
            num_heads=self.one_of("num_attention_heads", kind=int),
            num_kv_heads=self.one_of("num_key_value_heads", "num_attention_heads", kind=int, first=True),
            intermediate_size=self.one_of("intermediate_size", kind=int),
            num_lanes=self.one_of("num_lanes", kind=int),
            max_position_embeddings=self.one_of("max_position_embeddings", kind=int),
            head_dim=self.one_of("head_dim", kind=int, default=0),
            delay=self.delay(),
            attention_comm=self.one_of("use_attention_comm", "use_comm", kind=bool, default=True),
            mlp_comm=self.one_of("use_mlp_comm", "use_comm", kind=bool, default=True),
            early_comm=self.one_of("use_early_comm", kind=bool, default=False),
            sliding_window=window,
            sliding_layers=self.sliding_layers(layers, window),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=self.one_of("norm_eps", "rms_norm_eps", kind=float, default=1e-5),
            head=self.one_of("lm_head_type", kind=str, default="replicate"),
            pre_norm_lane_agg=self.one_of("pre_norm_lane_agg", kind=bool, default=False),
            lane_norm_scale=not self.one_of("replicated_rmsn_scale", kind=bool, default=True),
            tie_embeddings=self.one_of("tie_word_embeddings", kind=bool, default=False),
            dtype=self.one_of("torch_dtype", "dtype", kind=str, default="float32").removeprefix("torch."),
            bos_token_id=self.one_of("bos_token_id", kind=int, default=None),
            eos_token_ids=token_ids(self.fields.get("eos_token_id"), "eos_token_id"),
        )

    def one_of(self, *names: str, kind: type, default: Any = ..., first: bool = False) -> Any:
        """The value that stands under any of `names`; under several it must be the same, unless the `first` wins."""
        found = {name: self.fields[name] for name in names if self.fields.get(name) is not None}
        if not found:
            if default is ...:
                raise LaneformerError(f"{names[0]} is missing")
            return default
        for name, value in found.items():
            whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST
            if not (whole if kind is int else isinstance(value, kind) or (kind is float and whole)):
                raise LaneformerError(f"{name} must be of type {kind.__name__}, got {value!r}")
        values = list(found.values())
        if not first and any(value != values[0] for value in values[1:]):
            raise LaneformerError(f"fields contradict each other: {found}")
        return kind(values[0])

    def delay(self) -> int:
        layers = self.one_of("broadcast_delay", kind=int, default=None)
        modules = self.one_of("broadcast_delay_modules", kind=int, default=None)
        if layers is None:
            if modules is None:
                raise LaneformerError("broadcast_delay is missing")
            return modules
        if modules not in (None, 2 * layers):
            raise LaneformerError(f"broadcast_delay {layers} (layers) and {modules} modules contradict each other")
        return 2 * layers

    def rope(self) -> tuple[float, RopeScaling | None]:
        nested = {name: self.one_of(name, kind=dict, default={}) for name in ("rope_scaling", "rope_parameters")}
        thetas = {"rope_theta": self.fields.get("rope_theta")}
        thetas |= {f"{name}.rope_theta": fields.get("rope_theta") for name, fields in nested.items()}
        theta = _Reader(thetas).one_of(*thetas, kind=float, default=10000.0)
        scalings = {name: _rope_scaling(fields) for name, fields in nested.items() if fields.keys() - {"rope_theta"}}
        scaling = next(iter(scalings.values()), None)
        if any(other != scaling for other in scalings.values()):
            raise LaneformerError(f"fields contradict each other: {nested}")
        return theta, scaling

    def sliding_layers(self, layers: int, window: int | None) -> tuple[int, ...]:
        spellings = {}
        if self.fields.get("sliding_window_n_layers") is not None:
            n = self.one_of("sliding_window_n_layers", kind=int)
            chosen = {i for i in range(layers) if (i < n if n >= 0 else i >= layers + n)}
            spellings["sliding_window_n_layers"] = chosen - self.layers("unclamped_layers")
        if self.fields.get("swa_layers") is not None:
            spellings["swa_layers"] = self.layers("swa_layers")
        if self.fields.get("layer_types") is not None:
            kinds = self.one_of("layer_types", kind=list)
            for kind in kinds:
                if kind not in ("sliding_attention", "full_attention"):
                    raise LaneformerError(f"layer_types has {kind!r}: only sliding_attention and full_attention exist")
            if len(kinds) != layers:
                raise LaneformerError(f"layer_types has {len(kinds)} entries for {layers} layers")
            spellings["layer_types"] = {i for i, kind in enumerate(kinds) if kind == "sliding_attention"}
        if any(chosen != next(iter(spellings.values())) for chosen in spellings.values()):
            raise LaneformerError(f"fields contradict each other on which layers slide: {spellings}")
        return tuple(sorted(next(iter(spellings.values()), set()))) if window is not None else ()

    def layers(self, name: str) -> set[int]:
        layers = self.one_of(name, kind=list, default=[])
        if not all(isinstance(layer, int) for layer in layers):
            raise LaneformerError(f"{name} must list numbers of layers, got {layers!r}")
        return set(layers)


def _rope_scaling(fields: Mapping[str, Any]) -> RopeScaling | None:
    kind = fields.get("rope_type", fields.get("type"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise LaneformerError(f"rope_scaling of type {kind!r} is not supported (default or llama3)")
    names = [field.name for field in dataclasses.fields(RopeScaling)]
    missing = [name for name in names if name not in fields]
    if missing:
        raise LaneformerError(f"rope_scaling lacks {', '.join(missing)}")
    return RopeScaling(**{name: fields[name] for name in names})


def token_ids(value: Any, field: str) -> tuple[int, ...]:
    """The ids under `eos_token_id`: one, a list of them, or none.

    Raises:
        LaneformerError: anything else stands there.
    """
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise LaneformerError(f"{field} must be a token id or a list of them, got {value!r}")
    return tuple(dict.fromkeys(ids))


def laneformer_2b() -> LaneformerConfig:
    """The released 2B model's shape: 2,320,069,632 parameters (design: the checkpoint).

    The window of 2,048 is what a run that inspected the published config reported. A checkpoint's own `config.json`
    always decides; this preset serves planning and benchmarks.
    """
    return LaneformerConfig(
        vocab_size=32000,
        hidden_size=3072,
        num_layers=15,
        num_heads=32,
        num_kv_heads=16,
        intermediate_size=12288,
        num_lanes=8,
        max_position_embeddings=4096,
        delay=4,
        sliding_window=2048,
        sliding_layers=tuple(range(10)),
    )


def laneformer_small() -> LaneformerConfig:
    """The embedded default model's shape: eight lanes, a delay of two layers, sliding layers, 1.8 M parameters."""
    return LaneformerConfig(
        vocab_size=1024,
        hidden_size=128,
        num_layers=6,
        num_heads=8,
        num_kv_heads=8,
        intermediate_size=512,
        num_lanes=8,
        max_position_embeddings=512,
        delay=4,
        sliding_window=128,
        sliding_layers=(0, 1, 2, 3),
    )


PRESETS = {"laneformer_2b": laneformer_2b, "laneformer_small": laneformer_small}
