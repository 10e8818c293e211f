"""DReSD (arXiv 2502.15572): retrieve by meaning, drafting what followed similar target states.

The key of a place is the target's last state there, standardised, reduced and of unit length; the
query is the target's own newest state, which costs nothing. Of the nearest places those stay whose
next token is the one the target has just emitted, and what followed them is counted into a tree.
The row's own places are searched exactly; a store of texts (`specctl datastore --recipe dresd`)
through an approximate index. States are those of one target: a package is refused by any other.
States are standardised per dimension, reduced by PCA and set to unit length; neighbours are found
by cosine, in an approximate index (HNSW, library usearch, extra `dense`) or exactly.
Letters: B rows, C candidates, D hidden width, O output width (after PCA), P path, R flat rows
(places).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.drafter import Budget, Drafter, Family, Needs, Outcome, Space
from specctl.core.errors import IntegrityError, ResourceError
from specctl.core.messages.installed import library
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.option_checks import Count, OneOf, Options
from specctl.drafters.retrieval.corpus import BREAK, joined
from specctl.drafters.retrieval.occurrences import copied
from specctl.drafters.retrieval.trie import Trie, TrieState, counted

TRUST = 0.7  # guessed chance that a neighbour goes on alike; policies read it, no verifier


@dataclass(frozen=True, slots=True)
class DresdOptions(Options):
    """`neighbours` places are asked for, `span` tokens behind them drafted; states are reduced to
    `dims` numbers. `index`: hnsw (library usearch) or exact. `own`: search the row's own text."""

    neighbours: Count = 32
    span: Count = 10
    dims: Count = 64
    index: Annotated[str, OneOf(KINDS)] = "hnsw"
    own: bool = True


class Dresd(Drafter):
    """No weights; a package may hold texts, their keys and the projection that made them."""

    family = "dresd"
    holds_data = True
    options: DresdOptions

    def __init__(
        self, options: DresdOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        super().__init__(options, spec, vocab)
        self._tensors: dict[str, Tensor] = {}
        self.corpus_R = joined([])
        self.projection: Projection | None = None
        self.index: DenseIndex | None = None

    def needs(self) -> Needs:
        return Needs(taps=(self.spec.num_layers,))

    def open(self, space: Space) -> DresdState:
        return DresdState(self, space)

    def learn(
        self, texts: Iterable[Sequence[int]], taps: Iterable[Mapping[int, Tensor]] = ()
    ) -> None:
        """Retrieve from these texts from now on; `taps` are the target's last states of each."""
        pairs = [(ids, tap[self.spec.num_layers]) for ids, tap in zip(texts, taps, strict=True)]
        state_RD = torch.cat([state.float().cpu() for ids, state in pairs if len(ids)])
        projection = Projection.fit(state_RD, self.options.dims)
        keys = {"corpus": torch.from_numpy(joined([ids for ids, _ in pairs]))}
        self.load_tensors({**keys, **projection.tensors(), "keys": projection(state_RD).half()})

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._tensors)

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if not tensors:
            return
        if set(tensors) != {"corpus", "keys", "mean", "basis"}:
            raise _damaged(", ".join(sorted(tensors)), "corpus, keys, mean and basis")
        corpus_R = tensors["corpus"].cpu().numpy()
        place_R = np.flatnonzero(corpus_R != BREAK)
        shapes = {name: tuple(tensors[name].shape) for name in ("keys", "mean", "basis")}
        width = shapes["keys"][-1]
        size = self.spec.hidden_size
        wanted = {"keys": (len(place_R), width), "mean": (size,), "basis": (size, width)}
        if shapes != wanted or not BREAK <= corpus_R.min() <= corpus_R.max() < self.spec.vocab_size:
            raise _damaged(str(shapes), f"{wanted}, ids below {self.spec.vocab_size}")
        self._tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
        self.corpus_R, self.projection = corpus_R, Projection.of(self._tensors)
        self.index = DenseIndex(self._tensors["keys"], place_R, self.options.index)


def _damaged(found: str, expected: str) -> IntegrityError:
    return IntegrityError(
        "this is no dense store of this target",
        found=found,
        expected=expected,
        do="build the store again with `specctl datastore --recipe dresd`",
    )


@dataclass(slots=True)
class _DenseRow:
    """The target's last states of one row, in order. One writer: the DraftState."""

    states: list[Tensor] = field(default_factory=list)


class DresdState(TrieState):
    """Per slot, the states of the row's own places; the newest is the query."""

    def __init__(self, drafter: Dresd, space: Space) -> None:
        self.drafter, self.device = drafter, space.device
        self.tap = drafter.spec.num_layers
        self.rows = [_DenseRow() for _ in range(space.num_slots)]

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        self.end(slot)
        if self.tap in taps:
            self.rows[slot].states.append(taps[self.tap].float().cpu())

    def end(self, slot: int) -> None:
        self.rows[slot] = _DenseRow()

    def observe(self, outcome: Outcome) -> None:
        """States of the root and of the accepted nodes: the last one predicts the new root."""
        state_BPD = outcome.taps[self.tap].float().cpu()
        for b, (slot, accepted) in enumerate(
            zip(outcome.view.slots, outcome.num_accepted, strict=True)
        ):
            self.rows[slot].states.append(state_BPD[b, : accepted + 1])

    def draft_row(self, slot: int, tokens: Sequence[int], budget: Budget) -> Trie:
        options, row = self.drafter.options, self.rows[slot]
        span, trie = min(options.span, budget.depth), Trie()
        row.states[:] = [torch.cat(row.states)] if row.states else []
        if span < 1 or not row.states or not len(row.states[0]):
            return trie
        state_RD, root = row.states[0], tokens[-1]
        if options.own:
            ends = self._own(state_RD, tokens)
            trie = counted([copied(tokens, end, span) for end in ends], TRUST)
        if self.drafter.index is not None and self.drafter.projection is not None:
            query_O = self.drafter.projection(state_RD[-1:])[0]
            places = self.drafter.index.nearest(query_O, options.neighbours)
            trie.absorb(counted(self._continuations(places, root, span), TRUST))
        return trie

    def _own(self, state_RD: Tensor, tokens: Sequence[int]) -> list[int]:
        """Where the root stood before, after the states most similar to the newest one."""
        last, root = len(state_RD) - 1, tokens[-1]
        before = [i for i in range(last) if tokens[i + 1] == root]
        if not before:
            return []
        unit_RD = F.normalize(state_RD - state_RD.mean(0), dim=-1)
        alike_R = unit_RD[before] @ unit_RD[last]
        best = alike_R.topk(min(self.drafter.options.neighbours, len(before))).indices.tolist()
        good = [n for n in best if alike_R[n] >= 0.5 * alike_R[best[0]]]
        return [before[n] + 1 for n in good]

    def _continuations(self, places: list[int], root: int, span: int) -> list[list[int]]:
        corpus_R = self.drafter.corpus_R
        found = []
        for place in places:
            if int(corpus_R[place + 1]) == root:
                ids = corpus_R[place + 2 : place + 2 + span].tolist()
                found.append(ids[: ids.index(BREAK)] if BREAK in ids else ids)
        return found


KINDS = ("hnsw", "exact")
MIN_SCALE = 1e-6


@dataclass(frozen=True, slots=True)
class Projection:
    """mean_D and basis_DO (the scaling by dimension is inside it); states -> unit vectors."""

    mean_D: Tensor
    basis_DO: Tensor

    @classmethod
    def fit(cls, state_RD: Tensor, dims: int) -> Projection:
        """Standardisation and the `dims` strongest principal directions of these states."""
        state_RD = state_RD.float()
        mean_D = state_RD.mean(0)
        scale_D = (state_RD - mean_D).square().mean(0).sqrt().clamp(min=MIN_SCALE)
        scaled_RD = (state_RD - mean_D) / scale_D
        values_D, vectors_DD = torch.linalg.eigh(scaled_RD.T @ scaled_RD)
        best_O = values_D.argsort(descending=True)[: min(dims, len(values_D))]
        return cls(mean_D, vectors_DD[:, best_O] / scale_D[:, None])

    def __call__(self, state_RD: Tensor) -> Tensor:
        """[R, O] float32, each of length one."""
        return F.normalize((state_RD.float() - self.mean_D) @ self.basis_DO, dim=-1)

    def tensors(self) -> dict[str, Tensor]:
        return {"mean": self.mean_D, "basis": self.basis_DO.contiguous()}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Projection:
        return cls(tensors["mean"].float(), tensors["basis"].float())


class DenseIndex:
    """Unit vectors and the places they stand for. Read only."""

    def __init__(self, key_RO: Tensor, place_R: npt.NDArray[np.int64], kind: str) -> None:
        self.key_RO, self.place_R = key_RO.float(), place_R
        self._graph = _graph(self.key_RO) if kind == "hnsw" else None

    def nearest(self, query_O: Tensor, count: int) -> list[int]:
        """Places of the `count` most similar keys, the most similar first."""
        count = min(count, len(self.place_R))
        if self._graph is not None:
            found = self._graph.search(query_O.float().numpy(), count, threads=1).keys
            return [int(place) for place in self.place_R[np.asarray(found, dtype=np.int64)]]
        best_C = (self.key_RO @ query_O.float()).topk(count).indices
        return [int(place) for place in self.place_R[best_C.numpy()]]


def _graph(key_RO: Tensor) -> Any:
    """An HNSW graph over the keys; one thread, so that equal stores make equal graphs."""
    usearch = library(
        "usearch.index",
        "approximate search over states",
        "dense",
        instead="set drafter.options.index=exact (slow for large stores)",
        kind=ResourceError,
    )
    graph = usearch.Index(ndim=key_RO.shape[1], metric="cos", dtype="f32")
    graph.add(np.arange(len(key_RO)), key_RO.numpy(), threads=1)
    return graph


FAMILY = Family(
    name="dresd",
    summary=(
        "No training: looks for places in a store of texts, and in the text so far, where the "
        "target was in a similar state, and drafts what followed them. Finds contexts that mean "
        "the same in other words, which exact matching misses; the store keeps a vector per token "
        "and belongs to one target."
    ),
    paper="https://arxiv.org/abs/2502.15572",
    options=DresdOptions,
    build=Dresd,
    trainable=False,
    policies=("direct",),
)
