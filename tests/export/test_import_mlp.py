"""Import of MLP speculators in IBM's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from specctl.core.errors import SpecctlError
from specctl.export.package.folder import load_drafter
from specctl.export.package.manifest import CARD, MANIFEST, WEIGHTS
from specctl.runtime.target.target import Target
from specctl_testing.export.engine_cases import Change, exported, saying, shaken, without
from specctl_testing.export.import_cases import Config, Tensors, same_tensors, taken


def published(target: Target, out: Path, change: Change | None = None, **options: Any) -> Any:
    drafter = shaken("mlp-speculator", target, num_heads=3, **options)
    exported(drafter, target, out, "mlp-speculator")
    for name in (MANIFEST, CARD):
        (out / name).unlink()
    if change is not None:
        config, tensors = json.loads((out / "config.json").read_text()), load_file(out / WEIGHTS)
        change(config, tensors)
        (out / "config.json").write_text(json.dumps(config))
        save_file(tensors, out / WEIGHTS)
    return drafter


def repeated(config: Config, tensors: Tensors) -> None:
    """Tied weights under every index, as some writers leave them."""
    for name in list(tensors):
        for index in range(1, 3):
            if ".proj." not in name:
                tensors[name.replace(".0.", f".{index}.")] = tensors[name].clone()
    tensors["speculator.proj.2.weight"] = tensors["speculator.proj.1.weight"].clone()


def bare(config: Config, tensors: Tensors) -> None:
    """No prefix, and `inner_dim` 0 for the target's width."""
    config["inner_dim"] = 0
    for name in list(tensors):
        tensors[name.removeprefix("speculator.")] = tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (None, {}),
        (None, {"inner": 24, "scale_input": True}),
        (None, {"tie": True}),
        (repeated, {"tie": True}),
        (bare, {}),
    ],
)
def test_heads_come_back(
    change: Change | None, options: dict[str, Any], plain_target: Target, tmp_path: Path
) -> None:
    drafter = published(plain_target, tmp_path / "heads", change, **options)
    report = taken(tmp_path / "heads", plain_target, tmp_path / "package")
    assert (report.format, report.manifest.serve["length"]) == ("mlp-speculator", 3)
    found = load_drafter(tmp_path / "package", plain_target)
    assert same_tensors(found, drafter.to(plain_target.device, plain_target.dtype))


def differing(config: Config, tensors: Tensors) -> None:
    repeated(config, tensors)
    tensors["speculator.emb.1.weight"] += 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (saying(emb_dim=32), r"another target.*emb_dim: 32"),
        (saying(vocab_size=50), r"vocab_size: 50"),
        (saying(n_predict=2), r"emb.2.weight.*none such"),
        (saying(n_predict=None), r"n_predict: None"),
        (saying(inner_dim=24), r"\(48, 16\).*\(48, 24\)"),
        (saying(tie_weights="yes"), r"tie_weights: yes"),
        (without("speculator.ln.1.bias"), r"no ln.1.bias"),
    ],
)
def test_a_mistake_is_refused(
    change: Change, told: str, plain_target: Target, tmp_path: Path
) -> None:
    published(plain_target, tmp_path / "heads", change)
    with pytest.raises(SpecctlError, match=told):
        taken(tmp_path / "heads", plain_target, tmp_path / "package")
    assert not (tmp_path / "package").exists()


def test_tied_weights_that_differ_are_refused(plain_target: Target, tmp_path: Path) -> None:
    published(plain_target, tmp_path / "heads", differing, tie=True)
    with pytest.raises(SpecctlError, match=r"two emb.0.weight"):
        taken(tmp_path / "heads", plain_target, tmp_path / "package")
