"""What needs a target of attention alone: one that keeps keys and values, which can be taken back.

Whoever wants it names it here; it is refused where the target's configuration is read, before any
weight is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specctl.core.errors import IncompatibleError


@dataclass(frozen=True, slots=True)
class AttentionOnly:
    """`what` cannot go with recurrent states, the words that want it, and what to `do`."""

    what: str
    words: str
    do: str

    def error(self, model_type: str, where: str = "") -> IncompatibleError:
        """The refusal for a target of that type."""
        return IncompatibleError(
            self.what,
            where=where,
            found=f"{self.words}, and recurrent layers ({model_type})",
            expected="a target of attention alone",
            do=self.do,
        )


RECORDED = AttentionOnly(
    "rounds of a target with recurrent states cannot be recorded",
    "target.compile",
    "leave out target.compile",
)
PARALLEL = AttentionOnly(
    "drafting in parallel needs a target whose cache can be rolled back",
    "parallel",
    "leave out serve.parallel, or give --set serve.parallel=false",
)


def borrowing(name: str) -> AttentionOnly:
    """A drafter that runs layers of the target."""
    return AttentionOnly(
        f"drafter {name} runs layers of the target, whose recurrent states move once a round",
        f"drafter {name}",
        "choose a drafter that runs none of its layers, e.g. eagle3, medusa, prompt-lookup",
    )


def of_serving(serve: Mapping[str, Any]) -> Iterator[AttentionOnly]:
    """What the settings of serving need, by their names in a recipe."""
    if serve.get("parallel"):
        yield PARALLEL
    if (layer := serve.get("early_layer")) is not None:
        yield AttentionOnly(
            "a target with recurrent states cannot lose nodes of a tree half-way through",
            f"serve.early_layer {layer}",
            "leave serve.early_layer out: the tree is then verified whole",
        )
