"""RoundNoise: the random numbers of one round, computed from counters, with no generator to carry.

Every number is a hash of (seed of the row, stream, counters), so it depends neither on the batch a
row travels in, nor on the order of requests, nor on what was drawn before; asking twice gives the
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
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

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

# An int64 or float32 array: numpy on the CPU (a small operation costs a third of torch's), torch
# elsewhere. The operators used below mean the same in both; the bits are equal.
Array = Any


class Noise(Protocol):
    """What a verification rule may draw. Tests and the enumerator inject their own."""

    def accept_BT(self, num_fed: int) -> Tensor: ...

    def final_BV(self, vocab_size: int) -> Tensor: ...

    def target_BTV(self, depth_BT: Tensor, vocab_size: int) -> Tensor: ...

    def position_BT(self, depth_BT: Tensor) -> Tensor: ...


def _mix(x: Array) -> Array:
    """A bijection of int64 in which every output bit depends on every input bit. Not in place."""
    x = (x ^ ((x >> 32) & _LOW_32)) * _MUL_1
    x = (x ^ ((x >> 29) & _LOW_35)) * _MUL_2
    return x ^ ((x >> 32) & _LOW_32)


def _long(values: Sequence[int] | Tensor, device: torch.device) -> Array:
    if device == _CPU:
        return values.numpy() if isinstance(values, Tensor) else np.array(values, dtype=np.int64)
    return torch.as_tensor(values, dtype=torch.long, device=device)


def _count(num: int, device: torch.device) -> Array:
    return np.arange(num) if device == _CPU else torch.arange(num, device=device)


@lru_cache(maxsize=16)
def _codes(num: int, device: torch.device) -> Array:
    """int64 [num]: a fixed random code per token id or index (a constant table)."""
    return _mix((_count(num, device) + 1) * _STEP)


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
        self._seed_B = _mix(_long(seed_B, self.device) * _STEP + _STEP)
        self._round_B = _long(round_B, self.device)
        self._position_B = _long(position_B, self.device)

    def _round_key_B1(self, stream: int) -> Array:
        return _mix((self._seed_B ^ stream) + self._round_B * _STEP)[:, None]

    def _target_key_BT(self, depth_BT: Array, stream: int = TARGET) -> Array:
        at_BT = self._position_B[:, None] + depth_BT + 1
        return _mix((self._seed_B ^ stream)[:, None] + at_BT * _STEP)

    def accept_BT(self, num_fed: int) -> Tensor:
        """Uniforms for acceptance tests, keyed (seed, round, fed index)."""
        u_BT = _uniform(self._round_key_B1(ACCEPT), _codes(num_fed, self.device))
        return torch.as_tensor(u_BT)

    def final_BV(self, vocab_size: int) -> Tensor:
        """Gumbel noise for the last draw of the round, keyed (seed, round, token id)."""
        return _gumbel(_uniform(self._round_key_B1(FINAL), _codes(vocab_size, self.device)))

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

    def position_BT(self, depth_BT: Tensor) -> Tensor:
        """float64 uniforms keyed (seed, absolute position of the token drawn)."""
        depth = depth_BT.numpy() if self.device == _CPU else depth_BT
        bits_BT = _bits(self._target_key_BT(depth, POSITION), _codes(1, self.device))
        return (torch.as_tensor(bits_BT).double() + 0.5) * 2.0**-40

    def coupled_BK(self, depth: int, ids_K: Tensor | int) -> Tensor:
        """The target stream at that depth, restricted to the draft's ids (a tensor of target ids,
        or the full vocabulary size): drafting with it agrees with `target-only` most often."""
        if isinstance(ids_K, int):
            code_K = _codes(ids_K, self.device)
        else:
            code_K = _mix((_long(ids_K, self.device) + 1) * _STEP)
        depth_11 = _count(1, self.device)[:, None] + depth
        return _gumbel(_uniform(self._target_key_BT(depth_11), code_K))

    def counted_over(self, valid_BN: Tensor) -> Noise:
        """The same for the rules, but a node's uniform is that of its number among the row's own
        nodes: how a batch pads its trees is then no matter."""
        return OwnNodes(self, valid_BN)

    def draft_BMK(self, index: int, num_nodes: int, num_rows: int) -> Tensor:
        """Gumbel noise for drafting, keyed (seed, round, draw index, node in the draw, row of the
        draft vocabulary). `index` counts the draws of a round."""
        node_M = (_count(num_nodes, self.device) + ((index << 24) + 1)) * _STEP
        key_BM1 = _mix(self._round_key_B1(DRAFT) + node_M)[:, :, None]
        return _gumbel(_uniform(key_BM1, _codes(num_rows, self.device)))


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

    def final_BV(self, vocab_size: int) -> Tensor:
        return self.of.final_BV(vocab_size)

    def target_BTV(self, depth_BT: Tensor, vocab_size: int) -> Tensor:
        return self.of.target_BTV(depth_BT, vocab_size)

    def position_BT(self, depth_BT: Tensor) -> Tensor:
        return self.of.position_BT(depth_BT)
