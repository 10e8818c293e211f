"""The states that a drafter opens, for tests that look into or spy on one inside an engine."""

from __future__ import annotations

from specctl.core.drafter import Drafter, DraftState, Space


def opened_states(drafter: Drafter) -> list[DraftState]:
    """Every state that this drafter opens from now on, filled as it does."""
    states: list[DraftState] = []
    open_state = drafter.open

    def open_and_note(space: Space) -> DraftState:
        states.append(open_state(space))
        return states[-1]

    drafter.open = open_and_note  # type: ignore[method-assign]
    return states
