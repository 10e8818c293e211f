"""Limits: every bound of the server in one place, checked when it is built."""

from __future__ import annotations

from dataclasses import dataclass, fields

from specctl.core.errors import RecipeError

_MAY_BE_ZERO = ("max_queue", "max_logprobs", "drain", "queue_timeout", "control_tokens")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server takes on. Sizes in bytes, times in seconds.

    `max_batch` rows run at once and `max_queue` wait; one that waited `queue_timeout` is refused.
    `max_len` positions per row are reserved (None: the target's context, at most 4,096), within
    `memory` bytes of caches (None: what half of the free memory holds). `prefill_chunk` prompt
    tokens of joining rows are read per round, so that live rows go on. `control_tokens`: raw
    prompts may hold those of the target, spelled or as ids; in messages they are text anyway.
    """

    max_batch: int = 8
    max_queue: int = 64
    queue_timeout: float = 60.0
    max_len: int | None = None
    memory: int | None = None
    max_new_tokens: int | None = None
    prefill_chunk: int = 256
    max_body: int = 1 << 20
    max_n: int = 8
    max_stop: int = 16
    max_stop_chars: int = 256
    max_logprobs: int = 20
    drain: float = 30.0
    control_tokens: bool = True

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            least = 0 if one.name in _MAY_BE_ZERO else 1
            if value is not None and not least <= value < float("inf"):
                raise RecipeError(
                    f"server limit {one.name} is out of range",
                    found=repr(value),
                    expected=f"a finite number >= {least}",
                    do=f"give {one.name} another value, or leave it out",
                )
