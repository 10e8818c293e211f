"""Import of Medusa heads: the folder of FasterDecoding's layout comes back as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.core.errors import GateError, SpecctlError
from specctl.export.formats.medusa import FILE
from specctl.export.imports import import_published
from specctl.export.package.folder import load_drafter
from specctl.export.package.manifest import CARD, MANIFEST
from specctl.runtime.target.target import Target
from specctl_testing.export.engine_cases import Change, exported, saying, shaken, without


@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_come_back(
    num_blocks: int, dtype: torch.dtype, plain_target: Target, tmp_path: Path
) -> None:
    drafter = shaken("medusa", plain_target, dtype=dtype, num_heads=3, num_blocks=num_blocks)
    exported(drafter, plain_target, tmp_path / "heads", "medusa")
    report = import_published(
        tmp_path / "heads", plain_target, tmp_path / "package", command=["specctl", "import"]
    )
    assert (report.format, report.manifest.serve["length"]) == ("medusa", 3)
    found = load_drafter(tmp_path / "package", plain_target).tensors()
    ours = drafter.to(plain_target.device, plain_target.dtype).tensors()
    assert found.keys() == ours.keys()
    assert all(torch.equal(found[name], ours[name]) for name in ours)


def wider(config: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
    tensors["0.1.weight"] = torch.zeros(48, 32)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (saying(medusa_num_heads=2), r"2.0.linear.bias \(16,\).*none such"),
        (saying(medusa_num_heads=4), r"no 3.0.linear.bias"),
        (saying(medusa_num_heads="3"), r"medusa_num_heads: 3.*whole number"),
        (without("1.1.weight"), r"no 1.1.weight.*\(48, 16\)"),
        (wider, r"0.1.weight \(48, 32\).*0.1.weight \(48, 16\)"),
    ],
)
def test_heads_that_are_not_what_the_configuration_says_are_refused(
    change: Change, told: str, plain_target: Target, tmp_path: Path
) -> None:
    folder, drafter = tmp_path / "heads", shaken("medusa", plain_target, num_heads=3)
    exported(drafter, plain_target, folder, "medusa")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / FILE)
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / FILE)
    for name in (MANIFEST, CARD):
        (folder / name).unlink()
    with pytest.raises(SpecctlError, match=told):
        import_published(folder, plain_target, tmp_path / "package", command=["specctl"])
    assert not (tmp_path / "package").exists()


def test_heads_inside_a_whole_model_are_refused(plain_target: Target, tmp_path: Path) -> None:
    folder, drafter = tmp_path / "heads", shaken("medusa", plain_target, num_heads=3)
    exported(drafter, plain_target, folder, "medusa")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["MedusaLlamaModel"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / MANIFEST).unlink()
    with pytest.raises(GateError, match="architectures"):
        import_published(folder, plain_target, tmp_path / "package", command=["specctl"])
