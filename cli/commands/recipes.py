"""`specctl recipes`: list, show, copy, derive and check recipes. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specctl.cli.app.command import command_group
from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line
from specctl.cli.commands.recipe_commands import (
    drafted,
    planned,
    shown_value,
    trains,
    uses,
    write_recipe,
)
from specctl.cli.commands.recipes_of_pretrain import show_one
from specctl.cli.commands.recipes_write import write
from specctl.cli.options.flags import Sets
from specctl.cli.options.names import complete_any_recipe, complete_family, complete_target

Name = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe's name, or a YAML file.",
        autocompletion=complete_any_recipe,
    ),
]
DEFAULTS = ("default", "base")  # origins of values that a recipe leaves alone


def ls(
    console: Console,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            help="What fits this target: an alias, a hub id, a folder or a GGUF file.",
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
    all_: Annotated[
        bool, typer.Option("--all", help="Every recipe, or everything that fits the target.")
    ] = False,
) -> None:
    """List the usual recipes and how many others there are, or what fits a target.

    --all lists every recipe, --family and --search those that match, --json always all.

    Examples:

      specctl recipes ls --all
      specctl recipes ls --target qwen3-8b
      specctl recipes ls --family eagle3 --search vocabulary
    """
    from specctl.cli.commands import recipe_lists as lists
    from specctl.cli.commands import recipes_of_pretrain as pretraining

    every = lists.every_recipe()
    infos = lists.wanted(every, target, family, search)
    others = pretraining.found_by(family, search) if target is None else []
    result: dict[str, Any] = {
        "recipes": lists.as_json(infos),
        "pretraining": pretraining.group_json(others),
    }
    usual = lists.first_of(infos) or next((other.name for other in others), None)
    if family is not None or search is not None or (all_ and target is None):
        lists.show_tables(console, infos)
        pretraining.show_group(console, others)
        if not infos and not others:
            console.out("no recipe is like that")
    elif target is None:
        lists.show_overview(console, infos)
    else:
        from specctl.cli.commands.recipes_for_target import fitting, show_fitting

        fits = fitting(target, infos, every)
        show_fitting(console, fits, all_)
        result |= fits.to_json()
        usual = fits.usual
    following = ["recipes", "ls"] if usual is None else ["recipes", "show", usual]
    console.done(result, next=[command_line(*following)])


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
    from specctl.recipes.pretrained import pretraining_recipe
    from specctl.recipes.section import flatten
    from specctl.recipes.whole import whole_text

    if (made := pretraining_recipe(name)) is not None:
        show_one(console, made, set_ or ())
        return
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
        (k, shown_value(v), recipe.origin[k], *([notes.get(k, "")] if notes else []))
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
    family = recipe.drafter.family
    is_trained = trains(family, recipe.train.joint, bool(recipe.stages))
    otherwise = drafted(recipe.target.name, family)
    if is_trained:
        otherwise = planned(name, set_ or ())
    console.done(result, next=uses(text, name, set_ or (), is_trained, otherwise))


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
    from specctl.recipes.lineage import lineage
    from specctl.recipes.pretrained import pretraining_recipe
    from specctl.recipes.whole import whole_text

    made = pretraining_recipe(name)
    text = whole_text(lineage(name)) if made is None else made.text
    path = dest / f"{Path(name).stem}.yaml" if dest.is_dir() else dest
    path = write_recipe(path, text, force, f"specctl recipes cp {name} {path}")
    console.out(str(path))
    following = command_line("recipes", "validate", path)
    if made is not None:
        following = command_line("pretrain", "--recipe", path, "--out", f"runs/{path.stem}")
    console.done({"path": str(path)}, next=[following])


def validate(
    console: Console,
    name: Annotated[str, typer.Argument(metavar="FILE", help="A YAML file, or a recipe's name.")],
    set_: Sets = None,
) -> None:
    """Check a recipe: every key, every range, and the options of its family.

    Example:

      specctl recipes validate my-eagle3.yaml
    """
    from specctl.api.arguments.families import check_options
    from specctl.recipes.lineage import lineage
    from specctl.recipes.load import load_recipe
    from specctl.recipes.whole import whole_text

    recipe = load_recipe(name, set_ or ())
    check_options(recipe, name)
    family, target = recipe.drafter.family, recipe.target.name
    console.out(f"{name}: valid ({family} for {target})")
    if trains(family, recipe.train.joint, bool(recipe.stages)):
        following = planned(name, set_ or ())
    else:
        text = whole_text(lineage(name))
        following = uses(text, name, set_ or (), False, drafted(target, family))
    console.done({"valid": True, "name": recipe.name, "digest": recipe.digest}, next=following)


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

    A pair that is not in the table is refused when it is configured. Relaxed rules come last:
    they are approximate, which every output says, and take numbers (fly:0.5).

    Example:

      specctl recipes rules --json
    """
    from specctl.core.tree import NodeKind
    from specctl.runtime.verify import RULES, default_rule
    from specctl.runtime.verify.relaxed import RELAXED

    rows, found = [], []
    for rule in RULES.working().values():
        kinds = [kind.value for kind in NodeKind if kind in rule.kinds]
        shown = "any" if len(kinds) == len(NodeKind) else ", ".join(kinds)
        rows.append((rule.name, "chain" if rule.chains_only else "tree", shown, rule.summary))
        fields = {"name": rule.name, "summary": rule.summary, "paper": rule.paper, "kinds": kinds}
        found.append({**fields, "chains_only": rule.chains_only, "lossless": True})
    for relaxed in RELAXED.working().values():
        shape = "chain" if relaxed.chains_only else "tree"
        numbers = ":".join(f"{knob.default:g}" for knob in relaxed.knobs)
        name = f"{relaxed.name}:{numbers}"
        rows.append((name, shape, "any", f"approximate: {relaxed.summary}"))
        fields = {"name": relaxed.name, "summary": relaxed.summary, "paper": relaxed.paper}
        kinds = [kind.value for kind in NodeKind]
        more = {"kinds": kinds, "chains_only": relaxed.chains_only, "lossless": False}
        found.append({**fields, **more, "numbers": {k.name: k.default for k in relaxed.knobs}})
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


app = command_group(
    "recipes",
    "List, show, copy, derive and check recipes.",
    (ls, show, cp, write, validate, rules, schema),
)
