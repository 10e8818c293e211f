"""Checkpoints: damaged, half-written or unwritable ones never cost the run its last good state."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from specctl.core.errors import (
    Exit,
    FileError,
    IncompatibleError,
    IntegrityError,
    ResourceError,
    SpecctlError,
)
from specctl.core.storage.files import Disk, write_file
from specctl.runtime.measure.reporter import SilentReporter
from specctl.train.loop import TrainProgress, restore, save, take_step, train
from specctl.train.saving.checkpoint import Checkpoints, Snapshot, read_snapshot
from specctl.train.saving.fingerprint import check_same_run
from specctl.train.saving.integrity import damage
from specctl.train.saving.lock import Holder, live_holder, locked
from specctl.train.saving.tensorfile import DTYPES, tensor_chunks
from specctl_testing.train import toy


def snapshot(step: int) -> Snapshot:
    weights = {"w": torch.arange(6.0).view(2, 3) + step, "steps": torch.tensor(step)}
    state = {"adamw/w/exp_avg": torch.full((2, 3), float(step))}
    return Snapshot(
        step, {"model": weights, "optimizer": state}, {"torch": torch.ones(4)}, {"at": step}
    )


def filled(folder: Path, steps: tuple[int, ...] = (1, 2, 3), keep: int = 3) -> Checkpoints:
    found = Checkpoints(folder, SilentReporter(), keep, disk=toy.Unflushed())
    for step in steps:
        found.save(snapshot(step))
    return found


def test_what_is_written_is_what_the_official_reader_reads(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.arange(5).to(d) for i, d in enumerate(DTYPES)}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "view": torch.rand(4, 6).T}
    entry = write_file(Disk(), tmp_path / "f.safetensors", tensor_chunks(tensors))
    assert entry.bytes == (tmp_path / "f.safetensors").stat().st_size
    with safe_open(tmp_path / "f.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)


def test_a_checkpoint_comes_back_bit_for_bit_without_any_pickle(tmp_path: Path) -> None:
    found = filled(tmp_path).newest()
    assert found is not None
    assert found.step == 3
    assert torch.equal(found.tensors["model"]["w"], snapshot(3).tensors["model"]["w"])
    assert found.scalars == {"at": 3}
    assert os.readlink(tmp_path / "latest") == "step000003"
    names = {p.suffix for p in (tmp_path / "step000003").iterdir()}
    assert names == {".safetensors", ".json"}


def damages() -> dict[str, Callable[[Path], None]]:
    def truncate(path: Path) -> None:
        os.truncate(path, path.stat().st_size - 1)

    def empty(path: Path) -> None:
        os.truncate(path, 0)

    def delete(path: Path) -> None:
        path.unlink()

    def grow(path: Path) -> None:
        with path.open("ab") as file:
            file.write(b"\n")

    def flip_at(share: float) -> Callable[[Path], None]:
        def flip(path: Path) -> None:
            body = bytearray(path.read_bytes())
            body[int(share * (len(body) - 1))] ^= 1
            path.write_bytes(body)

        return flip

    flips = {f"flip at {share}": flip_at(share) for share in (0.0, 0.3, 0.5, 0.8, 1.0)}
    return {"truncate": truncate, "empty": empty, "delete": delete, "grow": grow, **flips}


FILES = (
    "manifest.json", "model.safetensors", "optimizer.safetensors", "rng-000.safetensors",
    "state.json",
)  # fmt: skip


@pytest.mark.parametrize("how", damages())
@pytest.mark.parametrize("name", FILES)
def test_every_damage_to_every_file_is_found_and_the_previous_checkpoint_used(
    tmp_path: Path, name: str, how: str
) -> None:
    found = filled(tmp_path)
    assert {p.name for p in found.path(3).iterdir()} == set(FILES)
    damages()[how](found.path(3) / name)
    back = found.newest()
    assert back is not None
    assert back.step == 2
    [warning] = found.reporter.warnings
    assert warning.startswith("skipped checkpoint step000003: ")
    assert len(warning) > len("skipped checkpoint step000003: ") + 5
    assert (tmp_path / "damaged-step000003").exists()
    found.save(snapshot(3))
    assert found.newest().step == 3


def test_a_flip_of_any_single_byte_of_the_manifest_is_found(tmp_path: Path) -> None:
    found = filled(tmp_path, (1,))
    path = found.path(1) / "manifest.json"
    whole = path.read_bytes()
    missed = []
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        if damage(found.path(1), hashes=False) is None:
            missed.append(at)
    assert missed == []


def test_a_run_without_a_whole_checkpoint_stays_refused_until_it_is_allowed_to_restart(
    tmp_path: Path,
) -> None:
    found = filled(tmp_path)
    for step in (1, 2, 3):
        (found.path(step) / "state.json").unlink()
    for _ in range(3):  # asking again changes nothing: not the answer, not the files
        with pytest.raises(IntegrityError, match=r"step000003: state.json is missing.*step000001"):
            found.newest()
        assert found.steps() == [1, 2, 3]
    assert found.newest(restart=True) is None
    assert found.steps() == []
    with pytest.raises(IntegrityError, match="set aside: damaged-step000001") as caught:
        found.newest()  # nothing was saved since
    assert "--allow restart" in caught.value.do
    found.save(snapshot(1))
    assert found.newest().step == 1


def test_what_was_set_aside_is_not_forgotten_when_the_last_whole_checkpoint_goes(
    tmp_path: Path,
) -> None:
    found = filled(tmp_path, (1, 2))
    (found.path(2) / "state.json").unlink()
    assert found.newest().step == 1
    shutil.rmtree(found.path(1))
    with pytest.raises(IntegrityError, match="set aside: damaged-step000002"):
        found.newest()


def test_a_folder_without_checkpoints_is_a_fresh_start_and_leftovers_are_swept(
    tmp_path: Path,
) -> None:
    found = Checkpoints(tmp_path, SilentReporter())
    assert found.newest() is None
    (tmp_path / ".tmp-step000009").mkdir()
    (tmp_path / ".tmp-step000009" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".tmp-latest").symlink_to("step000009")
    assert found.newest() is None
    assert list(tmp_path.iterdir()) == []


def test_retention_keeps_the_newest_two_whole_ones_and_the_pinned(tmp_path: Path) -> None:
    found = Checkpoints(tmp_path, SilentReporter(), keep=1)
    for step in range(1, 7):
        found.save(snapshot(step), pinned=[2])
    assert found.steps() == [2, 5, 6]
    (found.path(6) / "state.json").unlink()
    found.save(snapshot(7), pinned=[2])
    assert found.steps() == [2, 5, 7]  # the damaged one does not count as one of the two


class FailingDisk(Disk):
    """Fails its n-th call with an errno; counts all calls. Flushes nothing, to be quick."""

    def __init__(self, at: int = -1, code: int = errno.EIO) -> None:
        self.at, self.code, self.calls = at, code, []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) - 1 == self.at:
            raise OSError(self.code, os.strerror(self.code))

    def mkdir(self, folder: Path) -> None:
        self._call("mkdir")
        super().mkdir(folder)

    def open(self, path: Path) -> int:
        self._call("open")
        return super().open(path)

    def write(self, descriptor: int, data: memoryview) -> int:
        self._call("write")
        half = max(1, len(data) // 2)  # short writes are legal
        return super().write(descriptor, data[:half])

    def fsync(self, descriptor: int) -> None:
        self._call("fsync")

    def replace(self, source: Path, to: Path) -> None:
        self._call("replace")
        super().replace(source, to)

    def symlink(self, to: str, path: Path) -> None:
        self._call("symlink")
        super().symlink(to, path)


def calls_of_a_save(folder: Path) -> list[str]:
    filled(folder, (1, 2), keep=2)
    disk = FailingDisk()
    Checkpoints(folder, SilentReporter(), 2, disk=disk).save(snapshot(3))
    return disk.calls


def test_a_save_that_fails_at_any_system_call_leaves_the_old_state_loadable(tmp_path: Path) -> None:
    calls = calls_of_a_save(tmp_path / "count")
    points = [
        (at, code) for at in range(len(calls)) for code in (errno.ENOSPC, errno.EIO, errno.EACCES)
    ]
    assert len(points) >= 120
    assert set(calls) == {"mkdir", "open", "write", "fsync", "replace", "symlink"}
    base = tmp_path / "base"
    filled(base, (1, 2), keep=2)
    for at, code in points:
        folder = tmp_path / "run"
        shutil.copytree(base, folder, symlinks=True)
        disk = FailingDisk(at, code)
        with pytest.raises(SpecctlError) as caught:
            Checkpoints(folder, SilentReporter(), 2, disk=disk).save(snapshot(3))
        kind = ResourceError if code == errno.ENOSPC else FileError
        assert isinstance(caught.value, kind), (at, calls[at], code)
        assert str(folder) in caught.value.text()
        assert "bytes" in caught.value.expected
        again = Checkpoints(folder, SilentReporter(), 2, disk=FailingDisk())
        found = again.newest()
        assert found is not None
        assert found.step in (2, 3)
        published = calls.index("replace") < at
        assert found.step == (3 if published else 2), (at, calls[at])
        assert damage(folder / f"step{found.step:06d}") is None
        assert not list(folder.glob(".tmp-*"))
        assert again.reporter.warnings == []
        again.save(snapshot(4))
        shutil.rmtree(folder)


def test_files_are_flushed_before_the_rename_and_the_folder_after_it(tmp_path: Path) -> None:
    calls = calls_of_a_save(tmp_path)
    rename = calls.index("replace")
    assert calls[:rename].count("open") == len(FILES)
    assert calls[:rename].count("fsync") == len(FILES) + 1  # every file, then their folder
    assert calls[rename - 1] == "fsync"
    assert calls[rename + 1 : rename + 4] == ["fsync", "symlink", "replace"]


def test_a_disk_without_room_is_found_before_anything_is_written(tmp_path: Path) -> None:
    class Full(Disk):
        def free(self, folder: Path) -> int:
            return 10

    filled(tmp_path, (1,))
    with pytest.raises(ResourceError) as caught:
        Checkpoints(tmp_path, SilentReporter(), disk=Full()).save(snapshot(2))
    assert caught.value.exit == Exit.RESOURCES == 6
    assert "10 bytes are free" in caught.value.found
    assert "for 72 bytes" in caught.value.expected
    assert Checkpoints(tmp_path, SilentReporter()).steps() == [1]


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_optimizer_state_comes_back_for_every_parameter(tmp_path: Path, optimizer: str) -> None:
    job = toy.make_job(tmp_path, optimizer=optimizer)
    progress = TrainProgress()
    for _ in range(2):
        take_step(job, progress, lambda amount, note="": None)
    save(job, progress)
    fresh = toy.make_job(tmp_path, optimizer=optimizer)
    restore(fresh, read_snapshot(job.checkpoints.path(2)))
    names = {"embed.weight", "mix.weight", "norm.weight", "head.weight"}
    for kind, old in job.optimizers.items():
        new = fresh.optimizers[kind]
        for p, q in zip(old.param_groups[0]["params"], new.param_groups[0]["params"], strict=True):
            assert set(old.state[p]) == set(new.state[q]) != set()
            for key, value in old.state[p].items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(new.state[q][key]))
    stored = read_snapshot(job.checkpoints.path(2)).tensors["optimizer"]
    assert {name.split("/")[1] for name in stored} == names
    if optimizer == "muon":
        assert set(job.optimizers) == {"muon", "adamw"}
        assert "muon/mix.weight/momentum_buffer" in stored


def test_a_state_for_another_drafter_is_refused(tmp_path: Path) -> None:
    job = toy.make_job(tmp_path)
    train(job, TrainProgress())
    found = job.checkpoints.newest()
    moved = dict(found.tensors["optimizer"])
    moved["adamw/stranger/exp_avg"] = moved.pop("adamw/embed.weight/exp_avg")
    bad = Snapshot(found.step, {**found.tensors, "optimizer": moved}, found.own, found.scalars)
    with pytest.raises(IntegrityError, match="stranger"):
        restore(toy.make_job(tmp_path), bad)


def fingerprint() -> dict[str, Any]:
    config = {"train.steps": 10, "drafter.family": "toy"}
    target = {"target": "abc", "tokenizer": "def"}
    return {"config": config, "target": target, "data": "d1", "vocab": None, "world-size": 1}


@pytest.mark.parametrize(
    ("part", "change", "field"),
    [
        ("config", {"train.steps": 20, "drafter.family": "toy"}, "train.steps: 10 -> 20"),
        ("target", {"target": "xyz", "tokenizer": "def"}, "target: abc -> xyz"),
        ("target", {"target": "abc", "tokenizer": "new"}, "tokenizer: def -> new"),
        ("data", "d2", "data: d1 -> d2"),
        ("vocab", "a1" * 32, "vocab: None -> a1a1a1a1a1a1"),
        ("world-size", 2, "world-size: 1 -> 2"),
    ],
)
def test_a_changed_run_is_refused_by_the_field_that_differs(
    part: str, change: Any, field: str
) -> None:
    saved = json.loads(json.dumps(fingerprint()))
    assert check_same_run(saved, fingerprint()) == []
    with pytest.raises(IncompatibleError) as caught:
        check_same_run(saved, fingerprint() | {part: change})
    assert field in caught.value.found
    assert f"--allow {part}" in caught.value.do
    assert check_same_run(saved, fingerprint() | {part: change}, [part]) == [field]


def test_a_second_process_on_the_folder_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    with locked(tmp_path, SilentReporter()):
        with pytest.raises(FileError) as caught, locked(tmp_path, SilentReporter()):
            pass
        assert caught.value.exit == Exit.FILE == 4
        assert str(os.getpid()) in caught.value.found
    with locked(tmp_path, SilentReporter()):
        pass


class Keeping(SilentReporter):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def test_the_lock_of_a_dead_process_is_taken_over_with_a_note(tmp_path: Path) -> None:
    ready, done = os.pipe()
    child = os.fork()
    if child == 0:
        with locked(tmp_path, SilentReporter()):
            os.write(done, b"x")
            os.kill(os.getpid(), 9)
    os.read(ready, 1)
    os.waitpid(child, 0)
    assert live_holder(tmp_path) is None
    keeping, here = Keeping(), socket.gethostname()
    with locked(tmp_path, keeping):
        assert keeping.said == [f"took over the lock of process {child} on {here}, which is gone"]


def test_a_restarted_container_takes_over_the_lock_that_it_left_under_another_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "run.lock").write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    assert live_holder(tmp_path) is None
    keeping = Keeping()
    with locked(tmp_path, keeping):
        assert keeping.said == ["took over the lock of process 1 on elsewhere, which is gone"]


def test_a_lock_that_another_host_still_holds_is_refused_and_names_it(tmp_path: Path) -> None:
    with locked(tmp_path, SilentReporter()):  # a file system that locks for all hosts
        (tmp_path / "run.lock").write_text(json.dumps({"pid": 2**22 + 1, "host": "elsewhere"}))
        assert live_holder(tmp_path) == Holder(2**22 + 1, "elsewhere")
        with pytest.raises(FileError, match="elsewhere"), locked(tmp_path, SilentReporter()):
            pass


def test_looking_at_a_folder_never_makes_a_run_that_begins_there_leave(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    ends = threading.Event()

    def look() -> None:
        while not ends.is_set():
            live_holder(tmp_path)

    watchers = [threading.Thread(target=look) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    try:
        for _ in range(200):
            with locked(tmp_path, SilentReporter()):
                pass
    finally:
        ends.set()
        for watcher in watchers:
            watcher.join()
