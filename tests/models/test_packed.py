"""Matrices as GGUF files pack them: the file's numbers exactly, and one order of sums."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.errors import IncompatibleError
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.language_model import Feed
from specctl.core.spec import ModelSpec
from specctl.models.llama.fast_llama import FastLlama, LlamaModel, LlamaShape
from specctl.models.native import library as built
from specctl.models.native.packed import FLOATS, TYPES, PackedMatrix, PackedWeights, from_gguf
from specctl.models.native.step import MATRICES, NativeStep, packed_step

gguf = pytest.importorskip("gguf", reason="no gguf: blocks are compared with what it reads")
needs_compiler = pytest.mark.skipif(
    built.library().functions is None, reason=f"no compiled step: {built.library().missing}"
)
LEAST = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


def blocks(name: str, rows: int, columns: int, size: float = 0.05) -> Tensor:
    """Random ones, their scales normal numbers of that size."""
    about = TYPES[name]
    found = torch.randint(0, 256, (rows, columns // about.weights, about.bytes)).byte()
    scale = torch.randn(*found.shape[:2], 2).mul(size).half().view(torch.uint8)
    if name == "Q6_K":
        found[..., 208:] = scale[..., :2]
    else:
        count = 4 if name in LEAST else 2
        found[..., :count] = scale[..., :count]
    return found.flatten(1)


def dequantised(name: str, given: Tensor) -> Tensor:
    kind = gguf.GGMLQuantizationType[name]
    return torch.from_numpy(gguf.dequantize(given.numpy(), kind))


def shapes(name: str) -> tuple[tuple[int, int], ...]:
    """Also outputs that are no multiple of 16, inputs that are none of 64 or of 256, and many
    outputs."""
    if TYPES[name].weights == 256:
        return (16, 256), (5, 768), (1030, 512)
    return (16, 32), (5, 96), (1030, 224)


@needs_compiler
@pytest.mark.parametrize("name", TYPES)
def test_the_numbers_are_those_of_the_file(name: str) -> None:
    torch.manual_seed(0)
    for rows, columns in shapes(name):
        given = blocks(name, rows, columns)
        expected, matrix = dequantised(name, given), from_gguf(given, name, rows, columns)
        assert torch.equal(matrix.widened(), expected)
        picked = torch.tensor([rows - 1, 0, 3, 3])
        assert torch.equal(matrix.widened(picked), expected[picked])
        if rows % 16 == 0:
            wider = {"Q4_K": 1 / 8, "Q5_K": 1 / 8}.get(name, 0)
            bits = TYPES[name].bytes * 8 / TYPES[name].weights + wider
            assert (matrix.data.nbytes - 64) * 8 == bits * rows * columns


@needs_compiler
@pytest.mark.parametrize("name", [*TYPES, *FLOATS])
def test_picked_outputs_are_those_of_the_file_alone(name: str) -> None:
    """As if the file had no others; what is behind the last is nothing."""
    torch.manual_seed(0)
    for rows, columns in ((37, 32), (70, 50)) if name in FLOATS else shapes(name):
        wide = torch.randn(rows, columns)
        dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(name, torch.float32)
        given = blocks(name, rows, columns) if name in TYPES else wide.to(dtype).view(torch.uint8)
        matrix = from_gguf(given, name, rows, columns)
        for picked in (torch.arange(rows), torch.arange(0, rows, 2), torch.tensor([rows - 1, 0])):
            found = matrix.picked(picked)
            alone = from_gguf(given[picked], name, len(picked), columns)
            assert (found.type, found.rows, found.columns) == (name, len(picked), columns)
            assert torch.equal(found.widened(), matrix.widened(picked))
            assert torch.equal(found.data, alone.data)


@pytest.mark.parametrize("name", FLOATS)
def test_matrices_that_are_not_quantised_are_held_in_float32(name: str) -> None:
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
    weight = torch.randn(7, 50).to(dtype)
    matrix = from_gguf(weight.view(torch.uint8), name, 7, 50)
    assert torch.equal(matrix.widened(), weight.float())
    assert torch.equal(matrix.widened(torch.tensor([6])), weight[6:].float())


def test_other_types_and_bytes_of_another_shape_are_refused() -> None:
    with pytest.raises(IncompatibleError, match="IQ2_XS"):
        from_gguf(torch.zeros(4, 74, dtype=torch.uint8), "IQ2_XS", 4, 256)
    with pytest.raises(IncompatibleError, match="multiple of 256"):
        from_gguf(torch.zeros(4, 504, dtype=torch.uint8), "Q4_K", 4, 896)
    for wrong in (torch.zeros(4, 19, dtype=torch.uint8), torch.zeros(3, 20, dtype=torch.uint8)):
        with pytest.raises(IncompatibleError, match=r"uint8 \[4, 20\]"):
            from_gguf(wrong, "Q4_1", 4, 32)


def model(columns: int, outputs: int, layers: int = 1) -> FastLlama:
    torch.manual_seed(0)
    heads = (4, 2, 64)
    shape = LlamaShape(layers, columns, 90, *heads, 256, 1e-5, 1e4, tied=False, out_size=outputs)
    module = LlamaModel(shape).requires_grad_(False)
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    return FastLlama(module, ModelSpec("llama", layers, columns, 90, *heads, 256, 1e-5, 1e4, 256))


def matrices(lm: FastLlama, types: tuple[str, ...]) -> list[dict[str, PackedMatrix]]:
    """Random ones of these types in turn."""
    found, given = [], iter(types * 7 * len(lm.module.model.layers))
    stack = lm.module.stack()
    assert stack is not None
    for layer in stack.weights():
        of = dict(zip(built.LayerAddresses.NAMES, layer, strict=True))
        own = {}
        for each in MATRICES:
            weight, name = of[each], next(given)
            assert weight is not None
            if name == "F32":
                given_bytes = weight.detach().clone().view(torch.uint8)
            else:
                size = 3e-4 if TYPES[name].weights == 256 else 3e-4 if name == "Q8_0" else 3e-3
                given_bytes = blocks(name, *weight.shape, size)
            own[each] = from_gguf(given_bytes, name, *weight.shape)
        found.append(own)
    return found


def product(matrix: PackedMatrix, x_RK: Tensor) -> Tensor:
    """By the compiled step: as an LM head that reads what is fed."""
    lm = model(matrix.columns, matrix.rows)
    stack = lm.module.stack()
    assert stack is not None
    weights = PackedWeights(tuple(matrices(lm, ("F32",))), matrix)
    own = packed_step(replace(stack, norm=None), weights)
    assert own is not None
    return alone(own, lm, x_RK)


def alone(own: NativeStep, lm: FastLlama, x_RK: Tensor) -> Tensor:
    rows, start, nothing = len(x_RK), torch.tensor([0]), SubLayers((), ())
    kv = lm.new_kv(1, rows)
    kv.begin((0,), torch.tensor([0]), start, rows, rows)
    masks, ids = lm.chain_masks(start, rows, rows), torch.zeros(1, rows, dtype=torch.long)
    feed = Feed(ids, torch.arange(rows)[None], masks, parts=nothing, residual_BTD=x_RK[None])
    with torch.no_grad():
        logits = own.run(feed, kv).logits_BTV
    assert logits is not None
    return logits[0]


def rounded(x_RK: Tensor) -> Tensor:
    """The inputs as products read them, float64: 8 bits, and one scale for every 32."""
    part = x_RK.unflatten(-1, (-1, 32))
    most = part.abs().amax(-1, keepdim=True)
    up = torch.full_like(most, 127).div(most)  # 127 / most is a product with 1 / most
    whole = torch.where(most > 0, part * up, 0).round()
    return (whole.double() * (most / 127).double()).flatten(1)


@needs_compiler
@pytest.mark.parametrize("name", TYPES)
def test_products_are_those_of_the_files_numbers_in_one_order(name: str) -> None:
    """Of the inputs as they are rounded; each row of up to 33 bit for bit as alone."""
    rows, columns = shapes(name)[1][0] + 32, shapes(name)[1][1]
    torch.manual_seed(1)
    matrix = from_gguf(blocks(name, rows, columns), name, rows, columns)
    x = torch.randn(33, columns)
    x[2, 32:64] = 0
    x[3] *= 1e4
    expected = rounded(x) @ matrix.widened().double().T
    found = product(matrix, x)
    off = (found - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert float(off.max()) < 2e-6
    each = torch.cat([product(matrix, row[None]) for row in x[:5]])
    for count in (2, 3, 4, 5):
        assert torch.equal(product(matrix, x[:count]), each[:count])
    assert torch.equal(found[:5], each)


@needs_compiler
def test_the_largest_numbers_fit_into_the_sums() -> None:
    """Sums of few products are kept in 16 bits."""
    for name, about in TYPES.items():
        given = blocks(name, 16, about.weights)
        first = 0 if name == "Q6_K" else 4 if name in LEAST else 2
        given[:, first : -2 if name == "Q6_K" else None] = 0x80 if name == "Q8_0" else 0xFF
        matrix, x = from_gguf(given, name, 16, about.weights), torch.ones(2, about.weights)
        x[1] = -1
        expected = rounded(x) @ matrix.widened().double().T
        torch.testing.assert_close(product(matrix, x).double(), expected, rtol=1e-5, atol=1e-4)


@needs_compiler
def test_matrices_that_are_read_together_may_be_of_different_types() -> None:
    """A whole model of all types: near itself widened, whose inputs are not rounded, and every
    token of a round bit for bit as alone. A copy is of the same numbers."""
    lm = model(256, 40, layers=2)
    types = ("Q6_K", "Q4_1", "Q8_0", "Q5_K", "F32", "Q4_K", "Q5_0", "Q4_0", "Q5_1")
    own, head = matrices(lm, types), from_gguf(blocks("Q6_K", 40, 256), "Q6_K", 40, 256)
    for layer, of in zip(lm.module.model.layers, own, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        owners = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        for name, owner in zip(MATRICES, (*owners, *mlp_parts(mlp)), strict=True):
            owner.weight.copy_(of[name].widened())
    lm.module.lm_head.weight.copy_(head.widened())
    ids = torch.randint(0, 90, (1, 9))
    wide = read(lm, ids)
    assert lm.module.keep_packed(PackedWeights(tuple(own), head))
    packed = lm.in_bits("packed")
    found = read(packed, ids)
    assert float((found - wide).abs().mean() / wide.abs().mean()) < 0.05
    assert torch.equal(found, torch.cat([read(packed, ids, at) for at in range(9)], 1))
    with pytest.raises(IncompatibleError, match="not in memory in any other form"):
        lm.module.model.layers[0].mlp.up_proj.weight.sum()


def mlp_parts(mlp: Any) -> tuple[Any, Any, Any]:
    return mlp.gate_proj, mlp.up_proj, mlp.down_proj


def read(lm: FastLlama, ids: Tensor, at: int | None = None) -> Tensor:
    """Logits of all tokens; of token `at` alone, behind those before it."""
    kv, count = lm.new_kv(1, ids.shape[1]), ids.shape[1]
    runs = [(0, count)] if at is None else [(0, at), (at, at + 1)]
    found = torch.empty(0)
    for first, end in runs:
        if first == end:
            continue
        start = torch.tensor([first])
        kv.begin((0,), torch.tensor([0]), start, end - first, end)
        masks = lm.chain_masks(start, end - first, end)
        position = torch.arange(first, end)[None]
        with torch.no_grad():
            logits = lm.forward(ids[:, first:end], position, masks, kv).logits_BTV
        assert logits is not None
        found = logits
    return found
