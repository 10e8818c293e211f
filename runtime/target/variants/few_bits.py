"""A target whose matrices are read in few bits: `--dtype int8` or `int4`, or those of a GGUF file
as it packs them, `--dtype gguf`.

For int8 and int4, weights and the inputs of each matrix are rounded in groups
(models/native/bits.py). That is another model than the one published, so that it is never chosen
but by name, and every result says which. For gguf, the inputs alone are rounded, as in llama.cpp.
Text is lossless with respect to either. The matrices of the layers are kept in these bits alone:
what needs them as they were stored is refused (models/weights/released.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from specctl.core.errors import IncompatibleError, one_of_two
from specctl.models.llama.fast_llama import FastLlama
from specctl.models.native.library import no_int8
from specctl.models.native.packed import PackedWeights
from specctl.runtime.target.placement.device import FEW_BITS, PACKED
from specctl.runtime.target.variants.rounding import Unrounded

T = TypeVar("T")


def check_alone(
    dtype: str,
    compile: bool | None,
    is_spread: bool,
    inflate: str | None,
    adapters: Sequence[str],
) -> None:
    """Refuse what needs the weights in another form than a dtype of few bits."""
    others: dict[str, object] = {"target.compile": compile, "a target that is spread": is_spread}
    if dtype == PACKED:
        others |= {"--inflate": inflate, "--adapter": adapters}
    given = [words for words, value in others.items() if value]
    if given and (dtype in FEW_BITS or dtype == PACKED):
        raise one_of_two(
            f"weights of dtype {dtype} are read by the compiled step, as they are, in one process",
            f"--dtype {dtype} and {given[0]}",
            "leave one of them out",
        )


def as_packed(target: T, weights: PackedWeights) -> T:
    """The target with its matrices as a GGUF file packs them; those that it came without."""
    given: Any = target
    lm = given.lm
    assert isinstance(lm, FastLlama), "architectures of GGUF files are our own forward's"
    is_kept = lm.module.keep_packed(weights)
    assert is_kept, "the compiled step was there before the file was read"
    return cast(T, replace(given, lm=lm.in_bits("packed")))


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
