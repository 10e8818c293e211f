"""Jump: what a drafted token is made of, what training reads of it, and where it cannot be had."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.errors import IncompatibleError, RecipeError
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.language_model import Feed
from specctl.core.tree import NodeKind
from specctl.drafters.losses.head_losses import weighted_sum
from specctl.drafters.self_speculation.jump import Jump, JumpOptions
from specctl.drafters.tokens.uno import Uno, UnoOptions
from specctl.runtime.proof.enumerate import Case, enumerate_case
from specctl.runtime.target.target import Target

TEXT = [3, 1, 4, 1, 5, 9]


def made(target: Target, moved: float = 0.3, **options: Any) -> Jump:
    """`moved`: how far its matrices are from what they are when fresh."""
    torch.manual_seed(0)
    drafter = Jump(JumpOptions(**options), target.spec, None)
    drafter.bind(target.borrowed())
    with torch.no_grad():
        for parameter in drafter.module.parameters():
            parameter.add_(torch.randn_like(parameter) * moved)
    return drafter


KINDS = [
    ("llama", {}),
    ("gemma2", {"first": 1, "source": 1}),  # scaled embeddings, windows; the source is predicted
    ("llama", {"last": 2, "source": 2, "predictor": "linear", "reads_state": False}),
    ("gpt_neox", {"rank": None}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_training_reads_what_drafting_does_of_a_packed_row(
    make_target: Any, make_batch: Any, drive: Any, kind: str, options: dict[str, Any]
) -> None:
    """Of the second document, behind two anchors at once and four steps deep."""
    target = make_target(kind, num_layers=3, vocab=24)
    drafter = made(target, num_heads=4, **options)
    batch = make_batch(target, drafter)
    begin, anchor_BA = 9, torch.tensor([[11, 14]]).expand(len(batch.ids_BS), -1)
    assert batch.position_BS[0, begin] == 0
    steps = drafter._steps(batch, anchor_BA, drafter.lm)
    for which, anchor in enumerate(anchor_BA[0].tolist()):
        text = batch.ids_BS[0, begin : anchor + 5].tolist()
        drafted_TK = drive(target, drafter).chain_logits(text, anchor + 2 - begin)
        ready_TD = torch.stack([step.ready_BTD[0, which] for step in steps])
        trained_TK = ready_TD @ drafter.head_weight().T
        torch.testing.assert_close(trained_TK, drafted_TK, rtol=1e-4, atol=1e-4)


def test_a_token_is_the_predicted_state_through_the_upper_layers(
    make_target: Any, drive: Any
) -> None:
    """Written out for one token behind another: the equations of the module."""
    target = make_target("qwen3", num_layers=4, vocab=24)
    drafter = made(target, rank=None, width=1.5)
    net, lm = drafter.module.predictor, target.lm
    ids = torch.tensor([[7, 2]])
    masks, at = lm.document_masks(ids * 0), torch.arange(2)[None]
    with torch.no_grad():
        taps = lm.run(Feed(ids, at, masks, (2, 3)), None).taps
        e_D, h_D = target.borrowed().embedding_VD[2], taps[3][0, 0]

        def rms(x_D: Tensor) -> Tensor:
            return x_D / (x_D.square().mean() + 1e-6).sqrt()

        z = torch.cat([net.state_proj.weight @ rms(h_D), net.token_proj.weight @ rms(e_D)])
        gated = torch.nn.functional.silu(net.mlp.gate.weight @ z) * (net.mlp.value.weight @ z)
        x_D = e_D + net.gain * (net.skip.weight @ z + net.mlp.out.weight @ gated) + net.bias
        found_D = drafter.predicted(h_D[None, None], ids[:, 1:])[0, 0]
        torch.testing.assert_close(found_D, x_D)
        given = torch.stack([taps[2][0, 0], x_D])[None]  # the text, then the jump
        parts = SubLayers.span(2, 4)
        wanted = lm.run(Feed(ids, at, masks, parts=parts, residual_BTD=given), None)
    drafted_1K = drive(target, drafter).chain_logits([7, 2], 2)
    torch.testing.assert_close(drafted_1K[0], wanted.logits_BTV[0, 1], rtol=1e-4, atol=1e-4)


def test_siblings_and_their_children_are_made_of_their_own_parents(
    make_target: Any, drive: Any, round_view: Any
) -> None:
    target = make_target(num_layers=4, vocab=24)
    drafter = made(target)
    by_hand = drive(target, drafter)
    state = by_hand.open()
    by_hand.start(state, 0, TEXT)
    state.root(round_view({0: TEXT}))
    state.expand(torch.tensor([[7, 8]]), torch.tensor([[-1, -1]]))
    children_MK = state.expand(torch.tensor([[2, 2, 6]]), torch.tensor([[1, 0, 1]]))[0]
    for row, path in enumerate(([8, 2], [7, 2], [8, 6])):
        alone_K = by_hand.chain_logits([*TEXT, *path], len(TEXT))[-1]
        torch.testing.assert_close(children_MK[row], alone_K, rtol=1e-4, atol=1e-4)
    assert (children_MK[0] - children_MK[1]).abs().max() > 1e-2


@torch.no_grad()
def test_what_is_drafted_leaves_the_targets_distribution(make_target: Any, drive: Any) -> None:
    """Every draft of a chain of two and every coin, enumerated."""
    target, heat, prompt = make_target("llama", num_layers=3, vocab=4), 1.3, [1, 2, 3, 1]
    drafter, p, q = made(target), dict[Any, Any](), dict[Any, Any]()
    for path in (path for depth in range(3) for path in product(range(4), repeat=depth)):
        text = torch.tensor([[*prompt, *path]])
        masks, at = target.lm.document_masks(text * 0), torch.arange(text.shape[1])[None]
        row_V = target.lm.dense(text, at, masks).logits_BTV[0, -1]
        walked_NK = drive(target, drafter).chain_logits([*prompt, *path], len(prompt))
        p[path], q[path] = (
            (each.double() / heat).softmax(-1).numpy() for each in (row_V, walked_NK[-1])
        )
    assert min(abs(p[path] - q[path]).max() for path in ((), (1,))) > 1e-2
    assert enumerate_case(Case("jump", "chain", NodeKind.IID, (-1, 0), p, q, 4)).error < 1e-12


def test_the_loss_is_kl_and_the_states_error_of_every_step(
    make_target: Any, make_batch: Any
) -> None:
    """The state's is relative to the target's own at the token that the step reads."""
    target = make_target(num_layers=3, vocab=24)
    drafter = made(target, num_heads=2, stride=1, feature_weight=0.5)
    batch = make_batch(target, drafter)
    out = drafter.loss(batch)
    anchor_BA = drafter._anchors(batch)
    steps = drafter._steps(batch, anchor_BA, drafter.lm)
    ready_BATD = torch.stack([step.ready_BTD for step in steps], dim=2)
    plain = weighted_sum(drafter._compared(batch, anchor_BA, ready_BATD))
    wanted, own_BSD = plain.sum, batch.taps[drafter.first]
    for ahead, step in enumerate(steps, start=1):
        for b, t in torch.ones_like(batch.ids_BS).nonzero().tolist():
            at = t + ahead + 1
            if at >= 24 or not batch.loss_mask_BS[b, at]:
                continue
            if batch.document_BS[b, at] != batch.document_BS[b, t]:
                continue
            own_D = own_BSD[b, at - 1]
            off = (step.predicted_BTD[b, t] - own_D).square().mean() / own_D.square().mean()
            wanted = wanted + 0.5 * off
    torch.testing.assert_close(out.sum, wanted, rtol=1e-4, atol=1e-4)
    assert "state/1" in out.metrics


def test_what_is_no_jump_and_what_has_no_place_for_additions_is_refused(make_target: Any) -> None:
    target = make_target(num_layers=3, vocab=24)
    for options in ({"first": 0}, {"first": 3}, {"source": 3}, {"first": 2, "source": 1}):
        with pytest.raises(RecipeError, match="begins within them"):
            made(target, **options)
    with pytest.raises(RecipeError, match="nothing to learn"):
        JumpOptions(predictor="none", rank=None)
    with pytest.raises(IncompatibleError, match=r"no place for additions.*rank=null"):
        made(make_target("gpt_neox", num_layers=3, vocab=24))
    packed = replace(target, lm=target.lm.in_bits("packed"))
    with pytest.raises(IncompatibleError, match="--dtype float32"):
        made(packed)
    made(packed, rank=None)


def test_plans_say_what_a_packed_file_and_a_trimmed_vocabulary_mean(make_target: Any) -> None:
    from specctl.core.vocab import VocabMap

    spec = make_target(num_layers=3, vocab=24).spec
    whole, cut = None, VocabMap(torch.arange(9), 24)
    assert [Jump(JumpOptions(rank=r), spec, cut).remarks(True) != [] for r in (4, None)] == [
        True,
        False,
    ]
    for vocab, is_packed, count in ((whole, False, 0), (whole, True, 1), (cut, True, 2)):
        said = Uno(UnoOptions(), spec, vocab).remarks(is_packed)
        assert len(said) == count
        assert is_packed == any("--dtype float32" in text for text in said)
        assert (vocab is cut) == any("9 of 24 ids" in text for text in said)
