"""`specctl verify`: prove that a drafter is whole, belongs to its target, and changes no answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.api.arguments.outputs import check_file, write_report
from specctl.api.arguments.targets import target_json
from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import with_text
from specctl.cli.options.flags import Allow, Chat, TranslateSetting
from specctl.cli.options.loading import DraftChoice
from specctl.cli.options.names import check_drafter
from specctl.cli.options.prompts import tell_chat
from specctl.cli.options.target_choice import OWN, AnsweringChoice, loading
from specctl.core.errors import GateError
from specctl.core.storage.hub_access import go_offline

if TYPE_CHECKING:
    from specctl.api.verify import VerifyResult
    from specctl.runtime.proof.proof_report import Check

OWN_TARGET = AnsweringChoice(name=OWN, dtype="float32")  # no name: what the package was made for


def verify(
    console: Console,
    draft: Annotated[
        str, typer.Argument(metavar="PATH", help="A package, or a drafter without training.")
    ],
    level: Annotated[
        str, typer.Option(help="files, compat, lossless or full; each includes those before it.")
    ] = "lossless",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also write the report as JSON.")
    ] = None,
    allow: Allow = None,
    translate: TranslateSetting = "auto",
    chat: Chat = None,
    target: AnsweringChoice = OWN_TARGET,
) -> None:
    """Verify a drafter against its target (without --target, the one it was made for).

    Prints counts and p-values, and stores them in the package (.verification/, which changes no
    digest). Exits with 8 if anything contradicts losslessness. Levels:

    files: every byte is what was written.

    compat: target, tokenizer, template, taps and vocabulary match.

    lossless: greedy output equals plain decoding (token for token in float32, up to rounding ties
    in bfloat16), sampled output has the target's distribution, caches roll back, and the rules pass
    enumeration.

    full: the same with more samples, every rule and every policy that can grow the drafter.

    A family that is approximate by design is refused; --allow approximate measures it instead.

    Examples:

      specctl verify runs/quickstart/package
      specctl verify prompt-lookup --target tiny --level lossless --json
    """
    from specctl.api.verify import (
        APPROXIMATE,
        LEVELS,
        VerifyResult,
        check_fit,
        check_level,
        check_stored,
        prove_draft,
    )

    check_level(level)
    check_drafter(draft)
    check_file(out)
    if target.offline:
        go_offline()
    settings = DraftChoice(draft, allow=[*_of_package(allow)] or None, translate=translate)
    again = [*target.words(OWN_TARGET), "--draft", draft, *settings.words(), "--compare"]
    stored = [check_stored(draft)]
    _tell(console, stored[0])
    if level == LEVELS[0]:
        _finish(console, VerifyResult(draft, level, tuple(stored)), {}, out, again)
        return
    found = target.or_own(draft)
    console.say(loading(found))
    model = found.load(console, None, wanted=settings.wanted(draft))
    loaded = settings.load(model)
    loaded.announce(console)
    stored.append(check_fit(model))
    _tell(console, stored[1])
    approximate = APPROXIMATE in (allow or ())
    tell_chat(console, model, chat)
    result = prove_draft(
        model, loaded, level, stored, approximate=approximate, chat=chat, reporter=console
    )
    _finish(console, result, {"target": target_json(model)}, out, again)


def _of_package(allow: Sequence[str] | None) -> list[str]:
    """The mismatches that are accepted; the other word says what is to be measured."""
    from specctl.api.verify import APPROXIMATE

    return [name for name in allow or () if name != APPROXIMATE]


def _tell(console: Console, check: Check) -> None:
    console.out(f"{check.name:10} passed  {check.note}")


def _finish(
    console: Console,
    found: VerifyResult,
    more: Mapping[str, Any],
    out: Path | None,
    again: Sequence[str],
) -> None:
    proof, result = found.proof, {**found.to_json(), **more}
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
    console.done(result, next=[with_text("generate", *again)])
