"""EAGLE-3 (arXiv 2503.01840): one layer on the target's own features drafts token by token.

Row t reads (embedding of token t + 1, g_t) and predicts token t + 2, where g_t = fc(three taps of
the target at position t). When drafting, rows past the last true one take the layer's own output
state in place of g; training unrolls exactly that for several steps (training-time test).
`fc_norm` and `norm_output` are the two switches of EAGLE-3.1: a norm on each tap before `fc`, and
feeding back the state after the final norm.
Letters: B rows, S sequence or slots, T tokens, M nodes, W pending rows, D width, E head width,
K draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from specctl.drafters.parts.align import aim, shifted
from specctl.drafters.parts.base import (
    Borrowed,
    Drafter,
    Family,
    Needs,
    Outcome,
    RoundView,
    Space,
    StepState,
)
from specctl.drafters.parts.batch import LossOut, TrainBatch
from specctl.drafters.parts.blocks import (
    LayerShape,
    RmsNorm,
    WideLayer,
    attend,
    attend_chains,
    rotary,
)
from specctl.drafters.parts.growth import Growth, aim_cache
from specctl.drafters.parts.heads import cut_rows, draft_size, head_rows
from specctl.drafters.parts.losses import LossOptions, check_kind, head_loss, weighted_sum
from specctl.drafters.parts.masks import document_mask
from specctl.drafters.parts.slots import SlotKV
from specctl.drafters.parts.spec import ModelSpec
from specctl.drafters.parts.vocab import VocabMap
from specctl.recipes.errors import RecipeError

LM_HEADS = ("init", "frozen", "scratch")


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """Shape and training of an EAGLE-3 drafter. Sizes left None are those of the target.

    `lm_head`: "init" copies the target's rows and trains them, "frozen" copies and keeps them,
    "scratch" starts at random. `loss` is compared with the target's law at `temperature`; step j
    of the `ttt_steps` weighs decay^j. `taps` are hidden_states indices, None chooses three.
    """

    taps: tuple[int, ...] | None = None
    ttt_steps: int = 5
    decay: float = 0.8
    loss: str = "kl"
    temperature: float = 1.0
    lm_head: str = "init"
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.taps is not None:
            object.__setattr__(self, "taps", tuple(int(tap) for tap in self.taps))
        check_kind(self.loss, "drafter.options.loss")
        if self.lm_head not in LM_HEADS:
            raise RecipeError(
                f"unknown lm_head {self.lm_head!r}",
                where="drafter.options.lm_head",
                expected="one of " + ", ".join(LM_HEADS),
                do="write lm_head: init",
            )
        if self.ttt_steps < 1:
            raise RecipeError(
                "training-time test needs at least one step",
                where="drafter.options.ttt_steps",
                found=str(self.ttt_steps),
                expected="1 or more",
                do="write ttt_steps: 5",
            )


def default_taps(num_layers: int) -> tuple[int, ...]:
    """(2, L // 2, L - 3) of the paper; spread over the depth when those are not distinct."""
    paper = (2, num_layers // 2, num_layers - 3)
    if 2 < paper[1] < paper[2]:
        return paper
    spread = {min(1, num_layers - 1), num_layers // 2, num_layers - 1}
    spare = (tap for tap in range(num_layers + 1) if tap not in spread)
    while len(spread) < min(3, num_layers + 1):
        spread.add(next(spare))
    return tuple(sorted(spread))


class Eagle3Net(nn.Module):
    """The trained module; parameter names are those of the public EAGLE-3 format."""

    def __init__(self, shape: LayerShape, options: Eagle3Options, spec: ModelSpec, K: int) -> None:
        super().__init__()
        width, taps = spec.hidden_size, cast(tuple[int, ...], options.taps)
        if options.fc_norm:
            self.fc_norm = nn.ModuleList(RmsNorm(width, spec.norm_eps) for _ in taps)
        self.fc = nn.Linear(len(taps) * width, width, bias=False)
        self.layers = nn.ModuleList([WideLayer(shape, options.qk_norm)])
        self.norm = RmsNorm(width, spec.norm_eps)
        self.lm_head = nn.Linear(width, K, bias=False)
        self.lm_head.weight.requires_grad_(options.lm_head != "frozen")
        self.options, self.shape = options, shape

    @property
    def layer(self) -> WideLayer:
        return cast(WideLayer, self.layers[0])

    def fuse(self, taps: Mapping[int, Tensor]) -> Tensor:
        """[..., D]: g of the target features in `taps`."""
        chosen = [taps[tap].to(self.fc.weight.dtype) for tap in self.options.taps or ()]
        if self.options.fc_norm:
            chosen = [norm(tap) for norm, tap in zip(self.fc_norm, chosen, strict=True)]
        out: Tensor = self.fc(torch.cat(chosen, dim=-1))
        return out

    def turn(self, position: Tensor) -> Tensor:
        return rotary(position, self.shape.head_dim, self.shape.rope_theta)

    def carried(self, out_BTD: Tensor, normed_BTD: Tensor) -> Tensor:
        """The state handed to the next drafting step."""
        return normed_BTD if self.options.norm_output else out_BTD


class Eagle3(Drafter):
    """EAGLE-3 and 3.1."""

    family: ClassVar[str] = "eagle3"
    module: Eagle3Net

    def __init__(
        self, options: Eagle3Options, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        taps = options.taps if options.taps is not None else default_taps(spec.num_layers)
        if not taps or min(taps) < 0 or max(taps) > spec.num_layers:
            raise RecipeError(
                "a tap is not a layer of this target",
                where="drafter.options.taps",
                found=str(taps),
                expected=f"hidden_states indices 0 to {spec.num_layers}",
                do=f"write taps: {list(default_taps(spec.num_layers))}",
            )
        options = replace(options, taps=taps)
        super().__init__(options, spec, vocab)
        shape = LayerShape(
            spec.hidden_size,
            options.heads or spec.num_heads,
            options.kv_heads or (options.heads or spec.num_kv_heads),
            options.head_dim or spec.head_dim,
            options.intermediate or spec.intermediate_size,
            spec.norm_eps,
            spec.rope_theta,
        )
        self.module = Eagle3Net(shape, options, spec, draft_size(vocab, spec.vocab_size))
        self._is_fresh = options.lm_head != "scratch"
        self._embedding_VD: Tensor | None = None
        self._embed_scale = spec.embed_scale

    def needs(self) -> Needs:
        return Needs(self.options.taps, teacher=self.options.loss != "ce", borrow=True)

    def bind(self, borrowed: Borrowed) -> None:
        self._embedding_VD, self._embed_scale = borrowed.embedding_VD, borrowed.embed_scale
        if self._is_fresh:
            with torch.no_grad():
                self.module.lm_head.weight.copy_(head_rows(borrowed, self.vocab))
            self._is_fresh = False

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_tensors(tensors)
        self._is_fresh = False

    def trimmed(self, vocab: VocabMap) -> Eagle3:
        small = Eagle3(self.options, self.spec, vocab)
        weights = dict(self.module.state_dict())
        weights["lm_head.weight"] = cut_rows(weights["lm_head.weight"], self.vocab, vocab)
        small.module.to(weights["lm_head.weight"])
        small.module.load_state_dict(weights)
        small._is_fresh = self._is_fresh
        small._embedding_VD, small._embed_scale = self._embedding_VD, self._embed_scale
        return small

    def open(self, space: Space) -> Eagle3State:
        return Eagle3State(self, space)

    def embed(self, ids: Tensor) -> Tensor:
        assert self._embedding_VD is not None, "bind() the target's embedding first"
        embedding = self._embedding_VD[ids]
        if self._embed_scale != 1.0:
            embedding = embedding * self._embed_scale
        return embedding.to(self.module.fc.weight.dtype)

    def unroll(self, batch: TrainBatch, steps: int) -> list[Tensor]:
        """[B, S, D] per step: the normed states of training-time test, which the LM head reads."""
        net, layer = self.module, self.module.layer
        state_BSD = net.fuse(batch.taps)
        mask_B1SS = document_mask(batch.document_BS)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        normed: list[Tensor] = []
        for step in range(steps):
            turn = net.turn(batch.position_BS + step)
            x = layer.mix(self.embed(shifted(batch.ids_BS, 1 + step)), state_BSD)
            key, value = layer.self_attn.key_value(x, turn)
            keys.append(key)
            values.append(value)
            query = layer.self_attn.query(x, turn)
            out_BSD = layer.finish(state_BSD, attend_chains(query, keys, values, mask_B1SS))
            normed.append(net.norm(out_BSD))
            state_BSD = net.carried(out_BSD, normed[-1])
        return normed

    def loss(self, batch: TrainBatch) -> LossOut:
        """Sum over steps of decay^j times the loss of predicting 2 + j ahead (A1)."""
        how = LossOptions(self.options.loss, self.options.temperature, self.options.chunk)
        parts = []
        for step, normed_BSD in enumerate(self.unroll(batch, self.options.ttt_steps)):
            rows = aim(batch, 2 + step)
            out = head_loss(normed_BSD.flatten(0, 1), self.module.lm_head, rows, self.vocab, how)
            parts.append((self.options.decay**step, out))
        return weighted_sum(parts)


class Eagle3State(StepState):
    """Per slot: keys and values of true rows, and the newest true rows not yet written (pending).

    Drafted rows are written behind the true ones; the next root overwrites them with the features
    of what was accepted. One true row per known token but the first, so rows + pending = kept_len.
    """

    def __init__(self, drafter: Eagle3, space: Space) -> None:
        self.drafter, self.net, self.layer = drafter, drafter.module, drafter.module.layer
        shape, weight = self.net.shape, self.net.fc.weight
        self.kv = SlotKV(
            1,
            space.num_slots,
            shape.num_kv_heads,
            space.max_len + space.max_nodes + 2,
            shape.head_dim,
            weight.dtype,
            weight.device,
        )
        pending = (space.num_slots, space.max_nodes + 2)
        self.pending_token_SW = torch.zeros(pending, dtype=torch.long, device=weight.device)
        self.pending_SWD = torch.zeros(
            *pending, shape.hidden_size, dtype=weight.dtype, device=weight.device
        )
        self.num_pending = [0] * space.num_slots
        self.num_rows = [0] * space.num_slots
        self.turn_P2E = self.net.turn(torch.arange(self.kv.max_len, device=weight.device)).to(
            weight.dtype
        )
        self._growth: Growth | None = None
        self._states: list[Tensor] = []

    # -- rows join ------------------------------------------------------------------------------

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        num_rows = self.num_rows[slot] = len(tokens) - 1
        self.pending_SWD[slot] = 0.0
        self.num_pending[slot] = min(num_rows, 1)
        self.pending_token_SW[slot, 0] = tokens[-1]
        if num_rows == 0:
            return  # no features at all: the first round drafts from a zero row
        state_TD = self.net.fuse(taps)
        self.pending_SWD[slot, 0] = state_TD[-1]
        if num_rows > 1:
            ids_1T = torch.tensor([tokens[1:-1]], device=state_TD.device)
            slot_1 = torch.full((1,), slot, device=state_TD.device)
            self.kv.begin((slot,), slot_1, slot_1 * 0, num_rows - 1, num_rows - 1, 0)
            self._write(ids_1T, state_TD[None, :-1], self.turn_P2E[None, : num_rows - 1])

    def _write(self, ids_BW: Tensor, state_BWD: Tensor, turn_BW2E: Tensor) -> tuple[Tensor, ...]:
        """Write true rows: only keys and values matter. Returns what they read, and the cache."""
        x_BWI = self.layer.mix(self.drafter.embed(ids_BW), state_BWD)
        key, value = self.layer.self_attn.key_value(x_BWI, turn_BW2E)
        return x_BWI, *self.kv.update(0, key, value)

    # -- a round --------------------------------------------------------------------------------

    def root(self, view: RoundView) -> Tensor:
        counts = [max(self.num_pending[slot], 1) for slot in view.slots]
        kept = [max(self.num_rows[slot], 1) for slot in view.slots]
        kept_B = view.kept_len_B.clamp(min=1)
        self._growth = Growth(view, self.kv, kept, kept_B)
        ids_BW, state_BWD, turn_BW2E = self._aim_pending(view, counts, kept, kept_B)
        x_BWI, key, value = self._write(ids_BW, state_BWD, turn_BW2E)
        mask = None
        if self._growth.uniform is None:
            mask = (torch.arange(key.shape[2], device=key.device) < kept_B[:, None])[:, None, None]
        if min(counts) == max(counts):
            last = [x[:, -1:] for x in (x_BWI, state_BWD, turn_BW2E)]
        else:
            at_B = torch.tensor(counts, device=key.device) - 1
            row_B = torch.arange(len(counts), device=key.device)
            last = [x[row_B, at_B][:, None] for x in (x_BWI, state_BWD, turn_BW2E)]
        x_B1I, state_B1D, turn_B12E = last
        query = self.layer.self_attn.query(x_B1I, turn_B12E)
        self._states = []
        return self._step(state_B1D, attend(query, key, value, mask))[:, 0]

    def _aim_pending(
        self, view: RoundView, counts: list[int], kept: list[int], kept_B: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Aim the cache at the pending rows (right-padded) and gather them with their rotations."""
        B, W = len(counts), max(counts)
        before = [k - c for k, c in zip(kept, counts, strict=True)]
        uniform = before[0] if min(before) == max(before) else None
        start_B = (
            kept_B - W if min(counts) == W else kept_B - torch.tensor(counts, device=kept_B.device)
        )
        aim_cache(self.kv, view, start_B, W, max(before) + W, uniform)
        self._fit_turns()
        if uniform is not None:
            turn = self.turn_P2E[None, uniform : uniform + W]
        else:
            turn = self.turn_P2E[start_B[:, None] + torch.arange(W, device=kept_B.device)]
        if view.slots == tuple(range(B)):
            return (
                self.pending_token_SW[:B, :W],
                self.pending_SWD[:B, :W],
                turn.expand(B, -1, 2, -1),
            )
        slot_B = view.slot_B
        chosen = self.pending_token_SW[slot_B, :W], self.pending_SWD[slot_B, :W]
        return *chosen, turn.expand(B, -1, 2, -1)

    def _fit_turns(self) -> None:
        if self.turn_P2E.shape[0] < self.kv.max_len:
            every = torch.arange(self.kv.max_len, device=self.turn_P2E.device)
            self.turn_P2E = self.net.turn(every).to(self.turn_P2E.dtype)

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        assert self._growth is not None, "root() begins a round"
        place = self._growth.place(parent_BM)
        self._fit_turns()
        if place.is_next:
            state_BMD = self._states[-1]
        else:
            at_BM1 = (parent_BM + 1)[:, :, None]
            every_BND = torch.cat(self._states, dim=1)
            state_BMD = every_BND.gather(1, at_BM1.expand(-1, -1, every_BND.shape[-1]))
        turn_BM2E = self.turn_P2E[place.position_BM]
        x_BMI = self.layer.mix(self.drafter.embed(token_BM), state_BMD)
        key, value = self.kv.update(0, *self.layer.self_attn.key_value(x_BMI, turn_BM2E))
        query = self.layer.self_attn.query(x_BMI, turn_BM2E)
        return self._step(state_BMD, attend(query, key, value, place.mask))

    def _step(self, state_BMD: Tensor, attended_BMI: Tensor) -> Tensor:
        out_BMD = self.layer.finish(state_BMD, attended_BMI)
        normed_BMD = self.net.norm(out_BMD)
        self._states.append(self.net.carried(out_BMD, normed_BMD))
        logits: Tensor = self.net.lm_head(normed_BMD)
        return logits

    def observe(self, outcome: Outcome) -> None:
        view = outcome.view
        if self._growth is None:
            self._flush(view)
        self._growth, self._states = None, []
        state_BPD = self.net.fuse(outcome.taps)
        W = max(len(new) for new in outcome.emitted)
        tokens = [[*new, *(0,) * (W - len(new))] for new in outcome.emitted]
        token_BW = torch.tensor(tokens, device=state_BPD.device)
        if view.slots == tuple(range(len(view.slots))):
            at: slice | Tensor = slice(len(view.slots))
        else:
            at = view.slot_B
        self.pending_token_SW[at, :W] = token_BW
        self.pending_SWD[at, :W] = state_BPD[:, :W]
        for slot, new in zip(view.slots, outcome.emitted, strict=True):
            self.num_pending[slot] = len(new)
            self.num_rows[slot] += len(new)

    def _flush(self, view: RoundView) -> None:
        """A round without drafting: what was pending is written now, so that nothing piles up."""
        counts = [max(self.num_pending[slot], 1) for slot in view.slots]
        kept = [max(self.num_rows[slot], 1) for slot in view.slots]
        self._write(*self._aim_pending(view, counts, kept, view.kept_len_B.clamp(min=1)))


def build(options: Eagle3Options, spec: ModelSpec, vocab: VocabMap | None) -> Eagle3:
    return Eagle3(options, spec, vocab)


FAMILY = Family(
    name="eagle3",
    summary=(
        "One transformer layer that reads the target's features at three depths together with the "
        "newest token, and drafts on its own output states. Trained by unrolling its own drafting "
        "(training-time test), with its own LM head over a reduced vocabulary. The strongest "
        "drafter for its size, because the target's features already hold most of the answer; it "
        "must be trained for one target and served by an engine that hands out features."
    ),
    paper="https://arxiv.org/abs/2503.01840",
    options=Eagle3Options,
    build=build,
    trainable=True,
    policies=("chain", "dynamic-tree", "static-tree"),
)
