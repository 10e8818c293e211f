"""Matrices whose numbers are those of a GGUF file, as the compiled step reads them (packed.h).

A file's blocks hold whole numbers of 4 to 8 bits, and scales of 32 or 16 of them. They are moved
to where the step wants them, not changed, and take as many bytes (Q4_K and Q5_K an eighth of
a bit a weight more). Each matrix is of its own type: those that a step reads together (query, key
and value; gate and up) need not be of one.

For a model: one `from_gguf` for each matrix of each layer, under the step's names (`MATRICES`),
rows of query and key moved as the configuration wants them (whole rows: the blocks stay); one for
the LM head (of the embedding's blocks where the file ties them); and `LlamaModel.keep_packed` of
all in `PackedWeights`. Norms, biases and the embedding are float32 parameters.

In the order of axes below, strips are groups of 16 outputs, and records of 32 inputs.
Letters: I input width, O output width, Q picked rows, X any axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from specctl.core.errors import IncompatibleError
from specctl.models.native.bits import FOUR, SIDE
from specctl.models.native.library import library

SPAN, LINE, HEADER = 32, 64, 64  # inputs of a record; bytes of a line, and in front of all
STEPS, WHOLES = SPAN // FOUR, 8  # lines of 8 bits a record; records behind a front
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class PackedType:
    """Of a GGUF type: the step's number for it; weights and bytes of the file's blocks; lower and
    higher bits of a weight, and what is subtracted from it; whether a scale has a least value, and
    whether scales are wholes that are times two numbers a block."""

    kind: int
    weights: int
    bytes: int
    low: int
    high: int
    offset: int
    has_least: bool
    has_wholes: bool

    @property
    def lines(self) -> int:
        """Bytes of a record that are weights'."""
        return (self.low + self.high) * LINE

    @property
    def scales(self) -> int:
        """Its other bytes."""
        if not self.has_wholes:
            return SIDE * 2 * (1 + self.has_least)
        return SIDE * ((2 if self.high == 2 else 1) + self.has_least)

    @property
    def front(self) -> int:
        """Bytes in front of every 256 inputs."""
        return SIDE * 2 * (1 + self.has_least) if self.has_wholes else 0

    def strip(self, columns: int) -> int:
        """Bytes of 16 outputs."""
        groups = columns // SPAN
        return groups * (self.lines + self.scales) + groups // WHOLES * self.front


TYPES: Mapping[str, PackedType] = MappingProxyType(
    {
        "Q4_0": PackedType(1, 32, 18, 4, 0, 8, False, False),
        "Q4_1": PackedType(2, 32, 20, 4, 0, 0, True, False),
        "Q5_0": PackedType(3, 32, 22, 4, 1, 16, False, False),
        "Q5_1": PackedType(4, 32, 24, 4, 1, 0, True, False),
        "Q8_0": PackedType(5, 32, 34, 8, 0, 0, False, False),
        "Q4_K": PackedType(6, 256, 144, 4, 0, 0, True, True),
        "Q5_K": PackedType(7, 256, 176, 4, 1, 0, True, True),
        "Q6_K": PackedType(8, 256, 210, 4, 2, 32, False, True),
    }
)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """`rows` outputs of `columns` inputs each, of a GGUF type; `data`: uint8, what the step
    reads."""

    type: str
    rows: int
    columns: int
    data: Tensor

    def widened(self, picked_Q: Tensor | None = None) -> Tensor:
        """The file's numbers, float32 [O, I], or of these outputs alone [Q, I]."""
        body = self.data[HEADER:]
        if self.type in FLOATS:
            weight_OI = body.view(torch.float32).view(self.rows, self.columns)
            return weight_OI.clone() if picked_Q is None else weight_OI[picked_Q]
        about = TYPES[self.type]
        strip_X = body.view(-1, about.strip(self.columns))
        if picked_Q is None:
            return _widened(strip_X, about)[: self.rows]
        sides_QXI = _widened(strip_X[picked_Q // SIDE], about).view(len(picked_Q), SIDE, -1)
        return sides_QXI[torch.arange(len(picked_Q)), picked_Q % SIDE]

    def picked(self, picked_Q: Tensor) -> PackedMatrix:
        """These outputs alone, in that order, bit for bit as they are packed here."""
        count, body = len(picked_Q), self.data[HEADER:]
        if self.type in FLOATS:
            rows_QX = body.view(self.rows, -1)[picked_Q].flatten()
            return replace(self, rows=count, data=torch.cat([self.data[:HEADER], rows_QX]))
        strip, at_X = TYPES[self.type].strip(self.columns), _bytes_of_sides(self.type, self.columns)
        rows_OX = body.view(-1, strip)[:, at_X].flatten(0, 1)
        strips = -(-count // SIDE)
        row_X = rows_OX.new_zeros(strips * SIDE, rows_OX.shape[1])
        row_X[:count] = rows_OX[picked_Q]
        data = torch.empty(HEADER + strips * strip, dtype=torch.uint8)
        data[:HEADER] = self.data[:HEADER]
        data[HEADER:].view(strips, strip)[:, at_X] = row_X.view(strips, SIDE, -1)
        return replace(self, rows=count, data=data)


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """The matrices of a model: of each layer by the step's names (`MATRICES`), and the LM head."""

    layers: tuple[Mapping[str, PackedMatrix], ...]
    head: PackedMatrix


def from_gguf(blocks: Tensor, type: str, rows: int, columns: int) -> PackedMatrix:
    """A matrix of `rows` outputs and `columns` inputs, exactly as a file holds it: uint8
    [rows, bytes of a row]. Types: `TYPES`, which the compiled step moves (blocks.h), and `FLOATS`,
    which are held in float32. Raises IncompatibleError for any other type, and where the bytes are
    not those of that shape."""
    size = row_bytes(type, columns)
    if blocks.dtype != torch.uint8 or tuple(blocks.shape) != (rows, size):
        raise IncompatibleError(
            f"the bytes of a matrix in {type} do not fit its shape",
            found=f"{blocks.dtype} {list(blocks.shape)} for {rows} rows of {columns} weights",
            expected=f"uint8 [{rows}, {size}]",
            do="fetch the file again",
        )
    if type in FLOATS:
        return PackedMatrix(type, rows, columns, _floats(blocks, type))
    about = TYPES[type]
    strip, strips = about.strip(columns), -(-rows // SIDE)
    data, given = torch.empty(HEADER + strips * strip, dtype=torch.uint8), blocks.contiguous()
    _write_kind(data, about.kind)
    functions = library().functions
    assert functions is not None, "packed matrices are read by the compiled step alone"
    place = data.data_ptr() + HEADER
    functions.pack(about.kind, given.data_ptr(), rows, columns, place, torch.get_num_threads())
    return PackedMatrix(type, rows, columns, data)


def row_bytes(type: str, columns: int) -> int:
    """Bytes of a row of a file. Raises IncompatibleError where there are no such rows."""
    if type in FLOATS:
        return columns * (4 if type == "F32" else 2)
    about = TYPES.get(type)
    if about is None or columns % about.weights:
        one = f"a multiple of {about.weights} weights a row" if about else ""
        raise IncompatibleError(
            f"a matrix of {columns} weights a row in {type} cannot be held packed",
            found=f"{columns} weights a row, type {type}",
            expected=one or "types " + ", ".join((*TYPES, *FLOATS)),
            do="--dtype float32",
        )
    return columns // about.weights * about.bytes


def are_finite(blocks: Tensor, type: str) -> bool:
    """Whether no number of a file's blocks is NaN or infinite: their scales decide it."""
    if type in FLOATS:
        return bool(_floats(blocks, type)[HEADER:].view(torch.float32).isfinite().all())
    about = TYPES[type]
    first, last = (208, 210) if type == "Q6_K" else (0, 2 * (1 + about.has_least))
    each = blocks.reshape(len(blocks), -1, about.bytes)[..., first:last]
    return bool(_halves(each).isfinite().all())


def _write_kind(data: Tensor, kind: int) -> None:
    data[:HEADER] = 0
    data[:4].view(torch.int32)[0] = kind


def _floats(blocks: Tensor, type: str) -> Tensor:
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[type]
    weight_OI = blocks.contiguous().view(dtype)
    data = torch.empty(HEADER + weight_OI.numel() * 4, dtype=torch.uint8)
    _write_kind(data, 0)
    data[HEADER:].view(torch.float32).copy_(weight_OI.flatten())
    return data


def _widened(strip_X: Tensor, about: PackedType) -> Tensor:
    """Strips as float32 [O, I]."""
    size = about.lines + about.scales
    front_X, record_X = strip_X[:, :0], strip_X
    if about.has_wholes:
        every_X = _split(strip_X, -1, (-1, about.front + WHOLES * size))
        front_X, record_X = every_X[..., : about.front], every_X[..., about.front :]
    record_X = _split(record_X.flatten(1), -1, (-1, size))
    number = _whole(record_X[..., : about.lines], about)  # [strips, records, 16, 32]
    side = record_X[..., about.lines :]
    if not about.has_wholes:
        scale, *least = _split(_halves(side).unsqueeze(-1), 2, (-1, SIDE)).unbind(2)
    else:
        front = _split(_halves(front_X), -1, (-1, SIDE)).repeat_interleave(WHOLES, 1)
        wholes = _split(side, -1, (-1, SIDE))
        if about.has_least:
            scale = (front[:, :, 0] * wholes[:, :, 0]).unsqueeze(-1)
            least = [-(front[:, :, 1] * wholes[:, :, 1]).unsqueeze(-1)]
        else:
            both = front * wholes.view(torch.int8)  # of inputs 0-15 and 16-31
            scale, least = both.transpose(2, 3).repeat_interleave(SPAN // 2, -1), []
    wide = number * scale
    wide = wide + least[0] if least else wide
    return wide.transpose(1, 2).flatten(2).flatten(0, 1)


def _bytes_of_sides(type: str, columns: int) -> Tensor:
    """Where in a strip the bytes of each of its 16 outputs lie [16, X]: no byte is of two."""
    about = TYPES[type]

    def side(size: int, width: int) -> Tensor:
        return torch.arange(size) // width % SIDE

    record = torch.cat([side(about.lines, FOUR), side(about.scales, 1 if about.has_wholes else 2)])
    if about.has_wholes:
        record = torch.cat([side(about.front, 2), record.repeat(WHOLES)])
    whole = record.repeat(about.strip(columns) // len(record))
    return whole.argsort(stable=True).view(SIDE, -1)


def _whole(line_X: Tensor, about: PackedType) -> Tensor:
    """The numbers of records, float32 [strips, records, 16, 32]."""
    low = _split(line_X[..., : about.low * LINE], -1, (-1, SIDE, FOUR))
    if about.low == 8:
        return low.view(torch.int8).transpose(2, 3).flatten(-2).float()
    number = torch.stack([low & 15, low >> 4], 3).flatten(2, 3)  # [strips, records, 8, 16, 4]
    if about.high:
        high = _split(line_X[..., about.low * LINE :], -1, (about.high, 1, SIDE, FOUR))
        each = STEPS // about.high
        shift = torch.arange(0, 8, about.high, dtype=torch.uint8).view(each, 1, 1)
        mask = 2**about.high - 1
        number |= ((high >> shift & mask) << 4).flatten(2, 3)
    return number.transpose(2, 3).flatten(-2).float() - about.offset


def _split(x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    found: Tensor = x.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return found


def _halves(bytes_X: Tensor) -> Tensor:
    return bytes_X.contiguous().view(torch.float16).float()
