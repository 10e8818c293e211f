"""Rules that end drafts, where it is known that they must pay: behind some tokens the drafter knows
how the text goes on, behind the others it knows nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.drafter import Space
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies.base import Policy
from specctl.runtime.policies.chain import Chain
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.stops import trained_stops
from specctl.runtime.stops.learned import write_stop
from specctl.train.stop_rules import Collector, collect, fit, learned_rule
from specctl_testing.runtime.markov import MarkovDrafter, MarkovState, Pair, runs_and_open

VERSE, PROSE = 8, 4  # tokens that follow each other, and tokens behind which anything may come
PRICE = 0.1  # of a drafted token, where a forward pass of the target costs 1
LONGEST = 10


class Known(MarkovState):
    """Its state names the newest token and the one before; also before the first pass."""

    def root(self, view: Any) -> Tensor:
        self.newest_B = self.before_B = view.root_B
        return super().root(view)

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        self.before_B, self.newest_B = self.newest_B, token_BM[:, 0]
        return super().expand(token_BM, parent_BM)

    def hidden(self) -> Tensor:
        return torch.cat([one_hot(self.before_B), one_hot(self.newest_B)], dim=-1)

    def known(self, view: Any) -> Tensor:
        return torch.stack([one_hot(view.root_B)] * 2, dim=1)


def one_hot(token_B: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(token_B, VERSE + PROSE).float()


class Reader(MarkovDrafter):
    def open(self, space: Space) -> Known:
        return Known(self.log_VV)


@pytest.fixture(scope="module")
def pair() -> Pair:
    """Verse, which the drafter knows, and prose, of which it has no idea."""
    return runs_and_open(VERSE, PROSE)


@dataclass(frozen=True)
class Worth:
    """Tokens for a unit of cost, request by request."""

    of_R: Tensor

    def ahead_of(self, other: Worth) -> float:
        """The mean difference, in standard errors."""
        by_R = self.of_R - other.of_R
        return float(by_R.mean() / (by_R.std() / len(by_R) ** 0.5))


def worth(pair: Pair, policy: Policy) -> Worth:
    sampling = [Sampling(1.0, seed=i, max_new_tokens=160, ignore_eos=True) for i in range(16)]
    engine = Engine(pair.target, Reader(pair.q_VV), policy, num_slots=16)
    made = engine.run([Request((i % VERSE,), each) for i, each in enumerate(sampling)])
    costs = [one.stats.rounds + PRICE * one.stats.drafted for one in made]
    return Worth(torch.tensor([160 / cost for cost in costs]))


@pytest.fixture(scope="module")
def best_fixed(pair: Pair) -> Worth:
    return best_length(pair)


def best_length(pair: Pair) -> Worth:
    found = [worth(pair, Chain(length=length)) for length in range(1, LONGEST + 1)]
    return max(found, key=lambda one: float(one.of_R.mean()))


def learned(
    pair: Pair, name: str, file: Path, order: Callable[[int], Tensor] = torch.arange
) -> Policy:
    """Chains that a rule ends which has learned by now, from labels in that order."""
    rule, drafter = learned_rule(name), Reader(pair.q_VV)
    prompts = [[i % (VERSE + PROSE)] for i in range(24)]
    found = collect(pair.target, drafter, rule, prompts, LONGEST, new_tokens=48)
    labels = [found.labels[i] for i in order(len(found.labels)).tolist()]
    found = Collector(rule, features=found.features, labels=labels)
    write_stop(file, name, fit(rule, found, steps=150).net, {})
    return Chain(length=LONGEST, stop=name, stop_file=str(file))


def scrambled(count: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


@pytest.mark.proof
@pytest.mark.parametrize(("name", "threshold"), [("svip", 0.4), ("confidence", None)])
def test_a_rule_that_reads_the_drafters_confidence_beats_the_best_fixed_length(
    pair: Pair, best_fixed: Worth, name: str, threshold: float | None
) -> None:
    found = worth(pair, Chain(length=LONGEST, stop=name, threshold=threshold))
    assert found.ahead_of(best_fixed) > 5


@pytest.mark.proof
@pytest.mark.parametrize("name", trained_stops())
def test_a_rule_that_learns_where_drafts_end_beats_the_best_fixed_length(
    pair: Pair, best_fixed: Worth, name: str, tmp_path: Path
) -> None:
    found = worth(pair, learned(pair, name, tmp_path / "stop"))
    assert found.ahead_of(best_fixed) > 3


@pytest.mark.proof
@pytest.mark.parametrize("name", trained_stops())
def test_a_rule_that_learned_scrambled_labels_does_not(
    pair: Pair, best_fixed: Worth, name: str, tmp_path: Path
) -> None:
    found = worth(pair, learned(pair, name, tmp_path / "stop", scrambled))
    assert found.ahead_of(best_fixed) < 0


@pytest.fixture(scope="module")
def vain(pair: Pair) -> Pair:
    """Its drafter is as sure in prose as in verse, and wrong there."""
    q_VV = pair.q_VV.clone()
    for token in range(VERSE, VERSE + PROSE):
        q_VV[token] = 0.01 / len(q_VV)
        q_VV[token, VERSE + (token - VERSE + 2) % PROSE] += 0.99
    return Pair(pair.p_VV, q_VV)


@pytest.mark.proof
def test_of_a_drafter_that_is_sure_and_wrong_states_tell_and_confidence_does_not(
    vain: Pair, tmp_path: Path
) -> None:
    best = best_length(vain)
    by_state = ("specdec-pp", "ada-eagle")
    policies = {name: learned(vain, name, tmp_path / name) for name in (*by_state, "disco")}
    policies["svip"] = Chain(length=LONGEST, stop="svip", threshold=0.4)
    ahead = {name: worth(vain, policy).ahead_of(best) for name, policy in policies.items()}
    assert min(ahead[name] for name in by_state) > 3
    assert max(ahead["svip"], ahead["disco"]) < 2
