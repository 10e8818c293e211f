"""Sampling settings of a request, and the target distribution they define for a batch of rows.

Order of operations, as in transformers' `generate`: what reads the text so far (bias, penalties,
bad words, custom processors), then temperature, top-k, top-p, min-p. p = softmax(scores).
Letters: B rows, T fed tokens, M nodes expanded at once, K draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specctl.core.drafter import RoundView
from specctl.core.errors import SpecctlError
from specctl.core.tree import DraftTree
from specctl.runtime.sampling.processors import HistoryProcessors, min_p, top_k, top_p

if TYPE_CHECKING:
    from specctl.runtime.sampling.grammar import Grammar
    from specctl.runtime.sampling.grammar_mask import Guide


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request is sampled and when it ends; None means off, temperature 0 means greedy.

    Penalties count prompt and answer alike. `processors` are transformers LogitsProcessor objects;
    they see one row at a time, at every drafted node with that node's own text. `grammar` is what
    the answer is held to (`compile_grammar`); it has the last word before the temperature.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    processors: tuple[Any, ...] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        finite = math.isfinite(self.temperature)
        self._check("temperature", finite and self.temperature >= 0, "a finite number >= 0")
        is_count = self.top_k is None or 1 <= self.top_k < 2**31
        self._check("top_k", is_count, "None or a count in [1, 2^31)")
        self._check("top_p", self.top_p is None or 0 < self.top_p <= 1, "None or in (0, 1]")
        self._check("min_p", self.min_p is None or 0 <= self.min_p <= 1, "None or in [0, 1]")
        positive = self.repetition_penalty is None or 0 < self.repetition_penalty < math.inf
        self._check("repetition_penalty", positive, "None or a finite number > 0")
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            self._check(name, value is None or math.isfinite(value), "None or a finite number")
        bias = dict(self.logit_bias or {})
        real = all(i >= 0 and b < math.inf and not math.isnan(b) for i, b in bias.items())
        self._check("logit_bias", real, "token ids with finite biases (or -inf)")
        words = all(word and min(word) >= 0 for word in self.bad_words)
        self._check("bad_words", words, "non-empty tuples of token ids")
        self._check("seed", 0 <= self.seed < 2**63, "an integer in [0, 2^63)")
        self._check("max_new_tokens", self.max_new_tokens >= 1, "a count >= 1")
        self._check("stop", not isinstance(self.stop, str) and all(self.stop), "non-empty strings")
        callables = all(callable(one) for one in self.processors)
        self._check("processors", callables, "LogitsProcessor objects")

    def _check(self, name: str, ok: bool, expected: str) -> None:
        if not ok:
            raise SpecctlError(
                f"sampling setting {name} is out of range",
                where=f"Sampling.{name}",
                found=repr(getattr(self, name)),
                expected=expected,
                do=f"give {name} another value, or leave it out",
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class SamplingBatch:
    """The settings of the rows of one round, as tensors. Safe to keep or to rebuild: what it keeps
    of a text (how far a grammar was followed) is found again from the text. `is_mixed`: sampled
    rows take part in the round beside these, so that none of it is decided greedily."""

    def __init__(
        self,
        samplings: Sequence[Sampling],
        vocab_size: int,
        device: torch.device | str = "cpu",
        is_mixed: bool = False,
    ) -> None:
        self.samplings = tuple(samplings)
        self.vocab_size = vocab_size
        self.all_greedy = not is_mixed and all(one.greedy for one in self.samplings)
        self._history = HistoryProcessors.of(self.samplings, vocab_size, torch.device(device))

        def column(values: Sequence[float | None], neutral: float) -> Tensor | None:
            if all(value is None or value == neutral for value in values):
                return None
            filled = [neutral if value is None else value for value in values]
            return torch.tensor(filled, device=device)[:, None, None]

        greedy = [one.greedy for one in self.samplings]
        self._greedy_B11 = None
        if not self.all_greedy and any(greedy):
            self._greedy_B11 = torch.tensor(greedy, device=device)[:, None, None]
        self._temperature_B11 = column([one.temperature or 1.0 for one in self.samplings], 1.0)
        self._top_k = [one.top_k for one in self.samplings]
        self._top_k_B11 = column(self._top_k, 0)
        self._top_p_B11 = column([one.top_p for one in self.samplings], 1.0)
        self._min_p_B11 = column([one.min_p for one in self.samplings], 0.0)

    @property
    def reads_text(self) -> bool:
        """Whether the scores depend on the text so far, not on the logits alone."""
        return self._history is not None and self._history.reads_text

    def inherit(self, before: SamplingBatch) -> None:
        """Take over how far the grammars of an earlier batch were followed: their rows may still be
        here, and to follow a long text again takes time."""
        if self._history is not None and before._history is not None:
            ours, theirs = self._history.grammars, before._history.grammars
            if ours is not None and theirs is not None:
                ours.inherit(theirs)

    def guide(self, view: RoundView) -> Guide | None:
        """What holds drafts to the grammars of these rows; None if they have none."""
        if self._history is None or self._history.grammars is None:
            return None
        return self._history.grammars.guide(view)

    def scores(self, logits_BTV: Tensor, tree: DraftTree, view: RoundView) -> Tensor:
        """float32 log-scores, the target distribution is softmax(scores): `distribution` of what is
        `processed`."""
        return self.distribution(self.processed(logits_BTV, tree, view))

    def processed(self, logits_BTV: Tensor, tree: DraftTree, view: RoundView) -> Tensor:
        """float32 logits after what reads the text: bias, penalties, bad words, processors. The
        logits themselves when nothing is set."""
        logits_BTV = logits_BTV.float()
        return logits_BTV if self._history is None else self._history.apply(logits_BTV, tree, view)

    def distribution(self, processed_BTV: Tensor) -> Tensor:
        """Log-scores after temperature and truncation. If every row is greedy they are the
        processed logits; a greedy row among sampled ones gets a one-hot distribution (0 at its
        argmax, -inf elsewhere)."""
        return processed_BTV if self.all_greedy else self._warp(processed_BTV)

    def draft_distribution(self, logits_BMK: Tensor, ids_K: Tensor | None = None) -> Tensor:
        """float32 probabilities to draw drafts from: the row's temperature, top-k, top-p, min-p and
        fixed biases applied to draft logits; one-hot on greedy rows. `ids_K`: target ids of the
        draft vocabulary. What reads the text is left out (but for grammars, which `guide` applies
        to the logits beforehand): any distribution is legal, if it is the one used.
        Where nothing can be drafted (all logits -inf) the distribution is zero."""
        scores_BMK = logits_BMK.float()
        if self._history is not None and self._history.bias_B1V is not None:
            bias_B1V = self._history.bias_B1V
            scores_BMK = scores_BMK + (bias_B1V if ids_K is None else bias_B1V[:, :, ids_K])
        if self.all_greedy:
            distribution_BMK = _one_hot(scores_BMK, 0.0, 1.0)
        else:
            distribution_BMK = self._warp(scores_BMK).softmax(-1)
        return distribution_BMK.masked_fill_(scores_BMK.amax(-1, keepdim=True) == -math.inf, 0.0)

    def _warp(self, scores_BXV: Tensor) -> Tensor:
        raw_BXV = scores_BXV
        if self._temperature_B11 is not None:
            scores_BXV = scores_BXV / self._temperature_B11
        if self._top_k_B11 is not None:
            largest = max(k for k in self._top_k if k is not None)
            scores_BXV = top_k(scores_BXV, self._top_k_B11, largest)
        if self._top_p_B11 is not None:
            scores_BXV = top_p(scores_BXV, self._top_p_B11)
        if self._min_p_B11 is not None:
            scores_BXV = min_p(scores_BXV, self._min_p_B11)
        if self._greedy_B11 is not None:
            hard_BXV = _one_hot(raw_BXV, -math.inf, 0.0)
            scores_BXV = torch.where(self._greedy_B11, hard_BXV, scores_BXV)
        return scores_BXV


def _one_hot(scores: Tensor, off: float, on: float) -> Tensor:
    best = scores.argmax(-1, keepdim=True)
    return torch.full_like(scores, off).scatter_(-1, best, on)
