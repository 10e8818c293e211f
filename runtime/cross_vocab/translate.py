"""Drafting by a language model of another tokenizer, without losing the target's distribution.

Timor et al., "Accelerating LLM inference with lossless speculative decoding algorithms for
heterogeneous vocabularies" (arXiv 2502.05202). Token-level intersection (TLI, Algorithm 4): the
draft proposes only tokens that both vocabularies have; its distribution is renormalised on them
*before* it is sampled, and that distribution is what the verifier gets, as in any trimmed
vocabulary. So every policy and every rule applies unchanged. String-level matching (SLEM) is in
`string_match`, string-level rejection sampling (SLRS) in `string_rejection`.
Letters: B rows, K draft vocabulary (shared tokens), M new nodes, U foreign vocabulary, V target
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specctl.core.drafter import Drafter, Outcome, RoundView, Space, StepState
from specctl.core.errors import IncompatibleError, unknown
from specctl.core.language_model import LanguageModel
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters import family
from specctl.drafters.lm.small_lm import SmallLm
from specctl.runtime.cross_vocab.string_match import StringMatch
from specctl.runtime.cross_vocab.string_rejection import StringRejection
from specctl.runtime.cross_vocab.token_bytes import Reader, Shared, TokenBytes
from specctl.runtime.cross_vocab.translated import Texts, Translated, Translation
from specctl.runtime.policies import policies_of
from specctl.runtime.target.target import Target
from specctl.runtime.target.templates.ends import TOKENIZER, NamedEnds, united

METHODS = ("auto", "tli", "slem", "slrs")
LEAST_SHARED = 0.2  # of the smaller vocabulary: below, whole strings carry more than tokens


def check_method(method: str) -> None:
    """Refuse what is no way to translate."""
    if method not in METHODS:
        raise unknown("translation", method, METHODS, "--set drafter.translate")


def translated(
    lm: LanguageModel, tokenizer: Any, eos_id: int | None, target: Target, method: str = "auto"
) -> Drafter:
    """A drafter for `target` around a model of another tokenizer. `auto` takes TLI where the
    vocabularies share enough tokens. Where both have a chat template, the end of a turn stands for
    the end of a turn, else the end of a document for that of a document."""
    check_method(method)
    theirs = united([NamedEnds(TOKENIZER, eos_id)], tokenizer, lm.spec.vocab_size)
    documents = (theirs.of_document, target.end_of_document)
    is_chat = theirs.of_turn is not None and target.ends.of_turn is not None
    ends = (theirs.of_turn, target.end_of_turn) if is_chat else documents
    draft = TokenBytes.of(tokenizer, lm.spec.vocab_size, ends[0])
    ours = TokenBytes.of(target.tokenizer, target.spec.vocab_size, ends[1])
    shared = Shared.of(draft, ours, documents)
    smaller = min(len(draft.text_of), len(ours.text_of))
    if method == "auto":
        method = "tli" if len(shared.target_ids) >= LEAST_SHARED * smaller else "slem"
    if method == "tli" and len(shared.target_ids) < 2:
        raise IncompatibleError(
            "the two vocabularies share no tokens",
            found=f"{len(shared.target_ids)} common tokens",
            expected="at least 2",
            do="--set drafter.translate=slem",
            where="drafter.translate",
        )
    about = Translation(method, len(shared.target_ids), lm.spec.vocab_size, target.spec.vocab_size)
    reader = Reader(draft, ours, dict(zip(shared.target_ids, shared.draft_ids, strict=True)))
    if method == "tli":
        return Intersection(SmallLm.from_lm(lm, lm.spec), target.spec, reader, shared, about)
    kind = StringMatch if method == "slem" else StringRejection
    return kind(SmallLm.from_lm(lm, lm.spec), target.spec, reader, about)


class Intersection(Translated):
    """Token-level intersection. `draft_ids_K[i]` is the draft's id of target id `vocab.ids_K[i]`:
    one table both prunes the draft's logits and names what is left, so the two cannot disagree."""

    def __init__(
        self, inner: SmallLm, spec: ModelSpec, reader: Reader, shared: Shared, about: Translation
    ) -> None:
        device = inner.lm.device
        ids_K = torch.tensor(shared.target_ids, device=device)
        super().__init__(inner, spec, reader, about, VocabMap(ids_K, spec.vocab_size))
        self.policies = policies_of(family(inner.family))
        self.draft_ids_K = torch.tensor(shared.draft_ids, device=device)
        self.draft_id_V = torch.zeros(spec.vocab_size, dtype=torch.long, device=device)
        self.draft_id_V[ids_K] = self.draft_ids_K

    def open(self, space: Space) -> IntersectionState:
        return IntersectionState(self, space)


class IntersectionState(StepState):
    """The draft's texts; logits pruned to shared tokens, in the order of their target ids."""

    def __init__(self, drafter: Intersection, space: Space) -> None:
        self.drafter, self.texts = drafter, Texts(drafter, space)

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        self.texts.start(slot, tokens)

    def root(self, view: RoundView) -> Tensor:
        return self.texts.root(view).index_select(-1, self.drafter.draft_ids_K)

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        logits_BMU = self.texts.state.expand(self.drafter.draft_id_V[token_BM], parent_BM)
        return logits_BMU.index_select(-1, self.drafter.draft_ids_K)

    def observe(self, outcome: Outcome) -> None:
        self.texts.state.observe(outcome)

    def end(self, slot: int) -> None:
        self.texts.end(slot)
