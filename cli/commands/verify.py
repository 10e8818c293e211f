"""`specctl verify`: prove that a drafter is whole, belongs to its target, and changes no answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.cli.app.console import Console
from specctl.cli.app.outputs import check_file, write_report
from specctl.cli.options.flags import Allow, TranslateFlag
from specctl.cli.options.loading import DraftChoice
from specctl.cli.options.measurement import target_words
from specctl.cli.options.target_choice import OWN, TargetChoice, go_offline, target_json
from specctl.core.errors import GateError, RecipeError, nearest

if TYPE_CHECKING:
    from specctl.runtime.proof.proof_report import Proof
    from specctl.runtime.target.target import Target

OWN_TARGET = TargetChoice(name=OWN, dtype="float32")  # no name: what the package was made for
APPROXIMATE = "approximate"
LEVELS = ("files", "compat", "lossless", "full")


def verify(
    console: Console,
    draft: Annotated[
        str, typer.Argument(metavar="PATH", help="A package, or prompt-lookup / token-recycling.")
    ],
    level: Annotated[
        str, typer.Option(help="files, compat, lossless or full; each includes those before it.")
    ] = "lossless",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the report as JSON, too.")
    ] = None,
    allow: Allow = None,
    translate: TranslateFlag = "auto",
    target: TargetChoice = OWN_TARGET,
) -> None:
    """Verify a drafter against its target (without --target, the one it was made for).

    Prints counts and p-values, and keeps them in the package (.verification/, which changes no
    digest). Exits with 8 if anything contradicts losslessness.

    files: every byte is what was written.

    compat: target, tokenizer, template, taps and vocabulary fit.

    lossless: greedy output is that of plain decoding (token for token in float32, up to ties in
    rounding in bfloat16), sampled output has the target's distribution, caches roll back, the rules
    pass enumeration. full: the same with more samples, every rule and every policy that may grow
    the drafter.

    A family that is approximate by design is refused; --allow approximate measures it instead.

    Examples:

      specctl verify runs/quickstart/package
      specctl verify prompt-lookup --target tiny --level lossless --json
    """
    if level not in LEVELS:
        raise RecipeError(
            f"unknown level {level!r}",
            where="--level",
            found=level,
            expected="one of " + ", ".join(LEVELS),
            do=f"--level {nearest(level, LEVELS, 1)}",
        )
    check_file(out)
    if target.offline:
        go_offline()
    result: dict[str, Any] = {"path": draft, "level": level, "checks": []}
    _check_files(console, result, draft)
    proof = None
    if level != "files":
        model = target.or_own(draft).load(console)
        names = [name for name in allow or () if name != APPROXIMATE]
        loaded = DraftChoice(draft, allow=names or None, translate=translate).load(model)
        loaded.announce(console)
        result["target"] = target_json(model)
        _passed(console, result, "compat", f"fits target {model.name}")
        if level in ("lossless", "full"):
            from specctl.runtime.proof.prove import verify as prove

            assert loaded.drafter is not None, "a name other than none gives a drafter"
            proof = prove(
                model,
                loaded.drafter,
                level=level,
                policy=loaded.policy,
                rule=loaded.rule,
                reporter=console,
                approximate=APPROXIMATE in (allow or ()),
            )
            result["proof"] = proof.to_json()
            result["kept"] = _keep(console, draft, result, proof, model)
    _finish(console, result, proof, out)


def _is_package(draft: str) -> bool:
    return Path(draft).is_dir()


def _keep(
    console: Console, draft: str, result: dict[str, Any], proof: Proof, target: Target
) -> str | None:
    """Record the proof inside the package; a package that cannot be written stays as it is."""
    from specctl.export.package.manifest import MANIFEST

    if not (Path(draft) / MANIFEST).is_file():
        return None
    from specctl.export.package.proof_record import write_record

    body = {name: result[name] for name in ("level", "target", "proof")}
    command = ["specctl", "verify", draft, *target_words(target), "--level", proof.level]
    rows = [*proof.rows(), ("claim", proof.claim)]
    try:
        return str(write_record(Path(draft), body, rows, command))
    except OSError as error:
        console.warn(f"the report could not be kept in the package: {error}")
        return None


def _check_files(console: Console, result: dict[str, Any], draft: str) -> None:
    from specctl.export.package.find import Kind, locate
    from specctl.export.package.manifest import check_files

    folder: Path | None = Path(draft)
    if not _is_package(draft):
        found = locate(draft)  # refuses what is nowhere
        folder = found.folder if found.kind is Kind.PACKAGE else None
    if folder is None:
        _passed(console, result, "files", "nothing stored")
        return
    manifest = check_files(folder)
    count = len(manifest.files)
    _passed(console, result, "files", f"{count} files, digest {manifest.digest[:12]}")


def _passed(console: Console, result: dict[str, Any], name: str, note: str) -> None:
    result["checks"].append({"name": name, "passed": True, "note": note})
    console.out(f"{name:10} passed  {note}")


def _finish(
    console: Console, result: dict[str, Any], proof: Proof | None, out: Path | None
) -> None:
    console.result = result
    if proof is not None:
        for line in proof.lines():
            if not line.startswith("warning:"):  # said when it was found
                console.out(line)
        if proof.passed:
            console.out(proof.claim)
    if out is not None:
        write_report(out, result)
    if proof is not None and not proof.passed:
        raise GateError(
            "the drafter is not lossless on this target",
            where=str(result["path"]),
            found="a failed check above",
            expected="every check passed",
            do="do not use it; report it with the output of the same command and --json",
        )
    following = f'specctl generate --draft {result["path"]} --compare "..."'
    console.done(result, next=[following])
