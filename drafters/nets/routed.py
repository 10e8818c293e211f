"""A routed LM head: rows in groups, and a small router that picks the groups for every state.

Weight grouping of CORAL (arXiv 2502.16880): the LM head is more than half of a feature drafter's
time at a vocabulary of 128k, so its rows are split into G groups of equal size and only the `top`
groups that the router scores highest are multiplied. The distribution q is the softmax over the
rows of the picked groups and zero on all others. Picking is a deterministic function of the state,
hence of the past, so verification with that q stays lossless.

How q travels: logits of rows that were not picked are -inf, in the draft vocabulary's own order. So
the distribution of every node is a row of `QRows.prob_BTK` over the one fixed `ids_K`, with zeros
where that node's groups end; supports may differ from node to node without a union being formed.

Rows are grouped by balanced k-means over the target's LM-head rows, so that likely alternatives
stand together. The router learns the target's mass of each group, from states that it does not
move.
Letters: B rows, C candidates, D hidden width, G groups, K draft vocabulary, Q picked rows, R flat
rows, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.core.batch import LossOut
from specctl.core.errors import IntegrityError, RecipeError
from specctl.core.forward.only_shapes import has_only_shapes
from specctl.core.vocab import VocabMap
from specctl.drafters.losses.align import AlignedRows
from specctl.drafters.losses.teacher import TeacherLogits, wide
from specctl.drafters.nets.shortlist import ShortlistHead
from specctl.models.kernels import Weight, linear, prepared

PREFIX = "router."
SWEEPS = 4
ROWS_AT_ONCE = 256


class Router(nn.Module):
    """Scores of the groups, and the group of each draft row (`group_K`, stored as well)."""

    group_K: Tensor

    def __init__(self, width: int, rows: int, groups: int, top: int) -> None:
        super().__init__()
        self.top = top
        self.weight = nn.Parameter(torch.zeros(groups, width))
        spread_K = torch.arange(rows) * groups // rows
        self.register_buffer("group_K", spread_K)

    @property
    def num_groups(self) -> int:
        return self.weight.shape[0]

    def forward(self, state: Tensor) -> Tensor:
        return F.linear(state, self.weight)

    def picked(self, state: Tensor) -> Tensor:
        """[..., top]: groups whose rows are read."""
        score: Tensor = self(state)
        return score.topk(min(self.top, self.num_groups), dim=-1).indices

    @torch.no_grad()
    def arrange(self, head_KD: Tensor) -> None:
        """Group the rows of this head; the router starts at the groups' mean rows, or at zero where
        the drafter's states have another width than the head. Rows without content stay as they
        are."""
        if has_only_shapes():
            return
        self.group_K.copy_(balanced_groups(head_KD, self.num_groups))
        if head_KD.shape[1] == self.weight.shape[1]:
            self.weight.copy_(_means(head_KD.float(), self.group_K, self.num_groups))


def check_routing(groups: int | None, top: int) -> None:
    """Options head_groups and head_top make sense."""
    if groups is None or 1 <= top < groups:
        return
    raise RecipeError(
        "head_top does not pick some of the groups",
        where="drafter.options.head_top",
        found=f"{top} of {groups} groups",
        expected="at least 1, and fewer than head_groups",
        do="write head_groups: 16 and head_top: 4, or leave both out",
    )


def add_router(
    module: nn.Module, width: int, rows: int, groups: int | None, top: int
) -> Router | None:
    """Give `module` a router where the options ask for one; stored as module.router."""
    if groups is None:
        return None
    if groups > rows:
        raise RecipeError(
            "more groups than rows of the LM head",
            where="drafter.options.head_groups",
            found=f"{groups} groups for {rows:,} rows",
            expected=f"at most {rows:,}",
            do="write head_groups: 16",
        )
    router = Router(width, rows, groups, top)
    module.router = router
    return router


def balanced_groups(head_KD: Tensor, groups: int) -> Tensor:
    """[K] group numbers by k-means with equal sizes (to within one row): rows with most to lose
    choose first. Deterministic."""
    rows_KD = F.normalize(head_KD.detach().float().cpu(), dim=1)
    K = rows_KD.shape[0]
    generator = torch.Generator().manual_seed(0)
    centre_GD = rows_KD[torch.randperm(K, generator=generator)[:groups]]
    group_K = torch.zeros(K, dtype=torch.long)
    for _ in range(SWEEPS):
        near_KG = rows_KD @ F.normalize(centre_GD, dim=1).T
        group_K = _seated(near_KG)
        centre_GD = _means(rows_KD, group_K, groups)
    return group_K.to(head_KD.device)


def _seated(near_KG: Tensor) -> Tensor:
    """Each row in the nearest group that is not full."""
    K, G = near_KG.shape
    order_KG = near_KG.argsort(dim=1, descending=True)
    best_K2 = near_KG.topk(min(2, G), dim=1).values
    first = (best_K2[:, 0] - best_K2[:, -1]).argsort(descending=True).tolist()
    vacant = [K // G + (g < K % G) for g in range(G)]
    wanted, seat = order_KG.tolist(), [0] * K
    for row in first:
        group = next(g for g in wanted[row] if vacant[g])
        vacant[group] -= 1
        seat[row] = group
    return torch.tensor(seat)


def _means(rows_KD: Tensor, group_K: Tensor, groups: int) -> Tensor:
    total_GD = rows_KD.new_zeros(groups, rows_KD.shape[1]).index_add_(0, group_K, rows_KD)
    count_G = torch.bincount(group_K, minlength=groups).clamp(min=1)
    return total_GD / count_G[:, None]


def cut_router(
    module: nn.Module, options: Any, old: VocabMap | None, new: VocabMap
) -> tuple[dict[str, Tensor], Any]:
    """The module's tensors with the router cut to the ids of `new` (the LM head is the caller's),
    and options that say so: groups left empty disappear."""
    weights = dict(module.state_dict())
    name = f"{PREFIX}group_K"
    if name not in weights:
        return weights, options
    row_K = new.ids_K if old is None else old.to_draft()[new.ids_K]
    used_G, group_K = weights[name][row_K.to(weights[name].device)].unique(return_inverse=True)
    weights[name], key = group_K, f"{PREFIX}weight"
    weights[key] = weights[key][used_G].clone()
    top = min(options.head_top, max(1, used_G.numel() - 1))
    if used_G.numel() < 2:
        del weights[name], weights[key]
        return weights, replace(options, head_groups=None)
    return weights, replace(options, head_groups=used_G.numel(), head_top=top)


# -- training -----------------------------------------------------------------------------------


def with_router(
    out: LossOut,
    router: Router | None,
    state_RD: Tensor,
    aim: AlignedRows,
    vocab: VocabMap | None,
    teacher: TeacherLogits | None,
) -> LossOut:
    """`out` and the router's cross-entropy against the target's mass of each group (the label's
    group without a teacher). Metric `routed`: that mass inside the picked groups."""
    if router is None or aim.row_Q.numel() == 0:
        return out
    ids_K = None if vocab is None else vocab.ids_K
    row_V = None if vocab is None else vocab.to_draft()
    loss, caught = out.sum, torch.zeros_like(out.count)
    parts = (
        torch.split(rows, ROWS_AT_ONCE) for rows in (aim.row_Q, aim.label_Q, aim.teacher_row_Q)
    )
    for row_Q, label_Q, teacher_row_Q in zip(*parts, strict=True):
        score_QG = wide(router(state_RD[row_Q].detach().to(router.weight.dtype)))
        with torch.no_grad():
            mass_QG = torch.zeros_like(score_QG)
            if teacher is not None:
                p_QK = teacher.distribution(teacher_row_Q, ids_K).log_p_QK.exp().to(mass_QG.dtype)
                mass_QG.index_add_(1, router.group_K, p_QK)
            else:
                at_Q = label_Q if row_V is None else row_V[label_Q]
                group_Q1 = router.group_K[at_Q.clamp(min=0)][:, None]
                mass_QG.scatter_(1, group_Q1, (at_Q >= 0).to(mass_QG.dtype)[:, None])
            best_QC = score_QG.topk(min(router.top, router.num_groups), dim=-1).indices
            caught = caught + mass_QG.gather(1, best_QC).sum()
        loss = loss - (mass_QG * score_QG.log_softmax(-1)).sum()
    number = torch.full((), float(aim.row_Q.numel()), device=state_RD.device)
    metrics = {**out.metrics, "routed": (caught.detach(), number)}
    return replace(out, sum=loss, metrics=metrics)


# -- drafting -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoutedHead:
    """Inference copies: the router, each group's rows laid out for the kernels, and where they go.
    `row_GK` holds draft rows by group, short groups padded with their own first row."""

    router_GD: Tensor
    top: int
    heads: tuple[Weight, ...]
    row_GK: Tensor
    counts: tuple[int, ...]
    weight_GKD: Tensor | None
    size: int

    @classmethod
    def of(cls, router: Router, head_KD: Tensor) -> RoutedHead:
        head_KD, G = head_KD.detach(), router.num_groups
        members = [(router.group_K == g).nonzero()[:, 0] for g in range(G)]
        counts = tuple(m.numel() for m in members)
        if min(counts) == 0:
            raise IntegrityError(
                "a group of the routed LM head has no rows",
                found=f"{counts.count(0)} of {G} groups",
                expected="rows in every group",
                do="get the package again, or train again",
                where=f"{PREFIX}group_K",
            )
        longest = max(counts)
        row_GK = torch.stack([torch.cat([m, m[:1].expand(longest - m.numel())]) for m in members])
        on_cpu = head_KD.device.type == "cpu"
        heads = tuple(prepared(head_KD[m]) for m in members) if on_cpu else ()
        weight_GKD = None if on_cpu else head_KD[row_GK]
        weight_GD = router.weight.detach().to(head_KD.dtype)
        return cls(weight_GD, router.top, heads, row_GK, counts, weight_GKD, head_KD.shape[0])

    def __call__(self, state: Tensor) -> Tensor:
        """[..., K] logits, -inf outside the picked groups."""
        state_QD = state.reshape(-1, state.shape[-1])
        top = min(self.top, self.router_GD.shape[0])
        group_QC = F.linear(state_QD, self.router_GD).topk(top, dim=-1).indices
        if self.weight_GKD is None:
            logits_QK = self._by_group(state_QD, group_QC)
        else:
            logits_QK = self._gathered(state_QD, group_QC, self.weight_GKD)
        return logits_QK.view(*state.shape[:-1], self.size)

    def _by_group(self, state_QD: Tensor, group_QC: Tensor) -> Tensor:
        """On a CPU: only groups that some row picked, one product each."""
        logits_QK = state_QD.new_full((state_QD.shape[0], self.size), -torch.inf)
        if state_QD.shape[0] == 1:
            for g in group_QC[0].tolist():
                at_K = self.row_GK[g, : self.counts[g]]
                logits_QK[:, at_K] = linear(state_QD, self.heads[g])
            return logits_QK
        for g in torch.unique(group_QC).tolist():
            at_n = (group_QC == g).any(1).nonzero()[:, 0]
            at_K = self.row_GK[g, : self.counts[g]]
            logits_QK[at_n[:, None], at_K] = linear(state_QD[at_n], self.heads[g])
        return logits_QK

    def _gathered(self, state_QD: Tensor, group_QC: Tensor, weight_GKD: Tensor) -> Tensor:
        """Without reading anything back to the host: the picked rows are gathered."""
        Q = len(state_QD)
        part_QCK = torch.einsum("nd,ntrd->ntr", state_QD, weight_GKD[group_QC])
        logits_QK = state_QD.new_full((Q, self.size), -torch.inf)
        return logits_QK.scatter_(1, self.row_GK[group_QC].view(Q, -1), part_QCK.view(Q, -1))


ServedHead = Weight | RoutedHead | ShortlistHead


def served_head(weight: Tensor, options: Any, router: Router | None = None) -> ServedHead:
    """An LM head as serving reads it: by its router, or by the shortlist that a drafter's options
    name, or whole."""
    if router is not None:
        return RoutedHead.of(router, weight)
    shortlist = options.shortlist(len(weight))
    return prepared(weight) if shortlist is None else ShortlistHead.of(weight, shortlist)


def read_head(state: Tensor, head: ServedHead) -> Tensor:
    """Logits by a head of any kind."""
    return head(state) if isinstance(head, RoutedHead | ShortlistHead) else linear(state, head)
