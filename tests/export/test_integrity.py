"""No byte of a package can change unseen."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.core.errors import (
    FileError,
    IncompatibleError,
    IntegrityError,
    ResourceError,
    SpecctlError,
)
from specctl.core.vocab import VocabMap
from specctl.export.package.folder import load_drafter, own_files, save_package
from specctl.export.package.load import load_package
from specctl.export.package.manifest import MANIFEST, WEIGHTS, check_files, read_manifest
from specctl.runtime.target.target import Target


def test_package_gives_back_the_same_drafter(
    make_toy: Any, save: Any, plain_target: Target
) -> None:
    ids = torch.tensor([0, 2, 3, 5, 7, 40])
    drafter = make_toy(VocabMap(ids, plain_target.spec.vocab_size), scale=2)
    loaded = load_drafter(save(drafter), plain_target)
    assert loaded.options == drafter.options
    assert loaded.spec == drafter.spec
    assert loaded.vocab is not None
    assert torch.equal(loaded.vocab.ids_K, ids)
    for name, tensor in drafter.tensors().items():
        assert torch.equal(loaded.tensors()[name], tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_keep_their_dtype_on_disk(
    dtype: torch.dtype, make_toy: Any, save: Any, plain_target: Target
) -> None:
    drafter = make_toy()
    drafter.module.to(dtype)
    folder = save(drafter)
    assert read_manifest(folder).dtype == str(dtype).removeprefix("torch.")
    expected = drafter.tensors()["table.weight"].to(plain_target.dtype)
    assert torch.equal(load_package(folder, plain_target).tensors()["table.weight"], expected)


@pytest.mark.parametrize(("mask", "wanted"), [(0o022, 0o644), (0o077, 0o600)])
def test_whoever_may_enter_a_package_may_read_all_of_it(
    mask: int, wanted: int, make_toy: Any, save: Any
) -> None:
    before = os.umask(mask)
    try:
        folder = save(make_toy())
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert set(modes.values()) == {wanted}, modes


def test_every_flipped_byte_of_the_small_files_is_found(package: Path) -> None:
    flips = 0
    for name in ("README.md", MANIFEST):
        path = package / name
        original = path.read_bytes()
        handle = os.open(path, os.O_WRONLY)
        for at, byte in enumerate(original):
            # 0x2A turns a space into a newline, which JSON would not mind
            for mask in (1 << at % 8, 0x2A) if byte == 0x20 else (1 << at % 8,):
                os.pwrite(handle, bytes([byte ^ mask]), at)
                with pytest.raises((IntegrityError, IncompatibleError)):
                    check_files(package) if name != MANIFEST else read_manifest(path)
                flips += 1
            os.pwrite(handle, bytes([byte]), at)
        os.close(handle)
    check_files(package)
    assert flips > 3_500


def test_flipped_bytes_of_the_weights_are_found(package: Path, plain_target: Target) -> None:
    path = package / WEIGHTS
    original = path.read_bytes()
    header = 8 + int.from_bytes(original[:8], "little")
    draw = random.Random(0)
    places = [*range(header), *(draw.randrange(header, len(original)) for _ in range(200))]
    for at in places:
        changed = bytearray(original)
        changed[at] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(IntegrityError, match="changed after it was written"):
            load_package(package, plain_target)
    path.write_bytes(original)
    load_package(package, plain_target)


@pytest.mark.parametrize("name", [MANIFEST, WEIGHTS, "README.md"])
@pytest.mark.parametrize("damage", ["delete", "truncate", "append", "empty", "zero"])
def test_damaged_files_are_found(package: Path, name: str, damage: str) -> None:
    path = package / name
    body = path.read_bytes()
    if damage == "delete":
        path.unlink()
    else:
        changed = {
            "truncate": body[:-1],
            "append": body + b"\n",
            "empty": b"",
            "zero": bytes(len(body)),
        }
        path.write_bytes(changed[damage])
    with pytest.raises((IntegrityError, FileError)):
        check_files(package)


def test_unlisted_files_are_refused_and_hidden_ones_ignored(package: Path) -> None:
    (package / ".gitattributes").write_text("* text=auto\n")
    check_files(package)
    for name in ("LICENSE", "USE_POLICY.md", "curve.png"):  # as repositories hold them
        (package / name).write_text("any")
    for name in ("figures", "original", "checkpoint-7"):
        (package / name).mkdir()
        (package / name / "a.bin").write_text("not read")
    check_files(package)
    (package / "notes.txt").write_text("mine")
    with pytest.raises(IntegrityError, match=r"does not list.*notes\.txt"):
        check_files(package)


def test_every_missing_or_additional_field_is_named(package: Path) -> None:
    body = json.loads((package / MANIFEST).read_text())
    paths = [(key,) for key in body]
    paths += [(k, inner) for k, v in body.items() if isinstance(v, dict) for inner in v]
    optional = ("options", "files", "serve", "versions")  # open tables, checked elsewhere
    paths = [p for p in paths if len(p) == 1 or p[0] not in optional]
    paths.remove(("target", "dtype"))  # packages of before do not have it
    assert len(paths) > 40
    for path in paths:
        changed = json.loads(json.dumps(body))
        inner = changed
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        (package / MANIFEST).write_text(json.dumps(changed))
        with pytest.raises(IntegrityError) as caught:
            read_manifest(package)
        assert path[-1] in caught.value.text()
    for path in [p for p in paths if len(p) == 1]:
        changed = {**body, "surprise": 1}
        if isinstance(body[path[0]], dict) and path[0] not in optional:
            changed = {**body, path[0]: {**body[path[0]], "surprise": 1}}
        (package / MANIFEST).write_text(json.dumps(changed))
        with pytest.raises(IntegrityError, match="surprise"):
            read_manifest(package)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"null", b"{", b"\xff\xfe", b'{"a":1,"a":2}', b"[" * 200_000, b'{"a":NaN}', b"{}"],
)
def test_a_broken_manifest_is_a_typed_error(package: Path, body: bytes) -> None:
    (package / MANIFEST).write_bytes(body)
    with pytest.raises(IntegrityError):
        read_manifest(package)


def test_reading_a_manifest_needs_no_torch(package: Path) -> None:
    code = (
        "import sys; from specctl.export.package.manifest import check_files; "
        f"m = check_files({str(package)!r}); assert m.family == 'toy'; "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    env = {**os.environ, "PYTHONPATH": "src"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_weights_that_are_not_finite_are_not_packaged(make_toy: Any, save: Any) -> None:
    drafter = make_toy()
    with torch.no_grad():
        drafter.module["table"].weight[1, 1] = torch.nan
    with pytest.raises(IntegrityError, match=r"NaN or Inf in table\.weight"):
        save(drafter)


def test_weights_that_are_not_finite_are_not_loaded(
    package: Path, plain_target: Target, reseal: Callable[..., None]
) -> None:
    path = package / WEIGHTS
    body = bytearray(path.read_bytes())
    body[-4:] = b"\x00\x00\xc0\x7f"
    path.write_bytes(body)
    reseal(package)
    with pytest.raises(IntegrityError, match="not finite"):
        load_package(package, plain_target)


def test_an_older_package_is_replaced_and_a_foreign_folder_is_not(
    make_toy: Any, save: Any, tmp_path: Path, plain_target: Target
) -> None:
    folder = save(make_toy(seed=1))
    save(make_toy(seed=2))
    again = load_package(folder, plain_target).tensors()["table.weight"]
    assert torch.equal(again, make_toy(seed=2).tensors()["table.weight"])
    assert [p.name for p in tmp_path.iterdir()] == ["package"]
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(FileError, match="did not write"):
        save(make_toy())
    assert (folder / "thesis.txt").read_text() == "years of work"
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "data.json").write_text("{}")
    for name in ("foreign", "link", "file"):
        if name == "link":
            (tmp_path / name).symlink_to(foreign)
        if name == "file":
            (tmp_path / name).write_text("text")
        with pytest.raises(FileError, match="did not write"):
            save(make_toy(), name)
    assert [p.name for p in foreign.iterdir()] == ["data.json"]


def _failing(real: Callable[..., Any], at: int, code: int) -> Callable[..., Any]:
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    return call


def _error_of(action: Callable[[], Any]) -> SpecctlError | None:
    try:
        action()
    except SpecctlError as error:
        return error
    return None


@pytest.mark.parametrize("code", [28, 5, 13])
@pytest.mark.parametrize("function", ["os.fsync", "os.open", "os.mkdir", "pathlib.Path.open"])
def test_a_failing_disk_leaves_the_old_package(
    make_toy: Any,
    save: Any,
    plain_target: Target,
    tmp_path: Path,
    code: int,
    function: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save(make_toy(seed=1))
    old = make_toy(seed=1).tensors()["table.weight"]
    for at in range(1, 7):
        with monkeypatch.context() as patch:
            owner, _, name = function.rpartition(".")
            module = {"os": os, "pathlib.Path": Path}[owner]
            patch.setattr(module, name, _failing(getattr(module, name), at, code))
            error = _error_of(lambda: save(make_toy(seed=2)))
        assert error is None or isinstance(error, ResourceError | FileError)
        if error is not None and function in ("os.fsync", "os.mkdir"):
            assert isinstance(error, ResourceError) == (code == 28)
        left = [p for p in tmp_path.iterdir() if p.name != "package"]
        assert all(p.name.startswith(".package.tmp-") for p in left)
        assert not left or function == "os.open"  # which the cleaning up needs as well
        weight = load_package(tmp_path / "package", plain_target).tensors()["table.weight"]
        expected = make_toy(seed=2).tensors()["table.weight"] if error is None else old
        if not torch.equal(weight, expected):  # after the exchange: an fsync, the old manifest read
            assert function != "os.mkdir"
            assert torch.equal(weight, make_toy(seed=2).tensors()["table.weight"])
        save(make_toy(seed=1))


def test_a_full_disk_inside_the_tensor_library_leaves_the_old_package(
    make_toy: Any, save: Any, plain_target: Target
) -> None:
    folder = save(make_toy(seed=1))
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        error = _error_of(lambda: save(make_toy(seed=2)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert isinstance(error, ResourceError)
    assert [p.name for p in folder.parent.iterdir()] == ["package"]
    weight = load_package(folder, plain_target).tensors()["table.weight"]
    assert torch.equal(weight, make_toy(seed=1).tensors()["table.weight"])


def test_leftovers_of_killed_writers_are_swept(make_toy: Any, save: Any, tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale = tmp_path / f".package.tmp-{dead.pid}-0123abcd"
    alive = tmp_path / f".package.tmp-{os.getppid()}-0123abcd"
    other = tmp_path / f".other.tmp-{dead.pid}-0123abcd"
    for folder in (stale, alive, other):
        folder.mkdir()
    save(make_toy())
    assert not stale.exists()
    assert alive.exists()
    assert other.exists()


def test_leftovers_of_a_process_id_that_came_again_are_swept_by_age_and_content(
    make_toy: Any, save: Any, tmp_path: Path
) -> None:
    old = time.time() - 25 * 3600
    recycled = tmp_path / f".package.tmp-{os.getpid()}-0123abcd"
    written = tmp_path / f".package.tmp-{os.getppid()}-1123abcd"
    foreign = tmp_path / f".package.tmp-{os.getppid()}-2123abcd"
    for folder in (recycled, written, foreign):
        folder.mkdir()
        (folder / WEIGHTS).write_bytes(b"half")
    (foreign / ".git").mkdir()
    for path in (recycled / WEIGHTS, foreign / WEIGHTS, foreign / ".git"):
        os.utime(path, (old, old))
    for path in (recycled, written, foreign):
        os.utime(path, (old, old))
    save(make_toy())
    assert not recycled.exists()
    assert written.exists(), "a file in it has just been written"
    assert foreign.exists()


def test_renaming_aside_is_used_where_folders_cannot_be_exchanged(
    make_toy: Any, save: Any, tmp_path: Path, plain_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specctl.export.package.atomic._renamed", lambda *names: False)
    save(make_toy(seed=1))
    folder = save(make_toy(seed=2))
    assert [p.name for p in tmp_path.iterdir()] == ["package"]
    weight = load_package(folder, plain_target).tensors()["table.weight"]
    assert torch.equal(weight, make_toy(seed=2).tensors()["table.weight"])


def test_secrets_stay_out_of_the_manifest(make_toy: Any, save: Any) -> None:
    command = [
        *("specctl", "train-draft", "--hf-token", "hf_abcdefghijklmnop", "--api-key=topsecret"),
        *("hf_qrstuvwxyzabcdef", "--new-tokens", "64", "--max-tokens=9", "--api-key-file", "k.txt"),
    ]
    folder = save(make_toy(), command=command)
    text = (folder / MANIFEST).read_text() + (folder / "README.md").read_text()
    for secret in ("hf_", "topsecret"):
        assert secret not in text
    assert read_manifest(folder).command[-5:] == (
        *("--new-tokens", "64", "--max-tokens=9", "--api-key-file", "k.txt"),
    )


def test_acceptance_must_be_complete(make_toy: Any, save: Any) -> None:
    whole = {"tau": 2.5, "alpha": [0.7, 0.5], "command": "specctl bench", "data": "heldout"}
    folder = save(make_toy(), acceptance=whole)
    recorded = read_manifest(folder).acceptance
    assert recorded is not None
    assert recorded.alpha == (0.7, 0.5)
    for key in whole:
        with pytest.raises(SpecctlError, match=key):
            save(make_toy(), acceptance={k: v for k, v in whole.items() if k != key})
    for bad in ({"tau": 0.5}, {"alpha": [1.5]}, {"tau": float("nan")}, {"more": 1}):
        with pytest.raises(SpecctlError):
            save(make_toy(), acceptance={**whole, **bad})


def test_only_what_the_manifest_lists_is_ours(package: Path, tmp_path: Path) -> None:
    assert set(own_files(package) or ()) >= {path.name for path in package.iterdir()}
    copy = tmp_path / "copy"
    shutil.copytree(package, copy)
    (copy / MANIFEST).unlink()
    assert own_files(copy) is None
    assert own_files(tmp_path / "nothing") is None


def test_save_package_says_what_the_target_was(package: Path, plain_target: Target) -> None:
    manifest = read_manifest(package)
    assert manifest.target.fingerprint == plain_target.fingerprint
    assert manifest.target.revision == plain_target.revision
    assert manifest.taps.indices == (1, 3)
    assert manifest.parameters == plain_target.spec.vocab_size**2
    assert manifest.verification == "lossless"
    assert manifest.model_spec == plain_target.spec
    assert save_package.__doc__
