"""`specctl vocab-trim`: cut a drafter's vocabulary to the tokens that pay."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specctl.cli.console import Console
from specctl.cli.flags import Allow, Out
from specctl.cli.loading import DraftChoice, LoadedDraft, TargetChoice, packaged_serve
from specctl.recipes.errors import RecipeError, SpecctlError

if TYPE_CHECKING:
    from specctl.drafters.parts.base import Drafter
    from specctl.export.manifest import Manifest
    from specctl.runtime.target import Target
    from specctl.train.coverage import Counted
    from specctl.train.heldout import Prompt
    from specctl.train.trim_report import TrimReport

SOURCES = ("target", "text", "draft")


def vocab_trim(
    console: Console,
    target: TargetChoice,
    draft: Annotated[str, typer.Option("--draft", "-d", help="Package (or model folder) to trim.")],
    out: Out,
    size: Annotated[
        str, typer.Option(help="Tokens to keep: a number, 8k, or auto (what pays most here).")
    ] = "auto",
    source: Annotated[
        str, typer.Option(help="What is counted: target (what it writes), text, or draft.")
    ] = "target",
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Prompts or text to count; else the run's data beside DRAFT."),
    ] = None,
    min_coverage: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Least share of tokens kept, with --size auto.")
    ] = 0.95,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Held-out prompts on which tau is measured.")
    ] = 12,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 64,
    allow: Allow = None,
) -> None:
    """Trim the vocabulary of any drafter with an LM head. Verification stays lossless.

    Shows coverage by domain, the coverage curve, and tau, MBSU and tokens/s before and after; OUT
    gets the trimmed package, trim.json and (with matplotlib) trim.png beside it.

    Examples:

      specctl vocab-trim --draft runs/quickstart/package --size auto --out runs/trimmed
      specctl vocab-trim --draft runs/distill/package --size 2k --source text --data code.txt -o t
    """
    wanted = parse_size(size)
    _check_source(source, data)
    model = target.load(console)
    loaded = DraftChoice(draft, allow=allow).load(model)
    job = TrimJob(model, loaded, wanted, source, data, min_coverage, num_prompts, max_new_tokens)
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


@dataclass(frozen=True, slots=True)
class TrimJob:
    """A drafter and how it is to be trimmed."""

    target: Target
    draft: LoadedDraft
    size: int | Literal["auto"]
    source: str
    data: Path | None
    min_coverage: float
    num_prompts: int
    max_new_tokens: int


def trim_and_package(console: Console, job: TrimJob, out: Path) -> tuple[TrimReport, Manifest]:
    """Trim, show the report, write OUT/package and OUT/trim.json."""
    from specctl.train.coverage import count_tokens
    from specctl.train.heldout import heldout_prompts
    from specctl.train.vocab_trim import save_report, trim

    drafter, policy = job.draft.drafter, job.draft.policy
    assert drafter is not None, "DraftChoice loads a drafter for any name but none"
    assert policy is not None, "a drafter comes with a policy"
    if drafter.module is None:
        raise SpecctlError(
            f"{job.draft.name} has no LM head to trim",
            where="--draft",
            found=drafter.family,
            expected="a trained drafter",
            do="specctl train-draft --recipe distill, then trim its package",
        )
    console.say(f"counting tokens ({job.source})")
    prompts = heldout_prompts(job.target, 4 * job.num_prompts)
    measured, rest = prompts[: job.num_prompts], prompts[job.num_prompts :]
    counts, heldout = count_tokens(_documents(job, rest), job.target.spec.vocab_size)
    small, report = trim(
        drafter,
        job.size,
        target=job.target,
        counts=counts,
        heldout=heldout,
        policy=policy,
        prompts=measured,
        source=job.source,
        min_coverage=job.min_coverage,
        new_tokens=job.max_new_tokens,
        console=console,
    )
    for line in report.lines():
        console.out(line)
    console.out(report.plot())
    manifest = _package(job, small, measured, out / "package")
    save_report(report, out)
    return report, manifest


def _package(job: TrimJob, drafter: Drafter, prompts: list[Prompt], folder: Path) -> Manifest:
    """Write the trimmed drafter, with tau measured once more as it will be served."""
    from specctl.cli.training import packaged
    from specctl.runtime.generate import generate
    from specctl.runtime.sampling import Sampling

    made = generate(
        job.target,
        [p.ids for p in prompts],
        drafter=drafter,
        sampling=Sampling(max_new_tokens=job.max_new_tokens),
        policy=job.draft.policy,
        rule=job.draft.rule,
    )
    acceptance = {
        "tau": made.stats.tau,
        "alpha": list(made.stats.accepted_per_position),
        "command": f"specctl vocab-trim --draft {job.draft.name} --size {job.size}",
        "data": "held-out prompts",
        "temperature": 0.0,
        "prompts": len(prompts),
        "new_tokens": job.max_new_tokens,
    }
    return packaged(
        drafter,
        job.target,
        folder,
        serve=packaged_serve(job.draft.name),
        recipe_digest=_recipe_digest(job.draft.name),
        acceptance=acceptance,
        command=["specctl", *sys.argv[1:]],
    )


def _recipe_digest(draft: str) -> str:
    """The recipe of the package that is trimmed; empty for a foreign model."""
    from specctl.export.manifest import MANIFEST, read_manifest

    folder = Path(draft)
    return read_manifest(folder).recipe_digest if (folder / MANIFEST).is_file() else ""


def _documents(job: TrimJob, prompts: list[Prompt]) -> Iterable[Counted]:
    """What is counted, by domain."""
    from specctl.train.heldout import heldout_prompts
    from specctl.train.rows import TokenData
    from specctl.train.vocab_trim import data_tokens, draft_tokens, target_tokens

    if job.source == "text":
        return _text(job)
    given = prompts if job.data is None else heldout_prompts(job.target, 10_000, path=job.data)
    if job.source == "draft":
        assert job.draft.drafter is not None, "checked by the caller"
        assert job.draft.policy is not None, "checked by the caller"
        return draft_tokens(job.target, job.draft.drafter, job.draft.policy, given)
    run = Path(job.draft.name).resolve().parent
    if job.data is None and (run / "data" / "manifest.json").is_file():
        return data_tokens(TokenData.open(run / "data"))
    return target_tokens(job.target, given)


def _text(job: TrimJob) -> Iterable[Counted]:
    assert job.data is not None, "checked by _check_source"
    from specctl.train.heldout import heldout_prompts

    for prompt in heldout_prompts(job.target, 1_000_000, path=job.data):
        yield prompt.ids, prompt.domain


def _check_source(source: str, data: Path | None) -> None:
    if source not in SOURCES:
        raise RecipeError(
            f"unknown source {source!r}",
            where="--source",
            found=source,
            expected="one of " + ", ".join(SOURCES),
            do="--source target",
        )
    if source == "text" and data is None:
        raise RecipeError(
            "there is no text to count",
            where="--data",
            found="nothing",
            expected="a text or JSONL file",
            do="--data FILE, or --source target",
        )


def parse_size(text: str) -> int | Literal["auto"]:
    """`auto`, `2048`, `2k` (2,000 as in "32k")."""
    if text == "auto":
        return "auto"
    match = re.fullmatch(r"(\d+)(k?)", text.replace(",", "").lower())
    if match is None or int(match[1]) == 0:
        raise RecipeError(
            f"the size {text!r} cannot be read",
            where="--size",
            found=text,
            expected="a number of tokens such as 2048 or 32k, or auto",
            do="--size auto",
        )
    return int(match[1]) * (1000 if match[2] else 1)
