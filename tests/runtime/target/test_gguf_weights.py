"""The header of a GGUF file, its configuration and its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specctl.core.errors import IncompatibleError, IntegrityError
from specctl.core.gguf_header import read_header
from specctl.runtime.target.gguf_config import fields_of
from specctl.runtime.target.gguf_weights import GgufWeights
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
