"""verify(): prove on a user's own pair that a drafter changes no answer.

Every check runs the real engine with the real drafter and compares with a witness that shares no
code with it (oracle.py, verify/enumerate.py). A failed check means: do not use the drafter.
Warnings are about speed, not about answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from specctl.drafters import families
from specctl.drafters.parts.base import Drafter
from specctl.drafters.parts.tree import NodeKind
from specctl.recipes.errors import RecipeError
from specctl.runtime.engine import Engine
from specctl.runtime.generate import default_policy
from specctl.runtime.oracle import Joint, Replay, Watched, dense_logits, tolerance
from specctl.runtime.policies import make_policy
from specctl.runtime.policies.base import Policy
from specctl.runtime.report import Reporter, SilentReporter
from specctl.runtime.sampling import Sampling
from specctl.runtime.session import Completion, Request, Row
from specctl.runtime.target import Target
from specctl.runtime.verify import RULES, default_rule, legal, legal_rules
from specctl.runtime.verify.cases import proof_cases
from specctl.runtime.verify.compare import differences, random_round
from specctl.runtime.verify.enumerate import enumerate_case

ALARM = 1e-5  # false alarm rate of each statistical check
MAX_Z = 4.5
TEXTS = (
    "def main():\n    ",
    "The capital of France is",
    "import os\nimport sys\n\n",
    "Once upon a time there was",
    "1, 2, 3, 4, 5,",
    "class Node:\n    def __init__(self, value):\n        self.value = value\n",
    "In order to understand this, we first have to",
    "if x > 0:\n    return x\nelse:\n    return",
)


@dataclass(frozen=True, slots=True)
class Level:
    """How much is run: prompts and tokens of identity checks, samples of the law and their length
    (a draft is one token shorter), cases."""

    prompts: int
    tokens: int
    samples: int
    length: int
    all_rules: bool
    enumeration: str


LEVELS = {
    "lossless": Level(8, 40, samples=1_000, length=3, all_rules=False, enumeration="slice"),
    "full": Level(32, 96, samples=20_000, length=4, all_rules=True, enumeration="full"),
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


@dataclass(frozen=True, slots=True)
class Proof:
    """All findings on a pair. `passed`: nothing contradicts that the drafter is lossless."""

    target: str
    family: str
    level: str
    checks: tuple[Check, ...]
    warnings: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def lines(self) -> list[str]:
        """For people: one line per check, then warnings."""
        found = []
        for check in self.checks:
            word = "passed" if check.passed else "FAILED"
            p = "" if check.p_value is None else f", p = {check.p_value:.2g}"
            found.append(f"{check.name:28s} {word}  {check.count:,} {check.note}{p}")
        return found + [f"warning: {text}" for text in self.warnings]

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "family": self.family,
            "level": self.level,
            "passed": self.passed,
            "checks": [asdict(check) for check in self.checks],
            "warnings": list(self.warnings),
        }


def verify(
    target: Target,
    drafter: Drafter,
    *,
    level: str = "lossless",
    prompts: Sequence[str | Sequence[int]] | None = None,
    policy: Policy | None = None,
    rule: str = "auto",
    sampling: Sampling | None = None,
    reporter: Reporter | None = None,
) -> Proof:
    """Run the battery. `sampling` is the law to test (default: temperature 1); `policy` and `rule`
    are how the drafter will be served (default: its family's first policy, the best legal rule).
    """
    if level not in LEVELS:
        raise RecipeError("unknown level of proof", found=level, expected=", ".join(LEVELS))
    battery = _Battery(
        target,
        drafter,
        LEVELS[level],
        [tuple(p) for p in _prompts(target, prompts, LEVELS[level].prompts)],
        policy or default_policy(drafter),
        rule,
        sampling or Sampling(temperature=1.0),
    )
    steps = battery.steps()
    reporter = reporter or SilentReporter()
    checks: list[Check] = []
    with reporter.task("verify", len(steps), "checks") as advance:
        for step in steps:
            checks.extend(step())
            advance(1, checks[-1].name)
    warnings = tuple(battery.warnings())
    for text in warnings:
        reporter.warn(text)
    return Proof(target.name, drafter.family, level, tuple(checks), warnings)


def _prompts(
    target: Target, prompts: Sequence[str | Sequence[int]] | None, count: int
) -> Iterator[list[int]]:
    """Given prompts as ids, else short built-in texts (random ids without a tokenizer)."""
    longest = max(1, target.spec.max_positions // 4)
    if prompts is not None:
        for prompt in prompts:
            ids = target.encode(prompt) if isinstance(prompt, str) else list(prompt)
            yield ids[-longest:]
        return
    rng = np.random.default_rng(0)
    for i in range(count):
        if target.tokenizer is not None and i < len(TEXTS):
            yield target.encode(TEXTS[i])[-longest:]
        else:
            size = int(rng.integers(1, min(longest, 24) + 1))
            yield rng.integers(0, target.spec.vocab_size, size).tolist()


@dataclass(slots=True)
class _Battery:
    """The checks on one pair; remembers acceptance and drafts for the warnings."""

    target: Target
    drafter: Drafter
    level: Level
    prompts: list[tuple[int, ...]]
    policy: Policy
    rule: str
    sampling: Sampling
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    sane: bool | None = None

    def steps(self) -> list[Callable[[], list[Check]]]:
        found = [self.rules, self.greedy, self.seeded, self.caches]
        return found + [partial(self.law, policy, rule) for policy, rule in self._sampled()]

    def _sampled(self) -> Iterator[tuple[Policy, str]]:
        """What is tested against the exact law: as served; at the full level every legal rule of
        that policy, and the family's other policies too."""
        for policy in self._policies().values() if self.level.all_rules else [self.policy]:
            kind = policy.kind(sampled=True)
            served = policy is self.policy
            if self.level.all_rules and served:
                for rule in legal_rules(kind, policy.is_chain):
                    if rule != "greedy":
                        yield policy, rule
            elif served and self.rule not in ("auto", "greedy"):
                yield policy, self.rule
            else:
                yield policy, default_rule(kind, policy.is_chain)

    # -- the rules themselves ---------------------------------------------------------------------

    def rules(self) -> list[Check]:
        """Enumeration of the scalar rules, and the fast rules against them."""
        count, worst = _enumerated(self.level.enumeration)
        note = f"cases enumerated, max error {worst:.1e}"
        exact = Check("rules, exact law", worst <= 1e-12, count, worst, None, note)
        trees = wrong = 0
        for rule in RULES:
            for kind in NodeKind:
                for is_chain in (True, False):
                    if legal(rule, kind, is_chain):
                        one = random_round(np.random.default_rng(trees), kind, is_chain)
                        wrong += differences(rule, one)
                        trees += len(one.scores_BTV)
        note = f"random trees, {wrong} decided differently"
        return [exact, Check("rules, fast and scalar", wrong == 0, trees, float(wrong), None, note)]

    # -- identity ---------------------------------------------------------------------------------

    def greedy(self) -> list[Check]:
        """Greedy output, under every policy of the family, against plain decoding."""
        found = []
        for name, policy in self._policies().items():
            sampling = Sampling(max_new_tokens=self._tokens(), ignore_eos=True)
            replay, done = Replay(), self._run(policy, "auto", [sampling] * len(self.prompts), 3)
            for completion in done:
                replay.read(self.target, completion.request.tokens, completion.tokens, sampling)
            self._count(done)
            found.append(_replayed(f"greedy identity, {name}", replay))
        return found

    def seeded(self) -> list[Check]:
        """Rule target-only: one seed, one text, whatever drafts."""
        samplings = [
            replace(self.sampling, seed=i, max_new_tokens=self._tokens(), ignore_eos=True, stop=())
            for i in range(len(self.prompts))
        ]
        replay = Replay()
        for completion in self._run(self.policy, "target-only", samplings, 3):
            request = completion.request
            replay.read(self.target, request.tokens, completion.tokens, request.sampling)
        return [_replayed("seeded identity, target-only", replay)]

    # -- caches -----------------------------------------------------------------------------------

    def caches(self) -> list[Check]:
        """After every round: the next logits from the cache against a fresh forward."""
        size = max(self._tokens() // 2, 3 * (self.policy.depth + 1))
        sampling = replace(self.sampling, max_new_tokens=size, ignore_eos=True, stop=())
        worst, bound, count = 0.0, 0.0, 0
        engine = self._engine(self.policy, "auto", 2)

        def look(row: Row, new: tuple[int, ...]) -> None:
            nonlocal worst, bound, count
            if row.finished is None and new:
                fresh_V = dense_logits(self.target, [row.tokens])[0, -1]
                gap = (_cached_logits(engine, row) - fresh_V).abs().max()
                bound = tolerance(self.target, fresh_V) if bound == 0.0 else bound
                worst, count = max(worst, float(gap)), count + 1

        requests = [
            Request(prompt, replace(sampling, seed=i)) for i, prompt in enumerate(self.prompts[:4])
        ]
        engine.run(requests, look)
        ok = count > 0 and worst <= 4 * bound
        note = f"rounds, max logit difference {worst:.1e} (bound {4 * bound:.1e})"
        return [Check("cache rollback", ok, count, worst, None, note)]

    # -- the law ----------------------------------------------------------------------------------

    def law(self, policy: Policy, rule: str) -> list[Check]:
        """The first two tokens against the target's exact joint law, and drafts against their q."""
        prompt, name = max(self.prompts, key=len)[:8], f"{type(policy).__name__} {rule}"
        watched = Watched(policy)
        count = self.level.samples
        size = max(2, min(policy.depth + 1, self.level.length))
        sampling = replace(self.sampling, max_new_tokens=size, ignore_eos=True, stop=())
        engine = self._engine(watched, rule, 64)
        done = engine.run([Request(prompt, replace(sampling, seed=i)) for i in range(count)])
        self._count(done)
        found = Joint(self.target, prompt, sampling, count).test([c.tokens for c in done])
        note = f"samples of two tokens, {found.cells} cells, TV {found.total_variation:.3f}"
        passed = found.p_value > ALARM
        checks = [Check(f"law, {name}", passed, count, found.total_variation, found.p_value, note)]
        draws = watched.draws
        if draws.nodes:
            self.sane = draws.is_sane
            honest = abs(draws.z) <= MAX_Z and not draws.impossible and draws.worst_sum < 1e-3
            note = f"drafts against their q: z = {draws.z:.2f}, impossible {draws.impossible}"
            worst = max(abs(draws.z), float(draws.impossible))
            checks.append(Check(f"drafts follow q, {name}", honest, draws.nodes, worst, None, note))
        return checks

    # -- helpers ----------------------------------------------------------------------------------

    def warnings(self) -> Iterator[str]:
        """Lossless but useless: nearly nothing is accepted though the draft has opinions."""
        if self.rounds < 50 or self.drafted < self.rounds or self.sane is False:
            return
        if self.accepted < 0.02 * self.rounds:
            yield (
                f"almost nothing is accepted ({self.accepted:,} of {self.drafted:,} drafted tokens "
                f"in {self.rounds:,} rounds) although the drafts are not noise; likely causes: "
                "trained for another target or revision, wrong feature layers, another chat "
                "template or tokenizer, a damaged vocabulary map"
            )

    def _tokens(self) -> int:
        room = self.target.spec.max_positions - max(map(len, self.prompts))
        return max(2, min(self.level.tokens, room))

    def _policies(self) -> dict[str, Policy]:
        """The served policy first, then the family's others at their defaults."""
        found = {type(self.policy).__name__: self.policy}
        entry = families().get(self.drafter.family)
        for name in entry.policies if entry is not None else ():
            policy = make_policy({"policy": name})
            found.setdefault(type(policy).__name__, policy)
        return found

    def _engine(self, policy: Policy, rule: str, slots: int) -> Engine:
        return Engine(self.target, self.drafter, policy, rule, num_slots=slots)

    def _run(
        self, policy: Policy, rule: str, samplings: Sequence[Sampling], slots: int
    ) -> list[Completion]:
        pairs = zip(self.prompts, samplings, strict=True)
        return self._engine(policy, rule, slots).run([Request(p, s) for p, s in pairs])

    def _count(self, done: Sequence[Completion]) -> None:
        self.rounds += sum(c.stats.rounds for c in done)
        self.drafted += sum(c.stats.drafted for c in done)
        self.accepted += sum(c.stats.accepted for c in done)


@cache
def _enumerated(level: str) -> tuple[int, float]:
    """Number of cases and worst error; it does not depend on the pair."""
    errors = [enumerate_case(case).error for case in proof_cases(level)]
    return len(errors), max(errors)


def _replayed(name: str, replay: Replay) -> Check:
    note = f"tokens, {replay.unexplained} differ, {replay.explained} rounding ties"
    if replay.first:
        note += f" ({replay.first})"
    return Check(name, replay.unexplained == 0, replay.tokens, replay.worst, None, note)


@torch.inference_mode()
def _cached_logits(engine: Engine, row: Row) -> torch.Tensor:
    """Logits after a row's last token, read through the engine's cache. The entry it writes lies
    where the next round writes anyway."""
    cache, device = engine._cache(), engine.target.device
    slot_B = torch.tensor([row.slot], device=device)
    kept_B = torch.tensor([row.kept_len], device=device)
    cache.begin((row.slot,), slot_B, kept_B, 1, row.kept_len + 1)
    masks = engine.target.lm.chain_masks(kept_B, 1, row.kept_len + 1)
    ids_BT = torch.tensor([[row.tokens[-1]]], device=device)
    out = engine.target.lm.forward(ids_BT, kept_B[:, None], masks, cache)
    assert out.logits_BTV is not None
    return out.logits_BTV[0, 0].float()
