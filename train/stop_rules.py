"""Training of stop rules: SpecDec++'s acceptance head, DISCO's classifier, AdaEAGLE's predictor.

The drafter decodes prompts with chains of full length, half of them greedily and half sampled; what
a rule would have read at every step is noted beside a label. Of DISCO this is what became of the
token, and only tokens that were tested count, the accepted ones and the first rejected one: those
behind it were never looked at. SpecDec++ learns from the chance to be accepted, min(1, p / q), of
every drafted token, so that prefixes mix the target's text with drafted tokens, rejected ones among
them (the paper mixes them by a share of .15 along one text; here a chain's own tokens stand behind
the target's, and p is the target's behind both). Rejected tokens weigh more where the paper says so
(six times in SpecDec++). One row in five is kept to measure what was learned.
Letters: B rows, K draft vocabulary, N examples, F features, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from specctl.core.drafter import Drafter, Outcome, RoundSeconds, RoundView, StepState
from specctl.core.errors import IncompatibleError, RecipeError, SpecctlError
from specctl.drafters import family
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.policies import policies_of
from specctl.runtime.policies.chain import Chain
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.stops import STOPS, DraftStep, LearnedStop, StopRule, tested_rows
from specctl.runtime.stops import trained_stops as names_of_trained
from specctl.runtime.target.target import Target

HELD = 5  # one example in so many measures


@dataclass(slots=True)
class Collector(StopRule):
    """Never stops; notes what `rule` reads, and what became of the tokens. One writer: the engine
    that decodes for it."""

    rule: LearnedStop
    seen: list[Tensor] = field(default_factory=list)
    is_known: bool = False
    target: Target | None = None
    temperature: float = 0.0
    chances: list[Tensor] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    labels: list[float] = field(default_factory=list)

    def planned(self, view: RoundView, state: StepState) -> None:
        """Decides nothing, but notes what a rule would have read."""
        known_BF = self.rule.before(view, state)
        self.is_known, self.seen = known_BF is not None, []
        if known_BF is not None:
            self.seen.append(known_BF.cpu())

    def stops(self, step: DraftStep) -> None:
        if self.is_known:
            return
        if step.index == 0:
            self.seen, self.chances = [], []
        if self.rule.soft:
            self.chances.append(self._log_q(step))
        self.seen.append(self.rule.features(step).cpu())

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        if self.rule.soft:
            self._note_chances(outcome)
            return
        for tested in tested_rows(outcome):
            if self.rule.lengths:
                if self.seen:  # a full draft counts as its length, the most that will be asked for
                    self._add(0, tested.row, float(tested.accepted))
                continue
            for token in range(tested.num_tested):
                if token + self.rule.lag < len(self.seen):
                    is_kept = float(token < tested.accepted)
                    self._add(token + self.rule.lag, tested.row, is_kept)
        self.seen = []

    def _log_q(self, step: DraftStep) -> Tensor:
        """[B]: with which chance each row's token was drafted (1: it is the drafter's first)."""
        if self.temperature == 0:
            return torch.zeros(len(step.row_B))
        log_q_BK = (step.logits_BK.float() / self.temperature).log_softmax(-1)
        return log_q_BK.gather(1, step.row_B[:, None])[:, 0].cpu()

    @torch.no_grad()
    def _note_chances(self, outcome: Outcome) -> None:
        """What was read behind every drafted token, and its min(1, p / q), p behind the same
        tokens."""
        view, tree, target = outcome.view, outcome.tree, self.target
        assert target is not None, "chances are the target's"
        count = min(len(self.seen) - self.rule.lag, tree.num_nodes)
        if count > 0:
            ends, drafted = (view.kept_len_B + 1).tolist(), tree.token_BN.tolist()
            texts = [
                [*text[:end], *row[:count]]
                for text, end, row in zip(view.tokens, ends, drafted, strict=True)
            ]
            ids_BT = pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
            ids_BT = ids_BT.to(target.device)
            masks = target.lm.document_masks(torch.zeros_like(ids_BT))
            at_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
            logits_BTV = target.lm.dense(ids_BT, at_BT, masks).logits_BTV
            assert logits_BTV is not None
            for row, end in enumerate(ends):
                if outcome.finished[row] is None:
                    self._add_chances(row, logits_BTV[row, end - 1 : end - 1 + count], outcome)
        self.seen, self.chances = [], []

    def _add_chances(self, row: int, logits_TV: Tensor, outcome: Outcome) -> None:
        valid_N = outcome.tree.valid_BN[row].tolist()
        for token, said_V in enumerate(logits_TV.float().cpu()):
            if not valid_N[token]:
                break
            drafted = int(outcome.tree.token_BN[row, token])
            if self.temperature == 0:
                chance = float(int(said_V.argmax()) == drafted)
            else:
                log_p = (said_V / self.temperature).log_softmax(-1)[drafted]
                chance = float((log_p - self.chances[token][row]).exp().clamp(max=1.0))
            self._add(token + self.rule.lag, row, chance)

    def _add(self, step: int, row: int, label: float) -> None:
        self.features.append(self.seen[step][row])
        self.labels.append(label)


@dataclass(frozen=True, slots=True)
class WatchedChain(Chain):
    """A chain whose every step is shown to a collector."""

    collector: Collector | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stopper", self.collector)


@dataclass(frozen=True, slots=True)
class Learning:
    """A trained network and what it is worth on kept-back examples: `loss` beside `constant`, the
    loss of always saying the mean; of classifiers also the area under the ROC curve."""

    net: nn.Module
    examples: int
    loss: float
    constant: float
    auc: float | None

    def to_json(self) -> dict[str, Any]:
        auc = None if self.auc is None else round(self.auc, 4)
        figures = {"loss": round(self.loss, 4), "loss_of_the_mean": round(self.constant, 4)}
        return {"examples": self.examples, **figures, "auc": auc}


def learned_rule(name: str) -> LearnedStop:
    """A rule of that name that can be trained."""
    rule = STOPS[name]() if name in STOPS else None
    if not isinstance(rule, LearnedStop):
        raise RecipeError(
            f"{name} is not a stop rule that is trained",
            where="--stop-rule",
            found=name,
            expected="one of " + ", ".join(names_of_trained()),
            do="use it as it is: --set serve.stop=" + name if name in STOPS else "correct the name",
        )
    return rule


def collect(
    target: Target,
    drafter: Drafter,
    rule: LearnedStop,
    prompts: Sequence[Sequence[int]],
    length: int = 8,
    new_tokens: int = 64,
    batch: int = 8,
) -> Collector:
    """Decode the prompts greedily and once more sampled, noting every step."""
    policies = drafter.policies or policies_of(family(drafter.family))
    if "chain" not in policies:
        raise IncompatibleError(
            f"{drafter.family} does not draft step by step, so nothing stops it early",
            where="--draft",
            found="grown by " + ", ".join(policies),
            expected="a drafter that policy chain can grow, such as eagle3 or distill",
            do="specctl train-draft --recipe distill",
        )
    collector = Collector(rule, target=target)
    for temperature in (0.0, 0.8):
        collector.temperature = temperature
        settings = Sampling(temperature, max_new_tokens=new_tokens, ignore_eos=True)
        engine = Engine(
            target, drafter, WatchedChain(length=length, collector=collector), num_slots=batch
        )
        engine.run([Request(tuple(prompt), settings) for prompt in prompts])
    return collector


def fit(
    rule: LearnedStop,
    collector: Collector,
    steps: int = 600,
    rate: float = 3e-3,
    seed: int = 0,
    reporter: Reporter | None = None,
) -> Learning:
    """A network of the rule that tells the collected labels from the features."""
    if len(collector.labels) < 10 * HELD:
        raise SpecctlError(
            "too few tested tokens to learn from",
            found=f"{len(collector.labels)}",
            expected=f"at least {10 * HELD}",
            do="give more prompts",
        )
    torch.manual_seed(seed)
    features_NF, label_N = torch.stack(collector.features), torch.tensor(collector.labels)
    held_N = torch.arange(len(label_N)) % HELD == 0
    net = rule.new_net(features_NF.shape[1]).float()
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    train_NF, train_N = features_NF[~held_N], label_N[~held_N]
    for step in range(steps):
        pick = torch.randint(0, len(train_N), (min(256, len(train_N)),))
        loss = _loss(rule, net(train_NF[pick])[:, 0], train_N[pick]).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if reporter is not None and step + 1 == steps:
            reporter.say(f"{rule.name}: {len(train_N):,} examples, loss {float(loss):.3f}")
    with torch.no_grad():
        out_N, wanted_N = net.eval()(features_NF[held_N])[:, 0], label_N[held_N]
        constant = torch.full_like(out_N, _constant(rule, train_N))
        losses = [float(_loss(rule, each, wanted_N).mean()) for each in (out_N, constant)]
    auc = None if rule.lengths else roc_area(out_N, wanted_N)
    return Learning(net, len(label_N), losses[0], losses[1], auc)


def _loss(rule: LearnedStop, out_N: Tensor, label_N: Tensor) -> Tensor:
    """Absolute error of lengths, more for those too short; weighted cross-entropy of acceptance."""
    if rule.lengths:
        return torch.where(out_N < label_N, rule.too_short, 1.0) * (out_N - label_N).abs()
    kept_N, lost_N = label_N * F.softplus(-out_N), (1 - label_N) * F.softplus(out_N)
    return kept_N + rule.rejected * lost_N


def _constant(rule: LearnedStop, label_N: Tensor) -> float:
    """The best answer that looks at nothing."""
    if rule.lengths:
        return float(label_N.quantile(rule.too_short / (1.0 + rule.too_short)))
    kept, lost = label_N.sum(), rule.rejected * (1 - label_N).sum()
    return float(torch.logit(kept / (kept + lost), eps=1e-4))


def roc_area(score_N: Tensor, label_N: Tensor) -> float:
    """Chance that an accepted token scores above a rejected one (ties count half); of chances to be
    accepted those above one half count as accepted."""
    yes, no = score_N[label_N > 0.5], score_N[label_N <= 0.5]
    if not len(yes) or not len(no):
        return 0.5
    above = (yes[:, None] > no).float() + 0.5 * (yes[:, None] == no).float()
    return float(above.mean())
