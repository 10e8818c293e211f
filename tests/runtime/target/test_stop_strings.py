"""Stop strings in the engine: at the token that completes one, also at one that no text shows."""

from __future__ import annotations

import pytest

from specctl.drafters.training_free.prompt_lookup import PromptLookup, PromptLookupOptions
from specctl.runtime.engine.commit import cut
from specctl.runtime.engine.request import Request, Row
from specctl.runtime.generate import generate
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl_testing.runtime.serving import stub_target

USER = "<|user|>"


def marker(name: str) -> int:
    return int(stub_target().tokenizer.convert_tokens_to_ids(name))


@pytest.mark.parametrize("stop", [USER, f" b{USER}", f"{USER}<|bos|>"])
def test_a_round_is_cut_where_a_control_token_completes_a_stop_string(stop: str) -> None:
    """In the midst of accepted drafts: what was accepted behind it is never emitted."""
    target = stub_target()
    sampling = Sampling(stop=["no such text", stop], max_new_tokens=64)  # a list will do
    row = Row.of(0, 0, Request(tuple(target.encode("def f")), sampling))
    head = [*target.encode("a b"), marker(USER)]
    head += [marker("<|bos|>")] if stop.endswith("<|bos|>") else []
    assert cut(row, [*head, *target.encode(" c d")], target) == (head, "stop")
    other = [*target.encode("a b"), marker("<|assistant|>"), *target.encode(" c d")]
    assert cut(row, other, target) == (other, None)


@pytest.mark.parametrize("drafts", [False, True])
def test_generation_ends_at_a_stop_string_that_is_a_control_token(
    tiny_target: Target, drafts: bool
) -> None:
    drafter = PromptLookup(PromptLookupOptions(), tiny_target.spec) if drafts else None
    wanted = {marker(USER): 100.0}
    for stop, count in ((USER, 1), (f"{USER}{USER}", 2)):
        sampling = Sampling(max_new_tokens=6, stop=(stop,), logit_bias=wanted)
        prompt = f"import os{USER}{USER}{USER}{USER}"
        [output] = generate(tiny_target, [prompt], drafter=drafter, sampling=sampling).outputs
        assert (output.finish_reason, output.text) == ("stop", "")
        assert output.token_ids == (marker(USER),) * count


def test_a_stop_token_belongs_to_the_ids_and_not_to_the_text(tiny_target: Target) -> None:
    prompt = "import os\nimport sys\nimport"
    plain = generate(tiny_target, [prompt], sampling=Sampling(max_new_tokens=6)).outputs[0]
    last = plain.token_ids[2]
    sampling = Sampling(max_new_tokens=6, stop_token_ids=(last,))
    [output] = generate(tiny_target, [prompt], sampling=sampling).outputs
    at = plain.token_ids.index(last)
    assert output.token_ids == plain.token_ids[: at + 1]
    assert output.text == tiny_target.decode(plain.token_ids[:at])
