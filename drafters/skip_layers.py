"""The target without some of its layers drafts for the whole (Draft & Verify, arXiv 2309.08168).

Attentions and MLPs are left out one by one. Which ones are worth leaving out is found once for a
target, by Bayesian search over texts (`specctl datastore`), and kept in the package; by default
half of the layers are left out, evenly spread with the first and the last kept (unified layer
skipping, arXiv 2404.06954). A draft starts from the target's own keys and values of the known text.
The paper's self-tuned threshold is stop rule draft-verify.
Letters: B rows, S sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specctl.core.drafter import Family, Space
from specctl.core.errors import RecipeError
from specctl.core.spec import ModelSpec
from specctl.core.sub_layers import SubLayers
from specctl.core.vocab import VocabMap
from specctl.drafters.nets.layer_search import search
from specctl.drafters.nets.self_drafter import SelfDrafter, check_layers
from specctl.drafters.option_checks import check_count, check_options
from specctl.drafters.states.borrowed_state import FixedState

TEXT, MOST_TEXTS = 128, 16  # tokens of a text that is searched on, and how many


@dataclass(frozen=True, slots=True)
class SkipLayersOptions:
    """`skip_attention` and `skip_mlp`: layers whose attention or MLP is left out; None for both
    keeps the share `keep` of whole layers, evenly spread. `trials` sets are looked at where texts
    are searched on."""

    skip_attention: tuple[int, ...] | None = None
    skip_mlp: tuple[int, ...] | None = None
    keep: float = 0.5
    trials: int = 200

    def __post_init__(self) -> None:
        check_options(self, 0.0 < self.keep <= 1.0, ("keep",), "a share above 0, up to 1")
        check_count("trials", self.trials, most=1_000_000)


class SkipLayers(SelfDrafter):
    """A set that was searched for becomes part of the options, and so of the package."""

    family = "skip-layers"
    learns_states = False
    options: SkipLayersOptions

    def __init__(
        self, options: SkipLayersOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        super().__init__(options, spec, vocab)
        count = spec.num_layers
        if options.skip_attention is None and options.skip_mlp is None:
            self.parts = SubLayers.evenly(count, max(1, round(options.keep * count)))
        else:
            attention = check_layers("skip_attention", options.skip_attention or (), count)
            mlp = check_layers("skip_mlp", options.skip_mlp or (), count)
            self.parts = SubLayers.without(count, attention, mlp)

    @property
    def attention(self) -> tuple[int, ...]:
        return self.parts.attention

    def open(self, space: Space) -> FixedState:
        return FixedState(self.lm, self.parts, space)

    def learn(
        self, texts: Iterable[Sequence[int]], taps: Iterable[Mapping[int, Tensor]] = ()
    ) -> None:
        """Search for the set that is worth most on these texts."""
        del taps
        whole = [list(text[:TEXT]) for text in texts if len(text) >= TEXT][:MOST_TEXTS]
        if not whole:
            raise RecipeError(
                "no text is long enough to search for layers to skip",
                where="data.new_tokens",
                expected=f"texts of {TEXT} tokens",
                do=f"--set data.new_tokens={TEXT}",
            )
        ids_BS = torch.tensor(whole, device=self.lm.device)
        found = search(self.lm, ids_BS, self.options.trials)
        attention, mlp = found.parts.skipped(self.spec.num_layers)
        self.options = replace(self.options, skip_attention=attention, skip_mlp=mlp)
        self.parts = found.parts


FAMILY = Family(
    name="skip-layers",
    summary=(
        "No second model and no training: the target without some of its attentions and MLPs "
        "drafts for the whole of it. Which ones to leave out is searched for once, on texts of "
        "yours. Pays where a target has layers to spare, as large ones have."
    ),
    paper="https://arxiv.org/abs/2309.08168",
    options=SkipLayersOptions,
    build=SkipLayers,
    trainable=False,
    policies=("chain",),
)
