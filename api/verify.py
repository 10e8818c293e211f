"""verify(): prove that a drafter is whole, belongs to its target, and changes no answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specctl.api.arguments.attention_only import attention_only
from specctl.api.arguments.drafting import DrafterLike, LoadedDraft, load_draft
from specctl.api.arguments.progress import Progress, as_reporter
from specctl.api.arguments.prompts import Prompt, encode_prompts
from specctl.api.arguments.targets import TargetLike, target_json, target_or_own
from specctl.api.failures import raises_user_errors
from specctl.api.measured.measurement import target_words
from specctl.core.errors import RecipeError, SpecctlError, nearest
from specctl.core.messages.printable import counted
from specctl.core.messages.table import Table, Tabled
from specctl.export.package.find import Kind, locate
from specctl.export.package.manifest import MANIFEST, check_files, package_in
from specctl.export.package.proof_record import write_record
from specctl.recipes.drafter_names import drafter_names, drafter_words
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.proof import prove
from specctl.runtime.proof.proof_report import LEVELS as PROOFS
from specctl.runtime.proof.proof_report import Check, Proof
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

APPROXIMATE = "approximate"
LEVELS = ("files", "compat", "lossless", "full")


@dataclass(frozen=True, slots=True, repr=False)
class VerifyResult(Tabled):
    """What was found: `stored` about files and compatibility, `proof` by the checks of losslessness
    (None below that level). `kept` is the record in the package, if one could be written."""

    path: str
    level: str
    stored: tuple[Check, ...]
    proof: Proof | None = None
    kept: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def checks(self) -> tuple[Check, ...]:
        return self.stored + (() if self.proof is None else self.proof.checks)

    @property
    def passed(self) -> bool:
        """Nothing contradicts what the drafter claims."""
        return self.proof is None or self.proof.passed

    def lines(self) -> list[str]:
        """Every check and what it found, for people."""
        stored = [f"{check.name:10} passed  {check.note}" for check in self.stored]
        return stored + ([] if self.proof is None else self.proof.lines())

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def table(self) -> Table:
        """A row for every check."""
        stored = [(check.name, f"passed  {check.note}") for check in self.stored]
        return Table(("check", "found"), stored + ([] if self.proof is None else self.proof.rows()))

    def to_json(self) -> dict[str, Any]:
        stored = [{"name": c.name, "passed": c.passed, "note": c.note} for c in self.stored]
        found: dict[str, Any] = {"path": self.path, "level": self.level, "checks": stored}
        if self.proof is not None:
            found |= {"proof": self.proof.to_json(), "kept": self.kept}
        return found


@raises_user_errors
def verify(
    target: TargetLike,
    drafter: DrafterLike,
    level: str = "lossless",
    *,
    prompts: Prompt | Sequence[Prompt] | None = None,
    sampling: Sampling | None = None,
    allow: Sequence[str] = (),
    chat: bool | None = None,
    progress: Progress = None,
    **drafting: Any,
) -> VerifyResult:
    """Verify a drafter against its target (None: the one its package was made for, in float32).

    `level`: "files" (every byte is what was written), "compat" (target, tokenizer, template, taps
    and vocabulary fit), "lossless" (greedy output is token-identical, sampled output has the
    target's distribution, caches roll back, the rules pass enumeration), "full" (more samples,
    every rule and policy); each includes those before it. A failed proof is a result with `passed`
    False; it is kept in the package. `sampling` is the distribution to test (temperature 1).
    `drafting` is how to draft, and `chat` how prompts are read, as in `generate`. An approximate
    family is refused unless `allow` holds "approximate", which measures it instead.
    """
    check_level(level)
    reporter = as_reporter(progress)
    path = Path(drafter) if isinstance(drafter, (str, Path)) else None
    stored = [] if path is None else [check_stored(str(drafter))]
    if level == LEVELS[0]:
        name = drafter.name if isinstance(drafter, LoadedDraft) else str(drafter)
        return VerifyResult(name, level, tuple(stored))
    wanted = attention_only([drafter], *map(drafting.get, ("parallel", "policy", "rule")))
    model = target_or_own(target, drafter, dtype="float32", wanted=wanted)
    names = [name for name in allow if name != APPROXIMATE]
    settings: dict[str, Any] = drafting | ({"allow": names} if names else {})
    draft = load_draft(drafter, model, **settings)
    draft.announce(reporter)
    ids = None if prompts is None else [p.ids for p in encode_prompts(model, prompts, chat)]
    stored.append(check_fit(model))
    return prove_draft(
        model,
        draft,
        level,
        stored,
        prompts=ids,
        sampling=sampling,
        approximate=APPROXIMATE in allow,
        chat=chat,
        reporter=reporter,
    )


def check_level(level: str) -> None:
    """Refuse another word."""
    if level not in LEVELS:
        raise RecipeError(
            f"unknown level {level!r}",
            where="--level",
            found=level,
            expected="one of " + ", ".join(LEVELS),
            do=f"--level {nearest(level, LEVELS, 1)}",
        )


def check_stored(drafter: str) -> Check:
    """Every byte of a package is what was written, or an error names the file; of several drafters
    each."""
    folders = [_stored_in(name) for name in drafter_names(drafter)]
    manifests = [check_files(folder) for folder in folders if folder is not None]
    if not manifests:
        return Check("files", True, 0, note="nothing stored")
    count = sum(len(manifest.files) for manifest in manifests)
    digests = ", ".join(f"digest {manifest.digest[:12]}" for manifest in manifests)
    return Check("files", True, count, note=f"{counted(count, 'file')}, {digests}")


def _stored_in(drafter: str) -> Path | None:
    """The package of that name; None: a drafter of which nothing is stored."""
    if drafter not in drafter_words() and Path(drafter).is_dir():
        return package_in(Path(drafter))
    found = locate(drafter)  # refuses what is nowhere
    return found.folder if found.kind is Kind.PACKAGE else None


def check_fit(target: Target) -> Check:
    """That a drafter was loaded beside the target: what does not fit is refused then."""
    return Check("compat", True, 1, note=f"fits target {target.name}")


def prove_draft(
    target: Target,
    draft: LoadedDraft,
    level: str,
    stored: Sequence[Check],
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    sampling: Sampling | None = None,
    approximate: bool = False,
    chat: bool | None = None,
    reporter: Reporter,
) -> VerifyResult:
    """The checks of losslessness on a loaded drafter, where the level includes them."""
    result = VerifyResult(draft.name, level, tuple(stored))
    if level not in PROOFS:
        return result
    if draft.drafter is None:
        raise SpecctlError(
            "there is no drafter to verify",
            found=draft.name,
            expected="a package, prompt-lookup or token-recycling",
            do='specctl.verify(target, "prompt-lookup")',
        )
    proof = prove.verify(
        target,
        draft.drafter,
        level=level,
        prompts=prompts,
        policy=draft.policy,
        rule=draft.rule,
        sampling=sampling,
        reporter=reporter,
        approximate=approximate,
        chat=chat,
    )
    found = replace(result, proof=proof, warnings=proof.warnings)
    return replace(found, kept=_keep(found, target, reporter))


def _keep(result: VerifyResult, target: Target, reporter: Reporter) -> str | None:
    """Record the proof inside the package; a package that cannot be written stays as it is."""
    if result.proof is None or not (Path(result.path) / MANIFEST).is_file():
        return None
    if target.mixture is not None:
        reporter.say(f"not kept in the package, which is for {target.name} alone")
        return None
    body = {"level": result.level, "target": target_json(target), "proof": result.proof.to_json()}
    level = ("--level", result.proof.level)
    command = ["specctl", "verify", result.path, *target_words(target), *level]
    rows = [*result.proof.rows(), ("claim", result.proof.claim)]
    try:
        return str(write_record(Path(result.path), body, rows, command))
    except OSError as error:
        reporter.warn(f"the report could not be kept in the package: {error}")
        return None
