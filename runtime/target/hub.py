"""Files of a hub repository in the local cache, and what to tell a user when they cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from specctl.core.errors import NetworkError, SpecctlError
from specctl.core.hub_access import FLAG, forbidden_by, way_online
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


def cached_folder(resolved: ResolvedTarget) -> Path | None:
    """Where a repository's configuration lies in the local cache; None where it does not."""
    from huggingface_hub import try_to_load_from_cache

    assert resolved.repo is not None
    found = try_to_load_from_cache(resolved.repo, "config.json", revision=resolved.revision)
    return Path(found).parent if isinstance(found, str) else None


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
            do = "give an existing branch, tag or commit with --revision"
        return NetworkError(what, found=at, do=do)
    forbidden = list(dict.fromkeys([*([FLAG] if offline else []), *forbidden_by()]))
    otherwise = "a local folder with --target ./FOLDER, or --target tiny, which needs no download"
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
