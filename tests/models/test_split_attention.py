"""Our kernels on CUDA: attention split over the cache against float64, a layer's small steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.device.gpu_kernels import has_triton
from specctl.models import kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not has_triton(), reason="no CUDA device"),
]
DEVIATION = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SHAPES = [  # rows, query heads, key/value heads, queries, positions, head width
    (1, 8, 2, 1, 70, 16),
    (2, 4, 4, 6, 300, 32),
    (1, 32, 8, 8, 1300, 64),
    (3, 8, 2, 20, 257, 128),
    (2, 8, 1, 100, 900, 128),
    (2, 4, 1, 7, 500, 256),
    (1, 8, 2, 700, 1300, 64),
]


def dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    key, value = (
        x.double().repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value)
    )
    score = query.double() @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    return score.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0) @ value


@pytest.mark.parametrize("dtype", DEVIATION)
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_split_attention(shape: Any, dtype: torch.dtype) -> None:
    B, H, J, T, L, E = shape
    generator = torch.Generator("cuda").manual_seed(0)
    random: dict[str, Any] = {"device": "cuda", "generator": generator}
    key, value = (x[:, :, :L] for x in torch.randn(2, B, J, L + 30, E, **random).to(dtype))
    query = torch.randn(B, T, H, E, **random).to(dtype).transpose(1, 2)
    mask = torch.rand(B, 1, T, L, **random) < 0.5
    mask[0, 0, -1] = False  # sees nothing
    split = kernels.split_kernel()
    for given in (mask, mask[:1], None):
        assert split.takes(query, key, value, given)
        seen = torch.ones_like(mask) if given is None else given
        wanted = dense(query, key, value, seen)
        off = (split.attend(query, key, value, given) - wanted).abs().max()
        assert off <= DEVIATION[dtype] * max(1.0, float(wanted.abs().max()))


@torch.inference_mode()
def test_small_steps_of_a_layer() -> None:
    own = kernels.layer_kernels()
    generator = torch.Generator("cuda").manual_seed(0)
    random: dict[str, Any] = {"device": "cuda", "generator": generator}
    x, weight = torch.randn(2, 3, 96, **random), torch.randn(96, **random)
    torch.testing.assert_close(own.rms_norm(x, weight, 1e-5), F.rms_norm(x, (96,), weight, 1e-5))
    both = torch.randn(2, 3, 3000, **random)
    gate, up = both.chunk(2, -1)
    torch.testing.assert_close(own.silu_mul(both), F.silu(gate) * up)
    B, T, H, J, E = 2, 3, 4, 2, 16
    heads = torch.randn(B, T, H + 2 * J, E, **random)
    cos, sin = torch.randn(B, T, 1, 2 * E, **random).chunk(2, -1)
    mine, theirs = torch.zeros(2, 2, 5, J, 20, E, device="cuda")
    slot, at = torch.tensor([[3], [1]]).cuda(), torch.tensor([[4, 5, 6], [10, 11, 12]]).cuda()
    query = own.rotate_and_store(heads, (cos, sin), (mine[0], mine[1]), slot, at)
    rotated = heads * cos + heads.roll(E // 2, -1) * sin
    theirs[0][slot, :, at] = rotated[:, :, H : H + J]
    theirs[1][slot, :, at] = heads[:, :, H + J :]
    torch.testing.assert_close(query, rotated[:, :, :H].transpose(1, 2))
    torch.testing.assert_close(mine, theirs)
