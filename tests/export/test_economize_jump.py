"""Jumps that economize 0.3.2 has exported: what they become here, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.core.errors import SpecctlError
from specctl.export.imports import import_published
from specctl.export.imports.economize_jump import JumpNames
from specctl.export.package.load import read_package
from specctl.runtime.target.target import Target

# As its exporter writes the block, of four layers and a width of 32.
CONFIG: dict[str, Any] = {
    "target_layer": 2, "source_layer": 3, "exit_layer": 3, "extra_source_layers": [],
    "mixer": None, "mixer_heads": 8, "adaptation": "lora", "predictor": "linear",
    "predictor_width": 2.0, "predictor_depth": 1, "predictor_heads": 8, "predictor_layers": 1,
    "use_state": True, "use_token": True, "token_residual": True, "lora_rank": 4,
    "lora_alpha": None, "copy_dtype": "float32",
}  # fmt: skip
LINEARS = {
    "q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32),
    "gate_proj": (64, 32), "up_proj": (64, 32), "down_proj": (32, 64),
}  # fmt: skip


def block(**changed: Any) -> dict[str, Any]:
    said = {"format_version": 1, "num_layers": 4, "hidden_size": 32}
    said |= {key: changed.pop(key) for key in [*changed] if key in said}
    return {**said, "target_layer": 2, "exit_layer": 3, "jump_config": CONFIG | changed}


def tensors() -> dict[str, torch.Tensor]:
    """Under the names of its technique; the one layer that runs is its third."""
    shapes = {
        "predictor.state_proj.weight": (16, 32), "predictor.token_proj.weight": (16, 32),
        "predictor.skip.weight": (32, 32), "predictor.out_gain": (32,), "predictor.bias": (32,),
        "readout.linear.weight": (32, 32), "readout.mlp.gate.weight": (32, 32),
        "readout.mlp.value.weight": (32, 32), "readout.mlp.out.weight": (32, 32),
    }  # fmt: skip
    for name, (outputs, inputs) in LINEARS.items():
        shapes[f"lora.layers.3.{name}.lora_A"] = (4, inputs)
        shapes[f"lora.layers.3.{name}.lora_B"] = (outputs, 4)
    torch.manual_seed(0)
    return {f"jump.{name}": torch.randn(shape) * 0.2 for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    found: Target = make_target("llama", num_layers=4, vocab=24)
    return found


def written(folder: Path, said: dict[str, Any], kind: str = "flat") -> Path:
    folder.mkdir()
    body: dict[str, Any] = {"architectures": ["EconomizeJumpEagle3"], "economize_jump": said}
    if kind == "speculators":
        body |= {"speculators_model_type": "eagle3", "speculators_config": {}}
    (folder / "config.json").write_text(json.dumps(body))
    save_file(tensors(), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["flat", "speculators"])
def test_an_export_comes_in_bit_for_bit(target: Target, tmp_path: Path, kind: str) -> None:
    folder = written(tmp_path / "there", block(), kind)
    report = import_published(folder, target, tmp_path / "package", command=["specctl"])
    assert (report.format, report.manifest.family) == ("economize-jump", "jump")
    found: Any = read_package(tmp_path / "package", target)
    path = found.path
    assert (path.first, path.source, path.last) == (2, 3, 3)
    assert (found.options.rank, found.options.alpha) == (4, 8.0)
    again, before = JumpNames(2).published(found.tensors()), load_file(folder / "model.safetensors")
    assert again.keys() == before.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in before.items())


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"format_version": 2}, "format_version: 2"),
    ({"num_layers": 5}, "num_layers: 5"),
    ({"predictor": "flow"}, "predictor: flow"),
    ({"adaptation": "full"}, "adaptation: full"),
    ({"extra_source_layers": [1]}, "extra_source_layers"),
    ({"predictor_depth": 2}, "predictor_depth: 2"),
    ({"use_state": False}, "use_state: False"),
    ({"source_layer": 4}, "between layers"),
    ({"lora_rank": 5}, "another shape"),
    ({"exit_layer": None}, r"no layers\.1"),
]


@pytest.mark.parametrize(("said", "named"), MISTAKES, ids=[named for _, named in MISTAKES])
def test_what_is_no_jump_of_ours_is_refused_by_name(
    target: Target, tmp_path: Path, said: dict[str, Any], named: str
) -> None:
    folder = written(tmp_path / "there", block(**said))
    with pytest.raises(SpecctlError, match=named):
        import_published(folder, target, tmp_path / "package", command=["specctl"])
    assert not (tmp_path / "package").exists()
