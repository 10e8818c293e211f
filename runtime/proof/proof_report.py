"""What a proof covers and what it finds: levels, checks, and the findings on a pair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from specctl.core.messages.claim import meaning, stamp
from specctl.runtime.measure.reporter import Advance
from specctl.runtime.proof.sample_size import samples_for


@dataclass(frozen=True, slots=True)
class ProofLevel:
    """How much is run: prompts and tokens of identity checks, samples of the distribution and their
    length (a draft is one token shorter), cases. `all_rules`: also every other policy and rule that
    fits, each with `other_samples` (None: as many)."""

    prompts: int
    tokens: int
    samples: int
    length: int
    all_rules: bool
    enumeration: str
    other_samples: int | None = None


# Samples are as many as show a distribution that far (total variation) from the target's: 10 % in
# under a minute on one core and the embedded target; 7 % as served and 15 % for all other ways in
# minutes. `quick`, 20 %, is what `specctl quickstart` has time for on a chat model.
LEVELS = {
    "quick": ProofLevel(4, 24, samples_for(0.2), length=3, all_rules=False, enumeration="quick"),
    "lossless": ProofLevel(8, 40, samples_for(0.1), length=3, all_rules=False, enumeration="quick"),
    "full": ProofLevel(
        16,
        48,
        samples_for(0.07),
        length=4,
        all_rules=True,
        enumeration="slice",
        other_samples=samples_for(0.15),
    ),
}


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: how many things were looked at, the worst, a p-value where there is one."""

    name: str
    passed: bool
    count: int
    worst: float = 0.0
    p_value: float | None = None
    note: str = ""

    @property
    def is_about_distribution(self) -> bool:
        """Whether it compares outputs with the target's, not parts of the machinery."""
        return self.name.startswith(("greedy identity", "distribution,"))


@dataclass(frozen=True, slots=True)
class ProofStep:
    """One check and its cost in short texts, which the running check reports as it goes."""

    texts: int
    run: Callable[[Advance], list[Check]]

    @classmethod
    def whole(cls, texts: int, check: Callable[[], list[Check]]) -> ProofStep:
        """A check that reports once, at its end."""

        def run(advance: Advance) -> list[Check]:
            found = check()
            advance(texts, found[-1].name)
            return found

        return cls(texts, run)


@dataclass(frozen=True, slots=True)
class Proof:
    """All findings on a pair. `passed`: nothing contradicts what `verification` claims. A drafter
    that is approximate by construction is measured: how far its distribution is from the target's
    is reported and decides nothing. `dtype`: what the target computed in. `mixture`: the law of
    two models that stands for the target's own."""

    target: str
    family: str
    level: str
    checks: tuple[Check, ...]
    warnings: tuple[str, ...] = ()
    verification: str = "lossless"
    dtype: str | None = None
    mixture: str | None = None

    @property
    def claim(self) -> str:
        """What was checked, in the arithmetic in which it was."""
        mark = stamp(self.verification, self.dtype)
        if self.mixture is not None:
            mark = f"{mark}, of {self.mixture}"
        return f"{mark}: {meaning(self.verification, self.dtype)}"

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks if self._is_judged(check))

    def _is_judged(self, check: Check) -> bool:
        return self.verification == "lossless" or not check.is_about_distribution

    def rows(self) -> list[tuple[str, str]]:
        """Each check and what it found, then warnings."""
        found = []
        for check in self.checks:
            failed = "FAILED" if self._is_judged(check) else "differs"
            word = "passed" if check.passed else failed
            p = "" if check.p_value is None else f", p = {check.p_value:.2g}"
            found.append((check.name, f"{word}  {check.count:,} {check.note}{p}"))
        return found + [("warning:", text) for text in self.warnings]

    def lines(self) -> list[str]:
        """The rows for people."""
        rows = self.rows()
        checks = [name for name, _ in rows if name != "warning:"]
        width = max(map(len, checks), default=0)
        return [f"{name:{0 if name == 'warning:' else width}s} {found}" for name, found in rows]

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "family": self.family,
            "level": self.level,
            "verification": self.verification,
            "dtype": self.dtype,
            "mixture": self.mixture,
            "claim": self.claim,
            "passed": self.passed,
            "checks": [asdict(check) for check in self.checks],
            "warnings": list(self.warnings),
        }
