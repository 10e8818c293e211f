"""What a proof asks a pair with: short texts; and the logits that lie behind the engine's cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Row
from specctl.runtime.proof.reference_checks import target_distribution
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

TEXTS = (
    "def main():\n    ",
    "The capital of France is",
    "import os\nimport sys\n\n",
    "Once upon a time there was",
    "1, 2, 3, 4, 5,",
    "class Node:\n    def __init__(self, value):\n        self.value = value\n",
    "In order to understand this, we first have to",
    "if x > 0:\n    return x\nelse:\n    return",
)


def proof_prompts(
    target: Target, prompts: Sequence[str | Sequence[int]] | None, count: int
) -> Iterator[list[int]]:
    """Given prompts as ids, else short built-in texts (random ids without a tokenizer)."""
    longest = max(1, target.spec.max_positions // 4)
    if prompts is not None:
        for prompt in prompts:
            ids = target.encode(prompt) if isinstance(prompt, str) else list(prompt)
            yield ids[-longest:]
        return
    rng = np.random.default_rng(0)
    for i in range(count):
        if target.tokenizer is not None and i < len(TEXTS):
            yield target.encode(TEXTS[i])[-longest:]
        else:
            size = int(rng.integers(1, min(longest, 24) + 1))
            yield rng.integers(0, target.spec.vocab_size, size).tolist()


def open_prompt(
    target: Target, prompts: Sequence[tuple[int, ...]], sampling: Sampling, size: int = 8
) -> tuple[int, ...]:
    """The beginning of that prompt after which most is open: a distribution of one likely token
    would hide what is wrong with the others."""
    starts = [prompt[:size] for prompt in prompts]
    distributions = [target_distribution(target, [start], sampling)[0] for start in starts]
    entropy = [float(torch.special.entr(distribution_V).sum()) for distribution_V in distributions]
    return starts[entropy.index(max(entropy))]


@torch.inference_mode()
def cached_logits(engine: Engine, row: Row) -> torch.Tensor:
    """Logits after a row's last token, read through the engine's cache. The entry it writes lies
    where the next round writes anyway."""
    cache, device = engine.reader.kv, engine.target.device
    slot_B = torch.tensor([row.slot], device=device)
    kept_B = torch.tensor([row.kept_len], device=device)
    cache.begin((row.slot,), slot_B, kept_B, 1, row.kept_len + 1)
    masks = engine.target.lm.chain_masks(kept_B, 1, row.kept_len + 1)
    ids_BT = torch.tensor([[row.tokens[-1]]], device=device)
    out = engine.target.lm.forward(ids_BT, kept_B[:, None], masks, cache)
    assert out.logits_BTV is not None
    return out.logits_BTV[0, 0].float()
