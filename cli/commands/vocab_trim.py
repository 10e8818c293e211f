"""`specctl vocab-trim`: cut a drafter's vocabulary to the tokens that pay."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specctl.api.outputs import check_folder
from specctl.cli.app.console import Console
from specctl.cli.commands.trimming import TrimJob, trim_and_package
from specctl.cli.options.flags import Allow, Out
from specctl.cli.options.loading import DraftChoice
from specctl.cli.options.target_choice import OWN_TARGET, TargetChoice
from specctl.core.errors import RecipeError

if TYPE_CHECKING:
    from specctl.recipes.schema import VocabPart
    from specctl.train.vocab.selectors import Selector


def vocab_trim(
    console: Console,
    draft: Annotated[str, typer.Option("--draft", "-d", help="Package (or model folder) to trim.")],
    out: Out,
    size: Annotated[
        str | None,
        typer.Option(help="Tokens to keep: a number, 8k, or auto (what pays most here, default)."),
    ] = None,
    selector: Annotated[
        str | None,
        typer.Option(
            help="What is counted: vocab-trim (what the target writes, default), fr-spec (raw "
            "text), drafted or accepted (what the drafter proposes; what of it is accepted)."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="What is counted instead of the run's data beside DRAFT: prompts, or for fr-spec "
            "raw text (default: this machine's Python sources).",
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
        typer.Option(min=0.0, max=1.0, help="Least share of tokens kept, with --size auto (0.95)."),
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(
            help="With --size auto: exhaustive (every size, default), or tpe (size, draft length "
            "and domain weights together; needs optuna)."
        ),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Choices that --search tpe looks at (60).")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", "-r", help="Recipe whose vocab section is used, e.g. fr-spec."),
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Held-out prompts on which tau is measured.")
    ] = 12,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="At which sizes are predicted and measured.")
    ] = 0.0,
    allow: Allow = None,
    target: TargetChoice = OWN_TARGET,
) -> None:
    """Trim the vocabulary of any drafter with an LM head. Verification stays lossless.

    Shows coverage, acceptance, tau, MBSU and speed-up by domain before and after, and which
    prompts lost; OUT gets the trimmed package, trim.json and (with matplotlib) trim.png beside it.

    Examples:

      specctl vocab-trim --draft runs/quickstart/package --size auto --out runs/trimmed
      specctl vocab-trim --draft runs/distill/package --recipe fr-spec --size 2k --out runs/fr-spec
      specctl vocab-trim --draft runs/distill/package --search tpe --trials 80 --out runs/searched
    """
    part = _vocab_part(recipe, selector, min_coverage, search, trials)
    wanted = parse_size(size) if size is not None else part.size or "auto"
    chosen = _selector(part.selector)
    if part.search == "tpe" and wanted != "auto":
        raise RecipeError(
            "--search tpe chooses the size itself",
            where="--size",
            found=str(wanted),
            expected="--size auto",
            do="leave --size out, or --search exhaustive",
        )
    check_folder(out)
    from specctl.train.data.sources import check_source
    from specctl.train.vocab.settings import TrimSettings

    settings = TrimSettings(
        wanted, part.min_coverage, max_new_tokens, temperature,
        search=part.search, trials=part.trials,
    )  # fmt: skip
    if data is not None:
        check_source(str(data), "auto")
    target = target.or_own(draft)
    model = target.load(console)
    if size is not None and wanted != "auto" and not 2 <= wanted <= model.spec.vocab_size:
        raise _bad_size(size, f"2 to {model.spec.vocab_size:,} tokens, or auto")
    loaded = DraftChoice(draft, allow=[*(allow or ()), "padding"]).load(model)  # it is cut to fit
    job = TrimJob(model, loaded, settings, chosen, data, prompts, num_prompts)
    report, manifest = trim_and_package(console, job, out)
    console.done(
        {
            "out": str(out),
            "package": str(out / "package"),
            "report": report.to_json(),
            "sha256": manifest.digest,
        },
        next=[
            f"specctl bench --target {target.name} --draft {draft} --draft {out / 'package'}",
            f"specctl verify {out / 'package'} --target {target.name} --level lossless",
        ],
    )


def _vocab_part(
    recipe: str | None,
    selector: str | None,
    min_coverage: float | None,
    search: str | None,
    trials: int | None,
) -> VocabPart:
    """Flags over the recipe's vocab section over the defaults."""
    from specctl.recipes.load import load_recipe
    from specctl.recipes.schema import Recipe

    base = Recipe().vocab if recipe is None else load_recipe(recipe).vocab
    if search not in (None, "exhaustive", "tpe"):
        raise RecipeError(
            f"unknown search {search!r}",
            where="--search",
            found=str(search),
            expected="exhaustive or tpe",
            do="--search exhaustive",
        )
    given = {
        "selector": selector, "min_coverage": min_coverage, "search": search, "trials": trials,
    }  # fmt: skip
    return base.model_copy(update={k: v for k, v in given.items() if v is not None})


def _selector(name: str) -> Selector:
    from specctl.train.vocab.selectors import selector

    return selector(name)


def parse_size(text: str) -> int | Literal["auto"]:
    """`auto`, `2048`, `2k` (2,000 as in "32k")."""
    if text == "auto":
        return "auto"
    match = re.fullmatch(r"(\d+)(k?)", text.replace(",", "").lower())
    if match is None or int(match[1]) == 0:
        raise _bad_size(text, "a number of tokens such as 2048 or 32k, or auto")
    return int(match[1]) * (1000 if match[2] else 1)


def _bad_size(text: str, expected: str) -> RecipeError:
    return RecipeError(
        f"the size {text!r} is no size of a vocabulary",
        where="--size",
        found=text,
        expected=expected,
        do="--size auto",
    )
