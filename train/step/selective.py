"""AdaSPEC: spend a small drafter on the tokens it can still learn (arXiv 2510.19779, section 3).

A *reference*, the same drafter distilled as usual, shows what a model of that size can reach. Where
the drafter is further from the target than the reference, gap = KL(p || q) - KL(p || q_ref), there
is something to gain; where both are equally far off, the token is beyond them. Of every batch (of
one process) the tokens with a gap at or above its quantile 1 - share are learned. Ablations: the
lowest, or any. Works with every family whose losses go through `head_loss`. N rows of one loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specctl.core.batch import Select, TrainBatch
from specctl.core.drafter import Drafter
from specctl.core.errors import IncompatibleError, RecipeError
from specctl.recipes.schema import TrainPart

COMPARING = ("highest", "lowest")


class Selection:
    """Puts into a batch which of its tokens shall be learned. Reads the reference beforehand, loss
    by loss, in the order in which the drafter's own losses come."""

    def __init__(self, rule: str, share: float, seed: int, reference: Drafter | None) -> None:
        self.rule, self.share, self.seed, self.reference = rule, share, seed, reference

    def __call__(self, batch: TrainBatch, rows: Sequence[int]) -> TrainBatch:
        if self.rule == "random":
            return replace(batch, select=self._at_random(rows))
        references = iter(self._reference_kl(batch))

        def select(kl_N: Tensor) -> Tensor:
            return chosen(kl_N - next(references), self.share, self.rule == "highest")

        return replace(batch, select=select)

    def _reference_kl(self, batch: TrainBatch) -> list[Tensor]:
        """KL(p || q_ref) of the rows of each of the losses."""
        found: list[Tensor] = []

        def note(kl_N: Tensor) -> Tensor:
            found.append(kl_N)
            return torch.zeros_like(kl_N, dtype=torch.bool)  # nothing is left to be summed

        assert self.reference is not None, "highest and lowest compare with a reference"
        with torch.no_grad():
            self.reference.loss(replace(batch, select=note))
        return found

    def _at_random(self, rows: Sequence[int]) -> Select:
        """As many tokens, whichever; the same ones when a resumed run reads those rows again."""
        source = torch.Generator().manual_seed(hash((self.seed, *rows)) % 2**63)

        def select(kl_N: Tensor) -> Tensor:
            return chosen(torch.rand(len(kl_N), generator=source).to(kl_N.device), self.share, True)

        return select


def chosen(gap_N: Tensor, share: float, is_highest: bool) -> Tensor:
    """Bool [N]: the `share` with the highest or lowest gaps, and ties with the last of them."""
    count = round(share * len(gap_N))
    if count == 0:
        return torch.zeros_like(gap_N, dtype=torch.bool)
    order_N = gap_N if is_highest else -gap_N
    return order_N >= order_N.topk(count).values[-1]


def reference_part(train: TrainPart) -> TrainPart | None:
    """How the reference is trained, if one is to be trained first: the same drafter from the same
    first weights on the same rows, every token learned."""
    if train.select not in COMPARING or train.reference is not None:
        return None
    steps = train.reference_steps or train.steps
    plain = {"select": "none", "reference_steps": None, "steps": steps, "tau_suite": None}
    return train.model_copy(update=plain)


def selection_of(train: TrainPart, drafter: Drafter, reference: Drafter | None) -> Selection | None:
    """What the recipe selects; None for every token."""
    if train.select == "none":
        return None
    if drafter.needs().teacher:
        if reference is not None:
            check_reference(reference, drafter, train.reference or "OUT/reference")
        return Selection(train.select, train.select_share, train.seed, reference)
    raise RecipeError(
        "tokens are selected by how far the drafter is off the target, and this loss ignores it",
        found=f"train.select: {train.select}, loss ce",
        expected="a loss that reads the target: kl, rkl, jsd, tv, lk_alpha, lk_hybrid",
        do="--set drafter.options.loss=kl",
        where="train.select",
    )


def check_reference(reference: Drafter, drafter: Drafter, name: str) -> None:
    """Refuse a reference whose losses would not line up with the drafter's."""

    def described(of: Drafter) -> str:
        return f"{of.family}, {of.vocab.size if of.vocab else of.spec.vocab_size:,} ids"

    ours, theirs = (None if d.vocab is None else d.vocab.digest() for d in (drafter, reference))
    if reference.family != drafter.family or ours != theirs:
        raise IncompatibleError(
            "the reference does not speak of the same tokens as the drafter",
            found=f"{name}: {described(reference)}",
            expected=f"{described(drafter)}, the same ids",
            do="leave train.reference out to have one trained first",
            where="train.reference",
        )
