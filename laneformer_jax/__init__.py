"""Laneformer in JAX and Flax: eight lanes, sums deferred past the next layers' work."""

from laneformer_jax.config import LaneformerConfig, RopeScaling, laneformer_2b, laneformer_small
from laneformer_jax.errors import LaneformerError, UsageError
from laneformer_jax.generation import Completion, Session
from laneformer_jax.language_model import LanguageModel, load
from laneformer_jax.sampling import Sampling
from laneformer_jax.schedule import Step, make_schedule

__all__ = [
    "Completion",
    "LanguageModel",
    "LaneformerConfig",
    "LaneformerError",
    "RopeScaling",
    "Sampling",
    "Session",
    "Step",
    "UsageError",
    "laneformer_2b",
    "laneformer_small",
    "load",
    "make_schedule",
]
