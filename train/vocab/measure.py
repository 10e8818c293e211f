"""What a drafter achieves, prompt by prompt, in the engine on this device; what it moves, and what
its head costs by its rows.

Drafting reads the body's weights and k rows of the LM head at every sequential call, so a round of
g calls costs c_verify + g (c_body + c_head k / V). The parts are fitted to drafting times measured
in the real engine with whole and with trimmed heads. Letters: V target vocabulary, k kept ids.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from specctl.core.drafter import Drafter
from specctl.core.vocab import VocabMap
from specctl.drafters.lm.small_lm import SmallLm
from specctl.models.llama.fast_llama import FastLlama
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.measure.cost import measure_costs
from specctl.runtime.measure.cost_table import CostTable
from specctl.runtime.policies import Policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import HeldoutPrompt


@dataclass(frozen=True, slots=True)
class PromptRun:
    """One prompt decoded: its counters, and its seconds without prefill."""

    domain: str
    rounds: int
    tokens: int
    accepted: int
    tested: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MeasuredDrafter:
    """A drafter on held-out prompts. `alpha` = accepted / tested drafts."""

    tau: float
    alpha: float
    tokens_per_second: float
    tokens: int = 0
    by_prompt: tuple[PromptRun, ...] = ()

    @classmethod
    def of(cls, runs: Sequence[PromptRun]) -> MeasuredDrafter:
        rounds, tokens = sum(r.rounds for r in runs), sum(r.tokens for r in runs)
        tested, seconds = sum(r.tested for r in runs), sum(r.seconds for r in runs)
        return cls(
            tokens / max(rounds, 1),
            sum(r.accepted for r in runs) / max(tested, 1),
            tokens / max(seconds, 1e-9),
            tokens,
            tuple(runs),
        )

    def domain(self, name: str) -> MeasuredDrafter:
        """The prompts of one domain."""
        return MeasuredDrafter.of([run for run in self.by_prompt if run.domain == name])

    def to_json(self) -> dict[str, Any]:
        return {
            "tau": round(self.tau, 4),
            "alpha": round(self.alpha, 4),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "tokens": self.tokens,
        }


def measure_drafter(
    target: Target,
    drafter: Drafter,
    policy: Policy,
    prompts: Sequence[HeldoutPrompt],
    new_tokens: int = 64,
    temperature: float = 0.0,
) -> MeasuredDrafter:
    """tau, alpha and tokens per second of real decoding at batch 1."""
    engine = Engine(target, drafter, policy, max_len=_longest(target, policy, prompts, new_tokens))
    runs = []
    for i, prompt in enumerate(prompts):
        sampling = Sampling(temperature=temperature, seed=i, max_new_tokens=new_tokens)
        started, prefill = time.perf_counter(), engine.prefill_seconds
        (done,) = engine.run([Request(prompt.ids, sampling)])
        seconds = time.perf_counter() - started - (engine.prefill_seconds - prefill)
        stats = done.stats
        runs.append(
            PromptRun(
                prompt.domain,
                stats.rounds,
                stats.tokens,
                sum(stats.accepted_at),
                sum(stats.tested_at),
                seconds,
            )
        )
    return MeasuredDrafter.of(runs)


def _longest(
    target: Target, policy: Policy, prompts: Sequence[HeldoutPrompt], new_tokens: int
) -> int:
    """Room for the longest prompt, so that the caches are made once."""
    longest = max(len(p.ids) for p in prompts) + new_tokens
    return min(longest, target.spec.max_positions) + policy.nodes + 2


def moved_bytes(drafter: Drafter, target: Target) -> int:
    """Bytes of weights that one draft call reads: its own, a borrowed LM head, but not the input
    embedding, of which only rows are read (unless it serves as the LM head). Of a routed head the
    picked groups count, of one with a shortlist the rough scores and the candidates; of matrices
    as a GGUF file packs them, these blocks."""
    if isinstance(drafter, SmallLm) and drafter.is_packed:
        assert drafter.lm.token_bytes is not None
        return drafter.lm.token_bytes
    weights = {n: t for n, t in drafter.tensors().items() if t.is_floating_point()}
    num_rows = target.spec.vocab_size if drafter.vocab is None else drafter.vocab.size
    heads = {n for n, t in weights.items() if t.dim() == 2 and t.shape[0] == num_rows}
    own_heads = {n for n in heads if "embed" not in n}

    def moved(name: str, weight: Tensor) -> int:
        share = _read_share(drafter, *weight.shape) if name in heads else 1.0
        return round(weight.numel() * weight.element_size() * share)

    own = sum(
        moved(name, t)
        for name, t in weights.items()
        if "embed" not in name or (name in heads and not own_heads)
    )
    if heads:
        return own
    head_VD = target.borrowed().head_VD
    size, share = num_rows * head_VD.shape[1], _read_share(drafter, num_rows, head_VD.shape[1])
    return own + round(size * head_VD.element_size() * share)


def _read_share(drafter: Drafter, rows: int, width: int) -> float:
    """Of an LM head of that shape, what one call reads."""
    if (router := getattr(drafter.module, "router", None)) is not None:
        return float(router.top / router.num_groups)
    if getattr(drafter.options, "head_rank", None) is None:
        return 1.0
    shortlist = drafter.options.shortlist(rows)
    rough = shortlist.rank * (rows + width)
    return float((rough + min(shortlist.candidates, rows) * width) / (rows * width))


def target_bytes(target: Target) -> int:
    """Bytes of weights that one target step reads; the embedding counts as the LM head it feeds."""
    if isinstance(target.lm, FastLlama) and target.lm.bits == "packed":
        assert target.lm.token_bytes is not None
        return target.lm.token_bytes
    weight = target.borrowed().embedding_VD
    total = sum(p.numel() * p.element_size() for p in target.lm.module.parameters())
    is_tied = target.borrowed().head_VD.data_ptr() == weight.data_ptr()
    return total if is_tied else total - weight.numel() * weight.element_size()


@dataclass(frozen=True, slots=True)
class HeadCost:
    """Measured seconds on this device: a plain target step, a verification of a full draft, and one
    of the `calls` sequential draft calls, split into body and LM head at full vocabulary.
    `verify_at` holds verification by draft length where more than one length was measured."""

    plain: float
    verify: float
    body: float
    head: float
    calls: int
    vocab_size: int
    measured: tuple[tuple[int, float], ...] = ()  # (kept ids, drafting seconds of a round)
    verify_at: Mapping[int, float] = field(default_factory=dict)
    is_parallel: bool = False

    def round_seconds(self, size: int) -> float:
        return self.verify + self.calls * (self.body + self.head * size / self.vocab_size)

    def speedup(self, tau: float, size: int) -> float:
        """tau / (c_verify + g (c_body + c_head k / V)), costs in plain steps."""
        return tau * self.plain / self.round_seconds(size)

    def speedups(self, tau_N: Tensor, sizes: Sequence[int]) -> Tensor:
        """`speedup` of many sizes."""
        size_N = torch.tensor(sizes, dtype=torch.float64)
        call_N = self.body + self.head * size_N / self.vocab_size
        return tau_N * self.plain / (self.verify + self.calls * call_N)

    def at_length(self, length: int) -> HeadCost:
        """The cost of rounds that draft `length` tokens; it must have been measured."""
        calls = 1 if self.is_parallel else length
        return replace(self, verify=self.verify_at[length], calls=calls)

    def to_json(self) -> dict[str, Any]:
        milliseconds = {n: 1e3 * getattr(self, n) for n in ("plain", "verify", "body", "head")}
        return {
            **{f"{name}_ms": round(value, 4) for name, value in milliseconds.items()},
            "calls": self.calls,
            "measured_ms": [[size, round(1e3 * s, 4)] for size, s in self.measured],
        }


def fit_cost(
    plain: float,
    verify: float,
    rounds: Sequence[tuple[int, float]],
    calls: int,
    vocab_size: int,
) -> HeadCost:
    """Least squares of drafting time = calls (body + head k / V), neither part below zero."""
    size = torch.tensor([[1.0, k / vocab_size] for k, _ in rounds], dtype=torch.float64)
    seconds = torch.tensor([[s / calls] for _, s in rounds], dtype=torch.float64)
    body, head = torch.linalg.lstsq(size, seconds).solution[:, 0].tolist()
    mean = float(seconds.mean())
    if head < 0.0:
        body, head = mean, 0.0
    elif body < 0.0:
        body, head = 0.0, mean / max(float(size[:, 1].mean()), 1e-9)
    return HeadCost(plain, verify, body, head, calls, vocab_size, tuple(rounds))


def draft_calls(drafter: Drafter, policy: Policy) -> int:
    """g: sequential draft calls of a round."""
    return 1 if drafter.one_call else max(policy.depth, 1)


def _reached(tables: Collection[CostTable]) -> int:
    """The longest draft that every table has a price of."""
    common = set.intersection(*({k for k, s in t.draft.items() if s < inf} for t in tables))
    return max(common)


def measure_head_cost(
    target: Target,
    drafter: Drafter,
    policy: Policy,
    rank: Tensor,
    prompts: Sequence[HeldoutPrompt],
    rounds: int = 24,
    every_length: bool = False,
) -> HeadCost:
    """Times drafting with all ids, a third and a twelfth of them, and fits body and head; with
    `every_length` also verification of every draft length up to the policy's. Of drafts that always
    end early, the longest that occur are timed, and their price is that of a whole one's part."""
    num_ids, tables = rank.numel(), {}
    lengths = range(1, policy.depth + 1) if every_length else (policy.depth,)
    ids = [p.ids for p in prompts]
    for size in sorted({max(2, num_ids // 12), max(2, num_ids // 3), num_ids}):
        ids_K = rank[:size].sort().values.to(target.device)
        small = drafter.trimmed(VocabMap(ids_K, target.spec.vocab_size))
        tables[size] = measure_costs(target, small, policy, ids, lengths=lengths, rounds=rounds)
        if tables[size].draft[policy.depth] == inf:
            shorter = range(1, policy.depth + 1)
            tables[size] = measure_costs(target, small, policy, ids, lengths=shorter, rounds=rounds)
    reached = _reached(tables.values())
    whole = 1.0 if drafter.one_call else max(policy.depth, 1) / max(reached, 1)
    fitted = fit_cost(
        plain=min(t.round_seconds(0) for t in tables.values()),
        verify=min(t.verify[reached] for t in tables.values()),
        rounds=[(size, whole * table.draft[reached]) for size, table in tables.items()],
        calls=draft_calls(drafter, policy),
        vocab_size=target.spec.vocab_size,
    )
    verify_at = {k: min(t.verify[min(k, reached)] for t in tables.values()) for k in lengths}
    return replace(fitted, verify_at=verify_at, is_parallel=drafter.one_call)
