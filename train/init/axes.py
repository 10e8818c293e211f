"""Whether a drafter's positions are those of its target's images (M-RoPE), decided as a run begins.

Engines give a draft head of a Qwen2-VL or Qwen3-VL the target's three positions where its
configuration has `mrope_section` (SGLang and vLLM; SpecForge trains it so). Here a recipe that
learns from images of such a target does the same unless it says otherwise.
"""

from __future__ import annotations

from dataclasses import fields

from specctl.core.errors import IncompatibleError, RecipeError
from specctl.drafters import family
from specctl.recipes.schema import DrafterPart
from specctl.runtime.target.target import Target

MROPE = "mrope"
PLAIN = "--set 'drafter.options.mrope=[]'"


def with_axes(part: DrafterPart, target: Target, images: bool) -> DrafterPart:
    """The part with the target's axes where `images` are learned and nothing else is said. Raises
    IncompatibleError for axes that the target does not have, RecipeError for heads of another
    width than the target's."""
    if MROPE not in {field.name for field in fields(family(part.family).options)}:
        return part
    given = part.options.get(MROPE)
    axes = None if target.vision is None else target.vision.axes
    if given and axes is None:
        raise IncompatibleError(
            f"target {target.name} has no positions of several axes",
            where="drafter.options.mrope",
            found="a target that reads no images" if target.vision is None else target.vision.kind,
            expected="a multimodal target with M-RoPE (Qwen2-VL to Qwen3-VL), loaded with its "
            "vision",
            do=f"leave mrope out, or {PLAIN}",
        )
    if given is not None or axes is None or not images:
        return part
    width = part.options.get("head_dim") or target.spec.head_dim
    if width != target.spec.head_dim:
        raise RecipeError(
            "the target's axes are those of other frequencies than the drafter has",
            where="drafter.options.head_dim",
            found=f"heads of width {width}, and {target.spec.head_dim} in the target",
            expected="the same width, or mrope in the recipe",
            do=f"leave head_dim out, or {PLAIN}",
        )
    return part.model_copy(update={"options": part.options | {MROPE: list(axes.axis)}})
