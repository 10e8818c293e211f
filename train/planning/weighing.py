"""What a recipe's run holds in memory on given hardware, worked out as far as the question needs.

Whether a run fits is mostly clear from its target's weights alone, or from a generous guess; only
in between is a step traced, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from specctl.core.forward.slot_state import PENDING
from specctl.recipes.schema import DataPart, Recipe, TrainPart
from specctl.recipes.stages import runs_of
from specctl.runtime.target.placement.quantised import layer_share
from specctl.train.data.written.regenerate import HOST_ROWS
from specctl.train.planning.data_shares import tokens_in
from specctl.train.planning.hardware import Cluster
from specctl.train.planning.memory import (
    PROCESS_BYTES,
    Held,
    Moments,
    RowBytes,
    rows_each,
    way_out,
)
from specctl.train.planning.rehearsal import Rehearsal, small_data
from specctl.train.planning.step_bytes import StepSettings, step_bytes
from specctl.train.planning.target_shape import TargetShape
from specctl.train.planning.work import joint_memory

ROW_BYTES = 13  # of a prepared token: id, document, position (4 each) and its loss mask
SAMPLE_TOKENS = 4_700  # of a file of the corpus, on average
GENEROUS = 200  # numbers that any family keeps of a token, a step and a place of its width

SERVED = (
    "leave the target in a serving engine: {answers}--set data.target_source=endpoint "
    "--set data.states=URL"
)
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
        or traced (once for each number of rows)."""
        recipe, shape, seen = self.recipe, self.shape, self.rehearsal
        if seen is not None:
            more = max(0, data_tokens(recipe.data, seen) - seen.tokens)
            host = {"measured in a rehearsal": seen.memory, "more rows": more * ROW_BYTES}
            return Held({"on the GPU": seen.gpu} if seen.gpu else {}, host, "a rehearsal")
        dtype = self.dtype
        name = str(dtype).removeprefix("torch.")
        is_gpu = self.cluster.gpu is not None
        parts = min(self.cluster.processes, recipe.train.sequence_parallel)
        size = recipe.vocab.size
        kept = size if isinstance(size, int) else None
        settings = StepSettings(recipe.drafter, recipe.train, kept, self.is_elsewhere)
        step = step_bytes(settings, shape.config, shape.spec, name, is_gpu, self._rows, parts)
        if recipe.target.inflate is not None:
            step = replace(step, layers=dtype.itemsize * shape.parameters - step.beside_layers)
        gpu = self.cluster.gpu
        share = layer_share(shape.config, None if gpu is None else gpu.name, dtype.itemsize)
        step = replace(step, layers=round(share * step.layers))
        joint = joint_memory(recipe.train, shape, dtype.itemsize)
        is_fast = shape.plain_head and shape.spec.model_type in FAST
        if step.untraced:
            joint = {**joint, "batch, a bound from above": self._batch_at_most(self._rows)}
        row = RowBytes.of(shape, dtype)
        about = (recipe.target, recipe.data, recipe.train, shape.spec)
        return Moments(*about, step, self.cluster, row).held(joint, is_fast)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the target's layers run in a server, or its states lie in files."""
        return self.recipe.data.target_source != "inprocess"

    @property
    def _beside_layers(self) -> int:
        """Numbers in the target's embedding and head."""
        spec = self.shape.spec
        is_tied = getattr(self.shape.config, "tie_word_embeddings", False)
        return spec.vocab_size * spec.hidden_size * (1 if is_tied else 2)

    @property
    def _rows(self) -> int:
        """Of a batch on one process, or on a group that computes rows together."""
        return rows_each(self.recipe.train, self.cluster.processes)

    @property
    def dtype(self) -> torch.dtype:
        device = torch.device("cpu" if self.cluster.gpu is None else "cuda")
        return self.shape.dtype(self.recipe.target, device)

    def least(self) -> Held:
        """A bound from below: the target's weights."""
        gpu, wide = self.cluster.gpu, self.dtype.itemsize
        if self.is_elsewhere:
            return self._on_its_device({"target": wide * self._beside_layers})
        share = layer_share(self.shape.config, None if gpu is None else gpu.name, wide)
        weights = round(share * wide * self.shape.parameters)
        is_cut = self.recipe.train.shard_target or self.recipe.target.tensor_parallel
        weights = weights // self.cluster.processes if is_cut else weights
        if self.recipe.target.device_map is not None:
            weights = 0  # where layers go is settled as it is loaded
        return self._on_its_device({"target": weights})

    def most(self) -> Held:
        """A bound from above for all but unusual recipes."""
        spec = self.shape.spec
        count = self._beside_layers if self.is_elsewhere else self.shape.parameters
        weights = 2 * self.dtype.itemsize * count
        layer = 12 * spec.hidden_size * (spec.hidden_size + spec.intermediate_size)
        drafter = 24 * (8 * layer + 2 * spec.vocab_size * spec.hidden_size)
        found = {"target": weights, "drafter": drafter, "batch": self._batch_at_most(self._rows)}
        row, rows = RowBytes.of(self.shape, self.dtype), self.recipe.train.tau_prompts
        found |= {"states": max(HOST_ROWS, rows) * row.states + PENDING * row.pending}
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

    def way_out(self, fits: Fits, pipeline: Weighing | None = None) -> str | None:
        """The least change of recipe or hardware after which it fits, and with it every stage of
        the `pipeline` that it is part of."""
        whole = self if pipeline is None else pipeline
        recipe = whole.recipe

        def tried(train: TrainPart, cluster: Cluster) -> bool:
            changed = recipe.model_copy(update={"train": train})
            return replace(whole, recipe=changed, cluster=cluster)._all_fit(fits)

        found = way_out(recipe.train, not whole.is_elsewhere, self.cluster, tried)
        is_dear = found is None or found.startswith("--gpu ")
        may = is_dear and self._could_be_elsewhere and not recipe.stages
        if may and replace(whole._served(), cluster=self.cluster)._all_fit(fits):
            answers = "--endpoint URL " if self.recipe.data.regenerate else ""
            served = SERVED.format(answers=answers)
            return f"{found}, or {served}" if found else served
        return found

    def _all_fit(self, fits: Fits) -> bool:
        """Whether every stage fits, as it is traced; the bounds from below are looked at first."""
        each = [Weighing(part, self.shape, self.cluster) for part in runs_of(self.recipe)]
        return all(fits(stage.least(), self.cluster) for stage in each) and all(
            fits(stage.held(), self.cluster) for stage in each
        )

    @property
    def _could_be_elsewhere(self) -> bool:
        data, recipe = self.recipe.data, self.recipe
        if self.cluster.gpu is None:
            return False
        is_only_read = recipe.train.joint is None and recipe.target.inflate is None
        return not self.is_elsewhere and is_only_read and not data.on_policy

    def _served(self) -> Weighing:
        """The same run with the target's layers in a server."""
        recipe = self.recipe
        change = {"target_source": "endpoint", "states": "URL"}
        data = recipe.data.model_copy(update=change)
        train = recipe.train.model_copy(update={"shard_target": False})
        return replace(self, recipe=recipe.model_copy(update={"data": data, "train": train}))


def data_tokens(data: DataPart, rehearsal: Rehearsal | None = None) -> int:
    """Tokens of the rows. Text is read from the samples that gave the prompts; what those hold is
    known from a rehearsal, or guessed."""
    if not data.regenerate:
        held = tokens_in(data)
        return min(held, data.limit_tokens or held)
    each = data.prompt_tokens + data.new_tokens
    in_sample = float(SAMPLE_TOKENS)
    if rehearsal is not None:
        prompts = small_data(data).prompts
        in_sample = max(0.0, rehearsal.tokens / prompts - each)
    return data.prompts * each + min(data.text_tokens, round(data.prompts * in_sample))
