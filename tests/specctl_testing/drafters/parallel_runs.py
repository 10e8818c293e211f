"""Shared by the tests of drafters that decode in parallel: one engine, its answers and outcomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from specctl.core.batch import TrainBatch
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


def copying_target(
    make_model: Callable[..., Any], period: int, num_words: int = 24, counting: int = 0
) -> Target:
    """A target of three layers whose last one repeats the text: behind token t it says what stood
    `period` - 1 tokens before t. Behind the first `counting` words it says the next word instead,
    which every depth knows; of all others the first two layers know nothing."""
    size = 64
    assert 1 + 2 * num_words <= size
    model = make_model(
        num_layers=3, hidden=size, vocab=num_words, num_attention_heads=1,
        num_key_value_heads=1, head_dim=size,
    )  # fmt: skip
    always, own, copied = 0, slice(1, 1 + num_words), slice(1 + num_words, 1 + 2 * num_words)
    words, half, sharp = torch.eye(num_words), size // 2, 8.0
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding, attention = model.model.embed_tokens.weight, model.model.layers[-1].self_attn
        embedding.zero_()
        embedding[:, always], embedding[:, own] = 1.0, words
        for matrix in (attention.q_proj, attention.k_proj, attention.v_proj):
            matrix.weight.zero_()
        angle = (period - 1) * model.model.rotary_emb.inv_freq  # of the query, turned back so far
        attention.k_proj.weight[:half, always] = 1.0
        attention.q_proj.weight[:half, always] = sharp * angle.cos()
        attention.q_proj.weight[half:, always] = -sharp * angle.sin()
        attention.v_proj.weight[:num_words, own] = words * (2.0 / size) ** 0.5  # undoes the norm
        attention.o_proj.weight[copied, :num_words] = words
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, copied] = 3.0 * words
        next_word = words.roll(1, 0)
        next_word[:, counting:] = 0.0
        model.lm_head.weight[:, own] = 6.0 * next_word
    return Target.from_model(model)


def repeating_batch(period: int, rows: int, seed: int, num_words: int = 24) -> TrainBatch:
    """Rows of `period` different words, four times over; what was read once is to be predicted."""
    draw = torch.Generator().manual_seed(seed)
    words = [torch.randperm(num_words, generator=draw)[:period] for _ in range(rows)]
    ids_BS = torch.stack(words).repeat(1, 4)
    at_BS = torch.arange(4 * period).expand_as(ids_BS)
    return TrainBatch(ids_BS, at_BS >= period, torch.zeros_like(ids_BS), at_BS)


def counting_batch(rows: int, seed: int, size: int) -> TrainBatch:
    """Rows that count from a random number on, of a `counting_target` of that size."""
    draw = torch.Generator().manual_seed(seed)
    at_BS = torch.arange(24).expand(rows, -1)
    ids_BS = (torch.randint(0, size, (rows, 1), generator=draw) + at_BS) % size
    return TrainBatch(ids_BS, at_BS >= 1, torch.zeros_like(ids_BS), at_BS)
