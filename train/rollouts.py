"""Rollouts of a policy that learns, drafted by a drafter that follows it.

In reinforcement learning most of the time goes into rollouts, and the policy that writes them moves
away from the model that the drafter was trained for. So the drafter learns on: a few steps on the
newest rollouts, every so many steps of the policy (verl-SpeCo; online speculative decoding,
arXiv 2310.07177). Four rules keep that sound:

- rollouts are verified with the policy of this moment, so a drafter that lags behind costs
  acceptance and never changes their distribution;
- features are read with the policy that writes the next rollouts, also those of older rollouts;
- the loss compares distributions at the temperature of the rollouts;
- the drafter's weights change between two calls of `rollouts`, never within one.

Letters: B rows, N tokens, S sequence, V target vocabulary.
"""

from __future__ import annotations

import copy
import math
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Drafter
from specctl.core.errors import IncompatibleError, RecipeError, SpecctlError
from specctl.recipes.schema import TrainPart
from specctl.runtime.generate import generate
from specctl.runtime.measure.stats import Stats
from specctl.runtime.policies import Policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.moving import MovingTarget
from specctl.train.data.rows.pack import Document, best_fit, laid_out
from specctl.train.features.capture import capture, training_needs
from specctl.train.step.optim import Gradient, build_optimizers
from specctl.train.step.products import faster_products, usual_products

PLAIN = ("temperature", "seed", "max_new_tokens", "stop", "stop_token_ids", "ignore_eos")
MOST_LOGITS = 2**26  # numbers of a forward over rollouts


@dataclass(frozen=True, slots=True)
class Rollouts:
    """One continuation of every prompt, an ending EOS included. `logprobs` are those of the
    policy's whole distribution at the rollout temperature (0: of its likeliest token, so 0.0);
    `seconds` is what all of it took."""

    prompt_ids: tuple[tuple[int, ...], ...]
    ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    stats: Stats
    seconds: float


@dataclass(frozen=True, slots=True)
class Followed:
    """What some steps of the drafter did: `loss` is the mean per token, `skipped` counts steps
    without an update, their loss or gradient being no number."""

    steps: int
    skipped: int
    loss: float
    seconds: float


class RolloutDrafter:
    """A drafter that follows a policy. Its weights are changed in place, by `follow` alone; the
    policy is only read. `keep` newest rollouts are remembered to learn from."""

    def __init__(
        self,
        policy: MovingTarget,
        drafter: Drafter,
        sampling: Sampling,
        settings: TrainPart,
        *,
        tree: Policy | None = None,
        rule: str = "auto",
        batch: int = 16,
        keep: int = 256,
    ) -> None:
        check_sampling(sampling)
        self._policy, self._tree, self._rule = policy, tree, rule
        self.sampling, self.settings, self.batch = sampling, settings, batch
        target = policy.now()
        if drafter.file is not None:
            raise IncompatibleError(
                "the weights of a GGUF file are not trained in place",
                found=drafter.file.name,
                expected="a drafter whose package holds tensors",
                do=f"specctl train-draft --recipe distill --init {drafter.file}, then load its "
                "package",
            )
        self.drafter = at_temperature(drafter, sampling.temperature).to(
            target.device, torch.float32
        )
        if self.drafter.needs().borrow:
            self.drafter.bind(target.borrowed())
        trainable = self.drafter.trainable()
        sizes = {target.spec.vocab_size} | ({drafter.vocab.size} if drafter.vocab else set())
        self._optimizers = build_optimizers(trainable, settings, frozenset(sizes))
        self._gradient = Gradient(trainable)
        self._kept: deque[Document] = deque(maxlen=keep)
        self._num_written = self._num_followed = 0

    @property
    def target(self) -> Target:
        """The policy with the weights of this moment, for `specctl.generate` and the like. Read it
        anew after every step of the policy."""
        return self._policy.now()

    def rollouts(self, prompts: Sequence[Sequence[int]]) -> Rollouts:
        """One continuation of every prompt by the policy as it is now. No two calls use the same
        random numbers."""
        if not len(prompts):
            raise SpecctlError(
                "there are no prompts to continue",
                found="no prompt",
                expected="at least one, as token ids",
                do="rollouts([[1, 2, 3], ...])",
            )
        began, target = time.perf_counter(), self.target
        sampling = replace(self.sampling, seed=self.sampling.seed + self._num_written)
        module = self.drafter.module
        assert module is not None, "build_optimizers refuses a drafter without weights"
        module.eval()
        made = generate(
            target,
            prompts,
            drafter=self.drafter,
            sampling=sampling,
            policy=self._tree,
            rule=self._rule,
            batch=self.batch,
        )
        self._num_written += len(prompts)
        prompt_ids = tuple(tuple(map(int, prompt)) for prompt in prompts)
        ids = tuple(output.token_ids for output in made.outputs)
        documents = [_document(*pair) for pair in zip(prompt_ids, ids, strict=True)]
        self._kept.extend(document for document in documents if document.mask.any())
        logprobs = _logprobs(target, documents, sampling.temperature)
        return Rollouts(prompt_ids, ids, logprobs, made.stats, time.perf_counter() - began)

    def follow(self, steps: int) -> Followed:
        """Train the drafter so many steps on the newest rollouts, as the policy of this moment
        reads them: call it right before the next rollouts."""
        if not isinstance(steps, int) or steps < 1:
            raise SpecctlError(
                "this is no number of steps",
                found=repr(steps)[:80],
                expected="a whole number, at least 1",
                do="follow(8)",
            )
        if not self._kept:
            raise SpecctlError(
                "there are no rollouts to follow the policy on",
                found="follow() before rollouts()",
                expected="rollouts that were written before",
                do="call rollouts(prompts) first",
            )
        began, target, module = time.perf_counter(), self.target, self.drafter.module
        assert module is not None, "build_optimizers refuses a drafter without weights"
        if self.drafter.needs().borrow:
            self.drafter.bind(target.borrowed())  # what it borrows may be a copy of older weights
        rows, order = (
            self._rows(target),
            random.Random(f"{self.settings.seed}/{self._num_followed}"),
        )
        self._num_followed += 1
        losses, skipped, todo = list[float](), 0, list[int]()
        module.train()
        with torch.inference_mode(False), torch.enable_grad(), faster_products():
            for _ in range(steps):
                if not todo:
                    todo = order.sample(range(len(rows.ids_BS)), len(rows.ids_BS))
                chosen, todo = todo[: self.settings.rows], todo[self.settings.rows :]
                loss = self._step(target, _picked(rows, chosen))
                skipped += loss is None
                losses += [] if loss is None else [loss]
        module.eval()
        mean = sum(losses) / len(losses) if losses else math.nan
        return Followed(steps, skipped, mean, time.perf_counter() - began)

    def _step(self, target: Target, rows: TrainBatch) -> float | None:
        """One update; the mean loss before it, None where it was no number and nothing was done."""
        with usual_products():
            batch = capture(target, rows, training_needs(self.drafter))
        self._gradient.zero()
        out = self.drafter.loss(batch)
        if out.sum.requires_grad:
            out.sum.backward()  # type: ignore[no-untyped-call]
        count = max(float(out.count), 1e-9)
        loss, norm = float(out.sum.detach()) / count, self._gradient.norm(count)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return None
        self._gradient.divide(count, norm, self.settings.clip)
        for optimizer in self._optimizers.values():
            optimizer.step()
        return loss

    def _rows(self, target: Target) -> TrainBatch:
        """The remembered rollouts in rows as long as the longest."""
        documents = list(self._kept)
        lengths = [len(document.ids) for document in documents]
        plan = best_fit(lengths, max(lengths))
        packed = laid_out(documents, plan, max(lengths), target.spec.pad_id or 0)
        return TrainBatch(
            torch.from_numpy(packed.ids_RS).long(),
            torch.from_numpy(packed.mask_RS),
            torch.from_numpy(packed.document_RS).long(),
            torch.from_numpy(packed.position_RS).long(),
        )


def check_sampling(sampling: Sampling) -> None:
    """Refuse sampling under which the log-probabilities of the policy's own distribution, which the
    trainer computes again, are not those of what was drawn."""
    usual = Sampling()
    names = [name for name in Sampling.__dataclass_fields__ if name not in PLAIN]
    changed = [name for name in names if getattr(sampling, name) != getattr(usual, name)]
    if changed:
        raise RecipeError(
            "rollouts are drawn from the policy's whole distribution at one temperature",
            found=", ".join(f"{name}={getattr(sampling, name)!r}" for name in changed)[:200],
            expected="temperature, seed, max_new_tokens and stops alone",
            do=f"leave {' and '.join(changed)} out",
            where="sampling",
        )


def at_temperature(drafter: Drafter, temperature: float) -> Drafter:
    """The drafter, over the same weights, with a loss at this temperature (0: at its own)."""
    own = getattr(drafter.options, "temperature", 1.0)
    if temperature in (0.0, own):
        return drafter
    if not hasattr(drafter.options, "temperature"):
        raise RecipeError(
            f"the loss of {drafter.family} knows no temperature but 1",
            found=f"rollouts at temperature {temperature:g}",
            expected="temperature 1, or a family whose options have a temperature",
            do="sample rollouts at temperature 1, or take an eagle3 drafter",
            where="sampling.temperature",
        )
    drafter = copy.copy(drafter)
    drafter.options = replace(drafter.options, temperature=temperature)
    return drafter


def _document(prompt: Sequence[int], new: Sequence[int]) -> Document:
    mask = np.array([False] * len(prompt) + [True] * len(new))
    mask[:1] = False  # has nothing before it
    return Document(np.array([*prompt, *new], dtype=np.int32), mask, "")


def _picked(rows: TrainBatch, chosen: list[int]) -> TrainBatch:
    return TrainBatch(
        rows.ids_BS[chosen],
        rows.loss_mask_BS[chosen],
        rows.document_BS[chosen],
        rows.position_BS[chosen],
    )


@torch.no_grad()
def _logprobs(
    target: Target, documents: Sequence[Document], temperature: float
) -> tuple[tuple[float, ...], ...]:
    """Of each document's predicted tokens, read in one forward without a cache."""
    if temperature == 0:
        return tuple((0.0,) * int(document.mask.sum()) for document in documents)
    longest = max(len(document.ids) for document in documents)
    size = max(1, MOST_LOGITS // (longest * target.spec.vocab_size))
    found: list[tuple[float, ...]] = []
    for start in range(0, len(documents), size):
        some = documents[start : start + size]
        packed = laid_out(some, [[i] for i in range(len(some))], longest, target.spec.pad_id or 0)
        ids_BS, document_BS, position_BS = (
            torch.from_numpy(x).long().to(target.device)
            for x in (packed.ids_RS, packed.document_RS, packed.position_RS)
        )
        masks = target.lm.document_masks(document_BS)
        logits_BSV = target.lm.dense(ids_BS, position_BS, masks).logits_BTV
        assert logits_BSV is not None
        drawn_BS = _drawn(logits_BSV[:, :-1], ids_BS[:, 1:], temperature)
        found += [
            tuple(drawn_BS[b, : len(document.ids) - 1][document.mask[1:]].tolist())
            for b, document in enumerate(some)
        ]
    return tuple(found)


def _drawn(logits_BSV: Tensor, ids_BS: Tensor, temperature: float) -> Tensor:
    """[B, S]: log-probabilities of these tokens, on the host."""
    log_p_BSV = (logits_BSV.float() / temperature).log_softmax(-1)
    return log_p_BSV.gather(-1, ids_BS[..., None])[..., 0].cpu()
