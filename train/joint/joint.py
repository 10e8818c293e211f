"""Joint training of drafter and target (Medusa-2, arXiv 2401.10774, section 2.2.2).

The target learns, too, by low-rank additions to its hidden matrices, so that its states tell more
of the tokens ahead: L = L_target + weight * L_drafter. What keeps the target near itself is its own
term, KL(p || p') to the target without the additions (section 2.3.2: one set of weights is both
models), or cross-entropy with the text. The additions learn slower than the drafter, and not at all
while it learns alone in the beginning. The drafter's own gradient is not weighted: `weight` scales
what crosses the border, the taps. Works for every family that reads taps of the target.

SDSAT (arXiv 2403.18647): a family whose places the target itself reads (`pass`) runs the changed
target, so that the additions learn at the places, too, by `weight` times its loss. Places see the
text and each other, the text sees no place and stands where it stood, so that what the places learn
reaches the text through the additions alone. Keys and values of the text carry no gradient there.

`JointModel` stands in the loop in the drafter's place, so that checkpoints, resuming and the guards
of the loop hold for the additions as for all that trains. R flat rows, V target vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import Drafter, DraftState, Needs, Space
from specctl.drafters.losses.align import aim
from specctl.drafters.losses.head_losses import LinearHead, LossOptions, head_loss, weighted_sum
from specctl.drafters.losses.head_losses import joined as with_term
from specctl.drafters.losses.teacher import TeacherLogits
from specctl.models.sliced_head import Head
from specctl.recipes.low_rank import EarlyExitPart, JointPart, NoisePart, TrajectoryPart
from specctl.runtime.target.target import Target
from specctl.train.features.capture import capture, head_logits, read, to_device
from specctl.train.joint.early_exit import read_at_exits
from specctl.train.joint.noise import noised
from specctl.train.joint.trajectory import trajectory_state
from specctl.train.step.lora import add, additions
from specctl.train.step.optim import is_hidden_matrix

OF_DRAFTER, OF_TARGET = "drafter.", "target."
TEACHER = Needs(teacher=True, teacher_rows=True)


class JointModel(Drafter):
    """A drafter and the additions to its target as one thing to train. `target` is the changed one,
    over the very weights of the original, which stays as it is."""

    def __init__(self, drafter: Drafter, target: Target, part: JointPart) -> None:
        super().__init__(drafter.options, drafter.spec, drafter.vocab)
        self.family, self.lossless = drafter.family, drafter.lossless  # type: ignore[misc]
        own = drafter.module
        assert own is not None or part.alone is not None, "a trained family has a module"
        self.module = nn.ModuleDict({} if own is None else {"drafter": own})
        self.target = changing(target, part)
        self._drafter, self._original, self.part = drafter, target, part
        self._additions = dict(additions(self.target.lm.module))
        self._runs = target
        moving = {n for n, p in self.target.lm.module.named_parameters() if p.requires_grad}
        assert len(moving) == 2 * len(self._additions), f"more than additions would move: {moving}"

    def needs(self) -> Needs:
        return self._drafter.needs()

    def open(self, space: Space) -> DraftState:
        raise AssertionError("drafting is what `whole()` does")

    @contextmanager
    def whole(self) -> Iterator[Drafter]:
        """The drafter alone, which drafts for `target`."""
        self._run_layers_of(self.target)
        yield self._drafter

    def _run_layers_of(self, target: Target) -> None:
        """Where the drafter runs layers of its target, let them be those."""
        if self._drafter.runs_target and self._runs is not target:
            self._drafter.bind(target.borrowed())
            self._runs = target

    def slow(self) -> list[str]:
        """What of `trainable` learns at the target's own rate."""
        return [name for name in self.trainable() if name.startswith(OF_TARGET)]

    def trainable(self) -> dict[str, nn.Parameter]:
        own = {OF_DRAFTER + name: p for name, p in self._drafter.trainable().items()}
        return own | self._factors()

    def tensors(self) -> dict[str, Tensor]:
        own = {OF_DRAFTER + name: tensor for name, tensor in self._drafter.tensors().items()}
        return own | {name: factor.detach() for name, factor in self._factors().items()}

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        own = {
            n.removeprefix(OF_DRAFTER): t for n, t in tensors.items() if n.startswith(OF_DRAFTER)
        }
        self._drafter.load_tensors(own)
        factors = self._factors()
        theirs = {name for name in tensors if not name.startswith(OF_DRAFTER)}
        assert theirs == factors.keys(), f"other additions: {sorted(theirs ^ factors.keys())}"
        for name, factor in factors.items():
            factor.copy_(tensors[name])

    def _factors(self) -> dict[str, nn.Parameter]:
        found = {}
        for name, addition in self._additions.items():
            found[f"{OF_TARGET}{name}.down"] = addition.down_RI
            found[f"{OF_TARGET}{name}.up"] = addition.up_OR
        return found

    def loss(self, batch: TrainBatch) -> LossOut:
        """The drafter's loss on what the changed target says, and the target's own term; where the
        drafter has no weights, the latter alone: on noised text, with its consistency, or of every
        exit."""
        if self.part.noise is not None:
            return self._noised_term(to_device(batch, self.target.device), self.part.noise)
        if self.part.trajectory is not None:
            return self._consistent(to_device(batch, self.target.device), self.part.trajectory)
        if self.part.early_exit is not None:
            return self._early(to_device(batch, self.target.device), self.part.early_exit)
        is_alone = batch.progress < self.part.warmup
        self._run_layers_of(self._original if is_alone else self.target)
        if is_alone:
            return self._drafter.loss(capture(self._original, batch, self.needs()))
        batch = to_device(batch, self.target.device)
        taps = tuple(sorted({*self.needs().taps, self.spec.num_layers}))
        with torch.autocast(self.target.device.type, enabled=False):
            seen = read(self.target, batch, replace(TEACHER, taps=taps))
            own = self._own_term(seen)
            shown = self._shown(seen)
        out = self._with_layers(shown) if self._drafter.runs_target else self._drafter.loss(shown)
        return out if own is None else with_term(out, own)

    def _with_layers(self, shown: TrainBatch) -> LossOut:
        """The loss of a drafter that runs the layers that learn, in the target's own precision and
        weighted as a whole."""
        with torch.autocast(self.target.device.type, enabled=False):
            out = self._drafter.loss(shown)
        return replace(out, sum=weight_at(shown.progress, self.part) * out.sum)

    def _noised_term(self, batch: TrainBatch, noise: NoisePart) -> LossOut:
        """What the target says of noised text, compared with the text or with what the original
        says of it without noise."""
        needs = replace(TEACHER, taps=(self.spec.num_layers,))
        with torch.autocast(self.target.device.type, enabled=False):
            seen = read(self.target, replace(batch, ids_BS=noised(batch, noise)), needs)
            teacher = (
                None if self.part.keep == "ce" else original_distribution(self._original, batch)
            )
            return target_loss(self.target, replace(seen, ids_BS=batch.ids_BS), teacher)

    def _consistent(self, batch: TrainBatch, part: TrajectoryPart) -> LossOut:
        """The target's own term, and what it says behind a state of a Jacobi trajectory compared
        with what it says behind the text."""

        def most_probable(ids_BS: Tensor, row_Q: Tensor) -> Tensor:
            said = original_distribution(self._original, replace(batch, ids_BS=ids_BS))
            return said.distribution(row_Q, None).best_Q

        state = trajectory_state(batch, part, most_probable)
        needs = replace(TEACHER, taps=(self.spec.num_layers,))
        with torch.autocast(self.target.device.type, enabled=False):
            seen = read(self.target, batch, needs)
            own = self._own_term(seen)
            assert own is not None, "a target alone keeps something"
            wanted = replace(batch, ids_BS=state.ids_BS, loss_mask_BS=state.learns_BS)
            found = target_loss(self.target, read(self.target, wanted, needs), _detached(seen))
        agreement = found.metrics["target_agreement"]
        metrics = {"consistency": found.metrics["target_kl"], "consistent": agreement}
        return with_term(own, replace(found, metrics=metrics), part.weight)

    def _early(self, batch: TrainBatch, part: EarlyExitPart) -> LossOut:
        """The target's own term of the last layer and of the exits that have one."""
        with torch.autocast(self.target.device.type, enabled=False):
            exits = read_at_exits(self.target, batch, part)
            teacher = (
                None if self.part.keep == "ce" else original_distribution(self._original, batch)
            )
            found = [(w, target_loss(self.target, seen, teacher)) for _, w, seen in exits]
        out = weighted_sum(found)
        last, *below = (term for _, term in found)
        early = [(f"{name}_early", [term.metrics[name] for term in below]) for name in last.metrics]
        sums = {name: (_added(pairs, 0), _added(pairs, 1)) for name, pairs in early if pairs}
        return replace(out, metrics={**last.metrics, **sums})

    def _own_term(self, seen: TrainBatch) -> LossOut | None:
        """What the target learns for itself; None if it keeps nothing."""
        if self.part.keep == "none":
            return None
        teacher = None if self.part.keep == "ce" else original_distribution(self._original, seen)
        return target_loss(self.target, seen, teacher)

    def _shown(self, seen: TrainBatch) -> TrainBatch:
        """The batch as the drafter reads it: what comes back through its taps is weighted, and its
        teacher is the changed target as it stands."""
        needs, weight = self.needs(), weight_at(seen.progress, self.part)
        taps = {tap: _border(seen.taps[tap], weight) for tap in needs.taps}
        plain = replace(seen, taps=taps, teacher_BSV=None, teacher_rows=None)
        if not needs.teacher:
            return plain
        if seen.teacher_rows is None:
            assert seen.teacher_BSV is not None
            return replace(plain, teacher_BSV=seen.teacher_BSV.detach())
        state_BSD = seen.taps[self.spec.num_layers].detach()
        if needs.teacher_rows:
            rows = replace(seen.teacher_rows, state_RD=state_BSD.flatten(0, 1))
            return replace(plain, teacher_rows=rows)
        return replace(plain, teacher_BSV=head_logits(self.target.lm, state_BSD))


def changing(target: Target, part: JointPart) -> Target:
    """The target with additions that are zero. All weights are shared with `target`, none of which
    is ever written to."""
    own = target.lm.module
    lm = copy.deepcopy(target.lm, {id(t): t for t in (*own.parameters(), *own.buffers())})
    add(lm.module, hidden_matrices(target), part, "the target", "train.joint.targets")
    return replace(target, lm=lm)


def hidden_matrices(target: Target) -> dict[str, nn.Parameter]:
    """The weights that additions can be made to, by name: no embedding and no head, which drafters
    borrow."""
    module, sizes = target.lm.module, frozenset({target.spec.vocab_size})
    tables = {f"{n}.weight" for n, m in module.named_modules() if isinstance(m, nn.Embedding)}
    named = module.named_parameters()
    return {n: p for n, p in named if n not in tables and is_hidden_matrix(p, sizes)}


def original_distribution(target: Target, batch: TrainBatch) -> TeacherLogits:
    """What a frozen target says of the batch."""
    found = capture(target, batch, TEACHER)
    if found.teacher_rows is not None:
        return TeacherLogits(found.teacher_rows)
    assert found.teacher_BSV is not None
    return TeacherLogits(found.teacher_BSV.flatten(0, 1))


def target_loss(target: Target, seen: TrainBatch, teacher: TeacherLogits | None) -> LossOut:
    """How far the target that has read `seen` (its last state among the taps) is from a
    distribution, or from the text: its loss per token, as target_kl or target_ce, and how often its
    most probable token is the distribution's (target_agreement) or the text's (target_top1)."""
    rows = aim(replace(seen, select=None, teacher_BSV=None, teacher_rows=None), 1)
    head: Head = _as_it_is
    if seen.teacher_rows is not None:
        state_RX = seen.taps[target.spec.num_layers].flatten(0, 1)
        head = LinearHead(seen.teacher_rows.weight_VD, seen.teacher_rows.bias_V)
    else:
        assert seen.teacher_BSV is not None
        state_RX = seen.teacher_BSV.flatten(0, 1)
    kind = "ce" if teacher is None else "kl"
    out = head_loss(state_RX, head, rows, None, LossOptions(kind), teacher)
    best = "target_top1" if teacher is None else "target_agreement"
    found = {f"target_{kind}": (out.sum.detach(), out.count), best: out.metrics["top1"]}
    return replace(out, metrics=found)


def _detached(seen: TrainBatch) -> TeacherLogits:
    """What a target that learns has said of the batch, as a teacher."""
    if seen.teacher_rows is not None:
        rows = seen.teacher_rows
        return TeacherLogits(replace(rows, state_RD=rows.state_RD.detach()))
    assert seen.teacher_BSV is not None
    return TeacherLogits(seen.teacher_BSV.detach().flatten(0, 1))


def weight_at(progress: float, part: JointPart) -> float:
    """The weight of the drafter's loss after that share of the steps: from 0 to `part.weight` as a
    sine over the ramp (the paper's schedule for self-distillation)."""
    passed = progress - part.warmup
    if passed >= part.ramp:
        return part.weight
    return part.weight * math.sin(0.5 * math.pi * passed / part.ramp)


def _border(tap: Tensor, weight: float) -> Tensor:
    """The same numbers; of the gradient, `weight` times as much comes through."""
    crossed = tap.view_as(tap)
    if crossed.requires_grad:
        crossed.register_hook(lambda gradient: weight * gradient)  # type: ignore[no-untyped-call]
    return crossed


def _added(pairs: list[tuple[Tensor, Tensor]], which: int) -> Tensor:
    return torch.stack([pair[which] for pair in pairs]).sum(0)


def _as_it_is(logits_NV: Tensor) -> Tensor:
    return logits_NV
