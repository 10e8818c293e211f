"""Upload a package or an export to the Hugging Face hub: whole, in one commit, and read back.

Every byte is checked against the manifest before anything is sent. What is uploaded is the folder
itself, with its card, the commands that serve it (in the card), and the record of its proof where
`specctl verify` left one about this very package. A repository that holds anything which is no
package is left alone; files of an older package in it go in the same commit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.core.errors import FileError, IntegrityError, NetworkError, RecipeError
from specctl.core.storage.hub_access import forbidden_by, way_online
from specctl.export.package.files import open_folder
from specctl.export.package.manifest import CARD, MANIFEST, Manifest, check_files, package_in
from specctl.export.package.proof_record import RECORDS, read_record

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
OF_THE_HUB = (".gitattributes",)


@dataclass(frozen=True, slots=True)
class PushPlan:
    """What will be uploaded: name -> path, to which repository of which hub."""

    repo: str
    folder: Path
    files: dict[str, Path]
    manifest: Manifest
    has_proof: bool
    private: bool
    endpoint: str | None

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files.values())


@dataclass(frozen=True, slots=True)
class Pushed:
    """Where it is now."""

    url: str
    revision: str


def plan_push(
    package: Path | str, repo: str, private: bool = True, endpoint: str | None = None
) -> PushPlan:
    """What a push of `package` (its folder, or that of its run) would upload. Nothing is sent; a
    folder that is not whole raises IntegrityError. `endpoint`: another hub than HF_ENDPOINT's."""
    if not re.fullmatch(f"({NAME}/)?{NAME}", repo):
        raise RecipeError(
            "this is no name of a repository",
            where="--push",
            found=ascii(repo)[:80],
            expected="owner/name, of letters, digits, dots, dashes and underscores",
            do="--push OWNER/NAME",
        )
    folder = open_folder(package_in(Path(package)))
    manifest = check_files(folder)
    if CARD not in manifest.files:
        raise IntegrityError(
            "the folder has no card",
            found=", ".join(sorted(manifest.files))[:120],
            expected=CARD,
            do="export it again",
            where=str(folder),
        )
    has_proof = read_record(folder) is not None
    records = [name for name in RECORDS if has_proof and (folder / name).is_file()]
    files = {name: folder / name for name in (*sorted(manifest.files), MANIFEST, *records)}
    endpoint = endpoint or os.environ.get("HF_ENDPOINT")
    return PushPlan(repo, folder, files, manifest, has_proof, private, endpoint)


def push(plan: PushPlan, token: str | None = None) -> Pushed:
    """Upload what the plan names, and read back that it is there. `token`: else that of the hub's
    own login (HF_TOKEN, hf auth login)."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi(endpoint=plan.endpoint, token=token, library_name="specctl")
    with _hub_errors(plan):
        url = api.create_repo(plan.repo, private=plan.private, exist_ok=True)
        info = api.model_info(url.repo_id)
        there = [sibling.rfilename for sibling in info.siblings or ()]
        _refuse_public(plan, bool(info.private))
        _refuse_foreign(plan, there)
        stale = set(there) - set(plan.files) - set(OF_THE_HUB)
        operations: list[Any] = [CommitOperationDelete(name) for name in sorted(stale)]
        operations += [CommitOperationAdd(name, path) for name, path in plan.files.items()]
        check_files(plan.folder)  # while it was planned, somebody may have written there
        made = api.create_commit(
            url.repo_id,
            operations,
            commit_message=f"{plan.manifest.family} as {plan.manifest.format}",
            commit_description=f"manifest digest {plan.manifest.digest}",
            parent_commit=info.sha,
        )
        found = {
            entry.path: entry.size
            for entry in api.list_repo_tree(url.repo_id, recursive=True, revision=made.oid)
            if hasattr(entry, "size")
        }
    wanted = {name: path.stat().st_size for name, path in plan.files.items()}
    wrong = [name for name, size in wanted.items() if found.get(name) != size]
    if wrong:
        raise NetworkError(
            "the hub does not hold what was sent",
            found=f"{wrong[0]}: {found.get(wrong[0], 'missing')}",
            expected=f"{wanted[wrong[0]]:,} bytes",
            do="push again; the older revision of the repository is unchanged",
            where=plan.repo,
        )
    return Pushed(str(url), str(made.oid))


def _refuse_public(plan: PushPlan, is_private: bool) -> None:
    if plan.private and not is_private:
        raise RecipeError(
            "the repository exists and is public",
            where=plan.repo,
            found="a public repository",
            expected="a private one, unless you say otherwise",
            do="--public, or another name",
        )


def _refuse_foreign(plan: PushPlan, there: list[str]) -> None:
    others = sorted(set(there) - set(OF_THE_HUB))
    if others and MANIFEST not in others:
        raise FileError(
            "the repository holds something that specctl did not write",
            where=plan.repo,
            found=", ".join(others[:5]),
            expected="an empty repository, or one that a package was pushed to",
            do="push to another name",
        )


@contextmanager
def _hub_errors(plan: PushPlan) -> Iterator[None]:
    """Whatever the hub refuses or the network loses, as one error."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except (HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled, OSError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        forbidden = forbidden_by() if status is None else []  # a hub that answers was reached
        raise NetworkError(
            "the hub did not take the package",
            found=str(error).splitlines()[0][:200] if str(error) else type(error).__name__,
            expected="a hub that can be reached, and a token that may write there",
            do=f"{way_online(forbidden)}, then push again"
            if forbidden
            else "hf auth login, with a token that may write"
            if status in (401, 403) or isinstance(error, LocalTokenNotFoundError)
            else "push again; nothing is visible before the whole commit is",
            where=plan.repo,
        ) from error
