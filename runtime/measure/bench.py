"""Timed comparisons of ways to generate the same text, interleaved in one process.

Every contender runs the same prompts under the same sampling, in turn, `repeats` times; tables
give medians of tokens/s and ratios to specctl's own plain decoding on the same target. Each row
states tau and the repetition rate of the outputs (loops flatter n-gram drafters).
Letters: B rows, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from specctl.core.drafter import Drafter
from specctl.core.printable import counted
from specctl.core.table import Table, Tabled
from specctl.models.compiled import CompiledLM
from specctl.models.native.threads import threads_used
from specctl.runtime.generate import generate
from specctl.runtime.measure.cost import equip
from specctl.runtime.measure.cost_table import CostTable
from specctl.runtime.measure.doubt import PAYS, doubts
from specctl.runtime.measure.reporter import Reporter, SilentReporter
from specctl.runtime.measure.stats import busy_note, repetition_rate
from specctl.runtime.policies.base import Policy
from specctl.runtime.sampling.generation_config import described
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.inflate import inflated_note
from specctl.runtime.target.target import Target

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Timed:
    """One timed run: tokens and seconds, and what the engine counted (None where unknown)."""

    tokens: int
    seconds: float
    token_ids: tuple[tuple[int, ...], ...]
    tau: float | None = None
    draft_share: float | None = None
    accepted_per_position: tuple[float, ...] = ()
    well_counted: tuple[float, ...] = ()  # of these, the positions that were tested often


@dataclass(frozen=True, slots=True)
class Contender:
    """A named way to continue prompts: `run(prompts, sampling) -> Timed`."""

    name: str
    run: Callable[[Prompts, Sampling], Timed]


@dataclass(frozen=True, slots=True)
class BenchRow:
    """What was measured of one contender in one setting; `doubts` say why its speed-up is no
    finding yet."""

    name: str
    setting: str
    tau: float | None
    tokens_per_second: float
    speedup: float
    repetition_rate: float
    identical: bool | None
    draft_share: float | None
    accepted_per_position: tuple[float, ...]
    well_counted: tuple[float, ...] = ()
    doubts: tuple[str, ...] = ()

    @property
    def is_winner(self) -> bool:
        """Whether it was clearly faster than the baseline."""
        return self.speedup > PAYS and not self.doubts

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "setting": self.setting,
            "tau": None if self.tau is None else round(self.tau, 3),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "speedup": round(self.speedup, 3),
            "repetition_rate": round(self.repetition_rate, 3),
            "identical_to_plain": self.identical,
            "draft_share": None if self.draft_share is None else round(self.draft_share, 3),
            "accepted_per_position": [round(x, 3) for x in self.accepted_per_position],
            "doubts": list(self.doubts),
        }


@dataclass(frozen=True, slots=True, repr=False)
class BenchReport(Tabled):
    """Rows by setting and contender; the first contender is the baseline of every ratio."""

    rows: tuple[BenchRow, ...]
    target: str
    inflated: str | None
    dtype: str
    device: str
    threads: int
    threads_used: int  # at the end, where other work kept the cores busy
    num_prompts: int
    new_tokens: int
    repeats: int
    seconds: Mapping[str, float] = field(default_factory=dict)  # of wall time, by part

    def after(self, part: str, seconds: float) -> BenchReport:
        """This report with what was done before it, in that time."""
        return replace(self, seconds={part: seconds, **self.seconds})

    def table(self) -> Table:
        """A row for every contender and setting."""
        columns = (
            "drafter", "sampling", "tau", "tokens/s", "speed-up", "identical", "repetition",
            "drafting",
        )  # fmt: skip
        rows = [
            (
                row.name,
                row.setting,
                row.tau,
                f"{row.tokens_per_second:.1f}",
                row.speedup,
                row.identical,
                row.repetition_rate,
                None if row.draft_share is None else f"{row.draft_share:.0%}",
            )
            for row in self.rows
        ]
        notes = [
            f"{self.target} {self.dtype} on {self.device}, {counted(self.threads, 'thread')}, "
            f"{counted(self.num_prompts, 'prompt')} x {counted(self.new_tokens, 'token')}, "
            + (f"medians of {self.repeats} runs" if self.repeats > 1 else "one run of each")
        ]
        doubtful = [row for row in self.rows if row.doubts]
        notes += [f"doubtful: {r.name}, {r.setting}: {'; '.join(r.doubts)}" for r in doubtful]
        if self.threads_used < self.threads:
            notes.append(busy_note(self.threads_used, self.threads))
        if self.seconds:
            parts = ", ".join(f"{name} {spent:.0f}" for name, spent in self.seconds.items())
            notes.append(f"{sum(self.seconds.values()):.0f} seconds in all: {parts}")
        if self.inflated is not None:
            notes.append(inflated_note(self.target, self.inflated))
        return Table(columns, rows, notes)

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "inflated": self.inflated,
            "dtype": self.dtype,
            "device": self.device,
            "threads": self.threads,
            "threads_used": self.threads_used,
            "num_prompts": self.num_prompts,
            "new_tokens": self.new_tokens,
            "repeats": self.repeats,
            "seconds": {name: round(spent, 1) for name, spent in self.seconds.items()},
            "rows": [row.to_json() for row in self.rows],
        }


def engine_contender(
    name: str,
    target: Target,
    drafter: Drafter | None = None,
    policy: Policy | None = None,
    *,
    rule: str = "auto",
    batch: int = 1,
    costs: Callable[[Sampling], CostTable | None] = lambda sampling: None,
    parallel: bool = False,
) -> Contender:
    """specctl's own runtime; `costs` are the prices by which lengths are chosen (None: fixed)."""

    def run(prompts: Prompts, sampling: Sampling) -> Timed:
        chosen = equip(policy, costs(sampling))
        result = generate(
            target,
            prompts,
            drafter=drafter,
            sampling=sampling,
            policy=chosen.policy,
            rule=rule,
            batch=batch,
            chooser=chosen.chooser,
            parallel=parallel,
        )
        stats = result.stats
        return Timed(
            stats.tokens,
            stats.seconds,
            tuple(o.token_ids for o in result.outputs),
            stats.tau,
            stats.draft_share,
            stats.accepted_per_position,
            stats.well_counted,
        )

    return Contender(name, run)


def transformers_contender(
    name: str, model: Any, eos_ids: Sequence[int], **extra: Any
) -> Contender:
    """transformers' own `generate` on the same weights, one prompt at a time; `extra` goes to it
    (`assistant_model=...`, `prompt_lookup_num_tokens=...`)."""

    def run(prompts: Prompts, sampling: Sampling) -> Timed:
        options: dict[str, Any] = {"do_sample": not sampling.greedy, **extra}
        # All is said: what is left out would come from the checkpoint's generation_config.json.
        options["repetition_penalty"] = sampling.repetition_penalty or 1.0
        if not sampling.greedy:
            options |= {"temperature": sampling.temperature, "top_k": sampling.top_k or 0}
            options["top_p"] = sampling.top_p or 1.0
            if sampling.min_p is not None or model.generation_config.min_p is not None:
                options["min_p"] = sampling.min_p or 0.0
        options["eos_token_id"] = None if sampling.ignore_eos else list(eos_ids)
        outputs, started = [], time.perf_counter()
        for index, prompt in enumerate(prompts):
            torch.manual_seed(sampling.seed + index)
            ids = torch.tensor([list(prompt)], device=model.device)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=sampling.max_new_tokens,
                pad_token_id=0,
                **options,
            )
            outputs.append(tuple(out[0, len(prompt) :].tolist()))
        seconds = time.perf_counter() - started
        return Timed(sum(map(len, outputs)), seconds, tuple(outputs))

    return Contender(name, run)


def bench(
    target: Target,
    contenders: Sequence[Contender],
    prompts: Prompts,
    samplings: Sequence[Sampling],
    *,
    repeats: int = 3,
    reporter: Reporter | None = None,
) -> BenchReport:
    """Run all contenders interleaved; the first is the baseline. One warm-up prompt each, or all of
    them where the target's rounds are recorded: a longer text has others, and may take a new cache.
    Drafters record for each run anew, as they do whenever text is generated."""
    is_recorded = target.device.type == "cuda" or isinstance(target.lm, CompiledLM)
    warming = prompts if is_recorded else prompts[:1]
    reporter = reporter if reporter is not None else SilentReporter()
    rows: list[BenchRow] = []
    total = len(samplings) * repeats * len(contenders)
    warming_seconds, began = 0.0, time.perf_counter()
    with reporter.task("bench", total, "runs") as advance:
        for sampling in samplings:
            started = time.perf_counter()
            for contender in contenders:
                advance(0, f"{contender.name}, warming up")
                contender.run(warming, sampling)
            warming_seconds += time.perf_counter() - started
            runs: dict[str, list[Timed]] = {c.name: [] for c in contenders}
            for _ in range(repeats):
                for contender in contenders:
                    runs[contender.name].append(contender.run(prompts, sampling))
                    advance(1, contender.name)
            rows += _rows(runs, sampling)
    threads = torch.get_num_threads()
    return BenchReport(
        tuple(rows),
        target.name,
        target.inflated,
        target.dtype_name,
        str(target.device),
        threads,
        threads_used(threads),
        len(prompts),
        samplings[0].max_new_tokens,
        repeats,
        {"warm-up": warming_seconds, "runs": time.perf_counter() - began - warming_seconds},
    )


def setting_of(sampling: Sampling) -> str:
    """The name of a sampling in the rows."""
    return described(sampling).replace("temperature ", "T=").replace(",", "")


def _rows(runs: dict[str, list[Timed]], sampling: Sampling) -> list[BenchRow]:
    rates = {n: statistics.median(t.tokens / t.seconds for t in ts) for n, ts in runs.items()}
    baseline = next(iter(runs))
    greedy, setting = sampling.greedy, setting_of(sampling)
    rows = []
    for name, times in runs.items():
        last, is_baseline = times[-1], name == baseline
        pairs = zip(times, runs[baseline], strict=True)
        each = [one.tokens / one.seconds / (base.tokens / base.seconds) for one, base in pairs]
        speedup = rates[name] / rates[baseline]
        why = () if is_baseline else doubts(speedup, last.tau, last.tokens, each)
        same = last.token_ids == runs[baseline][-1].token_ids if greedy else None
        rows.append(
            BenchRow(
                name,
                setting,
                last.tau,
                rates[name],
                speedup,
                repetition_rate(last.token_ids),
                same,
                last.draft_share,
                last.accepted_per_position,
                last.well_counted,
                why,
            )
        )
    return rows
