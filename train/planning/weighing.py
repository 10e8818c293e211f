"""What a recipe's run holds in memory on given hardware, worked out as far as the question needs.

Whether a run fits is mostly clear from its target's weights alone, or from a generous guess; only
in between is a step traced, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specctl.recipes.schema import Recipe
from specctl.runtime.target.quantised import layer_share
from specctl.train.planning.hardware import Cluster
from specctl.train.planning.memory import PROCESS_BYTES, Held, held, rows_each, way_out
from specctl.train.planning.rehearsal import Rehearsal, small
from specctl.train.planning.step_bytes import step_bytes
from specctl.train.planning.target_shape import TargetShape
from specctl.train.planning.work import joint_memory

ROW_BYTES = 13  # of a prepared token: id, document, position (4 each) and its loss mask
SAMPLE_TOKENS = 4_700  # of a file of the corpus, on average
GENEROUS = 200  # numbers that any family keeps of a token, a step and a place of its width

FAST = ("llama", "mistral", "qwen2", "qwen3")  # model types whose forward is our own

Fits = Callable[[Held, Cluster], bool]


@dataclass(frozen=True, slots=True)
class Weighing:
    """A recipe for a target of that shape, on that hardware; what a rehearsal measured, if any."""

    recipe: Recipe
    shape: TargetShape
    cluster: Cluster
    rehearsal: Rehearsal | None = None

    def held(self) -> Held:
        """Bytes of the fuller moment: measured in a rehearsal, with the rows that it did without,
        or traced (once for all rows, lengths and clusters)."""
        recipe, shape, seen = self.recipe, self.shape, self.rehearsal
        if seen is not None:
            more = max(0, data_tokens(recipe, seen) - seen.tokens)
            host = {"measured in a rehearsal": seen.memory, "more rows": more * ROW_BYTES}
            return Held({"on the GPU": seen.gpu} if seen.gpu else {}, host, "a rehearsal")
        dtype = self.dtype
        name = str(dtype).removeprefix("torch.")
        is_gpu = self.cluster.gpu is not None
        step = step_bytes(recipe, shape.config, shape.spec, name, is_gpu)
        if recipe.target.inflate is not None:
            step = replace(step, layers=dtype.itemsize * shape.parameters - step.beside_layers)
        gpu = self.cluster.gpu
        share = layer_share(shape.config, None if gpu is None else gpu.name, dtype.itemsize)
        step = replace(step, layers=round(share * step.layers))
        joint = joint_memory(recipe.train, shape, dtype.itemsize)
        is_fast = shape.plain_head and shape.spec.model_type in FAST
        if step.untraced:
            rows = rows_each(recipe.train, self.cluster.processes)
            joint = {**joint, "batch, a bound from above": self._batch_at_most(rows)}
        return held(recipe, shape.spec, step, self.cluster, dtype.itemsize, joint, is_fast)

    @property
    def dtype(self) -> torch.dtype:
        device = torch.device("cpu" if self.cluster.gpu is None else "cuda")
        return self.shape.dtype(self.recipe.target, device)

    def least(self) -> Held:
        """A bound from below: the target's weights."""
        gpu, wide = self.cluster.gpu, self.dtype.itemsize
        share = layer_share(self.shape.config, None if gpu is None else gpu.name, wide)
        weights = round(share * wide * self.shape.parameters)
        is_spread = self.recipe.train.shard_target and self.cluster.processes > 1
        weights = weights // self.cluster.processes if is_spread else weights
        return self._on_its_device({"target": weights})

    def most(self) -> Held:
        """A bound from above for all but unusual recipes."""
        train, spec = self.recipe.train, self.shape.spec
        rows = rows_each(train, self.cluster.processes)
        weights = 2 * self.dtype.itemsize * self.shape.parameters
        layer = 12 * spec.hidden_size * (spec.hidden_size + spec.intermediate_size)
        drafter = 24 * (8 * layer + 2 * spec.vocab_size * spec.hidden_size)
        found = {"target": weights, "drafter": drafter, "batch": self._batch_at_most(rows)}
        return self._on_its_device(found)

    def _batch_at_most(self, rows: int) -> int:
        spec, places = self.shape.spec, self.recipe.train.seq_len
        steps = int(self.recipe.drafter.options.get("ttt_steps", 8))
        each = 4 * spec.hidden_size * (GENEROUS * steps + 2 * spec.num_layers)
        each += 4 * (3 * spec.vocab_size + 4 * spec.intermediate_size)
        each += 4 * steps * 4 * spec.num_heads * places
        return rows * places * each

    def _on_its_device(self, found: dict[str, int]) -> Held:
        count = self.cluster.per_node
        if self.cluster.gpu is not None:
            return Held(found, {"process": count * PROCESS_BYTES}, "a step")
        many = {name: count * size for name, size in found.items()}
        return Held({}, {"process": count * PROCESS_BYTES} | many, "a step")

    def way_out(self, fits: Fits) -> str | None:
        """The least change of recipe or hardware after which it fits."""

        def tried(recipe: Recipe, cluster: Cluster) -> bool:
            other = Weighing(recipe, self.shape, cluster)
            return fits(other.least(), cluster) and fits(other.held(), cluster)

        return way_out(self.recipe, self.cluster, tried)


def data_tokens(recipe: Recipe, rehearsal: Rehearsal | None = None) -> int:
    """Tokens of the rows. Text is read from the samples that gave the prompts; what those hold is
    known from a rehearsal, or guessed."""
    data = recipe.data
    if not data.regenerate:
        source = Path(data.source)
        in_file = source.stat().st_size // 4 if source.is_file() else 10_000_000
        return min(in_file, data.limit_tokens or in_file)
    each = data.prompt_tokens + data.new_tokens
    in_sample = float(SAMPLE_TOKENS)
    if rehearsal is not None:
        prompts = small(recipe).data.prompts
        in_sample = max(0.0, rehearsal.tokens / prompts - each)
    return data.prompts * each + min(data.text_tokens, round(data.prompts * in_sample))
