"""Exact attention over long rows in memory that grows with their length, not with its square.

Every query of training sees one run of keys (`seen.py`). Several sets of keys are attended to one
after the other and joined by their log-sum-exps; the backward pass asks every set again with the
joined output and log-sum-exp, which gives the gradient of one softmax over all of them (as in ring
attention, arXiv 2310.01889). Saved for it are query, keys, values, output and log-sum-exp. Rows of
text go through a flash kernel, document by document; other queries on a GPU through FlexAttention
(`flex.py`), elsewhere through slices of queries against the keys that any of them sees.
Letters: B rows, E head width, H query heads, J key/value heads, L positions, T fed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from specctl.drafters.attention import flex
from specctl.drafters.attention.joined import JoinedSoftmax
from specctl.drafters.attention.seen import KeySet, Seen, Span

SLICE_SCORES = 2**24  # of one slice of queries, over all heads
SLICE_QUERIES = 96  # at most: neighbours see about the same keys, a CPU's cache holds the scores
HALF = (torch.bfloat16, torch.float16)
LEAST = -78.0  # weights below e^-78 of the largest are 0
_cpu: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_cuda: Any = torch.ops.aten._flash_attention_forward
_cuda_backward: Any = torch.ops.aten._flash_attention_backward


def attend_seen(query_BHTE: Tensor, sets: Sequence[KeySet]) -> Tensor:
    """[B, T, H * E]: softmax attention over all sets together. Every query must see a key of the
    first one. A key that is in two sets counts twice."""
    kinds = tuple(keys.seen for keys in sets)
    flat = [tensor for keys in sets for tensor in (keys.key, keys.value)]
    device = query_BHTE.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if dtype is not None and query_BHTE.dtype != torch.float64:
        query_BHTE, flat = query_BHTE.to(dtype), [tensor.to(dtype) for tensor in flat]
    out: Tensor = _Attention.apply(kinds, query_BHTE, *flat)  # type: ignore[no-untyped-call]
    B, H, T, E = out.shape
    return out.transpose(1, 2).reshape(B, T, H * E)


class _Attention(torch.autograd.Function):
    """Forward: each set by itself, joined. Backward: each set with what was joined."""

    @staticmethod
    def forward(ctx: Any, kinds: tuple[Seen | None, ...], query: Tensor, *flat: Tensor) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            out, lse = _joined(kinds, query, flat)
        ctx.save_for_backward(query, *flat, out, lse)
        ctx.kinds = kinds
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        query, *flat, out, lse = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            grads = _joined_backward(ctx.kinds, outer[0], query, flat, out, lse)
        return (None, *grads)


def _joined(
    kinds: Sequence[Seen | None], query: Tensor, flat: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, E] and log-sum-exp [B, H, T]."""
    pairs = list(zip(flat[::2], flat[1::2], strict=True))
    parts, own = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
    for seen, (key, value) in zip(kinds, pairs, strict=True):
        if seen is None:
            own.append((_own_score(query, key), value))
        else:
            run = _text if seen.spans is not None else _any
            parts.append(run(query, key, value, seen))
    if len(kinds) == 1:
        return parts[0]
    lse = torch.stack([*(part[1] for part in parts), *(score for score, _ in own)]).logsumexp(0)
    out: Tensor | None = None
    for part, log in parts:
        share = part * (log - lse).exp()[..., None]
        out = share if out is None else out.add_(share)
    assert out is not None, "the first set has a mask"
    grouped = _grouped(out, pairs[0][0].shape[1])
    for score, value in own:
        grouped.addcmul_(
            _grouped((score - lse).exp()[..., None], value.shape[1]), value[:, :, None]
        )
    return out.to(query.dtype), lse


def _joined_backward(
    kinds: Sequence[Seen | None],
    grad: Tensor,
    query: Tensor,
    flat: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
) -> list[Tensor]:
    """Gradients of the query and of all keys and values."""
    pairs = list(zip(flat[::2], flat[1::2], strict=True))
    joined = JoinedSoftmax.of(query, grad, out, lse)
    into_query: Tensor | None = None
    found = list[Tensor]()
    for seen, (key, value) in zip(kinds, pairs, strict=True):
        if seen is None:
            by_query, by_key, by_value = _own_backward(joined, key, value)
        else:
            run = _any_backward if seen.spans is None else _text_backward
            by_query, by_key, by_value = run(joined, key, value, seen)
        into_query = by_query if into_query is None else into_query.add_(by_query)
        found += [by_key, by_value]
    assert into_query is not None
    return [into_query, *found]


# -- one entry per query ------------------------------------------------------------------------


def _grouped(x_BHTE: Tensor, num_kv_heads: int) -> Tensor:
    """[B, J, H / J, T, E]."""
    B, H, T, E = x_BHTE.shape
    return x_BHTE.view(B, num_kv_heads, H // num_kv_heads, T, E)


def _own_score(query: Tensor, key: Tensor) -> Tensor:
    """[B, H, T]."""
    grouped = _grouped(query.contiguous(), key.shape[1])
    wide = torch.promote_types(query.dtype, torch.float32)
    score = (grouped * key[:, :, None]).sum(-1, dtype=wide)
    return score.flatten(1, 2).mul_(query.shape[-1] ** -0.5)


def _own_backward(
    joined: JoinedSoftmax, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    J = key.shape[1]
    grad, query = (_grouped(x.contiguous(), J) for x in (joined.grad, joined.query))
    weight = (_own_score(query.flatten(1, 2), key) - joined.lse).exp_()
    by_weight = (grad * value[:, :, None]).sum(-1, dtype=joined.lse.dtype).flatten(1, 2)
    by_score = weight * (by_weight - joined.delta) * query.shape[-1] ** -0.5
    score = _grouped(by_score[..., None], J).to(query.dtype)
    share = _grouped(weight[..., None], J).to(query.dtype)
    return (
        (score * key[:, :, None]).flatten(1, 2),
        (score * query).sum(2),
        (share * grad).sum(2),
    )


# -- rows of text -------------------------------------------------------------------------------


def _text(query: Tensor, key: Tensor, value: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
    assert seen.spans is not None
    if _has_flash(query):
        q, k, v = (_packed(x) for x in (query, key, value))
        out, lse, *_ = _cuda(q, k, v, *_lengths(seen), 0.0, True, False)
        B, _, T, _ = query.shape
        return _unpacked(out, query), lse.unflatten(1, (B, T)).transpose(0, 1)
    if query.device.type != "cpu":
        return _any(query, key, value, seen)
    key, value = _spread(key, query), _spread(value, query)
    if len(seen.spans) == len(query):  # a document a row
        found: tuple[Tensor, Tensor] = _cpu(query, key, value, 0.0, True)
        return found
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = out.new_empty(out.shape[:3], dtype=torch.promote_types(out.dtype, torch.float32))
    for rows, at in _calls(seen.spans):
        part, log = _cpu(query[rows, :, at], key[rows, :, at], value[rows, :, at], 0.0, True)
        out[rows, :, at], lse[rows, :, at] = part, log
    return out, lse


def _text_backward(
    joined: JoinedSoftmax, key: Tensor, value: Tensor, seen: Seen
) -> tuple[Tensor, Tensor, Tensor]:
    assert seen.spans is not None
    grad, query, out, lse = joined.grad, joined.query, joined.out, joined.lse
    if _has_flash(query):
        state = [_packed(x) for x in (grad, query, key, value, out)]
        log = lse.transpose(0, 1).flatten(1).contiguous()
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of a dropout that is 0
        grads = _cuda_backward(*state, log, *_lengths(seen), 0.0, True, seed, seed[:0])
        return tuple(_unpacked(x, query) for x in grads)  # type: ignore[return-value]
    if query.device.type != "cpu":
        return _any_backward(joined, key, value, seen)
    J = key.shape[1]
    grad, key, value = grad.contiguous(), _spread(key, query), _spread(value, query)
    if len(seen.spans) == len(query):
        by = _cpu_backward(grad, query, key, value, out, lse.contiguous(), 0.0, True)
    else:
        by = tuple(torch.empty_like(query, memory_format=torch.contiguous_format) for _ in "qkv")
        for rows, at in _calls(seen.spans):
            state = [x[rows, :, at] for x in (grad, query, key, value, out)]
            parts = _cpu_backward(*state, lse[rows, :, at].contiguous(), 0.0, True)
            for whole, part in zip(by, parts, strict=True):
                whole[rows, :, at] = part
    return by[0], _gathered(by[1], J), _gathered(by[2], J)


def _calls(spans: Sequence[Span]) -> list[tuple[slice, slice]]:
    """Rows and positions of each call of a kernel."""
    return [(slice(s.row, s.row + 1), slice(s.start, s.stop)) for s in spans]


def _spread(x_BJLE: Tensor, query: Tensor) -> Tensor:
    """[B, H, L, E]: repeated for the query heads of each."""
    B, J, L, E = x_BJLE.shape
    group = query.shape[1] // J
    if group == 1:
        return x_BJLE
    return x_BJLE[:, :, None].expand(B, J, group, L, E).reshape(B, J * group, L, E)


def _gathered(by_BHLE: Tensor, num_kv_heads: int) -> Tensor:
    if by_BHLE.shape[1] == num_kv_heads:
        return by_BHLE
    return _grouped(by_BHLE.contiguous(), num_kv_heads).sum(2)


def _has_flash(query: Tensor) -> bool:
    """True where the GPU's kernel for documents of several lengths takes this."""
    width = query.shape[-1]
    return query.device.type == "cuda" and query.dtype in HALF and width <= 256 and width % 8 == 0


def _packed(x_BHTE: Tensor) -> Tensor:
    """[B * T, H, E]: as that kernel wants it."""
    return x_BHTE.transpose(1, 2).flatten(0, 1).contiguous()


def _unpacked(x: Tensor, query: Tensor) -> Tensor:
    return x.view(query.shape[0], query.shape[2], *x.shape[1:]).transpose(1, 2)


def _lengths(seen: Seen) -> tuple[Tensor, Tensor, int, int]:
    """Where the documents end in the rows behind one another, and the longest of them."""
    assert seen.spans is not None
    assert seen.ends is not None
    longest = max(span.stop - span.start for span in seen.spans)
    return seen.ends, seen.ends, longest, longest


# -- any queries --------------------------------------------------------------------------------


def _any(query: Tensor, key: Tensor, value: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
    if flex.is_at_hand(query):
        return flex.forward(query, key, value, seen.first_BT, seen.last_BT)
    return _sliced(query, key, value, seen)


def _any_backward(
    joined: JoinedSoftmax, key: Tensor, value: Tensor, seen: Seen
) -> tuple[Tensor, Tensor, Tensor]:
    if flex.is_at_hand(joined.query):
        return flex.backward(joined, key, value, seen.first_BT, seen.last_BT)
    return _sliced_backward(joined, key, value, seen)


@dataclass(frozen=True, slots=True)
class _Slice:
    """Queries [start, stop), and the keys [low, high) that any of them sees."""

    start: int
    stop: int
    low: int
    high: int


def _slices(seen: Seen, num_heads: int, num_keys: int) -> list[_Slice]:
    B, T = seen.first_BT.shape
    fitting = SLICE_SCORES // max(1, B * num_heads * num_keys)
    size = min(SLICE_QUERIES, max(16, fitting))
    starts = range(0, T, size)
    bounds = [
        (seen.first_BT[:, at : at + size].amin(), seen.last_BT[:, at : at + size].amax())
        for at in starts
    ]
    known = torch.stack([torch.stack(pair) for pair in bounds]).tolist()  # the host reads once
    return [
        _Slice(at, min(T, at + size), low, max(low, high) + 1)
        for at, (low, high) in zip(starts, known, strict=True)
    ]


def _sliced(query: Tensor, key: Tensor, value: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = out.new_empty(out.shape[:3], dtype=wide)
    for part in _slices(seen, query.shape[1], key.shape[2]):
        score = _scores(query, key, seen, part)
        best = score.amax(-1, keepdim=True)
        weight = _exp(score.sub_(best.nan_to_num(neginf=0.0)))
        total = weight.sum(-1, keepdim=True)  # 1 or more, 0 where nothing is seen
        found = _product(weight, value[:, :, part.low : part.high]).div_(total.clamp(min=1.0))
        at = slice(part.start, part.stop)
        out[:, :, at] = _unfolded(found, query.shape[1])
        lse[:, :, at] = _unfolded(best + total.log(), query.shape[1])[..., 0]
    return out, lse


def _sliced_backward(
    joined: JoinedSoftmax, key: Tensor, value: Tensor, seen: Seen
) -> tuple[Tensor, Tensor, Tensor]:
    query, lse = joined.query, joined.lse
    H, J, scale = query.shape[1], key.shape[1], query.shape[-1] ** -0.5
    by_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    by_key, by_value = (torch.zeros_like(x, dtype=lse.dtype) for x in (key, value))
    for part in _slices(seen, H, key.shape[2]):
        at, keys = slice(part.start, part.stop), slice(part.low, part.high)
        score = _scores(query, key, seen, part)
        weight = _exp(score.sub_(_folded(lse[:, :, at, None], J)))
        grad_folded = _folded(joined.grad[:, :, at], J)
        by_weight = _product(grad_folded, value[:, :, keys].transpose(-1, -2))
        by_score = by_weight.sub_(_folded(joined.delta[:, :, at, None], J)).mul_(weight).mul_(scale)
        by_value[:, :, keys] += _product(weight.transpose(-1, -2), grad_folded)
        by_key[:, :, keys] += _product(by_score.transpose(-1, -2), _folded(query[:, :, at], J))
        by_query[:, :, at] = _unfolded(_product(by_score, key[:, :, keys]), H)
    return by_query, by_key.to(key.dtype), by_value.to(value.dtype)


def _scores(query: Tensor, key: Tensor, seen: Seen, part: _Slice) -> Tensor:
    """[B, J, H / J * t, l], -inf where a query does not look."""
    at, J = slice(part.start, part.stop), key.shape[1]
    folded = _folded(query[:, :, at], J)
    score = _product(folded, key[:, :, part.low : part.high].transpose(-1, -2))
    score = score.mul_(query.shape[-1] ** -0.5)
    visible = Seen(seen.first_BT[:, at] - part.low, seen.last_BT[:, at] - part.low).mask(
        part.high - part.low
    )
    return score.masked_fill_(~visible.repeat(1, 1, query.shape[1] // J, 1), -torch.inf)


def _exp(score: Tensor) -> Tensor:
    """exp in place, 0 below e^-78: PyTorch takes 16 times as long on a CPU for exp(-inf) as for
    other numbers, and 130 times for a result that is denormal (1M of them: 6, 50 and .4 ms)."""
    weight = score.clamp_(min=LEAST - 2).exp_()
    return F.threshold(weight, math.exp(LEAST), 0.0, inplace=True)


def _folded(x_BHTE: Tensor, num_kv_heads: int) -> Tensor:
    """[B, J, H / J * T, E]: query heads of one key/value head as more queries of it."""
    B, H, T, E = x_BHTE.shape
    return x_BHTE.reshape(B, num_kv_heads, H // num_kv_heads * T, E)


def _unfolded(x_BJTE: Tensor, num_heads: int) -> Tensor:
    B, J, T, E = x_BJTE.shape
    return x_BJTE.reshape(B, num_heads, J * T // num_heads, E)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32 or better: from halves on a GPU, which adds up in float32."""
    half = a.dtype if a.dtype in HALF else b.dtype
    if half in HALF and a.device.type == "cuda":
        left, right = (x.to(half).flatten(0, 1) for x in (a, b))
        made = torch.bmm(left, right, out_dtype=torch.float32)
        return made.view(*a.shape[:2], *made.shape[1:])
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return a.to(wide) @ b.to(wide)
