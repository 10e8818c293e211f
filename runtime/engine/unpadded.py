"""Unpadded inputs: of a round whose rows draft unequally, only true tokens are computed (EMS-SD,
arXiv 2405.07542).

Caches hold every row at its own length anyway; what is left is the padding of the drafts, which are
as wide as the widest row. Here the tokens of all rows stand one behind another, without it, in all
that is computed token by token: norms, projections, MLPs, the LM head. Attention alone sees rows.
Whether it pays is decided from the number of true tokens, which a CPU knows at no cost; on another
device the host would have to wait for it, so rounds stay padded there.
Letters: B rows, Q picked rows, T fed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Feed, LanguageModel, LmOut
from specctl.core.tree import DraftTree
from specctl.models.llama.fast_llama import FastLlama

MOST_SHARE = 0.85  # of true tokens among the fed ones up to which they are gathered


@dataclass(frozen=True, slots=True)
class Unpadded:
    """The forward of a round without its padding. Zeros stand where padding was fed, which nothing
    reads."""

    lm: FastLlama

    @classmethod
    def of(cls, lm: LanguageModel) -> Unpadded | None:
        """None for models whose layers are not run one by one here."""
        return cls(lm) if type(lm) is FastLlama else None

    def true_tokens(self, feed: Feed, tree: DraftTree) -> Tensor | None:
        """[Q] flat fed indices of root and nodes; None where the padded forward is as good."""
        if len(feed.ids_BT) == 1 or not tree.num_nodes or tree.num_probes:
            return None
        if feed.ids_BT.device.type != "cpu":
            return None
        valid_BT = tree.fed_valid_BT()
        at_Q = valid_BT.flatten().nonzero()[:, 0]
        return at_Q if len(at_Q) <= MOST_SHARE * valid_BT.numel() else None

    def run(self, feed: Feed, tree: DraftTree, kv: SlotKV) -> LmOut:
        """Logits and taps at every fed token."""
        at_Q = self.true_tokens(feed, tree)
        return self.lm.run(feed, kv) if at_Q is None else self.lm.run_at(feed, kv, at_Q)
