"""A slice of every proof of training; `make proof` runs them whole."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """A module of benchmarks/ by name. Nothing is flushed, to be quick: the end of a process does
    not notice. Proofs compute with one thread; the tests after them shall not."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    threads = torch.get_num_threads()
    yield importlib.import_module
    torch.set_num_threads(threads)


def assert_proved(checks: Sequence[Any]) -> None:
    assert checks
    for check in checks:
        assert check.ok, check


def test_a_run_killed_at_random_moments_loses_nothing_it_had_acknowledged(proof: Any) -> None:
    assert_proved(proof("proof_kill").prove(kills=4, seed=1))


def test_a_run_asked_to_stop_saves_leaves_with_75_and_goes_on_as_if_it_had_not(proof: Any) -> None:
    assert_proved(proof("proof_kill").prove(kills=4, seed=2, number=signal.SIGTERM))


def test_a_save_that_fails_at_any_system_call_leaves_the_old_state(proof: Any) -> None:
    assert_proved(proof("proof_faults").prove(("EIO", "ENOSPC"), pairs=False))


def test_two_processes_fail_together_when_a_system_call_of_one_fails(
    proof: Any, tmp_path: Path
) -> None:
    found = proof("proof_faults").fail_on_one_of_two(tmp_path, 1, ("ENOSPC",), 60.0)
    assert len(found) >= 3
    assert set(found) == {None}


@pytest.mark.parametrize("kind", ["prune", "medusa"])
def test_a_run_cut_anywhere_ends_bit_for_bit_as_the_uncut_one(
    proof: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = proof("proof_resume")
    monkeypatch.setattr(module, "STEPS", 18)
    assert_proved(module.prove([kind], cuts=2))


@pytest.mark.proof
def test_every_row_is_read_once_an_epoch_however_a_run_is_divided_and_stopped(proof: Any) -> None:
    assert_proved(proof("proof_order").prove(runs=1, num_shares=200, sizes=(1, 2)))


def test_what_is_not_finite_never_reaches_the_weights(proof: Any) -> None:
    module = proof("proof_nan")
    one_each = {fault.where: fault for fault in module.FAULTS}
    assert set(one_each) == {"loss", "gradient", "input", "teacher", "spike"}
    assert_proved(module.prove([one_each["input"], one_each["teacher"]]))


@pytest.mark.proof
def test_damage_to_any_file_is_found_and_the_run_ends_where_it_would_have(proof: Any) -> None:
    assert_proved(proof("proof_damage").prove(flips=2, pairs=False))


@pytest.mark.proof
def test_a_changed_run_is_refused_by_the_field_that_differs(proof: Any) -> None:
    assert_proved(proof("proof_changed").prove(pairs=False))


@pytest.mark.proof
def test_two_runs_never_share_a_folder(proof: Any) -> None:
    assert_proved(proof("proof_lock").prove(tries=1, races=2))


def test_a_killed_regeneration_answers_every_prompt_once(proof: Any) -> None:
    assert_proved(proof("proof_answers").prove(kills=4, count=24))


@pytest.mark.proof
def test_a_shard_of_features_torn_by_a_kill_is_never_read(proof: Any) -> None:
    assert_proved(proof("proof_shards").prove(kills=2))


def test_a_rename_before_its_flush_would_be_seen(proof: Any, tmp_path: Path) -> None:
    syscalls = proof("syscalls")
    with syscalls.Syscalls(tmp_path).watching() as seen:
        (tmp_path / "new").mkdir()
        descriptor = syscalls.os.open(tmp_path / "new" / "file", syscalls.os.O_RDWR | 64)
        syscalls.os.write(descriptor, b"x")
        syscalls.os.close(descriptor)
        (tmp_path / "new").replace(tmp_path / "done")
    wrong = syscalls.unflushed_renames(seen.calls)
    assert len(wrong) == 3, wrong  # the file, its folder, and the folder above


def test_an_acknowledged_checkpoint_that_is_lost_would_be_seen(proof: Any) -> None:
    module = proof("proof_kill")
    notes = [["1", "a"], ["2", "b"], ["resumed", "1"], ["2", "c"]]
    assert module.wrong_resumes(notes) == ["resumed at 1, 2 was acknowledged"]
    assert module.acknowledged(notes)[2] == {"b", "c"}
    assert not proof("proof_common").Check("few", cases=3, failed=0, need=4).ok
