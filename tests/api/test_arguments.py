"""Whatever an argument is, it is used or refused by an error that says what it was."""

from __future__ import annotations

from typing import Any

import pytest

import specctl
from specctl.core.errors import IncompatibleError, SpecctlError
from specctl.core.messages.foreign_calls import calling_tokenizer
from specctl.runtime.target.target import Target

HALF = "\ud800"
PROMPTS: dict[str, Any] = {
    "a negative id": [[-1]],
    "an id beyond every vocabulary": [[2**40]],
    "none": None,
    "none among them": [None],
    "none as an id": [[None]],
    "bytes": b"abc",
    "bytes among them": [b"abc"],
    "half a pair": f"a{HALF}",
    "half a pair in a message": [{"role": "user", "content": HALF}],
    "no ids": [[]],
    "a truth": [[True]],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "batch -3": {"batch": -3},
    "batch 0": {"batch": 0},
    "batch as a text": {"batch": "2"},
    "half a batch": {"batch": 1.5},
    "a million drafted": {"drafter": "prompt-lookup", "length": 10**6},
    "fewer than none drafted": {"drafter": "prompt-lookup", "length": -1},
    "a million nodes": {"drafter": "prompt-lookup", "nodes": 10**6},
    "hot": {"temperature": "hot"},
    "no tokens": {"max_new_tokens": None},
    "tokens as a text": {"max_new_tokens": "8"},
    "top_k as a text": {"top_k": "x", "temperature": 1.0},
    "a seed as a text": {"seed": "x"},
    "half a pair as a stop": {"stop": [HALF]},
    "a stop that is no text": {"stop": [3]},
}


@pytest.mark.parametrize("case", PROMPTS)
def test_a_prompt_that_cannot_be_read_is_a_typed_error(case: str, tiny_target: Target) -> None:
    with pytest.raises(SpecctlError) as caught:
        specctl.generate(tiny_target, PROMPTS[case], max_new_tokens=2)
    str(caught.value).encode()


@pytest.mark.parametrize("case", SETTINGS)
def test_a_setting_out_of_range_is_a_typed_error(case: str, tiny_target: Target) -> None:
    with pytest.raises(SpecctlError) as caught:
        specctl.generate(tiny_target, "import os", **{"max_new_tokens": 2, **SETTINGS[case]})
    assert caught.value.found
    assert caught.value.expected
    assert caught.value.do
    str(caught.value).encode()


@pytest.mark.parametrize("name", ["batch", "repeats", "num_prompts"])
def test_counts_of_a_bench_are_counts(name: str, tiny_target: Target) -> None:
    with pytest.raises(SpecctlError, match=name):
        specctl.bench(tiny_target, "prompt-lookup", **{name: -3})


def test_a_panic_in_a_tokenizer_is_a_typed_error_and_others_are_let_pass() -> None:
    class PanicException(BaseException):
        pass

    for kind in (PanicException, TypeError, OverflowError, Exception):
        with pytest.raises(IncompatibleError, match="the tokenizer of x"), calling_tokenizer("x"):
            raise kind("out of bounds")
    for other in (KeyboardInterrupt, MemoryError, SystemExit):
        with pytest.raises(other), calling_tokenizer("x"):
            raise other
