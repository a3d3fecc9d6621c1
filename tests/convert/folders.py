"""Model folders to convert, made without the package's writers."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import toy
from safetensors.numpy import save_file

from laneformer_jax import weights

CONFIG = toy.BASE.replace(num_layers=1)
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def values(config=CONFIG, dtype="float32"):
    """The toy model's weights by their published names."""
    return {name: value.astype(DTYPES[dtype]) for name, value in toy.named_weights(config).items()}


def any_bits(dtype, config=CONFIG):
    """Weights of every bit pattern: NaNs with payloads, infinities, subnormals, both zeros; "mixed" takes turns."""
    shapes = {name: value.shape for name, value in toy.named_weights(config).items()}
    rng, made = np.random.default_rng(5), {}
    for i, (name, shape) in enumerate(shapes.items()):
        kind = np.dtype(DTYPES[list(DTYPES)[i % 3] if dtype == "mixed" else dtype])
        bits = rng.integers(0, 256, (*shape[:-1], shape[-1] * kind.itemsize), dtype=np.uint8)
        made[name] = bits.view(kind)
        made[name].flat[:2] = 0.0, -0.0
    made["model.tok_embeddings.weight"][:8] = -0.0  # on the disk, one part that is nothing else
    made["model.tok_embeddings.weight"][8:16] = 0.0
    return made


def write(folder, tensors=None, config=CONFIG, shards=1, **fields):
    """A Hugging Face folder; with several shards, one in a cache beside it as the hub's client leaves it."""
    folder.mkdir(parents=True)
    tensors = values(config) if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps(config.to_dict() | fields))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    shard_of = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(tensors)}
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for shard in set(shard_of.values()):
        save_file({name: tensors[name] for name in tensors if shard_of[name] == shard}, blobs / shard)
        (folder / shard).symlink_to(Path("..") / "blobs" / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
    return folder


def leaves(config=CONFIG, dtype="float32"):
    """The toy weights as the tree of nested dicts that Orbax stores."""
    tree = {}
    named = values(config, dtype)
    for name, path in weights.parameter_names(config).items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(str(key), {})
        node[path[-1]] = named[name]
    return tree
