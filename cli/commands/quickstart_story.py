"""What the stories of `specctl quickstart` share: training, the proof, and how steps are shown: in
plain words, bookkeeping with --verbose."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from specctl.cli.app.console import Console
from specctl.cli.app.memory import peak_memory, peak_text
from specctl.cli.app.progress import duration
from specctl.core.errors import GateError
from specctl.core.messages.printable import counted
from specctl.core.storage.files import write_json
from specctl.runtime.measure.reporter import Advance

if TYPE_CHECKING:
    from specctl.api.arguments.drafting import LoadedDraft
    from specctl.recipes.schema import Recipe
    from specctl.runtime.proof.proof_report import Check
    from specctl.runtime.target.target import Target

FULL_MINUTES = 10.0  # the budget for which sizes are meant, on two CPU cores
CHECKS = {
    "rules, exact": ("the rule that accepts guesses keeps the distribution, exactly", "case"),
    "rules, fast": ("its fast and its plain implementation decide alike", "random draft"),
    "greedy identity": ("greedy text is that of plain decoding", "token"),
    "seeded identity": ("with a fixed seed, sampled text is that of plain decoding", "token"),
    "cache rollback": ("after a rejected guess, the cache is that of plain decoding", "round"),
    "distribution": ("sampled text has the target's distribution", "sample"),
    "drafts follow": ("guesses come from the probabilities that they are judged by", "guess"),
}  # by the first words of a check: what it shows, and what it counts


@dataclass(frozen=True, slots=True)
class StoryPlace:
    """Where a story takes place: the target's name, the run folder, the minutes that there are, the
    recipe that is trained, and the flags that name the recipe of a chat model's drafter, with its
    changes, to another command."""

    console: Console
    target: str
    out: Path
    minutes: float
    recipe: Recipe
    recipe_words: tuple[str, ...] = ()
    began: float = field(default_factory=time.monotonic)

    def finished(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """The result with what every story says, written to OUT/quickstart.json."""
        seconds = time.monotonic() - self.began
        self.console.say(
            f"\nDone in {duration(seconds)}, {peak_text()}. Everything is in {self.out}."
        )
        about = {"target": self.target, "out": str(self.out), "seconds": round(seconds, 1)}
        whole = {**about, "peak_bytes": peak_memory(), **result}
        write_json(self.out / "quickstart.json", whole)
        return whole


@dataclass(frozen=True, slots=True)
class StoryReporter:
    """A reporter that leaves the bookkeeping of training and trimming to --verbose."""

    console: Console
    BOOKKEEPING: ClassVar[re.Pattern[str]] = re.compile(
        r"(answers|data|package|self|features|draft vocabulary): |"
        r"(starts from|trains|frozen|counting tokens|vocab-trim:) |frozen, shared|"
        r"[\d,]+ rows? to train on"
    )

    def say(self, text: str) -> None:
        show = self.console.detail if self.BOOKKEEPING.match(text) else self.console.say
        show(text)

    def warn(self, text: str) -> None:
        self.console.warn(text)

    def task(self, label: str, total: int, unit: str) -> AbstractContextManager[Advance]:
        return self.console.task(label, total, unit)


class TrimReporter(StoryReporter):
    """What trimming alone says of the speed is no news before the two drafters are compared."""

    __slots__ = ()

    def warn(self, text: str) -> None:
        self.console.detail(f"warning: {text}")


class ProofReporter(StoryReporter):
    """How far the proof is, without the names of its checks, which are said in words at its end."""

    __slots__ = ()

    @contextmanager
    def task(self, label: str, total: int, unit: str) -> Iterator[Advance]:
        with self.console.task(label, total, unit) as advance:
            yield lambda amount, note="": advance(amount)


def in_plain_words(checks: Sequence[Check]) -> list[str]:
    """A line for each kind of check that passed, and the number of its cases."""
    lines = []
    for start, (what, unit) in CHECKS.items():
        count = sum(check.count for check in checks if check.name.startswith(start))
        if count:
            lines.append(f"passed: {what} ({counted(count, unit, 'guesses' * (unit == 'guess'))})")
    known = tuple(CHECKS)
    lines += [f"passed: {check.name}" for check in checks if not check.name.startswith(known)]
    return lines


def train(place: StoryPlace) -> float | None:
    """Train and package, or go on where an earlier run ended; the best tau that was measured."""
    from specctl.api.train import train_and_package

    command = ["specctl", *sys.argv[1:]]
    reporter = StoryReporter(place.console)
    result = train_and_package(reporter, place.recipe, place.out, command=command)
    steps = f"trained {counted(result.steps, 'step')}"  # the time stands behind the bar
    tau = "" if result.tau is None else f": {result.tau:.2f} tokens per forward pass of the target"
    place.console.say(steps + tau)
    return result.tau


def prove(console: Console, target: Target, draft: LoadedDraft, level: str = "lossless") -> None:
    """Prove a drafter lossless as it is served, and say how. A package keeps its proof: an earlier
    one of this level or a stronger one, on this target, is shown again."""
    from specctl.api.verify import prove_draft

    console.explain(
        f"The target checks every guess, so drafting must not change the text. This is tested with "
        f"{draft.name}."
    )
    earlier = proved_before(Path(draft.name), target, level)
    if earlier:
        console.say("proved by an earlier run:")
        for line in in_plain_words(earlier):
            console.say(line)
        return
    proof = prove_draft(target, draft, level, [], reporter=ProofReporter(console)).proof
    assert proof is not None, f"{level} is a level with a proof"
    show = console.detail if proof.passed else console.say
    for line in proof.lines():
        if not line.startswith("warning:"):
            show(line)
    if not proof.passed:
        raise GateError(
            "the drafter is not lossless",
            where=draft.name,
            found="a failed check above",
            expected="every check passed",
            do=f"report it with the output of `specctl verify {draft.name} --target {target.name} "
            "--json`",
        )
    for line in in_plain_words(proof.checks):
        console.say(line)


def proved_before(package: Path, target: Target, level: str) -> tuple[Check, ...]:
    """The checks of the proof that a package keeps, if it passed at this level or a stronger one on
    this very target in this arithmetic; else none."""
    from specctl.export.package.manifest import MANIFEST
    from specctl.export.package.proof_record import read_record
    from specctl.runtime.proof.proof_report import LEVELS, Check

    found = read_record(package) if (package / MANIFEST).is_file() else None
    if found is None:
        return ()
    about, proof = found["target"], found["proof"]
    same = (about["fingerprint"], about["dtype"], about["inflated"]) == (
        target.fingerprint,
        target.dtype_name,
        target.inflated,
    )
    levels = list(LEVELS)  # the weakest first
    is_enough = found["level"] in levels[levels.index(level) :]
    if not (same and is_enough and proof["passed"]):
        return ()
    return tuple(Check(**one) for one in proof["checks"])
