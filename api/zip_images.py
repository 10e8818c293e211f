"""zip_images(): pictures whose rows are decoded at once (ZipAR), as `specctl generate` does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specctl.api.arguments.prompts import encode_prompts
from specctl.api.arguments.targets import TargetLike, target_or_own
from specctl.api.failures import raises_user_errors
from specctl.core.messages.table import Table, Tabled
from specctl.images.grid_net import DrawnGrids
from specctl.images.zipar import RowWindow, zip_grids
from specctl.runtime.generate import Output
from specctl.runtime.sampling.sampling import Sampling


@dataclass(frozen=True, slots=True, repr=False)
class PicturesResult(Tabled):
    """What was written, in the order of the prompts; `passes` of the model over each picture and
    the tokens `read` in them, where pictures differ on average."""

    outputs: tuple[Output, ...]
    passes: float
    read: float
    seconds: float
    verification: str

    @property
    def tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    def lines(self) -> tuple[str, ...]:
        """What it took."""
        per_pass = self.tokens / max(1, len(self.outputs)) / max(1, self.passes)
        return (
            f"passes a picture {self.passes:,g} | tokens per pass {per_pass:.2f} | "
            f"tokens read of each {self.read:,g}",
            f"{self.tokens:,} tokens in {self.seconds:.2f} s | verification {self.verification}",
        )

    def table(self) -> Table:
        """A row for every prompt."""
        rows = [(o.prompt, o.text, len(o.token_ids)) for o in self.outputs]
        return Table(("prompt", "text", "tokens"), rows, self.lines())

    def to_json(self) -> dict[str, Any]:
        return {
            "outputs": [output.to_json() for output in self.outputs],
            "stats": {
                "tokens": self.tokens,
                "passes": self.passes,
                "read": self.read,
                "seconds": round(self.seconds, 3),
                "verification": self.verification,
            },
        }


@raises_user_errors
def zip_images(
    target: TargetLike,
    prompts: str | Sequence[str],
    grid: int,
    window: int | str,
    *,
    temperature: float = 1.0,
    seed: int = 0,
) -> PicturesResult:
    """A grid of `grid` x `grid` image tokens behind each prompt, whose rows begin `window` tokens
    behind each other (docs/images-out.md), with "auto:MIN" at least so many, each row by a test;
    prompt i uses seed `seed + i`. With `window` = `grid` it is plain decoding, token by token; else
    it is approximate, and `verification` says so."""
    rows, sampling = RowWindow.read(window), Sampling(temperature=temperature, seed=seed)
    model = target_or_own(target, None)
    encoded = encode_prompts(model, prompts, False)
    ids, begin = [list(prompt.ids) for prompt in encoded], time.perf_counter()
    seeds = [sampling.seed + index for index in range(len(ids))]
    size = 1 if rows.is_adaptive else max(1, len(ids))  # each takes passes of its own
    made = [
        zip_grids(
            model.lm, ids[first : first + size], grid, rows, temperature=temperature,
            seeds=seeds[first : first + size],
        )
        for first in range(0, len(ids), size)
    ]  # fmt: skip
    tokens = [row for one in made for row in one.ids_BL.tolist()]
    outputs = tuple(
        Output(prompt.text, model.decode(row), tuple(row), "length")
        for prompt, row in zip(encoded, tokens, strict=True)
    )
    return pictures_result(outputs, made, begin, rows.verification(grid))


def pictures_result(
    outputs: Sequence[Output], made: Sequence[DrawnGrids], begin: float, verification: str
) -> PicturesResult:
    """What was made since `begin`, as one answer."""
    passes = sum(one.passes for one in made) / max(1, len(made))
    read = sum(one.read for one in made) / max(1, len(made))
    seconds = time.perf_counter() - begin
    return PicturesResult(tuple(outputs), _whole(passes), _whole(read), seconds, verification)


def _whole(number: float) -> float:
    """A whole number as one: a mean of equal ones is what each was."""
    return int(number) if number == int(number) else number
