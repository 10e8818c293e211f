"""Room: how many rows of which length the caches are reserved for, before anybody asks."""

from __future__ import annotations

from dataclasses import dataclass

from specctl.recipes.errors import ResourceError
from specctl.runtime.place import available_bytes
from specctl.runtime.policies.base import Policy
from specctl.runtime.server.limits import Limits
from specctl.runtime.target import Target

USUAL = 4096  # positions per row, where nobody says how many


@dataclass(frozen=True, slots=True)
class Room:
    """`slots` rows of `context` tokens (prompt and answer), `slot_bytes` of cache for each."""

    slots: int
    context: int
    slot_bytes: int


def room_for(target: Target, policy: Policy, limits: Limits) -> Room:
    """At most `max_batch` slots, as many as the memory holds. The target's own cache is counted; a
    drafter's is small beside it."""
    spec = target.spec
    context = min(spec.max_positions, limits.max_len or USUAL)
    row = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * target.dtype.itemsize
    slot = row * (context + policy.nodes + 2)
    memory = limits.memory
    if memory is None and (free := available_bytes(target.device)) is not None:
        memory = free // 2
    slots = limits.max_batch if memory is None else min(limits.max_batch, memory // slot)
    if slots < 1:
        raise ResourceError(
            "the cache of one row does not fit in memory",
            found=f"{(memory or 0) / 1e9:.2f} GB for caches",
            expected=f"{slot / 1e9:.2f} GB for one row of {context:,} tokens",
            do="serve a shorter context (max_len), or give it more memory",
        )
    return Room(int(slots), context, slot)
