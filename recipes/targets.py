"""Names of targets: an alias of `targets.yaml`, a local folder or GGUF file, a hub id owner/name,
or one of its GGUF files, owner/name:TYPE."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from specctl.core.errors import FileError, SpecctlError, nearest
from specctl.core.storage.gguf_header import is_gguf, models_in
from specctl.core.storage.model_folder import (
    CONFIG,
    PACKAGE,
    has_weights,
    is_adapter_alone,
    is_file_name,
    near_name,
)
from specctl.recipes.built_in import is_built_in
from specctl.recipes.installed_models import InstalledModel
from specctl.recipes.ollama_store import PREFIX, file_of

BRANCH = "main"  # of a repository where no revision is given
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_GGUF = re.compile(rf"(?P<repo>{HUB_ID.pattern}):(?P<type>[A-Za-z0-9][\w.-]*)")


@dataclass(frozen=True, slots=True)
class KnownShape:
    """Sizes of a known target, enough to plan memory and time without its files."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    positions: int
    tied: bool

    @property
    def parameters(self) -> int:
        """Parameters of embedding, head and projections; norms and biases are left out."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        mlp = (2 if self.model_type == "gpt_neox" else 3) * self.intermediate
        embedding = self.vocab * self.hidden * (1 if self.tied else 2)
        return embedding + self.layers * self.hidden * (attention + mlp)


@dataclass(frozen=True, slots=True)
class ResolvedTarget:
    """Where a target's files are: `path` for a folder, `file` for a GGUF file (of one in parts, any
    of them), `repo` and `revision` for the hub, with the type of numbers that its GGUF file
    `gguf` is named after; the others are None. `is_pinned` is False when the revision is a branch
    that may move; `installed` is what a package has in the place of the repository."""

    name: str
    repo: str | None
    revision: str | None
    path: Path | None
    is_pinned: bool = True
    note: str = ""
    shape: KnownShape | None = None
    file: Path | None = None
    gguf: str | None = None
    installed: InstalledModel | None = None

    @property
    def place(self) -> str:
        """The folder, the file or the repository."""
        return str(self.path or self.file or self.repo)


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = (files("specctl.recipes") / "targets.yaml").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return table


def aliases() -> tuple[str, ...]:
    """Every alias, in the order of the file."""
    return tuple(_table())


def resolve(name: str, revision: str | None = None) -> ResolvedTarget:
    """What a target's name means: an alias (built_in.py), a folder, a GGUF file (or a folder with
    one), a model of Ollama, or a hub id. A word that means nothing raises with the nearest."""
    if is_built_in(name, _table(), "target"):
        return _resolve_alias(name, revision)
    path = Path(name).expanduser()
    if not name.strip():
        raise _unknown(name, path)
    if name.startswith(PREFIX) and not path.exists():
        return ResolvedTarget(name, None, revision, None, file=file_of(name))
    if path.is_dir():
        file = gguf_in(path)
        return ResolvedTarget(name, None, revision, path if file is None else None, file=file)
    if path.exists():
        if not is_gguf(path):
            raise _a_file(path)
        return ResolvedTarget(name, None, revision, None, file=path)
    if is_hub_id(name):
        return ResolvedTarget(name, name, revision or BRANCH, None, _is_commit(revision))
    one = HUB_GGUF.fullmatch(name)
    if one is not None and is_on_hub(name):
        return ResolvedTarget(
            name, one["repo"], revision or BRANCH, None, _is_commit(revision), gguf=one["type"]
        )
    raise _unknown(name, path)


def gguf_in(folder: Path) -> Path | None:
    """The GGUF model that a folder without other weights holds; None where it holds none."""
    if has_weights(folder) or is_adapter_alone(folder) or (folder / PACKAGE).is_file():
        return None
    found = models_in(folder)
    if len(found) < 2:
        return found[0] if found else None
    names = [ascii(path.name)[1:-1][:80] for path in found]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    raise FileError(
        "the folder holds several GGUF models",
        found=", ".join(names[:8]) + more,
        expected="one, or the name of one",
        do=f"give the file itself: {found[0]}",
        where=str(folder),
    )


def gguf_at(path: Path) -> Path | None:
    """The GGUF file that is named, or that a folder without other weights holds."""
    if path.is_dir():
        return gguf_in(path)
    return path if path.is_file() and is_gguf(path) else None


def is_gguf_name(name: str) -> bool:
    """Whether a name means a GGUF file that Ollama or the hub has."""
    is_other = name.startswith(PREFIX) or (HUB_GGUF.fullmatch(name) is not None and is_on_hub(name))
    return is_other and not Path(name).expanduser().exists()


def _a_file(path: Path) -> SpecctlError:
    is_model = (path.parent / CONFIG).is_file() or is_adapter_alone(path.parent)
    return FileError(
        "the target is a file, not a folder",
        found=ascii(str(path)),
        expected=f"a folder with {CONFIG}, tokenizer and safetensors weights, or a GGUF file",
        do=f"give the folder: {path.parent}"
        if is_model
        else f"give a folder that holds {CONFIG}, which {path.parent} does not",
    )


def is_hub_id(name: str) -> bool:
    """Whether to look that name up on the hub, OWNER/NAME: it is no place on this machine, nor
    would it be one in `runs`, where every example has its folder."""
    path = Path(name).expanduser()
    is_place = path.exists() or path.parent.is_dir() or path.parent.name == "runs"
    return HUB_ID.fullmatch(name) is not None and not is_place


def is_on_hub(name: str) -> bool:
    """Whether to look that name up on the hub: a repository's, or of one of its GGUF files."""
    one = HUB_GGUF.fullmatch(name)
    is_one = one is not None and not Path(name).expanduser().exists()
    return is_hub_id(one["repo"] if one is not None and is_one else name)


def _resolve_alias(name: str, revision: str | None) -> ResolvedTarget:
    entry = _table()[name]
    shape = KnownShape(**entry["shape"])
    if "path" in entry:
        folder = Path(str(files("specctl.recipes") / entry["path"]))
        return ResolvedTarget(name, None, None, folder, True, entry["note"], shape)
    installed = InstalledModel(**entry["installed"]) if "installed" in entry else None
    if revision is not None:
        installed = None  # a commit of the hub is meant
    revision = revision or entry.get("revision", BRANCH)
    return ResolvedTarget(
        name,
        entry["repo"],
        revision,
        None,
        _is_commit(revision),
        entry["note"],
        shape,
        installed=installed,
    )


def _is_commit(revision: str | None) -> bool:
    return revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision) is not None


def _unknown(name: str, path: Path) -> SpecctlError:
    if "/" in name or name.startswith((".", "~")) or is_file_name(path):
        return FileError(
            "there is no such GGUF file"
            if is_file_name(path)
            else "there is no such target folder",
            found=ascii(name),
            expected="a folder with config.json, tokenizer and safetensors weights, or a GGUF file",
            do=near_name(path) + ", or name another target, such as tiny",
        )
    return SpecctlError(
        "unknown target",
        where="--target, or target.name of the recipe",
        found=ascii(name)[:80],
        expected="an alias, a folder, or a hub id owner/name",
        do=f"nearest aliases: {nearest(name, _table())}; what is here: specctl targets",
    )
