"""Shared parts of the drafters: alignment, rotary positions, chains in attention, growth, heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.errors import IncompatibleError
from specctl.core.forward.masks import document_mask
from specctl.core.kv_cache import SlotKV
from specctl.core.vocab import VocabMap
from specctl.drafters.attention.seen import Seen
from specctl.drafters.losses.align import ahead_mask, aim, shifted
from specctl.drafters.nets.blocks import attend, attend_chains, rotary, rotate
from specctl.drafters.nets.heads import ResBlock, cut_rows
from specctl.drafters.states.tree_layout import TreeLayout


def batch_of(document: list[int], loss: list[int]) -> TrainBatch:
    ids = torch.arange(10, 10 + len(document))[None]
    return TrainBatch(
        ids,
        torch.tensor([loss], dtype=torch.bool),
        torch.tensor([document]),
        torch.arange(len(document))[None],
        teacher_BSV=torch.zeros(1, len(document), 32),
    )


def test_rows_look_ahead_inside_their_document_at_wanted_tokens_only() -> None:
    batch = batch_of([0, 0, 0, 0, 1, 1, 1, -1], [0, 1, 1, 1, 0, 1, 1, 1])
    assert ahead_mask(batch, 1)[0].tolist() == [1, 1, 1, 0, 1, 1, 0, 0]
    assert ahead_mask(batch, 2)[0].tolist() == [1, 1, 0, 0, 1, 0, 0, 0]
    rows = aim(batch, 2)
    assert rows.row_Q.tolist() == [0, 1, 4]
    assert rows.label_Q.tolist() == [12, 13, 16]
    assert rows.teacher_row_Q.tolist() == [1, 2, 5]


def test_shifting_fills_behind_the_end() -> None:
    assert shifted(torch.tensor([[1, 2, 3]]), 2, fill=-1).tolist() == [[3, -1, -1]]
    assert shifted(torch.tensor([[1, 2, 3]]), 5).tolist() == [[0, 0, 0]]


def test_rotary_is_the_half_rotation_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    torch.manual_seed(0)
    query, key = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8)
    position = torch.tensor([[0, 1, 2, 9, 4], [3, 4, 5, 6, 70]])
    turn = rotary(position, 8, 10000.0)
    half = 10000.0 ** (-torch.arange(0, 8, 2).float() / 8)
    angle = (position[..., None].float() * half).repeat(1, 1, 2)
    theirs = apply_rotary_pos_emb(query, key, angle.cos(), angle.sin())
    torch.testing.assert_close(rotate(query, turn), theirs[0])
    torch.testing.assert_close(rotate(key, turn), theirs[1])


def test_chains_attend_to_true_rows_and_their_own_entries_only() -> None:
    """Against one dense softmax per row, with grouped query heads."""
    torch.manual_seed(0)
    B, H, G, S, E = 2, 2, 2, 5, 4
    query = torch.randn(B, H * G, S, E)
    keys = [torch.randn(B, H, S, E) for _ in range(3)]
    values = [torch.randn(B, H, S, E) for _ in range(3)]
    document = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, -1]])
    mask = document_mask(document)
    out = attend_chains(query, keys, values, Seen.text(document)).view(B, S, H * G, E)
    for b in range(B):
        for head in range(H * G):
            for t in range(S):
                seen = mask[b, 0, t].nonzero()[:, 0]
                own_key = [key[b, head // G, t][None] for key in keys[1:]]
                own_value = [value[b, head // G, t][None] for value in values[1:]]
                key = torch.cat([keys[0][b, head // G, seen], *own_key])
                value = torch.cat([values[0][b, head // G, seen], *own_value])
                weight = (key @ query[b, head, t] * E**-0.5).softmax(-1)
                torch.testing.assert_close(out[b, t, head], weight @ value, rtol=1e-4, atol=1e-5)


def test_the_first_step_of_chains_is_plain_attention() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    mask = document_mask(torch.zeros(1, 6, dtype=torch.long))
    repeated = (x.repeat_interleave(2, dim=1) for x in (key, value))
    wanted = torch.nn.functional.scaled_dot_product_attention(query, *repeated, attn_mask=mask)
    seen = Seen.text(torch.zeros(1, 6, dtype=torch.long))
    out = attend_chains(query, [key], [value], seen)
    torch.testing.assert_close(out, wanted.transpose(1, 2).reshape(1, 6, 32))
    torch.testing.assert_close(attend(query, key, value, mask), out)


def naive_mask(kept: int, parents: list[int], node: int, span: int) -> list[bool]:
    seen, at = set(range(kept)), node
    while at >= 0:
        seen.add(kept + at)
        at = parents[at]
    return [position in seen for position in range(span)]


@pytest.mark.parametrize("kept", [(3, 3), (5, 2)])
@pytest.mark.parametrize("opening", [0, 2])
def test_nodes_see_the_kept_rows_and_their_ancestors(
    round_view: Any, kept: tuple[int, int], opening: int
) -> None:
    """`opening` nodes of a chain first, then branches: the chain shortcut must not leak."""
    view = round_view({0: [0] * kept[0], 1: [0] * kept[1]})
    kv = SlotKV(1, 2, 1, 32, 4, torch.float32, torch.device("cpu"))
    growth = TreeLayout(view, kv, kept, torch.tensor(kept))
    parents: list[list[int]] = [[], []]
    calls = [[[i - 1]] * 2 for i in range(opening)]
    calls += [
        [[-1, opening - 1, -1], [opening - 1, -1, -1]],
        [[opening, opening + 2], [0, opening]],
    ]
    for call in calls:
        first = len(parents[0])
        place = growth.place(torch.tensor(call))
        for row in range(2):
            parents[row].extend(call[row])
        for row in range(2):
            for m, parent in enumerate(call[row]):
                depth, at = 1, parent
                while at >= 0:
                    depth, at = depth + 1, parents[row][at]
                assert int(place.position_BM[row, m]) == kept[row] + depth - 1
                wanted = naive_mask(kept[row], parents[row], first + m, place.span)
                if place.mask is None:
                    assert all(wanted)
                else:
                    assert place.mask[row, 0, m].tolist() == wanted
                near = growth.near(place, 3)[row, 0, m].tolist()
                for key in (k for k in range(place.span) if wanted[k]):
                    key_position = key
                    if key >= kept[row]:
                        key_position, at = kept[row], parents[row][key - kept[row]]
                        while at >= 0:
                            key_position, at = key_position + 1, parents[row][at]
                    assert near[key] == (kept[row] + depth - 1 - key_position < 3)


def test_a_cache_too_short_for_a_policy_grows_and_keeps_its_entries(round_view: Any) -> None:
    kv = SlotKV(1, 1, 1, 6, 2, torch.float32, torch.device("cpu"))
    kv.key_ZJLE[0][:] = 7.0
    growth = TreeLayout(round_view({0: [0] * 5}), kv, [5], torch.tensor([5]))
    growth.place(torch.tensor([[-1, -1, -1]]))
    new: Tensor = torch.ones(1, 1, 3, 2)
    keys, _ = kv.update(0, new, new)
    assert keys[0, 0, :, 0].tolist() == [7.0] * 5 + [1.0] * 3


def test_a_fresh_residual_block_is_the_identity() -> None:
    x = torch.randn(3, 8)
    assert torch.equal(ResBlock(8)(x), x)


def test_rows_are_cut_through_an_earlier_cut() -> None:
    weight = torch.arange(10.0)[:, None]
    first = VocabMap(torch.tensor([1, 3, 5, 7]), 10)
    once = cut_rows(weight, None, first)
    twice = cut_rows(once, first, VocabMap(torch.tensor([3, 7]), 10))
    assert twice[:, 0].tolist() == [3.0, 7.0]
    with pytest.raises(IncompatibleError, match="already cut"):
        cut_rows(once, first, VocabMap(torch.tensor([2, 3]), 10))
