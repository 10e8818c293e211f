"""DFlash, DFlash2 and DSpark as a GGUF file draft by llama.cpp's rules what the drafter drafts
here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from specctl.core.errors import GateError, IncompatibleError
from specctl.export.formats.gguf import FILE
from specctl.export.layouts.llama_cpp import blocks
from specctl.runtime.target.target import Target
from specctl_testing.export.engine_cases import exported, shaken
from specctl_testing.export.gguf_writing import KEPT, Tensors, mistaken, six_layers


@pytest.fixture(scope="module")
def target() -> Target:
    return six_layers()


@pytest.mark.parametrize("family", ["dflash", "dspark"])
@pytest.mark.parametrize(
    ("kept", "options"),
    [
        (None, {"mask_id": 7, "taps": (5, 1, 2)}),
        (None, {"mask_id": 7, "causal": True}),
        (KEPT, {}),
        (KEPT, {"mask_id": 7, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 24}),
    ],
)
def test_llama_cpp_computes_the_same_block(
    family: str, kept: Any, options: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    drafter: Any = shaken(family, target, kept, num_heads=3, **options)
    manifest = exported(drafter, target, tmp_path / "out", "gguf")
    file = gguf.GGUFReader(tmp_path / "out" / FILE)
    fields = {name: field.contents() for name, field in file.fields.items()}
    assert fields["dflash.target_layers"] == sorted(drafter.own_taps)
    assert fields["dflash.block_size"] == drafter.num_slots
    names = {tensor.name for tensor in file.tensors}
    assert ("token_embd.weight" in names) == ("mask_id" not in options)
    assert {"output.weight", "d2t"} <= names if kept else not {"output.weight", "d2t"} & names
    assert ("markov_w1.weight" in names) == (family == "dspark")
    words = manifest.served_by[-1].split()
    assert words[words.index("--spec-type") + 1] == f"draft-{family}"
    assert words[words.index("--spec-draft-n-max") + 1] == "3"


@pytest.mark.parametrize(
    "options", [{}, {"mask_id": 7, "window": 7, "conv_taps": 3}, {"mask_id": 7, "causal": True}]
)
def test_llama_cpp_chooses_as_dflash2_does(
    options: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    drafter: Any = shaken("dflash2", target, None, num_heads=3, **options)
    manifest = exported(drafter, target, tmp_path / "out", "gguf")
    file = gguf.GGUFReader(tmp_path / "out" / FILE)
    fields = {name: field.contents() for name, field in file.fields.items()}
    keys = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    found = [fields[f"dflash.{key}"] for key in keys]
    assert found == [options.get("conv_taps", 2), 4, 8, 3]
    assert fields["dflash.target_layers"] == [1, 2, 3]  # inputs of layers: hidden states
    assert fields.get("dflash.attention.sliding_window") == options.get("window")
    if "window" in options:
        assert fields["dflash.attention.sliding_window_pattern"] == [True, True]
    shapes = {tensor.name: list(map(int, tensor.shape)) for tensor in file.tensors}
    assert shapes["blk.1.attn_conv_base"] == [16, options.get("conv_taps", 2), 2]
    assert {"blk.0.ffn_conv_proj.weight", "selector_hidden.weight"} <= shapes.keys()
    assert shapes["selector_predecessor.weight"] == shapes["selector_successor.weight"] == [8, 320]
    words = manifest.served_by[-1].split()
    assert words[words.index("--spec-type") + 1] == "draft-dflash"


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("dflash2", {"candidates": 4}, "candidates: 4, beside a target of width 16"),
        ("dflash2", {"kept": KEPT}, "a vocabulary of 102 ids"),
        ("dspark", {"correction": "gated"}, "correction: gated"),
    ],
)
def test_what_llama_cpp_has_no_place_for_is_refused(
    family: str, options: dict[str, Any], said: str, target: Target, tmp_path: Path
) -> None:
    with pytest.raises(IncompatibleError, match=said):
        exported(shaken(family, target, **options), target, tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


def other_codebook(tensors: Tensors) -> None:
    tensors["selector_predecessor.weight"] = tensors["selector_predecessor.weight"].roll(1, 0)


def other_order(tensors: Tensors) -> None:
    """Taps before sides."""
    base = tensors["blk.0.attn_conv_base"]
    tensors["blk.0.attn_conv_base"] = base.transpose(0, 1).contiguous()


@pytest.mark.parametrize("change", [other_codebook, other_order])
def test_a_mistake_in_the_selectors_file_is_caught(
    change: Any, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistaken(monkeypatch, blocks, change)
    with pytest.raises(GateError, match=r"differ by|other token ids"):
        exported(shaken("dflash2", target, None), target, tmp_path / "out", "gguf")


def offsets(tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"] - torch.arange(len(tensors["d2t"]))


def neighbours(tensors: Tensors) -> None:
    """Rows in the order of a graph that rotates neighbours."""
    rows = tensors["blk.0.attn_k.weight"]
    tensors["blk.0.attn_k.weight"] = rows.view(2, 2, -1, 16).transpose(1, 2).reshape(rows.shape)


def without_norm(tensors: Tensors) -> None:
    del tensors["blk.1.attn_q_norm.weight"]


def without_head(tensors: Tensors) -> None:
    del tensors["output.weight"]


def unasked(tensors: Tensors) -> None:
    tensors["blk.0.attn_norm_2.weight"] = torch.ones(16)


def other_correction(tensors: Tensors) -> None:
    tensors["markov_w1.weight"] = tensors["markov_w1.weight"].roll(1, 0)


def less_sure(tensors: Tensors) -> None:
    tensors["conf_proj.bias"] = tensors["conf_proj.bias"] + 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (offsets, "could draft other token ids"),
        (neighbours, "differ by"),
        (without_norm, "blk.1.attn_q_norm.weight is missing"),
        (without_head, "no LM head for a reduced vocabulary"),
        (unasked, "does not read"),
        (other_correction, "differ by"),
        (less_sure, "confidences differ"),
    ],
)
def test_a_mistake_of_the_writer_is_caught(
    change: Any, said: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistaken(monkeypatch, blocks, change)
    with pytest.raises(GateError, match=said):
        exported(shaken("dspark", target, KEPT, num_heads=3), target, tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", ["layers", "mask"])
def test_shifted_layers_and_another_mask_are_caught(
    wrong: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wrong == "mask":
        monkeypatch.setattr(blocks, "mask_row", lambda source: 9)
    else:
        right = blocks.hidden_state_ids
        shifted = lambda taps, layers: [tap - 1 for tap in right(taps, layers)]  # noqa: E731
        monkeypatch.setattr(blocks, "hidden_state_ids", shifted)
    drafter = shaken("dflash", target, None, num_heads=3, mask_id=7)
    with pytest.raises(GateError, match="differ by"):
        exported(drafter, target, tmp_path / "out", "gguf")
