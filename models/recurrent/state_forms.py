"""How recurrent layers read a tree of tokens from the one state in front of it.

A recurrent state grows token by token, but what a token adds to it is known without it, or follows
from it in one triangular system. So a tree is read without a state per node: each node sums what
its own ancestors added, faded by the decays between them. What was added is kept, and the state
moves when the accepted path is known.

With S the state in front of the round, g the log-decays, c_t the sum of g over t and its ancestors,
and D_ts = exp(c_t - c_s) where s is t or an ancestor of t, else 0:

    out_t = exp(c_t) q_t S + sum_s D_ts (q_t . k_s) r_s
    S'    = exp(c_e) S + sum over the path to e of exp(c_e - c_s) k_s r_s^T

Mamba 2 (arXiv 2405.21060, section 6): k = B, q = C, r = dt x, g = dt A. The gated delta rule (arXiv
2412.06464, equation 10) writes r = beta (v - what the state already says at k), the solution of
(I + beta (K K^T . D, strictly below the diagonal)) r = beta (v - exp(c) k S). Kimi Delta Attention
(arXiv 2510.26692) has a decay per key channel. Mamba 1 (arXiv 2312.00752) has one per channel and
state entry, and no such sums: its nodes' states are made one by one.
Letters: B rows, E head width (of keys), H query heads, I input width (channels), L positions, O
output width (of values), P path, T fed tokens, W window (inputs of a convolution), X any axes (1,
or E: decays of a head), Y carry (state entries of a channel).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # tokens of a run that are read at once: their pairs are made
NARROW_BLOCK = 16  # where pairs have a decay for every key channel


@dataclass(slots=True)
class FedTokens:
    """How the fed tokens of a forward hang together. `ancestor_BTT`: which stand on the path to
    which, themselves included, parents before children; None: every row is a run."""

    ancestor_BTT: Tensor | None
    _windows: dict[int, Tensor] = field(default_factory=dict)

    def window_BTW(self, width: int) -> Tensor:
        """Of each token the last `width` inputs of its own path, the oldest first, as places in
        [width - 1 inputs in front of the round, the fed tokens]."""
        if width not in self._windows:
            assert self.ancestor_BTT is not None, "a run is read in its own order"
            self._windows[width] = _windows(self.ancestor_BTT, width)
        return self._windows[width]

    def to(self, device: torch.device) -> FedTokens:
        """The same on the device of a layer."""
        held = self.ancestor_BTT
        return self if held is None or held.device == device else FedTokens(held.to(device))


def parents_of(ancestor_BTT: Tensor) -> Tensor:
    """[B, T] the parent of each fed token, -1 of the root: of its ancestors the last, since parents
    stand before their children."""
    T = ancestor_BTT.shape[1]
    number_T = torch.arange(1, T + 1, device=ancestor_BTT.device)
    found: Tensor = (ancestor_BTT.tril(-1) * number_T).amax(2) - 1
    return found


def _windows(ancestor_BTT: Tensor, width: int) -> Tensor:
    B, T, _ = ancestor_BTT.shape
    in_front = width - 1
    old_L = torch.arange(in_front, device=ancestor_BTT.device) - 1
    before_BL = torch.cat(
        [old_L.clamp(min=0).expand(B, -1), parents_of(ancestor_BTT) + in_front], dim=1
    ).clamp(min=0)  # the root comes after the last input in front of it
    at_BT = (torch.arange(T, device=ancestor_BTT.device) + in_front).expand(B, T)
    places = [at_BT]
    for _ in range(in_front):
        places.append(before_BL.gather(1, places[-1]))
    return torch.stack(places[::-1], dim=2)


def convolved(
    input_BIT: Tensor, held_BIW: Tensor, weight_IW: Tensor, bias: Tensor | None, fed: FedTokens
) -> Tensor:
    """[B, I, T]: a causal depthwise convolution along the path of every token. Windows go through
    conv1d, whose rounding the model was made with."""
    channels, width = weight_IW.shape
    read_BIL = torch.cat([held_BIW.to(input_BIT.dtype), input_BIT], dim=2).to(weight_IW.dtype)
    stride = 1
    if fed.ancestor_BTT is not None:
        at_BL = fed.window_BTW(width).flatten(1)
        read_BIL = read_BIL.gather(2, at_BL[:, None].expand(-1, channels, -1))
        stride = width
    return F.conv1d(read_BIL, weight_IW[:, None], bias, stride=stride, groups=channels)


@dataclass(frozen=True, slots=True)
class DecayedTokens:
    """What tokens add to a state [B, H, E, O] that fades by `log_decay_BHTX`. `is_turned`: the
    state is held as [B, H, O, E]. `end_BHEO`: that behind all of a long run, where it was read."""

    key_BHTE: Tensor
    write_BHTO: Tensor
    log_decay_BHTX: Tensor
    is_turned: bool = False
    end_BHEO: Tensor | None = None

    def after(self, state_BX: Tensor, path_BP: Tensor) -> Tensor:
        if self.end_BHEO is not None and _is_whole(path_BP, self.key_BHTE.shape[2]):
            return self.end_BHEO.transpose(2, 3) if self.is_turned else self.end_BHEO
        at_BP, is_BHP1 = path_BP.clamp(min=0), (path_BP >= 0)[:, None, :, None]
        key, write, log_decay = (
            each.gather(2, at_BP[:, None, :, None].expand(*each.shape[:2], -1, each.shape[3]))
            for each in (self.key_BHTE, self.write_BHTO, self.log_decay_BHTX)
        )
        state = state_BX.transpose(2, 3) if self.is_turned else state_BX
        state = _grown(state, key, write * is_BHP1, log_decay * is_BHP1)
        return state.transpose(2, 3) if self.is_turned else state


def _is_whole(path_BP: Tensor, num_fed: int) -> bool:
    """Whether every row keeps all fed tokens. Not on a GPU, which would have to be waited for."""
    if path_BP.shape[1] != num_fed or path_BP.device.type != "cpu":
        return False
    return bool((path_BP == torch.arange(num_fed)).all())


def _grown(state_BHEO: Tensor, key: Tensor, write: Tensor, log_decay: Tensor) -> Tensor:
    """The state behind a run of tokens."""
    sum_BHTX = log_decay.cumsum(2)
    end_BH1X = sum_BHTX[:, :, -1:]
    faded_BHTE = key * (end_BH1X - sum_BHTX).exp()
    return (faded_BHTE.transpose(2, 3) @ write).addcmul_(end_BH1X.exp().transpose(2, 3), state_BHEO)


@dataclass(frozen=True, slots=True)
class DecayedInputs:
    """Float32 inputs of a layer whose state fades; `beta_BHT`: rates of the delta rule, None where
    values are added as they are."""

    query_BHTE: Tensor
    key_BHTE: Tensor
    value_BHTO: Tensor
    log_decay_BHTX: Tensor
    beta_BHT: Tensor | None = None

    def part(self, first: int, last: int) -> DecayedInputs:
        """Those of some tokens."""
        at = slice(first, last)
        return DecayedInputs(
            self.query_BHTE[:, :, at],
            self.key_BHTE[:, :, at],
            self.value_BHTO[:, :, at],
            self.log_decay_BHTX[:, :, at],
            None if self.beta_BHT is None else self.beta_BHT[:, :, at],
        )


def read_decayed(
    given: DecayedInputs, state_BHEO: Tensor, fed: FedTokens
) -> tuple[Tensor, DecayedTokens]:
    """Outputs [B, H, T, O] behind every token, and what the tokens add to the state. Long runs are
    read a block at a time, each from the state behind the one before."""
    T, num_decays = given.log_decay_BHTX.shape[2:]
    size = BLOCK if num_decays == 1 else NARROW_BLOCK
    if fed.ancestor_BTT is not None or size >= T:
        out, write = _read_block(given, state_BHEO, fed.ancestor_BTT)
        return out, DecayedTokens(given.key_BHTE, write, given.log_decay_BHTX)
    outs, writes = [], []
    for first in range(0, T, size):
        part = given.part(first, min(first + size, T))
        out, write = _read_block(part, state_BHEO, None)
        state_BHEO = _grown(state_BHEO, part.key_BHTE, write, part.log_decay_BHTX)
        outs.append(out)
        writes.append(write)
    added = given.key_BHTE, torch.cat(writes, 2), given.log_decay_BHTX
    return torch.cat(outs, 2), DecayedTokens(*added, end_BHEO=state_BHEO)


def _read_block(
    given: DecayedInputs, state_BHEO: Tensor, ancestor_BTT: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs, and what each token writes at its key."""
    query, key, log_decay = given.query_BHTE, given.key_BHTE, given.log_decay_BHTX
    T = key.shape[2]
    if ancestor_BTT is None:
        seen = torch.ones(T, T, dtype=torch.bool, device=key.device).tril()[None, None]
        sum_BHTX = log_decay.cumsum(2)
    else:
        seen = ancestor_BTT[:, None]
        sum_BHTX = seen.to(log_decay.dtype) @ log_decay
    fade_BHTX = sum_BHTX.exp()
    both_BHTTX = sum_BHTX[:, :, :, None] - sum_BHTX[:, :, None]
    # Hidden pairs first: between two branches the difference may be positive and overflow in exp.
    both_BHTTX = both_BHTTX.masked_fill(~seen[..., None], -torch.inf).exp()
    if both_BHTTX.shape[-1] == 1:
        decay_BHTT = both_BHTTX[..., 0]
        met_BHTT = (query @ key.transpose(2, 3)) * decay_BHTT
        alike_BHTT = (key @ key.transpose(2, 3)) * decay_BHTT
    else:
        faded = (both_BHTTX * key[:, :, None]).transpose(3, 4)  # [B, H, T, E, T]
        met_BHTT = (query[:, :, :, None] @ faded)[:, :, :, 0]
        alike_BHTT = (key[:, :, :, None] @ faded)[:, :, :, 0]
    write = given.value_BHTO
    if given.beta_BHT is not None:
        beta_BHT1 = given.beta_BHT[..., None]
        new = beta_BHT1 * (write - (fade_BHTX * key) @ state_BHEO)
        write = torch.linalg.solve_triangular(
            beta_BHT1 * alike_BHTT, new, upper=False, unitriangular=True
        )
    return (fade_BHTX * query) @ state_BHEO + met_BHTT @ write, write


@dataclass(frozen=True, slots=True)
class SelectiveTokens:
    """What tokens add to the state [B, I, Y] of Mamba 1: steps dt and inputs by channel, keys by
    state entry, and the rates (below zero) of both."""

    step_BIT: Tensor
    input_BIT: Tensor
    key_BTY: Tensor
    rate_IY: Tensor

    def after(self, state_BX: Tensor, path_BP: Tensor) -> Tensor:
        at_BP, is_BP = path_BP.clamp(min=0), path_BP >= 0
        at_BIP = at_BP[:, None].expand(-1, self.step_BIT.shape[1], -1)
        step_BIP = self.step_BIT.gather(2, at_BIP) * is_BP[:, None]
        add_BIP = step_BIP * self.input_BIT.gather(2, at_BIP)
        key_BPY = self.key_BTY.gather(1, at_BP[..., None].expand(-1, -1, self.key_BTY.shape[2]))
        for first in range(0, path_BP.shape[1], NARROW_BLOCK):
            at = slice(first, first + NARROW_BLOCK)
            sum_BIP = step_BIP[:, :, at].cumsum(2)
            end_BI1 = sum_BIP[:, :, -1:]
            fade_BIPY = ((end_BI1 - sum_BIP)[..., None] * self.rate_IY[:, None]).exp()
            new_BIPY = fade_BIPY * add_BIP[:, :, at, None] * key_BPY[:, None, at]
            state_BX = (end_BI1 * self.rate_IY).exp() * state_BX + new_BIPY.sum(2)
        return state_BX


def read_selective(
    given: SelectiveTokens, query_BTY: Tensor, state_BIY: Tensor, fed: FedTokens
) -> Tensor:
    """[B, I, T]: what every token reads of its own state, made from its parent's."""
    B, T, _ = query_BTY.shape
    outs = []
    if fed.ancestor_BTT is not None:  # the state in front of the round, then those of the nodes
        place_BT = parents_of(fed.ancestor_BTT) + 1
        held = state_BIY.new_empty(T + 1, *state_BIY.shape)
        held[0], row_B = state_BIY, torch.arange(B, device=query_BTY.device)
    for t in range(T):
        if fed.ancestor_BTT is not None:
            state_BIY = held[place_BT[:, t], row_B]
        step_BI1 = given.step_BIT[:, :, t, None]
        add_BIY = step_BI1 * given.input_BIT[:, :, t, None] * given.key_BTY[:, None, t]
        state_BIY = (step_BI1 * given.rate_IY).exp() * state_BIY + add_BIY
        outs.append((state_BIY @ query_BTY[:, t, :, None])[..., 0])
        if fed.ancestor_BTT is not None:
            held[t + 1] = state_BIY
    return torch.stack(outs, dim=2)
