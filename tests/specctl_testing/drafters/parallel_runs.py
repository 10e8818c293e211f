"""Shared by the tests of drafters that decode in parallel: one engine, its answers and outcomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from specctl.core.drafter import Drafter, DraftState, Outcome, RoundSeconds
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Completion, Request
from specctl.runtime.measure.cost_table import CostTable
from specctl.runtime.policies import make_policy
from specctl.runtime.policies.length import LengthChooser
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl_testing.runtime.states import opened_states

PROMPTS = ((3, 1, 4, 1, 5), (20, 2, 20, 2))


@dataclass
class Recorder(LengthChooser):
    """Never limits the draft; keeps what every round did."""

    first_is_free = False
    outcomes: list[Outcome] = field(default_factory=list)

    def length(self, batch: int) -> int:
        return 10**6

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        self.outcomes.append(outcome)


@dataclass(frozen=True)
class Ran:
    """What a run emitted, and how."""

    answers: list[tuple[int, ...]]
    completions: list[Completion]
    outcomes: list[Outcome]
    state: DraftState | None

    @property
    def tau(self) -> float:
        rows = [completion.stats for completion in self.completions]
        return sum(row.tokens for row in rows) / sum(row.rounds for row in rows)

    @property
    def drafted(self) -> int:
        return sum(completion.stats.drafted for completion in self.completions)


def decode(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    *,
    tokens: int = 32,
    length: int = 8,
    nodes: int | None = None,
    slots: int = 1,
    policy: str = "direct",
    temperature: float = 0.0,
    beam: int | None = None,
) -> Ran:
    """Answers of exactly `tokens` tokens under one policy."""
    recorder = Recorder(CostTable({0: 1.0}, {0: 1.0}, "", "", 1))
    serve = {"policy": policy, "length": length, "nodes": nodes, "beam": beam}
    grown = None if drafter is None else make_policy(serve)
    states = [] if drafter is None else opened_states(drafter)
    engine = Engine(target, drafter, grown, num_slots=slots, chooser=recorder)
    requests = [
        Request(
            tuple(prompt),
            Sampling(temperature=temperature, seed=i, max_new_tokens=tokens, ignore_eos=True),
        )
        for i, prompt in enumerate(prompts)
    ]
    completions = engine.run(requests)
    return Ran(
        [c.tokens for c in completions],
        completions,
        recorder.outcomes,
        states[-1] if states else None,
    )


def counting_target(make_model: Callable[..., Any], size: int = 64) -> Target:
    """A target that says token t + 1 after token t, whatever came before."""
    model = make_model(num_layers=2, hidden=size, vocab=size)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.copy_(torch.eye(size).roll(1, 0))
    return Target.from_model(model)
