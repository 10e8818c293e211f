"""Features that a server keeps beside the texts of its traffic: one safetensors file an answer.

    features-NUMBER-TEXT-HASH.safetensors    ids [L], tap-7 [L - 1, D] of layer 7

NUMBER counts up, TEXT is the beginning of the sha256 of the answer's line in the traffic, HASH that
of the whole file: one that a crash or a disk has damaged is none. The tensors are named as those of
features on disk, in bfloat16. The ids are those that the target read and wrote; the last of them
was never read, so it has no state. Letters: D hidden width, L positions.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, int32, tensor

from specctl.core.storage.files import Disk, replace_file
from specctl.core.storage.traffic_files import Writer

SCHEMA = "specctl.kept-features/1"
IDS = "ids"
RECORD_OF_IDS = b'{"input_ids": '  # how the line of `FeatureFile.record` begins
_NAME = re.compile(r"features-([0-9]{8})-([0-9a-f]{16})-([0-9a-f]{32})\.safetensors")
_HALF = re.compile(r"\.features-.*\.tmp")


class PrivateDisk(Disk):
    """Writes files that their owner alone may read."""

    def open(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


@dataclass(frozen=True, slots=True)
class AnswerFeatures:
    """What is kept of one answer: ids of prompt and answer, the number of those of the prompt, and
    the states [L - 1, D] by layer of the target that wrote it."""

    writer: Writer
    ids: tuple[int, ...]
    prompt_len: int
    states: Mapping[int, Tensor]

    def write(self, folder: Path, number: int, line: bytes) -> Path:
        """Beside the line of the answer; whole or not at all. OSError as the system raises it."""
        notes = {
            "schema": SCHEMA,
            "fingerprint": self.writer.fingerprint,
            "tokenizer": self.writer.tokenizer or "",
            "prompt_len": str(self.prompt_len),
        }
        tensors = {f"tap-{layer}": state.contiguous() for layer, state in self.states.items()}
        body = save({IDS: tensor(self.ids, dtype=int32), **tensors}, notes)
        hashed = hashlib.sha256(body).hexdigest()[:32]
        path = folder / f"features-{number:08}-{text_key(line)}-{hashed}.safetensors"
        replace_file(PrivateDisk(), path, body)
        return path


def text_key(line: bytes) -> str:
    """Names a line of the traffic, with or without its end."""
    return hashlib.sha256(line.rstrip(b"\n")).hexdigest()[:16]


def feature_files(folder: Path) -> list[Path]:
    """The files of a folder, the oldest first; links and other files are none."""
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def number_of(path: Path) -> int:
    return int(path.name.split("-")[1])


def key_of(path: Path) -> str:
    """Of the text whose features these are."""
    return path.name.split("-")[2]


def sweep_halves(folder: Path) -> None:
    """Remove what a killed server had not finished. Only while no server writes there."""
    for path in [path for path in folder.iterdir() if _HALF.fullmatch(path.name)]:
        path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class FeatureFile:
    """A whole file, and what it says of itself. States are read as far as they are wanted."""

    path: Path
    fingerprint: str
    tokenizer: str
    ids: tuple[int, ...]
    prompt_len: int
    layers: frozenset[int]

    @classmethod
    def open(cls, path: Path) -> FeatureFile | None:
        """None where the file is gone, damaged, or of another form. All of it is hashed."""
        named = _NAME.fullmatch(path.name)
        try:
            with path.open("rb") as file:
                hashed = hashlib.file_digest(file, "sha256").hexdigest()
            if named is None or hashed[:32] != named[3]:
                return None
            with safe_open(path, framework="pt") as kept:
                notes = kept.metadata() or {}
                if notes.get("schema") != SCHEMA:
                    return None
                ids = tuple(kept.get_tensor(IDS).tolist())
                taps = [name for name in kept.keys() if name != IDS]  # noqa: SIM118
            layers = frozenset(int(name.removeprefix("tap-")) for name in taps)
            about = (notes["fingerprint"], notes["tokenizer"], ids, int(notes["prompt_len"]))
            return cls(path, *about, layers)
        except (OSError, SafetensorError, ValueError, KeyError):
            return None

    def states(self, count: int, layers: Sequence[int]) -> dict[int, Tensor]:
        """[L, D] of each of these layers, at the first `count` tokens, or at all that have one."""
        with safe_open(self.path, framework="pt") as kept:
            return {layer: kept.get_slice(f"tap-{layer}")[:count] for layer in layers}

    def record(self, is_whole: bool) -> bytes:
        """The answer as a line of training data: the very ids. Learned are all of them, or those
        of the answer."""
        first = 0 if is_whole else self.prompt_len
        mask = [int(at >= first) for at in range(len(self.ids))]
        about = {"tokenizer": self.tokenizer} if self.tokenizer else {}
        fields = {"input_ids": self.ids, "loss_mask": mask, **about}
        return json.dumps(fields).encode() + b"\n"


def copy_features(source: Path, to: Path, lines: Sequence[bytes]) -> dict[str, FeatureFile]:
    """The whole files of those lines, linked into a folder of their owner's, where nobody evicts
    them; copied where the file system has no links. By the lines' keys, the newest of each."""
    wanted, found = {text_key(line) for line in lines}, dict[str, FeatureFile]()
    for path in reversed(feature_files(source)):
        key = key_of(path)
        if key not in wanted or key in found:
            continue
        to.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # evicted meanwhile
            kept = FeatureFile.open(linked(path, to / path.name))
            if kept is not None:
                found[key] = kept
    return found


def linked(path: Path, to: Path) -> Path:
    """The same file under another name, or a copy."""
    to.unlink(missing_ok=True)
    try:
        os.link(path, to)
    except FileNotFoundError:
        raise
    except OSError:
        replace_file(PrivateDisk(), to, path.read_bytes())
    return to
