"""Attention masks, all bool with True = may attend.

Letters: B rows, L positions, S sequence, T fed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tree_mask(
    kept_len_B: Tensor,
    ancestor_BTT: Tensor,
    span: int,
    window: int | None = None,
    depth_BT: Tensor | None = None,
) -> Tensor:
    """[B, 1, T, L]: a fed token sees the kept positions of its row, its ancestors and itself.

    `window` hides what lies `window` or more *positions* back (position of a fed token = kept
    length + depth, so `depth_BT` is needed with it); sliding-window layers are exact this way.
    """
    B, T, _ = ancestor_BTT.shape
    at_L = torch.arange(span, device=kept_len_B.device)
    fed_BL = at_L[None] - kept_len_B[:, None]
    kept_BL = fed_BL < 0
    index_BTL = fed_BL.clamp(0, T - 1)[:, None].expand(B, T, span)
    own_BTL = ancestor_BTT.gather(2, index_BTL) & ((fed_BL >= 0) & (fed_BL < T))[:, None]
    mask_BTL = kept_BL[:, None] | own_BTL
    if window is not None:
        assert depth_BT is not None, "a sliding window needs the depth of every fed token"
        query_BT = kept_len_B[:, None] + depth_BT
        key_depth_BL = depth_BT.gather(1, fed_BL.clamp(0, T - 1))
        key_BL = torch.where(
            kept_BL, at_L[None].expand_as(fed_BL), kept_len_B[:, None] + key_depth_BL
        )
        mask_BTL = mask_BTL & (query_BT[:, :, None] - key_BL[:, None] < window)
    return mask_BTL[:, None]


def chain_mask(kept_len_B: Tensor, num_fed: int, span: int, window: int | None = None) -> Tensor:
    """[B, 1, T, L]: `tree_mask` of a chain, in one comparison."""
    at_L = torch.arange(span, device=kept_len_B.device)
    query_BT = kept_len_B[:, None]
    if num_fed > 1:
        query_BT = query_BT + torch.arange(num_fed, device=kept_len_B.device)
    mask_BTL = at_L <= query_BT[:, :, None]
    if window is not None:
        mask_BTL = mask_BTL & (query_BT[:, :, None] - at_L < window)
    return mask_BTL[:, None]


def document_mask(document_BS: Tensor, window: int | None = None) -> Tensor:
    """[B, 1, S, S]: causal inside one document; padding (-1) sees only itself."""
    S = document_BS.shape[1]
    at_S = torch.arange(S, device=document_BS.device)
    causal_SS = at_S[:, None] >= at_S
    if window is not None:
        causal_SS = causal_SS & (at_S[:, None] - at_S < window)
    same_BSS = document_BS[:, :, None] == document_BS[:, None]
    real_BSS = (document_BS >= 0)[:, :, None]
    itself_SS = torch.eye(S, dtype=torch.bool, device=document_BS.device)
    return ((same_BSS & causal_SS & real_BSS) | itself_SS)[:, None]
