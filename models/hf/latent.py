"""Latent attention in its absorbed form: a round reads what the cache keeps, without heads.

Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) keeps of a token a latent c
(equation 9) and one rotated key r for all heads (15). transformers expands both to the keys
[W_UK c; r] and values W_UV c of every head (10, 11, 17), for all positions in every forward. But
q . W_UK c = (W_UK^T q) . c, and a weighted sum of W_UV c is W_UV times that of c. So here W_UK goes
to the queries and W_UV to what comes out of the attention (18), which has one key head of rank +
rotated width, whose first `rank` numbers are its values.

Per position and head that costs 2 rank + rotated width - key width - value width products more for
each fed token, and saves rank (key width + value width) once. So a forward of few tokens is
absorbed, a long piece of a prompt is expanded by transformers (`_most_fed`).

The attentions of transformers call their `expand_kv` between cache and kernel. Ours steps in while
a forward of ours runs; `hf_probe` compares what comes out.
Letters: B rows, E head width (of latents: latent and rotated key), H query heads, I input width (of
`kv_b_proj`: the latent), L positions, T fed tokens, X any axes (rows and tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

EXPANDING = "expand_kv"  # of transformers' attentions; older releases keep all heads
OWN = "specctl."


class LatentForward:
    """One forward of `num_fed` tokens a row against a cache. Attentions run one after another, so
    `absorbed` is the one whose latents were handed on as they are. One writer: the thread that
    runs it."""

    def __init__(self, num_fed: int) -> None:
        self.num_fed = num_fed
        self.absorbed: nn.Module | None = None


_RUNNING: ContextVar[LatentForward | None] = ContextVar("latent_forward", default=None)


@contextmanager
def running(num_fed: int) -> Iterator[None]:
    """Attentions read latents as they are, in this thread, until the end."""
    token = _RUNNING.set(LatentForward(num_fed))
    try:
        yield
    finally:
        _RUNNING.reset(token)


class LatentHeads:
    """The two halves of an attention's `kv_b_proj`, around a kernel that reads latents."""

    def __init__(self, module: Any) -> None:
        self.key_width: int = module.qk_nope_head_dim
        weight: Tensor = module.kv_b_proj.weight
        each = self.key_width + module.v_head_dim
        weight_HEI = weight.view(-1, each, weight.shape[1])
        self.key_HEI = weight_HEI[:, : self.key_width]
        self.value_HEI = weight_HEI[:, self.key_width :]

    def queries(self, query_BHTE: Tensor) -> Tensor:
        """[B, H, T, E]: the queries as latents and rotated keys meet them."""
        B, H, T, _ = query_BHTE.shape
        plain_HXE = query_BHTE[..., : self.key_width].transpose(0, 1).reshape(H, B * T, -1)
        latent_BHTI = (plain_HXE @ self.key_HEI).view(H, B, T, -1).transpose(0, 1)
        return torch.cat([latent_BHTI, query_BHTE[..., self.key_width :]], dim=-1)

    def values(self, out_BHTE: Tensor) -> Tensor:
        """[B, H, T, E]: the values of each head, of weighted sums of latents."""
        B, H, T, _ = out_BHTE.shape
        rank = self.value_HEI.shape[2]
        sum_HXI = out_BHTE[..., :rank].transpose(0, 1).reshape(H, B * T, rank)
        return (sum_HXI @ self.value_HEI.transpose(1, 2)).view(H, B, T, -1).transpose(0, 1)


def heads_at_hand(module: nn.Module) -> LatentHeads | None:
    """For the kernel of `module`: its heads, if the keys and values that it is given are latents;
    None if they are expanded."""
    forward = _RUNNING.get()
    if forward is None or forward.absorbed is not module:
        return None
    forward.absorbed = None
    return LatentHeads(module)


def install(model: nn.Module) -> bool:
    """Have the attentions' expanding step aside while a forward of ours runs; whether there are
    any. It is done once for a class, as for recurrent layers (`state_mixers.install`)."""
    kinds = {kind for part in model.modules() for kind in type(part).__mro__}
    holders = [kind for kind in kinds if EXPANDING in vars(kind) and _is_known(kind)]
    for kind in holders:
        original = vars(kind)[EXPANDING]
        if not hasattr(original, "__wrapped__"):
            setattr(kind, EXPANDING, _unless_absorbed(original))
    return bool(holders)


def reads_latents(attention: nn.Module, name: str) -> bool:
    """Whether that linear layer reads the cached latents of all positions, not the fed tokens; or
    is not called at all, where they are absorbed."""
    return name == "kv_b_proj" and hasattr(attention, EXPANDING)


def _is_known(kind: type) -> bool:
    return kind.__module__.startswith("transformers.models.")


def _unless_absorbed(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def expand_kv(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        forward = _RUNNING.get()
        if forward is None or not _is_plain(self) or forward.num_fed > _most_fed(self):
            expanded: tuple[Tensor, Tensor] = original(self, kv_nope, k_rot)
            return expanded
        forward.absorbed = self
        both_B1LE = torch.cat([kv_nope, k_rot], dim=-1)
        return both_B1LE, both_B1LE  # a kernel for keys and values of one width is the fastest

    return expand_kv


def _most_fed(module: Any) -> float:
    """Fed tokens up to which absorbing takes fewer products than expanding."""
    heads, rank = module.qk_nope_head_dim + module.v_head_dim, module.kv_lora_rank
    more = 2 * rank + module.qk_rope_head_dim - heads
    return float(rank * heads / more) if more > 0 else float("inf")


def _is_plain(module: Any) -> bool:
    """Whether `kv_b_proj` is its weight and no more: not quantised, split, adapted or elsewhere."""
    up = module.kv_b_proj
    if type(up) is not nn.Linear or up.bias is not None or "forward" in vars(up):
        return False
    if type(up.weight) is not nn.Parameter or up.weight.is_meta:
        return False
    hooks = (*up._forward_hooks.values(), *up._forward_pre_hooks.values())
    return all(str(getattr(hook, "__module__", "")).startswith(OWN) for hook in hooks)
