"""What a target can read: rows and answers that are longer are refused before any is made."""

from __future__ import annotations

from specctl.drafters.parts.spec import ModelSpec
from specctl.recipes.errors import RecipeError
from specctl.recipes.schema import Recipe


def check_context(recipe: Recipe, spec: ModelSpec) -> None:
    """The recipe's rows, and the answers that it asks for, fit into the target's context."""
    limits = [("train.seq_len", recipe.train.seq_len, spec.max_positions)]
    if recipe.data.regenerate:  # an answer stands behind one token of a prompt at least
        limits.append(("data.new_tokens", recipe.data.new_tokens, spec.max_positions - 1))
    for where, length, most in limits:
        if length > most:
            raise RecipeError(
                f"{recipe.target.name} cannot read that many tokens in a row",
                where=where,
                found=f"{length:,} tokens",
                expected=f"at most {most:,}: its context is {spec.max_positions:,} tokens",
                do=f"--set {where}={most}, or less",
            )
