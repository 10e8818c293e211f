"""EAGLE-3 as a GGUF file drafts by llama.cpp's rules what the drafter drafts here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from specctl.core.errors import GateError, IncompatibleError
from specctl.export.formats.gguf import FILE
from specctl.export.layouts.llama_cpp import eagle3 as eagle3_
from specctl.runtime.target.target import Target
from specctl_testing.export.engine_cases import exported, shaken
from specctl_testing.export.gguf_writing import KEPT, Tensors, mistaken, six_layers


@pytest.fixture(scope="module")
def target() -> Target:
    return six_layers()


@pytest.mark.parametrize(
    ("kept", "options"),
    [(None, {}), (KEPT, {"taps": (5, 0, 2)}), (KEPT, {"norm_before_residual": True})],
)
def test_llama_cpp_computes_the_same_drafts(
    kept: Any, options: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    drafter = shaken("eagle3", target, kept, **options)
    manifest = exported(drafter, target, tmp_path / "out", "gguf")
    file = gguf.GGUFReader(tmp_path / "out" / FILE)
    layers = file.fields["eagle3.target_layers"].contents()
    assert layers == sorted(drafter.needs().taps)
    tables = [t.data.tolist() for t in file.tensors if t.name == "d2t"]
    assert tables == ([] if kept is None else [list(KEPT)])
    assert "draft-eagle3" in manifest.served_by[-1]


def test_the_target_is_written_by_specctl_where_it_can_be(target: Target, tmp_path: Path) -> None:
    manifest = exported(shaken("eagle3", target), target, tmp_path / "out", "gguf")
    assert manifest.served_by[0].startswith("specctl export --target")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"fc_norm": True}, "fc_norm"),
        ({"norm_output": True}, "norm_output"),
        ({"qk_norm": True}, "qk_norm"),
        ({"taps": (2, 4)}, "2 taps"),
        ({"window": 8}, "llama.cpp has no window"),
    ],
)
def test_what_the_graph_has_no_place_for_is_refused(
    options: dict[str, Any], found: str, target: Target, tmp_path: Path
) -> None:
    with pytest.raises(IncompatibleError, match=found):
        exported(shaken("eagle3", target, **options), target, tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


def offsets(tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"] - torch.arange(len(tensors["d2t"]))


def halves(tensors: Tensors) -> None:
    rows = tensors["blk.0.attn_q.weight"]
    tensors["blk.0.attn_q.weight"] = rows.roll(1, 0)


def without_norm(tensors: Tensors) -> None:
    del tensors["blk.0.attn_norm_2.weight"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (offsets, "other token ids|differ by"),
        (halves, r"logits by llama\.cpp"),
        (without_norm, r"attn_norm_2\.weight is missing"),
    ],
)
def test_a_mistake_is_caught_before_an_engine_sees_it(
    change: Callable[[Tensors], None],
    said: str,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    mistaken(monkeypatch, eagle3_, change)
    with pytest.raises(GateError, match=said):
        exported(shaken("eagle3", target, KEPT), target, tmp_path / "out", "gguf")


def test_a_shifted_layer_is_caught(
    target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = eagle3_.hidden_state_ids
    monkeypatch.setattr(eagle3_, "hidden_state_ids", lambda *a: [tap - 1 for tap in right(*a)])
    with pytest.raises(GateError, match=r"logits by llama\.cpp"):
        exported(shaken("eagle3", target), target, tmp_path / "out", "gguf")
