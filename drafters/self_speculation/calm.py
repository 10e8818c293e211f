"""CALM (arXiv 2207.07061): each token leaves the target at the first layer that is sure of it.

Behind every exit a confidence is compared with a threshold (equation 3); a token that passes it is
read out there, through the target's own norm and LM head, and one that never does at the deepest
exit. Two of the paper's three measures (section 3.5; the third is a trained classifier):

    softmax   the difference of the two largest probabilities at the exit
    state     the cosine between the residuals behind the exit's last layer and before it

The threshold falls with the place t of a token, as what is wrong early spoils what follows
(equation 5): clip(0.9 threshold + 0.1 exp(-decay t / over), 0, 1). Alone CALM counts t from the
start of the answer and changes the text; here t counts from the root of a draft, and the target
verifies. A token has no keys in the layers above its exit: the state at the exit is propagated to
them (section 3.3), for as long as the draft lasts. What is known keeps the target's own keys.

`learn` calibrates the threshold on texts by Learn then Test (section 4, equations 6 and 7):
candidates are tested from the strictest on, each with Hoeffding's bound, until one cannot be shown
to have a `risk` below the one allowed, with an error of at most `error`. The risk of a text is the
share of its tokens that leave early and are then not what the whole target says.

Leaving early is a decision of the host, so every exit of a draft is waited for.
Letters: B rows, C candidates (exits), D hidden width, M new nodes, S sequence, T fed tokens,
V target vocabulary, X any axes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, log
from typing import Annotated

import torch
from torch import Tensor

from specctl.core.drafter import Family, Space
from specctl.core.errors import RecipeError
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.language_model import Feed, LanguageModel, LmOut, Masks
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.frames.self_drafter import SelfDrafter, UnverifiedOptions, check_layers
from specctl.drafters.option_checks import Count, OneOf, Options, check_options
from specctl.drafters.states.borrowed_state import BorrowedState, read_out, said_by

SOFTMAX, STATE = "softmax", "state"
TEXT = 64  # tokens of a text that the threshold is calibrated on
CANDIDATES = tuple(i / 50 for i in range(50, -1, -1))  # thresholds, from the strictest


@dataclass(frozen=True, slots=True)
class CalmOptions(UnverifiedOptions):
    """`exits`: layer counts after which a token may leave, None all below the target's. `measure`
    and `threshold` say when; `decay` and `over` how the threshold falls (None: it does not).
    `risk` and `error` are what a calibration allows."""

    exits: tuple[int, ...] | None = None
    measure: Annotated[str, OneOf((SOFTMAX, STATE))] = SOFTMAX
    threshold: float = 0.8
    decay: float | None = 4.0
    over: Count = 8
    risk: float = 0.2
    error: float = 0.05

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        check_options(self, 0.0 <= self.threshold <= 1.0, ("threshold",), "a share, 0 to 1")
        check_options(self, self.decay is None or self.decay >= 0.0, ("decay",), "0 or more")
        shares = 0.0 < self.risk < 1.0 and 0.0 < self.error < 1.0
        check_options(self, shares, ("risk", "error"), "shares between 0 and 1")

    def threshold_at(self, place_X: Tensor) -> Tensor:
        """The threshold of tokens that stand so many places behind the root of their draft."""
        if self.decay is None:
            return torch.full(place_X.shape, self.threshold, device=place_X.device)
        falling_X = torch.exp(-self.decay * place_X / self.over)
        return (0.9 * self.threshold + 0.1 * falling_X).clamp(0.0, 1.0)


class Calm(SelfDrafter):
    """Layers up to the deepest exit."""

    family = "calm"
    shares_kv = True
    learns_states = False
    options: CalmOptions

    def __init__(
        self, options: CalmOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        super().__init__(options, spec, vocab)
        self.lossless = options.unverified is None
        every = tuple(range(1, spec.num_layers))
        self.exits = check_layers("exits", options.exits or every, spec.num_layers)
        check_options(options, bool(self.exits) and self.exits[0] > 0, ("exits",), "1 and up")

    @property
    def attention(self) -> tuple[int, ...]:
        return tuple(range(self.exits[-1]))

    def open(self, space: Space) -> CalmState:
        return CalmState(self, self.lm, space)

    def learn(
        self, texts: Iterable[Sequence[int]], taps: Iterable[Mapping[int, Tensor]] = ()
    ) -> None:
        """Calibrate the threshold on these texts."""
        whole = [list(text[:TEXT]) for text in texts if len(text) >= TEXT]
        options = self.options
        needed = int(log(1 / options.error) / (2 * options.risk**2)) + 1
        if len(whole) < needed:
            raise RecipeError(
                "too few texts to calibrate a threshold on",
                where="data.prompts",
                found=f"{len(whole)} texts of {TEXT} tokens",
                expected=f"{needed} for a risk of {options.risk:g} and an error of "
                f"{options.error:g}",
                do=f"--set data.prompts={2 * needed}, or allow a larger drafter.options.risk",
            )
        exits = read_exits(self.lm, self.exits, options.measure, whole)
        self.options = replace(options, threshold=calibrated(exits, options))


@dataclass(frozen=True, slots=True)
class ReadExits:
    """Of every token of texts and each exit: its confidence, and whether it says what the target
    says [B, S, C]."""

    sure_BSC: Tensor
    right_BSC: Tensor

    def risks(self, options: CalmOptions) -> Tensor:
        """[B]: share of each text's tokens that leave early and are wrong. Tokens take the places
        of a draft in turn."""
        S = self.sure_BSC.shape[1]
        threshold_S1 = options.threshold_at(torch.arange(S) % options.over)[:, None]
        leaves_BSC = self.sure_BSC >= threshold_S1
        at_BS1 = leaves_BSC.to(torch.uint8).argmax(-1, keepdim=True)  # the first that is sure
        wrong_BS = leaves_BSC.any(-1) & ~self.right_BSC.gather(2, at_BS1)[:, :, 0]
        return wrong_BS.double().mean(1)


@torch.no_grad()
def read_exits(
    lm: LanguageModel, exits: Sequence[int], measure: str, texts: Sequence[Sequence[int]]
) -> ReadExits:
    """What the exits of a target are sure of, and right about, in texts of one length."""
    sure, right = [], []
    for text in texts:
        ids_1S = torch.tensor([list(text)], device=lm.device)
        position_1S = torch.arange(len(text), device=lm.device)[None]
        masks = lm.document_masks(torch.zeros_like(ids_1S))
        taps = tuple(sorted({layer - i for layer in exits for i in (0, 1)}))
        out = lm.dense(ids_1S, position_1S, masks, taps)
        assert out.logits_BTV is not None
        said_1S = out.logits_BTV.argmax(-1)
        own = {layer: read_out(lm, out.taps[layer]) for layer in exits}
        sure_of = [
            confidence(measure, own[layer], out.taps[layer - 1], out.taps[layer]) for layer in exits
        ]
        sure.append(torch.stack(sure_of, -1).cpu())
        said = [(own[layer].argmax(-1) == said_1S) for layer in exits]
        right.append(torch.stack(said, -1).cpu())
    return ReadExits(torch.cat(sure), torch.cat(right))


def calibrated(exits: ReadExits, options: CalmOptions) -> float:
    """The loosest threshold whose risk is below the one allowed, by fixed sequence testing; 1 where
    that can be shown of none."""
    found, count = 1.0, len(exits.sure_BSC)
    for threshold in CANDIDATES:
        risk = float(exits.risks(replace(options, threshold=threshold)).mean())
        if exp(-2 * count * max(0.0, options.risk - risk) ** 2) > options.error:
            break
        found = threshold
    return found


def confidence(
    measure: str, logits_BMV: Tensor | None, before_BMD: Tensor, behind_BMD: Tensor
) -> Tensor:
    """[B, M]: how sure an exit is."""
    if measure == STATE:
        return torch.cosine_similarity(before_BMD.float(), behind_BMD.float(), dim=-1)
    assert logits_BMV is not None
    best_BM2 = logits_BMV.float().softmax(-1).topk(2).values
    return best_BM2[..., 0] - best_BM2[..., 1]


@dataclass(slots=True)
class Climb:
    """The nodes of one call on their way up: their residual (where they left, that of their exit),
    whether they have left, and what they say."""

    state_BMD: Tensor
    out_BM: Tensor
    said: LmOut

    @classmethod
    def of(cls, lm: LanguageModel, num_rows: int, num_nodes: int) -> Climb:
        def zeros(width: int) -> Tensor:
            return torch.zeros(num_rows, num_nodes, width, dtype=lm.dtype, device=lm.device)

        width, last = lm.spec.hidden_size, lm.spec.num_layers
        out_BM = torch.zeros(num_rows, num_nodes, dtype=torch.bool, device=lm.device)
        return cls(zeros(width), out_BM, LmOut(zeros(lm.spec.vocab_size), {last: zeros(width)}))


class CalmState(BorrowedState):
    """Counts where drafted tokens left (`taken`: layers -> tokens)."""

    def __init__(self, drafter: Calm, lm: LanguageModel, space: Space) -> None:
        super().__init__(lm, drafter.attention, space)
        self.options, self.exits = drafter.options, drafter.exits
        self.least = drafter.options.unverified
        self.taken: Counter[int] = Counter()

    @property
    def mean_exit(self) -> float:
        """Layers that a node was given."""
        return sum(layers * count for layers, count in self.taken.items()) / self.taken.total()

    def parts_of(self, slot: int, first: int) -> SubLayers:
        return SubLayers.span(0, self.exits[-1])

    def read(self, feed: Feed, rows: Sequence[int]) -> Tensor:
        """A row goes up until all its nodes have left. Nodes that left before pass its layers as
        they were at their exit, which leaves there the keys and values of state propagation."""
        B, M = feed.ids_BT.shape
        place_BM = feed.position_BT - self.growth.kept_B[:, None]
        threshold_BM = self.options.threshold_at(place_BM.float())
        climb = Climb.of(self.lm, B, M)
        staying = list(range(B))
        for below, layers in pairwise((0, *self.exits)):
            row_X = torch.tensor(staying, device=self.lm.device)
            is_out_XM = climb.out_BM[row_X]
            found = self._climb(climb, self._aimed(feed, staying), row_X, below, layers)
            if layers == self.exits[-1]:
                leaves_XM = ~is_out_XM
            else:
                sure_XM = confidence(
                    self.options.measure,
                    found.logits_BTV,
                    found.taps[layers - 1],
                    found.taps[layers],
                )
                leaves_XM = ~is_out_XM & (sure_XM >= threshold_BM[row_X])
            self._leave(climb, row_X, leaves_XM, found)
            self.taken[layers] += int(leaves_XM.sum())
            is_gone = climb.out_BM[row_X].all(1).tolist()
            gone = [row for row, left in zip(staying, is_gone, strict=True) if left]
            staying = [row for row, left in zip(staying, is_gone, strict=True) if not left]
            if gone:
                self._propagate(self._aimed(feed, gone), climb.state_BMD[gone], layers)
            if not staying:
                break
        if self.options.measure == STATE:
            climb.said = said_by(self.lm, climb.state_BMD)
        assert climb.said.logits_BTV is not None
        self._ready_BMD = climb.said.taps[self.lm.spec.num_layers]
        return climb.said.logits_BTV

    def _aimed(self, feed: Feed, rows: list[int]) -> Feed:
        """The feed of some rows, with the cache aimed at them."""
        if len(rows) == len(feed.ids_BT):
            some = feed
        else:
            windows = {size: mask[rows] for size, mask in feed.masks.windows.items()}
            masks = Masks(feed.masks.full[rows], windows)
            some = Feed(feed.ids_BT[rows], feed.position_BT[rows], masks)
        growth, (_, M) = self.growth, feed.ids_BT.shape
        first, span = growth.num_nodes - M, feed.masks.full.shape[-1]
        slots = tuple(growth.view.slots[row] for row in rows)
        uniform = None if growth.uniform is None else growth.uniform + first
        start_B = growth.kept_B[rows] + first
        self.kv.begin(slots, growth.view.slot_B[rows], start_B, M, span, uniform)
        return some

    def _climb(self, climb: Climb, some: Feed, row_X: Tensor, below: int, layers: int) -> LmOut:
        """Those rows through layers below .. layers - 1, one by one where nodes that have left must
        stay as they are. Returns the states before and behind the last, and what is said there."""
        is_out_XM, last = climb.out_BM[row_X], self.lm.spec.num_layers
        steps = range(below + 1, layers + 1) if bool(is_out_XM.any()) else (layers,)
        found = LmOut(None)
        for step in steps:
            state_XMD = climb.state_BMD[row_X]
            wanted = step == layers and self.options.measure == SOFTMAX
            part = replace(
                some,
                taps=(step - 1, step, last) if wanted else (step - 1, step),
                logits=wanted,
                parts=SubLayers.span(below, step),
                residual_BTD=state_XMD if below else None,
            )
            found, below = self.lm.run(part, self.kv), step
            climb.state_BMD[row_X] = torch.where(
                is_out_XM[..., None], state_XMD, found.taps[step].to(state_XMD.dtype)
            )
        return found

    def _leave(self, climb: Climb, row_X: Tensor, leaves_XM: Tensor, found: LmOut) -> None:
        """Those nodes say what was found."""
        climb.out_BM[row_X] |= leaves_XM
        if self.options.measure == STATE:
            return
        last = self.lm.spec.num_layers
        assert climb.said.logits_BTV is not None
        assert found.logits_BTV is not None
        pairs = (
            (climb.said.logits_BTV, found.logits_BTV),
            (climb.said.taps[last], found.taps[last]),
        )
        for kept_BMX, new_XMX in pairs:
            kept_BMX[row_X] = torch.where(leaves_XM[..., None], new_XMX, kept_BMX[row_X])

    def _propagate(self, some: Feed, state_XMD: Tensor, layers: int) -> None:
        """Keys and values of the layers above an exit, of the state that left there."""
        above = range(layers, self.exits[-1])
        self.lm.write_kv(dict.fromkeys(above, state_XMD), some.position_BT, self.kv)


FAMILY = Family(
    name="calm",
    summary=(
        "No second model: every drafted token runs the target's layers until one is sure of it, by "
        "the margin of its probabilities or by how little the state still changes, and is read out "
        "there. The threshold can be calibrated on texts. For targets that can be read early; the "
        "whole target verifies."
    ),
    paper="https://arxiv.org/abs/2207.07061",
    options=CalmOptions,
    build=Calm,
    trainable=False,
    policies=("chain", "dynamic-tree"),
    borrows_layers=True,
)
