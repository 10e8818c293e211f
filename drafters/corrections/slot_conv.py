"""SlotConv: a short convolution over the slots of a block, with taps made of its input (DFlash2).

In front of a sublayer (side 0) and behind it (side 1) every row becomes a weighed sum of itself and
the rows just before it in its block,

    out[i, c] = sum_t (base[side, t, c] + d[side, t, i, c // g]) x[i - t, c],    d = P x

with one deviation d for g channels, made of the sublayer's normed input on both sides; what lies
before the block is zero. P and all of `base` but its first tap begin at zero and the first tap at
one: a fresh convolution changes nothing.
Letters: B rows, D hidden width, E head width, G groups, M new nodes, P path, T fed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specctl.core.errors import RecipeError
from specctl.drafters.nets.block_net import BlockNet
from specctl.drafters.nets.blocks import Attending, DecoderLayer

SIDES = 2


def convolve(net: BlockNet, num_taps: int, group: int, num_slots: int) -> None:
    """Put convolutions of so many taps (0: none) into the layers of a block's net."""
    width = net.shape.hidden_size
    if num_taps and width % group:
        raise RecipeError(
            "groups of channels do not fill the drafter's width",
            where="drafter.options.conv_group",
            found=f"{group} of {width}",
            expected=f"a divisor of {width}",
            do="write conv_group: 1, or another divisor",
        )
    for index, layer in enumerate(net.layers if num_taps else ()):
        assert isinstance(layer, DecoderLayer)
        net.layers[index] = ConvolvedLayer(layer, num_taps, group, num_slots)


class SlotConv(nn.Module):
    """The convolution around one sublayer."""

    def __init__(self, width: int, num_taps: int, group: int, num_slots: int) -> None:
        super().__init__()
        assert width % group == 0, (width, group)
        self.num_taps, self.group, self.num_slots = num_taps, group, num_slots
        base = torch.zeros(SIDES, num_taps, width)
        base[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(width, SIDES * num_taps * width // group, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def kernel(self, normed_BMD: Tensor) -> Tensor:
        """[2, taps, B, M, D / g]: the deviations, of both sides."""
        made = torch.unflatten(self.kernel_projection(normed_BMD), -1, (SIDES, self.num_taps, -1))
        return made.movedim((-3, -2), (0, 1))

    def forward(self, x_BMD: Tensor, kernel: Tensor, side: int) -> Tensor:
        """[B, M, D]; the rows of a block stand one after the other, block by block."""
        slot_M1 = torch.arange(x_BMD.shape[1], device=x_BMD.device)[:, None] % self.num_slots
        out_BMD = torch.zeros_like(x_BMD)
        for tap in range(min(self.num_taps, self.num_slots)):
            before_BMD = x_BMD.roll(tap, dims=1) * (slot_M1 >= tap)
            change_BMG = kernel[side, tap]
            weight_BMD = self.base_kernel[side, tap] + change_BMG.repeat_interleave(self.group, -1)
            out_BMD = out_BMD + weight_BMD.to(x_BMD) * before_BMD
        return out_BMD


class ConvolvedLayer(DecoderLayer):
    """A layer of blocks with the convolution around its attention and around its MLP."""

    def __init__(self, plain: DecoderLayer, num_taps: int, group: int, num_slots: int) -> None:
        nn.Module.__init__(self)  # the parts are those of the plain layer
        self.input_layernorm, self.self_attn = plain.input_layernorm, plain.self_attn
        self.post_attention_layernorm, self.mlp = plain.post_attention_layernorm, plain.mlp
        width = plain.self_attn.shape.hidden_size
        self.attention_conv = SlotConv(width, num_taps, group, num_slots)
        self.mlp_conv = SlotConv(width, num_taps, group, num_slots)

    def forward(self, x_BTD: Tensor, rope_BT2E: Tensor, attending: Attending) -> Tensor:
        attention, normed = self.self_attn, self.input_layernorm(x_BTD)
        kernel = self.attention_conv.kernel(normed)
        mixed = self.attention_conv(normed, kernel, 0)
        key, value = attention.key_value(mixed, rope_BT2E)
        attended = attention.o_proj(attending(attention.query(mixed, rope_BT2E), key, value))
        return self.finish(x_BTD + self.attention_conv(attended, kernel, 1))

    def finish(self, h_BTD: Tensor) -> Tensor:
        normed = self.post_attention_layernorm(h_BTD)
        kernel = self.mlp_conv.kernel(normed)
        out = self.mlp(self.mlp_conv(normed, kernel, 0))
        out_BTD: Tensor = h_BTD + self.mlp_conv(out, kernel, 1)
        return out_BTD
