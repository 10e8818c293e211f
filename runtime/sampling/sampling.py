"""Sampling settings of a request, and the target distribution they define for a batch of rows.

Order of operations, as in transformers' `generate`: what reads the text so far (bias, penalties,
bad words, custom processors), then temperature, top-k, top-p, min-p (`truncation.py`). p =
softmax(scores). The processors equal
SequenceBias-, RepetitionPenalty- and NoBadWordsLogitsProcessor, evaluated at every node of a draft
tree with that node's own text: the row's tokens, then the path from the root to the node.
Letters: B rows, C candidates, K draft vocabulary, L positions, M new nodes, N nodes, T fed tokens,
V target vocabulary, W window, X any axes.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from specctl.core.drafter import RoundView
from specctl.core.errors import SpecctlError
from specctl.core.language_model import ChainDraws, Truncation
from specctl.core.tree import DraftTree
from specctl.runtime.sampling.truncation import Truncations

if TYPE_CHECKING:
    from specctl.runtime.sampling.grammar import Grammar
    from specctl.runtime.sampling.grammar_mask import GrammarRows, Guide
    from specctl.runtime.sampling.noise import RoundNoise


DRAWN_SEEDS = 1 << 32  # few enough to type one again


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request is sampled and when it ends; None means off, temperature 0 means greedy.

    Penalties count prompt and answer alike. `processors` are transformers LogitsProcessor objects;
    they see one row at a time, at every drafted node with that node's own text. `grammar` is what
    the answer must follow (`compile_grammar`); it is applied last before the temperature. A `seed`
    of -1 or None is drawn when the settings are made, and `seed` then says which it is.
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
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    processors: tuple[Any, ...] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if _is_random(self.seed):
            object.__setattr__(self, "seed", secrets.randbelow(DRAWN_SEEDS))
        self._check_sequences()
        temperature = _is_number(self.temperature) and 0 <= self.temperature < math.inf
        self._check("temperature", temperature, "a finite number >= 0")
        is_count = self.top_k is None or (_is_count(self.top_k) and 1 <= self.top_k < 2**31)
        self._check("top_k", is_count, "None or a count in [1, 2^31)")
        top = self.top_p is None or (_is_number(self.top_p) and 0 < self.top_p <= 1)
        self._check("top_p", top, "None or in (0, 1]")
        least = self.min_p is None or (_is_number(self.min_p) and 0 <= self.min_p <= 1)
        self._check("min_p", least, "None or in [0, 1]")
        penalty = self.repetition_penalty
        positive = penalty is None or (_is_number(penalty) and 0 < penalty < math.inf)
        self._check("repetition_penalty", positive, "None or a finite number > 0")
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            finite = value is None or (_is_number(value) and math.isfinite(value))
            self._check(name, finite, "None or a finite number")
        seed = _is_count(self.seed) and 0 <= self.seed < 2**63
        self._check("seed", seed, "an integer in [0, 2^63), or -1 for any")
        most = _is_count(self.max_new_tokens) and self.max_new_tokens >= 1
        self._check("max_new_tokens", most, "a count >= 1")

    def _check_sequences(self) -> None:
        """What consists of several values."""
        bias = self.logit_bias if self.logit_bias is not None else {}
        real = isinstance(bias, Mapping) and all(
            _is_id(i) and _is_number(b) and b < math.inf and not math.isnan(b)
            for i, b in bias.items()
        )
        self._check("logit_bias", real, "token ids with finite biases (or -inf)")
        words = _is_several(self.bad_words) and all(
            _is_several(word) and word and all(map(_is_id, word)) for word in self.bad_words
        )
        self._check("bad_words", words, "non-empty tuples of token ids")
        stops = _is_several(self.stop) and all(map(_is_text, self.stop))
        self._check("stop", stops, "non-empty strings of whole characters")
        ids = _is_several(self.stop_token_ids) and all(map(_is_id, self.stop_token_ids))
        self._check("stop_token_ids", ids, "token ids")
        callables = _is_several(self.processors) and all(map(callable, self.processors))
        self._check("processors", callables, "LogitsProcessor objects")

    def _check(self, name: str, ok: bool, expected: str) -> None:
        if not ok:
            raise SpecctlError(
                f"sampling setting {name} is not valid",
                where=f"Sampling.{name}",
                found=repr(getattr(self, name))[:80],
                expected=expected,
                do=f"give {name} another value, or leave it out",
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def truncation(self) -> Truncation:
        p = 1.0 if self.top_p is None else self.top_p
        return Truncation(self.top_k or 0, p, self.min_p or 0.0)


def _is_random(seed: object) -> bool:
    return seed is None or (_is_count(seed) and seed == -1)


def _is_text(value: object) -> bool:
    """Whether it is a text that UTF-8 can spell, and not an empty one."""
    is_whole = isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)
    return is_whole and value != ""


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _is_several(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping))


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
        cuts = [one.truncation for one in self.samplings]
        self._truncations = Truncations.of(cuts, torch.device(device))

    @property
    def reads_text(self) -> bool:
        """Whether the scores depend on the text so far, not on the logits alone."""
        return self._history is not None and self._history.reads_text

    def chain_draws(self, noise: RoundNoise) -> ChainDraws | None:
        """How these rows draw a chain of drafts in one call; None where a row is biased, or none
        draws."""
        is_biased = self._history is not None and self._history.bias_B1V is not None
        if self.all_greedy or is_biased:
            return None
        truncations = None if self._truncations is None else self._truncations.rows
        return noise.chain_draws([one.temperature for one in self.samplings], truncations)

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

    def softened(self, processed_BTV: Tensor) -> Tensor:
        """The same, but of greedy rows the processed logits whatever stands beside them: how sure
        the target is."""
        if self.all_greedy:
            return processed_BTV
        scores_BTV = self._tempered_and_cut(processed_BTV)
        if self._greedy_B11 is None:
            return scores_BTV
        return torch.where(self._greedy_B11, processed_BTV, scores_BTV)

    def tempered(self, logits_BXK: Tensor) -> Tensor:
        """float32 logits over the row's temperature; those of greedy rows as they are."""
        wide_BXK = logits_BXK.float()
        return wide_BXK if self._temperature_B11 is None else wide_BXK / self._temperature_B11

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

    def _warp(self, raw_BXV: Tensor) -> Tensor:
        scores_BXV = self._tempered_and_cut(raw_BXV)
        if self._greedy_B11 is None:
            return scores_BXV
        hard_BXV = _one_hot(raw_BXV, -math.inf, 0.0)
        return torch.where(self._greedy_B11, hard_BXV, scores_BXV)

    def _tempered_and_cut(self, raw_BXV: Tensor) -> Tensor:
        scores_BXV = raw_BXV
        if self._temperature_B11 is not None:
            scores_BXV = scores_BXV / self._temperature_B11
        if self._truncations is not None:
            own_BXV = scores_BXV.clone() if scores_BXV is raw_BXV else scores_BXV
            scores_BXV = self._truncations.apply_(own_BXV)
        return scores_BXV


def _one_hot(scores: Tensor, off: float, on: float) -> Tensor:
    best = scores.argmax(-1, keepdim=True)
    return torch.full_like(scores, off).scatter_(-1, best, on)


# -- processors ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HistoryProcessors:
    """Bias, penalties, bad words, custom processors and grammars of the rows of a batch.

    `bias_B1V` holds logit biases and one-token bad words. Penalties are [B, 1, 1] or None.
    `words[b]` are the bad words of two tokens or more.
    """

    bias_B1V: Tensor | None
    repetition_B11: Tensor | None
    frequency_B11: Tensor | None
    presence_B11: Tensor | None
    words: tuple[tuple[tuple[int, ...], ...], ...]
    custom: tuple[Sequence[object], ...]
    grammars: GrammarRows | None = None

    @classmethod
    def of(
        cls, samplings: Sequence[Sampling], vocab_size: int, device: torch.device
    ) -> HistoryProcessors | None:
        """None if no row needs any of them."""

        def column(name: str, neutral: float) -> Tensor | None:
            values = [getattr(one, name) for one in samplings]
            if all(value is None or value == neutral for value in values):
                return None
            filled = [neutral if value is None else float(value) for value in values]
            return torch.tensor(filled, device=device)[:, None, None]

        made = cls(
            _bias(samplings, vocab_size, device),
            column("repetition_penalty", 1.0),
            column("frequency_penalty", 0.0),
            column("presence_penalty", 0.0),
            tuple(tuple(w for w in one.bad_words if len(w) > 1) for one in samplings),
            tuple(one.processors for one in samplings),
            _grammars(samplings),
        )
        return made if made.bias_B1V is not None or made.reads_text else None

    @property
    def _penalises(self) -> bool:
        penalties = (self.repetition_B11, self.frequency_B11, self.presence_B11)
        return any(one is not None for one in penalties)

    @property
    def reads_text(self) -> bool:
        others = any(self.words) or any(self.custom) or self.grammars is not None
        return self._penalises or others

    def apply(self, scores_BTV: Tensor, tree: DraftTree, view: RoundView) -> Tensor:
        """New scores; the argument is left untouched."""
        scores_BTV = scores_BTV.clone() if self.bias_B1V is None else scores_BTV + self.bias_B1V
        if self._penalises:
            scores_BTV = self._penalised(scores_BTV, _counts(scores_BTV, tree, view))
        if any(self.words):
            _ban(scores_BTV, self.words, _context(tree, view, max(map(_reach, self.words))))
        if any(self.custom):
            _run_custom(scores_BTV, self.custom, tree, view)
        if self.grammars is not None:
            self.grammars.apply(scores_BTV, tree, view)
        return scores_BTV

    def _penalised(self, scores_BTV: Tensor, count_BTV: Tensor) -> Tensor:
        seen_BTV = count_BTV > 0
        if self.repetition_B11 is not None:
            factor_B11 = self.repetition_B11
            damped_BTV = torch.where(
                scores_BTV < 0, scores_BTV * factor_B11, scores_BTV / factor_B11
            )
            scores_BTV = torch.where(seen_BTV, damped_BTV, scores_BTV)
        if self.frequency_B11 is not None:
            scores_BTV = scores_BTV - self.frequency_B11 * count_BTV
        if self.presence_B11 is not None:
            scores_BTV = scores_BTV - self.presence_B11 * seen_BTV
        return scores_BTV


def _bias(samplings: Sequence[Sampling], vocab_size: int, device: torch.device) -> Tensor | None:
    fixed = [
        {**(one.logit_bias or {}), **{w[0]: -math.inf for w in one.bad_words if len(w) == 1}}
        for one in samplings
    ]
    used = [
        *(i for row in fixed for i in row),
        *(i for s in samplings for w in s.bad_words for i in w),
    ]
    if used and max(used) >= vocab_size:
        raise SpecctlError(
            "logit_bias or bad_words names a token outside the vocabulary",
            found=f"token id {max(used):,}",
            expected=f"ids below {vocab_size:,}",
            do="take ids from the target's own tokenizer",
        )
    if not any(fixed):
        return None
    bias_BV = torch.zeros(len(samplings), vocab_size)
    for b, row in enumerate(fixed):
        for token, value in row.items():
            bias_BV[b, token] = value
    return bias_BV[:, None].to(device)


def _grammars(samplings: Sequence[Sampling]) -> GrammarRows | None:
    if all(one.grammar is None for one in samplings):
        return None
    from specctl.runtime.sampling.grammar_mask import GrammarRows

    return GrammarRows([one.grammar for one in samplings])


def _counts(scores_BTV: Tensor, tree: DraftTree, view: RoundView) -> Tensor:
    """[B, T, V]: how often each token occurs in the text that ends with each fed token."""
    B, T, V = scores_BTV.shape
    rows = [np.bincount(np.asarray(tokens), minlength=V) for tokens in view.tokens]
    text_BV = torch.from_numpy(np.stack(rows)).to(scores_BTV)
    count_BTV = text_BV[:, None].repeat(1, T, 1)
    on_path_BTN = tree.ancestor_BTT()[:, :, 1:].to(scores_BTV)
    token_BTN = tree.token_BN.clamp(min=0)[:, None].expand(B, T, T - 1)
    return count_BTV.scatter_add_(2, token_BTN, on_path_BTN)


def _reach(words: tuple[tuple[int, ...], ...]) -> int:
    return max((len(word) - 1 for word in words), default=0)


def _context(tree: DraftTree, view: RoundView, width: int) -> Tensor:
    """[B, T, W]: the last `width` tokens of each fed token's text, itself last, -1 = no text."""
    tails = [([-1] * width + list(tokens[-width:]))[-width:] for tokens in view.tokens]
    tail_BW = torch.tensor(tails, device=tree.token_BN.device)
    token_BL = torch.cat([tail_BW, tree.token_BN], dim=1)
    before_BW = torch.arange(-1, width - 1, device=tail_BW.device).expand_as(tail_BW)
    parent_BL = torch.cat([before_BW.clamp(min=0), tree.parent_BN + width], dim=1)
    at_BT = torch.arange(width - 1, width + tree.num_nodes, device=tail_BW.device)
    at_BT = at_BT.expand(tail_BW.shape[0], -1)
    found = []
    for _ in range(width):
        found.append(token_BL.gather(1, at_BT))
        at_BT = parent_BL.gather(1, at_BT)
    return torch.stack(found[::-1], dim=-1)


def _ban(
    scores_BTV: Tensor, words: tuple[tuple[tuple[int, ...], ...], ...], context_BTW: Tensor
) -> None:
    """In place: -inf on the last token of a bad word wherever the text ends with the rest of it."""
    for b, row in enumerate(words):
        for word in row:
            rest = torch.tensor(word[:-1], device=context_BTW.device)
            hit_T = (context_BTW[b, :, -len(rest) :] == rest).all(-1)
            scores_BTV[b, :, word[-1]].masked_fill_(hit_T, -math.inf)


def _run_custom(
    scores_BTV: Tensor, custom: tuple[Sequence[object], ...], tree: DraftTree, view: RoundView
) -> None:
    """In place: transformers processors, one call per depth (equal lengths). Reads the tree on the
    host: the price of running foreign code."""
    tokens, parents = tree.token_BN.tolist(), tree.parent_BN.tolist()
    for b, processors in enumerate(custom):
        if not processors:
            continue
        texts = [list(view.tokens[b])]
        for token, parent in zip(tokens[b], parents[b], strict=True):
            texts.append([*texts[parent + 1], token])
        for length in sorted({len(text) for text in texts}):
            at = [t for t, text in enumerate(texts) if len(text) == length]
            ids = torch.tensor([texts[t] for t in at], device=scores_BTV.device)
            rows = scores_BTV[b, at]
            for processor in processors:
                rows = processor(ids, rows)  # type: ignore[operator]
            scores_BTV[b, at] = rows.to(scores_BTV.dtype)
