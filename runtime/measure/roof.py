"""The speed that reading weights sets: a plain token takes at least as long as its weights take to
be read, and a drafted round, which reads them once, cannot take less.

So plain decoding makes at most bandwidth / bytes tokens a second, and a round that brings tau
tokens at most tau times as many (the memory roof of Williams et al., "Roofline", CACM 2009: a pass
for one token multiplies each weight once, far below what processors multiply a byte).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from specctl.core.messages.printable import counted
from specctl.runtime.target.target import Target

READ = 128 << 20  # bytes: beyond the caches of most processors
READS = 12  # of which the fastest counts: other work on the machine only slows them


@dataclass(frozen=True, slots=True)
class Roof:
    """`token_bytes`: of the weights that a plain token reads; `bandwidth`: bytes a second that
    this device reads, a CPU with these threads."""

    token_bytes: int
    bandwidth: float
    threads: int | None  # None: not on a CPU

    @classmethod
    def of(cls, target: Target) -> Roof | None:
        """Measured, in a fraction of a second; None where it is not known what a token reads."""
        size = target.lm.token_bytes
        if size is None:
            return None
        threads = torch.get_num_threads() if target.device.type == "cpu" else None
        return cls(size, bandwidth(target.device), threads)

    @property
    def tokens_per_second(self) -> float:
        """The most that plain decoding can make."""
        return self.bandwidth / self.token_bytes

    def text(self, rate: float) -> str:
        """How far plain decoding is from its limit."""
        read, most = rate * self.token_bytes / 1e9, self.bandwidth / 1e9
        about = (
            f"plain, {rate:.0f} tokens/s without the prompts, reads {self.token_bytes / 1e6:,.0f} "
            f"MB of weights a token: {read:.1f} GB/s"
        )
        if read >= most:
            return f"{about}, no less than a sum over numbers reads here ({most:.1f})"
        reader = "this device" if self.threads is None else counted(self.threads, "thread")
        return (
            f"{about} of the {most:.1f} GB/s that {reader} can read here, "
            f"which would be {self.tokens_per_second:.0f} tokens/s"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "token_bytes": self.token_bytes,
            "bandwidth": round(self.bandwidth),
            "tokens_per_second": round(self.tokens_per_second, 2),
        }


def bandwidth(device: torch.device) -> float:
    """Bytes of float32 a second that a sum reads."""
    ones = torch.ones(READ // 4, device=device)
    is_cuda = device.type == "cuda"
    ones.sum()
    least = float("inf")
    for _ in range(READS):
        if is_cuda:
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        ones.sum()
        if is_cuda:
            torch.cuda.synchronize(device)
        least = min(least, time.perf_counter() - began)
    return READ / least
