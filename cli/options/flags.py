"""The options that several commands share. Commands take them one by one, or as a dataclass whose
fields are options (`specctl.cli.app.command`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specctl.cli.app.config_file import apply

EVERYWHERE = "Everywhere"
SAMPLING = "Sampling"
DRAFTING = "Drafting"
TARGET = "Target"

Json = Annotated[
    bool, typer.Option("--json", help="One JSON object on stdout.", rich_help_panel=EVERYWHERE)
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Only results.", rich_help_panel=EVERYWHERE)
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Say more.", rich_help_panel=EVERYWHERE)
]
JsonLines = Annotated[
    bool,
    typer.Option(
        "--jsonl",
        help="Events on stdout, one JSON object a line; the last is the result.",
        rich_help_panel=EVERYWHERE,
    ),
]
NoColor = Annotated[
    bool, typer.Option("--no-color", help="Plain text, no bars.", rich_help_panel=EVERYWHERE)
]

TargetName = Annotated[
    str,
    typer.Option(
        "--target",
        "-t",
        help="Alias (tiny, qwen3-8b), hub id, or folder.",
        rich_help_panel=TARGET,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option("--revision", help="Commit of the hub repository.", rich_help_panel=TARGET),
]
Dtype = Annotated[
    str,
    typer.Option("--dtype", help="auto, float32, bfloat16 or float16.", rich_help_panel=TARGET),
]
Device = Annotated[
    str, typer.Option("--device", help="auto, cpu, cuda, cuda:1.", rich_help_panel=TARGET)
]
Inflate = Annotated[
    str | None,
    typer.Option(
        "--inflate",
        help="Grow the target to this cost (100m, 300m, 1b, 8b) with the same answers.",
        rich_help_panel=TARGET,
    ),
]
Offline = Annotated[
    bool, typer.Option("--offline", help="Never ask the hub.", rich_help_panel=TARGET)
]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Record the target's rounds in fixed shapes (CUDA graphs; torch.compile on a CPU).",
        rich_help_panel=TARGET,
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        "--draft",
        "-d",
        help="Package folder, model folder or hub id, prompt-lookup, token-recycling, or none.",
        rich_help_panel=DRAFTING,
    ),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="FIELD",
        help="Accept a mismatch of this field of the package (repeatable).",
        rich_help_panel=DRAFTING,
    ),
]
PolicyFlag = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help="How drafts grow: chain, direct, or a tree (docs/trees.md lists them).",
        rich_help_panel=DRAFTING,
    ),
]
LengthFlag = Annotated[
    int | None,
    typer.Option(
        "--length",
        min=1,
        max=64,
        help="Tokens drafted (depth of a tree).",
        rich_help_panel=DRAFTING,
    ),
]
NodesFlag = Annotated[
    int | None,
    typer.Option("--nodes", min=1, max=1024, help="Nodes of a tree.", rich_help_panel=DRAFTING),
]
RuleFlag = Annotated[
    str | None,
    typer.Option(
        "--rule",
        help="Verification rule: auto, or one that fits the policy (specctl recipes rules).",
        rich_help_panel=DRAFTING,
    ),
]
TranslateFlag = Annotated[
    str,
    typer.Option(
        "--translate",
        help="A draft model of another tokenizer: tli (shared tokens), slem (strings), slrs "
        "(strings by probability, small vocabularies), auto, or none to refuse it.",
        rich_help_panel=DRAFTING,
    ),
]
StopRuleFlag = Annotated[
    str | None,
    typer.Option(
        "--stop-rule",
        metavar="NAME|FILE",
        help="End chains early: svip, confidence, heuristic, ..., or a file of train-stop.",
        rich_help_panel=DRAFTING,
    ),
]
ControllerFlag = Annotated[
    str | None,
    typer.Option(
        "--controller",
        help="Who drafts in a team: auto, ucb, exp3, thompson, hedge or cascade.",
        rich_help_panel=DRAFTING,
    ),
]
ParallelFlag = Annotated[
    bool | None,
    typer.Option(
        "--parallel/--no-parallel",
        help="Draft while the target verifies (PEARL), one prompt at a time.",
        rich_help_panel=DRAFTING,
    ),
]
AdaptiveFlag = Annotated[
    bool | None,
    typer.Option(
        "--adaptive/--no-adaptive",
        help="Choose each round's draft length (or none) from measured costs. Left out: where "
        "specctl bench has measured them here.",
        rich_help_panel=DRAFTING,
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="Change a field of the recipe, e.g. train.steps=200."
    ),
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")]
Seed = Annotated[
    int,
    typer.Option(
        "--seed",
        min=0,
        max=2**63 - 1,
        metavar="INTEGER",
        help="Seed of every random choice.",
        rich_help_panel=SAMPLING,
    ),
]
MaxNewTokens = Annotated[
    int,
    typer.Option("--max-new-tokens", min=1, help="Longest continuation.", rich_help_panel=SAMPLING),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature", min=0.0, help="0 = greedy, as without it.", rich_help_panel=SAMPLING
    ),
]

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config-file",
        envvar="SPECCTL_CONFIG_FILE",
        is_eager=True,
        callback=apply,
        help="YAML file of defaults for flags, by command.",
        rich_help_panel=EVERYWHERE,
    ),
]

GLOBAL_FLAGS = {
    "json": Json,
    "jsonl": JsonLines,
    "quiet": Quiet,
    "verbose": Verbose,
    "no_color": NoColor,
}
