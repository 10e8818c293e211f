"""One draft model with several exits, for several targets (S2D, sorted fine-tuning).

https://arxiv.org/abs/2407.01955. All exits share the final norm and the LM head, and one forward
trains them all: L = sum over exits n of CE(x_{t+1}, W_U norm(h^n_t)), or a divergence from the
target's distribution. Drafting leaves at the first exit whose largest probability reaches
`threshold`. With loss `ce` it learns from text alone, so one draft serves every target of its
tokenizer. Letters: B rows, S sequence, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import Family, Space
from specctl.core.errors import RecipeError
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.losses.align import aim
from specctl.drafters.losses.head_losses import LinearHead, head_loss, judge_of, weighted_sum
from specctl.drafters.small_lm import SmallLm, SmallLmOptions
from specctl.drafters.states.exit_state import ExitState
from specctl.models.fast_llama import FastLlama
from specctl.models.kernels import rms_norm


@dataclass(frozen=True, slots=True)
class SortedOptions(SmallLmOptions):
    """Those of small-lm (None for the depth: three eighths of the target's) and: `exits`, layers
    after which a token may leave, the last being the depth (None: half, three quarters, all);
    `threshold`, the probability that lets it leave; `only`, an exit by number that every token
    takes, for comparison with a fixed depth."""

    loss: str = "ce"
    exits: tuple[int, ...] | None = None
    threshold: float = 0.6
    only: int | None = None

    def __post_init__(self) -> None:
        SmallLmOptions.__post_init__(self)
        if self.exits is not None:
            object.__setattr__(self, "exits", tuple(int(layer) for layer in self.exits))
        if not 0.0 <= self.threshold <= 1.0:
            raise RecipeError(
                "the threshold is no probability",
                where="drafter.options.threshold",
                found=str(self.threshold),
                expected="0 (always the first exit) to 1 (always the last)",
                do="write threshold: 0.6",
            )


def default_exits(depth: int) -> tuple[int, ...]:
    """6, 9 and 12 of 12 layers; fewer where those are not distinct."""
    return tuple(sorted({max(1, depth // 2), max(1, 3 * depth // 4), depth}))


def resolved(options: SortedOptions, spec: ModelSpec) -> SortedOptions:
    """The options with depth and exits written out, checked against each other."""
    layers = options.layers or len(options.from_layers or ()) or max(2, 3 * spec.num_layers // 8)
    exits = options.exits or default_exits(layers)
    is_sorted = list(exits) == sorted({*exits}) and exits[0] >= 1 and exits[-1] == layers
    if not is_sorted or (options.only is not None and not 0 <= options.only < len(exits)):
        raise RecipeError(
            "the exits do not fit the depth of the draft",
            where="drafter.options.exits",
            found=f"exits {list(exits)}, only {options.only}, {layers} layers",
            expected="ascending layer counts that end with the depth, and only an exit's number",
            do=f"write exits: {list(default_exits(layers))}",
        )
    if options.head_groups is not None:
        raise RecipeError(
            "sorted drafts have no routed LM head: all exits read the whole one",
            where="drafter.options.head_groups",
            found=str(options.head_groups),
            expected="null",
            do="leave head_groups out, or set drafter.family=small-lm",
        )
    return replace(options, layers=layers, exits=exits)


class SortedLm(SmallLm):
    """A small-lm whose shallower depths are drafters of their own."""

    family: ClassVar[str] = "sorted"
    lm: FastLlama

    def __init__(
        self,
        options: SortedOptions,
        spec: ModelSpec,
        vocab: VocabMap | None = None,
        lm: FastLlama | None = None,
    ) -> None:
        super().__init__(resolved(options, spec), spec, vocab, lm)

    @property
    def exits(self) -> tuple[int, ...]:
        exits: tuple[int, ...] = self.options.exits
        return exits

    @property
    def parts(self) -> tuple[range, ...]:
        """The layers between one exit and the next."""
        starts = (0, *self.exits[:-1])
        return tuple(range(a, b) for a, b in zip(starts, self.exits, strict=True))

    @property
    def threshold(self) -> float:
        return float(self.options.threshold)

    @property
    def only(self) -> int | None:
        only: int | None = self.options.only
        return only

    def open(self, space: Space) -> ExitState:  # type: ignore[override]
        return ExitState(self, space)

    def trimmed(self, vocab: VocabMap) -> SortedLm:
        small = super().trimmed(vocab)
        assert isinstance(small.lm, FastLlama)
        return SortedLm(small.options, self.spec, vocab, small.lm)

    def loss(self, batch: TrainBatch) -> LossOut:
        """Sum over exits of the loss of predicting 1 ahead (A0); metrics are those of the last
        exit, the others under top1_at_N and alpha_at_N."""
        how = self.options.compared()
        masks = self.lm.document_masks(batch.document_BS)
        taps = self.lm.dense(batch.ids_BS, batch.position_BS, masks, self.exits, logits=False).taps
        rows, judge, module = aim(batch, 1), judge_of(batch, how), self.lm.module
        head, outs = LinearHead(module.head_weight), []
        for layer in self.exits:
            state_BSD = taps[layer]
            if layer != module.shape.num_layers:  # the last tap has passed the final norm
                state_BSD = rms_norm(state_BSD, module.model.norm.weight, module.shape.norm_eps)
            outs.append(head_loss(state_BSD.flatten(0, 1), head, rows, self.vocab, how, judge))
        total = weighted_sum([(1.0, out) for out in outs])
        metrics = dict(outs[-1].metrics)
        for layer, out in zip(self.exits[:-1], outs[:-1], strict=True):
            metrics |= {f"{name}_at_{layer}": pair for name, pair in out.metrics.items()}
        return LossOut(total.sum, total.count, metrics)


def build(options: SortedOptions, spec: ModelSpec, vocab: VocabMap | None) -> SortedLm:
    return SortedLm(options, spec, vocab)


FAMILY = Family(
    name="sorted",
    summary=(
        "A small language model that may stop early: its shallower depths are trained as drafters "
        "of their own, with one norm and one LM head for all. Easy tokens leave at the first exit, "
        "hard ones go deeper, and the layers they skip are filled in when a later token needs "
        "them. Trained on text alone it serves every target of its tokenizer."
    ),
    paper="https://arxiv.org/abs/2407.01955",
    options=SortedOptions,
    build=build,
    trainable=True,
    policies=("chain", "dynamic-tree", "static-tree"),
)
