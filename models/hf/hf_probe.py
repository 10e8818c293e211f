"""What a transformers module makes of rows, windows, trees and a cache, tried before it is used.

An architecture may ignore a mask, take the place in the cache for the position, or look ahead, and
say nothing. So a module is asked through the very cache that rounds use, in the order of a round:
two prompts of different length in one forward, longer than the sliding window; a tree; what follows
its second path. Each token must get the logits of a plain forward of its own path, by transformers
alone. That is one plain forward and three with a cache, of 56 tokens at most; a window of thousands
is narrowed for the while.

The distance between two rows of logits is the norm of their difference over that of the logits
about their mean. Rounding to bfloat16 makes as much of it as some wrong masks do (0.01 to 0.05
measured, more where it sends a token to another expert), so weights of half precision are widened
to float32, one module at a time, and a right answer is within `BOUND`. Where they cannot be
(quantised weights, a kernel of one dtype) the middle distance counts, within `ROUGH`.
Letters: B rows, N nodes, P path, R flat rows, S sequence, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from specctl.core.errors import IncompatibleError
from specctl.core.forward.slot_state import RowShape, StateKV, StateShape
from specctl.core.kv_cache import KVShape, SlotKV
from specctl.core.language_model import LanguageModel
from specctl.core.tree import DraftTree, NodeKind
from specctl.models.hf.hf_spec import ALIBI, field_of, holds_states, numbers_added, scans_of
from specctl.models.hf.spread import is_piece
from specctl.models.not_finite import first_bad_module, is_bad, numbers_error, numbers_in

KEPT = (9, 5)  # prompt tokens of the two rows
WINDOW = 4  # what a longer window is narrowed to
PARENTS = (-1, -1, 0, 1)  # two children of the root with a child each
PATHS = ((0, 1, 3), (0, 2, 4))  # fed indices, the root first
TAIL = 2  # tokens behind the second path
LENGTH = max(KEPT) + len(PATHS[0]) + TAIL
BOUND, ROUGH = 1e-3, 0.1
HALF = (torch.float16, torch.bfloat16)
WIDE = (torch.float32,)
READ_PAST = ("conv", "conv1d", "dt_proj", "kv_b_proj")  # parts, by name, whose weights are read


@dataclass(frozen=True, slots=True)
class Plain:
    """What transformers alone says of the first path of both rows, then of the second, and what
    each layer of its cache keeps, of a token and as a state; `is_exact`: computed in float32."""

    ids_RS: Tensor
    logits_RSV: Tensor
    layers: tuple[KVShape, ...]
    states: tuple[StateShape, ...]
    is_exact: bool


class _Widened:
    """Hooks that have every module compute in float32: its own weights are widened while it runs,
    into memory that is used again and again, and so is what comes in. Embeddings widen what they
    look up. One writer: `widened`."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.before: dict[nn.Parameter, Tensor] = {}
        sizes = [sum(map(Tensor.numel, _half(part))) for part in parts if not _looks_up(part)]
        place = next((weight.device for part in parts for weight in _half(part)), None)
        self._scratch = torch.empty(max(sizes, default=0), device=place)
        self._used = 0

    def widen(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        for weight in () if _looks_up(module) else _half(module):
            self.before[weight] = weight.data
            end = self._used + weight.numel()
            room = self._scratch[self._used : end]
            if room.numel() < weight.numel() or room.device != weight.device:
                weight.data = weight.data.float()  # below a module with weights of its own
                continue
            weight.data = room.view(weight.shape).copy_(weight.data)
            self._used = end
        for weight in _beside(module):
            self.before[weight], weight.data = weight.data, weight.data.float()
        return tree_map(_wide, args), tree_map(_wide, kwargs)

    def restore(self, module: nn.Module, args: Any, out: Any) -> Any:
        for weight in (*module.parameters(recurse=False), *_beside(module, WIDE)):
            if weight in self.before:
                if weight.untyped_storage().data_ptr() == self._scratch.data_ptr():
                    self._used -= weight.numel()
                weight.data = self.before.pop(weight)
        return tree_map(_wide, out) if _looks_up(module) else None


def _retype(module: nn.Module, name: str, dtype: torch.dtype) -> None:
    """A weight that is elsewhere comes in the dtype of what stands for it."""
    stand_in = torch.empty_like(getattr(module, name), dtype=dtype)
    module._parameters[name] = nn.Parameter(stand_in, requires_grad=False)


def _can_widen(model: Any) -> bool:
    """Whether every weight is a plain number, in one piece."""
    is_plain = field_of(model.config, "quantization_config") is None
    return is_plain and not any(is_piece(w) for part in model.modules() for w in _half(part))


def _half(module: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in module.parameters(recurse=False) if weight.dtype in HALF]


def _beside(module: nn.Module, dtypes: tuple[torch.dtype, ...] = HALF) -> list[nn.Parameter]:
    """Weights of its parts that a recurrent layer, or latent attention, reads past them."""
    parts = (part for name, part in module.named_children() if name in READ_PAST)
    found = (weight for part in parts for weight in part.parameters(recurse=False))
    return [weight for weight in found if weight.dtype in dtypes and not weight.is_meta]


def _looks_up(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding)


@contextmanager
def widened(model: Any) -> Iterator[None]:
    """Weights of half precision count as float32. They are the same objects, with the same values,
    afterwards."""
    parts = [part for part in model.modules() if _half(part) or _beside(part)]
    kept = [
        (part, name, weight.dtype)
        for part in parts
        for name, weight in part.named_parameters(recurse=False)
        if weight.is_meta and weight.dtype in HALF
    ]
    away = {part for part, _, _ in kept}
    wide = _Widened([part for part in parts if part not in away])
    precision = torch.get_float32_matmul_precision()
    hooks = [part.register_forward_pre_hook(wide.widen, with_kwargs=True) for part in parts]
    hooks += [part.register_forward_hook(wide.restore) for part in parts]
    try:
        for part, name, _ in kept:
            _retype(part, name, torch.float32)
        torch.set_float32_matmul_precision("highest")
        yield
    finally:
        for part, name, dtype in kept:
            _retype(part, name, dtype)
        torch.set_float32_matmul_precision(precision)
        for hook in hooks:
            hook.remove()
        for weight, data in wide.before.items():
            weight.data = data


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value


@contextmanager
def narrowed(model: Any, windows: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Windows longer than `WINDOW` made that long in every configuration of the module."""
    if not windows or max(windows) <= WINDOW:
        yield windows
        return
    parts = [part.config for part in model.modules() if hasattr(part, "config")]
    parts.append(model.config.get_text_config())
    held = {id(part): part for part in parts if field_of(part, "sliding_window") in windows}
    before = {key: part.sliding_window for key, part in held.items()}
    try:
        for part in held.values():
            part.sliding_window = WINDOW
        yield (WINDOW,)
    finally:
        for key, part in held.items():
            part.sliding_window = before[key]


@torch.no_grad()
def ask_plainly(model: Any, windows: tuple[int, ...]) -> Plain:
    """The answers of the module by itself: no mask, no positions, attention written out (the one
    kernel with every soft cap and sink)."""
    ids_RS = _ids(model)
    is_exact = _can_widen(model)
    with _refusing(model, "a plain forward of it fails"), narrowed(model, windows):
        model.set_attn_implementation("eager")
        try:
            with widened(model) if is_exact else nullcontext():
                out = model(input_ids=ids_RS, use_cache=True)
        except Exception:  # a module that reads another's weights, or a kernel of one dtype
            out, is_exact = model(input_ids=ids_RS, use_cache=True), False
    _check_numbers(model, out.logits, lambda: model(input_ids=ids_RS, use_cache=False))
    cache = _cache_of(model, out)
    return Plain(ids_RS, out.logits, _layers(cache), _states(model, cache), is_exact)


@torch.no_grad()
def row_shape_of(model: Any) -> RowShape:
    """What a model with recurrent layers keeps of a row, tried on one token. The model may have no
    storage; its weights are bfloat16, since not every kernel has a form for shapes alone in
    float32."""
    model.set_attn_implementation("eager")
    ids_11 = torch.zeros(1, 1, dtype=torch.long, device=model.get_input_embeddings().weight.device)
    cache = _cache_of(model, model(input_ids=ids_11, use_cache=True))
    return RowShape(_layers(cache), _states(model, cache))


def _cache_of(model: Any, out: Any) -> Any:
    cache = getattr(out, "past_key_values", None)
    cache = getattr(out, "cache_params", None) if cache is None else cache
    cache = getattr(cache, "self_attention_cache", cache)
    if cache is None or not hasattr(cache, "layers"):
        raise refused(model, "it keeps no cache of keys and values")
    return cache


def _check_numbers(model: Any, logits_RSV: Tensor, forward: Callable[[], object]) -> None:
    """A model whose plain logits are no numbers is damaged, not of an unfit kind."""
    bad_RS = is_bad(logits_RSV)
    if not bool(bad_RS.any()):
        return
    row, at = bad_RS.nonzero()[0].tolist()
    kind = str(model.dtype).removeprefix("torch.")
    found = f"{numbers_in(logits_RSV[row, at])} behind {at + 1} tokens, in {kind}"
    raise numbers_error(type(model).__name__, model, kind, found, first_bad_module(model, forward))


def _ids(model: Any) -> Tensor:
    """[R, S]: tokens without a meaning of their own, but for toys with hardly any."""
    text = model.config.get_text_config()
    named = [field_of(text, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")]
    special = {i for each in named for i in (each if isinstance(each, list) else [each])}
    usual = [i for i in range(text.vocab_size) if i not in special] or [0]
    drawn = torch.randperm(len(usual), generator=torch.Generator().manual_seed(0)).tolist()
    ids = [usual[drawn[i % len(drawn)]] for i in range((len(KEPT) + 1) * LENGTH)]
    rows = [ids[i * LENGTH : (i + 1) * LENGTH] for i in range(len(KEPT))]
    end = ids[-1]
    paths = [
        [*row[: kept + 1], fork, end, *row[kept + 3 :]]
        for fork in ids[-3:-1]
        for row, kept in zip(rows, KEPT, strict=True)
    ]
    return torch.tensor(paths, device=model.get_input_embeddings().weight.device)


def _distance(found_NV: Tensor, wanted_NV: Tensor) -> Tensor:
    found, wanted = found_NV.float(), wanted_NV.float()
    size = (wanted - wanted.mean(-1, keepdim=True)).norm(dim=-1).clamp(min=1e-12)
    away: Tensor = (found - wanted).norm(dim=-1) / size
    return away.nan_to_num(torch.inf)


def _layers(cache: Any) -> tuple[KVShape, ...]:
    """What each layer of transformers' cache keeps of a token; layers that read another's keep
    nothing."""
    shapes = []
    for layer in cache.layers:
        pair = (getattr(layer, "keys", None), getattr(layer, "values", None))
        sizes = [0 if part is None else part.shape[i] for part in pair for i in (1, 3)]
        shapes.append(KVShape(*sizes))
    return tuple(shapes)


def _states(model: Any, cache: Any) -> tuple[StateShape, ...]:
    """What each layer keeps as states; empty where none does."""
    shapes, scans = [], scans_of(model)
    for layer in cache.layers:
        convs = [each for each in getattr(layer, "conv_states", {}).values() if each is not None]
        state = getattr(layer, "recurrent_states", {}).get(0)
        # Of as many inputs as a convolution is wide the next step has no use for the oldest.
        kept = tuple((each.shape[1], each.shape[2] - 1) for each in convs)
        recurrent = () if state is None else tuple(state.shape[1:])
        shapes.append(StateShape(kept, recurrent, numbers_added(scans, recurrent)))
    return tuple(shapes) if any(shape != StateShape() for shape in shapes) else ()


@torch.no_grad()
def check_rounds(lm: LanguageModel, plain: Plain) -> None:
    """Refuse a model that says otherwise through the cache than plainly."""
    with widened(lm.module) if plain.is_exact else nullcontext():
        _round(lm, plain)


def _round(lm: LanguageModel, plain: Plain) -> None:
    model, device, rows = lm.module, plain.ids_RS.device, range(len(KEPT))
    dtype = torch.float32 if plain.is_exact and lm.dtype in HALF else lm.dtype
    length = LENGTH + len(PARENTS)
    kv = lm.cache_of(len(KEPT), length, dtype)
    kept_B = torch.tensor(KEPT, device=device)
    row_B = torch.arange(len(KEPT), device=device)
    with _refusing(model, "it does not read rows of different length through a cache"):
        found = _chain(lm, kv, plain.ids_RS[: len(KEPT), : max(KEPT)], kept_B * 0)
    prompt = "a prompt longer than its sliding window" if lm.windows else "a prompt"
    for row, kept in enumerate(KEPT):
        _compare(lm, plain, prompt, found[row, :kept], plain.logits_RSV[row, :kept])
    if isinstance(kv, StateKV):  # states have read nothing yet: padding must not be among it
        at_BP = torch.arange(max(KEPT), device=device).expand(len(KEPT), -1)
        kv.advance(row_B, torch.where(at_BP < kept_B[:, None], at_BP, -1))
    with _refusing(model, "it does not read a tree through a cache"):
        found = _tree(lm, kv, plain, kept_B)
    for path, fed in enumerate(PATHS):
        for row, kept in enumerate(KEPT):
            wanted = plain.logits_RSV[path * len(KEPT) + row, kept : kept + len(fed)]
            _compare(lm, plain, "a path of a tree", found[row, list(fed)], wanted)
    kv.keep(row_B, kept_B, torch.tensor([PATHS[1] for _ in rows], device=device))
    start_B = kept_B + len(PATHS[1])
    at_BT = start_B[:, None] + torch.arange(TAIL, device=device)
    second = plain.ids_RS[len(KEPT) :]
    with _refusing(model, "it does not go on behind a path of a tree"):
        found = _chain(lm, kv, second.gather(1, at_BT), start_B)
    for row, start in enumerate(start_B.tolist()):
        wanted = plain.logits_RSV[len(KEPT) + row, start : start + TAIL]
        _compare(lm, plain, "what follows a path", found[row], wanted)


def _chain(lm: LanguageModel, kv: SlotKV, ids_BT: Tensor, start_B: Tensor) -> Tensor:
    B, T = ids_BT.shape
    span = int(start_B.max()) + T
    kv.begin(tuple(range(B)), torch.arange(B, device=ids_BT.device), start_B, T, span)
    position_BT = start_B[:, None] + torch.arange(T, device=ids_BT.device)
    out = lm.forward(ids_BT, position_BT, lm.chain_masks(start_B, T, span), kv)
    assert out.logits_BTV is not None
    return out.logits_BTV


def _tree(lm: LanguageModel, kv: SlotKV, plain: Plain, kept_B: Tensor) -> Tensor:
    B, device = len(KEPT), plain.ids_RS.device
    row_B = torch.arange(B, device=device)
    first, second = plain.ids_RS[:B], plain.ids_RS[B:]
    token_BN = torch.stack(
        [ids[row_B, kept_B + depth] for depth in (1, 2) for ids in (first, second)], dim=1
    )
    parent_BN = torch.tensor(PARENTS, device=device).expand(B, -1)
    tree = DraftTree(
        token_BN, parent_BN, parent_BN.clamp(max=0) + 1, parent_BN >= -1, NodeKind.POINT, 2
    )
    ids_BT = tree.fed_token_BT(first[row_B, kept_B])
    span = max(KEPT) + ids_BT.shape[1]
    kv.begin(tuple(range(B)), row_B, kept_B, ids_BT.shape[1], span)
    masks = lm.tree_masks(tree, kept_B, span)
    out = lm.forward(ids_BT, tree.position_BT(kept_B), masks, kv)
    assert out.logits_BTV is not None
    return out.logits_BTV


def _compare(lm: LanguageModel, plain: Plain, what: str, found: Tensor, wanted: Tensor) -> None:
    away_N = _distance(found, wanted)
    away = float(away_N.max() if plain.is_exact else away_N.median())
    if not away <= (BOUND if plain.is_exact else ROUGH):
        what = f"{what} gets other logits in a batch than alone"
        raise refused(lm.module, _looks_ahead(lm.module, plain) or what, away)


def _looks_ahead(model: Any, plain: Plain) -> str:
    """What is wrong, if later tokens change what the module says of earlier ones."""
    short = min(KEPT)
    first = model(input_ids=plain.ids_RS[:1, :short], use_cache=False).logits
    if float(_distance(first[0], plain.logits_RSV[0, :short]).median()) <= ROUGH:
        return ""
    is_encoder = field_of(model.config, "is_decoder") is False
    more = " (is_decoder is false in its configuration)" if is_encoder else ""
    return "later tokens change what it says of earlier ones" + more


@torch.no_grad()
def check_reading(model: Any) -> None:
    """Refuse a model that reads a document otherwise beside a longer one than alone."""
    ids_RS, short = _ids(model), min(KEPT)
    beside = ids_RS[:2].clone()
    beside[0, short:] = 0
    is_exact = _can_widen(model)
    with _refusing(model, "a plain forward of it fails"):
        try:
            with widened(model) if is_exact else nullcontext():
                alone, both = _read_twice(model, ids_RS[:1, :short], beside)
        except Exception:  # a kernel of one dtype
            is_exact = False
            alone, both = _read_twice(model, ids_RS[:1, :short], beside)
    _check_numbers(model, alone, lambda: model(input_ids=ids_RS[:1, :short], use_cache=False))
    away_N = _distance(both[0, :short], alone[0])
    away = float(away_N.max() if is_exact else away_N.median())
    if not away <= (BOUND if is_exact else ROUGH):
        raise refused(model, "a document gets other logits next to a longer one than alone", away)


def _read_twice(model: Any, alone: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    first, second = (model(input_ids=ids, use_cache=False).logits for ids in (alone, both))
    return first, second


@contextmanager
def _refusing(model: Any, what: str) -> Iterator[None]:
    """Whatever a foreign forward raises means that it cannot do this."""
    try:
        yield
    except IncompatibleError as error:
        if error.what.startswith(type(model).__name__):
            raise
        raise refused(model, error.what) from error
    except Exception as error:
        raise refused(model, what) from error


def refused(model: Any, what: str, away: float | None = None) -> IncompatibleError:
    """The error for a module that cannot be a target, with the cause as far as it shows."""
    by = "" if away is None else f", by {away:.1%} of the logits"
    cause = _cause(model)
    places = None if cause else _cache_places(model)
    cause = cause or places or ""
    do = "choose a target with rotary or learned positions, e.g. a Llama or Qwen3"
    if places is not None:
        do = (
            "let every layer be an object of its own whose attention has its place as layer_idx, "
            "and set config.num_hidden_layers to their number"
        )
    return IncompatibleError(
        f"{type(model).__name__} cannot be a target",
        found=f"{what}{by}" + (f": {cause}" if cause else ""),
        expected="a decoder that obeys 4-D masks and given positions",
        do=do,
    )


def _cause(model: Any) -> str:
    """Why an architecture cannot read trees, where its configuration or its forward tells."""
    config = model.config.get_text_config()
    if field_of(config, "alibi") or config.model_type in ALIBI:
        return "its attention is biased by places in the cache (ALiBi), not by positions"
    if "local" in (field_of(config, "attention_layers") or ()):
        return "its local layers mask by places in the cache, not by positions"
    if any(hasattr(part, "create_position_ids_from_input_ids") for part in model.modules()):
        return "it counts positions from the id of the padding token on"
    if "position_ids" not in signature(type(model).forward).parameters:
        return "its forward takes no positions"
    return ""


def _cache_places(model: Any) -> str | None:
    """What is wrong with the numbers by which attentions find their layer of a cache: after layers
    were taken out or put in by hand."""
    if holds_states(type(model), model.config):
        return None  # whose convolutions bear the number of their layer, too
    parts = (part for _, part in model.named_modules(remove_duplicate=False))
    found = [part.layer_idx for part in parts if hasattr(part, "layer_idx")]
    numbers = sorted(set(found))
    most = field_of(model.config.get_text_config(), "num_hidden_layers") or len(numbers)
    if not numbers or (len(numbers) == len(found) and numbers[-1] < most):
        return None
    named = ", ".join(map(str, found[:16]))
    return f"its layers are numbered {named} for the cache, of {most:,} that its configuration has"
