"""What `specctl recipes ls --target MODEL` prints: the recipes made for the target, what drafts for
it without training, and the methods that can be trained for it, each with its command. No torch."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specctl.api.arguments.attention_only import is_recurrent, of_recipe
from specctl.api.arguments.families import family_infos
from specctl.api.models_here import drafts_for
from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line, with_text
from specctl.cli.commands.recipe_commands import command_for
from specctl.cli.commands.recipe_lists import first_sentence, is_trained
from specctl.recipes.load import EMBEDDED, RecipeInfo
from specctl.recipes.made_for import PLACEHOLDER, is_same, usual_first
from specctl.recipes.targets import resolve

FREE = ("auto", "prompt-lookup", "token-recycling", "quantspec")  # the usual choices first
METHODS = ("eagle3", "distill", "medusa")
CHOOSES = "team"  # the family of several drafters, of which each round takes one
SMALLER = "A smaller model with the same vocabulary"
TIME = "40m"  # of training, where a command needs an example
NUMBERS = "; their numbers fit the embedded target, --time derives yours"
SHORT, UNMADE = (2, 3, 2), (0, 4, 3)  # commands of each section without --all


@dataclass(frozen=True, slots=True)
class FittingChoice:
    """A recipe or draft that fits a target, and the command that uses it."""

    name: str
    summary: str
    command: str


@dataclass(frozen=True, slots=True)
class TargetChoices:
    """What fits a target: recipes made for it, what drafts without training, methods to train."""

    target: str
    made_for: tuple[FittingChoice, ...]
    no_training: tuple[FittingChoice, ...]
    methods: tuple[FittingChoice, ...]

    @property
    def usual(self) -> str:
        """The recipe to look at first."""
        return (*self.made_for, *self.methods)[0].name

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def fitting(target: str, made: Sequence[RecipeInfo], every: Sequence[RecipeInfo]) -> TargetChoices:
    """What fits a target, for which these of all recipes were `made`."""
    if is_recurrent(target):  # what its rounds would refuse is left out
        every = [info for info in every if not of_recipe(info.name)]
    infos = {info.name: info for info in every}
    is_embedded = is_same(target, EMBEDDED)
    own = sorted(made, key=lambda info: usual_first(info.name, info.family))
    if is_embedded:  # what needs no training is in the list of that
        own = [info for info in own if is_trained(info)]
    return TargetChoices(
        target,
        tuple(
            FittingChoice(i.name, first_sentence(i.summary), command_for(i.name, target))
            for i in own
        ),
        tuple(_without_training(target, infos)),
        () if is_embedded else tuple(_methods(target, infos)),
    )


def _without_training(target: str, infos: dict[str, RecipeInfo]) -> Iterator[FittingChoice]:
    """Drafts that there are for this target, one of them first, and drafters without weights."""
    drafts = [
        _drafting(target, one.name, "A package for this target" if one.is_package else SMALLER)
        for one in drafts_for(target)
    ]
    found = resolve(target)
    is_packed = found.file is not None or found.gguf is not None
    free = [
        _drafting(target, info.name, first_sentence(info.summary))
        for info in _usual_first(infos, FREE)
        if _fits_any(info) and not (is_packed and family_infos()[info.family].reads_stored)
    ]
    yield from (*drafts[:1], *free[: len(FREE)], *drafts[1:], *free[len(FREE) :])


def _fits_any(info: RecipeInfo) -> bool:
    """Whether the name stands for a drafter without training whose options are no target's own: a
    family with its defaults, or a choice among such."""
    is_named = info.name == info.family or info.family == CHOOSES
    return is_named and info.target == EMBEDDED and not is_trained(info)


def _drafting(target: str, draft: str, summary: str) -> FittingChoice:
    words = ["--target", target, "--draft", draft, "--compare"]
    return FittingChoice(draft, summary, with_text("generate", *words))


def _methods(target: str, infos: dict[str, RecipeInfo]) -> Iterator[FittingChoice]:
    """A recipe of each family that is trained beside a frozen target, the usual ones first."""
    families = set[str]()
    for info in _usual_first(infos, METHODS):
        is_method = info.target == EMBEDDED and is_trained(info) and not info.is_joint
        if is_method and info.family not in families:
            families.add(info.family)
            words = ["--target", target, "--recipe", info.name, "--data", PLACEHOLDER]
            command = command_line("train-draft", *words, "--time", TIME)
            yield FittingChoice(info.name, first_sentence(info.summary), command)


def _usual_first(infos: dict[str, RecipeInfo], usual: Sequence[str]) -> list[RecipeInfo]:
    """All recipes: the usual ones, then those called like their family, then the others."""
    rest = sorted(infos.values(), key=lambda info: (info.name != info.family, info.name))
    return [
        *(infos[name] for name in usual if name in infos),
        *(i for i in rest if i.name not in usual),
    ]


# -- printed ---------------------------------------------------------------------------------------


def show_fitting(console: Console, found: TargetChoices, is_whole: bool) -> None:
    """The sections; without `is_whole` the first commands of each and the names of others."""
    sections = (
        (f"Recipes made for {found.target}", "", found.made_for),
        ("Without training", "", found.no_training),
        ("To train", NUMBERS, found.methods),
    )
    if not found.made_for:
        console.prose(f"No recipe was made for {found.target}.")
    counts = SHORT if found.made_for else UNMADE
    for (title, remark, choices), most in zip(sections, counts, strict=True):
        if choices:
            num_shown = len(choices) if is_whole else min(most, len(choices))
            count = (
                f"{num_shown} of {len(choices)}" if num_shown < len(choices) else str(len(choices))
            )
            if title != sections[0][0]:
                console.out()
            console.prose(f"{title} ({count}){remark}:")
            _show_choices(console, choices, num_shown)
    if not is_whole:
        console.out(
            "Everything: " + command_line("recipes", "ls", "--target", found.target, "--all")
        )


def _show_choices(console: Console, choices: Sequence[FittingChoice], num_shown: int) -> None:
    """Of the first name, summary and command, of the others as many names as one line takes;
    where there are no others, whole summaries."""
    shown, others = choices[:num_shown], ", ".join(choice.name for choice in choices[num_shown:])
    label = max(len(choice.name) for choice in shown)
    for choice in shown:
        _show_summary(console, f"  {choice.name:{label}}  ", choice.summary, is_whole=not others)
        console.out(f"    {choice.command}")
    if others:
        console.out(f"  also {console.cut(others, console.columns - len('  also '))}")


def _show_summary(console: Console, head: str, summary: str, is_whole: bool) -> None:
    width = max(20, console.columns - len(head))
    lines = textwrap.wrap(summary, width) if is_whole else [console.cut(summary, width)]
    for number, line in enumerate(lines):
        console.out((" " * len(head) if number else head) + line)
