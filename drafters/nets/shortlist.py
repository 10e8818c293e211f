"""A cheap LM head for large vocabularies: low-rank scores choose C rows, which alone are read.

Of the head W [K, D] the best approximation of rank r is its truncated singular value decomposition
(Eckart and Young, 1936). With V_r the r leading eigenvectors of W^T W, which is only D x D,

    W ~ (W V_r) V_r^T,    rough scores s = (W V_r) (V_r^T h),    r (K + D) products, not K D.

The same number added to every logit changes no distribution, so W is taken minus its mean row
first, which W V_r then need not spend a direction on. As errors of frequent tokens cost more, row k
weighs 1 / (k + smoothing) in that sum and mean: ids of byte-pair tokenizers are in the order of
their merges, and so roughly that of frequency (Zipf's law).

Of the C best rows by s the logits are those of W itself, all others are -inf. Hence q is the
softmax over exactly these C tokens, at any temperature, and that q is what a policy draws from and
reports: verification stays exact. Which rows they are follows from the state alone, hence from the
past.
Letters: C candidates, D hidden width, K draft vocabulary, O output width (the rank), Q picked rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from specctl.core.drafter import Drafter
from specctl.core.errors import RecipeError
from specctl.models.kernels import Weight, linear, prepared
from specctl.models.weights.copies import Copies

MOST_GATHERED = 2**24  # numbers of gathered rows alive at once
ROWS_AT_ONCE = 8192
CANDIDATES, SMOOTHING = 256, 100.0  # where the options name a rank alone


@dataclass(frozen=True, slots=True)
class Shortlist:
    """`rank` of the rough scores, and how many rows they choose. `smoothing`: row k weighs 1 / (k +
    smoothing) in the factors (the larger, the more alike)."""

    rank: int
    candidates: int
    smoothing: float = SMOOTHING

    def check(self, width: int, rows: int) -> None:
        """An LM head of so many rows of that width can be read so."""
        if self.rank >= width:
            raise RecipeError(
                "rough scores of that rank cost as much as the LM head itself",
                where="drafter.options.head_rank",
                found=f"head_rank: {self.rank}, the LM head is {width:,} wide",
                expected=f"1 to {width - 1:,}",
                do=f"write head_rank: {max(1, width // 8)}",
            )
        if self.candidates > rows:
            raise RecipeError(
                "more candidates than the LM head has rows",
                where="drafter.options.head_candidates",
                found=f"head_candidates: {self.candidates:,}, {rows:,} rows",
                expected=f"1 to {rows:,}",
                do=f"write head_candidates: {min(CANDIDATES, rows)}",
            )


def check_shortlist(drafter: Drafter) -> None:
    """What the options of a drafter say about its LM head fits that head: for options from a recipe
    or a command. A shortlist of a package that was trimmed later shrinks with its head."""
    options, width = drafter.options, drafter.head_width
    if getattr(options, "head_rank", None) is None:
        return
    if width is None or getattr(drafter, "router", None) is not None:
        raise RecipeError(
            "this drafter's LM head cannot be read in two steps",
            where="drafter.options.head_rank",
            found=drafter.family if width is None else "head_rank beside head_groups",
            expected="a drafter that reads one LM head after its layers, without a router; of "
            "language models a Llama-shaped one",
            do="leave head_rank out",
        )
    rows = drafter.spec.vocab_size if drafter.vocab is None else drafter.vocab.size
    shortlist = options.shortlist(rows)
    shortlist.check(width, rows)
    selected = getattr(options, "candidates", 0)  # of the selectors of blocks
    if selected > shortlist.candidates:
        raise RecipeError(
            "the selector chooses among more tokens than have a score",
            where="drafter.options.head_candidates",
            found=f"candidates: {selected}, head_candidates: {shortlist.candidates}",
            expected=f"head_candidates: {selected} or more",
            do=f"write head_candidates: {max(CANDIDATES, selected)}",
        )


def how_head_is_read(drafter: Drafter) -> str | None:
    """What a user should know where it is not read whole."""
    if getattr(drafter.options, "head_rank", None) is None:
        return None
    rows = drafter.spec.vocab_size if drafter.vocab is None else drafter.vocab.size
    found: Shortlist = drafter.options.shortlist(rows)
    return (
        f"the drafter's LM head is read in two steps: scores of rank {found.rank} choose "
        f"{min(found.candidates, rows):,} of {rows:,} rows; PyTorch reads it, not the compiled step"
    )


@dataclass(frozen=True, slots=True)
class RoughHead:
    """W V_r, without its mean row, and V_r^T."""

    up_KO: Tensor
    down_OD: Tensor


@torch.no_grad()
def rough_head(weight_KD: Tensor, rank: int, smoothing: float) -> RoughHead:
    """The factors, in the weight's dtype; sums over rows are taken in float64."""
    (K, D), device = weight_KD.shape, weight_KD.device
    share_K = 1.0 / (torch.arange(K, device=device) + smoothing)
    share_K = share_K / share_K.sum()
    mean_D = torch.zeros(D, dtype=torch.float64, device=device)
    gram_DD = torch.zeros(D, D, dtype=torch.float64, device=device)
    parts = zip(*(torch.split(x, ROWS_AT_ONCE) for x in (weight_KD, share_K)), strict=True)
    for part_KD, part_K in parts:
        weighed_KD = part_K[:, None] * part_KD.float()
        mean_D += weighed_KD.sum(0)
        gram_DD += weighed_KD.T @ part_KD.float()
    gram_DD -= torch.outer(mean_D, mean_D)
    leading_DO = torch.linalg.eigh(gram_DD).eigenvectors[:, -rank:].float()
    shift_O = mean_D.float() @ leading_DO
    each = [part.float() @ leading_DO - shift_O for part in torch.split(weight_KD, ROWS_AT_ONCE)]
    up_KO = torch.cat(each).to(weight_KD.dtype)
    return RoughHead(up_KO, leading_DO.T.contiguous().to(weight_KD.dtype))


@lru_cache
def rough_heads(rank: int, smoothing: float) -> Copies[Tensor, RoughHead]:
    """Factors of that rank by weight, made once however many engines are opened."""
    return Copies(lambda weight_KD: rough_head(weight_KD, rank, smoothing))


@dataclass(frozen=True, slots=True)
class ShortlistHead:
    """An LM head as serving reads it. `weight_KD` is the head itself, not a copy."""

    up_KO: Weight
    down_OD: Weight
    weight_KD: Tensor
    candidates: int

    @classmethod
    def of(cls, weight_KD: Tensor, shortlist: Shortlist) -> ShortlistHead:
        """A head cut to fewer rows than there are candidates (`vocab-trim`) is read whole."""
        rows, width = weight_KD.shape
        count = min(shortlist.candidates, rows)
        Shortlist(shortlist.rank, count).check(width, rows)
        rough = rough_heads(shortlist.rank, shortlist.smoothing).of(weight_KD)
        return cls(prepared(rough.up_KO), prepared(rough.down_OD), weight_KD.detach(), count)

    @torch.no_grad()
    def __call__(self, state: Tensor) -> Tensor:
        """[..., K] logits, -inf for all but the candidates."""
        state_QD = state.reshape(-1, state.shape[-1])
        rough_QK = linear(linear(state_QD, self.down_OD), self.up_KO)
        if state.device.type == "cpu":
            row_QC, exact_QC = self._row_by_row(rough_QK, state_QD)
        else:
            row_QC = rough_QK.topk(self.candidates, dim=-1).indices
            exact_QC = self._gathered(row_QC, state_QD)
        logits_QK = torch.full_like(rough_QK, -torch.inf).scatter_(1, row_QC, exact_QC)
        return logits_QK.view(*state.shape[:-1], len(self.weight_KD))

    def _row_by_row(self, rough_QK: Tensor, state_QD: Tensor) -> tuple[Tensor, Tensor]:
        """[Q, C]: the candidates and their logits. A batched product of gathered rows takes a CPU
        many times as long as one product a state, and so does a batched choice."""
        shape = len(state_QD), self.candidates
        row_QC, exact_QC = torch.empty(shape, dtype=torch.long), state_QD.new_empty(shape)
        for at, (rough_K, state_D) in enumerate(zip(rough_QK, state_QD, strict=True)):
            row_QC[at] = rough_K.topk(self.candidates).indices
            exact_QC[at] = torch.mv(self.weight_KD.index_select(0, row_QC[at]), state_D)
        return row_QC, exact_QC

    def _gathered(self, row_QC: Tensor, state_QD: Tensor) -> Tensor:
        """[Q, C]: logits of the candidates, without reading anything back to the host."""
        size = max(1, MOST_GATHERED // (self.candidates * state_QD.shape[1]))
        parts = zip(torch.split(row_QC, size), torch.split(state_QD, size), strict=True)
        found = [(self.weight_KD[row] @ state[:, :, None])[:, :, 0] for row, state in parts]
        return torch.cat(found)
