"""Quantised checkpoints: what is resident, and what is missing, known before a weight is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from transformers.quantizers import quantizer_awq

import specctl.recipes
from specctl.core.errors import IncompatibleError, ResourceError
from specctl.runtime.target import checkpoint
from specctl.runtime.target.placement import quantised as quantised_module
from specctl.runtime.target.placement.quantised import is_widened, layer_share, stored_tensors
from specctl.runtime.target.target import load_target

FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}


@pytest.fixture
def whole(make_model: Callable[..., Any], tmp_path: Path) -> Path:
    """A random Llama under the embedded tokenizer."""
    folder = tmp_path / "whole"
    make_model(num_layers=2, hidden=64, vocab=6144).save_pretrained(folder)
    tiny = Path(specctl.recipes.__path__[0]) / "tiny"
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return folder


def quantised(folder: Path, how: dict[str, Any]) -> None:
    """The matrices of layers in eight bits with a scale a block, as DeepSeek publishes them."""
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        blocks = tensors[name].unfold(0, 32, 32).unfold(1, 32, 32)
        scale = blocks.abs().amax((-1, -2)) / torch.finfo(torch.float8_e4m3fn).max
        wide = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)
        tensors[name] = (tensors[name] / wide).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}))


def test_eight_bits_without_a_kernel_are_widened_and_counted_as_what_they_become(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load_target(str(whole), device="cpu").lm
    quantised(whole, FP8)
    seen: list[int] = []
    monkeypatch.setattr(checkpoint, "check_memory", lambda need, *rest: seen.append(need))
    target = load_target(str(whole), device="cpu")
    resident = sum(p.numel() * p.itemsize for p in target.lm.module.parameters())
    assert seen == [resident]
    ids = torch.arange(12)[None]
    masks = before.document_masks(torch.zeros_like(ids))
    found, wanted = (lm.dense(ids, ids, masks).logits_BTV for lm in (target.lm, before))
    assert found is not None
    assert wanted is not None
    assert float((found - wanted).norm() / wanted.norm()) < 0.3  # a lost scale gives more than 1


def test_a_widened_checkpoint_that_does_not_fit_is_refused(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised(whole, FP8)
    files = sum(p.stat().st_size for p in whole.glob("*.safetensors"))
    monkeypatch.setattr(
        "specctl.runtime.target.placement.device.available_bytes", lambda device: files
    )
    with pytest.raises(ResourceError, match="does not fit"):
        load_target(str(whole), device="cpu")


def test_a_format_whose_library_is_missing_is_named_before_weights_are_read(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantizer_awq, "is_gptqmodel_available", lambda: False)
    quantised(whole, {"quant_method": "awq", "bits": 4, "group_size": 32})
    with pytest.raises(IncompatibleError, match="gptqmodel"):
        load_target(str(whole), device="cpu")


@pytest.mark.parametrize(
    ("method", "fields", "widened"),
    [
        ("compressed-tensors", {}, True),  # by its library, in the first forward
        ("compressed-tensors", {"use_fp8_kernel": True}, False),
        ("gptq", {}, False),
        ("mxfp4", {"dequantize": True}, True),
    ],
)
def test_what_a_library_unpacks_while_it_runs_counts_as_what_it_becomes(
    monkeypatch: pytest.MonkeyPatch, method: str, fields: dict[str, bool], widened: bool
) -> None:
    about = SimpleNamespace(dequantize=fields.get("dequantize", False))
    quantizer = SimpleNamespace(
        validate_environment=lambda **where: None, quantization_config=about, **fields
    )
    found = SimpleNamespace(from_config=lambda config, pre_quantized: quantizer)
    monkeypatch.setattr(quantised_module, "AutoHfQuantizer", found)
    config = _Config(quant_method=method)
    assert is_widened(config, torch.device("cpu"), "here") == widened


def test_what_is_kept_packed_counts_as_it_is_stored(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    packed = {"a": torch.zeros(8, 4, dtype=torch.int32), "b": torch.zeros(6, dtype=torch.bfloat16)}
    save_file(packed | {"c": torch.zeros(5, dtype=torch.uint8)}, file)
    assert sum(t.bytes(4) for t in stored_tensors([file])) == 8 * 4 * 4 + 6 * 4 + 5


class _Config:
    def __init__(self, **how: Any) -> None:
        self.quantization_config = how


def test_the_share_of_a_plan_follows_the_bits_and_the_kind_of_gpu() -> None:
    assert layer_share(_Config(quant_method="fp8"), "h100", 2) == 0.5
    assert layer_share(_Config(quant_method="fp8"), "a100", 2) == 1.0
    assert layer_share(_Config(quant_method="fp8"), None, 2) == 1.0
    assert 0.25 < layer_share(_Config(quant_method="awq", bits=4, group_size=128), "l4", 2) < 0.27
    assert layer_share(object(), "h100", 2) == 1.0
