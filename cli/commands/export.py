"""`specctl export`: write a drafter in another format, read back and compared.

`--push REPO`: show what will be uploaded, ask, upload.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.api.arguments.outputs import check_folder
from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line
from specctl.cli.options.flags import Allow, panel
from specctl.cli.options.names import ENGINES, check_package, complete_format
from specctl.cli.options.positional import DraftFlag, Word, one_drafter
from specctl.cli.options.publishing import NOT_PUBLISHED, PublishFlags
from specctl.cli.options.target_choice import OWN_TARGET, TargetChoice
from specctl.core.errors import GateError, RecipeError
from specctl.core.plugins import declared
from specctl.recipes.published import path_named

if TYPE_CHECKING:
    from specctl.export.push import PushPlan


hub_option = panel("Hub")

Push = Annotated[
    str | None,
    hub_option("--push", metavar="REPO", help="Upload it to this repository of the hub."),
]
Public = Annotated[
    bool, hub_option("--public", help="Let everybody read the repository; else it is private.")
]
Yes = Annotated[bool, hub_option("--yes", "-y", help="Upload without asking.")]


def pushed(console: Console, folder: Path, repo: str, public: bool, yes: bool) -> dict[str, Any]:
    """Show the plan of the upload, ask unless `yes`, upload; what happened, as JSON."""
    from specctl.export.push import plan_push, push

    plan = plan_push(folder, repo, private=not public)
    _show(console, plan)
    upload: dict[str, Any] = {
        "repo": plan.repo,
        "private": plan.private,
        "bytes": plan.bytes,
        "files": sorted(plan.files),
        "proof": plan.has_proof,
        "uploaded": False,
    }
    if not (yes or _may_push(console, plan)):
        return upload
    done = push(plan)
    console.out(f"uploaded: {done.url} at {done.revision[:12]}")
    return upload | {"uploaded": True, "url": done.url, "revision": done.revision}


def _show(console: Console, plan: PushPlan) -> None:
    rows = [(name, f"{path.stat().st_size:,}") for name, path in plan.files.items()]
    kind = "private" if plan.private else "PUBLIC"
    console.out(f"to {plan.repo} ({kind}), {plan.bytes:,} bytes in one commit:")
    console.table(("file", "bytes"), rows)
    if not plan.has_proof:
        console.warn(f"no proof is uploaded with it: specctl verify {plan.folder} makes one")


def _may_push(console: Console, plan: PushPlan) -> bool:
    if console.json or console.quiet or not (sys.stdin.isatty() and console.stderr.isatty()):
        raise RecipeError(
            "nothing was uploaded: nobody is here to be asked",
            where="--push",
            found=f"{len(plan.files)} files for {plan.repo}, checked and whole",
            expected="an answer at a terminal, or --yes",
            do="the same command with --yes",
        )
    return typer.confirm("upload?", default=False, err=True)


FORMATS = tuple(declared("specctl.export.formats", "FORMAT"))
PROVERS = tuple(declared("specctl.export.engines", "ENGINE"))


def export(
    console: Console,
    package: Word = None,
    draft: DraftFlag = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to write; not needed with --push.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="Engine (its format is chosen by the family): "
            + ", ".join(ENGINES)
            + "; or a format, else hf: "
            + ", ".join(FORMATS)
            + ".",
            autocompletion=complete_format,
        ),
    ] = None,
    allow: Allow = None,
    prove: Annotated[
        bool, typer.Option("--prove", help="Serve it in its engine and compare with specctl.")
    ] = False,
    engine: Annotated[
        str | None, typer.Option("--engine", help=f"Engine for --prove: {', '.join(PROVERS)}.")
    ] = None,
    engine_python: Annotated[
        str | None,
        typer.Option(
            "--engine-python", help="Python with the engine or its converter; else this one."
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            help="With --to specctl: write the weights anew in bfloat16, float16 or float32, "
            "without rows that are the target's.",
        ),
    ] = None,
    push: Push = None,
    public: Public = False,
    yes: Yes = False,
    publish: PublishFlags = NOT_PUBLISHED,
    target: TargetChoice = OWN_TARGET,
) -> None:
    """Write a package in a serving engine's format. The result is read back by that engine's rules
    and must draft what the drafter drafts. The commands that serve it are printed.

    --prove serves it with the installed engine (or that of --engine-python) and compares texts and
    accepted tokens with specctl's own. The result is written on the card.

    --push uploads it to the hub or, without --out, uploads the package itself with the record of
    its proof: to a private repository, after every byte was checked and the plan shown.

    --publish puts it among the drafters that come with specctl and are named without a folder.

    docs/export.md lists the formats of each family and the engines that read them.

    Examples:

      specctl export runs/eagle3 --to vllm --out exports/my-eagle3
      specctl export runs/distill --to hf --out runs/distill-hf
      specctl export runs/distill --to hf --out distill-hf --prove
      specctl export --target tiny --to gguf --out tiny-gguf
      specctl export runs/eagle3 --push OWNER/my-eagle3
      specctl export runs/eagle3 --to specctl --store bfloat16 --out small
    """
    from specctl.export.formats import PACKAGE, check_name, check_store

    if to is not None:
        check_name(to)
    serving = {"--prove": prove, "--engine": engine, "--engine-python": engine_python}
    upload = {"--push": push, "--public": public, "--yes": yes}
    is_published = publish.check({"--out": out, "--to": to, **serving, **upload})
    check_store(store, PACKAGE if is_published else to)
    if package is None and not draft and not is_published:
        _write_target(console, out, to, target)
        return
    word = one_drafter(package, draft, "specctl export runs/NAME --to vllm --out FOLDER")
    check_package(word)
    folder = path_named(word)
    if is_published:
        _publish(console, word, publish, store, tuple(allow or ()), target)
        return
    _refuse_useless(out, to, push, "--public" if public else "--yes" if yes else "")
    if out is None:
        assert push is not None
        console.done(
            {"push": pushed(console, folder, push, public, yes)},
            next=[command_line("show", folder)],
        )
        return
    to = to or "hf"
    check_folder(out)
    from specctl.api.export import export as export_
    from specctl.export.formats import format_for
    from specctl.export.package.manifest import package_in, read_manifest

    folder = package_in(folder)
    family = read_manifest(folder).family  # what is no package fails before torch is imported
    form = format_for(to, family)
    if form != to:
        console.say(f"{to} reads a drafter of family {family} in format {form}")
    model = target.or_own(str(folder)).load(console, is_read_only=True)
    result = export_(
        folder,
        form,
        out,
        target=model,
        allow=tuple(allow or ()),
        engine_python=engine_python,
        store=store,
    )
    console.out(f"{out}: {', '.join(result.files)}")
    for note in result.notes:
        console.warn(note)
    shown: dict[str, Any] = result.to_json()
    console.remains = lambda: f"the export is written, whole, in {out}; what follows it is not done"
    if prove:
        shown["proof"] = _proved(console, folder, out, engine, engine_python, model.name)
    if push is not None:
        shown["push"] = pushed(console, out, push, public, yes)
    console.done(shown, next=[command_line("show", out), *result.serve])


def _publish(
    console: Console,
    word: str,
    how: PublishFlags,
    store: str | None,
    allow: tuple[str, ...],
    choice: TargetChoice,
) -> None:
    """The package among the drafters that come with specctl."""
    from specctl.api.export import publish
    from specctl.export.package.publication import STORE, to_publish

    name = str(how.name)
    to_publish(name, how.license, how.measured, how.force)  # before anything is loaded
    model = choice.or_own(word).load(console, is_read_only=True)
    result = publish(
        word,
        name,
        license=str(how.license),
        target=model,
        measured=how.measured,
        store=store or STORE,
        force=how.force,
        allow=allow,
    )
    size = sum(path.stat().st_size for path in result.out.iterdir())
    console.out(f"{result.out}: {', '.join(result.files)} ({size:,} bytes)")
    command = command_line("generate", "--target", model.name, "--draft", name, "PROMPT")
    console.done(result.to_json() | {"name": name, "bytes": size}, next=[command])


def _write_target(console: Console, out: Path | None, to: str | None, choice: TargetChoice) -> None:
    """The target itself, for llama.cpp."""
    if to not in ("gguf", "llama.cpp") or out is None:
        raise RecipeError(
            "there is no package to export",
            where="PACKAGE",
            found="no package named",
            expected="a package; a target without one is written with --to gguf --out FOLDER",
            do="specctl export runs/NAME --to vllm --out FOLDER",
        )
    check_folder(out)
    from specctl.export.layouts.llama_cpp.target import FILE, export_target

    for note in export_target(choice.or_own().load(console), out):
        console.warn(note)
    console.out(f"{out}: {FILE}")
    written = {"out": str(out), "format": "gguf", "files": [FILE]}
    console.done(written, next=[shlex.join(["llama-server", "-m", str(out / FILE)])])


def _proved(
    console: Console, draft: Path, out: Path, engine: str | None, python: str | None, target: str
) -> dict[str, Any]:
    """The export in its engine; a difference is an error, and the folder stays."""
    from specctl.api.engine_proof import prove_export

    console.say(f"serving {out} in its engine, plain and drafted; this takes minutes")
    proof = prove_export(draft, out, engine=engine, python=python, target=target, progress=console)
    for line in str(proof).splitlines():
        console.out(line)
    if not proof.passed:
        console.result = {"out": str(out), "proof": proof.to_json()}
        raise GateError(
            f"{proof.engine} does not do with the export what specctl does with the package",
            where=str(out),
            found="; ".join(proof.faults)[:400],
            expected="the same texts, and as many drafted tokens accepted",
            do="do not serve it there; report it with the output of the same command and --json",
        )
    return proof.to_json()


def _refuse_useless(out: Path | None, to: str | None, push: str | None, also: str) -> None:
    """Flags of an upload without one, and an export that has no place."""
    if push is None and also:
        raise RecipeError(
            "there is nothing to upload",
            where=also,
            found="no --push",
            expected="--push REPO beside it",
            do="--push OWNER/NAME",
        )
    if out is None and (push is None or to is not None):
        raise RecipeError(
            "there is no folder to write to",
            where="--out",
            found="no --out",
            expected="a folder, or --push alone, which uploads the package as it is",
            do="--out FOLDER",
        )
