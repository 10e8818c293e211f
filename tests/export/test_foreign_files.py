"""What a user keeps in the folder of a package outlives every replacement of that package."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specctl.core.errors import FileError
from specctl.export.formats import export
from specctl.export.package import atomic
from specctl.export.package.atomic import new_folder
from specctl.export.package.folder import own_files
from specctl.export.package.manifest import MANIFEST, check_files
from specctl.export.package.proof_record import FOLDER, write_record
from specctl.runtime.target.target import Target

FOREIGN = (".env", ".git/HEAD", ".git/objects/ab/cd", f"{FOLDER}/thoughts.md")
WAYS = ("one call", "three renames")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of exchanging two folders."""
    if request.param == WAYS[1]:
        monkeypatch.setattr(atomic, "_renamed", lambda *call: False)
    return str(request.param)


@pytest.fixture
def two(save: Callable[..., Path], make_toy: Callable[..., Any]) -> tuple[Path, Path]:
    """Two packages with other weights."""
    return save(make_toy(seed=1), name="first"), save(make_toy(seed=2), name="second")


def put(folder: Path, names: tuple[str, ...] = FOREIGN) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"mine: {name}")


def lost(folder: Path, names: tuple[str, ...] = FOREIGN) -> list[str]:
    """Of the files that `put` wrote, those that are not in the folder as they were."""
    said = {name: folder / name for name in names}
    return [n for n, p in said.items() if not p.is_file() or p.read_text() != f"mine: {n}"]


def replace_with(package: Path, out: Path, meanwhile: Callable[[], None] = lambda: None) -> None:
    with new_folder(out, own_files) as temp:
        for path in package.iterdir():
            shutil.copyfile(path, temp / path.name)
        meanwhile()


def placed(two: tuple[Path, Path], folder: Path) -> Path:
    """A package in which somebody keeps things."""
    out = folder / "room" / "out"
    shutil.copytree(two[0], out)
    put(out)
    return out


def test_a_second_export_keeps_what_begins_with_a_dot(
    two: tuple[Path, Path], plain_target: Target, tmp_path: Path
) -> None:
    out = tmp_path / "room" / "out"
    export(two[0], "specctl", out, plain_target)
    put(out)
    write_record(out, {}, [("rules", "passed")], ["specctl"])
    manifest = export(two[1], "specctl", out, plain_target)
    assert lost(out) == []
    assert check_files(out).digest == manifest.digest
    assert [p.name for p in (out / FOLDER).iterdir()] == ["thoughts.md"]  # the record was the old's
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_empty_folders_and_links_are_kept_and_links_never_followed(
    two: tuple[Path, Path], tmp_path: Path, way: str
) -> None:
    out, elsewhere = tmp_path / "room" / "out", tmp_path / "elsewhere"
    shutil.copytree(two[0], out)
    elsewhere.mkdir()
    put(elsewhere, ("report.json", "report.md"))
    (out / FOLDER).symlink_to(elsewhere)
    (out / ".empty").mkdir()
    replace_with(two[1], out)
    assert lost(elsewhere, ("report.json", "report.md")) == []
    assert (out / FOLDER).is_symlink()
    assert (out / ".empty").is_dir()


def test_what_comes_while_the_new_folder_is_written_survives(
    two: tuple[Path, Path], tmp_path: Path, way: str
) -> None:
    out = placed(two, tmp_path)
    late = (".later", ".git/index")
    replace_with(two[1], out, lambda: put(out, late))
    assert lost(out, (*FOREIGN, *late)) == []
    assert check_files(out) == check_files(two[1])
    assert [p.name for p in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["notes.txt", "more/notes.txt"])
@pytest.mark.parametrize("is_empty", [False, True])
def test_a_visible_file_that_comes_meanwhile_is_a_refusal(
    two: tuple[Path, Path], tmp_path: Path, way: str, name: str, is_empty: bool
) -> None:
    out = tmp_path / "room" / "out"
    out.mkdir(parents=True) if is_empty else shutil.copytree(two[0], out)
    before = {path.name for path in out.iterdir()}
    with pytest.raises(FileError, match="refused to overwrite"):
        replace_with(two[1], out, lambda: put(out, (name,)))
    assert lost(out, (name,)) == []
    assert {path.name for path in out.iterdir()} == before | {name.split("/")[0]}
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    shutil.rmtree(out / "more", ignore_errors=True)
    (out / "notes.txt").unlink(missing_ok=True)
    replace_with(two[1], out)
    assert check_files(out) == check_files(two[1])


def test_a_folder_that_becomes_a_link_is_left_alone(
    two: tuple[Path, Path], tmp_path: Path, way: str
) -> None:
    out = placed(two, tmp_path)

    def relink() -> None:
        out.rename(tmp_path / "moved")
        out.symlink_to(tmp_path / "moved")

    with pytest.raises(FileError, match="refused to overwrite"):
        replace_with(two[1], out, relink)
    assert out.is_symlink()
    assert lost(tmp_path / "moved") == []
    assert check_files(tmp_path / "moved") == check_files(two[0])


def test_two_of_one_name_both_survive(
    two: tuple[Path, Path], tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody writes .env into the new folder before the old one's gets there."""
    out, clear = placed(two, tmp_path), atomic._clear

    def late(*call: Any) -> None:
        (out / ".env").write_text("newer")
        clear(*call)

    monkeypatch.setattr(atomic, "_clear", late)
    with pytest.raises(FileError, match=r"the new folder stands.*\.env"):
        replace_with(two[1], out)
    assert (out / ".env").read_text() == "newer"
    assert lost(out, FOREIGN[1:]) == []
    [left] = [path for path in out.parent.iterdir() if path != out]
    assert lost(left, (".env",)) == []
    assert check_files(out) == check_files(two[1])


@pytest.mark.parametrize("name", ["../kept.txt", "/kept.txt", "..", "sub/kept.txt"])
def test_a_manifest_that_lists_what_lies_outside_deletes_nothing(
    two: tuple[Path, Path], tmp_path: Path, name: str, reseal: Callable[..., None]
) -> None:
    out = placed(two, tmp_path)
    put(out.parent, ("kept.txt",))
    record = {"sha256": "0" * 64, "bytes": 1}
    reseal(out, lambda body: body["files"].update({name: record}))
    with pytest.raises(FileError, match="refused to overwrite"):
        replace_with(two[1], out)
    assert lost(out.parent, ("kept.txt",)) == []
    assert lost(out) == []


EVENTS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.listdir", "ctypes.dlsym", "open"}


def killed_at(step: int, two: tuple[Path, Path], out: Path) -> bool:
    """Replace the package in a process that is killed before its `step`-th look at the disk;
    False if it came to its end."""
    child = os.fork()
    if child == 0:
        left = step

        def count(event: str, _: Any) -> None:
            nonlocal left
            if event in EVENTS:
                left -= 1
                if left < 0:
                    os._exit(9)

        try:
            with new_folder(out, own_files) as temp:
                for path in two[1].iterdir():
                    shutil.copyfile(path, temp / path.name)
                put(out, (".later",))
                sys.addaudithook(count)
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process is copied")
def test_a_kill_at_any_point_loses_neither_package_nor_anything_foreign(
    two: tuple[Path, Path], tmp_path: Path, way: str
) -> None:
    whole = [check_files(package) for package in two]
    everything = (*FOREIGN, ".later")
    step, cleared = 0, 0
    while True:
        out = placed(two, tmp_path / str(step))
        was_killed = killed_at(step, two, out)
        folders = list(out.parent.iterdir())
        gone = set(everything)
        for folder in folders:
            gone &= set(lost(folder, everything))
        assert not gone, f"kill {step}: lost {gone}"
        standing = [out] if way == WAYS[0] or out.exists() else folders
        assert any((f / MANIFEST).exists() and check_files(f) in whole for f in standing), step
        cleared += len(folders) > 1
        replace_with(two[1], out)
        assert check_files(out) == whole[1]
        assert lost(out, everything) == [], f"kill {step}"
        assert [p.name for p in out.parent.iterdir()] == ["out"], f"kill {step}"
        if not was_killed:
            break
        step += 1
    assert step > 20
    assert cleared > 15
