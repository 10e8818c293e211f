"""What engines will read of a block drafter that is derived, and what that costs in training.

Which they are is decided by the formats themselves, which `Foresee` applies to the drafter that the
recipe makes. A mask that is a token costs nothing. The whole vocabulary, where engines know no
other, is chosen while a step costs little more with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specctl.core.errors import SpecctlError
from specctl.core.spec import ModelSpec
from specctl.recipes.schema import DrafterPart, TrainPart
from specctl.recipes.serve import ServePart
from specctl.runtime.target.target import Target
from specctl.runtime.target.templates.spare_token import spare_token
from specctl.train.planning.loss_flops import loss_flops
from specctl.train.planning.target_shape import TargetShape

MASK, VOCABULARY = "drafter.options.mask_id", "vocab.size"
ONLY_WAY, ONE_MORE = 2.0, 1.25  # how dear a step may be where no engine, where fewer read it else
UNKNOWN_SHARE = 4  # of the ids, where nothing is known of those that answers need


@dataclass(frozen=True, slots=True)
class BesideTarget:
    """What formats read of a target, without its weights."""

    spec: ModelSpec
    config: Any
    tokenizer: Any = None
    ends: tuple[int, ...] = ()

    @classmethod
    def of(cls, shape: TargetShape, target: Target | None) -> BesideTarget:
        if target is None:
            return cls(shape.spec, shape.config, None, shape.spec.eos_ids)
        return cls(target.spec, shape.config, target.tokenizer, target.eos_ids)

    def mask(self) -> tuple[int, str] | None:
        """A token that no text contains, and its text; None without any."""
        found = spare_token(self.tokenizer, self.spec, self.ends) if self.tokenizer else None
        if found is None:
            return None
        text = self.tokenizer.convert_ids_to_tokens(found) if found < len(self.tokenizer) else None
        return found, "a row without a token" if text is None else str(text)


Said = Mapping[str, SpecctlError | None]  # of each engine: why it does not read the drafter
# Of a drafter that is served so, with so many ids (None: all of them, or not known yet).
Foresee = Callable[[DrafterPart, ServePart, int | None, BesideTarget], Said]


@dataclass(frozen=True, slots=True)
class EngineReading:
    """The engines that will read the drafter as it is, and of the others what would make them."""

    reads: tuple[str, ...]
    others: Mapping[str, str]

    def text(self) -> str:
        """Of the others; engines that the same would help stand together."""
        by_way: dict[str, list[str]] = {}
        for engine, way in self.others.items():
            by_way.setdefault(way, []).append(engine)
        first = (
            f"specctl export RUN --to {self.reads[0]}" if self.reads else "specctl alone serves it"
        )
        return "; ".join([first, *(f"{', '.join(names)}: {way}" for way, names in by_way.items())])


@dataclass(frozen=True, slots=True)
class Whole:
    """The whole vocabulary beside a draft vocabulary: what engines say of either, and how many
    times as dear a step is with the whole one (None: not known)."""

    trimmed: Mapping[str, SpecctlError | None]
    whole: Mapping[str, SpecctlError | None]
    times: float | None

    @property
    def gained(self) -> tuple[str, ...]:
        """Engines that read it over all ids alone."""
        return tuple(e for e, no in self.whole.items() if no is None and self.trimmed[e])

    @property
    def is_worth_it(self) -> bool:
        if not self.gained or self.times is None:
            return False
        is_only_way = all(self.trimmed.values())
        return self.times <= (ONLY_WAY if is_only_way else ONE_MORE)

    @property
    def cost(self) -> str:
        return "" if self.times is None else f"a step costs {self.times:.1f} times as much"


def whole_vocabulary(
    part: DrafterPart,
    train: TrainPart,
    shape: TargetShape,
    size: int,
    ids: int,
    said_of: Callable[[int | None], Said],
) -> Whole:
    """Both vocabularies of a drafter for a target of `size` ids, whose answers need so many `ids`
    (0: not known). `said_of`: what engines say of it with so many (None: all)."""
    kept = min(ids or size // UNKNOWN_SHARE, size - 1)
    said = said_of(kept), said_of(None)
    if not any(no is None and said[0][engine] for engine, no in said[1].items()):
        return Whole(*said, None)
    flops = loss_flops(part, train, shape)
    return Whole(*said, None if flops is None else flops.over(size) / flops.over(kept))


def engine_reading(
    said: Mapping[str, SpecctlError | None], whole: Whole | None = None
) -> EngineReading:
    """What the plan says of a recipe of which engines say `said`. `whole`: what they would say of
    the whole vocabulary, where that was not chosen."""
    others = {engine: str(no.do) for engine, no in said.items() if no is not None}
    if whole is not None:
        cost = f" ({whole.cost})" if whole.cost else ""
        for engine, no in whole.whole.items():
            if engine in others and str(no) != str(whole.trimmed[engine]):
                more = "" if no is None else f" and {no.do}"
                others[engine] = f"--set {VOCABULARY}=null{cost}{more}"
    return EngineReading(tuple(engine for engine, no in said.items() if no is None), others)
