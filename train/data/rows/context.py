"""What a target can read: rows and answers that are longer are refused before any is made."""

from __future__ import annotations

from collections.abc import Sequence

from specctl.core.errors import RecipeError
from specctl.core.spec import ModelSpec
from specctl.recipes.schema import DataPart
from specctl.runtime.target.target import Target

LEAST_PROMPT = 2  # tokens of a prompt; an answer stands behind them


def check_ids(ids: Sequence[int], target: Target) -> None:
    """ValueError for a text with a token that the target lacks: a tokenizer may have more."""
    top = max(ids, default=0)
    if top >= target.spec.vocab_size:
        raise ValueError(f"the text spells token {top:,}, which the target lacks")


def check_context(name: str, data: DataPart, seq_len: int | None, spec: ModelSpec) -> None:
    """Rows of that length (None: none are made) and answers fit into the context of the target of
    that name."""
    limits = [] if seq_len is None else [("train.seq_len", seq_len, spec.max_positions)]
    if data.regenerate:
        most = spec.max_positions - LEAST_PROMPT
        limits.append(("data.new_tokens", data.new_tokens, most))
    for where, length, most in limits:
        if length > most:
            raise RecipeError(
                f"{name} cannot read that many tokens in a row",
                where=where,
                found=f"{length:,} tokens",
                expected=f"at most {most:,}: its context is {spec.max_positions:,} tokens",
                do=f"--set {where}={most}, or less; or --time 40m (train-draft, distill, plan), "
                "which derives sizes that this target can read",
            )
