"""Whole training runs on a random target, small enough to be repeated and stopped.

Loaded by path (tests are no package).
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import specctl.recipes
from specctl.core.batch import TrainBatch
from specctl.core.drafter import Drafter
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import Recipe
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.target.target import Target
from specctl.train.run import RunResult, train_draft

__all__ = [
    "Ran",
    "Talk",
    "parts",
    "random_target",
    "replace",
    "run",
    "small_recipe",
    "stopped_before",
]

SMALL = {
    "data.text_tokens": 0, "data.prompts": 24, "data.new_tokens": 16, "data.prompt_tokens": 8,
    "train.steps": 8, "train.rows": 4, "train.seq_len": 32, "train.save_every": 3,
    "train.tau_every": 100, "train.tau_prompts": 2, "train.tau_tokens": 6, "train.log_every": 2,
    "vocab.size": "null", "drafter.init": "null", "drafter.options": "{}", "target.dtype": "auto",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ran:
    """What a run left: its result, a digest of the packaged weights, what it said and warned of."""

    result: RunResult
    digest: str
    said: list[str]
    warned: list[str]


class Talk(SilentReporter):
    """Keeps what was said."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def words(folder: Path) -> Path:
    path = folder / "words.txt"
    lines = [f"def name_{i}(value):\n    return value + {i} * {i % 7}\n" for i in range(200)]
    path.write_text("\n\n".join(lines))
    return path


def random_target(seed: int) -> Target:
    """Random weights behind the embedded tokenizer."""
    folder = Path(specctl.recipes.__path__[0]) / "tiny"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, intermediate_size=32, max_position_embeddings=128,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return Target.from_model(LlamaForCausalLM(config), tokenizer)


def small_recipe(name: str, text: Path, **sets: Any) -> Recipe:
    fields = SMALL | {"data.source": str(text), "data.format": "text"}
    fields |= {key.replace("__", "."): value for key, value in sets.items()}
    return load_recipe(name, sets=[f"{key}={value}" for key, value in fields.items()])


def run(recipe: Recipe, out: Path, target: Target, **fields: Any) -> Ran:
    talk, digests = Talk(), [""]

    def package(
        drafter: Drafter, target: Target, out: Path, acceptance: Mapping[str, Any] | None
    ) -> None:
        digests.append(digest(drafter.tensors()))

    result = train_draft(recipe, out, target=target, package=package, reporter=talk, **fields)
    return Ran(result, digests[-1], talk.said, talk.warnings)


def digest(tensors: Mapping[str, Tensor]) -> str:
    body = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        body.update(name.encode() + tensor.detach().contiguous().view(-1).numpy().tobytes())
    return body.hexdigest()


def parts(batch: TrainBatch) -> tuple[Tensor, ...]:
    return batch.ids_BS, batch.loss_mask_BS, batch.document_BS, batch.position_BS


@contextmanager
def stopped_before(target: Target, step: int) -> Iterator[None]:
    """Ctrl-C while the target reads its `step`-th batch, so that as many steps are saved."""
    dense, calls = target.lm.dense, [0]

    def stopping(*args: Any, **fields: Any) -> Any:
        calls[0] += 1
        if calls[0] == step:
            os.kill(os.getpid(), signal.SIGINT)
        return dense(*args, **fields)

    target.lm.dense = stopping  # type: ignore[method-assign]
    try:
        yield
    finally:
        del target.lm.dense
