"""Sub-layers of a transformers module run apart: some left out, some with a residual handed in.

transformers' own forward stays in charge. For the while of one forward, an attention or an MLP that
is left out answers zero, and a layer may be given another residual than the one that reaches it.
Neither asks for more than that a layer adds what its parts put out to its residual, which
`check_parts` tries on the module before anything relies on it.
Letters: B rows, D hidden width, T fed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specctl.core.errors import IncompatibleError
from specctl.core.forward.row_additions import RowAdditions
from specctl.core.forward.sub_layers import SubLayers
from specctl.models.hf.latent import reads_latents

ATTENTION = ("self_attn", "attn", "attention", "self_attention")
MLP = ("mlp", "feed_forward", "block_sparse_moe", "ffn", "moe")


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """The layers of a module, and the attention and the MLP of each."""

    layers: tuple[nn.Module, ...]
    attentions: tuple[nn.Module, ...]
    mlps: tuple[nn.Module, ...]

    @classmethod
    def of(cls, model: Any, num_layers: int) -> DecoderParts:
        for module in model.base_model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == num_layers:
                layers = tuple(module)
                break
        else:
            raise refused(model, f"no list of {num_layers} layers")
        attentions = tuple(_part(model, layer, ATTENTION) for layer in layers)
        return cls(layers, attentions, tuple(_part(model, layer, MLP) for layer in layers))

    @contextmanager
    def only(
        self, parts: SubLayers | None, residual: Mapping[int, Tensor] | None = None
    ) -> Iterator[None]:
        """Run `parts` alone (None: all), each layer of `residual` behind that state; one of fewer
        rows takes the place of the last ones."""
        with ExitStack() as held:
            for layer, state in (residual or {}).items():
                hook = _given(state)
                handle = self.layers[layer].register_forward_pre_hook(hook, with_kwargs=True)
                held.callback(handle.remove)
            if parts is not None:
                for layer in range(len(self.layers)):
                    if layer not in parts.attention:
                        held.enter_context(_silent(self.attentions[layer], _no_attention))
                    if layer not in parts.mlp:
                        held.enter_context(_silent(self.mlps[layer], _no_mlp))
            yield

    def linear(self, layer: int, name: str) -> nn.Linear | None:
        """That linear layer of a layer's attention or MLP, if there is one of fed tokens."""
        for part in (self.attentions[layer], self.mlps[layer]):
            found = getattr(part, name, None)
            if isinstance(found, nn.Linear) and not reads_latents(part, name):
                return found
        return None

    @contextmanager
    def adding(self, several: Sequence[RowAdditions]) -> Iterator[None]:
        """For the while of one forward, linear layers put out what is added on some rows, too."""
        with ExitStack() as held:
            for additions in several:
                for layer, name in additions.factors:
                    part = self.linear(layer, name)
                    assert part is not None, f"layer {layer} has no {name}"
                    hook = _adding(additions, layer, name)
                    held.callback(part.register_forward_hook(hook).remove)
            yield


def _adding(additions: RowAdditions, layer: int, name: str) -> Callable[..., Tensor]:
    def add(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return additions.onto(layer, (name,), (out.shape[-1],), args[0], out)

    return add


def _part(model: Any, layer: nn.Module, names: tuple[str, ...]) -> nn.Module:
    for name in names:
        found = getattr(layer, name, None)
        if isinstance(found, nn.Module):
            return found
    raise refused(model, f"{type(layer).__name__} without any of {', '.join(names)}")


def refused(model: Any, found: str) -> IncompatibleError:
    """The error for a module whose layers cannot be run apart."""
    return IncompatibleError(
        f"{type(model).__name__} does not lend its layers",
        found=found,
        expected="layers that add an attention and an MLP to a residual",
        do="choose a drafter with weights of its own, or one that needs no training",
    )


def _given(state: Tensor) -> Callable[..., Any]:
    def swap(module: nn.Module, args: Any, kwargs: Any) -> Any:
        found = _input(args, kwargs)
        num_others = found.shape[1] - state.shape[1]
        new = torch.cat([found[:, :num_others], state.to(found)], 1) if num_others else state
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": new}
        return (new, *args[1:]), kwargs

    return swap


@contextmanager
def _silent(part: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    part.__dict__["forward"] = forward
    try:
        yield
    finally:
        del part.__dict__["forward"]


def _input(args: Any, kwargs: Any) -> Tensor:
    found = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    assert isinstance(found, Tensor)
    return found


def _no_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return torch.zeros_like(_input(args, kwargs)), None


def _no_mlp(*args: Any, **kwargs: Any) -> Tensor:
    return torch.zeros_like(_input(args, kwargs))


def check_parts(model: Any, run: Callable[[SubLayers, Tensor], Tensor], width: int) -> None:
    """Try that a state passes a layer whose parts are left out as it is. `run` gives the residual
    in front of the last layer."""
    like = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    state_1TD = torch.randn(1, 3, width, generator=generator).to(like.device, like.dtype)
    try:
        out_1TD = run(SubLayers((), ()), state_1TD)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise refused(model, f"{type(error).__name__}: {error}"[:200]) from error
    if not torch.equal(out_1TD, state_1TD):
        raise refused(model, "a residual that changes where nothing is added to it")
