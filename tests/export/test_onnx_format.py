"""Small models as ONNX graphs: what the converter is given, and a graph that computes something
else is caught. A converter and a reader stand in for those of ONNX Runtime."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.core.errors import GateError, IncompatibleError, ResourceError
from specctl.export.engines import engines
from specctl.export.engines import onnxruntime as engine
from specctl.export.engines.hosts import answer_transformers
from specctl.export.formats import onnx
from specctl.runtime.target.target import Target
from specctl_testing.export.engine_cases import KEPT, exported, shaken

Tensors = dict[str, torch.Tensor]
HOST = Path(answer_transformers.__file__).with_name("answer_onnxruntime.py")


class StandIn:
    """Converts by copying, and reads by transformers; what it reads one by one may be shifted."""

    def __init__(self) -> None:
        self.damage: Callable[[Tensors], None] | None = None
        self.stale = 0.0

    def __call__(
        self, name: str, python: str, job: Mapping[str, Any], scratch: Path
    ) -> dict[str, Any]:
        del python, scratch
        return self.convert(job) if name == "convert_onnx" else self.read(job)

    def convert(self, job: Mapping[str, Any]) -> dict[str, Any]:
        folder, out = Path(job["folder"]), Path(job["out"])
        out.mkdir()
        shutil.copy(folder / "config.json", out / "config.json")
        tensors = load_file(folder / "model.safetensors")
        if self.damage is not None:
            self.damage(tensors)
        save_file(tensors, out / "model.onnx", metadata={"format": "pt"})
        return {}

    def read(self, job: Mapping[str, Any]) -> dict[str, Any]:
        from transformers import AutoConfig, AutoModelForCausalLM

        folder = Path(job["draft"])
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        model.load_state_dict(load_file(folder / "model.onnx"), strict=False)
        with torch.no_grad():
            logits_1SV = model.double().eval()(torch.tensor(job["prompts"])).logits
        both = torch.cat([logits_1SV, logits_1SV + self.stale])
        np.save(job["logits"], both.float().numpy())
        return {}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    for module in (engine, onnx):
        monkeypatch.setattr(module, "run_script", made)
    monkeypatch.setattr(onnx, "check_installed", lambda found, python: None)
    return made


@pytest.mark.parametrize("kept", [None, KEPT])
def test_a_graph_that_computes_the_drafter_is_written(
    kept: Any, plain_target: Target, stand_in: StandIn, tmp_path: Path
) -> None:
    manifest = exported(
        shaken("small-lm", plain_target, kept, layers=1), plain_target, tmp_path / "out", "onnx"
    )
    assert "model.onnx" in manifest.files
    assert "model.safetensors" not in manifest.files
    assert manifest.served_by[0].startswith("optimum-cli export onnx")


def halved(tensors: Tensors) -> None:
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    tensors[name] = tensors[name] / 2


@pytest.mark.parametrize(("damage", "stale"), [(halved, 0.0), (None, 0.5)])
def test_another_graph_and_a_cache_that_errs_are_caught(
    damage: Any, stale: float, plain_target: Target, stand_in: StandIn, tmp_path: Path
) -> None:
    stand_in.damage, stand_in.stale = damage, stale
    with pytest.raises(GateError, match="logits differ"):
        exported(shaken("small-lm", plain_target, layers=1), plain_target, tmp_path / "out", "onnx")
    assert not (tmp_path / "out").exists()


def test_other_families_and_a_missing_engine_are_told(
    plain_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(IncompatibleError, match="format onnx cannot hold"):
        exported(shaken("eagle3", plain_target), plain_target, tmp_path / "out", "onnx")
    missing = replace(engines()["onnxruntime"], module="no_such_engine")
    monkeypatch.setattr(onnx, "ENGINE", missing)
    with pytest.raises(ResourceError, match="optimum-onnx"):
        exported(
            shaken("small-lm", plain_target, layers=1), plain_target, tmp_path / "other", "onnx"
        )


def test_the_loop_keeps_what_the_target_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that counts up, a draft that errs at every fourth token: the text is the target's,
    and the counts are those of chains of three."""
    monkeypatch.setitem(sys.modules, "onnxruntime", types.ModuleType("onnxruntime"))
    spec = importlib.util.spec_from_file_location("answer_onnxruntime", HOST)
    assert spec is not None
    assert spec.loader is not None
    host = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(host)

    class Counting:
        def __init__(self, errs: bool) -> None:
            self.text, self.errs = list[int](), errs

        @property
        def length(self) -> int:
            return len(self.text)

        def cut(self, length: int) -> None:
            assert length <= len(self.text)
            del self.text[length:]

        def __call__(self, ids: list[int]) -> Any:
            self.text += ids
            after = [one + (2 if self.errs and one % 4 == 3 else 1) for one in ids]
            return np.eye(100)[after]

    counts = {"drafted": 0, "accepted": 0, "rounds": 0}
    job = {"new_tokens": 12, "length": 3}
    target, draft = Counting(False), Counting(True)
    text = host.continued([5, 6], target, draft, job, counts)
    assert text == list(range(7, 19))
    assert counts == {"drafted": 10, "accepted": 8, "rounds": 4}
    assert host.continued([5, 6], target, None, job, counts) == text
