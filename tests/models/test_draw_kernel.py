"""On CUDA the kernel that draws tokens finds what the sum of scores and Gumbel numbers has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specctl.core.device.gpu_kernels import has_triton
from specctl.runtime.sampling.gumbel_max import best_token
from specctl.runtime.sampling.noise import RoundNoise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not has_triton(), reason="no CUDA device"),
]
B, M = 3, 4


def close(found: Tensor, noisy: Tensor) -> bool:
    """Whether these tokens have the best scores, but for the last bits of a logarithm."""
    if torch.equal(found, best_token(noisy)):
        return True
    best, mine = noisy.amax(-1), noisy.gather(-1, found[..., None])[..., 0]
    return bool((best - mine < 1e-5 * best.abs().clamp(min=1)).all())


@pytest.mark.parametrize("size", [1, 7, 1000, 1024, 5000, 128_256])
@torch.inference_mode()
def test_tokens_are_those_of_the_sum(size: int) -> None:
    torch.manual_seed(0)
    for seed in range(4):
        given = [seed - 2, 2**62 + seed, 5], [seed, 9, 1], [3 * seed, 7, 2]
        here, there = RoundNoise(*given), RoundNoise(*given, torch.device("cuda"))
        scores = torch.randn(B, M, size) * (seed + 0.5)
        moved = scores.cuda()
        drafted = there.draft_draw_BM(moved, seed).cpu()
        assert close(drafted, scores + here.draft_BMK(seed, M, size))
        final = there.final_draw_B(moved[:, 1]).cpu()
        assert close(final, scores[:, 1] + here.final_BV(size))
        depth = torch.tensor([[0, 1, 1, 2]]).repeat(B, 1)
        tree = there.target_draw_BT(moved, depth.cuda()).cpu()
        assert close(tree, scores + here.target_BTV(depth, size))
        chain = there.target_draw_BT(moved, None).cpu()
        assert close(chain, scores + here.target_BTV(torch.arange(M).expand(B, M), size))
        coupled = there.coupled_draw_B(moved[:, 0], seed, size).cpu()
        assert close(coupled, scores[:, 0] + here.coupled_BK(seed, size))
        assert torch.equal(there.accept_BT(9).cpu(), here.accept_BT(9))


@torch.inference_mode()
def test_nothing_and_what_is_no_number() -> None:
    scores = torch.randn(1, 3, 3000)
    scores[0, 0] = -torch.inf
    scores[0, 1, 2111] = torch.nan
    scores[0, 2, :-1] = -torch.inf
    found = RoundNoise([1], [2], [3], torch.device("cuda")).draft_draw_BM(scores.cuda(), 0)
    assert found.tolist() == [[0, 2111, 2999]]
