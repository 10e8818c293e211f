"""PEARL: drafting and verifying at once gives the same text, and runs longer than gamma."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from scipy.stats import chi2

from specctl.core.errors import RecipeError, SpecctlError
from specctl.drafters.features.eagle3 import Eagle3, Eagle3Options
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions
from specctl.drafters.training_free.prompt_lookup import PromptLookup, PromptLookupOptions
from specctl.drafters.training_free.token_recycling import TokenRecycling, TokenRecyclingOptions
from specctl.runtime.engine.request import Request
from specctl.runtime.generate import generate
from specctl.runtime.pearl import LONGEST_RUN, Pearl, PearlRow
from specctl.runtime.policies.chain import Chain
from specctl.runtime.policies.direct import Direct
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl_testing.runtime.markov import MarkovDrafter, alike

PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [7], [11, 12, 11, 12, 11])


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    found: Target = make_target(num_layers=3, vocab=24)
    return found


def twin(target: Target) -> SmallLm:
    """The target itself as its drafter: every greedy draft is right."""
    return SmallLm.from_lm(target.lm, target.spec)


def drafter_of(name: str, target: Target) -> Any:
    torch.manual_seed(3)
    if name == "twin":
        return twin(target)
    if name == "small-lm":
        return SmallLm(SmallLmOptions(layers=1, width=16), target.spec)
    return Eagle3(Eagle3Options(), target.spec)


@pytest.mark.parametrize("name", ["twin", "small-lm", "eagle3"])
@pytest.mark.parametrize("gamma", [1, 3])
def test_greedy_text_is_the_targets(target: Target, name: str, gamma: int) -> None:
    sampling = Sampling(max_new_tokens=30, ignore_eos=True)
    plain = generate(target, PROMPTS, sampling=sampling)
    drafter, policy = drafter_of(name, target), Chain(length=gamma)
    fast = generate(
        target, PROMPTS, drafter=drafter, sampling=sampling, policy=policy, parallel=True
    )
    assert [o.token_ids for o in fast.outputs] == [o.token_ids for o in plain.outputs]
    assert fast.stats.tokens == 90
    if name == "twin":
        assert fast.stats.rounds <= 3 * (30 // gamma + 2), "a round must give gamma tokens"


@pytest.mark.parametrize("gamma", [1, 3])
def test_sampled_text_follows_the_targets_distribution(gamma: int) -> None:
    pair, count = alike(3), 1200
    pearl = Pearl(pair.target, MarkovDrafter(pair.q_VV), Chain(length=gamma))
    (made,) = pearl.run([Request((0,), Sampling(1.0, seed=5, max_new_tokens=count))])
    p_VV = pair.p_VV.double()
    seen, wanted = torch.zeros_like(p_VV), torch.zeros_like(p_VV)
    for before, after in pairwise((0, *made.tokens)):
        seen[before, after] += 1
        wanted[before] += p_VV[before]
    often = wanted >= 5
    statistic = float(((seen - wanted)[often] ** 2 / wanted[often]).sum())
    assert float(chi2.sf(statistic, int(often.sum()) - len(p_VV))) > 1e-3
    alpha = float(torch.minimum(pair.p_VV[0], pair.q_VV[0]).sum())
    assert made.stats.accepted / sum(made.stats.tested_at) == pytest.approx(alpha, abs=0.06)
    assert any(pearl.run_lengths)


def test_accepted_runs_are_not_bounded_by_gamma(target: Target) -> None:
    pearl = Pearl(target, twin(target), Chain(length=3))
    sampling = Sampling(max_new_tokens=200, ignore_eos=True)
    (made,) = pearl.run([Request((3, 1, 4), sampling)])
    assert len(made.tokens) == 200
    assert max(pearl.run_lengths) > 20
    assert max(pearl.run_lengths) <= LONGEST_RUN


def test_both_sides_work_at_the_same_time(target: Target) -> None:
    """The drafter begins while the target's forward is running, and the other way round."""
    drafter, spans = twin(target), {"draft": [], "verify": []}  # type: ignore[var-annotated]
    pearl = Pearl(target, drafter, Chain(length=2))
    gate = threading.Barrier(2, timeout=20)
    draft, verify = PearlRow._draft, PearlRow._forward

    def timed(kind: str, call: Any) -> Any:
        def run(session: Any, *args: Any) -> Any:
            if session._count():
                gate.wait()  # passes only when the other side has begun, too
            began = time.perf_counter()
            found = call(session, *args)
            spans[kind].append((began, time.perf_counter()))
            return found

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PearlRow, "_draft", timed("draft", draft))
        patch.setattr(PearlRow, "_forward", timed("verify", verify))
        pearl.run([Request((3, 1, 4), Sampling(max_new_tokens=12, ignore_eos=True))])
    assert len(spans["draft"]) >= 4
    assert pearl.waited_seconds >= 0.0


def test_the_end_of_a_text_is_found_among_waiting_drafts(target: Target) -> None:
    plain = generate(target, [PROMPTS[0]], sampling=Sampling(max_new_tokens=30, ignore_eos=True))
    for limit in range(1, 9):
        sampling = Sampling(max_new_tokens=limit, ignore_eos=True)
        made = generate(
            target,
            [PROMPTS[0]],
            drafter=twin(target),
            sampling=sampling,
            policy=Chain(length=3),
            parallel=True,
        )
        assert made.outputs[0].token_ids == plain.outputs[0].token_ids[:limit]


@pytest.mark.parametrize("size", [256, 700])
def test_a_prompt_that_does_not_fit_is_refused_as_elsewhere(target: Target, size: int) -> None:
    """Before the prompts in front of it are continued."""
    assert target.spec.max_positions == 256
    for is_parallel in (False, True):
        written: list[int] = []
        with pytest.raises(SpecctlError, match=f"does not fit .* {size} tokens .* 1 to 255 tokens"):
            generate(
                target,
                [PROMPTS[0], [5] * size],
                drafter=twin(target),
                policy=Chain(length=3),
                parallel=is_parallel,
                on_tokens=lambda index, new, written=written: written.extend(new),
            )
        assert not written


def test_what_cannot_go_on_in_parallel_is_refused(target: Target) -> None:
    with pytest.raises(RecipeError, match="chain of fixed length"):
        Pearl(target, PromptLookup(PromptLookupOptions(), target.spec), Direct())
    with pytest.raises(RecipeError, match="chain of fixed length"):
        Pearl(target, twin(target), Chain(stop="svip"))
    recycling = TokenRecycling(TokenRecyclingOptions(), target.spec)
    with pytest.raises(RecipeError, match="while the target verifies"):
        Pearl(target, recycling, Chain(length=3))
