"""A draft model cut from the target itself: fewer layers, and a narrower rest.

What stays is decided by scores measured on text (`specctl.train.prune.scores`), once: ranking anew
after every cut does not pay (Minitron, arXiv 2407.14679). The cutting itself is
`specctl.models.llama.slice`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.errors import IncompatibleError, RecipeError
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.lm.small_lm import SmallLm
from specctl.drafters.nets.heads import cut_rows
from specctl.models.llama.fast_llama import FastLlama
from specctl.models.llama.llama import LlamaShape
from specctl.models.llama.slice import Inside, Keep, sliced
from specctl.runtime.target.target import Target
from specctl.train.data.rows.rows import TokenData
from specctl.train.features.capture import to_device
from specctl.train.prune.scores import Scores, acceptance_drop, measure_scores

Importance = Literal["bi", "alpha", "activation"]
CALIBRATION_TOKENS = 16_384
CALIBRATION_ROWS = 4  # of a batch


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be left. None keeps all; `from_layers` names layers, else `importance` chooses
    them, `contiguous` from spans that are cut out as a whole."""

    layers: int | None = None
    from_layers: tuple[int, ...] | None = None
    channels: int | None = None
    neurons: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    importance: Importance = "bi"
    contiguous: bool = False

    def is_narrower(self, shape: LlamaShape) -> bool:
        """True if anything but whole layers is cut from a model of that shape."""
        sizes = (shape.hidden_size, shape.intermediate_size, shape.num_heads, shape.num_kv_heads)
        wanted = (self.channels, self.neurons, self.heads, self.kv_heads)
        return any(w not in (None, size) for w, size in zip(wanted, sizes, strict=True))


def prunable(target: Target) -> FastLlama:
    """The target's model, if it is one that can be cut; others are refused by name."""
    if type(target.lm) is FastLlama:
        return target.lm
    raise uncuttable(target.name, type(target.lm.module).__name__, target.inflated)


def uncuttable(name: str, kind: str, inflated: str | None = None) -> IncompatibleError:
    """The refusal to cut a drafter out of a target of that kind."""
    return IncompatibleError(
        f"no drafter can be cut from target {name}",
        found=f"inflated to {inflated}" if inflated else kind,
        expected="a Llama, Mistral, Qwen2 or Qwen3 as published, with layers of one kind",
        do="train fresh weights: specctl distill --set drafter.init=null",
        where="drafter.init",
    )


def calibration(data: TokenData, device: torch.device) -> list[TrainBatch]:
    """The first rows of the data, on which scores are measured."""
    rows = min(data.num_rows, -(-CALIBRATION_TOKENS // data.seq_len))
    starts = range(0, rows, CALIBRATION_ROWS)
    batches = (data.batch(range(i, min(i + CALIBRATION_ROWS, rows))) for i in starts)
    return [to_device(batch, device) for batch in batches]


def spread_layers(num_layers: int, kept: int) -> tuple[int, ...]:
    """`kept` of the layers, evenly spaced, with the first and the last; a single one is the
    first, which alone reads what it was trained to read."""
    if kept == 1:
        return (0,)
    return tuple(round(i * (num_layers - 1) / (kept - 1)) for i in range(kept))


def groups_left(heads: int, num_heads: int, num_kv_heads: int) -> int:
    """Key/value heads for so many query heads: whole groups go where that works out, else heads
    go evenly out of every group."""
    group = num_heads // num_kv_heads
    return heads // group if heads % group == 0 else num_kv_heads


def choose(lm: FastLlama, wanted: Wanted, batches: Sequence[TrainBatch]) -> Keep:
    """What of the model stays. Nothing is measured when only named layers are kept."""
    shape = lm.module.shape
    check_cut(wanted, shape)
    by_score = wanted.from_layers is None and wanted.layers not in (None, shape.num_layers)
    if not by_score and not wanted.is_narrower(shape):
        return Keep(wanted.from_layers or tuple(range(shape.num_layers)))
    scores = measure_scores(lm, batches)
    layers = wanted.from_layers or tuple(range(shape.num_layers))
    if by_score:
        assert wanted.layers is not None
        layers = _best_layers(lm, wanted, scores, batches)
    channels = _best(scores.channels_D, wanted.channels)
    kept = torch.tensor(channels) if channels is not None else None
    return Keep(
        layers,
        channels,
        {layer: _inside(layer, wanted, shape, scores) for layer in layers},
        {} if kept is None else {n: _share(e, kept) for n, e in scores.energy.items()},
    )


def _best_layers(
    lm: FastLlama, wanted: Wanted, scores: Scores, batches: Sequence[TrainBatch]
) -> tuple[int, ...]:
    count = lm.module.shape.num_layers
    assert wanted.layers is not None
    span = count - wanted.layers if wanted.contiguous else 1
    if wanted.importance == "alpha":
        score = acceptance_drop(lm, batches, span)
    elif wanted.importance == "bi":
        score = scores.influence_LL.diagonal(span)
    else:
        score = scores.added_L.unfold(0, span, 1).sum(-1)
    if wanted.contiguous:
        first = int(score.argmin())
        return tuple(i for i in range(count) if not first <= i < first + span)
    best = _best(score, wanted.layers)
    assert best is not None
    return best


def _inside(layer: int, wanted: Wanted, shape: LlamaShape, scores: Scores) -> Inside:
    """Whole key/value groups by the heads that would stay of them, then those heads."""
    neurons = _best(scores.neurons_LN[layer], wanted.neurons)
    num_heads = wanted.heads or shape.num_heads
    num_groups = wanted.kv_heads or shape.num_kv_heads
    if (num_heads, num_groups) == (shape.num_heads, shape.num_kv_heads):
        return Inside(neurons=neurons)
    score_KG = scores.heads_LH[layer].view(shape.num_kv_heads, -1)
    top = score_KG.topk(num_heads // num_groups, dim=1)
    groups = _best(top.values.sum(1), num_groups) or ()
    size = score_KG.shape[1]
    heads = tuple(g * size + i for g in groups for i in sorted(top.indices[g].tolist()))
    return Inside(heads, groups, neurons)


def _best(score_N: Tensor, kept: int | None) -> tuple[int, ...] | None:
    """Numbers of the highest scores, ascending; None for all."""
    if kept in (None, len(score_N)):
        return None if kept is None else tuple(range(len(score_N)))
    return tuple(sorted(score_N.topk(int(kept or 0)).indices.tolist()))


def _share(energy_D: Tensor, kept: Tensor) -> float:
    return float(energy_D[kept.to(energy_D.device)].sum() / energy_D.sum())


def check_cut(wanted: Wanted, shape: LlamaShape | ModelSpec) -> None:
    """Refuse what is more than the model has, naming the option."""
    sizes = (
        ("layers", wanted.layers, shape.num_layers),
        ("width", wanted.channels, shape.hidden_size),
        ("intermediate", wanted.neurons, shape.intermediate_size),
        ("heads", wanted.heads, shape.num_heads),
        ("kv_heads", wanted.kv_heads, shape.num_kv_heads),
        ("from_layers", max(wanted.from_layers or (0,)), shape.num_layers - 1),
    )
    for option, number, most in sizes:
        if number is not None and not (number <= most):
            raise _too_much(option, str(number), f"at most {most:,}, as the target has")
    num_heads = wanted.heads or shape.num_heads
    groups, group = wanted.kv_heads or shape.num_kv_heads, shape.num_heads // shape.num_kv_heads
    if num_heads % groups or num_heads // groups > group:
        raise _too_much(
            "heads",
            f"{num_heads} query heads over {groups} key/value heads",
            f"a multiple of {groups}, at most {group} query heads a group as in the target",
        )


def _too_much(option: str, found: str, expected: str) -> RecipeError:
    return RecipeError(
        "this cannot be cut from the target",
        where=f"drafter.options.{option}",
        found=found,
        expected=expected,
        do=f"change drafter.options.{option}, or leave it out to follow the target",
    )


def cut_like(drafter: SmallLm, whole: SmallLm, data: TokenData) -> dict[str, Tensor]:
    """Tensors for `drafter`, cut from `whole` (the target) as its options say: named layers, else
    evenly spaced ones, narrowed by activations measured on the data."""
    assert isinstance(drafter.lm, FastLlama)
    assert isinstance(whole.lm, FastLlama)
    shape, has = drafter.lm.module.shape, whole.lm.module.shape
    if shape.head_dim != has.head_dim:
        raise _too_much("head_dim", str(shape.head_dim), f"{has.head_dim}, as in the target")
    if shape.num_layers > has.num_layers:
        raise _too_much("layers", str(shape.num_layers), f"at most {has.num_layers}")
    spread = spread_layers(has.num_layers, shape.num_layers)
    wanted = Wanted(
        from_layers=drafter.options.from_layers or spread,
        channels=shape.hidden_size,
        neurons=shape.intermediate_size,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
    )
    narrow = wanted.is_narrower(has)
    keep = choose(whole.lm, wanted, calibration(data, whole.lm.device) if narrow else [])
    small = sliced(has, whole.lm.module.state_dict(), keep)
    return fitted(drafter, small.tensors, whole.vocab)


def fitted(
    drafter: SmallLm, tensors: dict[str, Tensor], vocab: VocabMap | None
) -> dict[str, Tensor]:
    """A cut model's tensors for this drafter: on the CPU in float32, with the rows of its head;
    `vocab` is what the cut model speaks."""
    found = {name: t.to("cpu", torch.float32) for name, t in tensors.items()}
    head_KD = found.pop("lm_head.weight", found["model.embed_tokens.weight"])
    if "lm_head.weight" in drafter.tensors():
        wanted = drafter.vocab
        found["lm_head.weight"] = (
            head_KD.clone() if wanted is None else cut_rows(head_KD, vocab, wanted)
        )
    return found
