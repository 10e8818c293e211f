"""What a package gains when it is published: public names in the place of this machine's, a
licence, the sketch by which its target is known in other numbers, and what was measured with it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.core.errors import FileError, IncompatibleError, RecipeError
from specctl.export.package.card import shown_command
from specctl.recipes.drafter_names import drafter_words
from specctl.recipes.published import NAME, place_of_name
from specctl.recipes.targets import aliases, is_hub_id

if TYPE_CHECKING:
    from specctl.runtime.target.target import Target

MOST = 200_000  # characters of a benchmark's card
STORE = "bfloat16"
PROJECT = "pyproject.toml"  # stands beside the rooms of a checkout
WITHOUT = ("none", "plain")  # mean no drafter where one is named
_ABSOLUTE = re.compile(r"(?<![\w:/.~-])(?:/[\w.+-]+)+/(?=[\w.+-])")
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.-]{0,39}")


@dataclass(frozen=True, slots=True)
class Publication:
    """A published package: its name, the licence of its weights, and a benchmark's card (Markdown,
    empty for none)."""

    name: str
    license: str
    measured: str = ""

    @property
    def place(self) -> Path:
        """Its folder."""
        return place_of_name(self.name)

    def fields(self, about: Mapping[str, Any], target: Target) -> dict[str, Any]:
        """The fields of the manifest that differ from `about`."""
        acceptance = about["acceptance"]
        if acceptance is not None:
            words = tuple(shlex.split(acceptance["command"]))
            acceptance = acceptance | {"command": shown_command(words)}
        notes = [self._use(target.name), *about["notes"]]
        return {
            "license": self.license,
            "target": _public_record(target),
            "command": shlex.split(shown_command(tuple(about["command"]))),
            "acceptance": acceptance,
            "notes": notes + ([_as_part(self.measured)] if self.measured else []),
        }

    def _use(self, target: str) -> str:
        words = ["specctl", "generate", "--target", target, "--draft", self.name, "PROMPT"]
        return f"It comes with specctl under the name `{self.name}`:\n\n    {shlex.join(words)}"


def to_publish(
    name: str, licence: str | None, measured: str | Path | None = None, is_forced: bool = False
) -> Publication:
    """What is published under a name, after every check that needs neither package nor target: the
    name is free or replaced, the licence is one, the card can be read."""
    _check_name(name)
    if licence is None or _LICENCE.fullmatch(licence) is None:
        raise RecipeError(
            "a published drafter names the licence of its weights",
            where="--license",
            found="none" if licence is None else ascii(licence)[:80],
            expected="an identifier in lower case, such as apache-2.0",
            do="--license apache-2.0, if the target's licence and that of the data allow it",
        )
    card = "" if measured is None else _read_measured(Path(measured))
    publication = Publication(name, licence, card)
    _check_place(publication.place, is_forced)
    return publication


def _check_name(name: str) -> None:
    """Refuse a name that means something else."""
    if NAME.fullmatch(name) is None or name in drafter_words().union(WITHOUT):
        raise RecipeError(
            f"no drafter can be published as {name!r}",
            where="--publish",
            found=ascii(name)[:80],
            expected="a name of lower-case letters, digits, dots and dashes that no family, recipe "
            "or target has",
            do="--publish TARGET-FAMILY",
        )


def _check_place(folder: Path, is_forced: bool) -> None:
    """Refuse a folder that is there, unless forced, and one that no checkout has: an installed
    package loses it with its next version."""
    if not (folder.parent.resolve().parent / PROJECT).is_file():
        raise FileError(
            "this specctl is installed, and no checkout: what it publishes would be lost",
            where=str(folder.parent),
            found=f"no {PROJECT} beside it",
            expected="a checkout, installed with pip install -e",
            do="run the command there; --to specctl --store bfloat16 --out FOLDER writes a package",
        )
    if folder.exists() and not is_forced:
        raise FileError(
            f"a drafter is published as {folder.name} already",
            where=str(folder),
            found=folder.name,
            expected="a free name, or --force",
            do=f"--publish {folder.name} --force replaces it",
        )


def check_public(target: Target) -> None:
    """Refuse a target that others cannot name, and one with an adapter of this machine."""
    names = [one.name for one in target.adapters]
    if target.name not in aliases():
        names.insert(0, target.name)
    private = [ascii(name)[:200] for name in names if not is_hub_id(name)]
    if private:
        raise IncompatibleError(
            "a published drafter names its target as everybody can",
            where="--target",
            found=", ".join(private),
            expected="an alias or a hub id",
            do="--target ALIAS (specctl targets lists them)",
        )


def _read_measured(path: Path) -> str:
    """The card of a benchmark, as `specctl bench --card` writes it."""
    try:
        text = path.read_text(encoding="utf-8")
    except ValueError:
        text = ""
    if not text.startswith("# ") or len(text) > MOST:
        raise FileError(
            "this is no card of a benchmark",
            where=str(path),
            found=ascii(text[:60])[1:-1] or "no text",
            expected="Markdown that begins with a title",
            do="specctl bench --target TARGET PACKAGE --suite NAME --card FILE",
        )
    return text


def _public_record(target: Target) -> dict[str, Any]:
    """The target's record under its public name, with its sketch."""
    from specctl.export.package.folder import target_record
    from specctl.runtime.target.likeness import sketch_of

    sketch = sketch_of(target)
    if sketch is None:
        raise IncompatibleError(
            "of this target no sketch can be made",
            where="--target",
            found=f"{target.name} in {target.dtype_name}",
            expected="a target whose norms and embedding are in memory",
            do="--dtype auto, without target.device_map and target.tensor_parallel",
        )
    return target_record(target) | {"sketch": asdict(sketch)}


def _as_part(card: str) -> str:
    """A card as a part of another: titles one level lower, paths of this machine cut."""
    text = re.sub(r"(?m)^#(?=#* )", "##", card.strip())
    return _ABSOLUTE.sub("", text)
