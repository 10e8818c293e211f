"""What a round costs on this device, measured in the real engine, host time included.

Letters: B rows, N nodes, R flat rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import Any

import torch
from torch import Tensor

from specctl.core.drafter import Budget, Drafter, DraftState, Outcome, RoundView, Space
from specctl.core.tree import DraftTree, NodeKind, chain_tree
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.measure.cost_table import BatchCosts, CostTable, TreeCosts
from specctl.runtime.measure.live_costs import FEW_POSITIONS
from specctl.runtime.policies.base import Fitting, Policy
from specctl.runtime.policies.chain import Chain
from specctl.runtime.policies.direct import Direct
from specctl.runtime.policies.length import FixedLength, LengthChooser
from specctl.runtime.policies.prompt_tree import PromptTree
from specctl.runtime.policies.switch import Switch
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

DEFAULT_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8)
TREE_SIZES = (0, 1, 2, 4, 8, 16, 32, 64)
SELDOM = 4  # a switch drafts now and then: so many rounds apart, behind which it is slower
READINGS, READ = 5, 64  # of a prompt of so many tokens, by a team
RECORDING = 4  # rounds of an engine on a GPU that are slower: they are recorded


def measure_costs(
    target: Target,
    drafter: Drafter,
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    batch: int = 1,
    rounds: int = 24,
    sampling: Sampling | None = None,
) -> CostTable:
    """Lower quartiles over `rounds` rounds per length in the real engine, lengths interleaved
    twice; on a GPU over a few more, as the first of an engine are recorded. Of a switch, and of
    trees of prompt tokens, what is measured is how dear verification is: with a drafter that is
    never silent; of a switch over half as many rounds, each behind some without a draft. Of another
    tree that is fitted to the device, chains of its drafter: steps and nodes have their prices."""
    team, given = drafter, policy
    is_wrong = isinstance(policy, PromptTree | Switch)  # the repeater mostly is: a round is a token
    every = SELDOM if isinstance(policy, Switch) else 1
    if isinstance(policy, PromptTree):
        size = min(policy.nodes, TREE_SIZES[-1])
        drafter, policy = Repeater(drafter.options, target.spec), Direct(size, size)
        lengths = TREE_SIZES
    if isinstance(policy, Switch):
        size = max(policy.nodes, policy.depth)
        drafter, policy = Repeater(drafter.options, target.spec), Direct(size, size)
        lengths = (0, 1, 2, 4, 8, size)
    if isinstance(policy, Fitting):
        policy, lengths = Chain(length=min(policy.nodes, TREE_SIZES[-1])), TREE_SIZES
    base = sampling if sampling is not None else Sampling()
    batch = min(batch, len(prompts))
    lengths = sorted({0, *(k for k in lengths if k <= policy.depth), policy.depth})
    probes = {
        k: FixedLength(CostTable({}, {}, "", "", batch), fixed=k, every=every) for k in lengths
    }
    half = max(4, rounds // 2) * (2 if every > 1 else 1)
    if target.device.type == "cuda":
        half += RECORDING
    for _ in range(2):
        for k, probe in probes.items():
            limit = half + k if is_wrong else half * (k + 1)
            wanted = Sampling(
                temperature=base.temperature, seed=base.seed, max_new_tokens=limit, ignore_eos=True
            )
            requests = [Request(tuple(p), wanted) for p in list(prompts)[:batch]]
            Engine(target, drafter, policy, "auto", num_slots=batch, chooser=probe).run(requests)
    reads = [each for k, probe in probes.items() if k for each in probe.reads]
    return CostTable(
        {k: _usual(p.draft_seconds) for k, p in probes.items()},
        {k: _usual(p.verify_seconds) for k, p in probes.items()},
        str(target.device),
        target.dtype_name,
        batch,
        _team_reads(target, team) if isinstance(given, Switch) else _usual_read(reads),
    )


def _team_reads(target: Target, team: Drafter) -> float:
    """Seconds in which a team reads a position of a prompt: before the first draft, of any arm,
    with nothing that it would have to listen to, as `auto` drafts first."""
    length = min(READ, target.spec.max_positions // 2)
    [prompt], found = _counting(target, 1, length), []
    for _ in range(READINGS):
        engine = Engine(target, team, Switch("ucb", length=1, nodes=1, lengths=(1,)))
        assert isinstance(engine.policy, Switch)
        engine.policy.control.is_listening = False
        engine.run([Request(tuple(prompt), Sampling(max_new_tokens=6, ignore_eos=True))])
        found.append(engine.catch_up_seconds / length)
    return median(found)


def measure_batch_costs(
    target: Target,
    drafter: Drafter,
    policy: Policy,
    most: int,
    *,
    rounds: int = 8,
    context: int = 32,
    sampling: Sampling | None = None,
) -> BatchCosts:
    """The cost table of the pair at 1, 2, 4, ... and `most` rows, for batch policies. Lengths that
    a drafter was too silent to reach are as dear as those of one that is never silent."""
    sizes = batch_sizes(most)
    repeater = Repeater(drafter.options, target.spec)
    chain = Direct(policy.depth, policy.depth)

    def measure(size: int, pair: tuple[Drafter, Policy]) -> CostTable:
        prompts, lengths = _counting(target, size, context), (0, 1, 2, 4, 6, 8, 12, 16)
        given = {"lengths": lengths, "batch": size, "rounds": rounds, "sampling": sampling}
        return measure_costs(target, *pair, prompts, **given)  # type: ignore[arg-type]

    tables = {size: measure(size, (drafter, policy)) for size in sizes}
    silent = [size for size, table in tables.items() if inf in table.verify.values()]
    loud = {size: measure(size, (repeater, chain)) for size in silent}
    return BatchCosts({size: _filled(tables[size], loud.get(size)) for size in sizes})


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, ... and `most`: the batches that are measured."""
    return sorted({*(2**i for i in range(most.bit_length()) if 2**i <= most), most})


def _filled(table: CostTable, other: CostTable | None) -> CostTable:
    """The table, and from the other one what is not known there."""
    if other is None:
        return table
    draft = {k: other.draft[k] if v == inf else v for k, v in table.draft.items()}
    verify = {k: other.verify[k] if v == inf else v for k, v in table.verify.items()}
    return replace(table, draft=draft, verify=verify)


@dataclass(frozen=True, slots=True)
class Equipped:
    """A policy and, for policies of one drafter, what chooses its lengths."""

    policy: Policy | None
    chooser: LengthChooser | None


def equip(policy: Policy | None, costs: CostTable | None) -> Equipped:
    """Let measured costs decide: a switch takes them itself, trees that can be are fitted to them
    and drafted whole or not at all, others get a chooser of lengths."""
    if costs is None or policy is None:
        return Equipped(policy, None)
    if isinstance(policy, Switch):
        return Equipped(replace(policy, costs=costs), None)
    if isinstance(policy, Fitting):
        prices = TreeCosts.of(costs)
        fitted = policy.fitted(prices)
        return Equipped(fitted, LengthChooser(whole_tree(fitted, prices, costs)))
    return Equipped(policy, LengthChooser(costs))


def whole_tree(policy: Policy, prices: TreeCosts, costs: CostTable) -> CostTable:
    """The table of a choice between that tree and none."""
    start, depth = costs.draft.get(0, 0.0), policy.depth
    return replace(
        costs,
        draft={0: start, depth: start + depth * prices.step},
        verify={0: prices.verify_seconds(0), depth: prices.verify_seconds(policy.nodes)},
    )


def fitted_sizes(policy: Policy | None, equipped: Policy | None) -> dict[str, Any]:
    """The sizes, depths or thresholds of the policy that `equip` sets by measured costs, as they
    are now; empty where it sets none."""
    if equipped is policy or not isinstance(policy, Fitting):
        return {}
    names = ("nodes", "length", "threshold")
    return {name: getattr(equipped, name) for name in names if hasattr(equipped, name)}


class Repeater(Drafter):
    """Drafts the newest token over and over: chains of any length for timing."""

    family = "repeater"

    def open(self, space: Space) -> DraftState:
        return _Repeating()


class _Repeating(DraftState):
    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None: ...

    def propose(self, view: RoundView, budget: Budget) -> DraftTree:
        token_BN = view.root_B[:, None].repeat(1, min(budget.nodes, budget.depth))
        return chain_tree(token_BN, torch.ones_like(token_BN, dtype=torch.bool), NodeKind.POINT)

    def observe(self, outcome: Outcome) -> None: ...


def _counting(target: Target, rows: int, length: int) -> list[list[int]]:
    """Prompts that every target can read: ids counted off, by another step in each row."""
    steps_RN = torch.arange(1, rows + 1)[:, None] * torch.arange(1, length + 1)
    found: list[list[int]] = (steps_RN % target.spec.vocab_size).tolist()
    return found


def _usual_read(reads: Sequence[tuple[int, float]]) -> float:
    """Per position, of so many that were read in that time each; 0 where nothing had to be read."""
    each = [seconds / max(missed, FEW_POSITIONS) for missed, seconds in reads]
    return _usual(each) if reads else 0.0


def _usual(values: Sequence[float]) -> float:
    """The lower quartile: what else runs on the machine makes rounds dearer, never cheaper."""
    return sorted(values)[len(values) // 4] if values else inf
