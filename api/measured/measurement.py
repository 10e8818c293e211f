"""What a package records of its measured acceptance, with the command that measures it again.

The command names all that the figure depends on: the target, its dtype, the prompts, how many and
how long, how many at once. THIS_FOLDER and TARGET_FOLDER stand for paths, as on the card.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.recipes.section import flatten

if TYPE_CHECKING:
    from specctl.recipes.schema import Recipe
    from specctl.runtime.target.target import Target

MOST_AT_ONCE = 256  # prompts that `specctl bench --batch` takes
ESTIMATED = "alphas over documents of the training data that were kept back; nothing was decoded"
HELD_OUT, KEPT_BACK = "held-out prompts", "documents of the training data that were kept back"


@dataclass(frozen=True, slots=True)
class Measurement:
    """How acceptance was measured: greedily, on so many prompts of a file (None: those that come
    with specctl), `batch` at once."""

    tau: float
    accepted_per_position: Sequence[float]
    num_prompts: int
    new_tokens: int
    batch: int = 1
    prompts: Path | None = None
    is_estimate: bool = False  # from the alphas of text that was kept back; nothing was decoded

    def record(self, target: Target) -> dict[str, Any]:
        """The manifest's `acceptance`, measured again by `specctl bench`."""
        words = ["specctl", "bench", *target_words(target), "--draft", "THIS_FOLDER"]
        words += ["--num-prompts", str(self.num_prompts)]
        words += ["--max-new-tokens", str(self.new_tokens), "--temperature", "0"]
        words += ["--batch", str(min(self.batch, MOST_AT_ONCE)), "--no-adaptive"]
        if self.prompts is not None:
            words += ["--prompts", str(self.prompts)]
        return self._record(words, HELD_OUT if self.prompts is None else str(self.prompts))

    def record_of_run(
        self, source: str | tuple[str, ...], target: Target, words: Sequence[str]
    ) -> dict[str, Any]:
        """What a run on data of that source measured: again by `specctl bench`, or by the run (its
        command in `words`) where only it has the prompts, documents of its data that it did not
        train on."""
        from specctl.train.data.sources.sources import is_corpus

        if self.is_estimate:
            return self._record(words, ESTIMATED) | {"temperature": 1.0}
        if is_corpus(source):
            return self.record(target)
        return self._record(words, KEPT_BACK)

    def _record(self, words: Sequence[str], data: str) -> dict[str, Any]:
        return {
            "tau": self.tau,
            "alpha": list(self.accepted_per_position),
            "command": shlex.join(words),
            "data": data,
            "temperature": 0.0,
            "prompts": self.num_prompts,
            "new_tokens": self.new_tokens,
        }


def target_words(target: Target) -> list[str]:
    """The flags that load this target again, in pairs."""
    from specctl.export.package.card import given_target
    from specctl.export.package.folder import target_record
    from specctl.export.package.manifest import TargetRecord

    record = TargetRecord.model_validate(target_record(target))
    words = ["--target", given_target(record)]
    if record.repo is not None and record.revision is not None:
        words += ["--set", f"target.revision={record.revision}"]
    if target.inflated is not None:
        words += ["--inflate", target.inflated]
    if target.mixture is not None:
        words += ["--mix", str(target.mixture)]
    for one in target.adapters:
        words += ["--adapter", one.text()]
    return [*words, "--dtype", target.dtype_name]


def run_words(recipe: Recipe, target: Target, out: Path) -> list[str]:
    """A command that makes this run again: what its recipe does not say stands behind --set."""
    from specctl.train.data.sources.sources import names_of

    dtype = target.dtype_name
    fields = flatten(recipe.to_json()) | {"target.dtype": dtype}
    words = ["specctl", "train-draft", "--recipe", recipe.name]
    words += ["--target", recipe.target.name]
    words += [word for name in names_of(recipe.data.source) for word in ("--data", name)]
    words += ["--out", str(out)]
    for field, value in fields.items():
        is_given = recipe.origin[field] != "base" and not recipe.origin[field].startswith("recipe ")
        if field == "target.dtype" or (is_given and field not in ("target.name", "data.source")):
            words += ["--set", f"{field}={value if isinstance(value, str) else json.dumps(value)}"]
    return words
