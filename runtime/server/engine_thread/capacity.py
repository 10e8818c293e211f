"""Capacity: how many rows of which length the caches are reserved for, before anybody asks."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from specctl.core.drafter import Drafter, Space
from specctl.core.errors import ResourceError
from specctl.runtime.engine.guard import place_of
from specctl.runtime.policies.base import Policy
from specctl.runtime.server.requests.limits import Limits
from specctl.runtime.target.device import available_bytes
from specctl.runtime.target.target import Target

LOG = logging.getLogger("specctl.server")
USUAL = 4096  # positions per row, where nobody says how many


@dataclass(frozen=True, slots=True)
class Capacity:
    """`slots` rows of `context` tokens (prompt and answer), `slot_bytes` of memory for each, of
    which the drafter takes `drafter_bytes`."""

    slots: int
    context: int
    slot_bytes: int
    drafter_bytes: int = 0


def room_for(
    target: Target, policy: Policy, limits: Limits, drafter: Drafter | None = None
) -> Capacity:
    """At most `max_batch` slots, as many as the memory holds: the target's cache and what the
    drafter keeps of a row. ResourceError names both where not even one fits."""
    spec = target.spec
    context = min(spec.max_positions, limits.max_len or USUAL)
    length = context + policy.nodes + 2
    entry = sum(layer.size for layer in target.lm.kv_layers) * target.dtype.itemsize
    cache, kept = entry * length, 0
    if drafter is not None:
        try:
            kept = drafter_bytes(target, drafter, length, policy.nodes)
        except Exception as error:  # the engine goes on without a drafter that cannot be opened
            LOG.warning("the drafter's memory was not measured: %s", place_of(error))
    memory = limits.memory
    if memory is None and (free := available_bytes(target.device)) is not None:
        memory = free // 2
    slot = cache + kept
    slots = limits.max_batch if memory is None else min(limits.max_batch, memory // slot)
    if slots < 1:
        own = "serve a shorter context (max_len), or give it more memory"
        raise ResourceError(
            "the cache of one row does not fit in memory",
            found=f"{_size(memory or 0)} for caches",
            expected=f"{_size(slot)} for one row of {context:,} tokens: {_size(cache)} for the "
            f"target and {_size(kept)} for the drafter",
            do=own + (", or serve without the drafter" if kept else ""),
        )
    return Capacity(int(slots), context, slot, kept)


def drafter_bytes(target: Target, drafter: Drafter, length: int, nodes: int) -> int:
    """What one row of `length` positions takes for the drafter: its own memory, and the taps of the
    prompt, which wait for it and stay where a conversation may go on."""
    needs = drafter.needs()
    if needs.borrow:
        drafter.bind(target.borrowed())
    space = Space(1, length, nodes, target.device, target.dtype, target.identity)
    taps = len(needs.taps) * target.spec.hidden_size * target.dtype.itemsize
    return drafter.slot_bytes(space) + taps * length


def _size(num_bytes: int) -> str:
    """In the unit that leaves digits to compare."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 1e3:.2f} kB"
