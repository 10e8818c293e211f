"""A machine whose pace and data are known, for tests of what `--time` derives from them."""

from __future__ import annotations

import pytest

from specctl.train.planning import amounts, derive
from specctl.train.planning.data_facts import DataFacts
from specctl.train.planning.other_programs import OtherPrograms
from specctl.train.planning.pace import Pace

SMALL_PACE = Pace(once=1.0, answer=0.5, step=0.5, tau=0.1, save=0.1)
SMALL_FACTS = DataFacts(60, 8.0, 8, 8.0, 16, 0.5, 900, 0.95)


def is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other program uses the processors."""
    monkeypatch.setattr(OtherPrograms, "share", lambda counted: 0.0)


def is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle machine of SMALL_PACE with data of SMALL_FACTS, on which deriving takes no time."""
    is_idle(monkeypatch)
    for module in (derive, amounts):
        monkeypatch.setattr(module, "now", lambda: 0.0)
    monkeypatch.setattr(derive, "calibrate", lambda *given, **more: SMALL_PACE)
    monkeypatch.setattr(derive, "look_at_data", lambda *given: SMALL_FACTS)
