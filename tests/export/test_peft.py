"""UNO's additions as an adapter of peft, out and in: bit for bit, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.core.errors import IncompatibleError, IntegrityError, RecipeError, SpecctlError
from specctl.core.forward.row_additions import RowAdditions
from specctl.core.language_model import Feed
from specctl.drafters.tokens.uno import Uno, UnoOptions
from specctl.export.formats import export, format_for
from specctl.export.imports import import_published
from specctl.export.package.load import read_package
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.adapter import CONFIG, TENSORS
from specctl_testing.export.engine_cases import packaged

TEXT = [3, 1, 4, 1, 5, 9]


def taken(folder: Path, target: Target, out: Path, family: str | None = "uno") -> Any:
    return import_published(folder, target, out, command=["specctl", "import"], family=family)


@pytest.fixture(scope="module")
def model(make_model: Any) -> Any:
    return make_model("qwen3", num_layers=2, vocab=24)


@pytest.fixture(scope="module")
def target(model: Any) -> Target:
    return Target.from_model(model)


@pytest.fixture(scope="module")
def drafter(target: Target) -> Uno:
    torch.manual_seed(0)
    found = Uno(UnoOptions(num_heads=4, rank=4, alpha=10.0), target.spec)
    found.bind(target.borrowed())
    with torch.no_grad():
        for parameter in found.module.parameters():
            parameter.normal_(std=0.2)
    return found


@pytest.fixture(scope="module")
def folder(drafter: Uno, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = tmp_path_factory.mktemp("peft")
    export(packaged(drafter, target, room / "package"), "peft", room / "adapter", target)
    return room / "adapter"


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """As peft leaves it: without anything of ours."""
    there = tmp_path / "adapter"
    there.mkdir()
    for name in (CONFIG, TENSORS):
        (there / name).write_bytes((folder / name).read_bytes())
    return there


@torch.no_grad()
def test_peft_reads_the_folder_and_says_what_all_open_rows_do(
    model: Any, drafter: Uno, target: Target, folder: Path
) -> None:
    peft = pytest.importorskip("peft", reason="peft, of the extra lora, is not installed")
    ids = torch.tensor([TEXT])
    added = (RowAdditions(drafter.factors()),)
    feed = Feed(ids, torch.arange(6)[None], target.lm.document_masks(ids * 0), added=added)
    ours = target.lm.run(feed, None).logits_BTV
    wrapped = peft.PeftModel.from_pretrained(model, folder)
    theirs = wrapped(ids).logits
    wrapped.unload()
    assert ours is not None
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_comes_in_and_goes_out_bit_for_bit(
    target: Target, copied: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    tensors = {n: t.to(dtype) for n, t in load_file(copied / TENSORS).items()}
    save_file(tensors, copied / TENSORS)
    report = taken(copied, target, tmp_path / "package")
    assert (report.format, report.manifest.family) == ("peft", "uno")
    found = read_package(tmp_path / "package", target)
    assert (found.options.rank, found.options.alpha, found.vocab) == (4, 10.0, None)
    export(tmp_path / "package", format_for("sglang", "uno"), tmp_path / "again", target)
    again = load_file(tmp_path / "again" / TENSORS)
    assert again.keys() == tensors.keys()
    assert all(again[n].dtype == dtype and torch.equal(again[n], t) for n, t in tensors.items())
    before, after = (json.loads((f / CONFIG).read_text()) for f in (copied, tmp_path / "again"))
    assert before == after


FIRST = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
MISTAKES = [
    ({"use_rslora": True}, None, "use_rslora: True"),
    ({"use_dora": True}, None, "use_dora: True"),
    ({"bias": "all"}, None, "bias: 'all'"),
    ({"modules_to_save": ["lm_head"]}, None, "modules_to_save"),
    ({"rank_pattern": {"q_proj": 4}}, None, "rank_pattern"),
    ({"alpha_pattern": {"q_proj": 8}}, None, "alpha_pattern"),
    ({"peft_type": "IA3"}, None, "peft_type: 'IA3'"),
    ({"init_lora_weights": "pissa"}, None, "init_lora_weights"),
    ({}, lambda tensors: tensors.pop(FIRST), "lora_A"),
    ({}, lambda tensors: [tensors.pop(FIRST.replace("_A", s)) for s in ("_A", "_B")], "up_proj"),
    ({"r": 8}, None, "rank 4"),
    ({}, lambda tensors: [tensors.pop(n) for n in [*tensors] if ".layers.0." in n], "none of the"),
]


@pytest.mark.parametrize(("said", "change", "named"), MISTAKES, ids=[m[2] for m in MISTAKES])
def test_what_is_not_unos_is_refused_by_name(
    target: Target, copied: Path, tmp_path: Path, said: dict[str, Any], change: Any, named: str
) -> None:
    body = json.loads((copied / CONFIG).read_text())
    (copied / CONFIG).write_text(json.dumps(body | said))
    tensors = load_file(copied / TENSORS)
    if change is not None:
        change(tensors)
        save_file(tensors, copied / TENSORS)
    with pytest.raises(SpecctlError, match=named):
        taken(copied, target, tmp_path / "package")
    assert not (tmp_path / "package").exists()


def test_a_pickle_another_target_and_a_folder_of_no_known_meaning_are_refused(
    target: Target, make_target: Any, copied: Path, tmp_path: Path
) -> None:
    out = tmp_path / "package"
    with pytest.raises(IncompatibleError, match=r"lora_A\.weight"):
        taken(copied, make_target("qwen3", num_layers=3, vocab=24), out)
    with pytest.raises(IncompatibleError, match="--family uno"):
        taken(copied, target, out, family=None)
    with pytest.raises(RecipeError, match="leave --family out"):
        taken(copied, target, out, family="eagle3")
    (copied / TENSORS).rename(copied / "adapter_model.bin")
    with pytest.raises(IntegrityError, match="pickle"):
        taken(copied, target, out)
