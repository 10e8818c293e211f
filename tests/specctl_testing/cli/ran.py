"""What a run of the program leaves: its exit code and both streams."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        lines = self.out.splitlines()
        assert len(lines) == 1, f"more than one line on stdout: {self.out!r}"
        answer: dict[str, Any] = json.loads(lines[0])
        return answer


Run = Callable[..., Ran]
