"""Ranks: the processes of one training run and the little they say to each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from specctl.core.errors import Exit, SpecctlError

Value = TypeVar("Value")
PATIENCE = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among `size` others; the default is a run of one process. `host` is the group
    for words between CPUs, in which a rank may wait long (the first one prepares data alone)."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    host: Any = None

    @classmethod
    def current(cls, device: torch.device) -> Ranks:
        """The ranks of the process group, if one was started."""
        if dist.is_available() and dist.is_initialized():
            host = dist.new_group(backend="gloo", timeout=PATIENCE)
            return cls(dist.get_rank(), dist.get_world_size(), device, host)
        return cls(device=device)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace the tensor by its sum over all ranks."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """True on every rank when it is true on one."""
        if self.size == 1:
            return flag
        return bool(self.sum_(torch.tensor([float(flag)], device=self.device)).item())

    def gather(self, value: Value) -> list[Value]:
        """The value of every rank, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        found: list[Value | None] = [None] * self.size
        dist.all_gather_object(found, value, group=self.host)
        return found  # type: ignore[return-value]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Leave the block on all ranks or raise on all: one rank's full disk must not make the
        others wait for ever."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # raised again below, after the others have heard of it
            error = caught
        sent = None if error is None else (str(error), getattr(error, "exit", Exit.BUG))
        answers = self.gather(sent)
        if error is not None:
            raise error
        for rank, answer in enumerate(answers):
            if answer is not None:
                raise SpecctlError(f"rank {rank} failed: {answer[0]}", exit=Exit(answer[1]))
