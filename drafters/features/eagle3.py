"""EAGLE-3 (arXiv 2503.01840): one layer on the target's own features drafts token by token.

Row t reads (embedding of token t + 1, g_t) and predicts token t + 2, where g_t = fc(three taps of
the target at position t). When drafting, rows past the last true one take the layer's own output
state in place of g; training unrolls exactly that for several steps (training-time test).
`fc_norm` and `norm_output` are the two switches of EAGLE-3.1: a norm on each tap before `fc`, and
feeding back the state after the final norm. Without them the residual stream keeps the scale of the
target's features (ten times that of a normed state in the embedded target), beside which the
layer's own part is small: later tokens of a draft then miss. `norm_before_residual`, speculators'
switch, mends that as well: the residual stream starts at the normed state.
With `window` the layer sees the newest rows only (and the first `sink`), in training as in
drafting, so that a long text needs no more of its attention than a short one (speculators measured
a gain from about 10k tokens on, and a loss below). The cache of a slot is then bounded.

`Eagle3State` serves it with fused weights.
Letters: B rows, D hidden width, E head width, I input width, K draft vocabulary, L positions, M new
nodes, R flat rows, S sequence, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import Family, Needs, Space
from specctl.core.errors import RecipeError
from specctl.core.language_model import Borrowed
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.attention.kept_rows import KeptRows
from specctl.drafters.attention.recompute import is_large, run
from specctl.drafters.attention.seen import AttentionWindow, seen_ahead
from specctl.drafters.losses.align import aim, shifted
from specctl.drafters.losses.head_losses import (
    head_loss,
    teacher_logits,
    weighted_sum,
    with_stretch,
)
from specctl.drafters.nets.axes import checked_axes, rope_ahead
from specctl.drafters.nets.blocks import FeatureNet, LayerShape, attend, attend_chains, rotate
from specctl.drafters.nets.heads import BorrowingDrafter, cut_rows, draft_size, head_rows
from specctl.drafters.nets.options import ADDED, SERVED, DepthOptions
from specctl.drafters.nets.routed import (
    RoutedHead,
    add_router,
    check_routing,
    cut_router,
    read_head,
    served_head,
    with_router,
)
from specctl.drafters.nets.shortlist import ShortlistHead
from specctl.drafters.nets.taps import taps_of
from specctl.drafters.option_checks import Count, CountOrZero, OneOf, Within
from specctl.drafters.states.feature_state import FeatureState
from specctl.drafters.states.tree_layout import Fed, Place
from specctl.models.kernels import Weight, linear, prepared, rms_norm
from specctl.models.native.step import RESIDUAL, Stack
from specctl.models.rope import scaled_frequencies
from specctl.models.weights.copies import Copies

LM_HEADS = ("init", "frozen", "scratch")


@dataclass(frozen=True, slots=True)
class Eagle3Options(DepthOptions):
    """Shape and training of an EAGLE-3 drafter. Sizes left None are those of the target.

    `lm_head`: "init" copies the target's rows and trains them, "frozen" copies and keeps them,
    "scratch" starts at random. `ttt_steps` steps are unrolled. `taps` are hidden_states indices,
    None chooses three. `head_groups` splits the LM head's rows, of which the `head_top` best groups
    are read (CORAL). `rope_theta` is the base of the drafter's own rotary positions, which
    are plain, or with `scaled_rope` scaled as the target's (llama3). A row sees the newest
    `window` rows, itself counted, and the first `sink`; None: all. `mrope`: the axis (0 time, 1
    height, 2 width) of each frequency, by which rows of images are rotated; [] is plain, None the
    target's axes where the data hold images (see nets/axes.py).
    """

    decay: float = 0.8
    taps: tuple[int, ...] | None = None
    ttt_steps: Count = 5
    lm_head: Annotated[str, OneOf(LM_HEADS)] = "init"
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate: int | None = None
    head_groups: int | None = None
    head_top: int = 4
    norm_before_residual: bool = field(default=False, metadata=ADDED)
    rope_theta: Annotated[float, Within(most=1e12)] | None = field(default=None, metadata=ADDED)
    scaled_rope: bool = field(default=False, metadata=ADDED)
    window: Annotated[int, Within(1, 1 << 20)] | None = field(default=None, metadata=SERVED)
    sink: CountOrZero = field(default=0, metadata=SERVED)
    mrope: tuple[int, ...] | None = field(default=None, metadata=ADDED)

    def __post_init__(self) -> None:
        DepthOptions.__post_init__(self)
        check_routing(self.head_groups, self.head_top)
        is_seeing = self.window is None or self.window >= self.ttt_steps
        if not is_seeing or (self.sink and self.window is None):
            raise RecipeError(
                "a window holds every step that is unrolled, and only a window has sinks",
                where="drafter.options.window",
                found=f"window: {self.window}, sink: {self.sink}, ttt_steps: {self.ttt_steps}",
                expected=f"window: {self.ttt_steps} or more, or window: null and sink: 0",
                do="--set drafter.options.window=512",
            )

    @property
    def seen(self) -> AttentionWindow | None:
        """What a row sees of the rows before it; None: all."""
        return None if self.window is None else AttentionWindow(self.window, self.sink)


class Eagle3(BorrowingDrafter):
    """EAGLE-3 and 3.1."""

    family = "eagle3"
    splits_rows = True
    module: FeatureNet

    def __init__(
        self, options: Eagle3Options, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        taps = taps_of(options.taps, spec)
        options = replace(options, taps=taps)
        super().__init__(options, spec, vocab)
        head_dim, theta = options.head_dim or spec.head_dim, options.rope_theta or spec.rope_theta
        shape = LayerShape(
            spec.hidden_size,
            options.heads or spec.num_heads,
            options.kv_heads or (options.heads or spec.num_kv_heads),
            head_dim,
            options.intermediate or spec.intermediate_size,
            spec.norm_eps,
            theta,
            scaled_frequencies(spec, head_dim, theta) if options.scaled_rope else None,
        )
        self.module = FeatureNet(
            shape,
            taps,
            draft_size(vocab, spec.vocab_size),
            fc_norm=options.fc_norm,
            norm_output=options.norm_output,
            qk_norm=options.qk_norm,
            norm_before_residual=options.norm_before_residual,
        )
        self.module.lm_head.weight.requires_grad_(options.lm_head != "frozen")
        rows = draft_size(vocab, spec.vocab_size)
        self.axes = checked_axes(options, head_dim)
        self.router = add_router(
            self.module, spec.hidden_size, rows, options.head_groups, options.head_top
        )

    def needs(self) -> Needs:
        return Needs(self.options.taps, teacher=self.options.loss != "ce", borrow=True)

    def target_rows(self) -> tuple[str, ...]:
        return ("lm_head.weight",) if self.options.lm_head == "frozen" else ()

    def bind(self, borrowed: Borrowed) -> None:
        self.borrowed = borrowed
        if self._is_fresh:
            rows_KD = head_rows(borrowed, self.vocab)
            if self.options.lm_head != "scratch":
                with torch.no_grad():
                    self.module.lm_head.weight.copy_(rows_KD)
            if self.router is not None:
                self.router.arrange(rows_KD)
            self._is_fresh = False

    def trimmed(self, vocab: VocabMap) -> Eagle3:
        weights, options = cut_router(self.module, self.options, self.vocab, vocab)
        small = Eagle3(options, self.spec, vocab)
        weights["lm_head.weight"] = cut_rows(weights["lm_head.weight"], self.vocab, vocab)
        small.module.to(weights["lm_head.weight"])
        small.module.load_state_dict(weights)
        small.borrowed, small._is_fresh = self.borrowed, self._is_fresh
        return small

    def open(self, space: Space) -> Eagle3State:
        return Eagle3State(self, space)

    def slot_bytes(self, space: Space) -> int:
        """A window bounds the rows of a slot, however long texts become."""
        if (window := self.options.seen) is not None:
            most = KeptRows(window, 1, space.max_nodes + 2).most
            space = replace(space, max_len=min(space.max_len, most))
        return super().slot_bytes(space)

    def unroll(self, batch: TrainBatch, steps: int) -> list[Tensor]:
        """[B, S, D] per step: the normed states of training-time test, which the LM head reads."""
        net, layer, shape = self.module, self.module.layer, self.module.shape
        seen, own = seen_ahead(batch, self.options.seen, steps), batch.own
        width, inner = shape.hidden_size, shape.intermediate_size
        again = is_large(own(batch.ids_BS).numel(), steps, width, inner)

        def one(step: int, state_BSD: Tensor, *before: Tensor) -> tuple[Tensor, ...]:
            """State, what the LM head reads of it, key and value; `before`: those of the steps."""
            rope = rope_ahead(batch, step, net.rope, self.axes)
            x = layer.mix(self.embed(own(shifted(batch.ids_BS, 1 + step))), state_BSD)
            key, value = layer.self_attn.key_value(x, rope)
            if step == 0:  # later steps have entries of their own
                key, value = seen[0].gathered(key), seen[0].gathered(value)
            query = layer.self_attn.query(x, rope)
            keys, values = [*before[::2], key], [*before[1::2], value]
            out_BSD = layer.finish(state_BSD, attend_chains(query, keys, values, seen[step]))
            normed_BSD = net.norm(out_BSD)
            return normed_BSD if net.norm_output else out_BSD, normed_BSD, key, value

        state_BSD = net.fc(net.gathered(batch.own_taps()))
        pairs, normed = list[Tensor](), list[Tensor]()
        for step in range(steps):
            state_BSD, normed_BSD, *pair = run(again, one, step, state_BSD, *pairs)
            pairs += pair
            normed.append(normed_BSD)
        return normed

    def loss(self, batch: TrainBatch) -> LossOut:
        """Sum over steps of decay^j times the loss of predicting 2 + j ahead (A1)."""
        how = self.options.compared()
        teacher, head, parts = teacher_logits(batch, how, self.vocab), self.module.lm_head, []
        steps = self.unroll(batch, self.options.ttt_steps)
        for step, normed_BSD in enumerate(steps):
            rows = aim(batch, 2 + step)
            state_RD = normed_BSD.flatten(0, 1)
            out = head_loss(state_RD, head, rows, self.vocab, how, teacher)
            out = with_router(out, self.router, state_RD, rows, self.vocab, teacher)
            parts.append((self.options.decay**step, out))
        return with_stretch(weighted_sum(parts), steps)


@dataclass(frozen=True, slots=True)
class FusedWeights:
    """Inference copies: projections joined, the two input norms folded into the first one."""

    fc: Weight
    qkv: Weight
    output: Weight
    gate_up: Weight
    down: Weight

    @classmethod
    def of(cls, net: FeatureNet) -> FusedWeights:
        layer, attention = net.layer, net.layer.self_attn
        scale_I = torch.cat([layer.input_layernorm.weight, layer.hidden_norm.weight]).detach()
        parts = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        return cls(
            prepared(net.fc.weight),
            prepared(torch.cat([part.detach() for part in parts]) * scale_I),
            prepared(attention.o_proj.weight),
            prepared(torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]).detach()),
            prepared(layer.mlp.down_proj.weight),
        )


FUSED: Copies[FeatureNet, FusedWeights] = Copies(FusedWeights.of)


class Eagle3State(FeatureState):
    """Memory of one engine."""

    def __init__(self, drafter: Eagle3, space: Space) -> None:
        self.net, self.embed, self.borrowed = drafter.module, drafter.embed, drafter.borrowed
        self._options = drafter.options
        super().__init__(drafter, self.net.shape, 1, space, drafter.options.seen)

    def fuse_weights(self) -> None:
        self._fused = FUSED.of(self.net)
        self._head = served_head(self.net.lm_head.weight, self._options, self.net.router)

    @property
    def is_recordable(self) -> bool:
        return not isinstance(self._head, RoutedHead) and self._kept is None

    def features(self, taps: Mapping[int, Tensor]) -> Tensor:
        return linear(self.net.gathered(taps), self._fused.fc)

    def fill(self, fed: Fed) -> None:
        self._project(fed.ids_BT, fed.state_BTD, fed.rope_BT2E)

    def stack(self) -> Stack | None:
        net, borrowed = self.net, self.borrowed
        if borrowed is None or borrowed.embed_scale != 1.0:
            return None
        return self.stack_of(
            [net.layer],
            net.lm_head.weight,
            borrowed.embedding_VD,
            net.norm.weight,
            entry_norm=net.layer.input_layernorm.weight,
            is_residual_normed=net.layer.norm_before_residual,
        )

    def _compiled(self, ids_BT: Tensor, state_BTD: Tensor, at: Fed | Place) -> Tensor | None:
        """Logits by the compiled step, the states remembered; None where PyTorch does it."""
        is_plain = not isinstance(self._head, RoutedHead | ShortlistHead)
        fed_back = 1 if self.net.norm_output else RESIDUAL
        taps = (fed_back,) if is_plain else (1, fed_back)
        out = self.compiled(ids_BT, state_BTD, at, tuple(set(taps)), logits=is_plain)
        if out is None:
            return None
        state, normed = out.taps[fed_back], out.taps.get(1)
        if isinstance(at, Fed):
            state = at.newest(state)
            normed = None if normed is None else at.newest(normed)
        self._states.append(state)
        if out.logits_BTV is not None:
            return out.logits_BTV
        assert normed is not None
        return read_head(normed, self._head)

    def newest(self, fed: Fed, kept_B: Tensor) -> Tensor:
        if (found := self._compiled(fed.ids_BT, fed.state_BTD, fed)) is not None:
            return found
        query, key, value = self._project(fed.ids_BT, fed.state_BTD, fed.rope_BT2E)
        assert self._growth is not None
        mask, span = None, key.shape[2]
        if self._kept is not None and span > self._kept.window.size:
            mask = self._kept.chain(kept_B - 1, 1, span)
        elif self._growth.uniform != span:  # behind the newest row stands another, or padding
            at_L = torch.arange(span, device=self.device)
            mask = (at_L < kept_B[:, None])[:, None, None]
        query = fed.newest(query.transpose(1, 2)).transpose(1, 2)
        state_B1D = fed.newest(fed.state_BTD)
        return self._finish(state_B1D, attend(query, key, value, mask))

    def nodes(self, token_BM: Tensor, parent_BM: Tensor, place: Place) -> Tensor:
        state_BMD = self.of_parents(self._states, parent_BM, place)
        if (found := self._compiled(token_BM, state_BMD, place)) is not None:
            return found
        rope_BM2E = self._rope_L2E[place.position_BM]
        query, key, value = self._project(token_BM, state_BMD, rope_BM2E)
        return self._finish(state_BMD, attend(query, key, value, place.mask))

    def _project(
        self, ids_BT: Tensor, state_BTD: Tensor, rope_BT2E: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the fed tokens; keys and values as attention sees them after the write."""
        shape, attention = self.net.shape, self.net.layer.self_attn
        B, T = ids_BT.shape
        H, K, D = shape.num_heads, shape.num_kv_heads, shape.hidden_size
        both_BT2D = torch.stack([self.embed(ids_BT), state_BTD], dim=2)
        x_BTI = rms_norm(both_BT2D, None, shape.norm_eps).view(B, T, 2 * D)
        heads = linear(x_BTI, self._fused.qkv).view(B, T, H + 2 * K, shape.head_dim)
        heads = heads.transpose(1, 2)
        if attention.has_qk_norm:
            query = rotate(attention.q_norm(heads[:, :H]), rope_BT2E)
            key = rotate(attention.k_norm(heads[:, H : H + K]), rope_BT2E)
        else:
            rotated = rotate(heads[:, : H + K], rope_BT2E)
            query, key = rotated[:, :H], rotated[:, H:]
        return query, *self.kv.update(0, key, heads[:, H + K :])

    def _finish(self, state_BMD: Tensor, attended_BMI: Tensor) -> Tensor:
        """The rest of the layer, its state remembered; logits."""
        layer, shape, fused = self.net.layer, self.net.shape, self._fused
        if layer.norm_before_residual:
            state_BMD = rms_norm(state_BMD, layer.hidden_norm.weight, shape.norm_eps)
        h = state_BMD + linear(attended_BMI, fused.output)
        flat = rms_norm(h, layer.post_attention_layernorm.weight, shape.norm_eps)
        gate, up = linear(flat, fused.gate_up).chunk(2, dim=-1)
        out = h + linear(F.silu(gate) * up, fused.down)
        normed = rms_norm(out, self.net.norm.weight, shape.norm_eps)
        self._states.append(normed if self.net.norm_output else out)
        return read_head(normed, self._head)


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
    build=Eagle3,
    trainable=True,
    policies=("chain", "dynamic-tree", "static-tree"),
)
