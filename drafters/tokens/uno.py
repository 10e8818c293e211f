"""UNO (github.com/ifm-ai/uno): the target drafts itself, at rows of noise that low-rank additions
read.

A round reads the newest token and `num_heads` - 1 noise tokens behind it, causally, in one forward
of the target. The newest token's row is the target's own: what it says is exact. On the rows of
noise W + alpha / r B A stands for every matrix W of the `targets`; such a row stands where a token
to come will, and says the one behind it. All rows are read at once, so no draft depends on the one
before it: a chain of independent draws, or a tree of the rows' best. A second forward, the target
alone, verifies. The first draft of a chain is always accepted, so that two passes emit two tokens
at least; a tree at T > 0 holds the likeliest tokens, among which the one that is drawn need not be.

Trained behind anchors of a text: the rows of a block see the text up to the anchor as the target
itself reads it, and their own block causally. Each learns what the target says at the same place of
the true text: the sum of |q - p| over the vocabulary (twice the loss `tv`). Noise is uniform over
the ids 1 .. `mask_id` - 1 and drawn anew in every step; a draft's is fixed by its position, so that
it is the same whichever rows share a round. `stages` lets blocks grow as training goes on.
Letters: A anchors, B rows, D hidden width, K draft vocabulary, M new nodes, S sequence, T fed
tokens, X any axes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Family, RoundView, Space
from specctl.core.errors import RecipeError
from specctl.core.forward.row_additions import ATTENTION, MLP, Factors, Place, RowAdditions
from specctl.core.language_model import Borrowed, Feed, LanguageModel
from specctl.core.spec import ModelSpec
from specctl.drafters.frames.places import PlacesDrafter, PlacesOptions
from specctl.drafters.nets.low_rank import (
    OF_PACKED,
    LinearName,
    check_names,
    check_places,
    factors_of,
    pairs_of,
)
from specctl.drafters.nets.options import SERVED
from specctl.drafters.nets.routed import read_head, served_head
from specctl.drafters.option_checks import MOST_IDS, Count, Within
from specctl.drafters.states.borrowed_state import KnownTokensState, groups_behind

PERIOD = 4096  # positions behind which a draft's noise repeats


@dataclass(frozen=True, slots=True)
class UnoOptions(PlacesOptions):
    """`num_heads` tokens are drafted, the first by the newest token, the others by noise. Additions
    of `rank`, times `alpha` / `rank`, to the linear layers named `targets` of every layer.
    `mask_id`: noise is below it (None: of the whole vocabulary). `stages`: how many rows of noise
    learn, one stage of the training after another (None: all from the start). `fresh_noise: false`
    trains with the noise that drafts have at the same positions (an ablation)."""

    num_heads: Annotated[int, Within(2)] = field(default=6, metadata=SERVED)
    loss: str = "tv"
    rank: Count = 16
    alpha: Annotated[float, Within(1e-3, 1e6)] = 32.0
    targets: tuple[LinearName, ...] = ATTENTION + MLP
    mask_id: Annotated[int, Within(2, MOST_IDS)] | None = field(default=None, metadata=SERVED)
    stages: tuple[Count, ...] | None = None
    fresh_noise: bool = True

    def __post_init__(self) -> None:
        PlacesOptions.__post_init__(self)
        check_names(self.targets)
        stages = self.stages or (self.num_heads - 1,)
        if list(stages) != sorted({*stages}) or stages[-1] < self.num_heads - 1:
            raise RecipeError(
                "stages grow up to all rows of noise",
                where="drafter.options.stages",
                found=f"{list(stages)}, num_heads: {self.num_heads}",
                expected=f"rising numbers, the last {self.num_heads - 1} (num_heads - 1) or more",
                do="leave stages out: all of them learn from the start",
            )


class UnoNet(nn.Module):
    """The pairs of every layer, by the names of its linear layers."""

    def __init__(self, spec: ModelSpec, options: UnoOptions) -> None:
        super().__init__()
        self.layers = pairs_of(spec, options.targets, options.rank, spec.num_layers)


def fixed_noise(size: int, device: torch.device) -> Tensor:
    """[PERIOD]: the noise of a draft by its position: ids 1 .. size - 1."""
    chance = torch.Generator().manual_seed(0)
    return torch.randint(1, size, (PERIOD,), generator=chance).to(device)


class Uno(PlacesDrafter):
    """All layers of the target run. The newest token is the first place."""

    family = "uno"
    teaches_target = False  # its rows learn what the target as it is says
    reach, replaces_anchor = 1, True
    first = 0
    module: UnoNet
    options: UnoOptions

    def make_net(self) -> UnoNet:
        self.check_served()
        return UnoNet(self.spec, self.options)

    def check_served(self) -> None:
        if self.options.mask_id is not None:
            Within(2, self.spec.vocab_size).check("mask_id", self.options.mask_id)

    def bind(self, borrowed: Borrowed) -> None:
        super().bind(borrowed)
        check_places(self.lm, self.factors(), "choose pass, which adds nothing to matrices")

    def remarks(self, is_packed: bool) -> list[str]:
        found = [OF_PACKED] if is_packed else []
        if self.vocab is not None:
            size = f"{self.vocab.size:,} of {self.spec.vocab_size:,} ids"
            found.append(
                f"drafts name {size}: where the target's next token is another, a round of two "
                "passes emits it alone, and not two tokens at least"
            )
        return found

    def behind(self, state_BAD: Tensor) -> Tensor:
        raise AssertionError("noise is fed by its ids")

    def num_places(self, progress: float) -> int:
        stages, most = self.options.stages, self.options.num_heads
        if not stages:
            return most
        return min(1 + stages[min(int(progress * len(stages)), len(stages) - 1)], most)

    # -- a forward ------------------------------------------------------------------------------

    def factors(self) -> dict[Place, Factors]:
        """What is added where."""
        return factors_of(self.module.layers, self.options.alpha / self.options.rank)

    def noise(self, position_X: Tensor, is_fixed: bool) -> Tensor:
        """[X]: ids of rows of noise at these positions."""
        size = self.options.mask_id or self.spec.vocab_size
        if not is_fixed:
            return torch.randint(1, size, position_X.shape, device=position_X.device)
        return fixed_noise(size, position_X.device)[position_X % PERIOD]

    def read_rows(self, feed: Feed, size: int, kv: Any, lm: LanguageModel) -> Tensor:
        """[B, T, D]: what the LM head reads at groups of `size` rows, of which all but the first
        have additions."""
        last, T = self.spec.num_layers, feed.ids_BT.shape[1]
        is_noise_T = torch.arange(T, device=feed.ids_BT.device) % size > 0
        added = RowAdditions(self.factors(), is_noise_T.expand_as(feed.ids_BT))
        return lm.run(replace(feed, taps=(last,), logits=False, added=(added,)), kv).taps[last]

    def _read(self, batch: TrainBatch, anchor_BA: Tensor, lm: LanguageModel) -> Tensor:
        (B, A), T = anchor_BA.shape, self.num_places(batch.progress)
        groups = groups_behind(lm, self.attention, batch, anchor_BA, T, replaces_anchor=True)
        position_BAT = groups.position_BM.view(B, A, T)
        ids_BAT = self.noise(position_BAT, not self.options.fresh_noise)
        ids_BAT[..., 0] = batch.ids_BS.gather(1, anchor_BA)
        feed = Feed(ids_BAT.flatten(1), groups.position_BM, groups.masks)
        return self.read_rows(feed, T, groups.kv, lm).view(B, A, T, -1)

    def open(self, space: Space) -> UnoState:
        return UnoState(self, space)


class UnoState(KnownTokensState):
    """All logits of a draft are there with those of the root: they depend on depth alone."""

    may_draft_nothing = True

    def __init__(self, drafter: Uno, space: Space) -> None:
        super().__init__(drafter.lm, drafter.attention, space, extra=drafter.options.num_heads)
        self.drafter, self._head = drafter, served_head(drafter.head_weight(), drafter.options)
        self._ready_BTD = self._logits_BTK = torch.empty(0)
        self._depths: list[Tensor] = []

    def _drafted(self, view: RoundView, length: int) -> Tensor:
        """[B, T, K]: logits of the first `length` places."""
        lm, T = self.lm, length
        kept = [self.num_known[slot] for slot in view.slots]
        if max(kept) + T > self.kv.max_len:
            self.kv.reserve(max(kept) + T + 64)
        same = kept[0] if min(kept) == max(kept) else None
        self.kv.begin(view.slots, view.slot_B, view.kept_len_B, T, max(kept) + T, same)
        at_T = torch.arange(T, device=view.kept_len_B.device)
        position_BT = self.within(view.kept_len_B[:, None] + at_T)
        ids_BT = self.drafter.noise(position_BT, is_fixed=True)
        ids_BT[:, 0] = view.root_B
        feed = Feed(ids_BT, position_BT, lm.chain_masks(view.kept_len_B, T, max(kept) + T))
        self._ready_BTD = self.drafter.read_rows(feed, T, self.kv, lm)
        return read_head(self._ready_BTD, self._head)

    @torch.no_grad()
    def root(self, view: RoundView) -> Tensor:
        self._logits_BTK = self._drafted(view, self.drafter.options.num_heads)
        self._depths = [torch.zeros_like(view.slot_B[:, None])]
        return self._logits_BTK[:, 0]

    @torch.no_grad()
    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        """Behind a node at depth d the place d; past the last place, nothing."""
        depth_BM = torch.cat(self._depths, dim=1).gather(1, parent_BM + 1) + 1
        self._depths.append(depth_BM)
        T, K = self._logits_BTK.shape[1:]
        at_BMK = depth_BM.clamp(max=T - 1)[:, :, None].expand(-1, -1, K)
        logits_BMK = self._logits_BTK.gather(1, at_BMK)
        return logits_BMK.masked_fill((depth_BM >= T)[:, :, None], -torch.inf)

    @torch.no_grad()
    def marginals(self, view: RoundView, length: int) -> Tensor | None:
        return self._drafted(view, min(length, self.drafter.options.num_heads))

    def hidden(self) -> Tensor:
        return self._ready_BTD[:, min(len(self._depths), self._ready_BTD.shape[1]) - 1]


FAMILY = Family(
    name="uno",
    summary=(
        "The target drafts itself: behind the newest token it reads noise, through low-rank "
        "additions to its matrices that only those rows see, and says several tokens in one "
        "forward; a second one, of the target alone, verifies. Every chain emits two tokens at "
        "least. Costs two forwards a round, so it pays at few requests at a time."
    ),
    paper="https://github.com/ifm-ai/uno",
    options=UnoOptions,
    build=Uno,
    trainable=True,
    policies=("chain", "marginal-tree", "static-tree", "dynamic-tree"),
    borrows_layers=True,
)
