"""transformers' recurrent layers over the slots of a `SlotState`.

The mixers of transformers are one skeleton: they fetch states from the cache, call a convolution
and a scan of their file, and put the final states back. Here the cache says that it holds none, so
that they take the branch for several tokens, and the functions of the file are replaced while a
forward of ours runs: they read the slots' states, answer every token on its own path, and leave
what the tokens would add. Whether a release of transformers calls these functions is not looked up
here: `hf_probe` compares what comes out.
Letters: B rows, E head width, H query heads, I input width, O output width, T fed tokens, W window,
X any axes (decays of a head).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from specctl.core.forward.slot_state import WHOLE, SlotState
from specctl.models.hf.hf_spec import CONVOLUTION, DELTA, KIMI, MAMBA1, MAMBA2
from specctl.models.recurrent.state_forms import (
    DecayedInputs,
    FedTokens,
    SelectiveTokens,
    convolved,
    read_decayed,
    read_selective,
)

NORM_EPS = 1e-6  # of keys and queries, in every delta rule of transformers


class StateForward:
    """One forward that reads states. Mixers run one after another, so whose function is called is
    known from the cache layer that was last given inputs. One writer: the thread that runs it."""

    def __init__(self, state: SlotState, fed: FedTokens) -> None:
        self.state, self._fed = state, fed
        self._place = (-1, 0)
        self._head = 0

    def enter(self, layer: int, idx: int, input_BIT: Tensor) -> None:
        """A mixer has handed over the inputs of its convolution."""
        self._place, self._head = (layer, idx), 0
        self.state.leave_inputs(self._place, input_BIT)

    @property
    def layer(self) -> int:
        return self._place[0]

    def held_BIW(self) -> Tensor:
        """The inputs in front of the convolution at hand."""
        return self.state.conv_of(self._place)

    def fed_on(self, device: torch.device) -> FedTokens:
        self._fed = self._fed.to(device)
        return self._fed

    def next_head(self) -> int:
        """The number of the head at hand, where a mixer scans head by head."""
        self._head += 1
        return self._head - 1


class StateCacheLayer(LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """A layer of transformers' cache whose states are those of the slots."""

    def __init__(self, forward: StateForward, layer: int, num_convs: int) -> None:
        super().__init__(number_of_states=max(1, num_convs))
        self.forward, self.layer = forward, layer

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        return

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, *args: Any, **kwargs: Any
    ) -> Tensor:
        self.forward.enter(self.layer, state_idx, conv_states)
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return recurrent_states


_RUNNING: ContextVar[StateForward | None] = ContextVar("state_forward", default=None)


@contextmanager
def running(forward: StateForward) -> Iterator[StateForward]:
    """Recurrent layers read the states of that forward, in this thread, until the end."""
    token = _RUNNING.set(forward)
    try:
        yield forward
    finally:
        _RUNNING.reset(token)


def at_hand() -> StateForward:
    """The forward that is running in this thread."""
    forward = _RUNNING.get()
    assert forward is not None, "states are read within `running`"
    return forward


# -- what stands for the functions of transformers, by the names of its arguments --------------


def _causal_conv1d_fn(
    forward: StateForward,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    fed = forward.fed_on(hidden_states.device)
    out = convolved(hidden_states, forward.held_BIW(), weight, bias, fed)
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(hidden_states.dtype)


def _delta_rule(
    forward: StateForward,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *args: Any,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Both gated delta rules; `g` has a decay per head, or per key channel of a head."""
    grouped = value.shape[2] // key.shape[2]
    query, key = (each.float().repeat_interleave(grouped, dim=2) for each in (query, key))
    if use_qk_l2norm_in_kernel:
        query, key = (
            each * torch.rsqrt((each * each).sum(-1, keepdim=True) + NORM_EPS)
            for each in (query, key)
        )
    log_decay = g.float() if g.dim() == 4 else g.float()[..., None]
    given = DecayedInputs(
        query.transpose(1, 2) * query.shape[-1] ** -0.5,
        key.transpose(1, 2),
        value.float().transpose(1, 2),
        log_decay.transpose(1, 2),
        beta.float().transpose(1, 2),
    )
    state_BHEO = forward.state.state_of(forward.layer)
    return _decayed(forward, given, state_BHEO).to(value.dtype), state_BHEO


def _decayed(
    forward: StateForward, given: DecayedInputs, state_BHEO: Tensor, is_turned: bool = False
) -> Tensor:
    """[B, T, H, O]: what a layer of decayed inputs gives behind this state. Its tokens are left
    for the state; `is_turned`: the layer keeps its state as [B, H, O, E]."""
    fed = forward.fed_on(state_BHEO.device)
    out_BHTO, tokens = read_decayed(given, state_BHEO, fed)
    forward.state.leave((forward.layer, WHOLE), replace(tokens, is_turned=is_turned))
    return out_BHTO.transpose(1, 2).contiguous()


def _mamba2_chunk_scan(
    forward: StateForward,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *args: Any,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    step_BTH1 = dt.clamp(*dt_limit).float()[..., None]
    input_BTHO = hidden_states.float()
    grouped = input_BTHO.shape[2] // B.shape[2]
    key, query = (each.float().repeat_interleave(grouped, dim=2) for each in (B, C))
    given = DecayedInputs(
        query.transpose(1, 2),
        key.transpose(1, 2),
        (input_BTHO * step_BTH1).transpose(1, 2),
        (step_BTH1 * A.float()[:, None]).transpose(1, 2),
    )
    state_BHOE = forward.state.state_of(forward.layer)
    out_BTHO = _decayed(forward, given, state_BHOE.transpose(2, 3), is_turned=True)
    if D is not None:
        out_BTHO = out_BTHO + D[..., None] * input_BTHO
    return out_BTHO, state_BHOE


def _mamba_selective_scan(
    forward: StateForward,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = F.softplus(dt)
    state, place = forward.state.state_of(forward.layer), (forward.layer, WHOLE)
    if state.dim() == 4:  # Zamba scans head by head
        place = (forward.layer, forward.next_head())
        state = state[:, place[1]]
    tokens = SelectiveTokens(
        dt.float(), hidden_states.float(), B.float().transpose(1, 2), A.float()
    )
    fed = forward.fed_on(hidden_states.device)
    out_BIT = read_selective(tokens, C.float().transpose(1, 2), state, fed)
    forward.state.leave(place, tokens)
    if D is not None:
        out_BIT = out_BIT + hidden_states * D[:, None]
    if z is not None:
        out_BIT = out_BIT * F.silu(z)
    return out_BIT, state


Own = Callable[..., Any]
FUNCTIONS: dict[str, Own] = {
    CONVOLUTION: _causal_conv1d_fn,
    DELTA: _delta_rule,
    KIMI: _delta_rule,
    MAMBA2: _mamba2_chunk_scan,
    MAMBA1: _mamba_selective_scan,
}


class StateFunction:
    """A function of a modeling file of transformers, and ours while a forward of ours runs."""

    def __init__(self, original: Callable[..., Any], own: Own) -> None:
        self.original, self.own = original, own
        self.__doc__ = original.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = _RUNNING.get()
        if forward is None:
            return self.original(*args, **kwargs)
        return self.own(forward, *args, **kwargs)


def install(model: Any) -> None:
    """Have the functions of the model's files step aside while a forward of ours runs. It is done
    once: put in for one forward only, two threads would take each other's for the originals."""
    for file in _files_of(model):
        for name, own in FUNCTIONS.items():
            original = getattr(file, name, None)
            if original is not None and not isinstance(original, StateFunction):
                setattr(file, name, StateFunction(original, own))


def _files_of(model: Any) -> list[ModuleType]:
    """The modeling files of transformers that the layers of a model come from."""
    names = {cls.__module__ for part in model.modules() for cls in type(part).__mro__}
    return [sys.modules[name] for name in sorted(names) if name.startswith("transformers.models.")]
