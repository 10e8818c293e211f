"""What every part of a recipe is made of: the frozen base class, kinds of numbers, names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import CoreSchema, core_schema

from specctl.core.plugins import declared

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1, le=10**9)]
Tokens = Annotated[int, Field(ge=1, le=10**13)]
SeedNumber = Annotated[int, Field(ge=0, lt=2**32)]


@dataclass(frozen=True, slots=True)
class NameOf:
    """Annotates the name of a plug-in of that package (core/plugins.py), or another word `also`, as
    Literal would if all were known beforehand."""

    package: str
    attribute: str
    also: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, *_: Any) -> CoreSchema:
        known = declared(self.package, self.attribute)
        return core_schema.literal_schema([*self.also, *known])


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted leaf -> value; an empty mapping is a leaf."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves.update(flatten(value, f"{prefix}{key}."))
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


class Section(BaseModel):
    """A part of a recipe: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_switch_as_number(cls, given: Any) -> Any:
        """A yes or no would otherwise count as 1 or 0. YAML reads the word no as False; where it is
        one of the words that a field may be, the word was meant."""
        for key, value in given.items() if isinstance(given, Mapping) else ():
            field = cls.model_fields.get(str(key))
            if field is None or not isinstance(value, bool):
                continue
            if value is False and "no" in get_args(field.annotation):
                given = {**given, key: "no"}
            elif bool not in (field.annotation, *get_args(field.annotation)):
                shown = field.get_default(call_default_factory=True)
                raise ValueError(f"{key} is no switch; write a value such as {key}: {shown}")
        return given
