"""Files made to hurt are refused with typed errors, before any library parses them."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import random
import resource
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from specctl.core.errors import FileError, IntegrityError, SpecctlError
from specctl.drafters import families
from specctl.export.package.files import check_name, list_files, read_header
from specctl.export.package.folder import load_drafter
from specctl.export.package.load import load_package
from specctl.export.package.manifest import MANIFEST, WEIGHTS, check_files
from specctl.runtime.target.folders.checkpoint_folder import refuse_code
from specctl.runtime.target.target import Target

GOOD = save({"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4), "c": torch.ones(5).half()})


def pack(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


EIGHT = bytes(8)
HEADERS: dict[str, bytes] = {
    "empty file": b"",
    "seven bytes": bytes(7),
    "no header": bytes(8),
    "length beyond the file": pack({}, length=1 << 20),
    "length of 10 GB": pack({}, length=10 << 30),
    "length of 2^64 - 1": pack({}, length=(1 << 64) - 1),
    "a pickle": pickle.dumps({"a": 1}),
    "not JSON": pack(b"{nonsense}"),
    "not UTF-8": pack(b'{"\xff": 1}'),
    "a list": pack([]),
    "a number": pack(b"12345678"),
    "nested deeply": pack(b"[" * 100_000 + b"]" * 100_000),
    "key written twice": pack(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        EIGHT,
    ),
    "entry is a number": pack({"a": 1}, EIGHT),
    "no dtype": pack({"a": {"shape": [2], "data_offsets": [0, 8]}}, EIGHT),
    "no shape": pack({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, EIGHT),
    "no offsets": pack({"a": {"dtype": "F32", "shape": [2]}}, EIGHT),
    "additional key": pack({"a": {**entry()["a"], "code": "import os"}}, EIGHT),
    "unknown dtype": pack(entry("F33"), EIGHT),
    "dtype is a list": pack(entry(["F32"]), EIGHT),
    "shape is a number": pack(entry(shape=2), EIGHT),
    "negative shape": pack(entry(shape=[-2]), EIGHT),
    "boolean shape": pack(entry(shape=[True, 2]), EIGHT),
    "fractional shape": pack(entry(shape=[2.0]), EIGHT),
    "huge shape": pack(entry(shape=[1 << 60, 1 << 60]), EIGHT),
    "product of huge shapes": pack(entry(shape=[(1 << 47)] * 8), EIGHT),
    "nine dimensions": pack(entry(shape=[1] * 8 + [2]), EIGHT),
    "huge number": pack(
        b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}'
    ),
    "reversed offsets": pack(entry(offsets=[8, 0]), EIGHT),
    "negative offsets": pack(entry(offsets=[-8, 0]), EIGHT),
    "one offset": pack(entry(offsets=[8]), EIGHT),
    "three offsets": pack(entry(offsets=[0, 4, 8]), EIGHT),
    "offsets beyond the data": pack(entry(offsets=[0, 8]), bytes(4)),
    "claim of 10 GB": pack(entry("U8", [10 << 30], [0, 10 << 30]), EIGHT),
    "shape smaller than offsets": pack(entry(shape=[1]), EIGHT),
    "gap in front": pack(entry(offsets=[8, 16]), bytes(16)),
    "rest behind": pack(entry(), bytes(9)),
    "overlap": pack({**entry(), "b": entry()["a"]}, EIGHT),
    "metadata is a list": pack({"__metadata__": [], **entry()}, EIGHT),
    "metadata holds an object": pack({"__metadata__": {"a": {}}, **entry()}, EIGHT),
    "NaN in the header": pack(b'{"a": NaN}', EIGHT),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_bad_safetensors_header_is_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / WEIGHTS
    path.write_bytes(HEADERS[case])
    with pytest.raises(IntegrityError, match="header is not valid") as caught:
        read_header(path)
    assert caught.value.where == WEIGHTS


def _mutated(draw: random.Random) -> bytes:
    """A good file with a few changes of its header, length or data."""
    body = bytearray(GOOD)
    header = 8 + int.from_bytes(GOOD[:8], "little")
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(min(header, len(body)) or 1) if body else 0
        kind = draw.randrange(7)
        if kind == 0 and body:
            body[at] = draw.randrange(256)
        elif kind == 1:
            del body[at : at + draw.randint(1, 12)]
        elif kind == 2:
            body[at:at] = bytes(draw.randrange(256) for _ in range(draw.randint(1, 12)))
        elif kind == 3:
            body[:8] = draw.choice([0, 2**63, 2**32, len(body), 1]).to_bytes(8, "little")
        elif kind == 4:
            body[at:at] = draw.choice([b"[" * 500, b'"', b"}", b"9" * 30, b"-1", b"1e9", b"null"])
        elif kind == 5:
            del body[draw.randrange(len(body) + 1) :]
        else:
            body += bytes(draw.randint(1, 64))
    return bytes(body)


def test_a_thousand_fuzzed_files_give_typed_errors_and_little_memory(tmp_path: Path) -> None:
    draw, path, refused = random.Random(1), tmp_path / WEIGHTS, 0
    tracemalloc.start()
    for _ in range(1000):
        body = _mutated(draw)
        path.write_bytes(body)
        tracemalloc.reset_peak()
        try:
            read_header(path)
        except IntegrityError:
            refused += 1
        else:
            load_file(path)  # whatever we accept, the library accepts as well
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()
    assert refused > 750


def test_a_package_of_fuzzed_weights_is_refused_even_when_sealed(
    package: Path, plain_target: Target, reseal: Any
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in sorted(HEADERS):
        (package / WEIGHTS).write_bytes(HEADERS[case])
        reseal(package)
        with pytest.raises(SpecctlError):
            load_package(package, plain_target)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes


NAMES = [
    "..", ".", "", "../x", "../../etc/passwd", "/etc/passwd", "a/b", "a\\b", "..\\x", "C:\\x",
    "C:x", "\\\\server\\share\\x", "//server/x", "x\x00.json", "x\n.json", "x\r", "x\t", " x", "x ",
    "x.", ".hidden", "-x", "con", "CON.json", "nul.safetensors", "aux", "PRN.md", "com1.json",
    "LPT9", "x:stream", "x*", "x?", "x|y", "x<y", 'x"y', "~", "~root", "$HOME", "%TEMP%", "x;y",
    "\u202egnp.exe", "mod\u0435l.json", "\uff0e\uff0e\uff0fx", "e\u0301.json", "\U0001f600.json",
    "a" * 300, "x.pkl", "x.bin", "x.PT", "x.pth", "x.ckpt", "x.pickle", "x.joblib", "x.npz",
    "x.zip", "x.tar", "x.tar.gz", "x.py", "x.so", "x.sh", "x.nemo", "x.whl", "file://x", "http://x",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_a_hostile_name_is_refused_in_a_manifest(name: str, package: Path, reseal: Any) -> None:
    with pytest.raises(IntegrityError, match="refused file name"):
        check_name(name)
    record = {"sha256": "0" * 64, "bytes": 1}
    reseal(package, lambda body: body["files"].__setitem__(name, record))
    with pytest.raises(IntegrityError, match="refused file name"):
        check_files(package)


def test_names_that_differ_only_in_case_are_refused(package: Path, reseal: Any) -> None:
    for name in ("readme.MD", "Manifest.json"):
        (package / name).write_text("x")
        reseal(package, lambda body, name=name: body["files"].__setitem__(name, _record(b"x")))
        with pytest.raises(IntegrityError, match="only in case"):
            check_files(package)
        (package / name).unlink()
        reseal_without(package, name, reseal)


def _record(body: bytes) -> dict[str, Any]:
    import hashlib

    return {"sha256": hashlib.sha256(body).hexdigest(), "bytes": len(body)}


def reseal_without(package: Path, name: str, reseal: Any) -> None:
    (package / name).write_text("x")
    reseal(package, lambda body: body["files"].pop(name))
    (package / name).unlink()


class Bomb:
    """A pickle that leaves a mark where it is loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


SUFFIXES = [
    ".bin",
    ".pt",
    ".pth",
    ".pkl",
    ".ckpt",
    ".safetensors",
    ".json",
    ".md",
    ".txt",
    ".model",
]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_pickle_bomb_never_goes_off(
    suffix: str, package: Path, plain_target: Target, tmp_path: Path, reseal: Any
) -> None:
    canary = tmp_path / "canary"
    bomb = pickle.dumps(Bomb(canary))
    torch_zip = io.BytesIO()
    with zipfile.ZipFile(torch_zip, "w") as archive:
        archive.writestr("archive/data.pkl", bomb)
    own = {".safetensors": WEIGHTS, ".json": "config.json", ".md": "README.md"}
    for body in (bomb, torch_zip.getvalue()):
        (package / own.get(suffix, f"pytorch_model{suffix}")).write_bytes(body)
        with pytest.raises(SpecctlError):
            load_drafter(package, plain_target)
        hostile = package.parent / "hostile"
        hostile.mkdir(exist_ok=True)
        (hostile / "config.json").write_text('{"model_type": "llama", "vocab_size": 48}')
        (hostile / own.get(suffix, f"pytorch_model{suffix}")).write_bytes(body)
        with pytest.raises(SpecctlError):
            load_drafter(hostile, plain_target)
    assert not canary.exists()
    pickle.loads(bomb)
    assert canary.exists()


@pytest.mark.parametrize("kind", ["link out", "link in", "dangling", "folder", "pipe"])
def test_only_regular_files_are_read(kind: str, package: Path, plain_target: Target) -> None:
    path = package / "README.md"
    body = path.read_bytes()
    path.unlink()
    elsewhere = package.parent / "elsewhere"
    elsewhere.write_bytes(body)
    if kind == "link out":
        path.symlink_to(elsewhere)
    elif kind == "link in":
        path.symlink_to(package / WEIGHTS)
    elif kind == "dangling":
        path.symlink_to(package / "nothing")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(IntegrityError, match=r"symbolic link|regular file"):
        load_package(package, plain_target)


def test_a_linked_manifest_is_refused(package: Path, plain_target: Target) -> None:
    moved = package.parent / MANIFEST
    (package / MANIFEST).rename(moved)
    (package / MANIFEST).symlink_to(moved)
    with pytest.raises(SpecctlError):
        load_drafter(package, plain_target)


def test_the_hub_caches_own_links_are_followed(package: Path, plain_target: Target) -> None:
    repo = package.parent / "models--some--draft"
    snapshot, blobs = repo / "snapshots" / "0123abc", repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in package.iterdir():
        path.rename(blobs / f"blob-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob-{path.name}")
    assert load_drafter(snapshot, plain_target).family == "toy"
    (snapshot / "README.md").unlink()
    (snapshot / "README.md").symlink_to("/etc/hostname")
    with pytest.raises(IntegrityError, match="symbolic link"):
        list_files(snapshot)


@pytest.mark.parametrize("name", ["package.zip", "package.tar.gz", "model.safetensors"])
def test_files_and_archives_are_not_packages(
    name: str, plain_target: Target, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(IntegrityError, match="a folder, not a file"):
        load_drafter(path, plain_target)
    with pytest.raises(FileError, match="no such package folder"):
        load_drafter(tmp_path / "missing" / name, plain_target)


@pytest.mark.parametrize(
    "body",
    [
        {"auto_map": {"AutoModelForCausalLM": "evil.Model"}},
        {"auto_map": {"AutoConfig": "someone/else--config.C"}},
        {"text_config": {"auto_map": {"AutoModel": "x.Y"}}},
        {"sub": [{"deep": [{"auto_map": {"": "config.E"}}]}]},
        {"custom_pipelines": {"x": {"impl": "evil.P"}}},
        {"trust_remote_code": True},
        {"custom_code": "print(1)"},
    ],
)
def test_code_named_by_a_config_is_refused(body: Any, plain_target: Target, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="its own code"):
        refuse_code(body, "config.json")
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(GOOD)
    canary = tmp_path / "canary"
    for name in ("evil", "config", "x"):
        (folder / f"{name}.py").write_text(f"open({str(canary)!r}, 'w')")
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 48}')
        (folder / name).write_text(json.dumps({"model_type": "llama", "vocab_size": 48, **body}))
        with pytest.raises(IntegrityError, match="its own code"):
            load_drafter(folder, plain_target)
        (folder / name).unlink()
    assert not canary.exists()


def test_options_cannot_ask_for_memory(plain_target: Target, save: Any, reseal: Any) -> None:
    family = families()["small-lm"]
    options = family.options(layers=1, width=16, head_dim=8)
    folder = save(family.build(options, plain_target.spec, None))
    for name in ("width", "intermediate", "head_dim"):
        reseal(folder, lambda body, name=name: body["options"].__setitem__(name, 1 << 40))
        with pytest.raises(SpecctlError):
            load_package(folder, plain_target)
        reseal(folder, lambda body: body["options"].update(options_json(options)))
    load_package(folder, plain_target)


def options_json(options: Any) -> dict[str, Any]:
    return dataclasses.asdict(options)
