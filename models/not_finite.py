"""Logits that are no numbers: how they are known, where they come from, and the error that says so.

A row of logits is bad if it holds NaN or +inf, or nothing but -inf; -inf beside numbers is how
models mask ids of their padding. All three show in the row's largest logit. Where they come from is
looked for afterwards, by one forward that is watched, and by a look at the weights.
Letters: B rows, D hidden width, S sequence, T fed tokens, V target vocabulary, X any axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from specctl.core.errors import Exit, NumbersError
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.language_model import Feed, LanguageModel
from specctl.models.compiled import CompiledLM
from specctl.models.hf.spread import is_parallel
from specctl.models.llama.fast_llama import FastLlama

MOST_NAMED = 3  # damaged weights that a message lists


def is_bad(logits_XV: Tensor) -> Tensor:
    """[X]: whether a row of logits is no distribution."""
    return ~(logits_XV.amax(-1).abs() < torch.inf)


def check_logits(lm: LanguageModel, name: str, ids_BT: Tensor, logits_BTV: Tensor) -> None:
    """Raise NumbersError if any row of these logits of whole sequences is bad; `name`: the
    target's."""
    bad_BT = is_bad(logits_BTV)
    if bool(bad_BT.any()):
        row, at = bad_BT.nonzero()[0].tolist()
        raise not_numbers(lm, name, ids_BT[row, : at + 1].tolist(), logits_BTV[row, at])


def not_numbers(
    lm: LanguageModel,
    name: str,
    tokens: Sequence[int],
    logits_V: Tensor | None = None,
    rows: tuple[int, ...] = (),
) -> NumbersError:
    """The error for a target that read `tokens` and gave these logits behind them (None: other
    numbers that are none)."""
    bits = getattr(lm, "bits", None)
    kind = str(lm.dtype).removeprefix("torch.") if bits is None else f"int{bits}"
    kind = "gguf" if bits == "packed" else kind
    layer = first_bad_layer(lm, tokens)
    what = "hidden states that are not finite" if logits_V is None else numbers_in(logits_V)
    found = f"{what} behind {len(tokens):,} tokens, in {kind}"
    return numbers_error(name, lm.module, kind, found, layer, rows)


def adapter_numbers(
    adapters: Sequence[str | None], logits_V: Tensor, rows: tuple[int, ...]
) -> NumbersError:
    """The error for rows of adapters that requests choose, of which one gave these logits."""
    names = ", ".join(ascii(name) for name in dict.fromkeys(adapters))
    return NumbersError(
        f"the target's logits with adapter {names} are not numbers",
        found=numbers_in(logits_V),
        expected="finite logits (-inf for ids that are masked)",
        do="choose another model; who runs the server: --dtype float32, a smaller weight "
        "(FOLDER@0.5), or no such adapter",
        rows=rows,
    )


def numbers_error(
    name: str, module: nn.Module, kind: str, found: str, layer: str, rows: tuple[int, ...] = ()
) -> NumbersError:
    """The error with its cause: the `layer` in which numbers end ("": not known), the weights that
    are damaged, and a way out that fits the dtype `kind`."""
    damaged, parts = damaged_weights(module), [found]
    # Infinities alone may be large weights that a cast to float16 has made of them.
    is_damaged = any(count for *_, count in damaged) or bool(damaged and kind != "float16")
    if layer:
        parts.append(f"the first output that is not finite is that of {layer}")
    if damaged:
        more = len(damaged) - MOST_NAMED
        named = ", ".join(name for name, _ in damaged[:MOST_NAMED]) + (
            f" and {more} more" if more > 0 else ""
        )
        parts.append(f"weights that are not finite: {named}")
    return NumbersError(
        f"the logits of target {name} are not numbers",
        found="; ".join(parts),
        expected="finite logits (-inf for ids that are masked)",
        do=_way_out(kind, is_damaged),
        rows=rows,
        exit=Exit.INTEGRITY if is_damaged else Exit.INCOMPATIBLE,
    )


def _way_out(kind: str, is_damaged: bool) -> str:
    if is_damaged:
        return "the weights are damaged: download or copy the target again, or save it anew"
    if kind.startswith("int"):
        return "--dtype float32, which reads the weights as they are stored"
    if kind == "float16":
        return "its numbers overflow in float16: --dtype float32 (or bfloat16, as wide in range)"
    if kind == "bfloat16":
        return "--dtype float32; if that fails as well, its weights are damaged: get them again"
    return f"its numbers overflow in {kind} as well: take another checkpoint of this target"


def numbers_in(logits_V: Tensor) -> str:
    """What is wrong with a row of logits, in words."""
    nan, inf = int(logits_V.isnan().sum()), int((logits_V == torch.inf).sum())
    if nan + inf == 0:
        return "-inf for every token"
    parts = [f"{count:,} are {name}" for count, name in ((nan, "NaN"), (inf, "+inf")) if count]
    return f"of {logits_V.numel():,} logits {' and '.join(parts)}"


@torch.no_grad()
def damaged_weights(module: nn.Module) -> list[tuple[str, int]]:
    """Names of the weights that hold NaN or infinities, with how many, and how many are NaN. What
    lies elsewhere (meta) is passed over."""
    found = []
    for name, weight in module.named_parameters():
        if weight.is_meta or not weight.is_floating_point() or is_parallel(module):
            continue
        count = int((~weight.detach().isfinite()).sum())
        if count:
            text = f"{name} ({count:,} of {weight.numel():,})"
            found.append((text, int(weight.detach().isnan().sum())))
    return found


# -- where numbers end -----------------------------------------------------------------------------


@torch.no_grad()
def first_bad_layer(lm: LanguageModel, tokens: Sequence[int]) -> str:
    """Whose output is the first that is not finite when this text is read once more: the part, its
    layer and its type. "" where that is unknown: all are finite, as another kernel may round
    otherwise, or the layers are spread over processes, of which this one must not read alone."""
    lm = lm.lm if isinstance(lm, CompiledLM) else lm
    if is_parallel(lm.module):
        return ""
    ids_1S = torch.tensor([list(tokens)], device=lm.device)
    position_1S = torch.arange(ids_1S.shape[1], device=lm.device)[None]
    feed = Feed(ids_1S, position_1S, lm.document_masks(torch.zeros_like(ids_1S)))
    if isinstance(lm, FastLlama):
        return _first_by_taps(lm, feed)
    return first_bad_module(lm.module, lambda: lm.run(feed, None))


def _first_by_taps(lm: FastLlama, feed: Feed) -> str:
    depth, kind = lm.spec.num_layers, lm.spec.model_type
    out = lm.run(replace(feed, taps=tuple(range(depth + 1))), None)
    for tap in range(depth + 1):
        if not bool(out.taps[tap].isfinite().all()):
            part = f"the embedding ({kind})"
            return part if tap == 0 else _part_of_layer(lm, feed, tap, out.taps[tap - 1])
    assert out.logits_BTV is not None
    return f"the LM head ({kind})" if bool(is_bad(out.logits_BTV).any()) else ""


def _part_of_layer(lm: FastLlama, feed: Feed, tap: int, residual_1SD: Tensor) -> str:
    """Which part of the layer in front of that tap makes numbers end, given the residual that it
    gets; behind the last layer stands the final norm."""
    depth, kind = lm.spec.num_layers, lm.spec.model_type

    def is_good(attention: tuple[int, ...]) -> bool:
        parts = SubLayers(attention, ())
        run = replace(feed, taps=(tap,), logits=False, parts=parts, residual_BTD=residual_1SD)
        return bool(lm.run(run, None).taps[tap].isfinite().all())

    if tap == depth and not is_good(()):
        return f"the final norm ({kind})"
    name = "the MLP" if is_good((tap - 1,)) else "the attention"
    return f"{name} of decoder layer {tap - 1} ({kind}, {depth} layers)"


def first_bad_module(module: nn.Module, forward: Callable[[], object]) -> str:
    """What ends first of all modules whose output is not finite in that forward: the innermost."""
    found: list[str] = []

    def watched(name: str) -> Callable[..., None]:
        def look(part: nn.Module, args: Any, out: Any) -> None:
            if not found and any(not bool(one.isfinite().all()) for one in _tensors(out)):
                found.append(f"{name} ({type(part).__name__})")

        return look

    with ExitStack() as held:
        for name, part in module.named_modules():
            if name:
                held.callback(part.register_forward_hook(watched(name)).remove)
        forward()
    return found[0] if found else ""


def _tensors(out: Any) -> Iterator[Tensor]:
    """Floating-point tensors of what a module returns, the -inf of masks taken for numbers."""
    if isinstance(out, Tensor):
        if out.is_floating_point():
            yield out.masked_fill(out == -torch.inf, 0.0)
    elif isinstance(out, (tuple, list)):
        for one in out:
            yield from _tensors(one)
