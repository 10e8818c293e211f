"""The models that this machine has, and which drafts fit each. No torch, no hub, nothing loaded.

Looked at: the hub's cache (folders with weights, GGUF files, packages), the folders of LM Studio,
Ollama and llama.cpp, published drafters, and packages below ./runs. A place of another program is
a function of `PLACES` that yields models.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from specctl.core.errors import SpecctlError
from specctl.core.storage.gguf_header import read_header
from specctl.core.storage.model_folder import CONFIG, WEIGHTS
from specctl.export.package.manifest import MANIFEST, read_manifest
from specctl.recipes.ollama_store import pulled
from specctl.recipes.published import place_of_name, published_names
from specctl.recipes.targets import KnownShape, ResolvedTarget, aliases, resolve

RUNS = Path("runs")
DEEPEST = 3  # levels below ./runs
SMALLER = 0.5  # a draft has at most this share of its target's bytes or parameters
LONGEST_JSON = 64 << 20  # bytes
PARTS = "-of-"  # NAME-00001-of-00003.gguf


@dataclass(frozen=True, slots=True)
class ModelHere:
    """A model on this disk. `name` as --target takes it; `place` which program keeps it;
    `tokenizer` a digest of its vocabulary ("": not known without reading more); `drafts` that fit
    it."""

    name: str
    place: str
    path: Path
    bytes: int
    model_type: str = ""
    tokenizer: str = ""
    drafts: tuple[str, ...] = ()

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "place": self.place,
            "path": str(self.path),
            "bytes": self.bytes,
            "model_type": self.model_type or None,
            "drafts": list(self.drafts),
        }


@dataclass(frozen=True, slots=True)
class AliasHere:
    """A built-in name: what it stands for, whether it is here, and its `drafts`: packages made for
    it, and other aliases that are small models of its family with as many tokens."""

    name: str
    stands_for: str
    is_here: bool
    note: str
    shape: KnownShape
    drafts: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "stands_for": self.stands_for,
            "is_here": self.is_here,
            "note": self.note,
            "parameters": self.shape.parameters,
            "drafts": list(self.drafts),
        }


@dataclass(frozen=True, slots=True)
class FittingDraft:
    """A draft as --draft takes it: a package made for the target, or a smaller model."""

    name: str
    is_package: bool


def models_here(runs: Path = RUNS) -> list[ModelHere]:
    """Every model of this machine, by name, each with the drafts that fit it: packages made for
    it, and models of at most half its size with its very vocabulary."""
    found = {(one.name, one.path): one for place in PLACES for one in place()}
    models = sorted(found.values(), key=lambda one: (one.place, one.name.lower()))
    packages = [*_packages(runs)]
    return [replace(one, drafts=tuple(_fitting(one, models, packages))) for one in models]


def drafts_for(target: str, runs: Path = RUNS) -> list[FittingDraft]:
    """The drafts that fit one target: packages made for it first, then smaller models, those of a
    built-in name's family whether they are here or not."""
    found, models = resolve(target), models_here(runs)
    names = {target}
    if found.gguf is None:  # else a file beside those that the repository's name means
        names |= {found.place, *(_aliases_of(found.repo) if found.repo else ())}
    packages = [one.name for one in _packages(runs) if one.target in names]
    here = [one.drafts for one in models if one.name in names or str(one.path) in names]
    named = [one.drafts for one in aliases_here(models, runs) if one.name in names]
    every = dict.fromkeys([*packages, *(name for drafts in (*here, *named) for name in drafts)])
    return [FittingDraft(name, name in packages) for name in every]


def can_be_target(model: ModelHere) -> bool:
    """Whether what the files say of themselves is a model that is loaded; of a folder its
    configuration is read when it is loaded."""
    if not model.is_gguf:
        return True
    from specctl.runtime.target.gguf.config import fields_of

    try:
        fields_of(read_header(model.path))
    except SpecctlError:
        return False
    return True


def aliases_here(models: Sequence[ModelHere] = (), runs: Path = RUNS) -> list[AliasHere]:
    """The built-in names, in the order of their file, each with packages made for it and smaller
    names of its family."""
    packages = [*_packages(runs)]
    here = {one.name for one in models}
    known = {name: resolve(name) for name in aliases()}
    shapes = {name: one.shape for name, one in known.items() if one.shape is not None}
    return [
        AliasHere(
            name,
            one.repo or "comes with specctl",
            one.repo is None or one.repo in here or _is_installed(one),
            one.note,
            shapes[name],
            (
                *(package.name for package in packages if package.target in (name, one.repo)),
                *(other for other in shapes if _may_draft(shapes[other], shapes[name])),
            ),
        )
        for name, one in known.items()
        if name in shapes
    ]


def _is_installed(target: ResolvedTarget) -> bool:
    return target.installed is not None and target.installed.path() is not None


def _may_draft(small: KnownShape, large: KnownShape) -> bool:
    is_alike = (small.model_type, small.vocab) == (large.model_type, large.vocab)
    return is_alike and small.parameters <= SMALLER * large.parameters


# -- drafts -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Package:
    name: str
    target: str


def _packages(runs: Path) -> Iterator[_Package]:
    """Published drafters, and packages below a folder and in the hub's cache, with the name of the
    target each is for."""
    places = [(place_of_name(name), name) for name in published_names()]
    places += [(folder, str(folder)) for folder in _below(runs, DEEPEST)]
    places += [(folder, repo) for repo, folder in _snapshots()]
    for folder, name in places:
        if not (folder / MANIFEST).is_file():
            continue
        try:
            yield _Package(name, read_manifest(folder).target.name)
        except (SpecctlError, OSError):
            continue  # a manifest of something else


def _below(folder: Path, deepest: int) -> Iterator[Path]:
    if deepest < 0 or not folder.is_dir():
        return
    yield folder
    for inner in sorted(folder.iterdir()):
        if inner.is_dir() and not inner.is_symlink() and not inner.name.startswith("."):
            yield from _below(inner, deepest - 1)


def _fitting(
    model: ModelHere, models: Sequence[ModelHere], packages: Sequence[_Package]
) -> Iterator[str]:
    names = {model.name, str(model.path), *_aliases_of(model.name)}
    yield from (one.name for one in packages if one.target in names)
    for other in models:
        is_small = other.bytes <= SMALLER * model.bytes
        if model.tokenizer and other.tokenizer == model.tokenizer and is_small:
            yield other.name


def _aliases_of(repo: str) -> list[str]:
    return [name for name in aliases() if resolve(name).repo == repo]


# -- places -----------------------------------------------------------------------------------


def _hub_cache() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "huggingface"
    home = Path(os.environ.get("HF_HOME", home)).expanduser()
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()


def _snapshots() -> Iterator[tuple[str, Path]]:
    """Repositories of models in the hub's cache, with the snapshot that main names, else the
    newest."""
    cache = _hub_cache()
    for folder in sorted(cache.glob("models--*")) if cache.is_dir() else ():
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        main = folder / "refs" / "main"
        commit = main.read_text(encoding="utf-8").strip() if main.is_file() else ""
        named = folder / "snapshots" / commit
        others = [one for one in (folder / "snapshots").glob("*") if one.is_dir()]
        if commit and named.is_dir():
            yield repo, named
        elif others:
            yield repo, max(others, key=lambda one: one.stat().st_mtime)


def _of_hub() -> Iterator[ModelHere]:
    for repo, folder in _snapshots():
        weights = [*folder.glob("*.safetensors")]
        is_model = (folder / CONFIG).is_file() and any((folder / one).is_file() for one in WEIGHTS)
        if is_model and not (folder / MANIFEST).is_file():
            size = sum(one.stat().st_size for one in weights)
            kind = str(_json(folder / CONFIG).get("model_type") or "")
            yield ModelHere(repo, "hub cache", folder, size, kind, _vocabulary(folder))
        yield from _gguf_files("hub cache", folder, folder.rglob("*.gguf"))


def _of_lm_studio() -> Iterator[ModelHere]:
    for home in ("~/.lmstudio/models", "~/.cache/lm-studio/models"):
        folder = Path(home).expanduser()
        yield from _gguf_files("LM Studio", folder, folder.glob("*/*/*.gguf"))


def _of_llama_cpp() -> Iterator[ModelHere]:
    folder = Path(os.environ.get("LLAMA_CACHE", "~/.cache/llama.cpp")).expanduser()
    yield from _gguf_files("llama.cpp", folder, folder.glob("*.gguf"))


def _of_ollama() -> Iterator[ModelHere]:
    for name, file in pulled():
        if file.is_file():
            yield ModelHere(name, "Ollama", file, file.stat().st_size)


def _gguf_files(place: str, folder: Path, files: Iterator[Path]) -> Iterator[ModelHere]:
    """GGUF files that are models: a split one under its first part, with the bytes of all; not the
    vision part that lies beside some."""
    every = sorted(files) if folder.is_dir() else []
    for file in every:
        stem, is_part = file.stem, PARTS in file.stem
        if file.name.startswith("mmproj") or (is_part and f"-00001{PARTS}" not in stem):
            continue
        head = stem.rpartition("-00001")[0]
        parts = [f for f in every if f.parent == file.parent and f.stem.startswith(f"{head}-0")]
        size = sum(one.stat().st_size for one in (parts if is_part else [file]))
        yield ModelHere(str(file), place, file, size)


PLACES: tuple[Callable[[], Iterator[ModelHere]], ...] = (
    _of_hub,
    _of_lm_studio,
    _of_ollama,
    _of_llama_cpp,
)


def _json(file: Path) -> dict[str, Any]:
    """The object in a file; nothing where there is none."""
    try:
        if file.stat().st_size > LONGEST_JSON:
            return {}
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@lru_cache(maxsize=256)
def _vocabulary(folder: Path) -> str:
    """A digest of what tokens a folder's tokenizer has and how it merges them."""
    model = _json(folder / "tokenizer.json").get("model")
    if not isinstance(model, dict) or not model.get("vocab"):
        return ""
    body = json.dumps([model.get("vocab"), model.get("merges")], sort_keys=True)
    return hashlib.sha256(body.encode()).hexdigest()
