"""The file of the compiled step between commands: whole or built again, in a folder of our own."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from specctl.core.storage.cache_folder import cache_folder, check_private, make_private
from specctl.models.native import library as built
from specctl.models.native.kept_step import REMEMBERED, GivenUpError, KeptStep

pytestmark = pytest.mark.skipif(os.name != "posix", reason="a compiler that is a script")


def script(path: Path, body: str) -> str:
    """A compiler whose last argument ($out) is the file to write; its runs are counted in RUNS."""
    path.write_text(f"#!/bin/sh\nfor out; do :; done\necho >> {path.parent}/RUNS\n{body}\n")
    path.chmod(0o755)
    return str(path)


def runs(folder: Path) -> int:
    return len((folder / "RUNS").read_text().splitlines()) if (folder / "RUNS").exists() else 0


@pytest.fixture
def kept(tmp_path: Path) -> KeptStep:
    return KeptStep(tmp_path / "cache" / "native", "key")


@pytest.mark.parametrize("size", [0, 1, 4096, 9_999, 10_001])
def test_a_file_that_is_not_whole_is_built_again(size: int, kept: KeptStep, tmp_path: Path) -> None:
    compiler = script(tmp_path / "c++", 'head -c 10000 /dev/urandom > "$out"')
    path = kept.build([(compiler, "-o")], 10)
    assert kept.find() == path
    os.truncate(path, size)
    assert kept.find() is None
    assert not path.exists()
    again = kept.build([(compiler, "-o")], 10)
    assert kept.find() == again
    assert again.stat().st_size == 10_000
    assert runs(tmp_path) == 2
    assert list(kept.folder.iterdir()) == [again], "nothing half made is left"


def test_a_changed_byte_and_a_pipe_are_not_loaded(kept: KeptStep, tmp_path: Path) -> None:
    path = kept.build([(script(tmp_path / "c++", 'echo code > "$out"'),)], 10)
    path.write_bytes(b"cod_\n")
    assert kept.find() is None
    os.mkfifo(path)
    assert kept.find() is None


def test_a_compiler_that_does_not_end_is_ended_with_all_it_started_and_remembered(
    kept: KeptStep, tmp_path: Path
) -> None:
    body = f"sleep 60 & echo $! > {tmp_path}/CHILD; sleep 60"
    commands = [(script(tmp_path / "c++", body), "-o")]
    began = time.monotonic()
    with pytest.raises(GivenUpError, match=r"more than 0\.5 s") as caught:
        kept.build(commands, 0.5)
    assert time.monotonic() - began < 20
    assert not is_running(int((tmp_path / "CHILD").read_text()))
    (mark,) = kept.folder.iterdir()
    assert str(mark) in str(caught.value), "what is to be removed is named"
    with pytest.raises(GivenUpError, match=r"more than 0\.5 s"):
        kept.build(commands, 0.5)
    assert runs(tmp_path) == 1, "it is not tried again"
    long_ago = time.time() - REMEMBERED - 1
    os.utime(mark, (long_ago, long_ago))
    assert kept.given_up() is None
    script(tmp_path / "c++", 'echo code > "$out"')
    assert kept.build(commands, 10) == kept.find()


def is_running(pid: int) -> bool:
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
            os.kill(pid, 0)
        except (ProcessLookupError, FileNotFoundError):
            return False
        time.sleep(0.02)
    return True


def test_a_build_that_cannot_be_loaded_is_not_made_at_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(built.SWITCH, "1")
    monkeypatch.setattr(built, "COMPILERS", (script(tmp_path / "c++", 'echo code > "$out"'),))
    assert built.is_to_be_built()
    for _ in range(2):
        assert "what it built cannot be loaded" in built.library.__wrapped__().missing
    assert runs(tmp_path) == 1
    assert built.is_given_up()
    assert not built.is_to_be_built()


def test_a_compiler_that_cannot_be_started_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(built.SWITCH, "1")
    broken = tmp_path / "c++"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    monkeypatch.setattr(built, "COMPILERS", (str(broken),))
    assert built.is_to_be_built()
    step = built.library.__wrapped__()
    assert step.functions is None
    assert str(broken) in step.missing


def homeless(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    """A container that runs as a user whom nobody knows."""

    def nobody(*_: object) -> None:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))


def test_without_a_home_it_is_kept_in_a_private_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homeless(monkeypatch, tmp_path)
    tmp_path.chmod(0o1777)
    place = cache_folder("native")
    assert place.parent == tmp_path / f"specctl-{os.getuid()}"
    assert place.parent.stat().st_mode & 0o777 == 0o700
    make_private(place)
    assert cache_folder("native") == place, "the next command finds it"
    monkeypatch.setattr(built, "COMPILERS", ("no-such-compiler",))
    assert "no C++ compiler" in built.library.__wrapped__().missing


def test_a_home_that_cannot_be_written_to_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker gives / as home to a user without an entry."""
    homeless(monkeypatch, tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "access", lambda place, mode: tmp_path not in (place, *place.parents))
    assert cache_folder("costs").parent == tmp_path / f"specctl-{os.getuid()}"


def test_a_temporary_folder_that_somebody_else_prepared_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homeless(monkeypatch, tmp_path)
    place = tmp_path / f"specctl-{os.getuid()}"
    place.mkdir()
    place.chmod(0o777)
    with pytest.raises(PermissionError, match="only you may write to"):
        cache_folder("native")
    step = built.library.__wrapped__()
    assert step.functions is None
    place.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="only you may write to"):
        cache_folder("native")


def test_a_folder_that_others_can_replace_is_refused(tmp_path: Path) -> None:
    shared, place = tmp_path / "shared", tmp_path / "shared" / "specctl" / "native"
    place.mkdir(parents=True)
    place.chmod(0o700)
    shared.chmod(0o777)
    with pytest.raises(PermissionError, match=f"others may write to {shared}"):
        check_private(place)
    with pytest.raises(PermissionError, match=f"others may write to {shared}"):
        make_private(place)
    shared.chmod(0o1777)  # as /tmp: each may move only what is their own
    check_private(place)
    place.chmod(0o720)
    with pytest.raises(PermissionError, match=f"others may write to {place}"):
        check_private(place)
