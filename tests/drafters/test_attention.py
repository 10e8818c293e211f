"""Attention over long rows: equal to one dense softmax in float64, and memory linear in the row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from specctl.core.batch import TrainBatch
from specctl.core.forward.masks import document_mask
from specctl.drafters.attention import attention, flex, recompute
from specctl.drafters.attention.attention import attend_seen
from specctl.drafters.attention.seen import KeySet, Seen
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


def test_weights_too_small_for_a_cpu_are_none_and_change_nothing() -> None:
    """Scores 90 and 2,000 below the best, whose exp is denormal and 0; a key that nobody sees."""
    best = torch.tensor([0.0, -90.0, -2000.0, 1.0])[None, None, :, None]
    query = torch.ones(1, 1, 3, 1, requires_grad=True)
    key, value = best.clone().requires_grad_(), torch.ones(1, 1, 4, 1, requires_grad=True)
    seen = Seen(torch.zeros(1, 3, dtype=torch.long), torch.full((1, 3), 2))
    out = attend_seen(query, [KeySet(key, value, seen)])
    out.sum().backward()
    assert out.tolist() == [[[1.0]] * 3]
    assert value.grad is not None
    assert value.grad.flatten().tolist() == [3.0, 0.0, 0.0, 0.0]


def test_flex_attention_finds_what_slices_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own, uncompiled, in float64: blocks that all, some or none of the queries look
    into, and queries that see nothing; beside a second set whose softmax it shares. On a CPU its
    gradient is refused by name (its kernels are missing there), not by what it computes."""
    torch.manual_seed(0)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *given: None)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    asked: list[tuple[int, ...]] = []

    def kernel(query: Tensor, *given: Any, **how: Any) -> Any:
        mask = how["block_mask"]
        asked.append((int(mask.kv_num_blocks.sum()), int(mask.full_kv_num_blocks.sum())))
        return flex_attention.flex_attention(query, *given, **how)

    first = torch.cat([torch.zeros(2, 128), torch.randint(130, 290, (2, 22))], dim=1).long()
    last = torch.cat([torch.full((2, 128), 255), first[:, 128:] + torch.arange(-1, 21)], dim=1)
    seen = Seen(first, last.clamp(max=299).long())
    flat = [
        torch.randn(2, n, length, 8, dtype=torch.float64, requires_grad=True)
        for n, length in ((4, 150), (2, 150), (2, 150), (2, 300), (2, 300))
    ]
    each = Seen(torch.arange(150).expand(2, 150), torch.arange(150).expand(2, 150))

    def found() -> list[Tensor]:
        out = attend_seen(flat[0], [KeySet(flat[1], flat[2], each), KeySet(*flat[3:], seen)])
        return [out, *torch.autograd.grad(out.sin().sum(), flat)]

    wanted = found()
    monkeypatch.setattr(flex, "is_at_hand", lambda query: True)
    monkeypatch.setattr(flex, "kernel", lambda: kernel)
    for one, other in zip(found(), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    assert len(asked) == 4, "two sets, forward and backward"
    assert (4, 4) in asked, "whole blocks are read without their mask"


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
