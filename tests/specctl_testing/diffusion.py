"""A tiny random masked diffusion model in memory, of either layout, and its folder."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from specctl.diffusion.folder import DiffusionTarget, save_diffusion
from specctl.diffusion.model import MaskedLM
from specctl.diffusion.shape import DiffusionShape
from specctl.recipes.targets import resolve

VOCAB, MASK, EOS = 40, 39, 1


def tiny_shape(
    layout: str, vocab: int = VOCAB, mask: int = MASK, tied: bool = False
) -> DiffusionShape:
    return DiffusionShape(
        layout=layout,
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=48,
        vocab_size=vocab,
        mask_id=mask,
        max_positions=128,
        tied=tied,
        attention_bias=layout == "dream",
    )


def tiny_masked(layout: str, seed: int = 0, **sizes: int) -> MaskedLM:
    """Random weights that depend on the text around a mask; float64, so that no two tokens are
    nearly as likely as each other by rounding."""
    torch.manual_seed(seed)
    model = MaskedLM(tiny_shape(layout, **sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(("norm.weight", "layernorm.weight")):
                parameter.normal_(std=0.4)
    return model.double().eval().requires_grad_(False)


@cache
def tiny_target(layout: str = "dream", seed: int = 0) -> DiffusionTarget:
    return DiffusionTarget("tiny-random", tiny_masked(layout, seed), None, (EOS,), Path())


def tiny_folder(folder: Path, layout: str = "dream") -> Path:
    """The same with the tokenizer of the embedded target, as a folder."""
    from specctl.train.pretrain.data import load_tokenizer

    path = resolve("tiny").path
    assert path is not None
    tokenizer = load_tokenizer(path)
    model = tiny_masked(layout, vocab=len(tokenizer) + 8, mask=len(tokenizer))
    save_diffusion(folder, model, tokenizer, [1])
    return folder
