"""What models of pictures share that do not write row by row: layers, places in two dimensions,
and the tokens read so far.

A token's place is its row and its column: a half of every head is turned by the one and a half by
the other (rotary positions in two dimensions). The prompt, one token, stands at (0, 0), the patches
from (1, 1) on.
Letters: B rows, D hidden width, E head width, H query heads, L positions, T fed tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.images.grid_shape import GridShape

OWN = "own-target"  # what results say of pictures that follow the model itself
OUTPUTS = (".o_proj", ".down_proj")  # zero at the beginning: a layer begins as an identity


@dataclass(frozen=True, slots=True)
class DrawnGrids:
    """`ids_BL`: the grids' tokens in raster order; `passes` of the model over all rows together,
    that over the prompts included, and the tokens that they read of each row."""

    ids_BL: Tensor
    passes: int
    read: int


@dataclass(slots=True)
class GridCache:
    """Keys and values [B, H, L, E] of the tokens read so far, by layer. One writer: `joined`."""

    pairs: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def joined(self, layer: int, key_BHTE: Tensor, value_BHTE: Tensor) -> tuple[Tensor, Tensor]:
        """Everything read so far, these included, which are kept."""
        if layer in self.pairs:
            key, value = self.pairs[layer]
            key_BHTE = torch.cat([key, key_BHTE], 2)
            value_BHTE = torch.cat([value, value_BHTE], 2)
        self.pairs[layer] = key_BHTE, value_BHTE
        return key_BHTE, value_BHTE


class PlaceRotation(nn.Module):
    """Cosine and sine by which the heads of each place are turned. Place 0 is the prompt, place
    1 + i patch i in raster order."""

    def __init__(self, shape: GridShape) -> None:
        super().__init__()
        quarter = shape.head_dim // 4
        rate = shape.rope_theta ** (-torch.arange(quarter) / quarter)
        side = torch.arange(1, shape.grid + 1)
        row, column = torch.meshgrid(side, side, indexing="ij")
        angle = torch.cat([one.reshape(-1, 1) * rate for one in (row, column)], 1)
        angle = torch.cat([torch.zeros(1, 2 * quarter), angle])
        self.register_buffer("turn_L2E", torch.stack([angle.cos(), angle.sin()], 1), False)

    def of(self, at_BT: Tensor) -> Tensor:
        """[B, 1, T, 2, E / 2] of places [B, T]; B may be 1."""
        table: Tensor = self.get_buffer("turn_L2E")
        return table[at_BT][:, None]


def turned(x_BHTE: Tensor, turn: Tensor) -> Tensor:
    """Heads turned by their places."""
    cos, sin = turn.to(x_BHTE.dtype).unbind(-2)
    first, second = x_BHTE.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def in_heads(x_BTD: Tensor, size: int) -> Tensor:
    """[B, H, T, E]"""
    heads_BTHE: Tensor = x_BTD.view(*x_BTD.shape[:2], -1, size)
    return heads_BTHE.transpose(1, 2)


class GridLayer(nn.Module):
    """A layer with norms before attention and MLP, and no biases. Its tokens attend to each other,
    or, where `is_guided`, to keys and values that they are given."""

    def __init__(self, shape: GridShape, is_guided: bool = False) -> None:
        super().__init__()
        width, inner, eps = shape.hidden_size, shape.intermediate_size, shape.rms_norm_eps
        self.head_dim = shape.head_dim
        self.attention_norm = nn.RMSNorm(width, eps)
        self.q_proj = nn.Linear(width, width, bias=False)
        if not is_guided:
            self.k_proj = nn.Linear(width, width, bias=False)
            self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(
        self,
        x_BTD: Tensor,
        turn: Tensor,
        mask: Tensor | None,
        cache: GridCache | None = None,
        number: int = 0,
    ) -> Tensor:
        """`mask` [T, L]: what each token attends to (None: everything); L counts what the layer of
        that number has in the cache, then the tokens themselves."""
        normed = self.attention_norm(x_BTD)
        key = turned(in_heads(self.k_proj(normed), self.head_dim), turn)
        value = in_heads(self.v_proj(normed), self.head_dim)
        if cache is not None:
            key, value = cache.joined(number, key, value)
        return self.attend(x_BTD, normed, turn, (key, value), mask)

    def guided(
        self, x_BTD: Tensor, turn: Tensor, known: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Tensor:
        """The same, attending to `known` alone."""
        return self.attend(x_BTD, self.attention_norm(x_BTD), turn, known, mask)

    def attend(
        self,
        x_BTD: Tensor,
        normed_BTD: Tensor,
        turn: Tensor,
        known: tuple[Tensor, Tensor],
        mask: Tensor | None,
    ) -> Tensor:
        query = turned(in_heads(self.q_proj(normed_BTD), self.head_dim), turn)
        out = F.scaled_dot_product_attention(query, *known, attn_mask=mask)
        x_BTD = x_BTD + self.o_proj(out.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x_BTD)
        out_BTD: Tensor = self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return x_BTD + out_BTD


class GridNet(nn.Module, ABC):
    """What the training, the folder and the commands need of such a model."""

    def __init__(self, shape: GridShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.turns = PlaceRotation(shape)

    def heads(self) -> list[Tensor]:
        """The matrices from states to codes."""
        named = self.named_parameters()
        return [p for name, p in named if name.endswith("head.weight")]

    def begin(self) -> None:
        """Begin with layers that are identities and heads that prefer nothing."""
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        for name, part in self.named_modules():
            if name.endswith((*OUTPUTS, "head")):
                nn.init.zeros_(part.weight)

    @abstractmethod
    def verification(self, passes: int | None) -> str:
        """What results say of pictures in so many passes."""

    @abstractmethod
    def training_logits(self, rows_BL: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Logits of codes [B, L, K], and the codes [B, L] that they predict, of rows with the
        prompt and the grid's tokens in raster order. `random` draws what the training varies."""

    @abstractmethod
    def draw(
        self, prompts_B: Tensor, seeds: list[int], temperature: float, passes: int | None
    ) -> DrawnGrids:
        """Pictures behind prompts of one token; `passes`: how many the model is to take, None where
        it has its own number or takes one for every patch."""
