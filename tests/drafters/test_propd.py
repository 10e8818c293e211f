"""ProPD's family: Medusa's heads and an early head, which learns, is trimmed and prunes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.errors import RecipeError
from specctl.core.vocab import VocabMap
from specctl.drafters.heads.propd import ProPD, ProPDOptions
from specctl.runtime.engine.engine import Engine
from specctl.runtime.generate import generate
from specctl.runtime.policies.propd import Progressive
from specctl.runtime.sampling.sampling import Sampling


def make_drafter(target: Any, vocab: VocabMap | None = None, **options: Any) -> ProPD:
    drafter = ProPD(ProPDOptions(**options), target.spec, vocab)
    drafter.bind(target.borrowed())
    return drafter


def test_a_fresh_early_head_reads_a_layer_as_the_targets_head_reads_the_last(
    make_target: Any, make_batch: Any
) -> None:
    target = make_target(num_layers=4)
    drafter = make_drafter(target, early_layer=1)
    state_BSD = make_batch(target, drafter).taps[1]
    with torch.no_grad():
        logits_BSV = target.lm.lm_head(state_BSD)  # its last norm is of ones
        torch.testing.assert_close(drafter.early_logits(state_BSD), logits_BSV)


def test_the_early_head_learns_the_next_token_and_the_others_do_not_mind(
    make_target: Any, make_batch: Any
) -> None:
    target = make_target(num_layers=4)
    drafter = make_drafter(target, early_layer=2)
    batch = make_batch(target, drafter)
    out = drafter.loss(batch)
    out.sum.backward()
    heads = {n: p.grad.clone() for n, p in drafter.trainable().items() if p.grad is not None}
    assert set(heads) == set(drafter.trainable())
    early = {n for n in heads if n.startswith("4.")}
    assert early == {"4.norm.weight", "4.block.linear.weight", "4.block.linear.bias",
                     "4.head.weight"}  # fmt: skip
    optimizer = torch.optim.Adam([p for n, p in drafter.trainable().items() if n in early], lr=1e-2)

    def agree() -> float:
        """How much of the target's distribution the early head shares."""
        with torch.no_grad():
            q = drafter.early_logits(batch.taps[2]).softmax(-1)
            p = batch.teacher_BSV.softmax(-1)
        return float(torch.minimum(p, q).sum(-1).mean())

    before = agree()
    for _ in range(40):
        optimizer.zero_grad()
        drafter.loss(batch).sum.backward()
        optimizer.step()
    assert agree() > before + 0.5 * (1 - before)


def test_trimming_cuts_the_early_heads_rows_too(make_target: Any) -> None:
    target = make_target(num_layers=2, vocab=32)
    drafter = make_drafter(target)
    small = drafter.trimmed(VocabMap(torch.tensor([1, 5, 9, 30]), 32))
    torch.testing.assert_close(
        small.early.head.weight, drafter.early.head.weight[torch.tensor([1, 5, 9, 30])]
    )


def test_the_layer_lies_within_the_target(make_target: Any) -> None:
    with pytest.raises(RecipeError, match="layers below and above"):
        make_drafter(make_target(num_layers=2), early_layer=2)


def test_the_early_head_decides_what_falls_and_no_text_changes(make_target: Any) -> None:
    """A head that knows nothing but one token keeps no other; sampled text stays as it is."""
    target = make_target(num_layers=4, vocab=48)
    vocab = VocabMap(torch.arange(8, 48), 48)
    drafter = make_drafter(target, vocab, num_heads=3, early_layer=2)
    settings = {"temperature": 1.0, "seed": 3, "max_new_tokens": 12, "ignore_eos": True}
    sampling = Sampling(**settings)
    prompts = [[1, 2, 3], [7]]
    plain = generate(target, prompts, sampling=sampling, batch=2)

    def pruned(**more: Any) -> Any:
        policy = Progressive(3, 12, early_layer=2, early_top=1, **more)
        done = generate(target, prompts, sampling=sampling, drafter=drafter, policy=policy, batch=2)
        assert [o.token_ids for o in done.outputs] == [o.token_ids for o in plain.outputs]
        return done.stats.drafted / done.stats.rounds

    usual = pruned(early_shared=True)
    with torch.no_grad():
        drafter.early.head.weight.zero_()  # all tokens level: none ranks below another
    assert pruned() > usual
    assert pruned(early_shared=True) == usual


def test_a_head_of_another_layer_is_refused(make_target: Any) -> None:
    target = make_target(num_layers=4)
    drafter = make_drafter(target, early_layer=2)
    with pytest.raises(RecipeError, match="behind another layer"):
        Engine(target, drafter, Progressive(early_layer=3))
    Engine(target, drafter, Progressive(early_layer=3, early_shared=True))
