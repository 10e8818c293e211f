"""Packages and exports go to the hub whole, in one commit, private unless asked otherwise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from specctl.cli.main import main
from specctl.core.errors import FileError, IntegrityError, NetworkError, RecipeError
from specctl.export.package.manifest import MANIFEST, check_files, read_manifest
from specctl.export.package.proof_record import write_record
from specctl.export.push import plan_push, push
from specctl_testing.export.hub import Hub, Repository, hub

REPO, TOKEN = "me/drafter", "hf_" + "x" * 20


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # git-lfs over HTTP
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield running


def downloaded(repository: Repository, folder: Path) -> Path:
    for name, body in repository.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(body)
    return folder


def test_what_is_pushed_is_the_package_with_card_and_proof(
    package: Path, there: Hub, tmp_path: Path
) -> None:
    write_record(package, {"passed": True}, [("greedy", "equal")], ["specctl", "verify"])
    plan = plan_push(package, REPO)
    assert plan.has_proof
    done = push(plan)
    repository = there.repositories[REPO]
    assert repository.private
    assert repository.commits == 1
    assert done.revision == repository.sha
    got = downloaded(repository, tmp_path / "down")
    assert check_files(got).digest == read_manifest(package).digest
    assert "specctl generate" in repository.files["README.md"].decode()
    assert json.loads(repository.files[".verification/report.json"])["passed"]


def test_nothing_broken_is_pushed(package: Path, there: Hub) -> None:
    plan = plan_push(package, REPO)
    (package / "README.md").write_text("another card")
    for attempt in (lambda: plan_push(package, REPO), lambda: push(plan)):
        with pytest.raises(IntegrityError):
            attempt()
    assert not any("/commit/" in request for request in there.requests)


def test_the_proof_of_another_package_stays_at_home(package: Path, there: Hub) -> None:
    folder = write_record(package, {}, [], ["specctl", "verify"])
    report = json.loads((folder / "report.json").read_text())
    (folder / "report.json").write_text(json.dumps({**report, "package_digest": "0" * 64}))
    assert not any(name.startswith(".") for name in plan_push(package, REPO).files)


def test_a_second_push_replaces_the_first_in_one_commit(package: Path, there: Hub) -> None:
    push(plan_push(package, REPO))
    repository = there.repositories[REPO]
    repository.files["of-an-older-package.json"] = b"{}"
    push(plan_push(package, REPO))
    assert repository.commits == 2
    assert set(repository.files) == {*read_manifest(package).files, MANIFEST}


def test_a_public_or_a_foreign_repository_is_left_alone(package: Path, there: Hub) -> None:
    there.repositories[REPO] = Repository(False)
    with pytest.raises(RecipeError, match="public"):
        push(plan_push(package, REPO))
    there.repositories[REPO] = Repository(True, {"model.bin": b"theirs"})
    with pytest.raises(FileError, match="did not write"):
        push(plan_push(package, REPO))
    assert there.repositories[REPO].commits == 0


def test_a_hub_that_refuses_or_loses_a_file_is_an_error(package: Path, there: Hub) -> None:
    there.loses = MANIFEST
    with pytest.raises(NetworkError, match="does not hold"):
        push(plan_push(package, REPO))
    there.repositories.clear()
    there.refuses = 403
    with pytest.raises(NetworkError) as caught:
        push(plan_push(package, REPO))
    assert "hf auth login" in caught.value.do
    assert TOKEN not in f"{caught.value.found}{caught.value.do}"


@pytest.mark.parametrize("name", ["", "a/b/c", "../x", "me/ drafter", "me/"])
def test_a_wrong_name_is_refused(package: Path, name: str) -> None:
    with pytest.raises(RecipeError, match="name of a repository"):
        plan_push(package, name)


def test_the_command_shows_its_plan_and_asks(
    package: Path, there: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", "--draft", str(package), "--push", REPO]
    assert main(words) != 0  # nobody is there to answer
    told = capsys.readouterr()
    assert "README.md" in told.out
    assert "--yes" in told.err
    assert not there.repositories
    assert main([*words, "--yes", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    done = done.get("result", done)["push"]
    assert done["uploaded"]
    assert done["private"]
    assert done["files"] == sorted(there.repositories[REPO].files)


def test_flags_of_a_push_without_one_are_refused(package: Path, tmp_path: Path) -> None:
    assert main(["export", "--draft", str(package), "--out", str(tmp_path / "o"), "--yes"]) != 0
    assert main(["export", "--draft", str(package)]) != 0
