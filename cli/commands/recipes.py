"""`specctl recipes`: list, show, copy and check recipes. No torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.cli.app.command import command_group
from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line, with_text
from specctl.cli.options.flags import Sets
from specctl.cli.options.names import complete_family, complete_recipe, complete_target

if TYPE_CHECKING:
    from specctl.recipes.load import RecipeInfo
    from specctl.recipes.schema import Recipe

Name = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe's name, or a YAML file.",
        autocompletion=complete_recipe,
    ),
]
TAKE_SETS = ("train-draft", "distill", "prune", "adapt", "datastore", "plan", "quickstart")
DEFAULTS = ("default", "base")  # origins of values that a recipe leaves alone
RECOMMENDED = (
    "quickstart",
    "auto",
    "distill",
    "eagle3",
)  # to begin with; docs/choosing.md says why


def ls(
    console: Console,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            help="Only those for this target.",
            autocompletion=complete_target,
        ),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option("--family", help="Only those of this family.", autocompletion=complete_family),
    ] = None,
    search: Annotated[
        str | None,
        typer.Option("--search", "-s", help="Only those with this word in name, summary or paper."),
    ] = None,
) -> None:
    """List the recipes that come with specctl, by purpose.

    The groups: recommended, trained (for the embedded target), no training, for real targets.

    Examples:

      specctl recipes ls --target qwen3-8b
      specctl recipes ls --family eagle3 --search vocabulary
    """
    from specctl.api.families import family_infos
    from specctl.core.errors import unknown
    from specctl.recipes.load import EMBEDDED, list_recipes

    infos = sorted(list_recipes(), key=lambda i: (i.target != EMBEDDED, i.target, i.name))
    if target is not None:
        known = dict.fromkeys(info.target for info in infos)
        if target not in known:
            raise unknown("target of a recipe", target, known, "--target")
        infos = [info for info in infos if info.target == target]
    if family is not None:
        if family not in family_infos():
            raise unknown("drafter family", family, family_infos(), "--family")
        infos = [info for info in infos if info.family == family]
    if search is not None:
        infos = [i for i in infos if search.lower() in f"{i.name} {i.summary} {i.paper}".lower()]
    trained = {name for name, info in family_infos().items() if info.trainable}
    groups: dict[str, list[RecipeInfo]] = {name: [] for name in GROUPS}
    for info in infos:
        groups[_group(info, trained)].append(info)
    for title, found in groups.items():
        if found:
            targets = {info.target for info in found}
            several = len(targets) > 1  # else the title names it
            columns = ["recipe", "family", *(["target"] if several else []), "what"]
            rows = [
                [i.name, i.family, *([i.target] if several else []), _first_sentence(i.summary)]
                for i in found
            ]
            about = "" if several else f", target {targets.pop()}"
            console.table(columns, rows, title=f"{title}{about}:")
            console.out()
    if not infos:
        console.out("no recipe is like that")
    fields = ("name", "family", "target", "summary", "paper")
    console.done(
        {
            "recipes": [
                {**{f: getattr(i, f) for f in fields}, "group": title}
                for title, found in groups.items()
                for i in found
            ]
        },
        next=[f"specctl recipes show {next(i for g in groups.values() for i in g).name}"]
        if infos
        else ["specctl recipes ls"],
    )


GROUPS = ("recommended", "trained", "no training", "for real targets")


def _group(info: RecipeInfo, trained: set[str]) -> str:
    from specctl.recipes.load import EMBEDDED

    if info.name in RECOMMENDED:
        return "recommended"
    if info.target != EMBEDDED:
        return "for real targets"
    return "trained" if info.is_joint or info.family in trained else "no training"


def show(
    console: Console,
    name: Name,
    set_: Sets = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Also show values at their defaults.")
    ] = False,
) -> None:
    """Explain a recipe: what it does, its paper, and what differs from the defaults.

    Each value is shown with its source: a recipe or a flag and, in recipes for real
    targets, the paper or trainer that it was taken from.

    Examples:

      specctl recipes show eagle3
      specctl recipes show eagle3 --all --set train.steps=100
    """
    from specctl.recipes.lineage import lineage
    from specctl.recipes.load import load_recipe
    from specctl.recipes.made_for import advice
    from specctl.recipes.notes import named_sources, notes_of_recipe
    from specctl.recipes.section import flatten
    from specctl.recipes.whole import whole_text

    recipe = load_recipe(name, set_ or ())
    layers = lineage(name)
    text, parents = whole_text(layers), [layer.name for layer in layers[-2::-1]]
    values = flatten(recipe.to_json())
    notes = notes_of_recipe(layers)
    notes = {f: note for f, note in notes.items() if recipe.origin.get(f) != "--set"}
    sources = named_sources(notes.values())
    console.prose(f"{recipe.name}: {recipe.summary} {advice(layers)}".strip())
    if recipe.paper:
        console.out(f"Paper: {recipe.paper}")
    if parents:
        console.out(f"Based on: {', '.join(parents)}")
    console.out(f"Digest: {recipe.digest}")
    console.out()
    prose = ("name", "summary", "paper")
    rows = [
        (k, _shown(v), recipe.origin[k], *([notes.get(k, "")] if notes else []))
        for k, v in values.items()
        if k not in prose and (all_ or recipe.origin[k] not in DEFAULTS)
    ]
    console.table(("field", "value", "from", *(["because"] if notes else [])), rows)
    hidden = len(values) - len(rows) - sum(k in values for k in prose)
    if hidden:
        console.out(f"{hidden} more at their defaults (--all shows them)")
    if sources:
        console.out()
        console.table(("source", "is"), list(sources.items()))
    result: dict[str, Any] = {
        "recipe": recipe.to_json(),
        "origin": recipe.origin,
        "digest": recipe.digest,
        "notes": notes,
        "sources": dict(sources),
        "advice": advice(layers),
        "based_on": parents,
        "source": layers[-1].source.where,
        "text": text,
    }
    console.done(result, next=_uses(recipe, name, text, set_ or ()))


def cp(
    console: Console,
    name: Name,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="File to write, or a folder.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Copy a recipe to a file that you can change and use by its path.

    The copy is complete: what the recipe inherits from others is written into it.

    Example:

      specctl recipes cp eagle3 my-eagle3.yaml
    """
    from specctl.core.errors import FileError
    from specctl.recipes.lineage import lineage
    from specctl.recipes.whole import whole_text

    text = whole_text(lineage(name))
    path = dest / f"{Path(name).stem}.yaml" if dest.is_dir() else dest
    if path.suffix not in (".yaml", ".yml"):
        path = path.with_name(path.name + ".yaml")
    if path.exists() and not force:
        raise FileError(
            f"{path} exists already",
            where=str(path),
            found="a file",
            expected="a new path",
            do=f"specctl recipes cp {name} {path} --force   (replaces it)",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    console.out(str(path))
    console.done({"path": str(path)}, next=[command_line("recipes", "validate", path)])


def validate(
    console: Console,
    name: Annotated[str, typer.Argument(metavar="FILE", help="A YAML file, or a recipe's name.")],
    set_: Sets = None,
) -> None:
    """Check a recipe: every key, every range, and the options of its family.

    Example:

      specctl recipes validate my-eagle3.yaml
    """
    from specctl.api.families import check_options
    from specctl.recipes.lineage import lineage
    from specctl.recipes.load import load_recipe
    from specctl.recipes.whole import whole_text

    recipe = load_recipe(name, set_ or ())
    check_options(recipe, name)
    console.out(f"{name}: valid ({recipe.drafter.family} for {recipe.target.name})")
    console.done(
        {"valid": True, "name": recipe.name, "digest": recipe.digest},
        next=_planned(recipe, name, set_ or ())
        if _trains(recipe)
        else _uses(recipe, name, whole_text(lineage(name)), set_ or ()),
    )


def schema(
    console: Console,
    field: Annotated[str | None, typer.Option(help="Only this section, e.g. train.")] = None,
) -> None:
    """Print the JSON schema of a recipe, for editors."""
    import json

    from specctl.core.errors import unknown
    from specctl.recipes.schema import Recipe

    whole = Recipe.model_json_schema()
    part = whole
    if field is not None:
        known = whole["properties"]
        if field not in known:
            raise unknown("section of a recipe", field, known, "--field")
        reference = str(known[field].get("$ref", "")).rsplit("/", 1)[-1]
        part = whole["$defs"].get(reference, known[field])
    console.out(json.dumps(part, indent=1))
    console.done({"schema": part})


def rules(console: Console) -> None:
    """List the verification rules and the trees for which each one is lossless.

    A pair that is not in the table is refused when it is configured. Relaxed acceptance is
    not a rule but a family of its own, marked approximate in every output.

    Example:

      specctl recipes rules --json
    """
    from specctl.core.tree import NodeKind
    from specctl.runtime.verify import RULES, default_rule

    rows, found = [], []
    for rule in RULES.values():
        kinds = [kind.value for kind in NodeKind if kind in rule.kinds]
        shown = "any" if len(kinds) == len(NodeKind) else ", ".join(kinds)
        rows.append((rule.name, "chain" if rule.chains_only else "tree", shown, rule.summary))
        fields = {"name": rule.name, "summary": rule.summary, "paper": rule.paper, "kinds": kinds}
        found.append({**fields, "chains_only": rule.chains_only, "lossless": True})
    console.table(("rule", "shape", "drafts", "what"), rows)
    auto = {
        kind.value: {shape: default_rule(kind, shape == "chain") for shape in ("chain", "tree")}
        for kind in NodeKind
    }
    console.out()
    console.table(
        ("drafts", "auto, chain", "auto, tree"), [(k, *a.values()) for k, a in auto.items()]
    )
    console.done({"rules": found, "auto": auto})


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].removesuffix(".")


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _command_of(text: str) -> list[str]:
    """The words of the command in the first line of a recipe; none if it names none."""
    first = text.splitlines()[0] if text else ""
    return shlex.split(first.removeprefix("# specctl")) if first.startswith("# specctl") else []


def _uses(recipe: Recipe, name: str, text: str, sets: Sequence[str]) -> list[str]:
    """The command of a recipe's first line, for the recipe as it was named and changed; before it
    the one that trains the drafter it starts from, where that is not there."""
    from specctl.recipes.files import recipe_names

    words = _command_of(text)
    if not words or (sets and words[0] not in TAKE_SETS and _trains(recipe)):
        return _planned(recipe, name, sets)
    if name not in recipe_names():  # a copy, or a run: its first line names what it was made from
        words = _renamed(words, name)
    if words[0] in TAKE_SETS:
        words += [word for one in sets for word in ("--set", one)]
    drafts = [value for flag, value in pairwise(words) if flag == "--draft"]
    missing = [d for d in drafts if d.startswith("runs/") and not Path(d).exists()]
    return [*map(_training, missing), command_line(*words)]


def _planned(recipe: Recipe, name: str, sets: Sequence[str]) -> list[str]:
    """The command that says what a recipe takes; what trains nothing drafts as it is."""
    if not _trains(recipe):
        words = ["--target", recipe.target.name, "--draft", recipe.drafter.family, "--compare"]
        return [with_text("generate", *words)]
    return [
        command_line("plan", "--recipe", name, *(word for one in sets for word in ("--set", one)))
    ]


def _trains(recipe: Recipe) -> bool:
    from specctl.api.families import family_infos

    joint = recipe.train.joint
    is_joint = joint is not None and joint.alone is not None
    return bool(recipe.stages) or is_joint or family_infos()[recipe.drafter.family].trainable


def _renamed(words: Sequence[str], name: str) -> list[str]:
    """A command line with another recipe, and in the folder that is usual for it."""
    left = list(words)
    for flag in ("--out", "--recipe"):
        if flag in left:
            del left[left.index(flag) : left.index(flag) + 2]
    takes_recipe = left[0] in (*TAKE_SETS, "vocab-trim")
    out = ["--out", f"runs/{Path(name).stem}"] if "--out" in words else []
    return [*left, *(["--recipe", name, *out] if takes_recipe else [])]


def _training(package: str) -> str:
    """The command that makes runs/NAME/package."""
    folder = Path(package).parent if Path(package).name == "package" else Path(package)
    return command_line("train-draft", "--recipe", folder.name, "--out", folder)


app = command_group(
    "recipes", "List, show, copy and check recipes.", (ls, show, cp, validate, rules, schema)
)
