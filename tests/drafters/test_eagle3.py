"""EAGLE-3: alignment, training-time test, caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Outcome
from specctl.core.errors import IncompatibleError, RecipeError
from specctl.core.tree import NodeKind, chain_tree, empty_tree
from specctl.core.vocab import VocabMap
from specctl.drafters.features.eagle3 import FAMILY, Eagle3, Eagle3Options
from specctl.drafters.losses.align import ahead_mask
from specctl.drafters.nets.taps import default_taps
from specctl.export.package.load import parse_options

TEXT = [5, 17, 3, 88, 41, 9, 9, 60, 2, 33, 71, 12]


def make_drafter(target: Any, seed: int = 1, **options: Any) -> Eagle3:
    torch.manual_seed(seed)
    vocab = options.pop("vocab", None)
    drafter = Eagle3(Eagle3Options(**options), target.spec, vocab)
    drafter.bind(target.borrowed())
    with torch.no_grad():  # the attention has something to say
        for part in (drafter.module.layer.self_attn.o_proj, drafter.module.layer.mlp.down_proj):
            part.weight.normal_(std=part.in_features**-0.5)
    return drafter


def one_text(ids: Sequence[int]) -> TrainBatch:
    ids_1S = torch.tensor([list(ids)])
    everything = torch.ones_like(ids_1S, dtype=torch.bool)
    position_1S = torch.arange(len(ids))[None]
    return TrainBatch(ids_1S, everything, torch.zeros_like(ids_1S), position_1S)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fc_norm": True, "norm_output": True},
        {"qk_norm": True, "heads": 4, "kv_heads": 1},
        {"norm_before_residual": True, "rope_theta": 500.0},
    ],
)
def test_training_step_j_equals_j_real_drafting_steps(
    make_target: Any, drive: Any, capture_batch: Any, options: dict[str, Any]
) -> None:
    target = make_target()
    drafter = make_drafter(target, **options)
    batch = capture_batch(target, drafter, one_text(TEXT))
    steps = drafter.unroll(batch, 4)
    for true_len in (2, 3, 7):
        served_TK = drive(target, drafter).chain_logits(TEXT[: true_len + 3], true_len)
        for step in range(4):
            trained_K = drafter.module.lm_head(steps[step][0, true_len - 2])
            torch.testing.assert_close(trained_K, served_TK[step], rtol=1e-4, atol=1e-4)


def test_a_later_row_or_document_is_invisible_to_training_time_test(
    make_target: Any, make_batch: Callable[..., TrainBatch]
) -> None:
    target = make_target()
    drafter = make_drafter(target)
    batch = make_batch(target, drafter)
    row = 4
    changed = {tap: value.clone() for tap, value in batch.taps.items()}
    for value in changed.values():
        value[:, row + 1 :] += 1.0
    before = drafter.unroll(batch, 3)
    after = drafter.unroll(replace(batch, taps=changed), 3)
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(old[:, : row + 1], new[:, : row + 1])
        assert not torch.allclose(old[:, row + 1], new[:, row + 1])
    first_of_second = int((batch.document_BS[0] == 1).nonzero()[0, 0])
    for value in changed.values():
        value[:, :first_of_second] += 1.0
    far = drafter.unroll(replace(batch, taps=changed), 3)
    for new, newer in zip(after, far, strict=True):
        torch.testing.assert_close(new[:, first_of_second:], newer[:, first_of_second:])


def test_step_j_row_t_reads_token_t_plus_1_plus_j(make_target: Any, capture_batch: Any) -> None:
    target = make_target()
    drafter = make_drafter(target)
    batch = capture_batch(target, drafter, one_text(TEXT))
    ids = batch.ids_BS.clone()
    ids[0, 6] = 50  # read by row 5 in step 0, by row 4 in step 1, by row 3 in step 2
    before = drafter.unroll(batch, 3)
    after = drafter.unroll(replace(batch, ids_BS=ids), 3)
    for step, first_row in enumerate((5, 4, 3)):
        moved = (before[step] - after[step]).abs().amax(-1)[0] > 1e-6
        assert int(moved.nonzero()[0, 0]) == first_row


def test_loss_counts_each_predictable_row_once_per_step_weighted(
    make_target: Any, make_batch: Callable[..., TrainBatch]
) -> None:
    target = make_target()
    drafter = make_drafter(target, ttt_steps=3, decay=0.5)
    batch = make_batch(target, drafter)
    out = drafter.loss(batch)
    expected = sum(0.5**j * int(ahead_mask(batch, 2 + j).sum()) for j in range(3))
    assert float(out.count) == pytest.approx(expected)
    assert float(out.metrics["alpha/2"][1]) == int(ahead_mask(batch, 4).sum())


def test_positions_whose_target_argmax_is_cut_are_not_trained(
    make_target: Any, make_batch: Callable[..., TrainBatch]
) -> None:
    target = make_target()
    vocab = VocabMap(torch.arange(0, target.spec.vocab_size, 2), target.spec.vocab_size)
    drafter = make_drafter(target, vocab=vocab, ttt_steps=1)
    batch = make_batch(target, drafter)
    out = drafter.loss(batch)
    assert batch.teacher_BSV is not None
    kept = (batch.teacher_BSV.argmax(-1) % 2 == 0)[:, 1:]
    rows = ahead_mask(batch, 2)[:, :-1]
    assert float(out.count) == int((rows & kept).sum()) < int(rows.sum())


def test_head_options_decide_initial_rows_and_what_trains(make_target: Any) -> None:
    target = make_target()
    vocab = VocabMap(torch.tensor([1, 4, 5, 90]), target.spec.vocab_size)
    rows_KD = target.borrowed().head_VD[vocab.ids_K]
    for choice, copied, trains in (
        ("init", True, True),
        ("frozen", True, False),
        ("scratch", False, True),
    ):
        drafter = make_drafter(target, vocab=vocab, lm_head=choice)
        assert torch.equal(drafter.module.lm_head.weight, rows_KD) == copied
        assert ("lm_head.weight" in drafter.trainable()) == trains
        assert "lm_head.weight" in drafter.tensors()


def test_the_residual_starts_at_the_state_or_behind_its_norm(
    make_target: Any, capture_batch: Any
) -> None:
    target = make_target()
    drafters = [make_drafter(target, norm_before_residual=switch) for switch in (False, True)]
    batch = capture_batch(target, drafters[0], one_text(TEXT))
    told = []
    for drafter in drafters:
        layer = drafter.module.layer
        with torch.no_grad():
            layer.hidden_norm.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(1))
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        told.append(drafter.unroll(batch, 1)[0])
    net = drafters[0].module
    state_BSD = net.fc(net.gathered(batch.taps))
    torch.testing.assert_close(told[0], net.norm(state_BSD))
    torch.testing.assert_close(told[1], net.norm(net.layer.hidden_norm(state_BSD)))


def test_only_positions_of_a_target_that_scales_them_can_be_shared(make_target: Any) -> None:
    with pytest.raises(IncompatibleError, match="scaled_rope: false"):
        make_drafter(make_target(), scaled_rope=True)


def test_packages_without_the_later_options_are_read_as_they_were_written() -> None:
    options = asdict(Eagle3Options())
    for name in ("norm_before_residual", "rope_theta", "scaled_rope"):
        del options[name]
    read = parse_options(FAMILY, options)
    assert (read.norm_before_residual, read.rope_theta) == (False, None)


def test_binding_again_keeps_loaded_weights(make_target: Any) -> None:
    target = make_target()
    drafter = make_drafter(target)
    other = Eagle3(drafter.options, target.spec, None)
    other.load_tensors({name: tensor + 1.0 for name, tensor in drafter.tensors().items()})
    other.bind(target.borrowed())
    wanted = drafter.module.lm_head.weight + 1.0
    torch.testing.assert_close(other.module.lm_head.weight, wanted)


def test_tensor_names_are_those_of_the_public_format(make_target: Any) -> None:
    drafter = make_drafter(make_target(), fc_norm=True)
    names = set(drafter.tensors())
    layer = {
        f"layers.0.{part}.weight"
        for part in (
            "input_layernorm",
            "hidden_norm",
            "post_attention_layernorm",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        )
    }
    norms = {f"fc_norm.{i}.weight" for i in range(3)}
    assert names == layer | norms | {"fc.weight", "norm.weight", "lm_head.weight"}
    assert drafter.tensors()["layers.0.self_attn.q_proj.weight"].shape == (32, 64)


def test_taps_follow_the_paper_or_spread_over_a_shallow_target() -> None:
    assert default_taps(32) == (2, 16, 29)
    assert default_taps(8) == (2, 4, 5)
    assert [default_taps(n) for n in (1, 2, 3, 4, 6)] == [
        (0, 1),
        (0, 1, 2),
        (0, 1, 2),
        (1, 2, 3),
        (1, 3, 5),
    ]
    for depth in range(2, 40):
        taps = default_taps(depth)
        assert len(set(taps)) == 3
        assert 0 <= taps[0] < taps[-1] <= depth


def test_resolved_taps_are_recorded_in_the_options(make_target: Any) -> None:
    assert make_drafter(make_target()).options.taps == (1, 2, 3)


def test_a_tap_beyond_the_target_is_an_error(make_target: Any) -> None:
    with pytest.raises(RecipeError, match="0 to 4"):
        make_drafter(make_target(), taps=(1, 2, 9))


def _observe(
    drafter: Eagle3, state: Any, view: Any, text: list[int], new: list[int], features: Tensor
) -> list[int]:
    """Tell the state that all of `new` but its last token had been drafted and accepted."""
    drafts = torch.tensor([new[:-1]])
    tree = chain_tree(drafts, torch.ones_like(drafts, dtype=torch.bool), NodeKind.POINT)
    if len(new) == 1:
        tree = empty_tree(1, torch.device("cpu"))
    path = torch.arange(len(new))[None]
    at = slice(len(text) - 1, len(text) - 1 + len(new))
    taps = {tap: value[None, at] for tap, value in features.items()}
    state.observe(
        Outcome(
            view, tree, path, (len(new) - 1,), torch.tensor(new[-1:]), (tuple(new),), (None,), taps
        )
    )
    return text + new


@pytest.mark.parametrize("drafted", [True, False])
def test_after_rounds_with_or_without_drafting_the_cache_equals_a_fresh_one(
    make_target: Any, drive: Any, features: Any, round_view: Any, drafted: bool
) -> None:
    target = make_target()
    drafter = make_drafter(target)
    all_taps = features(target, TEXT, drafter.needs().taps)
    by_hand = drive(target, drafter)
    state = by_hand.open()
    text = TEXT[:3]
    by_hand.start(state, 0, text)
    for new in (TEXT[3:6], TEXT[6:7], TEXT[7:9]):
        view = round_view({0: text})
        if drafted:
            state.root(view)
            for step in range(3):  # junk drafts: they must leave no trace
                state.expand(torch.tensor([[step]]), torch.tensor([[step - 1]]))
        text = _observe(drafter, state, view, text, list(new), all_taps)
    root_K = state.root(round_view({0: text}))[0]
    torch.testing.assert_close(root_K, by_hand.chain_logits(text, len(text))[0])


def test_a_one_token_prompt_drafts_and_recovers(
    make_target: Any, drive: Any, features: Any, round_view: Any
) -> None:
    target = make_target()
    drafter = make_drafter(target)
    by_hand = drive(target, drafter)
    state = by_hand.open()
    by_hand.start(state, 0, TEXT[:1])
    view = round_view({0: TEXT[:1]})
    assert torch.isfinite(state.root(view)).all()
    state.expand(torch.tensor([[7]]), torch.tensor([[-1]]))
    all_taps = features(target, TEXT, drafter.needs().taps)
    text = _observe(drafter, state, view, TEXT[:1], TEXT[1:3], all_taps)
    root_K = state.root(round_view({0: text}))[0]
    torch.testing.assert_close(root_K, by_hand.chain_logits(text, 3)[0])


def test_tree_nodes_see_their_own_path_only(make_target: Any, drive: Any, round_view: Any) -> None:
    target = make_target()
    drafter = make_drafter(target)
    by_hand = drive(target, drafter)
    state = by_hand.open(num_slots=2)
    texts = {0: TEXT[:7], 1: TEXT[2:6]}
    for slot, text in texts.items():
        by_hand.start(state, slot, text)
    state.root(round_view(texts))
    token, parent = torch.tensor([[10, 11]] * 2), torch.full((2, 2), -1)
    state.expand(token, parent)
    deep = state.expand(torch.tensor([[20, 21, 22]] * 2), torch.tensor([[1, 0, 1]] * 2))
    for slot, text in texts.items():
        for node, path in enumerate(([11, 20], [10, 21], [11, 22])):
            alone = by_hand.chain_logits([*text, *path], len(text))[-1]
            torch.testing.assert_close(deep[slot, node], alone, rtol=1e-4, atol=1e-4)
