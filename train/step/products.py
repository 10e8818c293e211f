"""Products of float32 matrices by the faster of torch's two libraries, while a step is taken.

On a CPU torch multiplies float32 matrices by MKL, which is about half as fast as oneDNN, in torch
as well, on AMD's CPUs with AVX512 (docs/benchmarks/trainers.md#products-of-matrices). So the two
are timed once in a process, and where oneDNN is far ahead, `aten::mm` and `aten::addmm`, by which
layers, their gradients and Muon multiply, go to it inside of `faster_products()`. Both sum in
float32; the results differ by rounding.
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

from specctl.train.distributed.ranks import Ranks

LEAST_SIDE = 16  # of a product given to oneDNN: rows, inner, columns
LEAST_WORK = 500_000  # M * K * N; below, what the call costs counts as much
FAR = 1.5  # times as fast. Seen: 2.2 and more, or about 1; a run that goes on must choose the same
TIMED_SIDE, TIMED_TURNS = 384, 7

_here = threading.local()  # .inside: whether this thread is inside `faster_products()`
_registered: list[torch.library.Library] = []
_lock = threading.Lock()


@contextmanager
def faster_products(ranks: Ranks | None = None) -> Iterator[None]:
    """Inside, large products of float32 matrices on a CPU are made by whichever library is
    faster here, on all ranks by the same. It holds for this thread alone; torch runs a CPU's
    backward pass in the thread that asks for it."""
    is_faster = _agreed(torch.get_num_threads(), ranks)
    if is_faster:
        _register()
    with _inside(is_faster):
        yield


@contextmanager
def usual_products() -> Iterator[None]:
    """Inside, torch multiplies as it always does: what is read here and what another thread or an
    earlier phase reads is the same to the bit."""
    with _inside(False):
        yield


@contextmanager
def _inside(is_faster: bool) -> Iterator[None]:
    before = getattr(_here, "inside", False)
    _here.inside = is_faster
    try:
        yield
    finally:
        _here.inside = before


def _agreed(threads: int, ranks: Ranks | None) -> bool:
    if ranks is not None and ranks.device.type != "cpu":
        return False
    is_faster = bool(torch.backends.mkldnn.enabled) and is_onednn_faster(threads)
    if ranks is None or ranks.size == 1:
        return is_faster
    key = ranks.size, threads
    if key not in _answers:  # every rank asks in the same step
        _answers[key] = not ranks.any(not is_faster)
    return _answers[key]


_answers: dict[tuple[int, int], bool] = {}


@cache
def is_onednn_faster(threads: int) -> bool:
    """Whether oneDNN multiplies far faster than torch's default, by so many threads."""
    linear = _onednn()
    if linear is None:
        return False
    left, right = torch.ones(2, TIMED_SIDE, TIMED_SIDE, dtype=torch.float32, device="cpu")
    try:
        other = _least_seconds(lambda: linear(left, right.t(), None, "none", [], ""))
    except (RuntimeError, TypeError):  # another torch, where it takes other words
        return False
    return _least_seconds(lambda: torch.mm(left, right, out=torch.empty_like(left))) > FAR * other


@cache
def bf16_gain(device: torch.device) -> float:
    """How many times as fast as a product of float32 matrices one of bfloat16 is here, each by the
    faster of the ways that training has."""
    left, right = torch.ones(2, TIMED_SIDE, TIMED_SIDE, dtype=torch.float32, device=device)
    short_left, short_right = left.bfloat16(), right.bfloat16()

    def made(product: Tensor) -> Tensor:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return product

    with faster_products():
        wide = _least_seconds(lambda: made(left @ right))
    return wide / _least_seconds(lambda: made(short_left @ short_right))


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
    return torch.mm(left_MK, right_KN, out=left_MK.new_empty(0))


def _addmm(
    added: Tensor, left_MK: Tensor, right_KN: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    is_plain = beta != 0 and alpha != 0 and added.dtype == left_MK.dtype
    found = _product(left_MK, right_KN) if is_plain else None
    if found is None:
        out = added.new_empty(0)
        return torch.addmm(added, left_MK, right_KN, beta=beta, alpha=alpha, out=out)
    found = found if alpha == 1 else found.mul_(alpha)
    return found.add_(added, alpha=beta)


def _addmm_in_place(
    added_MN: Tensor, left_MK: Tensor, right_KN: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    if left_MK.ndim == right_KN.ndim == 2:
        shape = (left_MK.shape[0], right_KN.shape[1])
        if added_MN.shape != shape:  # as an out it would be made larger
            raise RuntimeError(f"a product of shape {shape} cannot be added to {[*added_MN.shape]}")
    is_plain = beta == 1 and alpha != 0 and added_MN.dtype == left_MK.dtype
    found = _product(left_MK, right_KN) if is_plain else None
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
    right_KN = right_KN if _is_plain(right_KN) else right_KN.contiguous()
    linear: Any = _onednn()
    found: Tensor = linear(left_MK, right_KN.t(), None, "none", [], "")
    return found


def _is_plain(matrix: Tensor) -> bool:
    """By rows or by columns, which may lie apart; oneDNN takes no others on the right."""
    down, across = matrix.stride()
    by_rows = across == 1 and down >= matrix.shape[1]
    return by_rows or (down == 1 and across >= matrix.shape[0])
