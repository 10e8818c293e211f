"""On how many of PyTorch's threads its work runs, beside the other work of the machine.

PyTorch's threads wait for each other after every operator, by spinning: beside one busy process a
prompt, or a training step, takes up to twice as long on two threads of two cores as on one. So
where the system puts threads of this process off their cores, steps on fewer threads take turns
with the others, and the faster number stays (models/native/threads.py, as in compiled decoding).
Sums of floating-point numbers may depend on it in their last digits: whoever sets OMP_NUM_THREADS
has that number throughout.
Letters: B rows, T fed tokens.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch

from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Feed
from specctl.models.native.threads import Kind, Threads, forward_threads_of, threads_of

CHOSEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # by the user, or by who started several processes
FEW = 32  # tokens: so many take as long as one, and more as long as they are
_HERE = threading.local()  # `most` of this thread, where fewer run around steps


@dataclass(slots=True)
class TorchThreads:
    """The number of threads, chosen anew before each step; `threads` is None where it is given."""

    threads: Threads | None
    fastest: dict[Kind, float] = field(default_factory=dict)  # seconds, of steps on all threads

    @contextmanager
    def step(self, kind: Kind = (), work: float = 1.0) -> Iterator[None]:
        """A step of so much work among those of its kind; all threads are back behind it."""
        if self.threads is None:
            yield
            return
        began, before = time.perf_counter(), torch.get_num_threads()
        torch.set_num_threads(self.threads.begin(began))
        try:
            yield
        finally:
            torch.set_num_threads(before)
        now = time.perf_counter()
        self.threads.end(kind, now - began, now, self.fastest, work)


@contextmanager
def forward_threads(feed: Feed, num_layers: int) -> Iterator[None]:
    """A forward of generation, in a model of so many layers: it takes as long as others of about as
    many tokens and positions."""
    most, num_tokens = most_threads(), feed.ids_BT.numel()
    span = feed.masks.full.shape[-1]
    kind = (most, num_layers, min(num_tokens, FEW), span.bit_length())
    with forwards_of(most).step(kind, max(num_tokens, FEW) / FEW):
        yield


@cache
def forwards_of(most: int) -> TorchThreads:
    """Of all forwards of this process that may take so many."""
    return TorchThreads(forward_threads_of(most))


@contextmanager
def around_steps() -> Iterator[None]:
    """What PyTorch does before and behind compiled steps, on no more threads than these run on."""
    most = most_threads()
    chosen = most if are_given(most) else threads_of(most).chosen
    if chosen == most or torch.get_num_threads() < most:
        yield
        return
    _HERE.most = most
    torch.set_num_threads(chosen)
    try:
        yield
    finally:
        torch.set_num_threads(most)
        _HERE.most = None


def most_threads() -> int:
    """On how many threads a step may run, also where fewer run around it."""
    most: int | None = getattr(_HERE, "most", None)
    return most or torch.get_num_threads()


def may_choose(feed: Feed, kv: SlotKV | None) -> bool:
    """Whether the threads of a forward are ours to choose: in generation, on a CPU. Training, whose
    forwards have no cache, chooses for whole steps."""
    if kv is None or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    return feed.ids_BT.device.type == "cpu" and not are_given(most_threads())


def are_given(most: int) -> bool:
    """Whether the user, or who started this process, has chosen the number of threads."""
    return most == 1 or any(name in os.environ for name in CHOSEN)
