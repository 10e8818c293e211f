"""Reference checks for a proof on a real pair, independent of the engine: plain forwards and
statistics.

`replay` reads an output with one cacheless forward and says where it is not what plain decoding
would have written. `WatchedPolicy` records what a policy drafts. `PairDistribution` is the exact
distribution of the first two tokens with a chi-square test.
Letters: B rows, K draft vocabulary, N nodes, S sequence, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log, sqrt

import torch
from torch import Tensor

from specctl.core.drafter import RoundView
from specctl.core.tree import DraftTree, NodeKind, empty_tree
from specctl.models.not_finite import check_logits
from specctl.runtime.policies.base import GrowRequest, Policy
from specctl.runtime.sampling.noise import RoundNoise
from specctl.runtime.sampling.sampling import Sampling, SamplingBatch
from specctl.runtime.target.target import Target

MIN_EXPECTED = 10.0


def dense_logits(target: Target, rows: Sequence[Sequence[int]]) -> Tensor:
    """[B, S, V] float32: logits of whole sequences of one length, without a cache. Raises
    NumbersError where they are no numbers."""
    ids_BS = torch.tensor([list(row) for row in rows], device=target.device)
    one_BS = torch.zeros_like(ids_BS)
    masks = target.lm.document_masks(one_BS)
    position_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device).expand_as(ids_BS)
    with torch.inference_mode():
        logits_BSV = target.lm.dense(ids_BS, position_BS, masks).logits_BTV
    assert logits_BSV is not None
    check_logits(target.lm, target.name, ids_BS, logits_BSV)
    return logits_BSV.float()


def tolerance(target: Target, logits: Tensor) -> float:
    """What the order of summation may change in a logit: a few units in the last place of the
    largest one, more of them where they are small."""
    steps = 4 if target.dtype in (torch.bfloat16, torch.float16) else 256
    finite = logits[torch.isfinite(logits)]
    return steps * torch.finfo(target.dtype).eps * max(1.0, float(finite.abs().max()))


@dataclass(slots=True)
class Replay:
    """Tokens read; those that differ from plain decoding by a tie in rounding (explained), and
    those that do not (unexplained); the widest gap seen."""

    tokens: int = 0
    explained: int = 0
    unexplained: int = 0
    worst: float = 0.0
    first: str = ""

    def read(
        self, target: Target, prompt: Sequence[int], output: Sequence[int], sampling: Sampling
    ) -> None:
        """Compare an output with argmax(scores + noise of its position) at every position (no
        noise when greedy): by induction it equals plain decoding if every token does."""
        text = [*prompt, *output]
        scores_TV = dense_logits(target, [text[:-1]])[0, len(prompt) - 1 :]
        slack = tolerance(target, scores_TV)
        if not sampling.greedy:
            scores_TV = torch.stack(
                [
                    _scores(target, row_V, text[: len(prompt) + i], sampling)
                    for i, row_V in enumerate(scores_TV)
                ]
            )
            slack = slack / sampling.temperature
            depth_1T = torch.arange(len(output), device=scores_TV.device)[None]
            noise = RoundNoise([sampling.seed], [0], [len(prompt) - 1], target.device)
            scores_TV = scores_TV + noise.target_BTV(depth_1T, scores_TV.shape[-1])[0]
        best_T = scores_TV.argmax(-1)
        for i, token in enumerate(output):
            self.tokens += 1
            if int(best_T[i]) == token:
                continue
            gap = float(scores_TV[i, best_T[i]] - scores_TV[i, token])
            self.worst = max(self.worst, gap)
            if gap <= 2 * slack:
                self.explained += 1
                continue
            self.unexplained += 1
            self.first = self.first or (
                f"token {i} of a prompt of {len(prompt)} tokens: wrote {token}, plain decoding "
                f"writes {int(best_T[i])}, gap {gap:.3g}"
            )


def _scores(target: Target, logits_V: Tensor, text: Sequence[int], sampling: Sampling) -> Tensor:
    """The target's processed log-scores after `text`."""
    device = logits_V.device
    one_B = torch.zeros(1, dtype=torch.long, device=device)
    view = RoundView((0,), one_B, one_B, one_B, (text,))
    batch = SamplingBatch([sampling], target.spec.vocab_size, device)
    return batch.scores(logits_V[None, None], empty_tree(1, device), view)[0, 0]


def target_distribution(
    target: Target, rows: Sequence[Sequence[int]], sampling: Sampling
) -> Tensor:
    """[B, V] float64: the exact distribution of the token after each text (all of one length)."""
    last_BV = dense_logits(target, rows)[:, -1]
    scores = [
        _scores(target, last_V, row, sampling) for last_V, row in zip(last_BV, rows, strict=True)
    ]
    return torch.stack(scores).double().softmax(-1)


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """Pearson's test; `p_value` is 1 where there is nothing to compare."""

    statistic: float
    cells: int
    p_value: float
    total_variation: float


class PairDistribution:
    """The exact joint distribution of the next two tokens, in cells with at least `MIN_EXPECTED`
    expected samples: pairs, then one cell for the rest of each first token, then one for all the
    rest."""

    def __init__(
        self, target: Target, prompt: Sequence[int], sampling: Sampling, num_samples: int
    ) -> None:
        self.num_samples = num_samples
        self.cell: dict[tuple[int, int | None], int] = {}
        self.expected = [0.0]  # cell 0 is all the rest
        first_V = target_distribution(target, [prompt], sampling)[0] * num_samples
        firsts = [int(t) for t in (first_V >= MIN_EXPECTED).nonzero().flatten()]
        rows = [[*prompt, token] for token in firsts]
        second_BV = target_distribution(target, rows, sampling) if rows else first_V.new_zeros(0, 0)
        self.expected[0] = num_samples - float(first_V[firsts].sum())
        for token, second_V in zip(firsts, second_BV, strict=True):
            self._split(token, float(first_V[token]), second_V)

    def _split(self, token: int, expected: float, second_V: Tensor) -> None:
        rest = expected
        for second in (second_V * expected >= MIN_EXPECTED).nonzero().flatten().tolist():
            self._add((token, second), expected * float(second_V[second]))
            rest -= expected * float(second_V[second])
        if rest >= MIN_EXPECTED:
            self._add((token, None), rest)
        else:
            self.expected[0] += max(rest, 0.0)

    def _add(self, key: tuple[int, int | None], expected: float) -> None:
        self.cell[key] = len(self.expected)
        self.expected.append(expected)

    def test(self, samples: Sequence[Sequence[int]]) -> ChiSquare:
        """Compare samples (their first two tokens) with the distribution."""
        assert len(samples) == self.num_samples, (len(samples), self.num_samples)
        counts = [0] * len(self.expected)
        for first, second in (sample[:2] for sample in samples):
            at = self.cell.get((first, second), self.cell.get((first, None), 0))
            counts[at] += 1
        return chi_square(counts, self.expected)


def chi_square(counts: Sequence[int], expected: Sequence[float]) -> ChiSquare:
    """Pearson's test; cell 0 is merged into its neighbour while too little is expected there."""
    observed, wanted = [float(c) for c in counts], list(expected)
    while len(wanted) > 1 and wanted[0] < MIN_EXPECTED:
        if wanted[0] < 1e-6 and observed[0] > 0:
            return ChiSquare(float("inf"), len(wanted), 0.0, observed[0] / sum(observed))
        observed[:2], wanted[:2] = [sum(observed[:2])], [sum(wanted[:2])]
    statistic = sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True))
    apart = sum(abs(o - w) for o, w in zip(observed, wanted, strict=True)) / (2 * sum(wanted))
    freedom = len(wanted) - 1
    p_value = 1.0
    if freedom > 0:
        half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
        p_value = float(torch.special.gammaincc(half[0], half[1]))
    return ChiSquare(statistic, len(wanted), p_value, apart)


@dataclass(slots=True)
class DrawAudit:
    """Whether sampled nodes look like draws from the q handed to the verifier.

    Under q, log q(x) has mean -H(q) and a known variance: summed over nodes, a z-test. It catches
    a q at another temperature, of another vocabulary order or of the untrimmed head, and argmax
    drafts passed off as samples.
    """

    nodes: int = 0
    impossible: int = 0
    worst_sum: float = 0.0
    surprise: float = 0.0
    variance: float = 0.0
    entropy: float = 0.0
    support: int = 0

    def see(self, tree: DraftTree) -> None:
        if tree.q is None or not tree.num_nodes:
            return
        prob_BTK = tree.q.prob_BTK.double()
        token_BN = tree.token_BN
        if tree.q.ids_K is not None:
            match_BNK = token_BN[:, :, None] == tree.q.ids_K
            found_BN, token_BN = match_BNK.any(-1), match_BNK.int().argmax(-1)
        else:
            found_BN = torch.ones_like(tree.valid_BN)
        distribution_BNK = prob_BTK.gather(
            1, (tree.parent_BN + 1)[:, :, None].expand(-1, -1, prob_BTK.shape[2])
        )
        seen_BN = tree.valid_BN
        if tree.kind is NodeKind.TOP_PLUS_ONE:
            distribution_BNK, seen_BN = (
                _without_fixed(tree, distribution_BNK, token_BN),
                seen_BN & (tree.rank_BN == 0),
            )
        if tree.kind.is_distinct:
            seen_BN = seen_BN & (
                tree.rank_BN == 0
            )  # later siblings follow the distribution of what is left
        q_BN = distribution_BNK.gather(2, token_BN[:, :, None])[:, :, 0] * found_BN
        log_BNK = torch.where(distribution_BNK > 0, distribution_BNK.log(), 0.0)
        mean_BN = (distribution_BNK * log_BNK).sum(-1)
        variance_BN = (distribution_BNK * log_BNK**2).sum(-1) - mean_BN**2
        good_BN = seen_BN & (q_BN > 0)
        self.nodes += int(seen_BN.sum())
        self.impossible += int((seen_BN & ~good_BN).sum())
        self.surprise += float(((q_BN.log() - mean_BN)[good_BN]).sum())
        self.variance += float(variance_BN[good_BN].sum())
        self.entropy -= float(mean_BN[seen_BN].sum())
        self.support = prob_BTK.shape[2]
        if bool(seen_BN.any()):
            off = float((distribution_BNK.sum(-1)[seen_BN] - 1).abs().max())
            self.worst_sum = max(self.worst_sum, off)

    @property
    def z(self) -> float:
        """Standard deviations between the drawn tokens and their distributions."""
        return self.surprise / sqrt(self.variance) if self.variance > 1e-9 else 0.0

    @property
    def mean_entropy(self) -> float | None:
        """In nats; None if nothing was sampled."""
        return self.entropy / self.nodes if self.nodes else None

    @property
    def is_sane(self) -> bool:
        """The distributions of the draft are not flat."""
        return self.mean_entropy is not None and self.mean_entropy < 0.9 * log(max(self.support, 2))


def _without_fixed(tree: DraftTree, distribution_BNK: Tensor, token_BN: Tensor) -> Tensor:
    """[B, N, K]: each node's distribution without its fixed siblings (those of other ranks than
    0)."""
    for n in range(tree.num_nodes):
        sibling_BN = tree.parent_BN == tree.parent_BN[:, n : n + 1]
        gone_BN = sibling_BN & tree.valid_BN & (tree.rank_BN[:, n : n + 1] > 0)
        column_BN1 = token_BN[:, n][:, None, None].expand(-1, tree.num_nodes, 1)
        kept_BN1 = distribution_BNK.gather(2, column_BN1) * ~gone_BN[:, :, None]
        distribution_BNK = distribution_BNK.scatter(2, column_BN1, kept_BN1)
    return distribution_BNK / distribution_BNK.sum(-1, keepdim=True).clamp(min=1e-30)


@dataclass(slots=True)
class WatchedPolicy:
    """A policy whose trees are looked at on their way to the engine."""

    policy: Policy
    draws: DrawAudit = field(default_factory=DrawAudit)

    @property
    def nodes(self) -> int:
        return self.policy.nodes

    @property
    def depth(self) -> int:
        return self.policy.depth

    @property
    def is_chain(self) -> bool:
        return self.policy.is_chain

    def kind(self, sampled: bool) -> NodeKind:
        return self.policy.kind(sampled)

    def grow(self, growth: GrowRequest) -> DraftTree:
        tree = self.policy.grow(growth)
        self.draws.see(tree)
        return tree
