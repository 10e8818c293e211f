"""The distribution that this program is installed as, and the commands that install more of it.

On the package index `specctl` is another project, which brings a command and an import package of
the same name. Ours has a name of its own, and is known from others by what its command starts.
"""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions, packages_distributions
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from specctl.core.errors import SpecctlError

NAME = "specctl-toolkit"  # as in pyproject.toml: of a source tree that was never installed
THEIRS = "specctl"  # nothing of ours is installed by this name, though ours once had it
STARTS = "specctl.cli.main:run"


def distribution_name() -> str:
    """What our distribution is called here, by its metadata."""
    ours = (dist.name for dist in distributions() if is_ours(dist) and _key(dist) != THEIRS)
    return next(ours, NAME)


def is_ours(dist: Distribution) -> bool:
    """Whether the command of that distribution starts this program."""
    scripts = dist.entry_points.select(group="console_scripts", name="specctl")
    return any(script.value == STARTS for script in scripts)


def foreign_distributions() -> Iterator[Distribution]:
    """What is installed beside us by the same name, or brings a package of the same name."""
    claim = set(packages_distributions().get("specctl", ()))
    for dist in distributions():
        if (_key(dist) == THEIRS or dist.name in claim) and not is_ours(dist):
            yield dist


def _key(dist: Distribution) -> str:
    """The name as an index compares it; a damaged distribution may have none."""
    return str(dist.name or "").lower()


def pip_install(extra: str) -> str:
    """The command that installs what the features of that extra need."""
    return f"pip install '{distribution_name()}[{extra}]'"


def library(
    name: str, need: str, extra: str, *, instead: str = "", kind: type[SpecctlError] = SpecctlError
) -> Any:
    """The module of that name, which an extra brings; without it an error that says what needs it,
    how it is installed, and what to do `instead`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise kind(
            f"{need} needs the library {package}",
            found="it is not installed" if error.name == package else str(error),
            expected=f"the extra {extra}",
            do=pip_install(extra) + (f", or {instead}" if instead else ""),
        ) from error


def way_to_newer(version: str = "") -> str:
    """How to come by another version of this program: from where this one was installed, since no
    index has it."""
    which = f"specctl {version} or newer" if version else "a newer specctl"
    place = _source()
    if place is None:
        return f"install {which} from where this one came from (a checkout or a wheel)"
    if place.startswith("git+"):
        return f"install {which}: pip install --upgrade '{distribution_name()} @ {place}'"
    return f"install {which}: update the checkout {place}, then pip install {shlex.quote(place)}"


def _source() -> str | None:
    """The checkout or the repository that our distribution was installed from, as its metadata say
    (PEP 610); of a source tree that was never installed, the tree. None where nothing tells."""
    ours = next((dist for dist in distributions() if is_ours(dist) and _key(dist) != THEIRS), None)
    if ours is None:
        tree = Path(__file__).resolve().parents[2]
        return str(tree) if (tree / "pyproject.toml").is_file() else None
    try:
        about = json.loads(ours.read_text("direct_url.json") or "{}")
    except ValueError:
        about = {}
    url = str(about.get("url", ""))
    if "vcs_info" in about:
        return f"git+{url}"
    if "dir_info" in about and url.startswith("file:"):
        return unquote(urlsplit(url).path)
    return None
