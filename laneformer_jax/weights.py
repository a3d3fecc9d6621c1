"""Checkpoint tensors to model parameters: one table of names, applied to an abstract model in both directions."""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import LaneformerError
from laneformer_jax.model import Laneformer
from laneformer_jax.safetensors_io import INDEX_FILE, SINGLE_FILE, SafetensorsFolder, SafetensorsWriter

LOG = logging.getLogger(__name__)
ParameterPath = tuple[str | int, ...]
Names = dict[str, ParameterPath]  # of a source's tensors, each with the path of its parameter in the model
Place = Callable[[nnx.Variable, Callable[[tuple[slice, ...]], np.ndarray]], jax.Array]

ORBAX_FOLDER = "orbax"  # of a converted folder


class TensorInfo(Protocol):
    """What a source says of a tensor before any of it is read."""

    @property
    def dtype(self) -> np.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class TensorSource(Protocol):
    """Named tensors in storage, of which any part can be read on its own."""

    @property
    def entries(self) -> Mapping[str, TensorInfo]: ...
    def read_slice(self, name: str, index: tuple[slice, ...], /) -> np.ndarray: ...


# Tensor name in the published checkpoint -> path in the model. `{i}` runs over layers; {norm} and {head} depend on the
# config. No tensor is transposed or split: the model keeps the checkpoint's layout.
TABLE: dict[str, str] = {
    "model.tok_embeddings.weight": "embedding",
    "model.layers.{i}.attention_norm.{norm}": "blocks.{i}.attention_norm.scale",
    "model.layers.{i}.attention.wq.weight": "blocks.{i}.attention.wq.weight",
    "model.layers.{i}.attention.wk.weight": "blocks.{i}.attention.wk.weight",
    "model.layers.{i}.attention.wv.weight": "blocks.{i}.attention.wv.weight",
    "model.layers.{i}.attention.wo.weight": "blocks.{i}.attention.wo.weight",
    "model.layers.{i}.ffn_norm.{norm}": "blocks.{i}.mlp_norm.scale",
    "model.layers.{i}.feed_forward.w1.weight": "blocks.{i}.mlp.w1.weight",
    "model.layers.{i}.feed_forward.w2.weight": "blocks.{i}.mlp.w2.weight",
    "model.layers.{i}.feed_forward.w3.weight": "blocks.{i}.mlp.w3.weight",
    "model.norm.{norm}": "head.norm.scale",
    "lm_head.{head}": "head.weight",
}
# Buffers that some exporters save although they follow from the config.
DERIVED_SUFFIXES = ("inv_freq", "rope.freqs", "freqs_cis", "cos_cached", "sin_cached")
FLOATS = {"float64", "float32", "float16", "bfloat16"}


def parameter_names(config: LaneformerConfig) -> Names:
    """Every tensor name that a checkpoint of `config` must hold, with the path of its parameter in the model."""
    norm = "scale" if config.lane_norm_scale else "weight"
    head = "linear.weight" if config.head == "lane" else "weight"

    def expand() -> Iterator[tuple[str, ParameterPath]]:
        for source, target in TABLE.items():
            if target == "head.weight" and config.tie_embeddings:
                continue
            for i in range(config.num_layers) if "{i}" in source else (0,):
                path = target.format(i=i).split(".")
                yield source.format(i=i, norm=norm, head=head), tuple(int(p) if p.isdigit() else p for p in path)

    return dict(expand())


def leaf_names(config: LaneformerConfig) -> Names:
    """The parameters' names in a converted folder: their paths in the model, joined by dots."""
    return {".".join(map(str, path)): path for path in parameter_names(config).values()}


def open_source(folder: Path, config: LaneformerConfig) -> tuple[TensorSource, Names]:
    """The weights of a model folder, safetensors or converted, and the names that they go by there.

    Raises:
        LaneformerError: there are none or both, or they are unusable.
    """
    if not os.path.lexists(folder / ORBAX_FOLDER):
        return SafetensorsFolder.open(folder), parameter_names(config)
    if any(os.path.lexists(folder / name) for name in (SINGLE_FILE, INDEX_FILE)):
        raise LaneformerError(f"{folder} has both safetensors and {ORBAX_FOLDER}/: remove the one that is not meant")
    from laneformer_jax.orbax_io import OrbaxFolder

    return OrbaxFolder.open(folder / ORBAX_FOLDER), leaf_names(config)


def abstract_model(config: LaneformerConfig, dtype: jnp.dtype | str | None = None) -> Laneformer:
    """The model with shapes and dtypes in place of arrays; nothing is computed or allocated."""
    return nnx.eval_shape(lambda: Laneformer(config, dtype=jnp.dtype(dtype or config.dtype), rngs=nnx.Rngs(0)))


def parameter_count(config: LaneformerConfig) -> int:
    """Number of parameters of a model of `config`."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract_model(config))))


def check_names(config: LaneformerConfig, source: TensorSource, names: Names) -> list[str]:
    """Names of derived tensors that will be skipped, once every other one matches its parameter.

    Raises:
        LaneformerError: tensors are missing, unexpected, or of a wrong shape or kind; all of them are listed.
    """
    shapes = {path: leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(abstract_model(config)))}
    skipped = [name for name in source.entries if name not in names and name.endswith(DERIVED_SUFFIXES)]
    if config.tie_embeddings:
        skipped += [name for name in ("lm_head.weight", "head.weight") if name in source.entries]
    problems = [f"{name} is missing" for name in names if name not in source.entries]
    problems += [f"{name} is unexpected" for name in source.entries if name not in names and name not in skipped]
    for name, path in names.items():
        entry = source.entries.get(name)
        if entry is not None and tuple(entry.shape) != tuple(shapes[path]):
            problems.append(f"{name} has shape {list(entry.shape)}, the config asks for {list(shapes[path])}")
        elif entry is not None and entry.dtype.name not in FLOATS:
            problems.append(f"{name} has dtype {entry.dtype.name}, which is not a float type of weights")
    _raise_all(problems)
    return skipped


def place_on_default_device(variable: nnx.Variable, read: Callable[[tuple[slice, ...]], np.ndarray]) -> jax.Array:
    """The whole tensor as one array on the default device, in the dtype of `variable`."""
    return jnp.asarray(read((slice(None),) * len(variable.shape)), dtype=variable.dtype)


def load(
    config: LaneformerConfig,
    source: TensorSource,
    dtype: jnp.dtype | str | None = None,
    place: Place = place_on_default_device,
    names: Names | None = None,
) -> Laneformer:
    """The model of a checkpoint folder, every parameter read once into its place.

    Args:
        config: of the folder.
        source: its tensors.
        dtype: of the parameters; the config's by default.
        place: makes the array of one parameter from a reader of its slices.
        names: of the tensors in the source; those of the published checkpoint by default.

    Raises:
        LaneformerError: as `check_names`, or values are not finite in `dtype`; all such tensors are listed.
    """
    names = parameter_names(config) if names is None else names
    skipped = check_names(config, source, names)
    if skipped:
        LOG.warning("skipped %d tensor(s) that follow from the config: %s", len(skipped), ", ".join(skipped))
    model = abstract_model(config, dtype)
    graph, state = nnx.split(model)
    abstract = dict(nnx.to_flat_state(state))
    loaded, problems = {}, []
    for name, path in names.items():
        variable = abstract[path]

        def read(index: tuple[slice, ...], name: str = name, dtype: np.dtype = variable.dtype) -> np.ndarray:
            return narrowed(source.read_slice(name, index), dtype)

        array = place(variable, read)
        loaded[path] = variable.replace(array)
        if not bool(_finite(array)):
            problems.append(f"{name} has values that are not finite in {array.dtype.name}")
    _raise_all(problems)
    return nnx.merge(graph, nnx.from_flat_state(loaded))


@jax.jit
def _finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()


def narrowed(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array in `dtype`, rounded to nearest even; overflow gives infinity without a warning."""
    with np.errstate(over="ignore"):
        return array if array.dtype == dtype else array.astype(dtype)


def save_folder(model: Laneformer, folder: Path, dtype: str | None = None) -> None:
    """Writes `config.json` and `model.safetensors` as the published checkpoint names them.

    Args:
        model: with concrete parameters.
        folder: made if it is not there.
        dtype: of the tensors written; the parameters' own by default.

    Raises:
        LaneformerError: values are not finite in `dtype`; all such tensors are listed, and no weights are written.
    """
    flat = dict(nnx.to_flat_state(nnx.state(model)))
    config = model.config.replace(dtype=dtype or model.embedding.dtype.name)
    target = np.dtype(getattr(ml_dtypes, config.dtype, config.dtype))
    folder.mkdir(parents=True, exist_ok=True)
    names, problems = parameter_names(config), []
    plan = {name: (target, tuple(flat[path].shape)) for name, path in names.items()}
    with SafetensorsWriter(folder / "model.safetensors", plan, {"format": "pt"}) as writer:
        for name, path in names.items():
            array = narrowed(np.asarray(flat[path][...]), target)
            writer.write(name, array)
            if not np.isfinite(array).all():
                problems.append(f"{name} has values that are not finite in {target.name}")
        _raise_all(problems)
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")


def _raise_all(problems: list[str]) -> None:
    if problems:
        raise LaneformerError(f"{len(problems)} problem(s) with the weights: " + "; ".join(problems))
