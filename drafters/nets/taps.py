"""Which depths of the target a feature drafter reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specctl.core.errors import RecipeError
from specctl.core.spec import ModelSpec


def default_taps(num_layers: int) -> tuple[int, ...]:
    """(2, L // 2, L - 3) of EAGLE-3; spread over the depth when those are not distinct."""
    paper = (2, num_layers // 2, num_layers - 3)
    if 2 < paper[1] < paper[2]:
        return paper
    spread = {min(1, num_layers - 1), num_layers // 2, num_layers - 1}
    spare = (tap for tap in range(num_layers + 1) if tap not in spread)
    while len(spread) < min(3, num_layers + 1):
        spread.add(next(spare))
    return tuple(sorted(spread))


def even_taps(num_layers: int, number: int = 5) -> tuple[int, ...]:
    """DFlash's (arXiv 2602.06036): so many outputs of layers, evenly from the one behind the second
    layer to the one before the last two; over the whole depth where these are not distinct."""
    for first, last in ((2, num_layers - 2), (0, num_layers)):
        step = (last - first) / max(1, number - 1)
        if step >= 1:
            return tuple(round(first + i * step) for i in range(number))
    return tuple(range(num_layers + 1))


def taps_of(
    taps: Sequence[int] | None,
    spec: ModelSpec,
    chosen: Callable[[int], tuple[int, ...]] = default_taps,
) -> tuple[int, ...]:
    """Those taps, checked; None = those chosen for the target's number of layers."""
    found = chosen(spec.num_layers) if taps is None else tuple(int(tap) for tap in taps)
    if not found or min(found) < 0 or max(found) > spec.num_layers:
        raise RecipeError(
            "a tap is not a layer of this target",
            where="drafter.options.taps",
            found=str(found),
            expected=f"hidden_states indices 0 to {spec.num_layers}",
            do=f"write taps: {list(chosen(spec.num_layers))}",
        )
    return found
