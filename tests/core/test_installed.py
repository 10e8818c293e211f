"""The name that we are installed by: ours alone, and the one that every hint names."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from specctl.cli.commands.doctor import RED, _namesakes
from specctl.core.messages import installed as distribution

ROOT = Path(__file__).parents[2]
OTHERS = {".git", ".venv", "runs", "build", "dist", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
# What would fetch another project: a requirement or a pip command with the bare name.
ANOTHER = re.compile(
    r"\bspecctl\[(?=[a-z])" r"|\bpip3? install [^`\n&;|]*?(?<![\w/.-])specctl(?![\w-])"
)


def shipped_texts() -> Iterator[tuple[Path, str]]:
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if OTHERS & set(parts) or any(part.endswith(".egg-info") for part in parts):
            continue
        if path.is_file() and path != Path(__file__):
            try:
                yield path, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def install(folder: Path, name: str, starts: str, *files: str) -> None:
    """A distribution of that name in a folder, as pip would leave it."""
    about = folder / f"{name.replace('-', '_')}-0.1.6.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.6\n")
    (about / "entry_points.txt").write_text(f"[console_scripts]\nspecctl={starts}\n")
    (about / "INSTALLER").write_text("pip\n")
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("")
    listed = [*files, *(f"{about.name}/{path.name}" for path in about.iterdir()), "RECORD"]
    listed[-1] = f"{about.name}/RECORD"
    (about / "RECORD").write_text("".join(f"{file},,\n" for file in listed))


FOREIGN = ("specctl", "specctl.specctl:transform", "specctl/__init__.py", "specctl/specctl.py")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All that is installed."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_no_shipped_text_names_another_project() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {hit[0]}"
        for path, text in shipped_texts()
        for hit in ANOTHER.finditer(text)
    ]
    assert not found


def test_what_names_another_project_would_be_seen() -> None:
    for wrong in ("specctl[serve]", "pip install specctl", "pip install --upgrade specctl, or"):
        assert ANOTHER.search(wrong), wrong
    for right in (
        "specctl-toolkit[serve]",
        "pip install specctl-toolkit",
        "pip install /src[serve]",
    ):
        assert not ANOTHER.search(right), right


def test_a_tree_that_was_never_installed_has_the_name_of_its_build(site: Path) -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert distribution.distribution_name() == distribution.NAME == built["name"]
    assert built["scripts"] == {"specctl": distribution.STARTS}
    hints = re.compile(r"""specctl-toolkit\[(\w+)\]|pip_install\(["'](\w+)""")
    named = {a or b for _, text in shipped_texts() for a, b in hints.findall(text)}
    assert {"serve", "grammar"} <= named <= {*built["optional-dependencies"]}


def test_a_hint_has_the_name_that_the_metadata_have(site: Path) -> None:
    install(site, "specctl-of-a-vendor", distribution.STARTS)
    assert distribution.pip_install("serve") == "pip install 'specctl-of-a-vendor[serve]'"
    assert "pip install --upgrade" not in distribution.way_to_newer()  # no index has it


def test_our_own_former_name_is_neither_hinted_at_nor_foreign(site: Path) -> None:
    install(site, "specctl", distribution.STARTS)
    assert distribution.distribution_name() == distribution.NAME
    assert not list(distribution.foreign_distributions())


def test_the_other_project_is_never_hinted_at(site: Path) -> None:
    install(site, *FOREIGN)
    assert distribution.pip_install("data") == f"pip install '{distribution.NAME}[data]'"


def test_doctor_names_the_other_project_and_how_to_mend_it(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not list(_namesakes())
    install(site, *FOREIGN)
    (check,) = _namesakes()
    assert check.state == RED
    assert "specctl 0.1.6 is another project" in check.found
    assert "among ours" not in check.found
    assert check.do.startswith("pip uninstall specctl, ")
    assert f"install {distribution.NAME} again" in check.do
    monkeypatch.setattr("specctl.cli.commands.doctor.HERE", site / "specctl")
    assert "2 of its files lie among ours" in next(_namesakes()).found


@pytest.mark.parametrize("starts", [distribution.STARTS, FOREIGN[1]], ids=["ours", "theirs"])
def test_make_removes_what_was_ours_by_the_former_name_and_nothing_else(
    tmp_path: Path, starts: str
) -> None:
    venv.create(tmp_path / "venv", system_site_packages=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    install(packages, "specctl", starts, "marked.py")
    (tmp_path / "tree").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path / "tree")
    words = ["make", "former", f"VENV={tmp_path / 'venv'}"]
    subprocess.run(words, cwd=tmp_path / "tree", check=True, capture_output=True, timeout=60)
    assert (packages / "marked.py").exists() == (starts != distribution.STARTS)
