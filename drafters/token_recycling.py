"""Token Recycling (arXiv 2408.08696): draft a tree from the target's own discarded candidates.

A matrix holds, for each token, the target's newest top-k continuations of it. Every token fed to
the target, accepted or not, refreshes its row; the draft reads the matrix breadth first along a
fixed template of ranks. The paper's matrix is one for all requests, so that one's text warms the
next: that is scope process. By default each request has its own; rows that share one otherwise
(a conversation) read what those before them had learned when they ended.
Letters: B rows, N nodes, T fed tokens, V target vocabulary, R ranks per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from specctl.core.drafter import (
    Budget,
    Drafter,
    DraftState,
    Family,
    Needs,
    Outcome,
    RoundView,
    Space,
)
from specctl.core.errors import FileError, RecipeError
from specctl.core.spec import ModelSpec
from specctl.core.tree import DraftTree, empty_tree, fitted
from specctl.core.vocab import VocabMap
from specctl.drafters.nets.heads import check_choice, check_count
from specctl.drafters.retrieval.recycled import Pages, RecycledStore, followers
from specctl.drafters.retrieval.store_registry import Scope, StoreRegistry
from specctl.drafters.states.template import Template, compile_template, greedy_paths

TEMPLATE_NODES = 80


@dataclass(frozen=True, slots=True)
class TokenRecyclingOptions:
    """`chances[r]`: how often the token of rank r is the next one; shapes the template tree and
    sets how many ranks are remembered. `max_depth` levels at most. `scope` says whose matrix may
    help whom; of scope disk, or with `freeze`, nothing is learned (needs a warm matrix). `max_mib`
    caps what is kept of each conversation, or of the process, between its rows."""

    chances: tuple[float, ...] = (0.5, 0.13, 0.07, 0.045, 0.03, 0.022, 0.017, 0.013)
    max_depth: int = 6
    freeze: bool = False
    scope: str = Scope.REQUEST
    max_mib: int = 32

    def __post_init__(self) -> None:
        object.__setattr__(self, "chances", tuple(float(chance) for chance in self.chances))
        if not self.chances or min(self.chances) <= 0 or sum(self.chances) > 1:
            raise RecipeError(
                "rank chances are not probabilities",
                where="drafter.options.chances",
                found=str(self.chances),
                expected="positive numbers that sum to at most 1",
                do="leave chances out to take the default",
            )
        check_choice("scope", self.scope, tuple(Scope))
        check_count("max_mib", self.max_mib, most=1_000_000)


class TokenRecycling(Drafter):
    """No weights; `matrix_VR` is an optional warm start, the one tensor a package may hold."""

    family: ClassVar[str] = "token-recycling"
    holds_data = True

    def __init__(
        self, options: TokenRecyclingOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        super().__init__(options, spec, vocab)
        self.matrix_VR: Tensor | None = None
        new = partial(RecycledStore, self.needs().topk, options.max_mib << 20)
        self.room = StoreRegistry(Scope(options.scope), new)

    @property
    def is_frozen(self) -> bool:
        return self.options.freeze or self.room.scope is Scope.DISK

    def needs(self) -> Needs:
        return Needs(topk=min(len(self.options.chances), self.spec.vocab_size))

    def open(self, space: Space) -> TokenRecyclingState:
        if self.is_frozen and self.matrix_VR is None:
            raise RecipeError(
                "a frozen token-recycling drafter knows nothing yet",
                where="drafter.options." + ("freeze" if self.options.freeze else "scope"),
                expected="a warm matrix",
                do="take scope request without freeze, or load a package that holds a warm matrix",
            )
        return TokenRecyclingState(self, space)

    def learn(
        self, texts: Iterable[Sequence[int]], taps: Iterable[Mapping[int, Tensor]] = ()
    ) -> None:
        """Start from what followed each token in these texts, the commonest first."""
        del taps
        matrix_VR = followers(texts, self.spec.vocab_size, self.needs().topk)
        self.load_tensors({"matrix": matrix_VR})

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.matrix_VR is None else {"matrix": self.matrix_VR}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        V, R = self.spec.vocab_size, self.needs().topk
        for name, tensor in tensors.items():
            if name != "matrix" or tuple(tensor.shape) != (V, R):
                raise FileError(
                    "this is no token-recycling matrix",
                    found=f"{name} {tuple(tensor.shape)}",
                    expected=f"matrix {(V, R)}",
                    do="use a package made for this target",
                )
            self.matrix_VR = tensor.to(torch.int32)
            self.room.disk = RecycledStore.of(self.matrix_VR)


class TokenRecyclingState(DraftState):
    """The matrices of one engine's rows: a page each, or one for all where the scope says so."""

    def __init__(self, drafter: TokenRecycling, space: Space) -> None:
        self.options, self.device, self.room = drafter.options, space.device, drafter.room
        self.is_frozen = drafter.is_frozen
        self.is_one = self.is_frozen or self.room.scope is Scope.PROCESS
        self.keeps = not self.is_frozen and self.room.scope is not Scope.REQUEST
        self.V, self.R = drafter.spec.vocab_size, drafter.needs().topk
        num_pages = 1 if self.is_one else space.num_slots
        self.pages = Pages(num_pages, self.V, self.R, space.device)
        page_S = torch.arange(space.num_slots, device=space.device) % num_pages
        self.first_S1 = (page_S * self.pages.W)[:, None]  # a slot's first cell
        self.first_rank_S1 = self.first_S1 * self.R
        self.stores = self.room.rows(space.identity, space.num_slots)
        self._live: set[int] = set()
        chances = [self.options.chances[: self.R]] * self.options.max_depth
        self.paths = greedy_paths(chances, max(TEMPLATE_NODES, space.max_nodes))
        self._templates: dict[tuple[int, int], Template] = {}

    def snapshot(self, slot: int = 0) -> Tensor:
        """[V, R] int32: what a slot's matrix holds, to be handed to a drafter of this target."""
        return self.pages.best_PWR[self._page(slot), : self.V].clone()

    def _page(self, slot: int) -> int:
        return 0 if self.is_one else slot

    def _known(self, slot: int) -> list[RecycledStore]:
        """What the slot's row is told of: the warm matrix, and what its scope has learned."""
        store, warm = self.stores.at(slot), self.room.disk
        return [store] if warm is None or warm is store else [warm, store]

    def join(self, slot: int, conversation: str | None) -> None:
        self.stores.join(slot, conversation)

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        del tokens, taps  # the prompt brings no top-k
        self.stores.start(slot)
        if not (self.is_one and self._live):
            self.pages.begin(self._page(slot), self._known(slot))
        self._live.add(slot)

    def end(self, slot: int) -> None:
        if slot in self._live and self.keeps:
            self.stores.at(slot).update(*self.pages.learned(self._page(slot)))
        self._live.discard(slot)
        self.stores.end(slot)

    def propose(self, view: RoundView, budget: Budget) -> DraftTree:
        template = self._template(budget)
        if not template.levels:
            return empty_tree(len(view.slots), self.device)
        flat = self.pages.best_PWR.view(-1)
        rank_BN = template.rank_N + self.first_rank_S1[view.slot_B]
        parent_BM = view.root_B[:, None]
        levels: list[Tensor] = []
        for first, last in template.levels:
            if levels:
                before = template.levels[len(levels) - 1][0]
                parent_BM = levels[-1][:, template.parent_N[first:last] - before]
            levels.append(flat[parent_BM * self.R + rank_BN[:, first:last]].long())
        token_BN = torch.cat(levels, dim=1)
        valid_BN = token_BN < self.V
        return fitted(template.point_tree(token_BN.masked_fill(~valid_BN, 0), valid_BN))

    def _template(self, budget: Budget) -> Template:
        key = budget.nodes, budget.depth
        if key not in self._templates:
            self._templates[key] = compile_template(self.paths, *key, self.device)
        return self._templates[key]

    def observe(self, outcome: Outcome) -> None:
        if self.is_frozen or outcome.topk_BTK is None:
            return
        tree = outcome.tree
        fed_BT = tree.fed_token_BT(outcome.view.root_B)
        if tree.num_nodes:
            fed_BT = fed_BT.masked_fill(~tree.fed_valid_BT(), self.V)
        cell_BT = fed_BT + self.first_S1[outcome.view.slot_B]
        self.pages.write(cell_BT.flatten(), outcome.topk_BTK.flatten(0, 1))


def build(
    options: TokenRecyclingOptions, spec: ModelSpec, vocab: VocabMap | None
) -> TokenRecycling:
    return TokenRecycling(options, spec, vocab)


FAMILY = Family(
    name="token-recycling",
    summary=(
        "No training: remembers which tokens the target ranked highest after each token it has "
        "read, accepted or rejected, and drafts a tree from that memory. Learns while it runs, so "
        "the first hundred tokens gain little; helps a bit on nearly every text."
    ),
    paper="https://arxiv.org/abs/2408.08696",
    options=TokenRecyclingOptions,
    build=build,
    trainable=False,
    policies=("direct",),
)
