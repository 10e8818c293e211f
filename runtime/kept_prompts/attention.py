"""What the last tokens of a text attend to: the weights of some layers' heads, made again from the
cached keys and the queries of these tokens.

Letters: B rows, D hidden width, E head width, H query heads, J key/value heads, L positions, T fed
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specctl.core.errors import IncompatibleError
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Feed, LanguageModel
from specctl.runtime.engine.prefill import CHUNK


def check_shows(lm: LanguageModel) -> None:
    """Refuse a model whose attention is not seen, or whose keys leave a window."""
    if lm.windows:
        raise IncompatibleError(
            "what a sliding window has left behind is not seen any more",
            where="--mix",
            found=f"{type(lm.module).__name__} with windows of {max(lm.windows):,} tokens",
            expected="models that attend to the whole text",
            do="leave out --mix",
        )
    residual_11D = torch.zeros(1, 1, lm.spec.hidden_size, dtype=lm.dtype, device=lm.device)
    lm.queries({0: residual_11D}, torch.zeros(1, 1, dtype=torch.long, device=lm.device))


def read_and_watch(
    lm: LanguageModel, kv: SlotKV, tokens: Sequence[int], watching: int, layers: range
) -> Iterator[tuple[int, Tensor]]:
    """Read a text into slot 0 of the cache with the model's layers below the last of `layers`. Of
    each of these: its number, and the attention weights [H, T, L] of the last `watching` tokens
    over all positions, those behind each token being 0."""
    above, first, at = SubLayers.span(0, layers.stop), len(tokens) - watching, 0
    parts = None if layers.stop == lm.spec.num_layers else above
    taps: dict[int, Tensor] = {}
    while at < len(tokens):
        end = min(at + CHUNK, first if at < first else len(tokens))
        wanted = tuple(layers) if at >= first else ()
        found = _run(lm, kv, tokens[at:end], at, wanted, parts)
        for tap, value_TD in found.items():
            taps[tap] = torch.cat([taps[tap], value_TD]) if tap in taps else value_TD
        at = end
    position_BT = torch.arange(first, len(tokens), device=lm.device)[None]
    for layer, residual_TD in taps.items():
        query_HTE = lm.queries({layer: residual_TD[None]}, position_BT)[layer][0]
        yield layer, weights_of(query_HTE, kv.key_ZJLE[layer][0, :, : len(tokens)])


def weights_of(query_HTE: Tensor, key_JLE: Tensor) -> Tensor:
    """[H, T, L] float32: softmax attention of the last T of L tokens."""
    H, T, E = query_HTE.shape
    J, L, _ = key_JLE.shape
    scores_JTL = query_HTE.reshape(J, H // J * T, E).float() @ key_JLE.float().transpose(1, 2)
    scores_HTL = scores_JTL.view(H, T, L) / math.sqrt(E)
    is_behind_TL = torch.ones(T, L, dtype=torch.bool, device=key_JLE.device).triu(L - T + 1)
    return scores_HTL.masked_fill(is_behind_TL, -torch.inf).softmax(-1)


def _run(
    lm: LanguageModel,
    kv: SlotKV,
    chunk: Sequence[int],
    at: int,
    taps: tuple[int, ...],
    parts: SubLayers | None,
) -> dict[int, Tensor]:
    """Read tokens that stand at that position; [T, D] of each tap."""
    end = at + len(chunk)
    slot_B, start_B = torch.tensor([[0], [at]], device=lm.device).unbind()
    kv.begin((0,), slot_B, start_B, len(chunk), end, at)
    ids_BT = torch.tensor([list(chunk)], device=lm.device)
    position_BT = torch.arange(at, end, device=lm.device)[None]
    masks = lm.chain_masks(start_B, len(chunk), end)
    feed = Feed(ids_BT, position_BT, masks, taps, logits=False, parts=parts)
    out = lm.run(feed, kv)
    return {tap: out.taps[tap][0] for tap in taps}
