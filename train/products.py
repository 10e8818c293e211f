"""Products of float32 matrices by the faster of torch's two libraries, while a step is taken.

On a CPU torch multiplies float32 matrices with MKL, which keeps its AVX512 code to Intel's own
CPUs. oneDNN, which torch carries as well, does not. One core of an AMD EPYC with AVX512, torch
2.13, billions of operations a second, MKL / oneDNN:

    [1152, 256] x [256, 640]   114 / 252      gradient of the left 113 / 264, of the right 110 / 193
    [170, 256] x [256, 6144]   104 / 243                           105 / 210               105 / 233
    [256, 256] x [256, 256]    110 / 228                           109 / 233               106 / 198

So the two are timed once in a process, and where oneDNN is clearly faster, `aten::mm` and
`aten::addmm`, by which layers, their gradients and Muon multiply, go to it inside of
`faster_products()`. Both sum in float32; the results differ by rounding.
Letters: M, K, N rows, inner and columns of a product.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

LEAST_SIDE = 16  # of a product given to oneDNN: rows, inner, columns
LEAST_WORK = 500_000  # M * K * N; below, what the call costs counts as much
CLEARLY = 1.25  # times as fast, or MKL keeps them
TIMED_SIDE, TIMED_TURNS = 384, 7

_here = threading.local()  # .inside: whether this thread is inside `faster_products()`
_registered: list[torch.library.Library] = []
_lock = threading.Lock()


@contextmanager
def faster_products() -> Iterator[None]:
    """Inside, large products of float32 matrices on a CPU are made by whichever library is
    faster here. Of this thread alone; torch makes the backward pass of a CPU in the thread that
    asks for it."""
    is_faster = is_onednn_faster(torch.get_num_threads())
    if is_faster:
        _register()
    before = getattr(_here, "inside", False)
    _here.inside = is_faster
    try:
        yield
    finally:
        _here.inside = before


@cache
def is_onednn_faster(threads: int) -> bool:
    """Whether oneDNN multiplies clearly faster than torch's default, by so many threads."""
    linear = _onednn()
    if linear is None:
        return False
    left, right = torch.ones(2, TIMED_SIDE, TIMED_SIDE, dtype=torch.float32, device="cpu")
    default = _least_seconds(lambda: torch.mm(left, right, out=torch.empty_like(left)))
    other = _least_seconds(lambda: linear(left, right.t(), None, "none", [], ""))
    return default > CLEARLY * other


@cache
def _onednn() -> Callable[..., Tensor] | None:
    """oneDNN's x w^T. Private to torch, but what its own compiler has emitted for CPU since 2.0."""
    is_there = torch.backends.mkldnn.is_available() and hasattr(  # type: ignore[no-untyped-call]
        torch.ops.mkldnn, "_linear_pointwise"
    )
    return torch.ops.mkldnn._linear_pointwise.default if is_there else None


def _least_seconds(work: Callable[[], Tensor]) -> float:
    seconds = []
    with torch.inference_mode():
        for _ in range(TIMED_TURNS):
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
    return min(seconds)


def _register() -> None:
    """Once in a process: what is registered stays, as other threads may be calling it; outside of
    `faster_products()` it hands on to the default."""
    if _registered:
        return
    with _lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        if _registered:
            return
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for name, product in (("mm", _mm), ("addmm", _addmm), ("addmm_", _addmm_in_place)):
            library.impl(name, product, "CPU", allow_override=True)
        _registered.append(library)


def _mm(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    if (found := _product(left_MK, right_KN)) is not None:
        return found
    out = left_MK.new_empty(left_MK.shape[0], right_KN.shape[-1])
    return torch.mm(left_MK, right_KN, out=out)


def _addmm(
    added: Tensor, left_MK: Tensor, right_KN: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    found = _product(left_MK, right_KN) if beta != 0 and added.dtype == left_MK.dtype else None
    if found is None:
        out = added.new_empty(left_MK.shape[0], right_KN.shape[-1])
        return torch.addmm(added, left_MK, right_KN, beta=beta, alpha=alpha, out=out)
    found = found if alpha == 1 else found.mul_(alpha)
    return found.add_(added, alpha=beta)


def _addmm_in_place(
    added_MN: Tensor, left_MK: Tensor, right_KN: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    shape = (left_MK.shape[0], right_KN.shape[-1])
    if added_MN.shape != shape:
        raise RuntimeError(f"a product of shape {shape} cannot be added to {[*added_MN.shape]}")
    found = _product(left_MK, right_KN) if beta == 1 and added_MN.dtype == left_MK.dtype else None
    if found is None:
        return torch.addmm(added_MN, left_MK, right_KN, beta=beta, alpha=alpha, out=added_MN)
    return added_MN.add_(found, alpha=alpha)


def _product(left_MK: Tensor, right_KN: Tensor) -> Tensor | None:
    """By oneDNN; None where the default makes it (and says what is wrong with the shapes)."""
    if not getattr(_here, "inside", False) or left_MK.dtype is not torch.float32:
        return None
    if left_MK.ndim != 2 or right_KN.ndim != 2 or right_KN.dtype is not torch.float32:
        return None
    (rows, inner), (inner_too, columns) = left_MK.shape, right_KN.shape
    is_large = min(rows, inner, columns) >= LEAST_SIDE and rows * inner * columns >= LEAST_WORK
    if inner != inner_too or not is_large:
        return None
    if 0 in left_MK.stride() or 0 in right_KN.stride():  # one row seen as many
        return None
    linear: Any = _onednn()
    found: Tensor = linear(left_MK, right_KN.t(), None, "none", [], "")
    return found
