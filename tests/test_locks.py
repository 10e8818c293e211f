"""The locks hold a hash for every version that is pinned, and `make install` installs by them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from specctl.recipes.targets import resolve

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "locks"
ENTRY = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)((?: \\\n {4}--hash=sha256:[0-9a-f]{64})+)$", re.M)
# What `make install` and `make dev` install; torch is a file of its own, see the Makefile.
RUN = ("plots", "data", "tracking", "serve", "grammar", "gguf")
EXTRAS = {"run": RUN, "dev": (*RUN, "tune", "dev")}
BUILT_WITH = {"setuptools"}
CUDA = ("cuda-", "nvidia-", "triton")  # libraries of torch's default build, which it pins itself


def pins(text: str) -> dict[str, str]:
    """Name -> version of the lines name==version."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s\\]+)", text, re.M)
    return {canonicalize_name(name): version for name, version in found}


def locked(name: str) -> dict[str, str]:
    return pins((LOCKS / f"{name}.lock").read_text())


def needed(extras: Iterable[str]) -> set[str]:
    """All distributions behind these extras, as the installed ones say."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    lines += [line for extra in extras for line in project["optional-dependencies"][extra]]
    todo, seen = [Requirement(line) for line in lines], set[str]()
    while todo:
        one = todo.pop()
        key = f"{canonicalize_name(one.name)}{sorted(one.extras)}"
        if key in seen:
            continue
        seen.add(key)
        for line in metadata.requires(one.name) or []:
            asked = Requirement(line)
            marker = asked.marker
            if asked.name.startswith(CUDA):
                continue
            if marker is None or any(marker.evaluate({"extra": e}) for e in ("", *one.extras)):
                todo.append(asked)
    return {key.partition("[")[0] for key in seen}


@pytest.mark.parametrize("name", ["run", "dev", "torch", "real", "trl", "lm-eval"])
def test_every_line_of_a_lock_is_a_version_with_hashes(name: str) -> None:
    text = (LOCKS / f"{name}.lock").read_text()
    entries = ENTRY.findall(text)
    assert len(entries) == len(locked(name)) > 0
    rest = [line for line in ENTRY.sub("", text).splitlines() if line and line[0] != "#"]
    assert rest == []
    for package, _, hashes in entries:
        each = re.findall("[0-9a-f]{64}", hashes)
        assert len(set(each)) == len(each), package


def test_the_locks_pin_what_the_constraints_pin() -> None:
    wanted = pins((ROOT / "constraints.txt").read_text())
    parts = [locked(name) for name in ("run", "dev", "torch")]
    assert sum(map(len, parts)) == len(wanted), "a package is in two locks, or in none"
    assert {k: v for part in parts for k, v in part.items()} == wanted


def test_what_install_needs_is_in_its_lock_and_nothing_else() -> None:
    run, dev, torch = (locked(name).keys() for name in ("run", "dev", "torch"))
    assert set(torch) == {"torch"}
    try:
        others = [name for name, pin in locked("run").items() if metadata.version(name) != pin]
        if others:
            pytest.skip(f"not the environment of the locks: other versions of {', '.join(others)}")
        assert {*run, *torch} == needed(EXTRAS["run"]) | BUILT_WITH
        assert {*run, *dev, *torch} == needed(EXTRAS["dev"]) | BUILT_WITH
    except metadata.PackageNotFoundError as error:
        pytest.skip(f"not installed here: {error}")


def test_the_makefile_installs_by_hash_before_anything_may_resolve() -> None:
    text = (ROOT / "Makefile").read_text()
    [by_hash] = re.findall(r"^HASHED := (.*)$", text, re.M)
    assert {"--require-hashes", "--no-deps"} <= set(by_hash.split())
    places = [
        text.index(f"$(HASHED) $(LATER) -r locks/{name}.lock") for name in ("run", "torch", "dev")
    ]
    assert "$(HASHED) --retries 1 -r locks/real.lock" in text
    installs = {name: text.index(f'-e ".[{",".join(EXTRAS[name])}]"') for name in EXTRAS}
    assert places[0] < places[1] < installs["run"]
    assert places[2] < installs["dev"]
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    [least] = [Requirement(line).specifier for line in build]
    assert least.contains(Version(locked("run")["setuptools"]))
    assert text.count("--no-build-isolation -e") == 3


def test_the_pythons_that_are_claimed_are_those_that_ci_runs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = "Programming Language :: Python :: "
    claimed = [c.removeprefix(name) for c in project["classifiers"] if c.startswith(name)]
    ci = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert claimed == ci["jobs"]["check"]["strategy"]["matrix"]["python"]
    assert project["requires-python"] == f">={claimed[0]}"


def test_no_lock_names_a_place_to_download_from() -> None:
    for path in LOCKS.glob("*.lock"):
        assert not re.search(r"://|--(extra-)?index-url|--find-links", path.read_text()), path


def test_the_real_model_is_the_version_that_its_alias_knows() -> None:
    installed = resolve("smollm2-135m").installed
    assert installed is not None
    assert locked("real") == {installed.package: installed.version}
