"""What a draft head costs and what a drafter achieves, measured in the engine on this device."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from specctl.drafters.parts.base import Drafter
from specctl.drafters.parts.vocab import VocabMap
from specctl.runtime.cost import measure_costs
from specctl.runtime.engine import Engine
from specctl.runtime.generate import summarize
from specctl.runtime.policies import Policy
from specctl.runtime.sampling import Sampling
from specctl.runtime.session import Request
from specctl.runtime.target import Target
from specctl.train.coverage import HeadCost, fit_cost
from specctl.train.heldout import Prompt
from specctl.train.trim_report import Measured

PARALLEL_FAMILIES = frozenset({"medusa"})  # one draft call gives every position


def measure_drafter(
    target: Target,
    drafter: Drafter,
    policy: Policy,
    prompts: Sequence[Prompt],
    new_tokens: int = 64,
    temperature: float = 0.0,
) -> Measured:
    """tau, alpha and tokens per second of real decoding at batch 1."""
    sampling = [
        Sampling(temperature=temperature, seed=i, max_new_tokens=new_tokens)
        for i in range(len(prompts))
    ]
    requests = [Request(p.ids, s) for p, s in zip(prompts, sampling, strict=True)]
    engine = Engine(target, drafter, policy)
    started = time.perf_counter()
    completions = engine.run(requests)
    stats = summarize(completions, engine, time.perf_counter() - started, "")
    return Measured(stats.tau, stats.alpha, stats.tokens_per_second, stats.tokens)


def draft_calls(drafter: Drafter, policy: Policy) -> int:
    """g: sequential draft calls of a round."""
    return 1 if drafter.family in PARALLEL_FAMILIES else max(policy.depth, 1)


def measure_head_cost(
    target: Target,
    drafter: Drafter,
    policy: Policy,
    rank: Tensor,
    prompts: Sequence[Prompt],
    rounds: int = 24,
) -> HeadCost:
    """Times drafting with all ids, a third and a twelfth of them, and fits body and head."""
    num_ids, tables = rank.numel(), {}
    for size in sorted({max(2, num_ids // 12), max(2, num_ids // 3), num_ids}):
        ids_K = rank[:size].sort().values.to(target.device)
        small = drafter.trimmed(VocabMap(ids_K, target.spec.vocab_size))
        ids = [p.ids for p in prompts]
        tables[size] = measure_costs(
            target, small, policy, ids, lengths=(policy.depth,), rounds=rounds
        )
    return fit_cost(
        plain=min(t.round_seconds(0) for t in tables.values()),
        verify=min(t.verify[policy.depth] for t in tables.values()),
        rounds=[(size, table.draft[policy.depth]) for size, table in tables.items()],
        calls=draft_calls(drafter, policy),
        vocab_size=target.spec.vocab_size,
    )


def moved_bytes(drafter: Drafter, target: Target) -> int:
    """Bytes of weights that one draft call reads: its own, a borrowed LM head, but not the input
    embedding, of which only rows are read (unless it serves as the LM head)."""
    weights = {n: t for n, t in drafter.tensors().items() if t.is_floating_point()}
    num_rows = target.spec.vocab_size if drafter.vocab is None else drafter.vocab.size
    heads = {n for n, t in weights.items() if t.dim() == 2 and t.shape[0] == num_rows}
    own_heads = {n for n in heads if "embed" not in n}
    own = sum(
        t.numel() * t.element_size()
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
