"""Products of a few rows by oneDNN, inside of models that transformers computes.

Drafted rounds feed 4 to 32 tokens, and there PyTorch's float32 product of a CPU (MKL) costs up to
three times what one row costs, as if weights were read anew for every few rows. oneDNN, which torch
has as well, reads them once: 1,024 x 3,584 takes 2.1 ms for one row, 6.6 by MKL and 3.5 by oneDNN
for eight (one core of an Intel Xeon at 2.8 GHz, AVX512). Both sum in float32; the results differ by
rounding. Weights stay where they are: no copy is laid out, as models of our own forward have.
Letters: B rows, T fed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Feed
from specctl.models.kernels import can_pack, packed_linear

LEAST, MOST = 4, 32  # rows
SMALL = 500_000  # elements of a weight; below, the call costs as much as it saves
WHOLE = (Tensor, nn.Parameter)  # not a tensor of shapes alone, nor one in parts


@contextmanager
def few_row_products(feed: Feed, kv: SlotKV | None) -> Iterator[None]:
    """Inside, linear layers multiply the rows of a drafted round by oneDNN, where it is one."""
    is_round = kv is not None and LEAST <= feed.ids_BT.numel() <= MOST
    if not is_round or torch.is_grad_enabled() or torch.compiler.is_compiling():
        yield
        return
    with _FewRows():
        yield


class _FewRows(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and not kwargs and _is_taken(args[0], args[1]):
            return packed_linear(*args)
        return func(*args, **(kwargs or {}))


def _is_taken(x: object, weight: object) -> bool:
    if type(x) is not Tensor or type(weight) not in WHOLE:
        return False
    assert isinstance(weight, Tensor)
    if weight.dtype is not torch.float32 or weight.dtype is not x.dtype or weight.ndim != 2:
        return False
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    is_few = LEAST <= rows <= MOST and weight.numel() >= SMALL
    return is_few and weight.is_contiguous() and can_pack(weight)
