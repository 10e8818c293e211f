"""What cutting a drafter out of a target will take, before anything is loaded.

Each cut reads the calibration text: with the target once, with acceptance drop once more for each
layer left out, and with what is left; then tau is measured, and the healing is an ordinary run.
"""

from __future__ import annotations

from dataclasses import replace

from specctl.core.spec import ModelSpec
from specctl.recipes.schema import Recipe
from specctl.train.assemble import trainable_family
from specctl.train.planning.plan import RunPlan, build_shape, data_tokens, plan
from specctl.train.planning.target_shape import target_shape
from specctl.train.planning.work import ANSWERS, Work, WorkSizes, measuring, num_parameters
from specctl.train.prune.cut import CALIBRATION_TOKENS, Wanted, check_cut
from specctl.train.prune.run import halfway


def prune_plans(
    recipe: Recipe,
    wanted: Wanted,
    steps: int,
    two_step: bool,
    speed: float | None = None,
) -> list[tuple[Recipe, RunPlan]]:
    """The plan of each cut with its healing. The text is made once, for the first."""
    spec = target_shape(recipe.target).spec
    check_cut(wanted, spec)
    if not two_step:
        return [_planned(recipe, wanted, steps, spec, speed)]
    first = _planned(recipe, halfway(wanted, spec), steps // 2, spec, speed)
    second, made = _planned(recipe, wanted, steps - steps // 2, spec, speed)
    left = tuple(part for part in made.parts if part.name != ANSWERS)
    return [first, (second, replace(made, parts=left))]


def _planned(
    recipe: Recipe, wanted: Wanted, steps: int, spec: ModelSpec, speed: float | None
) -> tuple[Recipe, RunPlan]:
    part = recipe.drafter.model_copy(update={"options": _options(recipe, wanted, spec)})
    train = recipe.train.model_copy(update={"steps": steps})
    healed = recipe.model_copy(update={"drafter": part, "train": train})
    text = min(CALIBRATION_TOKENS, data_tokens(recipe))
    forwards = 1 + (2 * spec.num_layers if wanted.importance == "alpha" else 0)

    def before(sizes: WorkSizes) -> list[Work]:
        reading = 2.0 * text * (forwards * sizes.target + sizes.target + sizes.drafter)
        scoring = Work("scoring what matters", f"{text:,} tokens", reading)
        once = measuring(recipe, sizes)
        return [scoring, replace(once, name="measuring tau of the cut")]

    made = plan(healed, flops_per_second=speed, before=before)
    disk = {**made.disk, "cut": _cut_bytes(healed, spec)}
    return healed, replace(made, disk=disk if steps else {**disk, "package": 0})


def _cut_bytes(recipe: Recipe, spec: ModelSpec) -> int:
    """Of the drafter before healing, whose vocabulary is still whole."""
    vocab = recipe.vocab.model_copy(update={"size": None})
    whole = recipe.model_copy(update={"vocab": vocab})
    return 4 * num_parameters(build_shape(trainable_family(whole), whole, spec))


def _options(recipe: Recipe, wanted: Wanted, spec: ModelSpec) -> dict[str, object]:
    """The drafter's options with the sizes that are wanted."""
    layers = wanted.layers or len(wanted.from_layers or ()) or spec.num_layers
    sizes = {
        "layers": layers,
        "width": wanted.channels,
        "intermediate": wanted.neurons,
        "heads": wanted.heads,
        "kv_heads": wanted.kv_heads,
    }
    given = {**recipe.drafter.options, **{k: v for k, v in sizes.items() if v is not None}}
    return {name: value for name, value in given.items() if name != "from_layers"}
