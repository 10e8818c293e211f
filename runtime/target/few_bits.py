"""A target whose matrices are read in few bits: `--dtype int8` or `int4`.

Weights and the inputs of each matrix are rounded in groups (models/native/bits.py). That is another
model than the one published, so that it is never chosen but by name, and every result says which.
Text is lossless with respect to it. The matrices of the layers are kept in these bits alone: what
needs them as they were stored is refused (models/released.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar, cast

from specctl.core.errors import IncompatibleError
from specctl.models.fast_llama import FastLlama
from specctl.models.native.library import no_int8
from specctl.runtime.target.rounding import Unrounded

T = TypeVar("T")


def measured_in_few_bits(target: T, bits: int) -> T:
    """The same, with how far it is from the model as stored (rounding.py)."""
    given: Any = target
    is_readable = isinstance(given.lm, FastLlama) and given.device.type == "cpu"
    unrounded = Unrounded.of(given, bits) if is_readable and no_int8() is None else None
    found: Any = in_few_bits(target, bits)
    rounding = None if unrounded is None else unrounded.beside(found)
    return cast(T, replace(found, rounding=rounding))


def in_few_bits(target: T, bits: int) -> T:
    """The target in 8 or 4 bits; its layers' matrices are released one by one, so nobody else may
    hold the model. Raises IncompatibleError where the compiled step cannot read it so."""
    given: Any = target
    lm, why = given.lm, no_int8()
    if not isinstance(lm, FastLlama):
        why = f"{given.spec.model_type}, which transformers runs"
    elif given.device.type != "cpu":
        why = f"device {given.device}"
    elif why is None and not lm.module.keep_bits(bits):
        why = f"weights of {given.dtype_name}"
    if why is not None:
        raise IncompatibleError(
            f"target {given.name} cannot be read in {bits} bits here",
            found=why,
            expected="a Llama, Mistral, Qwen2 or Qwen3, and a CPU with AVX2 and a compiler",
            do="--dtype auto",
        )
    return cast(T, replace(given, lm=lm.in_bits(bits)))
