"""Reward-guided speculative decoding (arXiv 2501.19324): steps of a small model, judged whole.

The small model writes a step of the answer, up to a blank line or `longest` tokens. A third model
scores it. At `delta` or more the step stays, else the target writes the whole step instead, so that

    P(step) = P_small(step) [score >= delta] + P_small(score < delta) P_target(step)

(equation 2 there with the step function as weight). The papers' judge is a process reward model
with a head of its own; ours is any causal language model of the same tokens, and the score is the
geometric mean of the probabilities that it gives the step's tokens, 0 to 1. Above 1 nothing stays:
the text is the target's own. At 0 or less it is the small model's. Where `delta` is to follow from
a budget: reward_budget.py.
Letters: B rows, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing

import torch

from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Feed
from specctl.models.not_finite import is_bad, not_numbers
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.prefill import CHUNK
from specctl.runtime.engine.request import Emission, Row
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.mixture import Mixture
from specctl.runtime.turns.base import Turns


class Judge:
    """Scores steps of one text at a time; what its cache holds of a text is not read again."""

    def __init__(self, target: Target) -> None:
        self.target, self.seconds = target, 0.0
        self._kv: SlotKV | None = None
        self._read: list[int] = []

    def open(self, longest: int) -> None:
        self._kv, self._read = self.target.new_kv(1, longest), []

    @torch.inference_mode()
    def score(self, text: Sequence[int], step: Sequence[int]) -> float:
        """The geometric mean of the probabilities of the step's tokens behind the text."""
        began = time.perf_counter()
        whole, root = [*text, *step], len(text) - 1
        pairs = zip(self._read, whole[:root], strict=False)
        at = next((i for i, (old, new) in enumerate(pairs) if old != new), None)
        at = min(len(self._read), root) if at is None else at
        while at < root:
            chunk = whole[at : min(at + CHUNK, root)]
            self._run(chunk, at, logits=False)
            at += len(chunk)
        total = 0.0
        while at < len(whole) - 1:
            chunk = whole[at : min(at + CHUNK, len(whole) - 1)]
            logits_TV = self._run(chunk, at, logits=True)
            behind_T1 = torch.tensor(whole[at + 1 : at + 1 + len(chunk)])[:, None]
            if bool((bad_T := is_bad(logits_TV)).any()):
                end = at + int(bad_T.nonzero()[0]) + 1
                raise not_numbers(self.target.lm, self.target.name, whole[:end])
            logp_TV = logits_TV.float().log_softmax(-1)
            total += float(logp_TV.gather(1, behind_T1.to(logp_TV.device)).sum())
            at += len(chunk)
        self._read = whole[:-1]
        self.seconds += time.perf_counter() - began
        return math.exp(total / len(step))

    def _run(self, chunk: Sequence[int], at: int, logits: bool) -> torch.Tensor:
        """[T, V] behind every token of the chunk, which stands at that position."""
        assert self._kv is not None, "open() reserves the cache"
        lm, device, end = self.target.lm, self.target.device, at + len(chunk)
        slot_B, start_B = torch.tensor([[0], [at]], device=device).unbind()
        self._kv.begin((0,), slot_B, start_B, len(chunk), end, at)
        ids_BT = torch.tensor([list(chunk)], device=device)
        position_BT = torch.arange(at, end, device=device)[None]
        masks = lm.chain_masks(start_B, len(chunk), end)
        out = lm.run(Feed(ids_BT, position_BT, masks, logits=logits), self._kv)
        return ids_BT if out.logits_BTV is None else out.logits_BTV[0]


class Threshold:
    """The score below which a step of one text is dropped: the same for every step."""

    def __init__(self, delta: float) -> None:
        self.delta = delta

    def drops(self, score: float) -> bool:
        """Whether a step with this score is dropped."""
        return score < self.delta


class RewardTurns(Turns):
    """Turns by the score of a step. Of several others the last one judges, else the target."""

    def __init__(self, large: Engine, others: Sequence[Target], mixture: Mixture) -> None:
        super().__init__(large, others, mixture)
        self.judge = Judge(others[-1] if len(others) > 1 else large.target)
        self.delta, self.longest = mixture.numbers[0], int(mixture.numbers[1])

    def open(self, longest: int) -> None:
        super().open(longest)
        self.judge.open(longest)

    @property
    def prefill_seconds(self) -> float:
        return super().prefill_seconds + self.judge.seconds

    def threshold(self) -> Threshold:
        """What the scores of one text are compared with."""
        return Threshold(self.delta)

    def rounds(self, row: Row) -> Iterator[tuple[int, ...]]:
        threshold = self.threshold()
        while row.finished is None:
            began = row.num_new
            draft = list(self._step(self.small, row, seed_of(row)))
            tokens = [token for emission, count in draft for token in emission.tokens[:count]]
            is_target = threshold.drops(self.judge.score(row.tokens, tokens))
            self.counts.dropped += len(tokens) * is_target
            for emission, count in self._step(self.large, row) if is_target else draft:
                yield self.extend(row, emission, count)
            self.counts.count(row.num_new - began, is_target)

    def _step(
        self, engine: Engine, row: Row, seed: int | None = None
    ) -> Iterator[tuple[Emission, int]]:
        """The rounds of one step of that model, and how many tokens of each belong to it."""
        step: list[int] = []
        most = min(self.longest, self.context - len(row.tokens))
        turn = self.write(engine, row, seed)
        with closing(turn):
            for emission in turn:
                for count, token in enumerate(emission.tokens, 1):
                    step.append(token)
                    if len(step) == most or self._is_whole(step):
                        yield emission, count
                        return
                yield emission, len(emission.tokens)

    def _is_whole(self, step: Sequence[int]) -> bool:
        """Whether there is a blank line behind the step's first word."""
        target = self.large.target
        return target.tokenizer is not None and "\n\n" in target.decode(step).lstrip()


def seed_of(row: Row) -> int:
    """The seed of a draft: others than the target's, which may write the same positions, and than
    those of an earlier draft there, which was dropped for what it drew."""
    words = f"{row.request.sampling.seed} {row.num_new}".encode()
    return int.from_bytes(hashlib.sha256(words).digest()[:8], "big") >> 1
