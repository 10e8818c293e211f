"""Random changes of a JSON object, and whether what follows is told as a user can understand."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from specctl.cli.app.failures import shown_error

ODD = [
    None, True, False, -1, 0, 1, 2, 3, 63, 10**6, 10**9, 2**63, -(2**63), 1e9, 1e308, -0.5, "", "1",
    "nan", "x" * 300, "../../etc/passwd", "\x1b[31m", [], [0], [1, 1], [64] * 20, [[]], {},
    {"a": 1}, {"rope_type": "llama3"}, {"rope_type": "yarn", "factor": "x"},
    "float32", "small-lm", "chain",
]  # fmt: skip


def leaves(body: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a JSON value, inner ones too."""
    items: Any = ()
    if isinstance(body, (dict, list)):
        items = body.items() if isinstance(body, dict) else enumerate(body)
    inner = [found for key, value in items for found in leaves(value, (*path, key))]
    return [path, *inner] if path else inner


def mutated(body: dict[str, Any], draw: random.Random) -> None:
    """Change one to three places of a JSON object: another value, a missing or a further key."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        places = leaves(body)
        if not places:
            return
        *parents, last = draw.choice(places)
        part: Any = body
        for key in parents:
            part = part[key]
        kind, old = draw.randrange(12), part[last]
        if kind == 0:
            del part[last]
        elif kind == 1 and isinstance(part, dict):
            part["more"] = draw.choice(ODD)
        elif kind == 2:
            part[last] = [old] * draw.choice((1, 2, 50))
        elif kind > 6 and isinstance(old, (int, float)):
            part[last] = old * draw.choice((-1, 0, 2, 3, 7, 1000)) + draw.choice((-1, 0, 1))
        else:
            part[last] = draw.choice(ODD)


def is_refused(action: Callable[[], object]) -> bool:
    """Whether it is refused as a user can understand; anything else but success fails here."""
    try:
        action()
    except Exception as error:
        if shown_error(error) is None:
            raise
        return True
    return False
