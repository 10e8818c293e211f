"""Neighbouring autoregressive modelling (NAR, arXiv 2503.10696): a picture grows from its corner.

A token predicts the token to its right and the token below it, by two heads (as in the published
code: the head for the row reads the last layer, the head for the column one layer more). Tokens are
decoded in the order of their Manhattan distance from the first: those of one distance, an
anti-diagonal, in one pass. Where a token has two such neighbours, the mean of their logits is its
prediction; the first token has that of both heads behind the prompt. So a grid of R rows and W
columns takes R + W - 1 passes. A token attends to the prompt and to all tokens that are as near to
the corner as itself or nearer.

It is a target of its own, which is trained so, and no way to decode a target of rows: the tokens of
a pass are drawn without each other, so that the model *is* the product of these distributions, and
what is written follows it exactly.
Letters: B rows, D hidden width, K draft vocabulary (the codes), L positions, T fed tokens.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from specctl.core.errors import RecipeError
from specctl.images.grid_net import OWN, DrawnGrids, GridCache, GridLayer, GridNet
from specctl.images.grid_shape import GridShape
from specctl.runtime.sampling.noise import RoundNoise


class Neighbours(GridNet):
    """The layers, one layer more before the lower head, and both heads."""

    def __init__(self, shape: GridShape) -> None:
        super().__init__(shape)
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.layers = nn.ModuleList(GridLayer(shape) for _ in range(shape.num_hidden_layers))
        self.below = GridLayer(shape)
        self.right_norm, self.below_norm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.right_head = nn.Linear(width, shape.codes, bias=False)
        self.below_head = nn.Linear(width, shape.codes, bias=False)

    def verification(self, passes: int | None) -> str:
        """What is written follows the model. Raises RecipeError where a number is given."""
        own = 2 * self.shape.grid - 1
        if passes is not None:
            raise RecipeError(
                "a model of neighbours has its own number of passes",
                where="picture.passes",
                found=str(passes),
                expected=f"none: it takes {own}, one for every anti-diagonal",
                do="leave it out",
            )
        return f"{OWN}:{self.shape.model_type}"

    @cached_property
    def distance_L(self) -> Tensor:
        """[1 + places]: how far each place is from the corner; the prompt is -1."""
        place = torch.arange(self.shape.places)
        far = place // self.shape.grid + place % self.shape.grid
        return torch.cat([torch.tensor([-1]), far])

    def forward(
        self, ids_BT: Tensor, at_T: Tensor, mask: Tensor | None, cache: GridCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, T, K] of the right and of the lower neighbour of tokens at places [T], of
        which 0 is the prompt."""
        x_BTD, turn = self.embed_tokens(ids_BT), self.turns.of(at_T[None])
        for number, layer in enumerate(self.layers):
            x_BTD = layer(x_BTD, turn, mask, cache, number)
        right = self.right_head(self.right_norm(x_BTD))
        x_BTD = self.below(x_BTD, turn, mask, cache, len(self.layers))
        return right, self.below_head(self.below_norm(x_BTD))

    def mixed(self, right_BLK: Tensor, below_BLK: Tensor, place_T: Tensor) -> Tensor:
        """The predictions [B, T, K] of patches, by the heads of all places [B, 1 + places, K]."""
        side = self.shape.grid
        row, column = place_T // side, place_T % side
        left = torch.where(column > 0, place_T, 0)  # patch i stands at place 1 + i
        above = torch.where(row > 0, place_T + 1 - side, 0)
        has_left = ((column > 0) | (place_T == 0)).float()[:, None]
        has_above = ((row > 0) | (place_T == 0)).float()[:, None]
        total = right_BLK[:, left] * has_left + below_BLK[:, above] * has_above
        return total / (has_left + has_above)

    def training_logits(self, rows_BL: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """All predictions of whole pictures; nothing is drawn."""
        far_L = self.distance_L
        at_L = torch.arange(len(far_L))
        right, below = self(rows_BL, at_L, far_L <= far_L[:, None])
        place_L = torch.arange(self.shape.places)
        return self.mixed(right, below, place_L), rows_BL[:, 1:] - self.shape.first_code

    @torch.inference_mode()
    def draw(
        self, prompts_B: Tensor, seeds: list[int], temperature: float, passes: int | None = None
    ) -> DrawnGrids:
        """Pictures, one anti-diagonal a pass. The noise of a token depends on its seed and place
        alone."""
        self.verification(passes)  # a number is refused
        shape, count = self.shape, len(prompts_B)
        noise = RoundNoise(seeds, [0] * count, [0] * count, prompts_B.device)
        cache, read = GridCache(), 0
        ids_BL = torch.zeros(count, 1 + shape.places, dtype=torch.long)
        ids_BL[:, 0] = prompts_B
        kind = self.right_head.weight.dtype
        right_BLK = torch.zeros(count, 1 + shape.places, shape.codes, dtype=kind)
        below_BLK = torch.zeros_like(right_BLK)
        passes = 2 * shape.grid - 1
        for far in range(passes):
            at_T = (self.distance_L == far - 1).nonzero()[:, 0]
            # what is cached is nearer to the corner, what is read with it as near: no mask
            right_BLK[:, at_T], below_BLK[:, at_T] = self(ids_BL[:, at_T], at_T, None, cache)
            read += len(at_T)
            place_T = (self.distance_L == far).nonzero()[:, 0] - 1
            logits_BTK = self.mixed(right_BLK, below_BLK, place_T)
            if temperature > 0:
                depth_BT = place_T.expand(count, -1)
                code_BT = noise.target_draw_BT(logits_BTK / temperature, depth_BT)
            else:
                code_BT = logits_BTK.argmax(-1)
            ids_BL[:, 1 + place_T] = shape.first_code + code_BT
        return DrawnGrids(ids_BL[:, 1:], passes, read)
