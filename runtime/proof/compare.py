"""Fast rules against scalar rules: the same trees, the same noise, the same decisions.

Random trees are ragged (padding behind the valid prefix), their siblings stand in any index order,
distributions have zeros, drafts include tokens that q could not have drawn. In float64 the two must
agree on every path and every token.
Letters: B rows, K draft vocabulary, N nodes, P path, T fed tokens, V target vocabulary, X any axes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specctl.core.tree import DraftTree, NodeKind, QRows
from specctl.runtime.verify import RULES, run_rule
from specctl.runtime.verify.scalar_parts import NoiseChooser, ScalarTree, draw, drawn_from_numbers


@dataclass(frozen=True, slots=True)
class FixedNoise:
    """Noise given as arrays; takes the place of RoundNoise."""

    uniform_BT: Tensor
    final: Tensor
    target: Tensor

    def accept_BT(self, num_fed: int) -> Tensor:
        return self.uniform_BT[:, :num_fed]

    def final_draw_B(self, scores_BV: Tensor) -> Tensor:
        return (scores_BV + self.final[:, : scores_BV.shape[-1]]).argmax(-1)

    def target_draw_BT(self, scores_BTV: Tensor, depth_BT: Tensor | None) -> Tensor:
        return (scores_BTV + self.target[:, :, : scores_BTV.shape[-1]]).argmax(-1)

    def target_BTV(self, depth_BT: Tensor, vocab_size: int) -> Tensor:
        return self.target[:, :, :vocab_size]

    def position_BT(self, depth_BT: Tensor) -> Tensor:
        return self.uniform_BT[:, : depth_BT.shape[1]]


@dataclass(frozen=True, slots=True)
class RandomRound:
    """A drafted batch, the target's scores at its fed tokens, and the noise of the round."""

    tree: DraftTree
    scores_BTV: Tensor
    noise: FixedNoise


def random_round(
    rng: np.random.Generator,
    kind: NodeKind,
    is_chain: bool,
    num_rows: int = 50,
    num_nodes: int = 6,
    vocab_size: int = 8,
    kept: int | None = None,
) -> RandomRound:
    """`kept`: size of a trimmed draft vocabulary, None = all ids."""
    forks_once = kind is NodeKind.PATHS and not is_chain
    step = 2 if forks_once else 1  # two paths, both one token longer at a time
    B, N, V = num_rows, num_nodes - num_nodes % step, vocab_size
    parent_BN, rank_BN, token_BN, valid_BN = _random_tree(rng, (B, N, V), is_chain, forks_once)
    scores_BTV = 1.5 * rng.standard_normal((B, N + 1, V))
    rows = np.arange(B)[:, None]
    np.add.at(scores_BTV, (rows, parent_BN + 1, token_BN), 1.5)  # so that drafts live for a while
    scores_BTV[rng.random(scores_BTV.shape) < 0.1] = -np.inf
    scores_BTV[:, :, 0] = np.maximum(scores_BTV[:, :, 0], -3.0)
    q = None if kind is NodeKind.POINT else _random_q(rng, B, N, V, kept)
    target_BTV = rng.gumbel(size=(B, N + 1, V))
    if q is not None and forks_once:
        _alike(token_BN, [scores_BTV, target_BTV, q.prob_BTK.numpy()])
    tree = DraftTree(
        torch.from_numpy(token_BN),
        torch.from_numpy(parent_BN),
        torch.from_numpy(rank_BN),
        torch.from_numpy(valid_BN),
        kind,
        _depth(parent_BN),
        is_chain=is_chain,
        q=q,
    )
    noise = FixedNoise(
        torch.from_numpy(rng.random((B, N + 1))),
        torch.from_numpy(rng.gumbel(size=(B, V))),
        torch.from_numpy(target_BTV),
    )
    return RandomRound(tree, torch.from_numpy(scores_BTV), noise)


def _alike(token_BN: np.ndarray, distributions: list[np.ndarray]) -> None:
    """In place: where both paths have read the same tokens, their rows are equal."""
    for n in range(1, token_BN.shape[1], 2):
        same_B = (token_BN[:, 1 : n + 1 : 2] == token_BN[:, 0:n:2]).all(1)
        for rows_BTX in distributions:
            rows_BTX[same_B, n + 1] = rows_BTX[same_B, n]


def _random_tree(
    rng: np.random.Generator, size: tuple[int, int, int], is_chain: bool, forks_once: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Parents, ranks, tokens and which nodes are there, each [B, N]."""
    B, N, V = size
    parent_BN = np.tile(np.arange(N) - 1, (B, 1))
    rank_BN = np.zeros((B, N), dtype=np.int64)
    if forks_once:
        parent_BN = np.tile(np.maximum(np.arange(N) - 2, -1), (B, 1))
        rank_BN[:, 1] = 1
    elif not is_chain:
        parent_BN = np.stack([[rng.integers(-1, n) for n in range(N)] for _ in range(B)])
        rank_BN = rng.permuted(np.tile(np.arange(N), (B, 1)), axis=1)
    order_BTV = np.stack([[rng.permutation(V) for _ in range(N + 1)] for _ in range(B)])
    token_BN = np.take_along_axis(order_BTV[:, :, 0], parent_BN + 1, 1)
    if forks_once:  # in half of the rows both paths begin alike
        token_BN[::2, 1] = order_BTV[::2, 0, 1]
    elif not is_chain:  # siblings differ, as their ranks do
        token_BN = np.stack([order_BTV[b, parent_BN[b] + 1, rank_BN[b]] for b in range(B)])
    step = 2 if forks_once else 1
    valid_BN = np.arange(N) < step * rng.integers(0, N // step + 1, (B, 1))
    return parent_BN, rank_BN, token_BN, valid_BN


def _random_q(rng: np.random.Generator, B: int, N: int, V: int, kept: int | None) -> QRows:
    ids_K = None if kept is None else torch.from_numpy(np.sort(rng.permutation(V)[:kept]))
    prob_BTK = np.exp(1.5 * rng.standard_normal((B, N + 1, kept or V)))
    prob_BTK[rng.random(prob_BTK.shape) < 0.15] = 0.0
    prob_BTK[:, :, 0] += 0.01
    return QRows(torch.from_numpy(prob_BTK / prob_BTK.sum(-1, keepdims=True)), ids_K)


def _depth(parent_BN: np.ndarray) -> int:
    depth_BT = np.zeros((parent_BN.shape[0], parent_BN.shape[1] + 1), dtype=np.int64)
    for n in range(parent_BN.shape[1]):
        depth_BT[:, n + 1] = np.take_along_axis(depth_BT, parent_BN[:, n : n + 1] + 1, 1)[:, 0] + 1
    return int(depth_BT.max())


def scalar_round(rule: str, round_: RandomRound) -> list[tuple[list[int], int]]:
    """What the scalar rule decides: per row the path of fed indices and the next token."""
    tree, noise = round_.tree, round_.noise
    p_BTV = round_.scores_BTV.softmax(-1).numpy()
    q_BTV = None if tree.q is None else tree.q.dense(p_BTV.shape[-1]).numpy()
    decided = []
    for b in range(p_BTV.shape[0]):
        drafted = _row(tree, b, p_BTV[b], None if q_BTV is None else q_BTV[b])
        chooser = NoiseChooser(noise.uniform_BT[b].numpy(), noise.target[b].numpy())
        at, distribution = RULES[rule].reference(drafted, chooser)
        path = []
        end = at
        while at > 0:
            path.append(at)
            at = drafted.parent[at]
        token = draw(distribution, noise.final[b].numpy())
        decided.append(([0, *path[::-1]] if end else [0], token))
    return decided


def _row(tree: DraftTree, b: int, p_TV: np.ndarray, q_TV: np.ndarray | None) -> ScalarTree:
    token = [-1, *tree.token_BN[b].tolist()]
    parent = [0, *(tree.parent_BN[b] + 1).tolist()]
    rank = [0, *tree.rank_BN[b].tolist()]
    fed = [n + 1 for n, valid in enumerate(tree.valid_BN[b].tolist()) if valid]
    children = [
        sorted((c for c in fed if parent[c] == t), key=rank.__getitem__) for t in range(len(token))
    ]
    if tree.is_chain:  # the scalar chain rules read the drafted length from the token list
        token = token[: len(fed) + 1]
    num_fed = len(token)
    q = None if q_TV is None else list(q_TV[:num_fed])
    return drawn_from_numbers(
        ScalarTree(token, parent[:num_fed], children, list(p_TV), q, tree.kind)
    )


def differences(rule: str, round_: RandomRound) -> int:
    """Rows on which the fast rule and the scalar rule disagree."""
    verdict = run_rule(rule, round_.tree, round_.scores_BTV, round_.noise)
    wrong = 0
    for b, (path, token) in enumerate(scalar_round(rule, round_)):
        found = [fed for fed in verdict.path_BP[b].tolist() if fed >= 0]
        same = found == path and int(verdict.next_token_B[b]) == token
        wrong += not (same and int(verdict.num_accepted_B[b]) == len(path) - 1)
    return wrong
