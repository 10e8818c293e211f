"""The flags and settings that several commands share. Commands take them one by one, or as a
dataclass whose fields are options (`specctl.cli.app.command`)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from specctl.cli.app.config_file import apply
from specctl.cli.app.settings import Setting
from specctl.cli.options.names import (
    complete_controller,
    complete_draft,
    complete_policy,
    complete_stop,
    one_of,
)
from specctl.cli.options.recipe_fields import complete_field
from specctl.core.plugins import declared

DRAFTING = "Drafting"


def panel(name: str) -> partial[Any]:
    """`typer.Option` for the flags of one panel of a help screen."""
    return partial(typer.Option, rich_help_panel=name)


everywhere_option, drafting_option = panel("Everywhere"), panel(DRAFTING)
sampling_option, target_option = panel("Sampling"), panel("Target")

Json = Annotated[bool, everywhere_option("--json", help="One JSON object on stdout.")]
Quiet = Annotated[bool, everywhere_option("--quiet", "-q", help="Only results.")]
Verbose = Annotated[bool, everywhere_option("--verbose", "-v", help="More messages.")]
JsonLines = Annotated[
    bool,
    everywhere_option(
        "--jsonl", help="Events on stdout, one JSON object a line; the last is the result."
    ),
]
NoColor = Annotated[bool, everywhere_option("--no-color", help="Plain text, no bars.")]

Offline = Annotated[bool, target_option("--offline", help="Do not use the hub.")]
Compile = Annotated[
    bool | None,
    Setting(
        "target.compile",
        "Record the target's rounds in fixed shapes (CUDA graphs; torch.compile on a CPU). By "
        "default on a GPU only.",
        was="--compile/--no-compile",
    ),
]
Chat = Annotated[
    bool | None,
    target_option(
        "--chat/--raw",
        help="Read a prompt as a user's turn in the target's chat template, or continue it as a "
        "text. By default as the target was trained: chat models get their template.",
    ),
]
Draft = Annotated[
    str,
    drafting_option(
        "--draft",
        "-d",
        help="Package, run or model folder, GGUF file, hub id, a drafter's name (auto, "
        "prompt-lookup, ...), several of them joined by +, or none.",
        autocompletion=complete_draft,
    ),
]
Allow = Annotated[
    list[str] | None,
    drafting_option(
        "--allow",
        metavar="FIELD",
        help="Accept a mismatch in this field of the package (repeatable).",
    ),
]
PolicySetting = Annotated[
    str | None,
    Setting(
        "serve.policy",
        "How drafts grow: chain, direct, or a tree (docs/trees.md lists them).",
        was="--policy",
        metavar="NAME",
        complete=complete_policy,
    ),
]
LengthFlag = Annotated[
    int | None, drafting_option("--length", min=1, max=64, help="Tokens drafted (depth of a tree).")
]
NodesSetting = Annotated[
    int | None, Setting("serve.nodes", "Nodes of a tree.", was="--nodes", min=1, max=1024)
]
RuleFlag = Annotated[
    str | None,
    drafting_option(
        "--rule",
        help="Verification rule: auto, one that fits the policy, or a relaxed one, which is "
        "approximate, such as fly:0.5 (specctl recipes rules).",
    ),
]
TranslateSetting = Annotated[
    str,
    Setting(
        "drafter.translate",
        "For a draft model with another tokenizer: tli (shared tokens), slem (strings), slrs "
        "(strings by probability, small vocabularies), auto, or none to refuse it.",
        was="--translate",
        metavar="NAME",
        complete=one_of("auto", "tli", "slem", "slrs", "none"),
    ),
]
DraftOptionSetting = Annotated[
    list[str] | None,
    Setting(
        "drafter.options.",
        "An option of the drafter that its weights do not fix, such as window=512 of eagle3.",
        was="--draft-option",
        metavar="VALUE",
    ),
]
StopRuleSetting = Annotated[
    str | None,
    Setting(
        "serve.stop",
        "End chains early: svip, confidence, heuristic, ..., or a file from train-stop.",
        was="--stop-rule",
        metavar="NAME|FILE",
        complete=complete_stop,
    ),
]
ControllerSetting = Annotated[
    str | None,
    Setting(
        "serve.controller",
        "Who drafts in a team: "
        + ", ".join(declared("specctl.runtime.controllers", "CONTROLLER"))
        + ".",
        was="--controller",
        metavar="NAME",
        complete=complete_controller,
    ),
]
ParallelSetting = Annotated[
    bool | None,
    Setting(
        "serve.parallel",
        "Draft while the target verifies (PEARL), one prompt at a time.",
        was="--parallel/--no-parallel",
    ),
]
AdaptiveFlag = Annotated[
    bool | None,
    drafting_option(
        "--adaptive/--no-adaptive",
        help="Choose each round's draft length (or none) from measured costs. Default: if "
        "specctl bench has measured them on this machine.",
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Change a field of the recipe, e.g. serve.length=4.",
        autocompletion=complete_field,
    ),
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")]
Seed = Annotated[
    int,
    sampling_option(
        "--seed", min=0, max=2**63 - 1, metavar="INTEGER", help="Seed of every random choice."
    ),
]
DrawnSeed = Annotated[
    int,
    sampling_option(
        "--seed",
        min=-1,
        max=2**63 - 1,
        metavar="INTEGER",
        help="Seed of every random choice; -1 draws one, and says which.",
    ),
]

ConfigFile = Annotated[
    Path | None,
    everywhere_option(
        "--config-file",
        envvar="SPECCTL_CONFIG_FILE",
        is_eager=True,
        callback=apply,
        help="YAML file of defaults for flags, by command.",
    ),
]

GLOBAL_FLAGS = {
    "json": Json,
    "jsonl": JsonLines,
    "quiet": Quiet,
    "verbose": Verbose,
    "no_color": NoColor,
}
