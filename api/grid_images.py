"""grid_images(): pictures of a model that writes in an order of its own, as `specctl generate`
does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from specctl.api.failures import raises_user_errors
from specctl.api.zip_images import PicturesResult, pictures_result
from specctl.images.grid_folder import GridTarget, load_grid
from specctl.runtime.generate import Output
from specctl.runtime.sampling.sampling import Sampling


@raises_user_errors
def grid_images(
    model: GridTarget | str | Path,
    prompts: str | Sequence[str],
    *,
    passes: int | None = None,
    temperature: float = 1.0,
    seed: int = 0,
) -> PicturesResult:
    """A picture behind each prompt, one word that the model knows; prompt i uses seed `seed + i`.
    `passes` is of any-order models alone: with fewer than patches they are approximate, and
    `verification` says so. Raises RecipeError where the model has its own number."""
    sampling = Sampling(temperature=temperature, seed=seed)  # refused where it cannot be
    target = model if isinstance(model, GridTarget) else load_grid(Path(model))
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    verification = target.model.verification(passes)
    ids_B = torch.tensor([target.encode(text) for text in texts], dtype=torch.long)
    begin = time.perf_counter()
    seeds = [sampling.seed + index for index in range(len(texts))]
    made = [target.model.draw(ids_B, seeds, temperature, passes)] if texts else []
    outputs = [
        Output(text, target.decode(row), tuple(row), "length")
        for text, row in zip(
            texts, (row for one in made for row in one.ids_BL.tolist()), strict=True
        )
    ]
    return pictures_result(outputs, made, begin, verification)
