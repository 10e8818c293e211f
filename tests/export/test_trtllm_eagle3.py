"""TensorRT-LLM's reader of a flat EAGLE-3 folder: what it must not take for the drafter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.core.errors import GateError
from specctl.export.package.manifest import WEIGHTS
from specctl.export.readers.trial import Trial, compare
from specctl.export.readers.trtllm_eagle3 import ENGINE, TrtllmEagle3
from specctl.runtime.target.target import Target
from specctl_testing.export.engine_cases import KEPT, Change, exported, shaken

LAYERS = [0, 1, 2]


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    made = make_target(hidden=16, vocab=48, pad_token_id=9, rope_theta=77.0, rms_norm_eps=0.03)
    found: Target = replace(made, name="some/target", eos_ids=(2,))
    return found


@pytest.fixture(scope="module")
def folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trtllm") / "eagle3"
    exported(
        shaken("eagle3", target, KEPT, taps=(3, 1, 2), fc_norm=True, norm_output=True),
        target, out, "sglang",
    )  # fmt: skip
    return out


def logits(folder: Path, target: Target, layers: list[int]) -> torch.Tensor:
    """[N + 1, V] behind states that differ in every layer."""
    random = torch.Generator().manual_seed(1)
    states = torch.randn((5, 6, 16), generator=random, dtype=torch.float64)
    trial = Trial((3, 1, 4, 11, 5, 9, 2), KEPT[2:5], dict(enumerate(states)))
    shared = target.borrowed()
    reader = TrtllmEagle3(folder, shared.embedding_VD.double(), shared.head_VD.double(), layers)
    return reader.drafted_logits(trial)


def names(change: Callable[[str], str]) -> Change:
    def renamed(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        del config
        for name in list(tensors):
            tensors[change(name)] = tensors.pop(name)

    return renamed


def absolute_ids(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    del config
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def without(key: str) -> Change:
    return lambda config, tensors: config.pop(key)


def dropped(key: str) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        del config, tensors[key]

    return change


def changed(folder: Path, change: Change, out: Path) -> Path:
    shutil.copytree(folder, out)
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / WEIGHTS)
    change(config, tensors)
    (out / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, out / WEIGHTS)
    return out


MISTAKES: dict[str, tuple[Change, str]] = {
    "a prefix on every name": (names("model.{}".format), "parameters get no tensor"),
    "a missing norm": (dropped("midlayer.hidden_norm.weight"), "hidden_norm.weight first"),
    "no table": (dropped("d2t"), "d2t"),
    "a table of ids, not of offsets": (absolute_ids, "other token ids|d2t leads out"),
    "fc_norm not said": (without("fc_norm"), "fc_norm.0.weight goes nowhere"),
    "norm_output not said": (without("norm_output"), "drafted token 2: logits by TensorRT-LLM"),
    "eps not said": (without("rms_norm_eps"), "drafted token 1: logits by TensorRT-LLM"),
    "the whole vocabulary said": (without("draft_vocab_size"), "lm_head.weight"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_silent_mistake_is_caught(
    mistake: str, folder: Path, target: Target, tmp_path: Path
) -> None:
    change, said = MISTAKES[mistake]
    ours = logits(folder, target, LAYERS)
    with pytest.raises(GateError, match=said):
        compare(ENGINE, logits(changed(folder, change, tmp_path / "out"), target, LAYERS), ours)


def test_both_names_of_the_layer_are_read(folder: Path, target: Target, tmp_path: Path) -> None:
    other = changed(folder, names(lambda n: n.replace("midlayer.", "layers.0.")), tmp_path / "out")
    assert torch.equal(logits(other, target, LAYERS), logits(folder, target, LAYERS))


def test_other_layers_in_the_settings_are_caught(folder: Path, target: Target) -> None:
    ours = logits(folder, target, LAYERS)
    assert torch.equal(logits(folder, target, [2, 0, 1]), ours)  # it sorts them
    with pytest.raises(GateError, match="drafted token 1"):
        compare(ENGINE, logits(folder, target, [1, 2, 3]), ours)
    with pytest.raises(GateError, match=r"fc\.weight"):
        logits(folder, target, [1, 2])
