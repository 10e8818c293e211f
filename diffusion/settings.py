"""How a canvas is denoised: settings as words, checked before anything loads. No torch.

unmask   static | threshold:T | entropy:T | explore:T:N | learn2pd:T
reuse    none | dkv:REFRESH | window:ACTIVE:BUFFER:REFRESH
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specctl.core.errors import RecipeError, one_of_two

Numbers = tuple[float, ...]
# Name of a way: what its numbers are called, and which are allowed.
UNMASK: dict[str, tuple[str, Callable[[Numbers], bool]]] = {
    "static": ("", lambda n: n == ()),
    "threshold": (":T (0 to 1)", lambda n: len(n) == 1 and 0 <= n[0] <= 1),
    "entropy": (":T (nats, 0 or more)", lambda n: len(n) == 1 and 0 <= n[0] < math.inf),
    "learn2pd": (":T (0 to 1)", lambda n: len(n) == 1 and 0 <= n[0] <= 1),
    "explore": (
        ":T:N (0 to 1, and a count)",
        lambda n: len(n) == 2 and 0 <= n[0] <= 1 and _are_counts((n[1] + 1,)),
    ),
}
REUSE: dict[str, tuple[str, Callable[[Numbers], bool]]] = {
    "none": ("", lambda n: n == ()),
    "dkv": (":REFRESH (a count)", lambda n: len(n) == 1 and _are_counts(n)),
    "window": (
        ":ACTIVE:BUFFER:REFRESH (counts)",
        lambda n: len(n) == 3 and _are_counts((n[0], n[1] + 1, n[2])),
    ),
}


def _are_counts(numbers: Numbers) -> bool:
    return all(number >= 1 and number.is_integer() for number in numbers)


@dataclass(frozen=True, slots=True)
class DenoiseWay:
    """A word such as threshold:0.9: its name and its numbers."""

    name: str
    numbers: Numbers

    @classmethod
    def of(
        cls, word: str, known: Mapping[str, tuple[str, Callable[[Numbers], bool]]], key: str
    ) -> DenoiseWay:
        """The way that a word names; RecipeError for any other."""
        name, *parts = str(word).split(":")
        try:
            numbers = tuple(float(part) for part in parts)
        except ValueError:
            numbers = (-1.0,)
        if name not in known or not known[name][1](numbers):
            raise RecipeError(
                f"{key} of diffusion decoding is not valid",
                where=f"diffusion.{key}",
                found=str(word)[:80],
                expected=", ".join(name + form for name, (form, _) in known.items()),
                do=f"leave it out, or give one of these: --set diffusion.{key}=...",
            )
        return cls(name, numbers)


@dataclass(frozen=True, slots=True)
class DenoiseSettings:
    """`block`: tokens that are denoised together, blocks from left to right; `steps`: passes over
    a block in the plain schedule (None: as many as it has tokens); `unmask`: which tokens a pass
    keeps; `reuse`: what a pass does not compute again; `ahead`: drafted steps in a pass (FreeDave;
    0: none)."""

    block: int = 32
    steps: int | None = None
    unmask: str = "static"
    reuse: str = "none"
    ahead: int = 0

    def __post_init__(self) -> None:
        for name, least in (("block", 1), ("steps", 1), ("ahead", 0)):
            value: Any = getattr(self, name)
            if value is None and name == "steps":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise RecipeError(
                    f"{name} of diffusion decoding is not valid",
                    where=f"diffusion.{name}",
                    found=repr(value)[:40],
                    expected=f"a count of at least {least}",
                    do=f"give another number: --set diffusion.{name}=...",
                )
        if self.steps is not None and self.steps > self.block:
            raise RecipeError(
                "a block has more passes than tokens",
                where="diffusion.steps",
                found=f"{self.steps} passes for {self.block} tokens",
                expected=f"at most {self.block}: a pass keeps one token at least",
                do="lower diffusion.steps, or raise diffusion.block",
            )
        unmask, reuse = self.unmask_way, self.reuse_way
        if unmask.name != "static" and self.steps is not None:
            raise one_of_two(
                "diffusion.steps is the plain schedule's, and another way was chosen",
                f"diffusion.steps={self.steps} and diffusion.unmask={self.unmask}",
                "leave out one of the two",
            )
        if self.ahead and (unmask.name, reuse.name) != ("static", "none"):
            raise one_of_two(
                "drafted steps are verified against the plain schedule, computed whole",
                f"diffusion.ahead={self.ahead}, unmask={self.unmask}, reuse={self.reuse}",
                "leave out diffusion.ahead, or the other settings",
            )

    @property
    def unmask_way(self) -> DenoiseWay:
        return DenoiseWay.of(self.unmask, UNMASK, "unmask")

    @property
    def reuse_way(self) -> DenoiseWay:
        return DenoiseWay.of(self.reuse, REUSE, "reuse")
