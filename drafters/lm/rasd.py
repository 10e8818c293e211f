"""RASD (arXiv 2503.03434): a draft model's tree fused with what retrieval finds for the same words.

The model drafts its own tree. Continuations of the newest tokens, from the row's own text and from
a store of texts, are a second tree, from which every branch is cut that begins, or goes on from a
node that the model has read, with a token outside the model's `keep` likeliest there. Equal
prefixes are merged and the best nodes by estimate are verified. With `first` the model is asked
only when retrieval finds nothing for some row (CopySpec's two stages, arXiv 2502.08923).
Letters: B rows, C candidates, K draft vocabulary, M new nodes, P path, R flat rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from specctl.core.drafter import Budget, Family, Outcome, RoundView, Space
from specctl.core.errors import RecipeError
from specctl.core.language_model import LanguageModel
from specctl.core.spec import ModelSpec
from specctl.core.tree import DraftTree
from specctl.core.vocab import VocabMap
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions
from specctl.drafters.retrieval.retrieve import Retriever
from specctl.drafters.retrieval.trie import Trie, pack
from specctl.drafters.states.lm_state import LmState
from specctl.drafters.states.tree_layout import expansions
from specctl.drafters.training_free.rest import Rest, RestOptions


@dataclass(frozen=True, slots=True)
class RasdOptions(SmallLmOptions):
    """Those of small-lm, and of retrieval: suffixes of `min_match` to `max_match` tokens are looked
    up, `span` tokens behind them drafted; branches stay whose tokens are among the model's `keep`
    likeliest (None: all stay); `first`: where retrieval answers, the model is not asked."""

    min_match: int = 2
    max_match: int = 16
    span: int = 10
    keep: int | None = 16
    first: bool = False

    def __post_init__(self) -> None:
        SmallLmOptions.__post_init__(self)
        assert self.retrieval.reach
        if self.keep is not None and self.keep < 1:
            raise RecipeError(
                "every retrieved branch would be cut",
                where="drafter.options.keep",
                found=str(self.keep),
                expected="a positive number, or null to cut none",
                do="write keep: 16",
            )

    @property
    def retrieval(self) -> RestOptions:
        """The options of the source, checked."""
        return RestOptions(self.min_match, self.max_match, self.span)


class Rasd(SmallLm):
    """A small-lm with a store beside it; a package may hold the texts of the store."""

    family = "rasd"
    splits_rows = False
    holds_data = True

    def __init__(
        self,
        options: RasdOptions,
        spec: ModelSpec,
        vocab: VocabMap | None = None,
        lm: LanguageModel | None = None,
    ) -> None:
        super().__init__(options, spec, vocab, lm)
        self.source = Rest(options.retrieval, spec)

    def open(self, space: Space) -> RasdState:
        return RasdState(self, space)

    def learn(
        self, texts: Iterable[Sequence[int]], taps: Iterable[Mapping[int, Tensor]] = ()
    ) -> None:
        """Retrieve from these texts (token ids) from now on."""
        self.source.learn(texts, taps)

    def tensors(self) -> dict[str, Tensor]:
        return {**super().tensors(), **self.source.tensors()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_tensors({name: t for name, t in tensors.items() if name != "corpus"})
        self.source.load_tensors({name: t for name, t in tensors.items() if name == "corpus"})

    def trimmed(self, vocab: VocabMap) -> Self:
        cut = super().trimmed(vocab)
        cut.source = self.source
        return cut


@dataclass(frozen=True, slots=True)
class _RasdRound:
    """Nodes that the model has read this round, and the target ids it holds likeliest after each.
    Entry 0 is the root; `child[b]`: (entry, token) -> entry."""

    likely: list[list[set[int]]]
    child: list[dict[tuple[int, int], int]]


class RasdState(LmState):
    """The model's memory, and where each slot's text repeats itself."""

    def __init__(self, drafter: Rasd, space: Space) -> None:
        super().__init__(drafter, space)
        self.options, self.vocab, self.device = drafter.options, drafter.vocab, space.device
        self.first = bool(self.options.first)
        reach = drafter.source.options.reach
        self.retriever = Retriever(reach, space.num_slots, drafter.source.store)
        self._kept_ids = None if self.vocab is None else set(self.vocab.ids_K.tolist())
        self._seen: _RasdRound | None = None

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        super().start(slot, tokens, taps)
        self.retriever.start(slot, tokens)

    def end(self, slot: int) -> None:
        super().end(slot)
        self.retriever.end(slot)

    def root(self, view: RoundView) -> Tensor:
        logits_BK = super().root(view)
        self._seen = _RasdRound(
            [[row] for row in self._likely(logits_BK)], [{} for _ in view.slots]
        )
        return logits_BK

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        logits_BMK = super().expand(token_BM, parent_BM)
        if self._seen is not None and self.options.keep is not None:
            likely = self._likely(logits_BMK.flatten(0, 1))
            tokens, parents = token_BM.tolist(), parent_BM.tolist()
            for b, (known, child) in enumerate(
                zip(self._seen.likely, self._seen.child, strict=True)
            ):
                for m, (token, parent) in enumerate(zip(tokens[b], parents[b], strict=True)):
                    child[parent + 1, token] = len(known)
                    known.append(likely[b * len(tokens[b]) + m])
        return logits_BMK

    def _likely(self, logits_RK: Tensor) -> list[set[int]]:
        if self.options.keep is None:
            return [set() for _ in logits_RK]
        row_RC = logits_RK.topk(min(self.options.keep, logits_RK.shape[-1]), dim=-1).indices
        ids_RC = row_RC if self.vocab is None else self.vocab.ids_K[row_RC]
        return [set(row) for row in ids_RC.tolist()]

    def retrieve(self, view: RoundView, budget: Budget) -> DraftTree:
        """What retrieval drafts for each row, pruned by what the model has read this round."""
        tries = []
        for b, (slot, tokens) in enumerate(zip(view.slots, view.tokens, strict=True)):
            trie = self.retriever.trie(slot, tokens, 4 * budget.nodes, budget.depth)
            tries.append(trie.part(self._plausible(trie, b)))
        return pack(tries, budget, self.device)

    def _plausible(self, trie: Trie, b: int) -> list[int]:
        """Nodes whose path the model would not rule out, parents first."""
        seen, kept = self._seen, self._kept_ids
        entry: dict[int, int | None] = {-1: 0}  # node -> the entry the model has read it as
        for node, (parent, token) in enumerate(zip(trie.parents, trie.tokens, strict=True)):
            if parent not in entry or (kept is not None and token not in kept):
                continue
            above = entry[parent]
            if seen is None or above is None or self.options.keep is None:
                entry[node] = None
            elif token in seen.likely[b][above]:
                entry[node] = seen.child[b].get((above, token))
        return [node for node in entry if node >= 0]

    def observe(self, outcome: Outcome) -> None:
        """Accepted nodes that only retrieval proposed have not been read: the next root does."""
        growth, self._seen = self._growth, None
        super().observe(outcome)
        if growth is None:
            return
        read_BP = expansions(outcome, growth.num_nodes) >= 0
        lead_B = read_BP.long().cumprod(1).sum(1).tolist()
        for slot, kept, lead in zip(outcome.view.slots, self._kept, lead_B, strict=True):
            self.num_cached[slot] = min(self.num_cached[slot], kept + lead)


FAMILY = Family(
    name="rasd",
    summary=(
        "A small language model whose tree is fused with what retrieval finds: repeats in the "
        "text so far, and a store of texts if the package holds one. The model prunes what is "
        "retrieved; retrieval reaches further than the model can. Take it where answers quote "
        "their context or an in-house corpus and a draft model is at hand."
    ),
    paper="https://arxiv.org/abs/2503.03434",
    options=RasdOptions,
    build=Rasd,
    trainable=True,
    policies=("fused", "dynamic-tree"),
)
