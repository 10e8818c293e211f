"""Heads: residual blocks on a target state, and rows of an LM head under a draft vocabulary.

Letters: D hidden width, K draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.core.errors import IncompatibleError, RecipeError, nearest
from specctl.core.language_model import Borrowed
from specctl.core.vocab import VocabMap


class ResBlock(nn.Module):
    """x + SiLU(Wx + b) with W and b zero at first: a fresh block is the identity (Medusa)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


def check_count(name: str, number: float, least: float = 1, most: float = 10_000) -> None:
    """A number of an option (of layers, heads or steps, mostly) is within reason."""
    if not least <= number <= most:
        raise RecipeError(
            f"{name} of a drafter is too {'small' if number < least else 'large'}",
            where=f"drafter.options.{name}",
            found=str(number),
            expected=f"{least:,} to {most:,}",
            do=f"write {name}: {least if number < least else most}",
        )


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """An option that must be one of a few words."""
    if value not in choices:
        raise RecipeError(
            f"unknown {name} {value!r}",
            where=f"drafter.options.{name}",
            found=str(value),
            expected="one of " + ", ".join(choices),
            do=f"write {name}: {nearest(str(value), choices, 1)}",
        )


def check_options(options: object, is_right: bool, names: Sequence[str], expected: str) -> None:
    """Options that have no such check of their own are in range, by themselves and together."""
    if not is_right:
        raise RecipeError(
            "options are out of range",
            where="drafter.options",
            found=", ".join(f"{name} {getattr(options, name)}" for name in names),
            expected=expected,
            do="leave them out to take the defaults",
        )


def draft_size(vocab: VocabMap | None, target_size: int) -> int:
    return target_size if vocab is None else vocab.size


def head_rows(borrowed: Borrowed, vocab: VocabMap | None) -> Tensor:
    """[K, D]: rows of the target's LM head that the draft vocabulary keeps."""
    if vocab is None:
        return borrowed.head_VD
    return borrowed.head_VD[vocab.ids_K.to(borrowed.head_VD.device)]


def fitting_rows(embedding_VD: Tensor, size: int) -> Tensor:
    """An embedding of exactly `size` rows, for a vocabulary padded otherwise than the target's:
    surplus rows are never read; missing ones are read as the last."""
    rows = embedding_VD.shape[0]
    if rows == size:
        return embedding_VD
    if rows > size:
        return embedding_VD[:size].clone()
    return torch.cat([embedding_VD, embedding_VD[-1:].expand(size - rows, -1)])


def cut_rows(weight_KD: Tensor, old: VocabMap | None, new: VocabMap) -> Tensor:
    """Rows of a draft head for a smaller vocabulary; every kept id must be speakable now."""
    if old is None:
        return weight_KD[new.ids_K.to(weight_KD.device)].clone()
    rows_K = old.to_draft()[new.ids_K.to(old.ids_K.device)]
    if bool((rows_K < 0).any()):
        raise IncompatibleError(
            "the new draft vocabulary keeps ids that the present one has already cut",
            found=f"{int((rows_K < 0).sum()):,} such ids",
            expected="a subset of the present draft vocabulary",
            do="trim from the untrimmed drafter",
        )
    return weight_KD[rows_K.to(weight_KD.device)].clone()
