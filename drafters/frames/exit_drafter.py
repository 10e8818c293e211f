"""ExitDrafter: the target's lower layers, then a small trained module, then the target's LM head.

What is made of the residual behind layer E of a token predicts what the target predicts at that
token, the same position (A0). The target is frozen; the lower layers are run by the drafter itself
for drafted tokens, and known tokens bring their residual with them, so that nothing is computed
twice for the text.

Behind a `LayerExit` stand one layer of the drafter's own and a norm: q_t = softmax(W
norm(layer(h^E_<=t))) against p_t. The layer's own keys and values of the last drafted token are
those of its residual, too, which the target's reading brings even where all of a draft was
accepted.
Letters: B rows, D hidden width, E head width, J key/value heads, K draft vocabulary, L positions, M
new nodes, R flat rows, S sequence, T fed tokens, W window, Z slots.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import Needs, Space
from specctl.core.forward.masks import document_mask
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Feed
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.frames.self_drafter import check_layer
from specctl.drafters.frames.shared_head import SharedHeadDrafter
from specctl.drafters.losses.align import AlignedRows, aim
from specctl.drafters.losses.head_losses import LinearHead, head_loss
from specctl.drafters.nets.blocks import DecoderLayer, LayerShape, RmsNorm, attending
from specctl.drafters.nets.options import CompareOptions
from specctl.drafters.nets.routed import ServedHead, read_head, served_head
from specctl.drafters.states.borrowed_state import BorrowedState
from specctl.models.weights.copies import num_writes


@dataclass(frozen=True, slots=True)
class ExitOptions(CompareOptions):
    """`layers`: how many of the target's layers a token goes through before the module; None is
    what the family takes."""

    layers: int | None = None


class ExitNet(nn.Module):
    """The norm in front of the LM head. Fresh, a module passes the residual on."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.norm = RmsNorm(shape.hidden_size, shape.norm_eps)


class LayerNet(ExitNet):
    """A layer in front of it."""

    def __init__(self, layer: DecoderLayer, shape: LayerShape) -> None:
        super().__init__(shape)
        self.layer = layer


class ExitDrafter(SharedHeadDrafter):
    """The loss. A family gives its module and how deep it leaves."""

    module: ExitNet
    options: ExitOptions
    shares_kv = True

    def __init__(
        self, options: ExitOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        super().__init__(options, spec, vocab)
        layers = self.usual_layers(spec) if options.layers is None else options.layers
        self.parts = SubLayers.span(0, check_layer("layers", layers, spec.num_layers))
        self.shape = LayerShape.of(spec)
        self.module = self.make_net(self.shape)

    @abstractmethod
    def make_net(self, shape: LayerShape) -> ExitNet:
        """Its module."""

    @abstractmethod
    def usual_layers(self, spec: ModelSpec) -> int:
        """Where a token leaves unless the options say otherwise."""

    @abstractmethod
    def ready(self, batch: TrainBatch) -> Tensor:
        """[B, S, D]: what the LM head reads at every token of a text."""

    @property
    def exit(self) -> int:
        """The tap that the module reads."""
        return len(self.parts.attention)

    @property
    def attention(self) -> tuple[int, ...]:
        return self.parts.attention

    @property
    def dtype(self) -> torch.dtype:
        return self.module.norm.weight.dtype

    def needs(self) -> Needs:
        taps = (*self.attention, self.exit)
        teacher = self.options.loss != "ce"
        return Needs(taps, teacher=teacher, teacher_rows=True, borrow=True, copied=self.copied)

    def head_weight(self) -> Tensor:
        """[K, D]: in the module's precision."""
        return super().head_weight().to(self.dtype)

    def version(self) -> int:
        """Changes whenever a weight does."""
        return num_writes(self.module)

    def loss(self, batch: TrainBatch) -> LossOut:
        """Loss of predicting 1 ahead (A0) from the residual at the exit."""
        return self.compared(self.ready(batch).flatten(0, 1), aim(batch, 1))

    def compared(self, ready_RD: Tensor, rows: AlignedRows) -> LossOut:
        """What the LM head says of them, compared with the target."""
        head = LinearHead(self.head_weight())
        return head_loss(ready_RD, head, rows, self.vocab, self.options.compared())


class LayerExit(ExitDrafter):
    """A layer behind the exit, which a family gives."""

    module: LayerNet

    @abstractmethod
    def make_layer(self, shape: LayerShape) -> DecoderLayer:
        """The drafter's own layer."""

    def make_net(self, shape: LayerShape) -> LayerNet:
        return LayerNet(self.make_layer(shape), shape)

    def ready(self, batch: TrainBatch) -> Tensor:
        state_BSD = batch.taps[self.exit].to(self.dtype)
        look = attending(document_mask(batch.document_BS))
        out_BSD = self.module.layer(state_BSD, self.shape.rope(batch.position_BS), look)
        ready_BSD: Tensor = self.module.norm(out_BSD)
        return ready_BSD

    def open(self, space: Space) -> ExitAdapterState:
        return ExitAdapterState(self, space)


class LowerLayersState(BorrowedState):
    """The lower layers' cache, and the LM head as serving reads it."""

    def __init__(self, drafter: ExitDrafter, space: Space) -> None:
        super().__init__(drafter.lm, drafter.attention, space, exit_layer=drafter.exit)
        self._exit = drafter
        self._version, self._head = drafter.version(), self._packed()

    def _packed(self) -> ServedHead:
        return served_head(self._exit.head_weight(), self._exit.options)

    def parts_of(self, slot: int, first: int) -> SubLayers:
        return self._exit.parts

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        if self._version != self._exit.version():
            self._version, self._head = self._exit.version(), self._packed()
        super().start(slot, tokens, taps)


class ExitAdapterState(LowerLayersState):
    """Beside it a cache for the layer, in the module's precision."""

    def __init__(self, drafter: LayerExit, space: Space) -> None:
        super().__init__(drafter, space)
        self.drafter, shape = drafter, drafter.shape
        slots, device = space.num_slots, space.device
        self.own = SlotKV.of([shape.kv], slots, self.max_len, drafter.dtype, device)

    def _beside(self, num_fed: int) -> SlotKV:
        """The module's cache, aimed as the lower layers' is."""
        self.own.reserve(self.kv.max_len)
        aim = self.kv.aim
        at_M = torch.arange(num_fed, device=aim.start_B1.device)
        return self.own.aimed(aim, aim.start_B1 + at_M)

    def _write(
        self,
        slots: tuple[int, ...],
        slot_B: Tensor,
        start_B: Tensor,
        starts: Sequence[int],
        taps: Mapping[int, Tensor],
        W: int,
    ) -> None:
        super()._write(slots, slot_B, start_B, starts, taps, W)
        layer = self.drafter.module.layer
        state_BWD = taps[self.drafter.exit].to(self.drafter.dtype)
        position_BW = start_B[:, None] + torch.arange(W, device=slot_B.device)
        rope = self.drafter.shape.rope(position_BW)
        key, value = layer.self_attn.key_value(layer.input_layernorm(state_BWD), rope)
        self._beside(W).update(0, key, value)

    def read(self, feed: Feed, rows: Sequence[int]) -> Tensor:
        drafter, exit_at = self.drafter, self.drafter.exit
        out = self.lm.run(replace(feed, taps=(exit_at,), logits=False), self.kv)
        self._left(out.taps[exit_at])
        state_BMD = out.taps[exit_at].to(drafter.dtype)
        look = attending(feed.masks.full, self._beside(feed.ids_BT.shape[1]), 0)
        rope = drafter.shape.rope(feed.position_BT)
        self._ready_BMD = drafter.module.norm(drafter.module.layer(state_BMD, rope, look))
        return read_head(self._ready_BMD, self._head)
