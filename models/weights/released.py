"""Released: what stands in place of a weight of which only a copy in few bits is left.

A target in 8 or 4 bits, or packed as in a GGUF file, is read by the compiled step alone, so that
its matrices need not be kept in any other form. Whatever else would read one (training that runs
the target's layers, starting a drafter from them, saving them, drafters that make keys and values
of the target's own) gets an error that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from specctl.core.errors import IncompatibleError

ABOUT = ("shape", "dtype", "layout", "requires_grad", "grad", "grad_fn", "is_leaf", "itemsize")
ASKED: frozenset[Any] = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in (*ABOUT, "is_meta", "_version", "ndim")),
        *(getattr(Tensor, name) for name in ("size", "dim", "numel", "element_size")),
        Tensor.requires_grad_,  # models are frozen as a whole
    }
)


class Released(Tensor):
    """As large as the weight was, without numbers. Raises IncompatibleError for whatever is asked
    of it but its size, dtype and device."""

    device = torch.device("cpu")  # type: ignore[assignment]
    is_cuda: ClassVar[bool] = False  # type: ignore[misc]
    _is_param = True  # it takes the place of a parameter

    @classmethod
    def of(cls, weight: Tensor) -> Tensor:
        nothing = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        return Tensor._make_subclass(cls, nothing)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in ASKED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise IncompatibleError(
            "the weights of a target in few bits are not in memory in any other form",
            found="dtype int8, int4 or gguf; only generating, measuring, training heads read it",
            expected="a target with its weights as they are stored",
            do="--dtype float32 (recipes: target.dtype: float32)",
        )
