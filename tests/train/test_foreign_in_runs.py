"""What a user keeps in the folders of a run is never deleted by the run."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from specctl.core.storage.files import Disk, write_whole
from specctl.runtime.measure.reporter import SilentReporter
from specctl.train.data.rows.pack import PackedRows
from specctl.train.data.rows.rows import write_rows
from specctl.train.data.sources.defects import Defects
from specctl.train.features.shards import make_room, sweep
from specctl.train.runs.folders import dispensable, read_run
from specctl.train.saving.checkpoint import Checkpoints, Snapshot
from specctl.train.saving.integrity import drop


def snapshot(step: int) -> Snapshot:
    scalars = {"at": step, "progress": {}}
    return Snapshot(step, {"model": {"w": torch.ones(2)}}, {"torch": torch.ones(1)}, scalars)


def saved(folder: Path, *steps: int) -> Checkpoints:
    found = Checkpoints(folder, SilentReporter())
    for step in steps:
        found.save(snapshot(step))
    return found


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    return path


def test_a_checkpoint_that_goes_leaves_what_a_user_put_into_it(tmp_path: Path) -> None:
    found = saved(tmp_path, 1, 2)
    put(tmp_path / "step000001" / "notes.txt")
    put(tmp_path / "step000001" / ".cache" / "index")
    (tmp_path / "step000001" / "extra.safetensors").symlink_to(put(tmp_path / "elsewhere"))
    found.save(snapshot(3))
    assert found.steps() == [2, 3]
    kept = tmp_path / "kept-step000001"
    names = {path.name for path in kept.iterdir()}
    assert names == {"notes.txt", ".cache", "extra.safetensors"}
    assert (kept / ".cache" / "index").read_text() == "mine"
    assert (tmp_path / "elsewhere").read_text() == "mine"
    assert any("kept-step000001" in warning for warning in found.reporter.warnings)
    assert not list(tmp_path.glob(".tmp-*"))


def test_the_same_step_dropped_twice_keeps_both(tmp_path: Path) -> None:
    for turn in range(2):
        saved(tmp_path, 1)
        put(tmp_path / "step000001" / f"notes-{turn}")
        drop(tmp_path / "step000001")
    kept = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.glob("kept-*/*"))
    assert kept == ["kept-step000001-2/notes-1", "kept-step000001/notes-0"]


def test_only_our_own_leftovers_are_swept(tmp_path: Path) -> None:
    found = saved(tmp_path, 1)
    mine = [put(tmp_path / ".tmp-notes"), put(tmp_path / ".tmp-mine" / "a")]
    half = put(tmp_path / ".tmp-step000009" / "model.safetensors")
    dropped = put(tmp_path / ".tmp-old-step000000" / "notes.txt")
    (tmp_path / ".tmp-latest").symlink_to("step000001")
    assert found.newest() is not None
    assert all(path.read_text() == "mine" for path in mine)
    assert not half.parent.exists()
    assert not dropped.parent.exists()
    assert (tmp_path / "kept-step000000" / "notes.txt").read_text() == "mine"
    assert not os.path.lexists(tmp_path / ".tmp-latest")


def test_a_second_damaged_checkpoint_of_a_step_does_not_delete_the_first(tmp_path: Path) -> None:
    for turn in range(2):
        found = saved(tmp_path, 1, 2) if turn == 0 else saved(tmp_path, 2)
        put(tmp_path / "step000002" / f"notes-{turn}")
        (tmp_path / "step000002" / "state.json").write_text("{}")
        assert found.newest() is not None
    kept = sorted(path.name for path in tmp_path.glob("damaged-*/notes-*"))
    assert kept == ["notes-0", "notes-1"]


def test_what_runs_clean_may_delete_is_named_as_a_run_names_it(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("recipe: {train: {steps: 9}}\n")
    saves = tmp_path / "checkpoints"
    saves.mkdir()
    saved(saves, 1)
    put(saves / ".tmp-mine" / "a")
    put(saves / "damaged-steps-of-mine" / "a")
    ours = [
        put(saves / name / "state.json").parent
        for name in (".tmp-step000002", "damaged-step000003")
    ]
    assert dispensable(read_run(tmp_path)) == ours


def test_rows_that_a_user_put_beside_ours_stay(tmp_path: Path) -> None:
    ids_RS = np.zeros((1, 4), dtype=np.int32)
    rows = PackedRows(ids_RS, ids_RS.astype(bool), ids_RS, ids_RS, ["code"])
    mine = put(tmp_path / "rows-mine.safetensors")
    for digest in ("a" * 64, "b" * 64):
        write_rows(tmp_path, rows, digest, {}, "test", Defects())
    assert mine.read_text() == "mine"
    ours = {path.name for path in tmp_path.glob("rows-*")} - {mine.name}
    assert ours == {f"rows-{'b' * 12}.safetensors"}


def test_shards_that_a_user_named_alike_stay(tmp_path: Path) -> None:
    key = tmp_path / "0123456789ab"
    mine = [put(key / name) for name in ("shard-a.safetensors", ".notes.tmp", "shard-b.json")]
    mine.append(put(key / "shard-b.safetensors"))
    gone = [put(key / name) for name in ("shard-00001.safetensors", ".shard-00002.json.77.tmp")]
    sweep(tmp_path)
    make_room(tmp_path, [key], 1, 0)
    assert all(path.exists() for path in mine)
    assert not any(path.exists() for path in gone)


@pytest.mark.parametrize("name", [".run.yaml.old.tmp", ".run.yaml.1.tmp.tmp", ".runxyaml.7.tmp"])
def test_a_file_named_like_a_half_written_one_stays(tmp_path: Path, name: str) -> None:
    mine, half = put(tmp_path / name), put(tmp_path / ".run.yaml.77.tmp")
    write_whole(Disk(), tmp_path / "run.yaml", b"x")
    assert mine.exists()
    assert not half.exists()
