"""Unpadded inputs: what true tokens read is as with padding, and only they are computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.language_model import Feed
from specctl.core.tree import DraftTree, NodeKind, chain_tree
from specctl.models.llama import fast_llama
from specctl.models.llama.fast_llama import FastLlama
from specctl.runtime.engine.unpadded import Unpadded

TAPS = (1, 3)


@pytest.fixture
def in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FastLlama, "_native", lambda self, feed: None)


@pytest.fixture(params=["PyTorch", "compiled"])
def way(request: pytest.FixtureRequest) -> None:
    if request.param == "PyTorch":
        request.getfixturevalue("in_pytorch")


def tree_of(lengths: list[int], is_chain: bool) -> DraftTree:
    """A draft of so many nodes per row: a chain, or pairs of siblings."""
    width, places = max(lengths), torch.arange(max(lengths))
    valid_BN = places < torch.tensor(lengths)[:, None]
    token_BN = torch.randint(0, 96, valid_BN.shape)
    if is_chain:
        return chain_tree(token_BN, valid_BN, NodeKind.POINT)
    parent_BN = ((places // 2) * 2 - 1).expand_as(token_BN)
    return DraftTree(token_BN, parent_BN, (places % 2).expand_as(token_BN), valid_BN,
                     NodeKind.POINT, (width + 1) // 2)  # fmt: skip


def forward(target: Any, tree: DraftTree, run: Any) -> Any:
    """A round behind texts of 5, 3, 9 and 4 tokens, then the plain round after it."""
    B, kept_B = 4, torch.tensor([5, 3, 9, 4])
    torch.manual_seed(2)
    kv = target.new_kv(B, 40)
    for store in (*kv.key_ZJLE, *kv.value_ZJLE):
        store.normal_()
    slots, root_B, num_fed = (0, 1, 2, 3), torch.tensor([3, 1, 4, 1]), tree.num_nodes + 1
    kv.begin(slots, torch.arange(B), kept_B, num_fed, 9 + num_fed)
    masks = target.lm.tree_masks(tree, kept_B, 9 + num_fed)
    feed = Feed(tree.fed_token_BT(root_B), tree.position_BT(kept_B), masks, TAPS)
    return run(feed, tree, kv), kv


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("is_chain", [True, False])
@torch.no_grad()
def test_true_tokens_read_what_they_read_with_padding(make_target: Any, is_chain: bool) -> None:
    target = make_target(num_layers=3)
    tree = tree_of([0, 8, 1, 3], is_chain)
    unpadded = Unpadded.of(target.lm)
    assert unpadded is not None
    whole, kv = forward(target, tree, lambda feed, tree, kv: target.lm.run(feed, kv))
    out, same = forward(target, tree, unpadded.run)
    valid_BT = tree.fed_valid_BT()
    same_as = {"atol": 5e-5, "rtol": 1e-4}
    torch.testing.assert_close(out.logits_BTV[valid_BT], whole.logits_BTV[valid_BT], **same_as)
    for tap in TAPS:
        torch.testing.assert_close(out.taps[tap][valid_BT], whole.taps[tap][valid_BT], **same_as)
    for b, kept in enumerate([5, 3, 9, 4]):
        at = [kept + t for t in range(tree.num_nodes + 1) if valid_BT[b, t]]
        for ours, theirs in zip(same.key_ZJLE, kv.key_ZJLE, strict=True):
            torch.testing.assert_close(ours[b, :, at], theirs[b, :, at], **same_as)


@pytest.mark.usefixtures("in_pytorch")
@torch.no_grad()
def test_only_true_tokens_are_computed(make_target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(num_layers=3)
    sizes, linear = set(), fast_llama.linear

    def counted(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.add(x.numel() // x.shape[-1])
        return linear(x, *rest)

    monkeypatch.setattr(fast_llama, "linear", counted)
    unpadded = Unpadded.of(target.lm)
    assert unpadded is not None
    forward(target, tree_of([0, 8, 1, 3], True), unpadded.run)
    assert sizes == {4 + 12}, "four roots and twelve drafted tokens of 36 that are fed"
    sizes.clear()
    forward(target, tree_of([8, 7, 8, 6], True), unpadded.run)
    assert sizes == {36}, "with so little padding the rows stay as they are"
