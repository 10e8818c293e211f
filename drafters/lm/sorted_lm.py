"""One draft model with several exits, for several targets (S2D, sorted fine-tuning).

https://arxiv.org/abs/2407.01955. All exits share the final norm and the LM head, and one forward
trains them all: L = sum over exits n of CE(x_{t+1}, W_U norm(h^n_t)), or a divergence from the
target's distribution. Drafting leaves at the first exit whose largest probability reaches
`threshold`. With loss `ce` it learns from text alone, so one draft serves every target of its
tokenizer.

The depth is cut into parts, one per exit. Every entry of the cache (a known token, or a node of
this round) has a residual below each part it has reached. Part 0 reads everything at once; a deeper
part is first asked when a token is not sure enough, and then reads all entries that it has missed,
from the residuals kept below it. So keys and values of skipped layers are never guessed: what is
filled later is what a full forward would have written.
Letters: B rows, D hidden width, K draft vocabulary, L positions, M new nodes, N nodes, P path, R
flat rows, S sequence, W window, Z slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import Family, Outcome, RoundView, Space, StepState
from specctl.core.errors import RecipeError
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions
from specctl.drafters.losses.align import aim
from specctl.drafters.losses.head_losses import LinearHead, head_loss, teacher_logits, weighted_sum
from specctl.drafters.states.tree_layout import TreeLayout, aim_cache, expansions
from specctl.models.kernels import rms_norm
from specctl.models.llama.fast_llama import FastLlama


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

    family = "sorted"
    splits_rows = False
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
    def head_width(self) -> int | None:
        return None

    @property
    def exits(self) -> tuple[int, ...]:
        exits: tuple[int, ...] = self.options.exits
        return exits

    @property
    def parts(self) -> tuple[range, ...]:
        """The layers between one exit and the next."""
        starts = (0, *self.exits[:-1])
        return tuple(range(a, b) for a, b in zip(starts, self.exits, strict=True))

    def open(self, space: Space) -> ExitState:  # type: ignore[override]
        return ExitState(self, space)

    def loss(self, batch: TrainBatch) -> LossOut:
        """Sum over exits of the loss of predicting 1 ahead (A0); metrics are those of the last
        exit, the others under top1_at_N and alpha_at_N."""
        how = self.options.compared()
        masks = self.lm.document_masks(batch.document_BS)
        taps = self.lm.dense(batch.ids_BS, batch.position_BS, masks, self.exits, logits=False).taps
        rows, teacher, module = (
            aim(batch, 1),
            teacher_logits(batch, how, self.vocab),
            self.lm.module,
        )
        head, outs = LinearHead(module.head_weight), []
        for layer in self.exits:
            state_BSD = taps[layer]
            if layer != module.shape.num_layers:  # the last tap has passed the final norm
                state_BSD = rms_norm(state_BSD, module.model.norm.weight, module.shape.norm_eps)
            outs.append(head_loss(state_BSD.flatten(0, 1), head, rows, self.vocab, how, teacher))
        total = weighted_sum([(1.0, out) for out in outs])
        metrics = dict(outs[-1].metrics)
        for layer, out in zip(self.exits[:-1], outs[:-1], strict=True):
            metrics |= {f"{name}_at_{layer}": pair for name, pair in out.metrics.items()}
        return LossOut(total.sum, total.count, metrics)


CHUNK = 512  # entries fed at once while a single row catches up
LONG = 32  # a row that has missed more entries than this catches up alone


class ExitState(StepState):
    """Per part and slot, the first `filled` entries are true. One writer: the engine's round."""

    def __init__(self, drafter: SortedLm, space: Space) -> None:
        self.lm, self.parts = drafter.lm, drafter.parts
        options: SortedOptions = drafter.options
        self.threshold, self.only = options.threshold, options.only
        max_len = space.max_len + space.max_nodes + 2
        self.kv = self.lm.new_kv(space.num_slots, max_len)
        shape = (space.num_slots, max_len, self.lm.spec.hidden_size)
        device, dtype = self.lm.device, self.lm.dtype
        # Below part 0 lie the embeddings, above the last part what its exit reads.
        self.residual_ZLD = [
            torch.zeros(shape, device=device, dtype=dtype) for _ in range(len(self.parts) + 1)
        ]
        self.filled = [[0] * space.num_slots for _ in self.parts]
        self.num_known = [0] * space.num_slots
        self._growth: TreeLayout | None = None
        self._known: list[int] = []

    @torch.no_grad()
    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        count = self.num_known[slot] = len(tokens) - 1
        for filled in self.filled:
            filled[slot] = 0
        slot_1 = torch.full((1,), slot, device=self.lm.device)
        ids_1W = torch.tensor([list(tokens[:-1])], device=self.lm.device, dtype=torch.long)
        self._read(slot_1, ids_1W, torch.arange(count, device=self.lm.device)[None])
        self._catch_up(0, slot, count)

    @torch.no_grad()
    def root(self, view: RoundView) -> Tensor:
        known = self._known = [len(tokens) for tokens in view.tokens]
        starts = [self.num_known[slot] for slot in view.slots]
        missing = [list(t[at:]) for t, at in zip(view.tokens, starts, strict=True)]
        W = max(map(len, missing))
        device = view.slot_B.device
        ids_BW = torch.tensor([ids + [0] * (W - len(ids)) for ids in missing], device=device)
        entry_BW = torch.tensor(starts, device=device)[:, None] + torch.arange(W, device=device)
        self._reserve(max(starts) + W)
        self._read(view.slot_B, ids_BW, entry_BW)
        for slot, count in zip(view.slots, known, strict=True):
            self.num_known[slot] = count
        self._growth = TreeLayout(view, self.kv, known, view.kept_len_B + 1)
        return self._head_logits(view.kept_len_B[:, None])[:, 0]

    @torch.no_grad()
    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        growth = self._grown()
        first = growth.num_nodes
        growth.place(parent_BM)
        self._reserve(self.kv.max_len)
        at_M = torch.arange(first, growth.num_nodes, device=token_BM.device)
        entry_BM = growth.kept_B[:, None] + at_M
        self._read(growth.view.slot_B, token_BM, entry_BM)
        return self._head_logits(entry_BM)

    def observe(self, outcome: Outcome) -> None:
        growth, view = self._growth, outcome.view
        if growth is None:
            return  # nothing was fed; the next root catches up from the tokens
        self._growth = None
        is_chain = outcome.tree.is_chain and growth.is_chain
        if not is_chain and outcome.path_BP.shape[1] > 2:
            self._keep(view.slot_B, growth.kept_B, expansions(outcome, growth.num_nodes))
        rows = zip(view.slots, self._known, outcome.num_accepted, strict=True)
        for slot, known, accepted in rows:
            stays = min(accepted, growth.num_nodes) if is_chain else max(accepted - 1, 0)
            self.num_known[slot] = known + stays
            for filled in self.filled:
                # A tree's nodes have moved: a part that had read only some of them reads anew.
                is_whole = is_chain or filled[slot] >= known + growth.num_nodes
                filled[slot] = min(filled[slot], known + stays if is_whole else known)

    # -- entries --------------------------------------------------------------------------------

    def _grown(self) -> TreeLayout:
        assert self._growth is not None, "root() begins a round"
        return self._growth

    def _reserve(self, num_entries: int) -> None:
        extra = num_entries - self.residual_ZLD[0].shape[1]
        if extra > 0:
            self.residual_ZLD = [F.pad(store, (0, 0, 0, extra)) for store in self.residual_ZLD]

    def _read(self, slot_B: Tensor, ids_BW: Tensor, entry_BW: Tensor) -> None:
        """Put embeddings of tokens below part 0."""
        embedding = self.lm.module.model.embed_tokens.weight
        self.residual_ZLD[0][slot_B[:, None], entry_BW] = F.embedding(ids_BW, embedding)

    def _keep(self, slot_B: Tensor, kept_B: Tensor, path_BP: Tensor) -> None:
        """Move the accepted path's entries to the front of the round's."""
        self.kv.keep(slot_B, kept_B, path_BP)
        last, slot_B1 = self.residual_ZLD[0].shape[1] - 1, slot_B[:, None]
        to_BP = kept_B[:, None] + torch.arange(path_BP.shape[1], device=path_BP.device)
        from_BP = torch.where(path_BP >= 0, kept_B[:, None] + path_BP, to_BP).clamp(max=last)
        for store in self.residual_ZLD:
            store[slot_B1, to_BP.clamp(max=last)] = store[slot_B1, from_BP]

    # -- parts ----------------------------------------------------------------------------------

    def _head_logits(self, entry_BM: Tensor) -> Tensor:
        """[B, M, K]: logits at those entries, each of the first exit that is sure enough. Whether
        it is follows from its distribution alone, never from a drawn token, so the distribution
        used is the distribution reported."""
        everyone = list(range(len(entry_BM)))
        first = 0 if self.only is None else self.only
        for part in range(first + 1):
            self._fill(part, everyone)
        logits_BMK = self._logits(first, everyone, entry_BM)
        if self.only is not None:
            return logits_BMK
        is_weak_BM = torch.ones_like(entry_BM, dtype=torch.bool)
        for part in range(1, len(self.parts)):
            sure_BM = logits_BMK.float().softmax(-1).amax(-1)
            is_weak_BM = is_weak_BM & (sure_BM < self.threshold)
            rows = [row for row, is_weak in enumerate(is_weak_BM.any(-1).tolist()) if is_weak]
            if not rows:
                break
            self._fill(part, rows)
            deeper_RMK = self._logits(part, rows, entry_BM)
            is_weak_RM1 = is_weak_BM[rows][:, :, None]
            logits_BMK[rows] = torch.where(is_weak_RM1, deeper_RMK, logits_BMK[rows])
        return logits_BMK

    def _logits(self, part: int, rows: list[int], entry_BM: Tensor) -> Tensor:
        slot_R1 = self._grown().view.slot_B[rows][:, None]
        return self.lm.lm_head(self.residual_ZLD[part + 1][slot_R1, entry_BM[rows]])

    def _fill(self, part: int, rows: list[int]) -> None:
        """Let a part read what it has missed of those rows."""
        growth, filled = self._grown(), self.filled[part]
        view = growth.view
        ends = [known + growth.num_nodes for known in self._known]
        for row in rows:
            if ends[row] - filled[view.slots[row]] > LONG:
                self._catch_up(part, view.slots[row], self._known[row])
        W = max(ends[row] - filled[view.slots[row]] for row in rows)
        if W == 0:
            return
        # A row that lacks less than W entries reads some of them twice; none beyond the longest.
        starts = [max(0, end - W) for end in ends]
        device = view.slot_B.device
        start_B = torch.tensor(starts, device=device)
        entry_BW = start_B[:, None] + torch.arange(W, device=device)
        span = max(starts[row] for row in rows) + W
        mask, position_BW = growth.sees(entry_BW, span)[rows], growth.position(entry_BW)
        slots = tuple(view.slots[row] for row in rows)
        part_view = replace(view, slots=slots, slot_B=view.slot_B[rows])
        uniform = starts[rows[0]] if len({starts[row] for row in rows}) == 1 else None
        aim_cache(self.kv, part_view, start_B[rows], W, span, uniform)
        self._pass(part, part_view.slot_B, entry_BW[rows], position_BW[rows], mask)
        for row in rows:
            filled[view.slots[row]] = ends[row]

    def _catch_up(self, part: int, slot: int, until: int) -> None:
        """Let a part read the known tokens of one row before `until`, in chunks."""
        device, filled = self.lm.device, self.filled[part]
        slot_1 = torch.full((1,), slot, device=device)
        while filled[slot] < until:
            first, last = filled[slot], min(filled[slot] + CHUNK, until)
            start_1 = torch.full((1,), first, device=device)
            self.kv.begin((slot,), slot_1, start_1, last - first, last, first)
            entry_1W = torch.arange(first, last, device=device)[None]
            mask = self.lm.chain_masks(start_1, last - first, last).full
            self._pass(part, slot_1, entry_1W, entry_1W, mask)
            filled[slot] = last

    def _pass(
        self, part: int, slot_R: Tensor, entry_RW: Tensor, position_RW: Tensor, mask: Tensor
    ) -> None:
        """From the residual below a part to the one above it, against the aimed cache."""
        last = self.lm.spec.max_positions - 1
        at = (slot_R[:, None], entry_RW)
        self.residual_ZLD[part + 1][at] = self.lm.through(
            self.residual_ZLD[part][at],
            position_RW.clamp(max=last),
            mask,
            self.kv,
            self.parts[part],
        )


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
    build=SortedLm,
    trainable=True,
    policies=("chain", "dynamic-tree", "static-tree"),
)
