"""Rounds of targets with recurrent layers against the exact joint distribution of what they write.

Every draft that can be drawn is a row of one batch. Half of the rows have read the text as a
prompt, the others as a shorter prompt and an accepted path of a tree with rejected siblings, all
padded. What the target says of root and nodes goes through every coin of the rule; the outcome must
be the joint distribution by transformers' own forwards over whole texts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.forward.slot_state import StateKV
from specctl.core.tree import DraftTree, NodeKind
from specctl.models.recurrent import state_forms
from specctl.models.recurrent.state_forms import FedTokens
from specctl.models.recurrent.state_lm import StateLM
from specctl.runtime.proof.cases import CHAINS, TREES, depth_of, random_distributions
from specctl.runtime.proof.enumerate import Case, Exact, all_drafts, enumerate_case
from specctl.runtime.verify.scalar_parts import Distribution
from specctl_testing.hybrids import FEW, HYBRIDS
from specctl_testing.models import build_model

V = 3
TEXT = (0, 2, 1, 1, 0, 2, 0, 1)  # the last is the root of the round that is proved
KEPT = len(TEXT) - 1
SHORT = 4  # tokens that the rows of the longer way read as their prompt
WAY = (-1, -1, 1, 0)  # parents of their tree's nodes; fed index = node index + 1
PATH = (0, 2, 3)
BOUND, WRONG = 1e-5, 1e-3
CASES = (
    ("block", NodeKind.PATHS, "chain-3"),
    ("chain", NodeKind.PATHS, "chain-2"),
    ("traversal", NodeKind.WITHOUT_REPLACEMENT, "two-paths"),
    ("multi-round", NodeKind.IID, "two-uneven"),
    ("target-only", NodeKind.POINT, "two-two-left"),
)


@cache
def made(kind: str) -> tuple[StateLM, Any]:
    model = build_model(kind, hidden=64, vocab=V, **HYBRIDS[kind])
    oracle = copy.deepcopy(model)
    oracle.set_attn_implementation("eager")
    return StateLM(model), oracle


@cache
def plainly(kind: str, depth: int) -> dict[tuple[int, ...], Distribution]:
    """By transformers alone, of every path behind the text."""
    found: dict[tuple[int, ...], Distribution] = {}
    for length in range(depth + 1):
        paths = list(product(range(V), repeat=length))
        ids = torch.tensor([[*TEXT, *path] for path in paths])
        with torch.no_grad():
            logits = made(kind)[1](input_ids=ids, use_cache=False).logits[:, -1]
        found |= dict(zip(paths, _distributions(logits), strict=True))
    return found


def _distributions(logits: Tensor) -> Iterator[Distribution]:
    yield from logits.double().softmax(-1).numpy()


class Batch:
    """A row for every draft. `follow` moves states along paths, to try what goes wrong."""

    def __init__(self, kind: str, drafts: list[list[int]], follow: Callable[..., None]) -> None:
        self.lm, self.follow = made(kind)[0], follow
        self.drafts = drafts
        kv = self.lm.new_kv(len(drafts), 32)
        assert isinstance(kv, StateKV)
        self.kv = kv
        even = list(range(0, len(drafts), 2))
        odd = list(range(1, len(drafts), 2))
        lengths = torch.tensor([SHORT if row % 2 else KEPT for row in range(len(drafts))])
        ids = torch.tensor([TEXT[:KEPT]] * len(drafts))
        at = torch.arange(KEPT).expand(len(drafts), -1)
        ids = torch.where(at < lengths[:, None], ids, 0)  # padded, as chunks of prompts are
        self._read([*even, *odd], ids[[*even, *odd]], 0, None)
        rows = [*even, *odd]
        path = torch.where(at < lengths[:, None], at, -1)[rows]
        self.follow(kv, torch.tensor(rows), path)
        if odd:
            wrong = (TEXT[5] + 1) % V
            nodes = torch.tensor([[wrong, TEXT[5], TEXT[6], TEXT[6]]] * len(odd))
            tree = self._tree(nodes, WAY)
            fed = torch.cat([torch.full((len(odd), 1), TEXT[4]), nodes], dim=1)
            self._read(odd, fed, SHORT, tree)
            kept_B = torch.full((len(odd),), SHORT)
            path = torch.tensor([[*PATH, -1, -1]] * len(odd))
            super(StateKV, kv).keep(torch.tensor(odd), kept_B, path)
            self.follow(kv, torch.tensor(odd), path)

    @staticmethod
    def _tree(nodes: Tensor, shape: tuple[int, ...]) -> DraftTree:
        parents = torch.tensor(shape).expand(len(nodes), -1)
        ranks = torch.tensor([shape[:n].count(up) for n, up in enumerate(shape)])
        ranks = ranks.expand_as(parents)
        return DraftTree(nodes, parents, ranks, parents >= -1, NodeKind.POINT, len(shape))

    def _read(self, rows: list[int], fed: Tensor, kept: int, tree: DraftTree | None) -> Tensor:
        kept_B, span = torch.full((len(rows),), kept), kept + fed.shape[1]
        self.kv.begin(tuple(rows), torch.tensor(rows), kept_B, fed.shape[1], span)
        if tree is None:
            masks = self.lm.chain_masks(kept_B, fed.shape[1], span)
            position = torch.arange(fed.shape[1]).expand(len(rows), -1) + kept
        else:
            masks, position = self.lm.tree_masks(tree, kept_B, span), tree.position_BT(kept_B)
        logits = self.lm.forward(fed, position, masks, self.kv).logits_BTV
        assert logits is not None
        return logits

    def said(self, shape: tuple[int, ...]) -> dict[tuple[int, ...], list[Distribution]]:
        """At root and nodes of every draft, in the round behind the text."""
        nodes = torch.tensor(self.drafts)
        fed = torch.cat([torch.full((len(nodes), 1), TEXT[-1]), nodes], dim=1)
        logits = self._read(list(range(len(nodes))), fed, KEPT, self._tree(nodes, shape))
        return {
            tuple(draft): list(_distributions(logits[row])) for row, draft in enumerate(self.drafts)
        }


def advance(kv: StateKV, slot_B: Tensor, path_BP: Tensor) -> None:
    kv.advance(slot_B, path_BP)


def enumerated(
    kind: str, rule: str, node: NodeKind, shape_name: str, follow: Callable[..., None] = advance
) -> Exact:
    shape = {**CHAINS, **TREES}[shape_name]
    depth = depth_of(shape)
    _, q = random_distributions("random", V, depth, seed=1)
    case = Case(f"{kind}/{rule}", rule, node, shape, plainly(kind, depth), q, V)
    drafts = [tokens for _, tokens in all_drafts(case)]
    drafts = [list(each) for each in dict.fromkeys(map(tuple, drafts))]
    batch = Batch(kind, drafts * 2 if len(drafts) == 1 else drafts, follow)
    said = batch.said(shape)
    return enumerate_case(case, read=lambda tokens: said[tuple(tokens)])


@pytest.mark.parametrize(("rule", "node", "shape"), CASES)
@pytest.mark.parametrize("kind", FEW)
def test_rounds_have_the_joint_distribution_of_plain_forwards(
    kind: str, rule: str, node: NodeKind, shape: str
) -> None:
    found = enumerated(kind, rule, node, shape)
    assert found.error < BOUND
    assert found.accepted > 0.1


# -- what is wrong shows in the joint distribution ----------------------------------------------


def padded(kv: StateKV, slot_B: Tensor, path_BP: Tensor) -> None:
    """Padding is read into the states, and nothing looks amiss."""
    right_B = kv.state.position_Z[slot_B] + (path_BP >= 0).sum(1)
    kv.advance(slot_B, torch.arange(path_BP.shape[1]).expand_as(path_BP))
    kv.state.position_Z[slot_B] = right_B


def other_child(kv: StateKV, slot_B: Tensor, path_BP: Tensor) -> None:
    """The rejected sibling is kept for the accepted one."""
    is_tree = path_BP[:, 1:2] == PATH[1]
    kv.advance(slot_B, torch.where(is_tree & (path_BP == PATH[1]), 1, path_BP))


@pytest.mark.parametrize("follow", [padded, other_child])
@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next", "falcon_h1", "jamba"])
def test_states_that_followed_another_path_are_caught(kind: str, follow: Any) -> None:
    assert (
        enumerated(kind, "traversal", NodeKind.WITHOUT_REPLACEMENT, "two-paths", follow).error
        > WRONG
    )


@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1", "jamba"])
def test_siblings_in_a_state_are_caught(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made(kind)

    def as_run(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: function(*given[:-1], FedTokens(None))

    for name in ("read_decayed", "read_selective"):
        mixed = as_run(getattr(state_forms, name))
        monkeypatch.setattr(f"specctl.models.recurrent.state_mixers.{name}", mixed)
    assert enumerated(kind, "multi-round", NodeKind.IID, "two-uneven").error > WRONG


def test_a_neighbours_convolution_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    made("lfm2")

    def neighbours(ancestor_BTT: Tensor, width: int) -> Tensor:
        at_T = torch.arange(ancestor_BTT.shape[1])[:, None] + torch.arange(width)
        return at_T.expand(len(ancestor_BTT), -1, -1)

    monkeypatch.setattr(state_forms, "_windows", neighbours)
    assert enumerated("lfm2", "multi-round", NodeKind.IID, "two-uneven").error > WRONG
