"""The numbers of a model in GGUF under transformers' names, widened a piece at a time.

llama.cpp's graph of Llama rotates neighbours (2i, 2i + 1) of a head where transformers rotates
halves (i, i + E/2): its rows of query and key are put back, whole rows, so that blocks stay blocks.
No more than `PIECE` weights are wide beside the model at any time.
Letters: B bytes of a row, E head width, H heads, I input width, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specctl.core.errors import IncompatibleError
from specctl.core.storage.gguf_header import GgufHeader, GgufTensor
from specctl.runtime.target.gguf.blocks import numbers, stored_rows
from specctl.runtime.target.gguf.config import (
    FREQUENCIES,
    NEIGHBOURS,
    expected_shapes,
    fields_of,
)

if TYPE_CHECKING:
    import torch

PIECE = 1 << 22  # weights that are widened at a time
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a parameter of transformers."""
    stem, leaf = name.rsplit(".", 1)
    if stem in OUTER:
        return f"{OUTER[stem]}.{leaf}"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{INNER[part]}.{leaf}"


class GgufWeights:
    """The tensors of a model by the names that transformers has for them, read in pieces; the same
    questions as `StoredWeights` answers."""

    def __init__(self, header: GgufHeader, fields: Mapping[str, Any] | None = None) -> None:
        self.header, self.folder = header, header.path
        self.fields = dict(fields_of(header) if fields is None else fields)
        self.shapes = expected_shapes(self.fields)
        self._check_table()

    def _check_table(self) -> None:
        """Every parameter has its tensor, and every tensor its parameter."""
        unused = set(self.header.tensors) - {FREQUENCIES}
        for name, shape in self.shapes.items():
            theirs = gguf_name(name)
            tensor = self.header.tensors.get(theirs)
            if tensor is None or tensor.shape != tuple(shape):
                found = "no such tensor" if tensor is None else str(list(tensor.shape))
                raise self.header.damaged(
                    f"the tensor {theirs} does not fit the fields of the file",
                    found,
                    str(list(shape)),
                )
            unused.discard(theirs)
        if unused:
            raise IncompatibleError(
                f"the file has tensors that {self.header.architecture} does not know",
                found=f"{len(unused)}, first {ascii(min(unused))[1:-1][:80]}",
                expected="the tensors of a plain model of that architecture",
                do="give the folder of safetensors that the file was made from",
                where=str(self.header.path),
            )

    def _heads(self, name: str) -> int | None:
        """Heads whose rows are in the order of llama.cpp; None where rows stay."""
        if self.header.architecture not in NEIGHBOURS:
            return None
        part = name.rpartition(".")[0].rpartition(".")[2]
        counts = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        return int(self.fields[counts[part]]) if part in counts else None

    def tensor(self, name: str) -> GgufTensor:
        """Where the file has a parameter."""
        return self.header.tensors[gguf_name(name)]

    def blocks(self, name: str) -> np.ndarray:
        """The rows of a matrix as bytes, uint8 [R, B], in the order of transformers."""
        tensor, heads = self.tensor(name), self._heads(name)
        stored_RB = stored_rows(tensor, 0, tensor.shape[0])
        if heads is None:
            return stored_RB
        pairs = stored_RB.reshape(heads, -1, 2, stored_RB.shape[-1])
        return np.ascontiguousarray(pairs.transpose(0, 2, 1, 3)).reshape(stored_RB.shape)

    def fill(self, name: str, out: torch.Tensor) -> None:
        """Write a whole parameter into a tensor of its shape, rounded to its dtype."""
        import torch

        tensor = self.tensor(name)
        width = tensor.shape[-1]
        rows = tensor.count // width
        flat_RI = out.view(rows, width)
        step = max(1, PIECE // width)
        for first in range(0, rows, step):
            last = min(first + step, rows)
            flat_RI[first:last] = torch.from_numpy(numbers(tensor, first, last)).to(out.dtype)
        heads = self._heads(name)
        if heads is not None:
            pairs = out.reshape(heads, -1, 2, *out.shape[1:])
            out.copy_(pairs.transpose(1, 2).reshape(out.shape).contiguous())

    def whole(self, name: str, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        """A parameter in float32 on the device."""
        import torch

        found = torch.empty(tuple(shape), dtype=torch.float32)
        self.fill(name, found)
        return found.to(device)

    def flat(self, name: str, shape: Sequence[int], start: int, count: int) -> torch.Tensor:
        """`count` numbers from place `start` of the flattened parameter; only their rows are
        read."""
        import torch

        tensor, heads = self.tensor(name), self._heads(name)
        if len(shape) == 1 and heads is not None:  # a bias, whose numbers are its rows
            return self.whole(name, shape, torch.device("cpu"))[start : start + count]
        width = shape[-1]
        first, last = start // width, -(-(start + count) // width)
        rows = [self._row(row, heads, shape[0]) for row in range(first, last)]
        wide = np.concatenate([numbers(tensor, row, row + 1) for row in rows]).reshape(-1)
        begin = start - first * width
        return torch.from_numpy(wide[begin : begin + count].copy())

    def piece(self, name: str, start: int, count: int) -> torch.Tensor:
        """`flat` of a parameter of the model, for its fingerprint."""
        return self.flat(name, self.shapes[name], start, count)

    @staticmethod
    def _row(row: int, heads: int | None, num_rows: int) -> int:
        """Where the file has that row of the parameter."""
        if heads is None:
            return row
        size = num_rows // heads
        head, inside = divmod(row, size)
        half, place = divmod(inside, size // 2)
        return head * size + 2 * place + half
