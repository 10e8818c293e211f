"""Files of a hub repository in the local cache, and what to tell a user when they cannot be had."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from specctl.core.errors import FileError, NetworkError, SpecctlError
from specctl.core.storage.gguf_header import PROJECTOR, SUFFIX, part_names
from specctl.core.storage.hub_access import FLAG, forbidden_by, way_online
from specctl.core.storage.model_folder import has_weights
from specctl.recipes.targets import ResolvedTarget

TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt")


def download(resolved: ResolvedTarget, offline: bool, check: Callable[[Path], object]) -> Path:
    """The folder of a repository in the cache. `check` sees the configuration first, so that a
    refused architecture costs no download of weights."""
    from huggingface_hub import snapshot_download

    assert resolved.repo is not None
    try:
        for patterns in (TEXT_FILES, (*TEXT_FILES, "*.safetensors")):
            folder = Path(
                snapshot_download(
                    repo_id=resolved.repo,
                    revision=resolved.revision,
                    local_files_only=offline,
                    allow_patterns=list(patterns),
                )
            )
            check(folder)
    except SpecctlError:
        raise
    except Exception as error:  # huggingface_hub and its http client raise dozens of kinds
        raise _network_error(resolved, offline, error) from error
    return folder


def with_file(resolved: ResolvedTarget, offline: bool) -> ResolvedTarget:
    """The same; where one of the GGUF files of a repository is meant, with it and its commit,
    fetched where it is not here; where a repository is not here and a package has the model, with
    the package's. Raises NetworkError, and FileError where there is no such file."""
    folder = cached_folder(resolved) if resolved.installed is not None else None
    if resolved.installed is not None and (folder is None or not has_weights(folder)):
        file = resolved.installed.checked()
        return resolved if file is None else replace(resolved, file=file, revision=None)
    if resolved.gguf is None:
        return resolved
    from huggingface_hub import HfApi, snapshot_download

    repo, revision = resolved.repo, resolved.revision
    assert repo is not None
    try:
        if offline or forbidden_by():
            folder = Path(snapshot_download(repo, revision=revision, local_files_only=True))
            names = [path.relative_to(folder).as_posix() for path in folder.rglob(f"*{SUFFIX}")]
            wanted = named_gguf(names, resolved.gguf, repo)
        else:
            names = HfApi().list_repo_files(repo, revision=revision)
            wanted = named_gguf(names, resolved.gguf, repo)
            folder = Path(snapshot_download(repo, revision=revision, allow_patterns=wanted))
    except SpecctlError:
        raise
    except Exception as error:  # huggingface_hub and its http client raise dozens of kinds
        raise _network_error(resolved, offline, error) from error
    return replace(resolved, file=folder / wanted[0], revision=folder.name)


def installed_note(resolved: ResolvedTarget) -> str:
    """What is to be said of a model that came with a package."""
    assert resolved.installed is not None
    return (
        f"{resolved.name} is the GGUF file of the package {resolved.installed.package}, since "
        f"{resolved.repo} is not in the hub's cache: the weights of either are rounded otherwise"
    )


def named_gguf(names: Sequence[str], kind: str, repo: str) -> list[str]:
    """The file of a repository that is named after a type of numbers, such as Q4_K_M: all parts of
    it, the first in front. FileError where none is, or several are."""
    files = sorted(name for name in names if name.lower().endswith(SUFFIX))
    files = [name for name in files if not Path(name).name.lower().startswith(PROJECTOR)]
    word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(kind)}(?![A-Za-z0-9_])", re.IGNORECASE)
    found = [name for name in files if word.search(Path(name).name)]
    models = {(part_names(Path(name).name) or [Path(name).name])[0]: name for name in found}
    if len(models) == 1:
        parts = part_names(Path(found[0]).name) or [Path(found[0]).name]
        return [(Path(found[0]).parent / part).as_posix() for part in parts]
    listed = [Path(name).name for name in (found or files)]
    raise FileError(
        f"{repo} has {'several GGUF files' if found else 'no GGUF file'} of type {kind}",
        found=", ".join(listed[:12]) + (" ..." if len(listed) > 12 else "") or "no GGUF file",
        expected="one whose name has the type behind the colon",
        do=f"--target {repo}:TYPE with a type of these names"
        if files
        else f"--target {repo}, where it has safetensors",
        where=repo,
    )


def cached_folder(resolved: ResolvedTarget) -> Path | None:
    """Where a repository's configuration lies in the local cache; None where it does not."""
    from huggingface_hub import try_to_load_from_cache

    assert resolved.repo is not None
    found = try_to_load_from_cache(resolved.repo, "config.json", revision=resolved.revision)
    return Path(found).parent if isinstance(found, str) else None


def is_local(resolved: ResolvedTarget) -> bool:
    """Whether its weights are on this machine: in a place of their own, in an installed package, or
    as safetensors in the hub's cache."""
    if resolved.repo is None or (resolved.installed is not None and resolved.installed.path()):
        return True
    folder = cached_folder(resolved) if resolved.gguf is None else None
    return folder is not None and has_weights(folder)


def folder_of(resolved: ResolvedTarget, offline: bool = False) -> Path:
    """Where the files of a resolved name lie, fetched where they are not here."""
    return resolved.path or download(resolved, offline, lambda _: None)


def _network_error(resolved: ResolvedTarget, offline: bool, error: Exception) -> NetworkError:
    kind = type(error).__name__
    at = f"{resolved.repo} at {resolved.revision}"
    if kind in ("GatedRepoError", "RepositoryNotFoundError", "RevisionNotFoundError"):
        what = {
            "GatedRepoError": "the hub asks for permission",
            "RepositoryNotFoundError": "the hub has no such repository, or it is private",
            "RevisionNotFoundError": "the repository has no such revision",
        }[kind]
        do = "accept the licence on the model page, then set HF_TOKEN (or run `hf auth login`)"
        if kind == "RevisionNotFoundError":
            do = "give an existing branch, tag or commit with target.revision"
        return NetworkError(what, found=at, do=do)
    forbidden = list(dict.fromkeys([*([FLAG] if offline else []), *forbidden_by()]))
    otherwise = "a local folder with --target ./FOLDER, or --target tiny, which needs no download"
    if resolved.installed is not None:
        otherwise = f"`{resolved.installed.command}`, which brings the model, or {otherwise}"
    if forbidden:
        return NetworkError(
            "the target is not in the local cache, and the hub may not be asked",
            found=f"{at}, with {' and '.join(forbidden)}",
            expected="its files in the cache, or leave to ask the hub",
            do=f"{way_online(forbidden)} and give the same again, or give {otherwise}",
        )
    return NetworkError(
        "the hub cannot be reached",
        found=f"{at}: {kind}: {str(error).splitlines()[0][:120] if str(error) else ''}",
        expected="a network connection, or the files in the cache",
        do=f"check the network and give the same again, or give {otherwise}",
    )
