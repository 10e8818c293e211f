"""Memory that stays with the process: what glibc is asked for, and when it is not."""

from __future__ import annotations

import sys

import pytest
import torch

from specctl.core.device import kept_memory as kept
from specctl.core.device.kept_memory import give_back_gaps, kept_memory

CPU = torch.device("cpu")


class Glibc:
    """Notes what it is asked; keeps no blocks above `most`."""

    def __init__(self, most: int) -> None:
        self.most, self.settings, self.trims = most, dict[int, int](), 0

    def mallopt(self, what: int, value: int) -> int:
        if what == kept.MMAP_THRESHOLD and value > self.most:
            return 0
        self.settings[what] = value
        return 1

    def malloc_trim(self, left: int) -> None:
        self.trims += 1


def given(monkeypatch: pytest.MonkeyPatch, most: int = kept.MOST) -> Glibc:
    for name in kept.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    glibc = Glibc(most)
    monkeypatch.setattr(kept, "_glibc", lambda: glibc)
    return glibc


@pytest.mark.parametrize("most", [kept.MOST, kept.OWN])
def test_blocks_are_kept_inside_and_given_back_behind(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    glibc = given(monkeypatch, most)
    with kept_memory(CPU):
        inside, trims = dict(glibc.settings), glibc.trims
    assert inside == {kept.MMAP_THRESHOLD: most, kept.TRIM_THRESHOLD: kept.MOST}
    assert trims == 0
    assert glibc.settings == {kept.MMAP_THRESHOLD: kept.OWN, kept.TRIM_THRESHOLD: 2 * kept.OWN}
    assert glibc.trims == 1


def test_gaps_are_given_back_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    glibc, clock = given(monkeypatch), [0.0]
    monkeypatch.setattr(kept.time, "monotonic", lambda: clock[0])
    with kept_memory(CPU):
        for seconds, trims in ((1.0, 0), (kept.EVERY, 1), (kept.EVERY + 1.0, 1)):
            clock[0] = seconds
            give_back_gaps()
            assert glibc.trims == trims
    assert glibc.trims == 2  # the last one when it was over
    clock[0] = 9 * kept.EVERY
    give_back_gaps()
    assert glibc.trims == 2


def test_nothing_is_asked_for_a_gpu_or_where_the_user_chose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    glibc = given(monkeypatch)
    with kept_memory(torch.device("cuda")):
        pass
    for name in kept.SETTINGS:
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            with kept_memory(CPU):
                pass
    assert glibc.settings == {}
    assert glibc.trims == 0


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert kept._glibc() is None
