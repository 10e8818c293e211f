"""Token Recycling (arXiv 2408.08696): draft a tree from the target's own discarded candidates.

A matrix holds, for each token, the target's newest top-k continuations of it. Every token fed to
the target, accepted or not, refreshes its row; the draft reads the matrix breadth first along a
fixed template of ranks. The matrix belongs to one engine's memory and is shared by its rows, so
one request's text warms the next one; `freeze` stops all learning from a given warm matrix.
Letters: B rows, N nodes, F fed tokens of all rows, V target vocabulary, R ranks per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specctl.drafters.parts.base import (
    Budget,
    Drafter,
    DraftState,
    Family,
    Needs,
    Outcome,
    RoundView,
    Space,
)
from specctl.drafters.parts.spec import ModelSpec
from specctl.drafters.parts.template import Template, compile_template, greedy_paths
from specctl.drafters.parts.tree import DraftTree, empty_tree, fitted
from specctl.drafters.parts.vocab import VocabMap
from specctl.recipes.errors import FileError, RecipeError

TEMPLATE_NODES = 80


@dataclass(frozen=True, slots=True)
class TokenRecyclingOptions:
    """`chances[r]`: how often the token of rank r is the next one; shapes the template tree and
    sets how many ranks are remembered. `max_depth` levels at most. `freeze`: never learn (needs a
    warm matrix)."""

    chances: tuple[float, ...] = (0.5, 0.13, 0.07, 0.045, 0.03, 0.022, 0.017, 0.013)
    max_depth: int = 6
    freeze: bool = False

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


class TokenRecycling(Drafter):
    """No weights; `matrix_VR` is an optional warm start, the one tensor a package may hold."""

    family: ClassVar[str] = "token-recycling"
    holds_data = True

    def __init__(
        self, options: TokenRecyclingOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        super().__init__(options, spec, vocab)
        self.matrix_VR: Tensor | None = None

    def needs(self) -> Needs:
        return Needs(topk=min(len(self.options.chances), self.spec.vocab_size))

    def open(self, space: Space) -> TokenRecyclingState:
        if self.options.freeze and self.matrix_VR is None:
            raise RecipeError(
                "a frozen token-recycling drafter knows nothing yet",
                where="drafter.options.freeze",
                expected="a warm matrix",
                do="leave freeze out, or load a package that holds a warm matrix",
            )
        return TokenRecyclingState(self, space)

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.matrix_VR is None else {"matrix": self.matrix_VR}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        expected = (self.spec.vocab_size, self.needs().topk)
        for name, tensor in tensors.items():
            if name != "matrix" or tuple(tensor.shape) != expected:
                raise FileError(
                    "this is no token-recycling matrix",
                    found=f"{name} {tuple(tensor.shape)}",
                    expected=f"matrix {expected}",
                    do="use a package made for this target",
                )
            self.matrix_VR = tensor.to(torch.int32)


class TokenRecyclingState(DraftState):
    """The adjacency matrix of one engine, int32. Unwritten entries hold the number V, which is also
    the index of an extra row that stays unwritten: so missing tokens have missing children."""

    def __init__(self, drafter: TokenRecycling, space: Space) -> None:
        self.options, self.device = drafter.options, space.device
        self.V, self.R = drafter.spec.vocab_size, drafter.needs().topk
        self.matrix_WR = torch.full(
            (self.V + 1, self.R), self.V, dtype=torch.int32, device=self.device
        )
        if drafter.matrix_VR is not None:
            self.matrix_WR[: self.V] = drafter.matrix_VR.to(self.device)
        self.is_frozen = self.options.freeze
        self._newest_W = torch.zeros(self.V + 1, dtype=torch.long, device=self.device)
        chances = [self.options.chances[: self.R]] * self.options.max_depth
        self.paths = greedy_paths(chances, max(TEMPLATE_NODES, space.max_nodes))
        self._templates: dict[tuple[int, int], Template] = {}

    def snapshot(self) -> Tensor:
        """[V, R] int32: what has been learned, to be handed to another drafter of this target."""
        return self.matrix_WR[: self.V].clone()

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        del slot, tokens, taps  # one matrix for all rows; the prompt brings no top-k

    def propose(self, view: RoundView, budget: Budget) -> DraftTree:
        template = self._template(budget)
        if not template.levels:
            return empty_tree(len(view.slots), self.device)
        flat = self.matrix_WR.view(-1)
        parent_BM = view.root_B[:, None]
        levels: list[Tensor] = []
        for first, last in template.levels:
            if levels:
                before = template.levels[len(levels) - 1][0]
                parent_BM = levels[-1][:, template.parent_N[first:last] - before]
            levels.append(flat[parent_BM * self.R + template.rank_N[first:last]].long())
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
        self.learn(fed_BT.flatten(), outcome.topk_BTK.flatten(0, 1))

    def learn(self, token_F: Tensor, best_FR: Tensor) -> None:
        """Overwrite the row of each token; of equal tokens the last one wins (V = ignore)."""
        order_F = torch.arange(token_F.numel(), device=token_F.device)
        self._newest_W.scatter_reduce_(0, token_F, order_F, "amax", include_self=False)
        self.matrix_WR[token_F] = best_FR[self._newest_W[token_F]].to(torch.int32)
        self.matrix_WR[self.V] = self.V


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
