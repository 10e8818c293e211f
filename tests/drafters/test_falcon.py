"""Falcon: blocks of tokens per pass, a recurrence over the text, and glancing in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.errors import RecipeError
from specctl.drafters.features.falcon import FalconOptions, Glance, choose
from specctl.drafters.nets.stride_net import TextLstm
from specctl_testing.drafters.head_cases import alphas, make_heads, nearly_markov, train
from specctl_testing.drafters.parallel_runs import decode

TEXT = [5, 17, 3, 8, 21, 1, 2, 9]


def disturbed(target: Any, **options: Any) -> Any:
    """A drafter whose branches all say something."""
    drafter = make_heads(target, "falcon", **options)
    with torch.no_grad():
        for parameter in drafter.trainable().values():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return drafter


@pytest.mark.parametrize(("stride", "passes"), [(2, 3), (3, 2), (5, 1)])
@torch.no_grad()
def test_a_pass_drafts_as_many_tokens_as_the_stride(
    make_target: Any, drive: Any, monkeypatch: Any, stride: int, passes: int
) -> None:
    drafter, calls = disturbed(make_target(num_layers=2, vocab=24), stride=stride), []
    look = type(drafter.module).look
    monkeypatch.setattr(
        type(drafter.module), "look", lambda *given: (calls.append(1), look(*given))[1]
    )
    assert len(drive(make_target(num_layers=2, vocab=24), drafter).chain_logits(TEXT, 4)) == 5
    assert len(calls) == passes


@torch.no_grad()
def test_the_second_block_reads_what_the_first_one_drafted(
    make_target: Any, drive: Any, features: Any
) -> None:
    """Served token by token, and computed again from whole rows of known and drafted features."""
    target = make_target(num_layers=2, vocab=24)
    drafter, known = disturbed(target), 4
    net, ids = drafter.module, torch.tensor([TEXT])
    state = features(target, TEXT[: known - 1], (2,))[2][None]
    for _ in range(2):
        S = state.shape[1]
        at_S = torch.arange(S)[None]
        x_BSD = net.over(drafter.embed(ids[:, 1 : S + 1]), state, torch.zeros_like(at_S))
        seen = [net.key_value(x_BSD, net.rope(at_S))]
        block = net.look(x_BSD[:, -2:], net.rope(at_S[:, -2:]), seen, None)
        state = torch.cat([state, block], dim=1)
    wanted = state[0, known - 1 :] @ drafter.head_weight().t()
    served = drive(target, drafter).chain_logits(TEXT[: known + 3], known)
    torch.testing.assert_close(served, wanted, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_token_of_a_block_is_guessed_without_the_one_before_it(
    make_target: Any, drive: Any
) -> None:
    target = make_target(num_layers=2, vocab=24)
    one = drive(target, disturbed(target))
    first, second = (one.chain_logits([*TEXT[:4], *drafted], 4) for drafted in ([1, 2], [7, 2]))
    torch.testing.assert_close(first[:2], second[:2])
    assert not torch.allclose(first[2], second[2])


def test_rows_of_other_lengths_change_no_draft(make_target: Any) -> None:
    target = make_target(num_layers=2, vocab=24)
    drafter = disturbed(target)
    prompts = ([7], TEXT, [3, 1, 4])
    alone, together = (
        decode(target, drafter, prompts, slots=slots, length=4, policy="chain") for slots in (1, 3)
    )
    assert [c.stats.rounds for c in alone.completions] == [
        c.stats.rounds for c in together.completions
    ]


@torch.no_grad()
def test_the_recurrence_begins_anew_with_every_document_and_goes_on_while_drafting() -> None:
    lstm = TextLstm(6, 4, num_layers=2)
    x_BSI = torch.randn(2, 9, 6)
    document_BS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1, -1], [0] * 9])
    packed = lstm.over(x_BSI, document_BS)
    torch.testing.assert_close(packed[:1, 4:7], lstm(x_BSI[:1, 4:7])[0])
    torch.testing.assert_close(packed[1:], lstm(x_BSI[1:])[0])
    fresh = torch.zeros(2, lstm.memory_width)
    _, memory = lstm.onward(x_BSI[:, :5], fresh, (2, 5))  # the first row ends after two tokens
    for row, count in enumerate((2, 5)):
        rest, _ = lstm.onward(x_BSI[row : row + 1, count:], memory[row : row + 1], (9 - count,))
        torch.testing.assert_close(rest, lstm(x_BSI[row : row + 1])[0][:, count:])


def test_the_recurrence_drops_between_its_layers_while_it_learns_only() -> None:
    """0.1 of the published trainer's LSTM; serving and the first pass of glancing drop nothing."""
    assert FalconOptions().dropout == 0.1
    torch.manual_seed(0)
    lstm, x_BSI = TextLstm(6, 4, num_layers=2, drop=0.5), torch.randn(2, 9, 6)
    document_BS = torch.zeros(2, 9, dtype=torch.long)
    whole, _ = lstm(x_BSI)
    assert not torch.allclose(lstm.over(x_BSI, document_BS), whole)
    with torch.no_grad():
        torch.testing.assert_close(lstm.over(x_BSI, document_BS), whole)
    served, _ = lstm.onward(x_BSI, torch.zeros(2, lstm.memory_width), (9, 9))
    torch.testing.assert_close(served, whole)
    lstm.eval()
    torch.testing.assert_close(lstm.over(x_BSI, document_BS), whole)


def test_a_share_of_the_wrong_tokens_is_shown_from_the_beginning_of_blocks() -> None:
    is_end_BS = torch.zeros(1, 60, dtype=torch.bool)
    is_end_BS[:, 5:45] = True
    glance = choose(torch.full((1, 60), 2), is_end_BS, stride=3, share=0.25)
    assert int((glance.shown_BS > 0).sum()) == 20  # a quarter of 40 times 2
    assert not bool((glance.shown_BS > 0)[~is_end_BS].any())
    assert set(glance.shown_BS[glance.shown_BS > 0].tolist()) == {1, 2}
    assert not bool(glance.shows(2).any())  # the last row of a block never
    one = Glance(torch.tensor([[0, 0, 0, 0, 1, 0, 0, 2, 0]]), stride=3)
    assert one.rows(torch.ones(1, 9, dtype=torch.bool))[0].nonzero()[:, 0].tolist() == [2, 5, 6]


def test_what_was_shown_is_not_scored(make_target: Any, make_batch: Any) -> None:
    target = make_target(num_layers=2, vocab=24)
    counts = {}
    for glance in (0.0, 0.4):
        drafter = make_heads(target, "falcon", glance=glance, decay=1.0)
        counts[glance] = float(drafter.loss(make_batch(target, drafter)).count)
    assert 0.6 * counts[0.0] < counts[0.4] < 0.9 * counts[0.0]


@pytest.mark.proof
def test_without_glancing_unseen_text_is_drafted_worse(make_model: Any, make_batch: Any) -> None:
    """A thousand tokens, seventy times over: glancing keeps the drafter from learning them by
    heart. False answers would do so here as well (docs/feature-level.md)."""
    target = nearly_markov(make_model)
    found = {}
    for glance in (0.0, 0.25):
        drafter = make_heads(target, "falcon", noise=0.0, glance=glance, glance_last=glance)
        train(target, drafter, make_batch, 70)
        found[glance] = alphas(target, drafter, make_batch)
    assert found[0.25][1] > found[0.0][1] + 0.015, found


@pytest.mark.parametrize(
    ("options", "message"), [({"stride": 1}, "too small"), ({"ttt_steps": 2}, "not unrolled")]
)
def test_options_that_make_no_sense_are_refused(options: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        FalconOptions(**options)
