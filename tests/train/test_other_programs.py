"""How busy other programs keep the processors."""

from __future__ import annotations

import pytest

from specctl.train.planning import other_programs
from specctl.train.planning.other_programs import OtherPrograms


def test_the_share_of_other_programs_leaves_out_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"_busy_seconds": 10.0, "_own_seconds": 4.0, "_all_seconds": 100.0}
    for name in seconds:
        monkeypatch.setattr(other_programs, name, lambda name=name: seconds[name])
    counted = OtherPrograms(seconds["_busy_seconds"], seconds["_own_seconds"], 100.0)
    assert counted.share() == 0.0
    seconds |= {"_busy_seconds": 17.0, "_own_seconds": 6.0, "_all_seconds": 110.0}
    assert counted.share() == 0.5
    seconds["_own_seconds"] = 11.0
    assert not counted.note()


def test_an_idle_process_counts_what_there_is() -> None:
    counted = OtherPrograms()
    assert counted.all > 0.0
    assert 0.0 <= counted.share() <= 1.0
