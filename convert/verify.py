"""A conversion checked by running it: PyTorch on the source's weights beside JAX on the result's, in float32."""

import gc
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from convert.plan import Plan
from laneformer_jax import weights
from laneformer_jax.engine import Engine
from laneformer_jax.errors import LaneformerError
from laneformer_jax.language_model import LanguageModel

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 2, 32, 16
# Of the largest logit. Another order of float32 sums moves a logit by some 1e-6 of it, a wrong tensor by all of it.
TOLERANCE = 1e-3


class Verification:
    """Compares logits and greedy continuations of seeded prompts; made before a conversion and called after it.

    Args:
        folder: the source.
        reference: "own" for this project's PyTorch model, "hub" for the folder's own modelling code in Transformers,
            which runs its Python files.

    Raises:
        LaneformerError: a package is missing, or the folder has no modelling code.
    """

    def __init__(self, folder: Path, reference: str = "own"):
        self.folder, self.reference = folder, reference
        self.difference = self.largest = self.agreement = 0.0
        torch = _package("torch", "--verify needs PyTorch: pip install 'laneformer-jax[reference]'")
        if reference == "hub":
            if not any(folder.glob("*.py")):
                raise LaneformerError(f"{folder} carries no modelling code: use --reference own")
            _package("transformers", "--reference hub needs Transformers: pip install transformers")
        self.torch = torch

    def __call__(self, folder: Path, plan: Plan) -> None:
        """Runs both models.

        Raises:
            LaneformerError: they differ by more than rounding although no value was rounded.
        """
        tokens = min(PROMPT_TOKENS, plan.config.max_position_embeddings - NEW_TOKENS)
        if tokens < 1:
            raise LaneformerError(f"a context of {plan.config.max_position_embeddings} is too short to verify")
        ids = np.random.default_rng(0).integers(plan.config.vocab_size, size=(PROMPTS, tokens), dtype=np.int32)
        expected, expected_ids = (self._hub if self.reference == "hub" else self._own)(plan, ids)
        gc.collect()
        logits, new_ids = _result(folder, plan, ids)
        self.largest = float(np.abs(expected).max())
        self.difference = float(np.abs(logits - expected).max())
        self.agreement = float((new_ids == expected_ids).mean())
        rounded = any(not np.can_cast(item.source_dtype, item.dtype) for item in plan.items)
        if not rounded and not self.difference <= TOLERANCE * self.largest:
            raise LaneformerError(f"the result differs from the source: {self.report()}")

    def report(self) -> str:
        """One line of figures."""
        return (
            f"largest logit difference {self.difference:.2g} (largest logit {self.largest:.2g}), "
            f"greedy agreement {self.agreement:.0%} of {PROMPTS * NEW_TOKENS} tokens"
        )

    def _own(self, plan: Plan, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        from experiments import reference

        config = plan.config.replace(dtype="float32")
        model = reference.Laneformer(config)
        paths = weights.parameter_names(config)
        sources = {item.path: item for item in plan.items}
        for name, part in reference.checkpoint_tensors(model):
            item = sources[paths[name]]
            values = plan.source.read_slice(item.source, tuple(slice(0, size) for size in item.shape))
            part.copy_(self.torch.from_numpy(values.astype(np.float32)))
        prompts = self.torch.from_numpy(ids).long()
        return model(prompts).numpy(), model.generate(prompts, NEW_TOKENS)[:, -NEW_TOKENS:].numpy()

    def _hub(self, plan: Plan, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        transformers = importlib.import_module("transformers")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(self.folder), trust_remote_code=True, torch_dtype=self.torch.float32
        ).eval()
        prompts = self.torch.from_numpy(ids).long()

        def forward(tokens: Any) -> Any:
            with self.torch.inference_mode():
                return model(input_ids=tokens, use_cache=False).logits.float()

        return forward(prompts).numpy(), _greedy(self.torch, forward, prompts)


def _greedy(torch: ModuleType, forward: Callable[[Any], Any], tokens: Any) -> np.ndarray:
    for _ in range(NEW_TOKENS):
        tokens = torch.cat([tokens, forward(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
    return tokens[:, -NEW_TOKENS:].numpy()


def _result(folder: Path, plan: Plan, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    config = plan.config.replace(dtype="float32")
    source, names = weights.open_source(folder, config)
    # Without end tokens, so that all continuations are of one length.
    model = LanguageModel(Engine(weights.load(config, source, names=names)), None, ())
    completions = model.generate([row.tolist() for row in ids], max_new_tokens=NEW_TOKENS)
    return np.asarray(model.logits(ids)), np.asarray([completion.token_ids for completion in completions])


def _package(name: str, missing: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise LaneformerError(missing) from error
