"""verify(): prove on a user's own pair that a drafter changes no answer.

Every check runs the real engine with the real drafter and compares it with a witness that shares no
code with it (`reference_checks`, `enumerate`). A failed check means: do not use the drafter.
Warnings are about speed, not about answers.
Letters: B rows, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch

from specctl.core.drafter import Drafter
from specctl.core.errors import RecipeError, unknown
from specctl.core.tree import NodeKind
from specctl.drafters import families
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Completion, Request, Row
from specctl.runtime.generate import default_policy
from specctl.runtime.measure.reporter import Advance, Reporter, SilentReporter
from specctl.runtime.policies import make_policy, policies_of
from specctl.runtime.policies.base import Policy
from specctl.runtime.proof.cases import proof_cases
from specctl.runtime.proof.compare import differences, random_round
from specctl.runtime.proof.enumerate import enumerate_case
from specctl.runtime.proof.proof_report import LEVELS, Check, Proof, ProofLevel, ProofStep
from specctl.runtime.proof.reference_checks import (
    PairDistribution,
    Replay,
    WatchedPolicy,
    dense_logits,
    target_distribution,
    tolerance,
)
from specctl.runtime.proof.sample_size import ALARM, visible
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.runtime.verify import RULES, default_rule, legal, legal_rules
from specctl.runtime.verify.relaxed import relaxation

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


def proof_prompts(
    target: Target,
    prompts: Sequence[str | Sequence[int]] | None,
    count: int,
    chat: bool | None = None,
) -> Iterator[list[int]]:
    """Given prompts as ids, else short built-in texts (random ids without a tokenizer), with `chat`
    as a user's turns; None: as the target is spoken to."""
    is_chat = target.is_chat if chat is None else chat
    longest = max(1, target.spec.max_positions // 4)
    if prompts is not None:
        for prompt in prompts:
            ids = target.encode(prompt) if isinstance(prompt, str) else list(prompt)
            yield ids[-longest:]
        return
    rng = np.random.default_rng(0)
    for i in range(count):
        if target.tokenizer is not None and i < len(TEXTS):
            turn = {"role": "user", "content": TEXTS[i]}
            ids = target.encode_chat([turn]) if is_chat else target.encode(TEXTS[i])
            yield ids[-longest:]
        else:
            size = int(rng.integers(1, min(longest, 24) + 1))
            yield rng.integers(0, target.spec.vocab_size, size).tolist()


def open_prompt(
    target: Target, prompts: Sequence[tuple[int, ...]], sampling: Sampling, size: int = 8
) -> tuple[int, ...]:
    """The beginning of that prompt after which most is open: a distribution of one likely token
    would hide what is wrong with the others. Where all begin alike, as conversations do, it is a
    whole prompt."""
    starts = [prompt[:size] for prompt in prompts]
    if len({*starts}) == 1:
        starts = [*prompts]
    distributions = [target_distribution(target, [start], sampling)[0] for start in starts]
    entropy = [float(torch.special.entr(distribution_V).sum()) for distribution_V in distributions]
    return starts[entropy.index(max(entropy))]


@torch.inference_mode()
def cached_logits(engine: Engine, row: Row) -> torch.Tensor:
    """Logits after a row's last token, read through the engine's cache. The entry it writes lies
    where the next round writes anyway."""
    cache, device = engine.reader.kv, engine.target.device
    slot_B = torch.tensor([row.slot], device=device)
    kept_B = torch.tensor([row.kept_len], device=device)
    cache.begin((row.slot,), slot_B, kept_B, 1, row.kept_len + 1)
    masks = engine.target.lm.chain_masks(kept_B, 1, row.kept_len + 1)
    ids_BT = torch.tensor([[row.tokens[-1]]], device=device)
    out = engine.target.lm.forward(ids_BT, kept_B[:, None], masks, cache)
    assert out.logits_BTV is not None
    return out.logits_BTV[0, 0].float()


MAX_Z = 4.5
SHORT = 3  # tokens of a short text, the unit of progress
LAW_ROWS = 64  # rows sampled at once
CASES = {"quick": 500, "slice": 2_500, "full": 10_000}  # cost of an enumeration in short texts


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
    approximate: bool = False,
    chat: bool | None = None,
) -> Proof:
    """Run the battery. `sampling` is the distribution to test (default: temperature 1); `policy`
    and `rule` are how the drafter will be served (default: its family's first policy, the best
    legal rule). A drafter that is not lossless by construction is refused unless `approximate`
    wants a measurement of its distance instead of a proof. `chat`: as of `proof_prompts`.
    """
    if level not in LEVELS:
        raise unknown("level of proof", level, LEVELS, "level")
    is_relaxed = relaxation(rule) is not None
    is_lossless = drafter.lossless and not is_relaxed
    if not is_lossless and not approximate:
        cause = f"rule {rule}" if is_relaxed else f"family {drafter.family}"
        raise RecipeError(
            f"{cause} is approximate: it changes the target's answers by design",
            where="--allow",
            found="verification: approximate",
            expected="a lossless family and rule",
            do="specctl verify ... --allow approximate   (measures by how much)",
        )
    battery = _Battery(
        target,
        drafter,
        LEVELS[level],
        [tuple(p) for p in proof_prompts(target, prompts, LEVELS[level].prompts, chat)],
        policy or default_policy(drafter),
        rule,
        sampling or Sampling(temperature=1.0),
    )
    steps = battery.steps()
    reporter = reporter or SilentReporter()
    checks: list[Check] = []
    with reporter.task("verify", sum(step.texts for step in steps), "texts") as advance:
        for step in steps:
            checks.extend(step.run(advance))
    warnings = tuple(battery.warnings())
    for text in warnings:
        reporter.warn(text)
    mark = "lossless" if is_lossless else "approximate"
    dtype = target.dtype_name
    mixture = None if target.mixture is None else str(target.mixture)
    return Proof(target.name, drafter.family, level, tuple(checks), warnings, mark, dtype, mixture)


@dataclass(slots=True)
class _Battery:
    """The checks on one pair; remembers acceptance and drafts for the warnings."""

    target: Target
    drafter: Drafter
    level: ProofLevel
    prompts: list[tuple[int, ...]]
    policy: Policy
    rule: str
    sampling: Sampling
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    sane: bool | None = None
    prompt: tuple[int, ...] | None = None

    def steps(self) -> list[ProofStep]:
        written = len(self.prompts) * self._tokens() // SHORT
        found = [
            ProofStep.whole(CASES[self.level.enumeration], self.rules),
            ProofStep.whole(written * len(self._policies()), self.greedy),
            ProofStep.whole(written, self.seeded),
            ProofStep.whole(written, self.caches),
        ]
        return found + [self._distribution_step(*each) for each in self._sampled()]

    def _distribution_step(self, policy: Policy, rule: str, count: int) -> ProofStep:
        return ProofStep(count, lambda advance: self.distribution(policy, rule, count, advance))

    def _sampled(self) -> Iterator[tuple[Policy, str, int]]:
        """What is tested against the exact distribution, and with how many samples: as served; at
        the full level every legal rule of that policy, and every other policy that may grow the
        drafter."""
        kind = self.policy.kind(sampled=True)
        rule = self.rule if self.rule not in ("auto", "greedy") else ""
        served = rule or default_rule(kind, self.policy.is_chain)
        yield self.policy, served, self.level.samples
        if not self.level.all_rules:
            return
        others = self.level.other_samples or self.level.samples
        for name in legal_rules(kind, self.policy.is_chain):
            if name not in ("greedy", served):
                yield self.policy, name, others
        for policy in self._policies().values():
            if policy is not self.policy:
                own = default_rule(policy.kind(sampled=True), policy.is_chain)
                yield policy, own, others

    # -- the rules themselves ---------------------------------------------------------------------

    def rules(self) -> list[Check]:
        """Enumeration of the scalar rules, and the fast rules against them."""
        count, worst = _enumerated(self.level.enumeration)
        note = f"cases enumerated, max error {worst:.1e}"
        exact = Check("rules, exact distribution", worst <= 1e-12, count, worst, None, note)
        trees = wrong = 0
        for rule in RULES.working():
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
            is_served = policy is self.policy and relaxation(self.rule) is not None
            rule = self.rule if is_served else "auto"
            replay, done = Replay(), self._run(policy, rule, [sampling] * len(self.prompts), 3)
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
                gap = (cached_logits(engine, row) - fresh_V).abs().max()
                bound = tolerance(self.target, fresh_V) if bound == 0.0 else bound
                worst, count = max(worst, float(gap)), count + 1

        requests = [
            Request(prompt, replace(sampling, seed=i)) for i, prompt in enumerate(self.prompts[:4])
        ]
        engine.run(requests, look)
        ok = count > 0 and worst <= 4 * bound
        note = f"rounds, max logit difference {worst:.1e} (bound {4 * bound:.1e})"
        return [Check("cache rollback", ok, count, worst, None, note)]

    # -- the distribution
    # ----------------------------------------------------------------------------------

    def distribution(
        self, policy: Policy, rule: str, count: int | None = None, advance: Advance | None = None
    ) -> list[Check]:
        """The first two tokens against the target's exact joint distribution, and drafts against
        their q."""
        self.prompt = self.prompt or open_prompt(self.target, self.prompts, self.sampling)
        prompt, name = self.prompt, f"{type(policy).__name__} {rule}"
        watched = WatchedPolicy(policy)
        count = count or self.level.samples
        size = max(2, min(policy.depth + 1, self.level.length))
        sampling = replace(self.sampling, max_new_tokens=size, ignore_eos=True, stop=())
        engine = self._engine(watched, rule, LAW_ROWS)

        def tell(row: Row, new: tuple[int, ...]) -> None:
            if advance is not None and row.finished is not None:
                advance(1, f"distribution, {name}")

        requests = [Request(prompt, replace(sampling, seed=i)) for i in range(count)]
        done = engine.run(requests, tell)
        self._count(done)
        found = PairDistribution(self.target, prompt, sampling, count).test(
            [c.tokens for c in done]
        )
        far, seen = found.total_variation, visible(count, found.cells)
        note = f"samples, {found.cells} cells, TV {far:.3f} (wrong by {seen:.2f} is seen)"
        checks = [
            Check(f"distribution, {name}", found.p_value > ALARM, count, far, found.p_value, note)
        ]
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
        longest = self.target.spec.max_positions - max(map(len, self.prompts))
        return max(2, min(self.level.tokens, longest))

    def _policies(self) -> dict[str, Policy]:
        """The served policy first, then at their defaults the family's others; at the full level
        every policy that may grow it."""
        found = {type(self.policy).__name__: self.policy}
        names = self.drafter.policies if self.level.all_rules else self.drafter.policies[:3]
        entry = families().get(self.drafter.family)
        if not names and entry is not None:
            names = policies_of(entry) if self.level.all_rules else entry.policies
        for name in names:
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
