"""A proof kept in a package: it changes no digest, and speaks only of that package."""

from __future__ import annotations

import json
from typing import Any

from specctl.export.package.folder import load_drafter, own_files
from specctl.export.package.manifest import check_files
from specctl.export.package.proof_record import FOLDER, PROSE, REPORT, read_record, write_record

BODY = {"level": "lossless", "proof": {"passed": True}}
ROWS = [("rules, exact distribution", "passed  500 cases"), ("cache rollback", "passed  12 rounds")]


def test_a_record_changes_no_digest_and_no_package(
    save: Any, make_toy: Any, plain_target: Any
) -> None:
    package = save(make_toy())
    before = check_files(package)
    folder = write_record(package, BODY, ROWS, ["specctl", "verify", str(package)])
    assert folder == package / FOLDER
    assert check_files(package) == before
    assert own_files(package) is not None
    assert load_drafter(package, plain_target).family == before.family
    found = read_record(package)
    assert found is not None
    assert found["package_digest"] == before.digest
    assert found["proof"] == BODY["proof"]
    prose = (folder / PROSE).read_text()
    assert "| rules, exact distribution | passed 500 cases |" in prose
    assert before.digest in prose


def test_a_record_is_replaced_and_leaves_nothing_behind(save: Any, make_toy: Any) -> None:
    package = save(make_toy())
    for level in ("lossless", "full"):
        write_record(package, {**BODY, "level": level}, ROWS, ["specctl"])
    assert sorted(p.name for p in (package / FOLDER).iterdir()) == sorted([PROSE, REPORT])
    found = read_record(package)
    assert found is not None
    assert found["level"] == "full"


def test_a_record_of_another_package_or_a_broken_one_says_nothing(save: Any, make_toy: Any) -> None:
    package = save(make_toy())
    assert read_record(package) is None
    write_record(package, BODY, ROWS, ["specctl"])
    file = package / FOLDER / REPORT
    body = json.loads(file.read_text())
    file.write_text(json.dumps({**body, "package_digest": "0" * 64}))
    assert read_record(package) is None
    file.write_text("{")
    assert read_record(package) is None


def test_secrets_in_the_command_are_not_kept(save: Any, make_toy: Any) -> None:
    package = save(make_toy())
    write_record(package, BODY, ROWS, ["specctl", "verify", "--token", "hf_abcdefghijkl"])
    kept = "".join(p.read_text() for p in (package / FOLDER).iterdir())
    assert "hf_abcdefghijkl" not in kept
