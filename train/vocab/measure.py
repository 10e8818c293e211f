"""What a drafter achieves, prompt by prompt, in the engine on this device; and what it moves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from specctl.core.drafter import Drafter
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import Policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.data.heldout import HeldoutPrompt


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
    picked groups count."""
    weights = {n: t for n, t in drafter.tensors().items() if t.is_floating_point()}
    num_rows = target.spec.vocab_size if drafter.vocab is None else drafter.vocab.size
    heads = {n for n, t in weights.items() if t.dim() == 2 and t.shape[0] == num_rows}
    own_heads = {n for n in heads if "embed" not in n}
    router = getattr(drafter.module, "router", None)
    share = 1.0 if router is None else router.top / router.num_groups
    own = sum(
        round(t.numel() * t.element_size() * (share if name in heads else 1.0))
        for name, t in weights.items()
        if "embed" not in name or (name in heads and not own_heads)
    )
    if heads:
        return own
    head_VD = target.borrowed().head_VD
    return own + num_rows * head_VD.shape[1] * head_VD.element_size()


def target_bytes(target: Target) -> int:
    """Bytes of weights that one target step reads; the embedding counts as the LM head it feeds."""
    weight = target.borrowed().embedding_VD
    total = sum(p.numel() * p.element_size() for p in target.lm.module.parameters())
    is_tied = target.borrowed().head_VD.data_ptr() == weight.data_ptr()
    return total if is_tied else total - weight.numel() * weight.element_size()
