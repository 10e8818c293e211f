"""TargetReader: the target with the KV cache of the active rows.

Letters: B rows, D hidden width, M new nodes (probes), P path, T fed tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from specctl.core.drafter import Drafter
from specctl.core.errors import one_of_two
from specctl.core.forward.prompt_images import offsets
from specctl.core.forward.slot_state import StateKV
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Feed, LmOut
from specctl.core.tree import DraftTree
from specctl.runtime.engine.early_pruning import pruning_of
from specctl.runtime.engine.reflection import Reflection
from specctl.runtime.engine.round import Round
from specctl.runtime.engine.unpadded import Unpadded
from specctl.runtime.policies.base import Mixing, Policy
from specctl.runtime.target.target import Target
from specctl.runtime.verify import Verdict

# One forward of a tree; the tree that comes back may have fewer valid nodes.
TreeForward = Callable[[Feed, DraftTree, SlotKV], tuple[DraftTree, LmOut]]


def shares_kv(drafter: Drafter, policy: Policy) -> bool:
    """Whether it drafts in the target's cache. Trees may expand more nodes than they keep, and for
    these it has no room."""
    steps_in_chains = isinstance(policy, Mixing) and policy.steps_in_chains
    return (policy.is_chain or steps_in_chains) and bool(drafter.needs().copied)


class TargetReader:
    """Reads what a round drafted and keeps what it accepted; with the `taps` that the drafter wants
    of every position, and those of the `features` that are kept for training. With a `reflection`
    it reads chains twice. One writer of the cache."""

    def __init__(
        self,
        target: Target,
        policy: Policy,
        taps: tuple[int, ...],
        drafter: Drafter | None = None,
        reflection: Reflection | None = None,
        features: tuple[int, ...] = (),
    ) -> None:
        self.target, self.features, self.device = target, features, target.device
        self.taps = tuple(sorted({*taps, *features})) if features else taps
        changing = reflection or pruning_of(target.lm, policy, drafter)
        if changing is not None and target.row_adapters is not None:
            raise one_of_two(
                "adapters that requests choose are added in whole forwards",
                "api.adapters, and a rule or policy that changes how drafts are read",
                "leave out api.adapters, or choose another --rule or serve.policy",
            )
        self._unpadded = Unpadded.of(target.lm)
        self._changed: TreeForward | None = None if changing is None else changing.forward
        self._kv: SlotKV | None = None

    def open(self, num_slots: int, max_len: int) -> None:
        """A new cache."""
        self._kv = None  # its memory is free for the new one
        self._kv, self.device = self.target.new_kv(num_slots, max_len), self.target.device

    @property
    def is_open(self) -> bool:
        return self._kv is not None

    @property
    def kv(self) -> SlotKV:
        assert self._kv is not None, "open() reserves the caches"
        return self._kv

    def read(self, round: Round, tree: DraftTree) -> tuple[DraftTree, LmOut]:
        """Feed root and nodes: fed token i is written at kept_len + i, its position is by depth."""
        if round.roots is not None:
            return tree, round.roots
        view, num_fed = round.view, tree.num_nodes + 1
        lengths = [len(tokens) - 1 for tokens in view.tokens]
        span, context = max(lengths) + num_fed, self.target.spec.max_positions
        same = lengths[0] if min(lengths) == max(lengths) else None
        self.kv.begin(view.slots, view.slot_B, view.kept_len_B, num_fed, span, same)
        position_BT = tree.position_BT(view.kept_len_B)
        if any(row.request.images is not None for row in round.rows):
            offset_B1 = offsets([row.request.images for row in round.rows], self.device)
            position_BT = position_BT if offset_B1 is None else position_BT + offset_B1
            tree = replace(tree, exits=None)  # read with what stands for an image in its ids
        if span > context:  # padding beyond the context: cut at commit
            position_BT = position_BT.clamp(max=context - 1)
        masks = self.target.lm.tree_masks(tree, view.kept_len_B, span)
        fed_BT, extra_BMD = tree.fed_token_BT(view.root_B), tree.probe_BMD
        if extra_BMD is not None:  # masked values of nan would reach the text: 0 * nan
            extra_BMD = extra_BMD.nan_to_num(0.0, 0.0, 0.0)
        feed = Feed(fed_BT, position_BT, masks, self.taps, residual_BTD=extra_BMD)
        if self.target.row_adapters is not None:
            feed = self.target.row_adapters.onto(feed, [row.request.adapter for row in round.rows])
        if feed.added:  # layers that a drafter ran had no additions
            tree = replace(tree, exits=None)
        return (self._changed or self._whole)(feed, tree, self.kv)

    def _whole(self, feed: Feed, tree: DraftTree, kv: SlotKV) -> tuple[DraftTree, LmOut]:
        if tree.exits is not None:
            out = self.target.lm.resume(feed, tree.exits, kv)
            if out is not None:
                return tree, out
        if self._unpadded is not None and not feed.added:
            return tree, self._unpadded.run(feed, tree, kv)
        return tree, self.target.lm.run(feed, kv)

    def keep(self, round: Round, tree: DraftTree, verdict: Verdict) -> None:
        """Move the entries of accepted nodes to where they belong; those of a chain lie there."""
        if not (tree.is_chain or self.kv.holds_state):
            self.kv.keep(round.view.slot_B, round.view.kept_len_B, verdict.path_BP)

    def advance(self, round: Round, tree: DraftTree, verdict: Verdict) -> None:
        """Move the states of recurrent layers along the accepted path, once the round is certain:
        one that fails for a row is drafted again for the others, and states do not go back."""
        if not isinstance(self.kv, StateKV):
            return
        slot_B, path_BP = round.view.slot_B, verdict.path_BP
        if tree.is_chain:
            self.kv.advance(slot_B, path_BP)
        else:
            self.kv.keep(slot_B, round.view.kept_len_B, path_BP)
