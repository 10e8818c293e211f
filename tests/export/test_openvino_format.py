"""EAGLE-3, DFlash and small models as OpenVINO's IR: what the converter is given, and an IR that
computes something else is caught. A converter and a reader stand in for those of OpenVINO."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.api.train import other_formats
from specctl.core.errors import GateError, IncompatibleError, IntegrityError, ResourceError
from specctl.export.engines import engines
from specctl.export.engines import openvino as engine
from specctl.export.formats import openvino
from specctl.export.package.files import check_name
from specctl.export.package.manifest import check_files
from specctl.export.readers.sglang_blocks import DFLASH as DFLASH_CLASS
from specctl.export.readers.sglang_blocks import SglangBlocks
from specctl.export.readers.sglang_eagle import SglangEagle3
from specctl.export.readers.trial import Trial, chained
from specctl.recipes.load import load_recipe
from specctl.runtime.target.target import Target
from specctl_testing.export.engine_cases import KEPT, exported, shaken

# optimum-intel 2.2: LlamaEagle3Model of optimum/exporters/openvino/model_patcher.py.
LAYER = {
    *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    *("input_layernorm.weight", "hidden_norm.weight", "post_attention_layernorm.weight"),
}
NAMES = {
    *(f"midlayer.{name}" for name in LAYER),
    *("embed_tokens.weight", "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"),
}
# Qwen3DFlashForCausalLM of the same file.
BLOCK = LAYER - {"hidden_norm.weight"} | {f"self_attn.{part}_norm.weight" for part in "qk"}
DFLASH = {
    *(f"layers.{index}.{name}" for index in range(2) for name in BLOCK),
    *("fc.weight", "hidden_norm.weight", "norm.weight"),
}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    made = make_target(num_layers=6, hidden=16, vocab=48, rms_norm_eps=0.03, rope_theta=77.0)
    found: Target = replace(made, name="some/target", eos_ids=(2,))
    return found


class StandIn:
    """Converts by copying, and reads as OpenVINO does by the rules of another reader."""

    def __init__(self) -> None:
        self.given: dict[str, torch.Tensor] = {}
        self.layers: list[int] = []
        self.damage: Callable[[Tensors], None] | None = None
        self.shift, self.mode, self.mask = 0, "True", 0
        self.is_drafter = False

    def __call__(
        self, name: str, python: str, job: Mapping[str, Any], scratch: Path
    ) -> dict[str, Any]:
        del python, scratch
        return self.convert(job) if name == "convert_openvino" else self.read(job)

    def convert(self, job: Mapping[str, Any]) -> dict[str, Any]:
        shutil.copytree(job["folder"], job["out"])
        (Path(job["out"]) / "openvino_model.bin").write_bytes(b"weights")
        self.given, self.layers = load_file(Path(job["out"]) / "model.safetensors"), job["layers"]
        self.is_drafter = job["is_drafter"]
        if self.damage is not None:
            changed = dict(self.given)
            self.damage(changed)
            save_file(changed, Path(job["out"]) / "model.safetensors")
        return {}

    def read(self, job: Mapping[str, Any]) -> dict[str, Any]:
        return self.read_block(job) if job["block"] is not None else self.read_chain(job)

    def read_block(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """By the rules of SGLang's reader, whose head is the identity: states for logits."""
        folder, fed_TD = Path(job["folder"]), torch.from_numpy(np.load(job["block"])).double()
        states = torch.from_numpy(np.load(job["states"])).double()
        rows_VD = torch.stack([fed_TD[1], fed_TD[0]]).repeat(24, 1)
        config = json.loads((folder / "config.json").read_text())["dflash_config"]
        rows_VD[config["mask_token_id"]] = fed_TD[1]
        root = 0 if config["mask_token_id"] else 1
        rows_VD[root] = fed_TD[0]
        reader = SglangBlocks(folder, DFLASH_CLASS, rows_VD, torch.eye(16).double(), 6)
        ids = (*job["ids"][: job["known"] - 1], root)
        shifted = {k: states[min(k + self.shift, 6)] for k in range(7)}
        said_ND = reader.drafted_logits(Trial(ids, (), shifted))
        np.save(job["logits"], said_ND.numpy().astype(np.float32))
        told = {"mask_token_id": str(config["mask_token_id"] + self.mask), "dflash": self.mode}
        return told | {"layers": config["target_layer_ids"]}

    def read_chain(self, job: Mapping[str, Any]) -> dict[str, Any]:
        folder, known = Path(job["folder"]), job["known"]
        tensors = load_file(folder / "model.safetensors")
        reader = SglangEagle3(folder, tensors["embed_tokens.weight"].double())
        states = torch.from_numpy(np.load(job["states"])).double()
        taken = torch.cat([states[layer + 1 + self.shift] for layer in self.layers], -1)
        ids = job["ids"]

        class Text:
            pass

        text: Any = Text()
        text.ids, text.drafted = ids[:known], ids[known:]
        said = chained(reader._step, text, reader._joined(taken))
        np.save(job["logits"], said.numpy().astype(np.float32))
        return {"layers": self.layers, "eagle3": self.mode, "d2t": tensors["d2t"].tolist()}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    monkeypatch.setattr(openvino, "run_script", made)
    monkeypatch.setattr(engine, "run_script", made)
    monkeypatch.setattr(openvino, "check_installed", lambda engine, python: None)
    return made


@pytest.mark.parametrize("kept", [None, KEPT])
def test_the_converter_is_given_every_tensor_by_its_own_name(
    kept: Any, target: Target, stand_in: StandIn, tmp_path: Path
) -> None:
    drafter = shaken("eagle3", target, kept, taps=(4, 1, 2))
    manifest = exported(drafter, target, tmp_path / "out", "openvino")
    assert set(stand_in.given) == NAMES
    assert "openvino_model.bin" in check_files(tmp_path / "out").files
    assert stand_in.is_drafter
    assert stand_in.layers == [0, 1, 3]  # outputs of layers, lowest first
    rows = torch.arange(len(stand_in.given["d2t"])) + stand_in.given["d2t"]
    assert rows.tolist() == (list(range(48)) if kept is None else list(KEPT))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert manifest.served_by[0].startswith("optimum-cli export openvino -m some/target")
    assert 'draft_model("THIS_FOLDER", "CPU")' in manifest.served_by[1]
    assert "layers 0, 1, 3" in manifest.notes[0]


def random_layer(tensors: Tensors) -> None:
    """What the converter does with a layer that it does not find."""
    random = torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.startswith("midlayer.mlp")]:
        tensors[name] = torch.randn(tensors[name].shape, generator=random)


def absolute_ids(tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


@pytest.mark.parametrize(
    "damage",
    [
        {"damage": random_layer},
        {"damage": absolute_ids},
        {"shift": 1},
        {"mode": "False"},
    ],
)
def test_an_ir_that_drafts_otherwise_is_caught(
    damage: dict[str, Any], target: Target, stand_in: StandIn, tmp_path: Path
) -> None:
    for name, value in damage.items():
        setattr(stand_in, name, value)
    with pytest.raises(GateError):
        exported(shaken("eagle3", target, KEPT), target, tmp_path / "out", "openvino")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"fc_norm": True}, "fc_norm"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"taps": (2, 4)}, "2 taps"),
        ({"window": 8}, "OpenVINO GenAI has no window"),
    ],
)
def test_what_the_converter_has_no_place_for_is_refused(
    options: dict[str, Any], found: str, target: Target, stand_in: StandIn, tmp_path: Path
) -> None:
    with pytest.raises(IncompatibleError, match=found):
        exported(shaken("eagle3", target, **options), target, tmp_path / "out", "openvino")
    assert not stand_in.given


def block_drafter(target: Target, kept: Any = None, **options: Any) -> Any:
    return shaken("dflash", target, kept, **{"mask_id": 21, "taps": (4, 1, 2)} | options)


def test_dflash_becomes_what_the_converters_class_has_and_nothing_else(
    target: Target, stand_in: StandIn, tmp_path: Path
) -> None:
    manifest = exported(block_drafter(target), target, tmp_path / "out", "openvino")
    assert set(stand_in.given) == DFLASH
    assert stand_in.is_drafter
    assert stand_in.layers is None  # the converter writes its own list
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["dflash_config"]["target_layer_ids"] == [0, 1, 3]  # outputs of layers
    assert config["dflash_config"]["mask_token_id"] == 21
    assert "scheduler_config=g.SchedulerConfig()" in manifest.served_by[1]
    assert "num_assistant_tokens=5" in manifest.served_by[1]


def swapped_norms(tensors: Tensors) -> None:
    tensors["hidden_norm.weight"], tensors["norm.weight"] = (
        tensors["norm.weight"].clone(),
        tensors["hidden_norm.weight"].clone(),
    )


def other_order(tensors: Tensors) -> None:
    """`fc` as it reads the taps in the order of the drafter's own list."""
    tensors["fc.weight"] = torch.roll(tensors["fc.weight"], 16, 1)


@pytest.mark.parametrize(
    "damage",
    [
        {"damage": swapped_norms},
        {"damage": other_order},
        {"shift": 1},
        {"mode": "False"},
        {"mask": 1},
    ],
)
def test_an_ir_of_dflash_that_drafts_otherwise_is_caught(
    damage: dict[str, Any], target: Target, stand_in: StandIn, tmp_path: Path
) -> None:
    for name, value in damage.items():
        setattr(stand_in, name, value)
    with pytest.raises(GateError):
        exported(block_drafter(target), target, tmp_path / "out", "openvino")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kept", "options", "found"),
    [
        (None, {"mask_id": None}, "OpenVINO GenAI takes the mask"),
        (KEPT, {}, "OpenVINO GenAI drafts a block over all"),
        (None, {"causal": True}, "OpenVINO GenAI computes blocks whose slots see each other"),
    ],
)
def test_blocks_that_openvino_cannot_hold_are_refused(
    kept: Any,
    options: dict[str, Any],
    found: str,
    target: Target,
    stand_in: StandIn,
    tmp_path: Path,
) -> None:
    with pytest.raises(IncompatibleError, match=found):
        exported(block_drafter(target, kept, **options), target, tmp_path / "out", "openvino")
    assert not stand_in.given


def test_without_openvino_the_install_is_told(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = replace(engines()["openvino"], module="no_such_engine")
    monkeypatch.setattr(openvino, "ENGINE", missing)
    with pytest.raises(ResourceError, match="openvino-genai") as found:
        exported(shaken("eagle3", target), target, tmp_path / "out", "openvino")
    assert sys.executable in str(found.value)
    recipe = load_recipe("eagle3", sets=["export.formats=[openvino]"])
    with pytest.raises(ResourceError, match="openvino-genai"):
        other_formats(recipe.drafter.family, recipe.export)  # before anything is trained


def test_weights_of_an_ir_are_no_pickles_and_nothing_else_is_let_in() -> None:
    check_name("openvino_model.bin")
    for name in ("pytorch_model.bin", "openvino_model.bin.pt", "OPENVINO_MODEL.bin", "x.bin"):
        with pytest.raises(IntegrityError, match="run code"):
            check_name(name)
