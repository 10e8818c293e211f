"""One cut, planned and measured: a drafter out of the target, or out of one that was cut before.

A plan says what it will take, before anything is loaded. Each cut reads the calibration text: with
the target once, with acceptance drop once more for each layer left out, and with what is left; then
tau is measured, and the healing is an ordinary run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from specctl.core.errors import RecipeError
from specctl.core.spec import ModelSpec
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions, options_of
from specctl.models.llama.fast_llama import FastLlama
from specctl.models.llama.llama import LlamaShape
from specctl.models.llama.slice import Keep, sliced
from specctl.recipes.schema import DataPart, DrafterPart, Recipe, TrainPart
from specctl.runtime.target.target import Target
from specctl.train.assemble import family_options, trainable_family
from specctl.train.data.rows.rows import TokenData
from specctl.train.features.capture import capture
from specctl.train.metrics.metrics import MeasuredAcceptance
from specctl.train.planning.pace import Pace
from specctl.train.planning.plan import CALIBRATED, RunPlan, build_shape, plan
from specctl.train.planning.target_shape import target_shape
from specctl.train.planning.weighing import data_tokens
from specctl.train.planning.work import ANSWERS, Part, Work, WorkSizes, measuring, num_parameters
from specctl.train.prune.cut import (
    CALIBRATION_TOKENS,
    Wanted,
    calibration,
    check_cut,
    choose,
    fitted,
    prunable,
)

SCORING, TAU_OF_CUT = "scoring what matters", "measuring tau of the cut"


@dataclass(frozen=True, slots=True)
class CutReport:
    """What was cut, and how well the rest drafts before any healing. `alpha` is E sum min(p, q) on
    the text of the scores, `measured` greedy decoding of held-out prompts."""

    keep: Keep
    before: LlamaShape
    after: LlamaShape
    parameters_before: int
    parameters: int
    alpha: float
    measured: MeasuredAcceptance

    def to_json(self) -> dict[str, Any]:
        return {
            "layers": list(self.keep.layers),
            "channels": None if self.keep.channels is None else list(self.keep.channels),
            "inside": {str(layer): asdict(i) for layer, i in self.keep.inside.items()},
            "energy": dict(self.keep.energy),
            "before": asdict(self.before),
            "after": asdict(self.after),
            "parameters_before": self.parameters_before,
            "parameters": self.parameters,
            "alpha": self.alpha,
            "tau": self.measured.tau,
        }


@dataclass(frozen=True, slots=True)
class CutDrafter:
    """A drafter in evaluation mode, and what was done to get it."""

    drafter: SmallLm
    report: CutReport


def cut_drafter(
    source: SmallLm,
    wanted: Wanted,
    part: DrafterPart,
    target: Target,
    data: TokenData,
    measure: Callable[[SmallLm], MeasuredAcceptance],
) -> CutDrafter:
    """What is left of `source` as a drafter of its own, on the target's device and dtype; scores
    are measured on the data, its acceptance by `measure`."""
    assert isinstance(source.lm, FastLlama)
    module, batches = source.lm.module, calibration(data, target.device)
    keep = choose(source.lm, wanted, batches)
    small = sliced(module.shape, module.state_dict(), keep)
    others = asdict(family_options(trainable_family(part, None), part)) | {"from_layers": None}
    options = SmallLmOptions(**{**others, **options_of(small.shape, target.spec)})
    drafter = SmallLm(options, target.spec, source.vocab)
    drafter.load_tensors(fitted(drafter, small.tensors, source.vocab))
    drafter.to(target.device, target.dtype)
    drafter.module.eval()
    measured = measure(drafter)
    total = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for batch in batches:
            found = drafter.loss(capture(target, batch, drafter.needs())).metrics["alpha"]
            total += torch.stack([part.detach().double().cpu() for part in found])
    report = CutReport(
        keep=keep,
        before=module.shape,
        after=small.shape,
        parameters_before=sum(p.numel() for p in module.parameters()),
        parameters=sum(t.numel() for t in drafter.tensors().values()),
        alpha=float(total[0] / total[1]),
        measured=measured,
    )
    return CutDrafter(drafter, report)


def whole_target(target: Target) -> SmallLm:
    """The target as its own drafter, to cut from."""
    return SmallLm.from_lm(prunable(target), target.spec)


def halfway(wanted: Wanted, shape: LlamaShape | ModelSpec) -> Wanted:
    """The first of two cuts: geometric means of depth, channels and neurons; heads go in the
    second. Beyond half of a model two cuts with distillation in between beat one (Minitron)."""
    if wanted.from_layers is not None:
        raise RecipeError(
            "named layers are cut in one step",
            found=f"from_layers {list(wanted.from_layers)}",
            expected="a number of layers",
            do="leave out --two-step, or drafter.options.from_layers",
            where="--two-step",
        )
    half = replace(
        wanted,
        layers=_mean(wanted.layers, shape.num_layers),
        channels=_mean(wanted.channels, shape.hidden_size),
        neurons=_mean(wanted.neurons, shape.intermediate_size),
        heads=None,
        kv_heads=None,
    )
    if half in (replace(wanted, heads=None, kv_heads=None), Wanted(importance=wanted.importance)):
        raise RecipeError(
            "there is nothing between the target and the drafter",
            found=f"{wanted}",
            expected="a cut of more than one layer, or of width",
            do="leave out --two-step",
            where="--two-step",
        )
    return half


def _mean(wanted: int | None, has: int) -> int | None:
    return None if wanted is None else round((wanted * has) ** 0.5)


def prune_plans(
    recipe: Recipe,
    wanted: Wanted,
    steps: int,
    two_step: bool,
    speed: float | None = None,
    pace: Pace | None = None,
) -> list[tuple[Recipe, RunPlan]]:
    """The plan of each cut with its healing. The text is made once, for the first. `pace` of the
    healing of a single cut, where it has been measured."""
    spec = target_shape(recipe.target).spec
    check_cut(wanted, spec)
    cuts = [(wanted, steps)]
    if two_step:
        cuts = [(halfway(wanted, spec), steps // 2), (wanted, steps - steps // 2)]
    found = list[tuple[Recipe, RunPlan]]()
    for cut, count in cuts:
        options = {"options": cut_options(recipe.drafter.options, cut, spec)}
        drafter = recipe.drafter.model_copy(update=options)
        train = recipe.train.model_copy(update={"steps": count})
        healed = recipe.model_copy(update={"drafter": drafter, "train": train})
        before = partial(_cutting, recipe.data, train, cut, spec)
        made = plan(healed, flops_per_second=speed, before=before)
        disk = {**made.disk, "cut": _cut_bytes(drafter, spec)}
        found.append((healed, replace(made, disk=disk if count else {**disk, "package": 0})))
    healed, made = found[-1]
    if two_step:
        left = tuple(part for part in made.parts if part.name != ANSWERS)
        found[-1] = healed, replace(made, parts=left)
    elif pace is not None:
        found[-1] = healed, _paced(healed.data, healed.train, made, pace)
    return found


def cut_parts(made: RunPlan) -> tuple[Part, ...]:
    """The parts of a plan that come before the healing and are no part of another run."""
    return tuple(part for part in made.parts if part.name in (SCORING, TAU_OF_CUT))


def _paced(data: DataPart, train: TrainPart, made: RunPlan, pace: Pace) -> RunPlan:
    parts = pace.parts(data, train, data_tokens(data), CALIBRATED)
    basis = f"calibrated here: {pace.step:.3g} s a step; {SCORING}: {made.basis}"
    return replace(made, parts=(*cut_parts(made), *parts), basis=basis)


def shape_fields(part: DrafterPart, wanted: Wanted, spec: ModelSpec) -> dict[str, object]:
    """The fields of a recipe for a drafter of the shape that will be left of a target, to be
    derived or planned."""
    given = {**dict.fromkeys(part.options), **cut_options(part.options, wanted, spec)}
    return {f"drafter.options.{name}": value for name, value in given.items()}


def _cutting(
    data: DataPart, train: TrainPart, wanted: Wanted, spec: ModelSpec, sizes: WorkSizes
) -> list[Work]:
    """The work of a cut before its healing."""
    text = min(CALIBRATION_TOKENS, data_tokens(data))
    forwards = 1 + (2 * spec.num_layers if wanted.importance == "alpha" else 0)
    reading = 2.0 * text * (forwards * sizes.target + sizes.target + sizes.drafter)
    scoring = Work(SCORING, f"{text:,} tokens", reading)
    return [scoring, replace(measuring(data, train, sizes), name=TAU_OF_CUT)]


def _cut_bytes(part: DrafterPart, spec: ModelSpec) -> int:
    """Of the drafter before healing, whose vocabulary is still whole."""
    return 4 * num_parameters(build_shape(trainable_family(part, None), part, None, spec))


def cut_options(
    options: Mapping[str, object], wanted: Wanted, spec: ModelSpec
) -> dict[str, object]:
    """The drafter's options with the sizes that are wanted."""
    layers = wanted.layers or len(wanted.from_layers or ()) or spec.num_layers
    sizes = {
        "layers": layers,
        "width": wanted.channels,
        "intermediate": wanted.neurons,
        "heads": wanted.heads,
        "kv_heads": wanted.kv_heads,
    }
    given = {**options, **{k: v for k, v in sizes.items() if v is not None}}
    return {name: value for name, value in given.items() if name != "from_layers"}
