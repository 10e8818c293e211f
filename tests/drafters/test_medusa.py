"""Medusa: fresh heads are the target's head; trees of ranks; alignment."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.drafter import Budget, Space
from specctl.core.errors import RecipeError
from specctl.core.vocab import VocabMap
from specctl.drafters.frames.parallel_heads import MAX_RANK, default_tree
from specctl.drafters.heads.medusa import Medusa, MedusaOptions
from specctl.drafters.losses.align import aim
from specctl.drafters.states.template import compile_template

TEXT = [5, 17, 3, 88, 41, 9, 9, 60]


def make_drafter(target: Any, vocab: VocabMap | None = None, **options: Any) -> Medusa:
    drafter = Medusa(MedusaOptions(**options), target.spec, vocab)
    drafter.bind(target.borrowed())
    return drafter


@pytest.mark.parametrize("head", ["own", "shared"])
def test_every_fresh_head_reproduces_the_targets_head(
    make_target: Any, make_batch: Any, head: str
) -> None:
    target = make_target()
    drafter = make_drafter(target, head=head, num_blocks=2)
    batch = make_batch(target, drafter)
    for index in range(4):
        logits_BSK = drafter.head_logits(index, batch.taps[target.spec.num_layers])
        torch.testing.assert_close(logits_BSK, batch.teacher_BSV)


def test_heads_and_blocks_share_no_parameter(make_target: Any) -> None:
    drafter = make_drafter(make_target(), num_heads=3, num_blocks=2)
    pointers = [p.data_ptr() for p in drafter.trainable().values()]
    assert len(pointers) == len(set(pointers)) == 3 * (2 * 2 + 1)


def test_shared_head_trains_the_blocks_only(make_target: Any) -> None:
    drafter = make_drafter(make_target(), head="shared")
    assert set(drafter.tensors()) == {
        f"{h}.0.linear.{part}" for h in range(4) for part in ("weight", "bias")
    }


def test_tensor_names_are_those_of_the_public_format(make_target: Any) -> None:
    drafter = make_drafter(make_target(), num_heads=2, num_blocks=1)
    assert set(drafter.tensors()) == {
        *(f"{h}.0.linear.{part}" for h in range(2) for part in ("weight", "bias")),
        *(f"{h}.1.weight" for h in range(2)),
    }


def test_head_i_learns_token_t_plus_2_plus_i(make_target: Any, make_batch: Any) -> None:
    """On text where token t + 2 + i is a function of i alone, each head finds its own answer."""
    target = make_target()
    drafter = make_drafter(target, loss="ce", num_heads=3)
    batch = make_batch(target, drafter)
    for index in range(3):
        rows = aim(batch, 2 + index)
        flat = batch.ids_BS.flatten()
        assert torch.equal(flat[rows.row_Q + 2 + index], rows.label_Q)
        assert torch.equal(rows.teacher_row_Q, rows.row_Q + 1 + index)


def test_later_heads_start_worse_and_every_head_improves(
    make_target: Any, make_batch: Any, train_a_little: Any
) -> None:
    target = make_target()
    drafter = make_drafter(target)
    batch = make_batch(target, drafter)

    def alphas() -> list[float]:
        metrics = drafter.loss(batch).metrics
        names = ["alpha", *(f"alpha/{i}" for i in range(1, 4))]
        return [float(metrics[name][0] / metrics[name][1]) for name in names]

    before = alphas()
    train_a_little(target, drafter, 25, 1e-2)
    assert all(new > old + 0.05 for new, old in zip(alphas(), before, strict=True))


def test_the_static_tree_holds_the_heads_best_ranks(
    make_target: Any, features: Any, round_view: Any
) -> None:
    target = make_target()
    vocab = VocabMap(torch.arange(1, 96, 2), 96)
    tree = ((0,), (1,), (0, 0), (0, 2), (0, 0, 1))
    drafter = make_drafter(target, vocab=vocab, tree=tree)
    state = drafter.open(Space(1, 32, 16, torch.device("cpu"), torch.float32))
    taps = features(target, TEXT[:-1], drafter.needs().taps)
    state.start(0, TEXT, taps)
    draft = state.propose(round_view({0: TEXT}), Budget(16, 3))
    state_D = taps[target.spec.num_layers][-1]
    expected = []
    for path in sorted(tree, key=lambda path: (len(path), path)):
        order = drafter.head_logits(len(path) - 1, state_D).argsort(descending=True)
        expected.append(int(vocab.ids_K[order[path[-1]]]))
    assert draft.token_BN[0].tolist() == expected
    assert draft.parent_BN[0].tolist() == [-1, -1, 0, 0, 2]
    assert draft.depth == 3


def test_nothing_is_proposed_before_any_feature(make_target: Any, round_view: Any) -> None:
    target = make_target()
    drafter = make_drafter(target)
    state = drafter.open(Space(2, 32, 16, torch.device("cpu"), torch.float32))
    state.start(0, [4], {})
    assert state.propose(round_view({0: [4]}), Budget(8, 3)).num_nodes == 0


def test_a_tree_without_a_prefix_or_beyond_the_heads_is_refused() -> None:
    for tree in ([[0, 0]], [[0], [0]], [[0], [0, 0], [0, 0, 0]], [[MAX_RANK]]):
        with pytest.raises(RecipeError, match="template tree"):
            MedusaOptions(num_heads=2, tree=tuple(map(tuple, tree)))


def test_the_default_tree_is_sparse_and_favours_first_ranks() -> None:
    tree = default_tree(4)
    assert len(tree) == len(set(tree)) == 24
    assert tree[0] == (0,)
    assert (0, 0, 0) in tree
    assert max(len(path) for path in tree) == 4
    template = compile_template(tree, 5, 2, torch.device("cpu"))
    assert len(template.rank_N) == 5
    assert template.levels[-1][1] == 5
