"""`specctl vocab-trim`: cut a drafter's vocabulary to the tokens that pay."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.api.arguments.outputs import check_folder
from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line
from specctl.cli.options.flags import Allow, Out
from specctl.cli.options.loading import DraftChoice
from specctl.cli.options.names import check_drafter
from specctl.cli.options.positional import DraftFlag, Word, one_drafter
from specctl.cli.options.target_choice import OWN_TARGET, TargetChoice

if TYPE_CHECKING:
    from specctl.api.vocab_trim import VocabTrimResult


def vocab_trim(
    console: Console,
    out: Out,
    package: Word = None,
    draft: DraftFlag = None,
    size: Annotated[
        str | None,
        typer.Option(help="Tokens to keep: a number, 8k, or auto (fastest here, default)."),
    ] = None,
    selector: Annotated[
        str | None,
        typer.Option(
            help="What is counted: vocab-trim (what the target writes, default), fr-spec (raw "
            "text), drafted or accepted (what the drafter proposes; what of it is accepted)."
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="What is counted instead of the run's data beside DRAFT (repeatable): prompts, or "
            "for fr-spec raw text (default: this machine's Python sources).",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="Your prompts, text or JSONL with a domain field; else the held-out prompts.",
        ),
    ] = None,
    min_coverage: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Minimum coverage, with --size auto (0.95)."),
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(
            help="With --size auto: exhaustive (every size, default), or tpe (size, draft length "
            "and domain weights together; needs optuna)."
        ),
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Trials of --search tpe (60).")] = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", "-r", help="Recipe whose vocab section is used, e.g. fr-spec."),
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Held-out prompts on which tau is measured.")
    ] = 12,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Temperature of prediction and measurement.")
    ] = 0.0,
    allow: Allow = None,
    target: TargetChoice = OWN_TARGET,
) -> None:
    """Trim the vocabulary of any drafter with an LM head. Verification stays lossless.

    Shows coverage, acceptance, tau, memory-bound speed-up (MBSU) and speed-up by domain, before and
    after, and the prompts that became slower. OUT gets the trimmed package, trim.json and (with
    matplotlib) trim.png.

    Examples:

      specctl vocab-trim runs/quickstart --size auto --out runs/trimmed
      specctl vocab-trim runs/distill --recipe fr-spec --size 2k --out runs/fr-spec
      specctl vocab-trim runs/distill --search tpe --trials 80 --out runs/searched
    """
    draft = one_drafter(package, draft, "specctl vocab-trim runs/NAME --size auto --out FOLDER")
    from specctl.api.vocab_trim import trim_settings
    from specctl.api.vocab_trim import vocab_trim as trim

    settings: dict[str, Any] = {
        "size": size,
        "selector": selector,
        "data": data,
        "min_coverage": min_coverage,
        "search": search,
        "trials": trials,
        "recipe": recipe,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
    }
    trim_settings(**settings)  # what cannot be is refused before the target is read
    check_drafter(draft)
    check_folder(out)
    target = target.or_own(draft)
    result = trim(
        draft,
        out,
        target=target.load(console, wanted=DraftChoice(draft).wanted(draft)),
        prompts=prompts,
        num_prompts=num_prompts,
        allow=allow or (),
        progress=console,
        command=["specctl", *sys.argv[1:]],
        **settings,
    )
    show_trim(console, result)
    allowed = [word for name in allow or () for word in ("--allow", name)]
    console.done(
        result.to_json(),
        next=[
            command_line("bench", *target.words(), draft, out / "package", *allowed),
            command_line("verify", out / "package", *target.words(), "--level", "lossless"),
        ],
    )


def show_trim(console: Console, result: VocabTrimResult) -> None:
    """The report of a trimming."""
    console.out(str(result))
    console.out(result.report.plot())
