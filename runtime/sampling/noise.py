"""RoundNoise: the random numbers of one round, computed from counters, with no generator to carry.

Every number is a hash of (seed of the row, stream, counters), so it depends neither on the batch a
row travels in, nor on the order of requests, nor on what was drawn before; a second call gives the
same answer. The hash is two rounds of an xor-shift-multiply finalizer (the construction of
splitmix64 and murmur3) on int64 with wraparound, bit-identical on meta, CPU and CUDA. The *target*
stream is keyed by absolute position and token id: the draw of a position is then the same whatever
drafter, tree or batch (Daliri, Musco and Suresh, "Coupling without communication and drafter-
invariant speculative decoding", arXiv 2408.07978).

Uniforms are float32, strictly inside (0, 1), with fine steps near zero (40 random bits), so that a
Gumbel number resolves rare events even over large vocabularies.
Letters: B rows, K draft vocabulary, L positions, M new nodes, N nodes, T fed tokens, V target
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from specctl.core.language_model import ChainDraws, Truncation
from specctl.runtime.sampling.gumbel_max import NoiseCounters, best_token, drawn

ACCEPT, FINAL, TARGET, DRAFT, POSITION = 1, 2, 3, 4, 5  # streams
_M64 = (1 << 64) - 1


def _signed(value: int) -> int:
    value &= _M64
    return value - (1 << 64) if value >> 63 else value


_STEP = _signed(0x9E3779B97F4A7C15)  # odd; spreads consecutive counters
_MUL_1 = _signed(0xBF58476D1CE4E5B9)
_MUL_2 = _signed(0x94D049BB133111EB)
_LOW_32, _LOW_35, _LOW_40 = (1 << 32) - 1, (1 << 35) - 1, (1 << 40) - 1
_BELOW_ONE = 1.0 - 2.0**-24
_CPU = torch.device("cpu")

# An int64 or float32 array: numpy on the CPU (a small operation costs a third of torch's), where
# all keys are made, torch elsewhere. The operators used below mean the same in both; the bits are
# equal.
Array = Any


class Noise(Protocol):
    """What a verification rule may draw. Tests and the enumerator inject their own."""

    def accept_BT(self, num_fed: int) -> Tensor: ...

    def final_draw_B(self, scores_BV: Tensor) -> Tensor: ...

    def target_draw_BT(self, scores_BTV: Tensor, depth_BT: Tensor | None) -> Tensor: ...

    def target_BTV(self, depth_BT: Tensor, vocab_size: int) -> Tensor: ...

    def position_BT(self, depth_BT: Tensor) -> Tensor: ...


def _mix(x: Array) -> Array:
    """A bijection of int64 in which every output bit depends on every input bit. Not in place."""
    x = (x ^ ((x >> 32) & _LOW_32)) * _MUL_1
    x = (x ^ ((x >> 29) & _LOW_35)) * _MUL_2
    return x ^ ((x >> 32) & _LOW_32)


def _long(values: Sequence[int] | Tensor, device: torch.device) -> Array:
    if device == _CPU:
        return np.ascontiguousarray(values, dtype=np.int64)
    return torch.as_tensor(values, dtype=torch.long, device=device)


def _placed(array: Array, device: torch.device) -> Array:
    """The same where it is needed; the host does not wait for the copy."""
    return array if device == _CPU else torch.from_numpy(array).to(device, non_blocking=True)


def _ints(values: Sequence[int] | Tensor) -> Sequence[int]:
    return values.tolist() if isinstance(values, Tensor) else values


def _count(num: int, device: torch.device) -> Array:
    return np.arange(num) if device == _CPU else torch.arange(num, device=device)


@lru_cache(maxsize=16)
def _codes(num: int, device: torch.device) -> Array:
    """int64 [num]: a fixed random code per token id or index (a constant table)."""
    return _mix((_count(num, device) + 1) * _STEP)


@lru_cache(maxsize=16)
def _code_tensor(num: int, device: torch.device = _CPU) -> Tensor:
    """The same, for who wants an address."""
    return torch.as_tensor(_codes(num, device))


def _inner(index: int) -> int:
    """The counter of the first node of a draw."""
    return (index << 24) + 1


def _bits(key: Array, code: Array) -> Array:
    """40 random bits from well mixed keys and codes of broadcastable shape."""
    x = key ^ code
    x *= _MUL_1
    x ^= (x >> 32) & _LOW_32
    x *= _MUL_2
    x >>= 24
    x &= _LOW_40
    return x


def _uniform(key: Array, code: Array) -> Array:
    """float32 in (0, 1) from well mixed keys and codes of broadcastable shape."""
    x = _bits(key, code)
    u = x.to(torch.float32) if isinstance(x, Tensor) else x.astype(np.float32)
    u += 0.5
    u *= 2.0**-40
    return u.clamp_(max=_BELOW_ONE) if isinstance(u, Tensor) else u.clip(max=_BELOW_ONE, out=u)


def _gumbel(u: Array) -> Tensor:
    """-log(-log(1 - u)): the maximum is decided by small u, where the grid is fine."""
    if isinstance(u, Tensor):
        return u.neg_().log1p_().neg_().log_().neg_()
    np.log1p(np.negative(u, out=u), out=u)
    np.log(np.negative(u, out=u), out=u)
    return torch.from_numpy(np.negative(u, out=u))


class RoundNoise:
    """Noise of B rows in one round. `position_B` is the position of the root (the kept length)."""

    def __init__(
        self,
        seed_B: Sequence[int] | Tensor,
        round_B: Sequence[int] | Tensor,
        position_B: Sequence[int] | Tensor,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self._seeds, self._rounds, self._positions = map(_ints, (seed_B, round_B, position_B))

    @cached_property
    def _seed_B(self) -> Array:
        return _mix(_long(self._seeds, _CPU) * _STEP + _STEP)

    @cached_property
    def _round_B(self) -> Array:
        return _long(self._rounds, _CPU)

    @cached_property
    def _position_B(self) -> Array:
        return _long(self._positions, _CPU)

    def _round_key_B1(self, stream: int) -> Array:
        return _mix((self._seed_B ^ stream) + self._round_B * _STEP)[:, None]

    def _target_key_BT(self, depth_BT: Array, stream: int = TARGET) -> Array:
        """Where the depths are."""
        seed_B, position_B = self._seed_B, self._position_B
        if isinstance(depth_BT, Tensor):
            seed_B, position_B = _placed(np.stack([seed_B, position_B]), depth_BT.device)
        at_BT = position_B[:, None] + depth_BT + 1
        return _mix((seed_B ^ stream)[:, None] + at_BT * _STEP)

    def _gumbel_numbers(self, key: Array, code: Array) -> Tensor:
        return _gumbel(_uniform(_placed(key, self.device), code))

    def accept_BT(self, num_fed: int) -> Tensor:
        """Uniforms for acceptance tests, keyed (seed, round, fed index)."""
        u_BT = _uniform(self._round_key_B1(ACCEPT), _codes(num_fed, _CPU))
        return torch.as_tensor(_placed(u_BT, self.device))

    def final_BV(self, vocab_size: int) -> Tensor:
        """Gumbel noise for the last draw of the round, keyed (seed, round, token id)."""
        return self._gumbel_numbers(self._round_key_B1(FINAL), _codes(vocab_size, self.device))

    def final_draw_B(self, scores_BV: Tensor) -> Tensor:
        """The best of scores + `final_BV`: the last draw of the round, by softmax(scores)."""
        V = scores_BV.shape[-1]
        counters = NoiseCounters(FINAL, self._seeds, self._rounds)
        token_B1 = drawn(scores_BV[:, None], _code_tensor(V, self.device), counters)
        return best_token(scores_BV + self.final_BV(V)) if token_B1 is None else token_B1[:, 0]

    def target_BTV(self, depth_BT: Tensor, vocab_size: int) -> Tensor:
        """Gumbel noise keyed (seed, absolute position of the token drawn, token id)."""
        codes_V = _codes(vocab_size, self.device)
        if self.device != _CPU:
            return _gumbel(_uniform(self._target_key_BT(depth_BT)[:, :, None], codes_V))
        depth = depth_BT.numpy()
        num_levels = int(depth.max()) + 1  # a tree has fewer depths than nodes: once per depth
        if num_levels >= depth.shape[1]:
            return _gumbel(_uniform(self._target_key_BT(depth)[:, :, None], codes_V))
        level_1L = np.arange(num_levels)[None]
        gumbel_BLV = _gumbel(_uniform(self._target_key_BT(level_1L)[:, :, None], codes_V))
        return gumbel_BLV[torch.arange(len(depth))[:, None], depth_BT]

    def target_draw_BT(self, scores_BTV: Tensor, depth_BT: Tensor | None) -> Tensor:
        """The best of scores + `target_BTV`: what the target draws behind every fed token. Depths
        None: those of a chain."""
        B, T, V = scores_BTV.shape
        keys = TARGET, self._seeds, self._positions
        counters = NoiseCounters(*keys, 1, depth_BT, is_chain=depth_BT is None)
        token_BT = drawn(scores_BTV, _code_tensor(V, self.device), counters)
        if token_BT is not None:
            return token_BT
        if depth_BT is None:
            depth_BT = torch.arange(T, device=self.device).expand(B, T)
        return best_token(scores_BTV + self.target_BTV(depth_BT, V))

    def position_BT(self, depth_BT: Tensor) -> Tensor:
        """float64 uniforms keyed (seed, absolute position of the token drawn)."""
        depth = depth_BT.numpy() if self.device == _CPU else depth_BT
        bits_BT = _bits(self._target_key_BT(depth, POSITION), _codes(1, self.device))
        return (torch.as_tensor(bits_BT).double() + 0.5) * 2.0**-40

    def coupled_BK(self, depth: int, ids_K: Tensor | int) -> Tensor:
        """The target stream at that depth, restricted to the draft's ids (a tensor of target ids,
        or the full vocabulary size): drafting with it agrees with `target-only` most often."""
        key_B1 = self._target_key_BT(np.full((1, 1), depth))
        return self._gumbel_numbers(key_B1, self._codes_of(ids_K))

    def coupled_draw_B(self, scores_BK: Tensor, depth: int, ids_K: Tensor | int) -> Tensor:
        """The best of scores + `coupled_BK`."""
        counters = NoiseCounters(TARGET, self._seeds, self._positions, depth + 1)
        code_K = torch.as_tensor(self._codes_of(ids_K))
        row_B1 = drawn(scores_BK[:, None], code_K, counters)
        if row_B1 is not None:
            return row_B1[:, 0]
        return best_token(scores_BK + self.coupled_BK(depth, ids_K))

    def _codes_of(self, ids_K: Tensor | int) -> Array:
        if isinstance(ids_K, int):
            return _codes(ids_K, self.device)
        return _mix((_long(ids_K, self.device) + 1) * _STEP)

    def chain_draws(
        self, temperatures: Sequence[float], truncations: Sequence[Truncation] | None = None
    ) -> ChainDraws:
        """For a chain that is drafted in one call: draw i is that of `draft_draw_BM` at index i."""
        codes = partial(_code_tensor, device=self.device)
        return ChainDraws(temperatures, truncations, self._seeds, self._rounds, codes)

    def counted_over(self, valid_BN: Tensor) -> Noise:
        """The same for the rules, but a node's uniform is that of its number among the row's own
        nodes: how a batch pads its trees is then no matter."""
        return OwnNodes(self, valid_BN)

    def draft_BMK(self, index: int, num_nodes: int, num_rows: int) -> Tensor:
        """Gumbel noise for drafting, keyed (seed, round, draw index, node in the draw, row of the
        draft vocabulary). `index` counts the draws of a round."""
        node_M = (np.arange(num_nodes) + _inner(index)) * _STEP
        key_BM1 = _mix(self._round_key_B1(DRAFT) + node_M)[:, :, None]
        return self._gumbel_numbers(key_BM1, _codes(num_rows, self.device))

    def draft_draw_BM(self, scores_BMK: Tensor, index: int) -> Tensor:
        """The best of scores + `draft_BMK`."""
        _, M, K = scores_BMK.shape
        counters = NoiseCounters(DRAFT, self._seeds, self._rounds, inner=_inner(index))
        row_BM = drawn(scores_BMK, _code_tensor(K, self.device), counters)
        return best_token(scores_BMK + self.draft_BMK(index, M, K)) if row_BM is None else row_BM


@dataclass(frozen=True, slots=True)
class OwnNodes:
    """Noise of a round whose nodes are numbered row by row, padding left out."""

    of: RoundNoise
    valid_BN: Tensor

    def accept_BT(self, num_fed: int) -> Tensor:
        u_BT = self.of.accept_BT(num_fed)
        if num_fed != self.valid_BN.shape[1] + 1:  # of a path through the tree, by depth
            return u_BT
        own_BT = torch.nn.functional.pad(self.valid_BN, (1, 0), value=True).cumsum(1) - 1
        return u_BT.gather(1, own_BT)

    def final_draw_B(self, scores_BV: Tensor) -> Tensor:
        return self.of.final_draw_B(scores_BV)

    def target_draw_BT(self, scores_BTV: Tensor, depth_BT: Tensor | None) -> Tensor:
        return self.of.target_draw_BT(scores_BTV, depth_BT)

    def target_BTV(self, depth_BT: Tensor, vocab_size: int) -> Tensor:
        return self.of.target_BTV(depth_BT, vocab_size)

    def position_BT(self, depth_BT: Tensor) -> Tensor:
        return self.of.position_BT(depth_BT)
