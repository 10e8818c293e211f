"""SelfDrafter: the frame of families that draft with the target's own layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from specctl.core.drafter import Drafter, Needs
from specctl.core.errors import RecipeError
from specctl.core.language_model import Borrowed, LanguageModel
from specctl.drafters.option_checks import Options, Within


@dataclass(frozen=True, slots=True, kw_only=True)
class UnverifiedOptions(Options):
    """`unverified`: tokens of a chain are taken as they are while the layers that draft give each
    at least this probability, which is approximate: what the method does that has no target behind
    it. None: every token is verified."""

    unverified: Annotated[float, Within(0, 1)] | None = None


class SelfDrafter(Drafter):
    """Runs layers of the target, whose states at all of `attention` it reads. `shares_kv`: what it
    keeps of known tokens is what the target caches, so that its states can do without a copy."""

    shares_kv: ClassVar[bool] = False
    runs_target = True
    _lm: LanguageModel | None = None

    @property
    @abstractmethod
    def attention(self) -> tuple[int, ...]:
        """Layers whose attention may run."""

    def needs(self) -> Needs:
        return Needs(taps=self.attention, borrow=True, copied=self.copied)

    @property
    def copied(self) -> tuple[int, ...]:
        """`Needs.copied`."""
        return self.attention if self.shares_kv else ()

    def bind(self, borrowed: Borrowed) -> None:
        self._lm = borrowed.layers()

    @property
    def lm(self) -> LanguageModel:
        assert self._lm is not None, "bind() the target's layers first"
        return self._lm


def check_layer(name: str, layer: int, num_layers: int, least: int = 1) -> int:
    """A number of layers below all of the target's."""
    if not least <= layer < num_layers:
        raise RecipeError(
            f"{name} leaves nothing to skip, or nothing to run",
            where=f"drafter.options.{name}",
            found=str(layer),
            expected=f"{least} to {num_layers - 1}, the target having {num_layers} layers",
            do=f"write {name}: {max(least, num_layers // 4)}, or leave it out",
        )
    return layer


def check_layers(name: str, layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Layer numbers of the target, ascending."""
    if list(layers) != sorted({*layers}) or any(not 0 <= one < num_layers for one in layers):
        raise RecipeError(
            f"{name} does not name layers of this target",
            where=f"drafter.options.{name}",
            found=str(list(layers)),
            expected=f"ascending layer numbers, 0 to {num_layers - 1}",
            do=f"leave {name} out, or correct it",
        )
    return tuple(layers)
