"""Attention over long rows: equal to one dense softmax in float64, and memory linear in the row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.masks import document_mask
from specctl.drafters.nets import attention, recompute
from specctl.drafters.nets.attention import KeySet, Seen, attend_seen
from specctl_testing.drafters.saved_bytes import saved_bytes

PACKED = [[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, -1, -1]]
ALONE = [[0] * 7, [3] * 7]


def dense(query: Tensor, sets: list[KeySet]) -> Tensor:
    """Every score of every set in one softmax."""
    B, H, T, E = query.shape
    scores, values = [], []
    for keys in sets:
        group = H // keys.key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (keys.key, keys.value))
        own = torch.eye(T, dtype=torch.bool)[None, None]
        mask = own if keys.seen is None else keys.seen.mask(key.shape[2])
        score = (query @ key.transpose(-1, -2) * E**-0.5).masked_fill(~mask, -torch.inf)
        scores.append(score)
        values.append(value)
    out = torch.cat(scores, -1).softmax(-1) @ torch.cat(values, 2)
    return out.transpose(1, 2).reshape(B, T, H * E)


@pytest.mark.parametrize("documents", [PACKED, ALONE])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("kernel", ["flash", "sliced"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_unrolled_steps_are_one_dense_softmax(
    documents: list[list[int]],
    kv_heads: int,
    kernel: str,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(attention, "SLICE_QUERIES", 3)  # several slices
    text = Seen.text(torch.tensor(documents))
    seen = text if kernel == "flash" else Seen(text.first_BT, text.last_BT)
    query = torch.randn(2, 4, 7, 8, dtype=torch.float64, requires_grad=True)
    flat = [
        torch.randn(2, kv_heads, 7, 8, dtype=torch.float64, requires_grad=True)
        for _ in range(2 * steps)
    ]
    sets = [KeySet(flat[2 * i], flat[2 * i + 1], None if i else seen) for i in range(steps)]
    found, wanted = attend_seen(query, sets), dense(query, sets)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    by, into = torch.randn_like(found), [query, *flat]
    grads = zip(*(torch.autograd.grad(x, into, by) for x in (found, wanted)), strict=True)
    for one, other in grads:
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_other_queries_see_their_run_of_keys_and_a_second_set() -> None:
    """Of the second set the first query sees nothing."""
    torch.manual_seed(0)
    known = Seen(torch.tensor([[0, 2, 2]]), torch.tensor([[1, 2, 4]]))
    own = Seen(torch.tensor([[1, 0, 2]]), torch.tensor([[0, 1, 2]]))
    flat = [
        torch.randn(1, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 5, 5, 3, 3)
    ]
    sets = [KeySet(flat[1], flat[2], known), KeySet(flat[3], flat[4], own)]
    found, wanted = attend_seen(flat[0], sets), dense(flat[0], sets)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    grads = zip(*(torch.autograd.grad(x.sin().sum(), flat) for x in (found, wanted)), strict=True)
    for one, other in grads:
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("documents", [PACKED, ALONE])
def test_what_rows_of_text_see_is_the_mask_of_documents(documents: list[list[int]]) -> None:
    document_BS = torch.tensor(documents)
    assert torch.equal(Seen.text(document_BS).mask(7), document_mask(document_BS))


@pytest.mark.parametrize(("seq_len", "most"), [(8_192, 8e9), (16_384, 16e9)])
def test_eagle3_of_llama_8b_keeps_little_for_the_backward_pass(seq_len: int, most: float) -> None:
    """Five steps, one row; with scores kept it was 31 and 96 GB, counted alike."""
    assert saved_bytes("eagle3", {"ttt_steps": 5, "chunk": 8_192}, seq_len) <= most


@pytest.mark.parametrize(
    "family", ["eagle3", "gumiho", "falcon", "p-eagle", "dflash", "hydra", "moa"]
)
def test_computing_passes_again_changes_no_gradient(
    family: str,
    make_model: Callable[..., object],
    make_batch: Callable[..., TrainBatch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from specctl_testing.drafters.head_cases import make_heads, nearly_markov

    target, found = nearly_markov(make_model), []
    for most in (10**12, 0):
        monkeypatch.setattr(recompute, "MOST_SAVED", most)
        torch.manual_seed(0)
        drafter = make_heads(target, family)
        torch.manual_seed(1)
        out = drafter.loss(make_batch(target, drafter))
        trained = list(drafter.trainable().values())
        found.append(torch.autograd.grad(out.sum, trained, allow_unused=True))
    for kept, again in zip(*found, strict=True):
        assert kept is None or torch.equal(kept, again)
