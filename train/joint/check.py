"""What joint training cannot be combined with, refused before anything is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from specctl.core.drafter import Drafter
from specctl.core.errors import IncompatibleError, RecipeError
from specctl.drafters import family as family_named
from specctl.models.hf.hf_lm import HfLM
from specctl.models.llama.fast_llama import FastLlama
from specctl.recipes.low_rank import ALONE, JointPart
from specctl.recipes.schema import DataPart, TargetPart, TrainPart
from specctl.runtime.target.placement.device import FEW_BITS, PACKED
from specctl.runtime.target.target import Target
from specctl.train.step.selective import COMPARING

PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class Clash:
    """A setting beside which the target cannot learn, why, and the setting that lets it."""

    where: str
    found: str
    why: str
    instead: str


def clashes(data: DataPart, train: TrainPart, target: TargetPart) -> Iterator[Clash]:
    """The settings of a recipe that exclude train.joint."""
    if data.features == "offline":
        why = "features on disk are those of the target before it learns"
        yield Clash("data.features", "offline", why, "online")
    if data.on_policy > 0:
        why = "a drafter of the target's states writes no text of its own"
        yield Clash("data.on_policy", f"{data.on_policy:g}", why, "0")
    if train.parallel == "fsdp":
        why = "additions are made to whole weights, which fsdp spreads"
        yield Clash("train.parallel", "fsdp", why, "ddp")
    if train.lora is not None:
        why = "the drafter that learns with its target learns whole, not by additions"
        yield Clash("train.lora", f"rank {train.lora.rank}", why, "null")
    if train.select in COMPARING:
        why = "a reference was made for the target before it learns"
        yield Clash("train.select", train.select, why, "none")
    if target.inflate is not None:
        why = "an inflated target is for measuring speed, it has no weights to publish"
        yield Clash("target.inflate", target.inflate, why, "null")


def check_joint(data: DataPart, train: TrainPart, target: TargetPart, drafter: Drafter) -> None:
    """Refuse settings that exclude train.joint, and drafters that read no states of the target or
    run its layers as they were."""
    if train.joint is None:
        return
    for clash in clashes(data, train, target):
        raise RecipeError(
            f"joint training does not go with {clash.where}: {clash.why}",
            where=clash.where,
            found=clash.found,
            expected=clash.instead,
            do=f"--set {clash.where}={clash.instead}, or --set train.joint=null",
        )
    if train.joint.alone is not None:
        _check_alone(drafter.family, train, train.joint, train.joint.alone)
        return
    if drafter.runs_target and not drafter.teaches_target:
        raise RecipeError(
            f"a {drafter.family} drafter runs layers of the target while it learns, and "
            "would run those of before",
            where="train.joint",
            found=f"drafter.family: {drafter.family}",
            expected="a family with layers of its own, such as medusa or eagle3, or pass",
            do="--set train.joint=null, or --set drafter.family=medusa",
        )
    if not drafter.needs().taps:
        raise RecipeError(
            f"a {drafter.family} drafter reads no states of the target, so that nothing "
            "tells the target what to learn",
            where="train.joint",
            found=f"drafter.family: {drafter.family}",
            expected="a family that reads the target's states, such as medusa, hydra or eagle3",
            do="--set train.joint=null, or --set drafter.family=medusa",
        )


def _check_alone(family: str, train: TrainPart, part: JointPart, way: str) -> None:
    """Where the target alone learns, settings of a drafter that learns beside it say nothing."""
    found = None
    if family_named(family).trainable:
        other = f"--set drafter.family={ALONE[way]}"
        found = f"drafter.family: {family}, which has weights", other
    elif part.keep == "none":
        found = "train.joint.keep: none, so that nothing is learned", "--set train.joint.keep=kl"
    elif part.warmup or part.ramp:
        said = f"train.joint.warmup: {part.warmup:g}, ramp: {part.ramp:g}"
        found = said, "--set train.joint.warmup=0 --set train.joint.ramp=0"
    elif train.compile:
        found = "train.compile: true", "--set train.compile=false"
    if found is not None:
        raise RecipeError(
            f"the target alone learns (train.joint.{way}), and there is no drafter to train",
            where="train.joint",
            found=found[0],
            expected="a family without weights, a loss of the target, nothing for a drafter",
            do=f"{found[1]}, or --set train.joint.{way}=null",
        )


def check_stages(stages: Sequence[JointPart | None]) -> None:
    """Refuse a stage after one that changes the target: it would go on with the original. Given is
    the train.joint of each."""
    for number, joint in enumerate(stages[:-1], start=1):
        if joint is not None:
            raise RecipeError(
                "a stage changes the target, and the next one starts from the original again",
                where="train.joint",
                found=f"stage {number} of {len(stages)}",
                expected="joint training in the last stage alone",
                do="set train.joint: null in every stage but the last",
            )


def check_target(target: Target) -> None:
    """Refuse targets whose weights cannot be added to or written as a folder."""
    problem = None
    lm = target.lm
    dtypes = {p.dtype for p in lm.module.parameters()} - {*PLAIN}
    config = getattr(lm.module, "config", None)
    if target.inflated is not None:
        problem = f"inflated to {target.inflated}"
    elif dtypes or getattr(config, "quantization_config", None) is not None:
        kinds = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        problem = f"quantised weights ({kinds or 'by its configuration'})"
    elif (bits := FEW_BITS.get(target.dtype_name)) is not None:
        problem = f"weights that are read in {bits} bits (dtype {target.dtype_name})"
    elif target.dtype_name == PACKED:
        problem = "matrices as a GGUF file packs them"
    elif type(lm) not in (FastLlama, HfLM) or (isinstance(lm, FastLlama) and lm.config is None):
        problem = f"a {type(lm).__name__} that did not come from transformers"
    elif target.adapters and isinstance(lm, HfLM):
        problem = "adapters that stay unmerged, for want of our own forward"
    elif target.inside_of is not None:
        problem = f"the text side of a {target.inside_of}, which would be written without the rest"
    elif target.tokenizer is None:
        problem = "no tokenizer to write beside the weights"
    if problem is not None:
        raise IncompatibleError(
            f"target {target.name} cannot learn together with a drafter",
            found=problem,
            expected="a whole transformers model in float32, bfloat16 or float16, with tokenizer",
            do="choose the target as it was published, or --set train.joint=null",
            where="train.joint",
        )
