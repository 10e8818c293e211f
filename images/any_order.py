"""ARPG (Randomized parallel decoding, arXiv 2503.10568): any places of a picture, in any order.

What is known and what is wanted are read apart. First a causal pass over the known tokens, in the
order in which they came (the prompt first), each at its own place; its states make one set of keys
and values. Then queries, which hold nothing but the places to be predicted, attend to these keys
through the guided layers, and not to each other. So any number of places can be predicted in one
pass, in any order, with one cache that is shared by all guided layers.

Training draws an order for every picture: query i, of the i-th place in that order, attends to the
prompt and to the tokens before it in the order (a token more in every row of one causal mask).
Decoding draws an order by the seed and predicts few places in the first passes and more later:
after pass t of n a share 1 - cos(pi t / 2n) is known. The places of one pass are drawn without each
other. With one place a pass the model is decoded exactly; with more it is
`approximate:arpg`. It is a target of its own in either case.

The tokens of one pass are read causally, in the order that was drawn, as in training; the published
code lets them attend to each other. Guidance without classes is not built.
Letters: B rows, D hidden width, K draft vocabulary (the codes), L positions, M new nodes (places to
be predicted), T fed tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.core.errors import RecipeError
from specctl.images.grid_net import OWN, DrawnGrids, GridCache, GridLayer, GridNet, in_heads, turned
from specctl.images.grid_shape import GridShape
from specctl.runtime.sampling.noise import RoundNoise

MARK = "arpg"


class AnyOrder(GridNet):
    """Half of the layers read what is known, the other half are guided by it."""

    def __init__(self, shape: GridShape) -> None:
        super().__init__(shape)
        width, eps, guided = shape.hidden_size, shape.rms_norm_eps, shape.num_hidden_layers // 2
        self.layers = nn.ModuleList(
            GridLayer(shape) for _ in range(shape.num_hidden_layers - guided)
        )
        self.known_norm = nn.RMSNorm(width, eps)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.wanted = nn.Parameter(torch.randn(width) * 0.02)
        self.guided = nn.ModuleList(GridLayer(shape, is_guided=True) for _ in range(guided))
        self.norm = nn.RMSNorm(width, eps)
        self.head = nn.Linear(width, shape.codes, bias=False)

    def verification(self, passes: int | None) -> str:
        """One patch a pass follows the model; fewer passes are approximate."""
        if passes is None or passes == self.shape.places:
            return f"{OWN}:{self.shape.model_type}"
        pass_sizes(self.shape.places, passes)  # refused where there are more
        return f"approximate:{MARK}"

    def read(
        self, ids_BT: Tensor, at_BT: Tensor, cache: GridCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, L, E] of all known tokens, these included, which come last and in
        this order; places [B, T], of which 0 is the prompt."""
        x_BTD, turn = self.embed_tokens(ids_BT), self.turns.of(at_BT)
        count = at_BT.shape[1]
        kept = 0 if cache is None or not cache.pairs else cache.pairs[0][0].shape[2]
        mask_TL = torch.ones(count, kept + count, dtype=torch.bool).tril(kept)
        for number, layer in enumerate(self.layers):
            x_BTD = layer(x_BTD, turn, mask_TL, cache, number)
        normed = self.known_norm(x_BTD)
        key = turned(in_heads(self.k_proj(normed), self.shape.head_dim), turn)
        value = in_heads(self.v_proj(normed), self.shape.head_dim)
        if cache is not None:
            key, value = cache.joined(len(self.layers), key, value)
        return key, value

    def predict(
        self, at_BM: Tensor, known: tuple[Tensor, Tensor], mask_ML: Tensor | None = None
    ) -> Tensor:
        """Logits [B, M, K] of the patches at places [B, M]."""
        x_BMD, turn = self.wanted.expand(*at_BM.shape, -1), self.turns.of(at_BM)
        for each in self.guided:
            layer: Any = each
            x_BMD = layer.guided(x_BMD, turn, known, mask_ML)
        logits: Tensor = self.head(self.norm(x_BMD))
        return logits

    def training_logits(self, rows_BL: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Of every picture in an order of its own, each patch given those before it."""
        shuffled = torch.rand(len(rows_BL), self.shape.places, generator=random)
        return self.in_order(rows_BL, 1 + shuffled.argsort(1))

    def in_order(self, rows_BL: Tensor, at_BM: Tensor) -> tuple[Tensor, Tensor]:
        """The same in a given order of the places."""
        label_BM = rows_BL.gather(1, at_BM)
        ids_BL = torch.cat([rows_BL[:, :1], label_BM[:, :-1]], 1)
        known = self.read(ids_BL, F.pad(at_BM[:, :-1], (1, 0)))  # the prompt is place 0
        places = self.shape.places
        before_ML = torch.ones(places, places, dtype=torch.bool).tril()
        return self.predict(at_BM, known, before_ML), label_BM - self.shape.first_code

    @torch.inference_mode()
    def draw(
        self, prompts_B: Tensor, seeds: list[int], temperature: float, passes: int | None = None
    ) -> DrawnGrids:
        """Pictures in `passes` passes (None: one for every patch), each in an order of its own
        seed. The noise of a token depends on its seed and place alone."""
        shape, count = self.shape, len(prompts_B)
        noise = RoundNoise(seeds, [0] * count, [0] * count, prompts_B.device)
        order_BL = torch.stack([order_of(seed, shape.places) for seed in seeds])
        ids_BL = torch.zeros(count, 1 + shape.places, dtype=torch.long)
        ids_BL[:, 0] = prompts_B
        cache, known_BT, done = GridCache(), torch.zeros(count, 1, dtype=torch.long), 0
        sizes = pass_sizes(shape.places, shape.places if passes is None else passes)
        for size in sizes:
            known = self.read(ids_BL.gather(1, known_BT), known_BT, cache)
            at_BM = order_BL[:, done : done + size]
            logits_BMK = self.predict(at_BM, known)
            if temperature > 0:
                code_BM = noise.target_draw_BT(logits_BMK / temperature, at_BM - 1)
            else:
                code_BM = logits_BMK.argmax(-1)
            ids_BL.scatter_(1, at_BM, shape.first_code + code_BM)
            known_BT, done = at_BM, done + size
        return DrawnGrids(ids_BL[:, 1:], len(sizes), 1 + shape.places - sizes[-1])


def order_of(seed: int, places: int) -> Tensor:
    """The places 1 .. `places` in the order of that seed."""
    random = torch.Generator().manual_seed(seed % 2**63)
    return 1 + torch.randperm(places, generator=random)


def pass_sizes(places: int, passes: int) -> list[int]:
    """How many places each pass predicts: by the cosine, at least one, all in the end."""
    if not isinstance(passes, int) or not 1 <= passes <= places:
        raise RecipeError(
            "a picture cannot be decoded in so many passes",
            where="picture.passes",
            found=str(passes),
            expected=f"1 to {places}, its patches",
            do=f"--set picture.passes={min(places, max(1, places // 4))}",
        )
    sizes, known = list[int](), 0
    for left in range(passes, 0, -1):
        done = 1 - math.cos(math.pi / 2 * (passes - left + 1) / passes)
        size = max(1, round(places * done) - known)
        size = places - known if left == 1 else min(size, places - known - (left - 1))
        sizes.append(size)
        known += size
    return sizes
