"""The Markov oracle: target and drafter as explicit distributions of the next token given the last
one.

Both are [V, V] tables of probabilities, so acceptances and expected lengths are sums that a test
can do by hand, and the engine, the policies and the rules run on them as on any model.
Letters: B rows, M nodes, T fed tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specctl.core.drafter import Drafter, Needs, Outcome, RoundSeconds, Space, StepState
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Borrowed, Feed, LanguageModel, LmOut
from specctl.core.spec import ModelSpec
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.measure.cost_table import CostTable
from specctl.runtime.policies.base import Policy
from specctl.runtime.policies.length import LengthChooser
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target


class MarkovLM(LanguageModel):
    """Logits are log p of the last token's row; there is nothing to remember."""

    def __init__(self, distribution_VV: Tensor) -> None:
        self.module = nn.Module()
        self.module.register_parameter(
            "log_VV", nn.Parameter(distribution_VV.log(), requires_grad=False)
        )
        size = len(distribution_VV)
        self.spec = ModelSpec("markov", 1, 1, size, 1, 1, 2, 1, 1e-6, 1e4, 1 << 20)

    def run(self, feed: Feed, kv: SlotKV | None) -> LmOut:
        rows: Any = self.module.log_VV
        return LmOut(feed.asked(rows[feed.ids_BT]))

    def borrowed(self) -> Borrowed:
        raise AssertionError("a Markov distribution has no embedding")


class MarkovState(StepState):
    """Counts what a policy asks for: `calls` to root or expand, `expanded` nodes."""

    def __init__(self, log_VV: Tensor) -> None:
        self.log_VV, self.calls, self.expanded = log_VV, 0, 0

    def start(self, slot: int, tokens: Any, taps: Any) -> None:
        pass

    def observe(self, outcome: Outcome) -> None:
        pass

    def root(self, view: Any) -> Tensor:
        self.calls += 1
        return self.log_VV[view.root_B]

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        self.calls, self.expanded = self.calls + 1, self.expanded + token_BM.shape[1]
        return self.log_VV[token_BM]


class MarkovDrafter(Drafter):
    family = "small-lm"

    def __init__(self, distribution_VV: Tensor) -> None:
        self.log_VV = distribution_VV.log()
        self.state = MarkovState(self.log_VV)

    def needs(self) -> Needs:
        return Needs()

    def open(self, space: Space) -> MarkovState:
        self.state = MarkovState(self.log_VV)
        return self.state


class PlacesState(MarkovState):
    """Shows the marginals of all places at once: q^d, whatever is drafted before."""

    def marginals(self, view: Any, length: int) -> Tensor:
        self.calls += 1
        rows, state_BV = [], torch.eye(len(self.log_VV))[view.root_B]
        for _ in range(length):
            state_BV = state_BV @ self.log_VV.exp()
            rows.append(state_BV.log())
        return torch.stack(rows, dim=1)


class Places(MarkovDrafter):
    def open(self, space: Space) -> PlacesState:
        self.state = PlacesState(self.log_VV)
        return self.state


class SilentState(MarkovState):
    """Has nothing to say behind tokens 2 and 4."""

    may_be_silent = True

    def root(self, view: Any) -> Tensor:
        return self._hushed(super().root(view), view.root_B)

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        return self._hushed(super().expand(token_BM, parent_BM), token_BM)

    def _hushed(self, logits: Tensor, behind: Tensor) -> Tensor:
        is_silent = (behind == 2) | (behind == 4)
        return logits.masked_fill(is_silent[..., None], -torch.inf)


class Silent(MarkovDrafter):
    def open(self, space: Space) -> MarkovState:
        self.state = SilentState(self.log_VV)
        return self.state


@dataclass
class Recorder(LengthChooser):
    """As deep as the policy allows; keeps every whole round."""

    first_is_free = False
    outcomes: list[Outcome] = field(default_factory=list)

    def length(self, batch: int) -> int:
        return 1 << 20

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        if not any(outcome.finished):
            self.outcomes.append(outcome)


@dataclass(frozen=True)
class Rounds:
    """What some rounds did: accepted tokens of each, nodes verified, draft calls and nodes."""

    accepted: np.ndarray
    nodes: np.ndarray
    outcomes: list[Outcome]
    calls: float
    expanded: float

    @property
    def mean(self) -> float:
        return float(self.accepted.mean())

    @property
    def error(self) -> float:
        """Standard error of the mean (rounds are nearly independent)."""
        return float(self.accepted.std() / np.sqrt(len(self.accepted)))

    def steps(self, size: int) -> np.ndarray:
        """[V, V]: how often each token followed each."""
        counts = np.zeros((size, size))
        for outcome in self.outcomes:
            for last, new in zip(outcome.view.root_B.tolist(), outcome.emitted, strict=True):
                for before, after in pairwise((last, *new)):
                    counts[before, after] += 1
        return counts

    @property
    def mean_nodes(self) -> float:
        return float(self.nodes.mean())


@dataclass(frozen=True)
class Pair:
    """A target distribution p and a draft distribution q, [V, V] each, and how q drafts."""

    p_VV: Tensor
    q_VV: Tensor
    drafts: type[MarkovDrafter] = MarkovDrafter

    @property
    def target(self) -> Target:
        return Target("markov", None, MarkovLM(self.p_VV), None, "markov", None, None, ())

    def run(
        self,
        policy: Policy,
        rule: str = "auto",
        tokens: int = 96,
        rows: int = 128,
        temperature: float = 1.0,
    ) -> Rounds:
        """Rounds of the real engine."""
        drafter, recorder = self.drafts(self.q_VV), Recorder(CostTable({}, {}, "", "", 1))
        engine = Engine(self.target, drafter, policy, rule, num_slots=rows, chooser=recorder)
        starts = [(i % len(self.p_VV),) for i in range(rows)]
        engine.run(
            [
                Request(start, Sampling(temperature, seed=i, max_new_tokens=tokens))
                for i, start in enumerate(starts)
            ]
        )
        outcomes = recorder.outcomes
        return Rounds(
            np.concatenate([o.num_accepted for o in outcomes]),
            np.concatenate([o.tree.valid_BN.sum(1).numpy() for o in outcomes]),
            outcomes,
            drafter.state.calls / len(outcomes),
            drafter.state.expanded / len(outcomes),
        )


def runs_and_open(run: int, num_open: int) -> Pair:
    """Token i of a run is followed by i + 1, the last one by an open token. Behind an open token
    the target goes on with one certain open token or begins the run; the drafter knows the run and
    has no idea of the rest."""
    size = run + num_open
    p_VV = torch.full((size, size), 0.01 / size)
    for token in range(run):
        p_VV[token, token + 1] += 0.99
    for token in range(run, size):
        p_VV[token, run + (token - run + 1) % num_open] += 0.59
        p_VV[token, 0] += 0.4
    q_VV = p_VV.clone()
    q_VV[run:] = 1.0
    return Pair(p_VV / p_VV.sum(1, keepdim=True), q_VV / q_VV.sum(1, keepdim=True))


def shifted(distribution_V: np.ndarray) -> Tensor:
    """Every row the same distribution, turned: acceptance is then the same in every state."""
    return torch.tensor(
        np.stack([np.roll(distribution_V, s) for s in range(len(distribution_V))])
    ).float()


def random_distribution(rng: np.random.Generator, size: int, spread: float = 1.5) -> np.ndarray:
    distribution = np.exp(spread * rng.standard_normal(size))
    return np.asarray(distribution / distribution.sum())


def alike(seed: int, size: int = 5, spread: float = 1.5, noise: float = 0.7) -> Pair:
    """A pair whose acceptance does not depend on the state."""
    rng = np.random.default_rng(seed)
    p = random_distribution(rng, size, spread)
    q = p * np.exp(noise * rng.standard_normal(size))
    return Pair(shifted(p), shifted(q / q.sum()))


def mixed(seed: int, size: int = 8, noise: float = 0.4) -> Pair:
    """States differ: behind half of them the next token is nearly certain, behind others open."""
    rng = np.random.default_rng(seed)
    spreads = np.where(np.arange(size) % 2 == 0, 5.0, 0.7)
    p = np.stack([random_distribution(rng, size, spread) for spread in spreads])
    q = p * np.exp(noise * rng.standard_normal(p.shape))
    return Pair(torch.tensor(p).float(), torch.tensor(q / q.sum(1, keepdims=True)).float())


def humble(seed: int, size: int = 8) -> Pair:
    """The next token is always nearly certain, but the drafter knows it behind every other token
    only, and is unsure where it does not know: its confidence says what will be accepted."""
    rng = np.random.default_rng(seed)
    p = np.stack([random_distribution(rng, size, 5.0) for _ in range(size)])
    ignorance = np.where(np.arange(size) % 2 == 0, 0.05, 0.9)[:, None]
    guess = np.stack([random_distribution(rng, size, 0.5) for _ in range(size)])
    q = (1.0 - ignorance) * p + ignorance * guess
    return Pair(torch.tensor(p).float(), torch.tensor(q).float())


def sibling_acceptance(p_V: np.ndarray, q_V: np.ndarray, count: int) -> list[float]:
    """Chance that the i-th sibling drawn without replacement is the accepted one, by recursive
    rejection, summed over every order of draws."""
    found = [0.0] * count
    for order in permutations(range(len(p_V)), count):
        r, s, chance = p_V.astype(float), q_V.astype(float), 1.0
        for i, x in enumerate(order):
            if s[x] <= 0:
                break
            chance *= s[x]
            take = min(1.0, r[x] / s[x])
            share = chance * take
            found[i] += share / _orders_after(len(p_V), i, count)
            chance *= 1.0 - take
            r = np.maximum(r - s, 0.0)
            r = r / r.sum() if r.sum() > 0 else r
            s = s.copy()
            s[x] = 0.0
            s = s / s.sum() if s.sum() > 0 else s
    return found


def _orders_after(size: int, i: int, count: int) -> int:
    """How many orders share their first i + 1 draws."""
    ways = 1
    for used in range(i + 1, count):
        ways *= size - used
    return ways
