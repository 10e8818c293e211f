"""The noise of a round: keyed by counters, uniform, independent, the same on every device."""

import numpy as np
import pytest
import torch
from scipy import stats

from specctl.models.native.library import library
from specctl.runtime.sampling.gumbel_max import NoiseCounters, best_token, drawn
from specctl.runtime.sampling.noise import RoundNoise, _codes, _gumbel, _long, _mix, _uniform

CPU = torch.device("cpu")


def gumbel_to_uniform(gumbel):
    return torch.exp(-torch.exp(-gumbel.double())).flatten().numpy()


def test_uniforms_lie_strictly_inside_zero_and_one():
    lowest, highest = np.array([0], dtype=np.int64), np.array([-1], dtype=np.int64)
    for bits in (lowest, highest):
        u = (bits >> 24 & (1 << 40) - 1).astype(np.float32)
        u = np.minimum((u + np.float32(0.5)) * np.float32(2.0**-40), 1 - 2.0**-24)
        assert 0.0 < float(u[0]) < 1.0
    u_BT = RoundNoise(range(2000), [0] * 2000, [0] * 2000).accept_BT(200)
    assert u_BT.dtype == torch.float32
    assert float(u_BT.min()) > 0.0
    assert float(u_BT.max()) < 1.0


def test_gumbel_noise_is_finite_at_both_ends_of_the_grid():
    ends = np.array([2.0**-41, 1 - 2.0**-24], dtype=np.float32)
    assert torch.isfinite(_gumbel(ends)).all()


STREAMS = {
    "accept": lambda n, i: n.accept_BT(7)[:, i],
    "final": lambda n, i: _gumbel_as_uniform(n.final_BV(7)[:, i]),
    "target": lambda n, i: _gumbel_as_uniform(
        n.target_BTV(torch.arange(7).expand(len(n._round_B), 7), 3)[:, i, 1]
    ),
    "draft": lambda n, i: _gumbel_as_uniform(n.draft_BMK(i, 2, 3)[:, 1, 2]),
}


def _gumbel_as_uniform(gumbel):
    return torch.exp(-torch.exp(-gumbel.double()))


def by_seed(count):
    return RoundNoise(range(count), [4] * count, [9] * count)


def by_round(count):
    return RoundNoise([7] * count, range(count), range(count))


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("rows", [by_seed, by_round])
def test_every_stream_is_uniform_over_consecutive_counters(stream, rows):
    values = STREAMS[stream](rows(20_000), 3).double().numpy()
    assert stats.kstest(values, "uniform").pvalue > 1e-4


@pytest.mark.parametrize("stream", STREAMS)
def test_neighbouring_indices_rounds_and_seeds_are_independent(stream):
    for rows in (by_seed, by_round):
        noise = rows(20_000)
        here, beside = STREAMS[stream](noise, 3).double(), STREAMS[stream](noise, 4).double()
        assert independent(here, beside)
        assert independent(here[:-1], here[1:])


def test_streams_do_not_share_numbers():
    noise = by_round(20_000)
    values = [STREAMS[stream](noise, 3).double() for stream in STREAMS]
    for i, first in enumerate(values):
        for second in values[i + 1 :]:
            assert independent(first, second)


def independent(first, second):
    """Chi-square over a 8 x 8 table of ranks."""
    table, *_ = np.histogram2d(first.numpy(), second.numpy(), bins=8, range=[[0, 1], [0, 1]])
    return stats.chisquare(table.ravel()).pvalue > 1e-5


def test_one_large_vocabulary_row_is_uniform_and_has_no_ties_at_the_top():
    gumbel_V = RoundNoise([1], [2], [3]).final_BV(130_000)[0]
    assert stats.kstest(gumbel_to_uniform(gumbel_V), "uniform").pvalue > 1e-4
    best = gumbel_V.topk(50).values
    assert len(best.unique()) == 50


def test_gumbel_draws_follow_the_distribution():
    distribution_V = torch.tensor([0.5, 0.3, 0.15, 0.05])
    noise = RoundNoise(range(40_000), [0] * 40_000, [0] * 40_000)
    counts = torch.bincount(
        noise.final_draw_B(distribution_V.log().repeat(40_000, 1)), minlength=4
    ).numpy()
    assert stats.chisquare(counts, 40_000 * distribution_V.numpy()).pvalue > 1e-4


def scores_of(*shape, seed=0):
    """Of the usual spread, with tokens that cannot be drawn."""
    scores = 3.0 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return scores.masked_fill(scores < -3.0, -torch.inf)


DRAWS = {
    "final": (lambda n, s: n.final_draw_B(s[:, 0]), lambda n, s: s[:, 0] + n.final_BV(s.shape[-1])),
    "target, a chain": (
        lambda n, s: n.target_draw_BT(s, None),
        lambda n, s: s + n.target_BTV(torch.tensor([[0, 1, 2]] * len(s)), s.shape[-1]),
    ),
    "target, a tree": (
        lambda n, s: n.target_draw_BT(s, torch.tensor([[0, 1, 1]] * len(s))),
        lambda n, s: s + n.target_BTV(torch.tensor([[0, 1, 1]] * len(s)), s.shape[-1]),
    ),
    "draft": (
        lambda n, s: n.draft_draw_BM(s, 4),
        lambda n, s: s + n.draft_BMK(4, s.shape[1], s.shape[2]),
    ),
    "coupled": (
        lambda n, s: n.coupled_draw_B(s[:, 0], 2, s.shape[-1]),
        lambda n, s: s[:, 0] + n.coupled_BK(2, s.shape[-1]),
    ),
    "coupled, some ids": (
        lambda n, s: n.coupled_draw_B(s[:, 0], 2, torch.arange(s.shape[-1]) * 3 + 1),
        lambda n, s: s[:, 0] + n.coupled_BK(2, torch.arange(s.shape[-1]) * 3 + 1),
    ),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("vocab_size", [1, 7, 64, 2048])
def test_a_draw_is_the_best_sum_of_score_and_noise(name, vocab_size):
    draw, summed = DRAWS[name]
    for again in range(40):
        noise = RoundNoise([again, 2**63 - 1], [5, again], [77, 1000 * again])
        scores = scores_of(2, 3, vocab_size, seed=again)
        assert torch.equal(draw(noise, scores), summed(noise, scores).argmax(-1))


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_that_rounding_decides_is_that_of_the_sums(name):
    draw, summed = DRAWS[name]
    noise = RoundNoise([1, 2], [3, 4], [5, 6])
    none = torch.zeros(2, 3, 200)
    level = none - (
        summed(noise, none)[:, None] if name.startswith(("f", "c")) else summed(noise, none)
    )
    sums = summed(noise, level)
    assert float(sums.abs().max()) < 1e-5  # every token is as good as the others
    assert torch.equal(draw(noise, level), sums.argmax(-1))


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_a_draw_from_odd_scores_is_that_of_the_sums(odd):
    noise = RoundNoise([1, 2], [3, 4], [5, 6])
    scores = scores_of(2, 50)
    scores[0, 20] = odd
    scores[1] = -torch.inf
    assert torch.equal(noise.final_draw_B(scores), best_token(scores + noise.final_BV(50)))


@pytest.mark.skipif(library().functions is None, reason=f"no compiled step: {library().missing}")
def test_the_compiled_draw_decides_by_itself_nearly_always():
    scores, code_V = scores_of(5000, 64), torch.from_numpy(_codes(64, CPU))
    told = [drawn(scores[None, i : i + 1], code_V, NoiseCounters(1, [i], [0])) for i in range(5000)]
    assert sum(token is None for token in told) < 10


def test_asking_twice_gives_the_same_numbers():
    noise = RoundNoise([1, 2], [3, 4], [5, 6])
    assert torch.equal(noise.final_BV(9), noise.final_BV(9))
    assert torch.equal(noise.accept_BT(9), noise.accept_BT(9))


def test_a_row_draws_the_same_whatever_batch_it_is_in():
    together = RoundNoise([11, 12, 13], [1, 2, 3], [40, 50, 60])
    alone = RoundNoise([12], [2], [50])
    depth_BT = torch.tensor([[0, 1, 1], [0, 1, 2], [0, 0, 0]])
    assert torch.equal(together.accept_BT(4)[1:2], alone.accept_BT(4))
    assert torch.equal(together.final_BV(30)[1:2], alone.final_BV(30))
    target_BTV = together.target_BTV(depth_BT, 30)
    assert torch.equal(target_BTV[1:2], alone.target_BTV(depth_BT[1:2], 30))
    assert torch.equal(together.draft_BMK(2, 3, 30)[1:2], alone.draft_BMK(2, 3, 30))


def test_the_target_stream_depends_on_the_position_alone():
    early = RoundNoise([5], [0], [10]).target_BTV(torch.tensor([[0, 1, 2, 3]]), 20)
    later = RoundNoise([5], [9], [12]).target_BTV(torch.tensor([[0, 1]]), 20)
    assert torch.equal(early[:, 2:], later)
    assert not torch.equal(early[:, :2], later)


def test_coupled_drafts_see_the_target_stream_on_their_own_ids():
    noise = RoundNoise([5, 6], [0, 1], [10, 20])
    target_BTV = noise.target_BTV(torch.tensor([[0, 1, 2], [0, 1, 2]]), 50)
    ids_K = torch.tensor([3, 17, 49])
    assert torch.equal(noise.coupled_BK(2, ids_K), target_BTV[:, 2, ids_K])
    assert torch.equal(noise.coupled_BK(1, 50), target_BTV[:, 1])


def test_draws_of_a_round_differ_by_index_and_by_node():
    noise = RoundNoise([5], [0], [10])
    rows = torch.cat([noise.draft_BMK(index, 3, 16)[0] for index in range(4)])
    assert len(rows.unique(dim=0)) == 12


def test_torch_and_numpy_hash_the_same_bits():
    seeds = [0, 1, 2**40, 2**63 - 1]
    key_B = _long(seeds, CPU)
    torch_B = torch.tensor(seeds)
    assert torch.equal(torch.from_numpy(_mix(key_B)), _mix(torch_B))
    codes_V = _codes(100, CPU)
    plain = torch.from_numpy(_uniform(_mix(key_B)[:, None], codes_V))
    other = _uniform(_mix(torch_B)[:, None], torch.from_numpy(codes_V))
    assert torch.equal(plain, other)


def test_the_numbers_never_change_between_versions():
    noise = RoundNoise([1234], [5], [678])
    u = noise.accept_BT(3)[0].tolist()
    assert u == pytest.approx(PINNED, abs=1e-7)


PINNED = [0.90833873, 0.04921503, 0.14094122]


def test_all_streams_run_on_the_meta_device():
    noise = RoundNoise([1], [2], [3], "meta")
    depth_BT = torch.zeros(1, 4, dtype=torch.long, device="meta")
    assert noise.target_BTV(depth_BT, 6).shape == (1, 4, 6)
    assert noise.final_BV(6).device.type == noise.accept_BT(2).device.type == "meta"
    assert noise.draft_BMK(0, 2, 6).shape == (1, 2, 6)
    assert noise.coupled_BK(1, torch.zeros(3, dtype=torch.long, device="meta")).shape == (1, 3)
