"""Where a conversion reads from: a folder, or a repository of the Hugging Face hub."""

import hashlib
import importlib
import re
from dataclasses import dataclass
from pathlib import Path

from laneformer_jax.errors import LaneformerError, UsageError
from laneformer_jax.safetensors_io import INDEX_FILE, SINGLE_FILE, SafetensorsFolder
from laneformer_jax.weights import ORBAX_FOLDER, TensorSource

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# What goes with the weights, unchanged. Python files are the published modelling code, which is never run from here.
CARRIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "README.md",
    "metrics.json",
    "LICENSE*",
    "NOTICE*",
    "*.py",
)
WEIGHTS = (SINGLE_FILE, INDEX_FILE, "*.safetensors", f"{ORBAX_FOLDER}/*")


@dataclass(frozen=True)
class Source:
    """A model folder on this machine, and where it came from.

    Attributes:
        origin: for the manifest: the folder's name, or the hub's id and revision.
    """

    folder: Path
    origin: dict[str, str]

    def carried(self) -> list[Path]:
        """Its files that go with the weights."""
        found = {path for pattern in CARRIED for path in self.folder.glob(pattern) if path.is_file()}
        return sorted(found)

    def files(self, weights: TensorSource) -> list[Path]:
        """Every file that a conversion of `weights` reads, the carried ones included."""
        if isinstance(weights, SafetensorsFolder):
            index = self.folder / INDEX_FILE
            read = [file.path for file in weights.files] + ([index] if index.is_file() else [])
        else:
            read = [path for path in (self.folder / ORBAX_FOLDER).rglob("*") if path.is_file()]
        return sorted({*read, *self.carried()})


def find_source(source: str, revision: str | None) -> Source:
    """The folder `source`, or the hub's repository of that id, downloaded unless it is in the cache.

    Args:
        source: a folder, or "owner/name" where there is no such folder.
        revision: of the repository: a branch, tag or commit; the main branch by default.

    Raises:
        UsageError: a revision of a folder.
        LaneformerError: there is no such folder, or the hub cannot be reached or lacks it.
    """
    folder = Path(source)
    if folder.is_dir():
        if revision is not None:
            raise UsageError(f"--revision goes with an id of the hub, but {source} is a folder")
        return Source(folder.resolve(), {"folder": folder.resolve().name})
    if folder.exists() or not HUB_ID.fullmatch(source):
        raise LaneformerError(f"{source} is neither a model folder nor an id of the hub, as in kogai/laneformer-2b-it")
    return _download(source, revision)


def sha256(path: Path) -> str:
    """The hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(name: str, revision: str | None) -> Source:
    try:
        hub = importlib.import_module("huggingface_hub")
    except ModuleNotFoundError as error:
        raise LaneformerError(
            f"there is no folder {name}; to download it from the hub: pip install 'laneformer-jax[hub]'"
        ) from error
    try:
        folder = Path(hub.snapshot_download(name, revision=revision, allow_patterns=[*CARRIED, *WEIGHTS]))
    except Exception as error:  # of the hub's, its HTTP client's and the system's many kinds
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise LaneformerError(
            f"there is no folder {name}, and the hub does not give it ({reason}): check the id, the revision and the "
            "connection, or download it elsewhere and name its folder"
        ) from error
    # The cache keeps a snapshot under the commit that a branch or tag stands for.
    return Source(folder, {"hub": name, "revision": folder.name})
