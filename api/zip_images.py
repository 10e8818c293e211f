"""zip_images(): pictures whose rows are decoded at once (ZipAR), as `specctl generate` does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specctl.api.failures import raises_user_errors
from specctl.api.prompts import encode_prompts
from specctl.api.targets import TargetLike, target_or_own
from specctl.core.messages.table import Table, Tabled
from specctl.images.zipar import verification_of, zip_grids
from specctl.runtime.generate import Output


@dataclass(frozen=True, slots=True, repr=False)
class ZippedResult(Tabled):
    """What was written, in the order of the prompts; `passes` of the target over one picture, all
    of which are decoded together, and the `read` tokens of each in them."""

    outputs: tuple[Output, ...]
    passes: int
    read: int
    seconds: float
    verification: str

    @property
    def tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    def lines(self) -> tuple[str, ...]:
        """What it took."""
        per_pass = self.tokens / max(1, len(self.outputs)) / self.passes
        return (
            f"passes a picture {self.passes:,} | tokens per pass {per_pass:.2f} | "
            f"tokens read of each {self.read:,}",
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
    window: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
) -> ZippedResult:
    """A grid of `grid` x `grid` image tokens behind each prompt, whose rows begin `window` tokens
    behind each other (docs/images-out.md); prompt i uses seed `seed + i`. With `window` = `grid` it
    is plain decoding, token by token; else it is approximate, and `verification` says so."""
    model = target_or_own(target, None)
    encoded = encode_prompts(model, prompts, False)
    ids, begin = [list(prompt.ids) for prompt in encoded], time.perf_counter()
    seeds = [seed + index for index in range(len(ids))]
    made = zip_grids(model.lm, ids, grid, window, temperature=temperature, seeds=seeds)
    outputs = tuple(
        Output(prompt.text, model.decode(row), tuple(row), "length")
        for prompt, row in zip(encoded, made.ids_BL.tolist(), strict=True)
    )
    seconds = time.perf_counter() - begin
    return ZippedResult(outputs, made.passes, made.read, seconds, verification_of(window, grid))
