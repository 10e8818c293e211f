"""The header of a GGUF file, its configuration and its numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from specctl.core.errors import IncompatibleError, IntegrityError
from specctl.core.storage.gguf_header import KINDS, GgufKind, GgufTensor, read_header
from specctl.runtime.target.gguf.blocks import numbers
from specctl.runtime.target.gguf.config import fields_of
from specctl.runtime.target.gguf.weights import GgufWeights
from specctl.runtime.target.target import Target


def test_exported_weights_are_read_back_bit_for_bit(tiny_target: Target, tiny_gguf: Path) -> None:
    weights = GgufWeights(read_header(tiny_gguf))
    for name, parameter in tiny_target.lm.module.named_parameters():
        assert torch.equal(weights.whole(name, parameter.shape, torch.device("cpu")), parameter)
        middle = parameter.numel() // 2
        piece = weights.flat(name, parameter.shape, middle, 5)
        assert torch.equal(piece, parameter.reshape(-1)[middle : middle + 5]), name


def test_fields_say_the_shape_of_the_model(tiny_target: Target, tiny_gguf: Path) -> None:
    found, spec = fields_of(read_header(tiny_gguf)), tiny_target.spec
    assert found["model_type"] == "llama"
    assert found["rms_norm_eps"] == spec.norm_eps
    assert found["hidden_size"] == spec.hidden_size
    assert found["max_position_embeddings"] == spec.max_positions
    assert found["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (lambda raw: raw[:-9], IntegrityError, "cut short"),
        (lambda raw: raw[:100], IntegrityError, "cut short"),
        (lambda raw: b"PK\x03\x04" + raw[4:], IntegrityError, "zip"),
        (lambda raw: raw[:4] + b"\1\0\0\0" + raw[8:], IncompatibleError, "version 1"),
        (lambda raw: raw[:4] + b"\0\0\0\3" + raw[8:], IncompatibleError, "big-endian"),
        (lambda raw: raw[:8] + b"\xff" * 8 + raw[16:], IntegrityError, "cut short"),
        (lambda raw: raw[:16] + b"\xff" * 8 + raw[24:], IntegrityError, "cut short"),
        (lambda raw: b"version https://git-lfs.github.com/spec/v1", IntegrityError, "Git LFS"),
    ],
)
def test_damaged_files_are_refused_with_the_reason(
    tiny_gguf: Path, tmp_path: Path, change: object, kind: type[Exception], says: str
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(change(tiny_gguf.read_bytes()))
    with pytest.raises(kind, match=says):
        read_header(path)


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_rows_of_every_type_are_what_the_library_reads(kind: GgufKind, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the library gguf is not installed")
    raw = np.random.default_rng(0).integers(0, 256, (4, 2 * 256 // kind.weights * kind.bytes))
    raw_RB = raw.astype(np.uint8)
    path = tmp_path / "blocks"
    path.write_bytes(b"front" + raw_RB.tobytes())
    tensor = GgufTensor("x", (4, 512), kind, len(b"front"), path)
    with np.errstate(all="ignore"):  # random scales may be infinite
        right_RI = gguf.dequantize(raw_RB, gguf.GGMLQuantizationType[kind.name])
        found_RI = numbers(tensor, 1, 3)
    assert found_RI.dtype == np.float32
    assert np.array_equal(found_RI, right_RI[1:3].reshape(2, 512), equal_nan=True)
