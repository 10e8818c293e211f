"""The command lines that use a recipe: the one that its first line names, or the one that plans it.
No torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.cli.app.follow_up import command_line, with_text

if TYPE_CHECKING:
    from specctl.recipes.low_rank import JointPart

TAKE_SETS = ("train-draft", "distill", "prune", "adapt", "datastore", "plan", "quickstart")
MAKE_RUNS = ("train-draft", "distill", "datastore")  # with --out they have a default for


def command_of(text: str) -> list[str]:
    """The words of the command in the first line of a recipe; none if it names none."""
    first = text.splitlines()[0] if text else ""
    return shlex.split(first.removeprefix("# specctl")) if first.startswith("# specctl") else []


def uses(
    text: str, name: str, sets: Sequence[str], is_trained: bool, otherwise: list[str]
) -> list[str]:
    """The command of a recipe's first line, for the recipe as it was named and changed; before it
    the one that trains the drafter it starts from, where that is not there. `otherwise`: what is
    used where there is no such line, or what it names takes no changes of a recipe that
    `is_trained`."""
    from specctl.recipes.files import recipe_names

    words = command_of(text)
    if not words or (sets and words[0] not in TAKE_SETS and is_trained):
        return otherwise
    if name not in recipe_names():  # a copy, or a run: its first line names what it was made from
        words = _renamed(words, name)
    if words[0] in TAKE_SETS:
        words += [word for one in sets for word in ("--set", one)]
    drafts = [value for flag, value in pairwise(words) if flag == "--draft"]
    missing = [d for d in drafts if d.startswith("runs/") and not Path(d).exists()]
    return [*map(_training, missing), command_line(*words)]


def planned(name: str, sets: Sequence[str]) -> list[str]:
    """The command that says what a recipe takes."""
    return [
        command_line("plan", "--recipe", name, *(word for one in sets for word in ("--set", one)))
    ]


def drafted(target: str, family: str) -> list[str]:
    """The command that uses what trains nothing: it drafts as it is."""
    return [with_text("generate", "--target", target, "--draft", family, "--compare")]


def trains(family: str, joint: JointPart | None, has_stages: bool) -> bool:
    """Whether a recipe of that family trains anything."""
    from specctl.api.arguments.families import family_infos

    is_joint = joint is not None and joint.alone is not None
    return has_stages or is_joint or family_infos()[family].trainable


def _renamed(words: Sequence[str], name: str) -> list[str]:
    """A command line with another recipe, and in the folder that is usual for it."""
    left = _without(words, "--out", "--recipe")
    takes_recipe = left[0] in (*TAKE_SETS, "vocab-trim")
    out = ["--out", f"runs/{Path(name).stem}"] if "--out" in words else []
    return [*left, *(["--recipe", name, *out] if takes_recipe else [])]


def _training(package: str) -> str:
    """The command that makes runs/NAME/package."""
    folder = Path(package).parent if Path(package).name == "package" else Path(package)
    return command_line("train-draft", "--recipe", folder.name, "--out", folder)


def command_for(name: str, target: str) -> str:
    """The command that uses a recipe which was made for this target, as short as it can be typed:
    a run's folder and the number of GPUs have their defaults, the target is the recipe's."""
    from specctl.recipes.files import shipped
    from specctl.recipes.targets import resolve

    words = command_of(shipped(name).text)
    if "--recipe" in words and words[0] in MAKE_RUNS:
        named = ["--target"] if resolve(target).gguf is None else []
        return command_line(*_without(words, "--out", "--gpus", *named))
    if "--target" in words:
        words[words.index("--target") + 1] = target
    return with_text(*words[:-1]) if words[0] == "generate" else command_line(*words)


def _without(words: Sequence[str], *flags: str) -> list[str]:
    """A command line without these flags and their values."""
    left = list(words)
    for flag in flags:
        if flag in left:
            del left[left.index(flag) : left.index(flag) + 2]
    return left


def new_file(path: Path, force: bool, command: str) -> Path:
    """The path with the ending .yaml; FileError where a file is there, unless it is replaced."""
    from specctl.core.errors import FileError

    if path.suffix not in (".yaml", ".yml"):
        path = path.with_name(path.name + ".yaml")
    if path.exists() and not force:
        raise FileError(
            f"{path} exists already",
            where=str(path),
            found="a file",
            expected="a new path",
            do=f"{command} --force   (replaces it)",
        )
    return path


def write_recipe(path: Path, text: str, force: bool, command: str) -> Path:
    """Write the file of a recipe, whose name ends in .yaml; one that is there only with --force."""
    path = new_file(path, force, command)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def shown_value(value: object) -> str:
    """A value of a recipe, as its YAML says it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
