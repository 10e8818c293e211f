"""What a round costs on this device: medians measured in the real engine, host time included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from specctl.drafters.parts.base import Drafter
from specctl.runtime.engine import Engine
from specctl.runtime.policies.base import Policy
from specctl.runtime.policies.length import CostTable, FixedLength, LengthChooser
from specctl.runtime.sampling import Sampling
from specctl.runtime.session import Request
from specctl.runtime.target import Target

DEFAULT_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8)


def measure_costs(
    target: Target,
    drafter: Drafter,
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    batch: int = 1,
    rounds: int = 24,
    sampling: Sampling | None = None,
) -> CostTable:
    """Medians over `rounds` rounds per length in the real engine, lengths interleaved twice."""
    base = sampling if sampling is not None else Sampling()
    lengths = sorted({0, *(k for k in lengths if k <= policy.depth), policy.depth})
    probes = {k: FixedLength(CostTable({}, {}, "", "", batch), fixed=k) for k in lengths}
    for _ in range(2):
        for k, probe in probes.items():
            limit = max(4, rounds // 2) * (k + 1)
            wanted = Sampling(
                temperature=base.temperature, seed=base.seed, max_new_tokens=limit, ignore_eos=True
            )
            requests = [Request(tuple(p), wanted) for p in list(prompts)[:batch]]
            Engine(target, drafter, policy, "auto", num_slots=batch, chooser=probe).run(requests)
    return CostTable(
        {k: _median(p.draft_seconds) for k, p in probes.items()},
        {k: _median(p.verify_seconds) for k, p in probes.items()},
        str(target.device),
        str(target.dtype).removeprefix("torch."),
        batch,
    )


def adaptive(
    target: Target, drafter: Drafter, policy: Policy, *, batch: int = 1, context: int = 32
) -> Callable[[], LengthChooser]:
    """Measure the pair on this device once; every call then makes a fresh chooser, which picks the
    draft length of each round and switches speculation off where it does not pay."""
    steps_N = torch.arange(1, batch + 1)[:, None] * torch.arange(1, context + 1)
    prompts = (steps_N % target.spec.vocab_size).tolist()
    costs = measure_costs(target, drafter, policy, prompts, batch=batch, rounds=16)
    return partial(LengthChooser, costs)


def _median(values: Sequence[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).median()) if values else float("inf")
