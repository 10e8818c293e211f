"""What engines are foreseen to read is what they are given: exports of the same drafter agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specctl.core.errors import SpecctlError
from specctl.drafters import families
from specctl.export.foreseen import Foreseen, refusals
from specctl.export.formats import export, format_for
from specctl.runtime.target.target import Target
from specctl_testing.export.engine_cases import KEPT, SMALL, packaged, shaken

BLOCKS = ("dflash", "dflash2", "domino", "dspark", "lilicorr", "xpress")
READ = {  # with a draft vocabulary, with all ids; llama.cpp has no tokenizer of words
    "dflash": ({"vllm"}, {"vllm", "sglang", "openvino"}),
    "dflash2": (set(), {"vllm", "sglang"}),
    "domino": (set(), {"sglang"}),
    "dspark": ({"vllm"}, {"vllm", "sglang"}),
    "lilicorr": (set(), {"vllm", "sglang"}),
    "xpress": (set(), {"vllm"}),
}


def said(family: str, target: Target, kept: int | None, **options: Any) -> dict[str, Any]:
    made = families()[family].options(**SMALL[family] | options)
    seen = Foreseen(
        family, made, target.spec, kept, {"length": 3}, None, target.tokenizer, target.eos_ids
    )
    return refusals(seen)


@pytest.mark.parametrize("family", BLOCKS)
def test_what_is_foreseen_is_what_an_export_does(
    family: str, target: Target, tmp_path: Path
) -> None:
    for number, (mask, kept) in enumerate(((None, KEPT), (9, KEPT), (9, None))):
        package = packaged(
            shaken(family, target, kept, mask_id=mask), target, tmp_path / f"{number}"
        )
        found = said(family, target, kept and len(kept), mask_id=mask)
        for engine, no in found.items():
            if engine == "openvino":  # its converter is not installed
                continue
            form, out = format_for(engine, family), tmp_path / f"{number}-{engine}"
            if no is None:
                assert export(package, form, out, target).format == form
                continue
            with pytest.raises(type(no)) as caught:
                export(package, form, out, target)
            assert str(caught.value) == str(no)
        reads = {engine for engine, no in found.items() if no is None}
        assert mask is None or reads == READ[family][kept is None]


def test_what_no_engine_computes_is_foreseen(target: Target) -> None:
    found = said("domino", target, None, mask_id=9, recurrent=False)
    assert isinstance(found["sglang"], SpecctlError)
    assert "recurrent: false" in str(found["sglang"])
    assert set(found) == {"sglang"}  # no other engine has a format for it
    assert said("dflash", target, None)["sglang"] is not None  # a mask of its own
