"""The golden checkpoints: seeded models with their published forward pass's float64 results (see golden/README.md)."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

FOLDER = Path(__file__).parent / "golden"
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
PROMPT_TOKENS, NEW_TOKENS = 21, 24


class Golden(NamedTuple):
    input_ids: np.ndarray  # [2, 21]
    logits: np.ndarray  # [2, 21, V]
    greedy: np.ndarray  # [2, 45]


def expected(name: str) -> Golden:
    with np.load(FOLDER / name / "expected.npz") as arrays:
        return Golden(arrays["input_ids"], arrays["logits"], arrays["greedy"])
