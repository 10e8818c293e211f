"""--dtype int8: results name it, one text however it is drafted, refused where it is no gain."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specctl
from specctl.core.errors import IncompatibleError, SpecctlError
from specctl.models.native.library import no_int8
from specctl.runtime.target import eight_bits
from specctl.runtime.target.target import Target
from specctl.train.joint.check import check_target

needs_int8 = pytest.mark.skipif(no_int8() is not None, reason=f"int8: {no_int8()}")


@pytest.fixture(scope="module")
def target() -> Target:
    return specctl.load_target("tiny", dtype="int8")


@needs_int8
def test_every_result_says_int8_and_text_is_one_however_it_is_drafted(target: Target) -> None:
    plain = specctl.generate(target, "def read(path):\n", max_new_tokens=40)
    drafted = specctl.generate(target, "def read(path):\n", "prompt-lookup", max_new_tokens=40)
    assert target.dtype_name == "int8"
    assert plain.text == drafted.text
    report = specctl.bench(target, "prompt-lookup", num_prompts=2, max_new_tokens=8)
    assert report.to_json()["dtype"] == "int8"
    with pytest.raises(IncompatibleError, match="8 bits"):
        check_target(target)


@needs_int8
def test_whole_sequences_are_read_as_rounds_are_and_near_what_was_published(
    target: Target,
) -> None:
    ids = torch.tensor([target.encode("import os\n\n\ndef walk(top):\n    for name in os.listdir")])
    whole, position = ids.shape[1], torch.arange(ids.shape[1])[None]
    masks = target.lm.chain_masks(torch.tensor([0]), whole, whole)
    kv = target.new_kv(1, whole)
    kv.begin((0,), torch.tensor([0]), torch.tensor([0]), whole, whole, 0)
    with torch.no_grad():
        dense = target.lm.dense(ids, position, masks).logits_BTV
        assert torch.equal(dense, target.lm.forward(ids, position, masks, kv).logits_BTV)
        published = specctl.load_target("tiny").lm.dense(ids, position, masks).logits_BTV
    before, after = published.log_softmax(-1), dense.log_softmax(-1)
    kl = (before.exp() * (before - after)).sum(-1).mean()
    assert 1e-6 < float(kl) < 5e-3


def test_where_it_is_no_gain_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any]
    for given in ({"compile": True}, {"device_map": "auto"}):
        with pytest.raises(SpecctlError, match="8 bits"):
            specctl.load_target("tiny", dtype="int8", **given)
    monkeypatch.setattr(eight_bits, "no_int8", lambda: "a CPU without AVX2")
    with pytest.raises(IncompatibleError, match="8 bits") as refused:
        specctl.load_target("tiny", dtype="int8")
    assert refused.value.found == "a CPU without AVX2"
