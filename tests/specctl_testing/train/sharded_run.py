"""A whole run on a random target, for test_sharding.py: in one process, or in several."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specctl.core.drafter import Drafter
from specctl.recipes.load import load_recipe
from specctl.runtime.target.target import Target
from specctl.train.distributed.sharding import sharded_layers
from specctl.train.pretrain.data import train_tokenizer
from specctl.train.run import train_draft


def random_target(text: str) -> Target:
    """A random model of three layers behind a tokenizer trained on the text."""
    tokenizer = train_tokenizer([text], 300, 256)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, intermediate_size=32, max_position_embeddings=128,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return Target.from_model(LlamaForCausalLM(config), tokenizer)


def run(out: Path, text: Path, sets: list[str]) -> None:
    """Train; leave how many layers of the target were spread, and what was handed over."""

    def package(drafter: Drafter, target: Target, folder: Path, acceptance: object) -> None:
        layers = sharded_layers(target)
        shapes = {name: list(tensor.shape) for name, tensor in drafter.tensors().items()}
        kinds = sorted({type(tensor).__name__ for tensor in drafter.tensors().values()})
        report = {"layers": len(layers), "shapes": shapes, "kinds": kinds}
        (out / "report.json").write_text(json.dumps(report))

    recipe = load_recipe("eagle3", sets=[f"data.source={text}", *sets])
    train_draft(recipe, out, target=random_target(text.read_text()), package=package)
