"""Options that trained drafters share. A family's own dataclass extends one of these and overrides
the defaults that its paper sets otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from specctl.core.errors import RecipeError
from specctl.drafters.losses.head_losses import LossOptions
from specctl.drafters.nets.shortlist import CANDIDATES, SMOOTHING, Shortlist
from specctl.drafters.option_checks import Count, Options, Within

ADDED = {"added": True}  # metadata of an option that older packages lack: they have its default
SERVED = {**ADDED, "served": True}  # and that may be set anew whenever the drafter is served


def added_before(value: Any) -> dict[str, Any]:
    """Metadata of an option that older packages lack: they are as this value makes them."""
    return {**ADDED, "before": value}


def read_options(kind: type[Any], given: Mapping[str, Any]) -> Any:
    """A family's options from a recipe or a manifest. Nothing is taken for a number that is none:
    neither true nor "1" is a count, and null only where the option may be None."""
    return TypeAdapter(kind).validate_json(json.dumps(given, default=str), strict=True)


def served_anew(options: Any, given: Mapping[str, Any]) -> Any:
    """The options of a trained drafter with some set anew: those that its weights do not fix."""
    every = fields(options) if is_dataclass(options) else ()
    free = [field.name for field in every if field.metadata.get("served")]
    for name in given:
        if name not in free:
            raise RecipeError(
                f"{name} was decided when this drafter was trained, or it is no option of it",
                where=f"drafter.options.{name}",
                found=name,
                expected=", ".join(free) or "a drafter with options that may be set when it drafts",
                do="leave it out" if not free else f"--set drafter.options.{free[0]}=VALUE",
            )
    known = {field.name: getattr(options, field.name) for field in every}
    try:
        return read_options(type(options), {**known, **given})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = str(first["loc"][0]) if first["loc"] else ", ".join(given)
        raise RecipeError(
            f"{name} of a drafter has another type",
            where=f"drafter.options.{name}",
            found=repr(given.get(name))[:80],
            expected=str(first["msg"]),
            do="write such a value, or leave it out",
        ) from error


@dataclass(frozen=True, slots=True)
class CompareOptions(Options):
    """`loss` compares a drafter's distributions with the target's at `temperature`, `chunk` rows at
    a time (None fits the vocabulary). While drafting, low-rank scores of rank `head_rank` (None:
    off) choose the `head_candidates` rows of the LM head that are read (None: 256, or all). Row k
    weighs 1 / (k + `head_smoothing`) in these scores, as frequent tokens have low ids (None: 100;
    1e9: all rows alike)."""

    loss: str = "kl"
    temperature: float = 1.0
    chunk: int | None = None
    head_rank: Annotated[int, Within(1, 1 << 16)] | None = field(default=None, metadata=SERVED)
    head_candidates: Annotated[int, Within(1, 1 << 24)] | None = field(
        default=None, metadata=SERVED
    )
    head_smoothing: Annotated[float, Within(1, 1e9)] | None = field(default=None, metadata=SERVED)

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        self.compared()
        given = [n for n in ("head_candidates", "head_smoothing") if getattr(self, n) is not None]
        if given and self.head_rank is None:
            raise RecipeError(
                "nothing chooses candidates: rough scores have no rank",
                where=f"drafter.options.{given[0]}",
                found=f"{given[0]}: {getattr(self, given[0])}, head_rank: null",
                expected=f"head_rank beside {given[0]}, or neither",
                do=f"write head_rank: 64, or leave {given[0]} out",
            )

    def compared(self) -> LossOptions:
        """How a head is compared with the target."""
        return LossOptions(self.loss, self.temperature, self.chunk)

    def shortlist(self, rows: int) -> Shortlist | None:
        """How an LM head of so many rows is read; None: whole."""
        if self.head_rank is None:
            return None
        count = self.head_candidates or min(CANDIDATES, rows)
        return Shortlist(self.head_rank, count, self.head_smoothing or SMOOTHING)


@dataclass(frozen=True, slots=True)
class DepthOptions(CompareOptions):
    """The same at every depth of a draft: head, step or slot i weighs decay^i."""

    decay: Annotated[float, Within(0, 10)] = 1.0


@dataclass(frozen=True, slots=True)
class HeadOptions(DepthOptions):
    """The same for drafters that are trained `num_heads` tokens deep. `d_pace`: each weighs by
    D-PACE with this smoothing (0.5 in the paper; losses/pace.py) in place of decay^i."""

    num_heads: Count = 4
    d_pace: Annotated[float, Within(0.01, 1)] | None = field(default=None, metadata=ADDED)
