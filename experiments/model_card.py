"""`python -m experiments.model_card DIR`: writes a trained model's card, its README.md, from its metrics and samples.

The prompts, seeds and settings are fixed here, so that nobody can pick the samples.
"""

import json
import sys
from pathlib import Path
from typing import Any

import laneformer_jax as lf

PROMPTS = (
    "def ",
    "class ",
    "import ",
    "from ",
    '"""',
    "def __init__(self",
    "    for ",
    "if __name__ ==",
    "class TestCase(",
    "def read(self, size=-1):\n",
)
SETTINGS: dict[str, Any] = {"max_new_tokens": 120, "temperature": 0.7, "top_p": 0.95}

CARD = """# Laneformer small: the embedded default model

{parameters:,} parameters in bfloat16: {config.num_layers} layers, {config.num_lanes} lanes, a delay of {delay} layers,
width {config.hidden_size}, {config.num_heads} heads, FFN {config.intermediate_size}, a vocabulary of
{config.vocab_size:,} pieces with byte fallback, context {config.max_position_embeddings}; layers
{slides[0]} to {slides[1]} see the last {config.sliding_window} tokens. It is there so
that the whole path, from a checkpoint folder to generated text, can be tried and tested without a download. It writes
things that look like Python and mean nothing. It is no coding assistant, and it has no chat template.

## Training

On the standard library of Python {python} ({corpus_files:,} files, {training_bytes:,} bytes, tests left out), less
{held_out_bytes:,} bytes of whole files that were held out by a hash of their path:

```sh
laneformer train --out runs/default_model     # JAX {jax}; every setting is a default, the seed included
```

{steps:,} steps, {tokens:,} tokens, {minutes:.0f} minutes of wall time on two cores of an AMD EPYC that were shared with
other work. Another version of Python has another standard library, so that it gives another model.

| on the held-out files | bits per byte |
| --- | --- |
| this model, float32 | {bits_per_byte:.3f} |
| this model, rounded to bfloat16 as shipped | {bits_per_byte_bfloat16:.3f} |
| gzip -9 | {gzip_bits_per_byte:.3f} |
| frequencies of single bytes | {unigram_bits_per_byte:.3f} |

All figures are from `metrics.json`, which `laneformer train` wrote.

## Ten samples, unpicked

`python -m experiments.model_card laneformer_jax/default_model` wrote this page; sample i has seed i, temperature
{settings[temperature]}, top-p {settings[top_p]}, at most {settings[max_new_tokens]} new tokens.

{samples}
## Licence

Weights and tokenizer: Apache-2.0. The training text is Python's standard library, under the PSF License.
"""


def write_card(folder: Path) -> None:
    """Writes `folder`/README.md from its `metrics.json` and from samples of the model that is there."""
    facts = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    lm = lf.load(folder)
    completions = lm.generate(PROMPTS, seed=range(len(PROMPTS)), **SETTINGS)
    samples = "".join(
        f"{i}. Prompt `{json.dumps(prompt)}`\n\n~~~python\n{prompt}{completion.text}\n~~~\n\n"
        for i, (prompt, completion) in enumerate(zip(PROMPTS, completions, strict=True))
    )
    card = CARD.format(
        config=lm.config,
        delay=lm.config.delay // 2,
        slides=(lm.config.sliding_layers[0], lm.config.sliding_layers[-1]),
        minutes=facts["seconds"] / 60,
        samples=samples,
        **{**facts, "settings": SETTINGS},
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    write_card(Path(sys.argv[1]))
