"""Round: the active rows, and everything that is decided before they draft.

What is decided here follows from earlier rounds only. A length that looked at this round's drafts
would bias what is emitted (non-anticipation).

Under most rules what a sampled row emits depends on its drafts. Its draft must then be the one that
it would have alone, however much room the rows beside it have: trees are grown as deep as the
policy goes and cut to the row's own room (a chain's beginning is the shorter chain).
Letters: B rows, C candidates, N nodes, P path, T fed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specctl.core.drafter import Budget, RoundView
from specctl.core.language_model import LmOut
from specctl.core.round_rows import view_of_rows
from specctl.core.tree import DraftTree, empty_tree
from specctl.runtime.engine.request import Row
from specctl.runtime.sampling.noise import RoundNoise
from specctl.runtime.sampling.sampling import SamplingBatch


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The budget of a round's trees, and the length of every row where a batch policy decides.
    `estimates`: somebody wants to know how likely each drafted token is."""

    budget: Budget
    lengths: tuple[int, ...] | None = None
    estimates: bool = False

    def drafts(self, b: int) -> bool:
        """Whether row b drafts at all."""
        return self.budget.depth > 0 and (self.lengths is None or self.lengths[b] > 0)

    def cut(self, tree: DraftTree) -> DraftTree:
        """The tree without what lies beyond its row's own length."""
        if self.lengths is None:
            return tree
        return tree.within(torch.tensor(self.lengths, device=tree.token_BN.device))

    def of_rows(self, at: Sequence[int]) -> RoundPlan:
        """The plan of some rows only."""
        lengths = self.lengths
        return replace(self, lengths=None if lengths is None else tuple(lengths[b] for b in at))


@dataclass(frozen=True, slots=True)
class Round:
    """The rows, what drafter and policies see of them, their sampling settings, the random numbers
    of this round, and how much each row may draft. `began`: when, on time.perf_counter. `roots`:
    the logits at the roots, where the prefill has read them already."""

    rows: tuple[Row, ...]
    view: RoundView
    sampling: SamplingBatch
    noise: RoundNoise
    plan: RoundPlan
    began: float = 0.0
    roots: LmOut | None = None

    def of_rows(self, at: Sequence[int]) -> Round:
        """The round of some rows only, as if the others were not there."""
        if len(at) == len(self.rows):
            return self
        rows, device = tuple(self.rows[b] for b in at), self.view.slot_B.device
        settings, is_mixed = [row.request.sampling for row in rows], not self.sampling.all_greedy
        sampling = SamplingBatch(settings, self.sampling.vocab_size, device, is_mixed)
        sampling.inherit(self.sampling)
        return replace(
            self,
            rows=rows,
            view=view_of_rows(self.view, at, torch.tensor(at, device=device)),
            sampling=sampling,
            noise=noise_of(rows, device),
            plan=self.plan.of_rows(at),
        )


def view_of(rows: Sequence[Row], device: torch.device) -> RoundView:
    """What drafter and policies see of these rows."""
    slots, texts = tuple(row.slot for row in rows), tuple(row.tokens for row in rows)
    host = [slots, [text[-1] for text in texts], [row.kept_len for row in rows]]
    slot_B, root_B, kept_len_B = torch.tensor(host, device=device).unbind()
    lens, wanted = tuple(row.prompt_len for row in rows), [row.request.drafts for row in rows]
    chosen = tuple(name if isinstance(name, str) else None for name in wanted)
    chosen = chosen if any(chosen) else ()
    return RoundView(slots, slot_B, root_B, kept_len_B, texts, lens, chosen=chosen)


def noise_of(rows: Sequence[Row], device: torch.device) -> RoundNoise:
    """The random numbers of these rows' coming round."""
    return RoundNoise(
        [row.request.sampling.seed for row in rows],
        [row.num_rounds for row in rows],
        [row.kept_len for row in rows],
        device,
    )


def scatter_rows(tree: DraftTree, at: Sequence[int], num_rows: int) -> DraftTree:
    """The tree of the rows `at` as one of all rows; the others have no node of it."""
    if len(at) == num_rows:
        return tree
    device = tree.token_BN.device
    if not tree.num_nodes:
        return empty_tree(num_rows, device)
    source = {b: i for i, b in enumerate(at)}
    at_B = torch.tensor([source.get(b, 0) for b in range(num_rows)], device=device)
    drafts_B1 = torch.tensor([b in source for b in range(num_rows)], device=device)[:, None]
    tree = tree.of_rows(at_B)
    return replace(tree, valid_BN=tree.valid_BN & drafts_B1)
