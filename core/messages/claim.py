"""What a package or a proof claims, in words: lossless means less in bfloat16 than in float32.

The rules are exact in real numbers. Logits are not: reading several tokens at once rounds otherwise
than reading them one by one, and where two tokens nearly tie in that rounding, another one is the
larger. No torch here: cards and `specctl show` say it, too.
"""

from __future__ import annotations

EXACT = ("float32", "float64")  # ties within the rounding of these are not met in practice
_PLAIN = "the distribution of plain decoding, and under greedy decoding its tokens"
_OF_FEW_BITS = (
    "the distribution of plain decoding of the target in {} bits, which is not quite the published "
    "one, and under greedy decoding its tokens"
)
_PACKED = (
    "the distribution of plain decoding with the weights of the GGUF file, the inputs of each "
    "matrix rounded to 8 bits, and under greedy decoding its tokens"
)
_NEAR = (
    "the distribution of plain decoding up to rounding; where two tokens nearly tie the choice may "
    "flip, so greedy texts may differ from those of plain decoding and of other engines"
)


def stamp(verification: str, dtype: str | None) -> str:
    """The mark with the arithmetic it is about: `lossless in bfloat16`; dtype None is unknown."""
    return verification if dtype is None or verification != "lossless" else f"lossless in {dtype}"


def meaning(verification: str, dtype: str | None) -> str:
    """What that mark promises of the output, beside the target's own plain decoding."""
    if verification != "lossless":
        return "the distribution differs from plain decoding's, by design"
    if dtype is None:
        return f"in float32 {_PLAIN}; in bfloat16 and float16 {_NEAR}"
    if dtype in ("int8", "int4"):
        return _OF_FEW_BITS.format(dtype.removeprefix("int"))
    if dtype == "gguf":
        return _PACKED
    return _PLAIN if dtype in EXACT else _NEAR
