"""The last step of the quickstart: the same prompts decoded plainly and with the drafter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.cli.app.console import Console

if TYPE_CHECKING:
    from specctl.api.drafting import LoadedDraft
    from specctl.runtime.generate import Generated
    from specctl.runtime.measure.reporter import Advance
    from specctl.runtime.policies.length import CostTable
    from specctl.runtime.sampling.sampling import Sampling
    from specctl.runtime.target.target import Target

COMPARE_PROMPTS, COMPARE_TOKENS = 12, 64


@dataclass(frozen=True, slots=True)
class Pair:
    """The same prompts decoded plainly and with the drafter."""

    setting: str
    target: str
    plain: Generated
    fast: Generated

    @property
    def speedup(self) -> float:
        return self.fast.stats.tokens_per_second / max(self.plain.stats.tokens_per_second, 1e-9)

    @property
    def identical(self) -> bool | None:
        if self.setting != "greedy":
            return None
        pairs = zip(self.plain.outputs, self.fast.outputs, strict=True)
        return all(a.token_ids == b.token_ids for a, b in pairs)

    def to_json(self) -> dict[str, Any]:
        return {
            "setting": self.setting,
            "target": self.target,
            "plain": self.plain.stats.to_json(),
            "speculative": self.fast.stats.to_json(),
            "speedup": round(self.speedup, 3),
            "identical": self.identical,
        }


def compare(console: Console, model: Target, package: Path, inflate: str | None) -> dict[str, Any]:
    """Held-out prompts, greedy and at T = 0.8, plain and speculative; and at a larger cost."""
    targets: list[tuple[Target, int, tuple[float, ...]]] = [(model, COMPARE_PROMPTS, (0.0, 0.8))]
    if inflate is not None:
        from specctl.cli.options.target_choice import TargetChoice

        console.say(f"and the same target at the cost of {inflate} parameters")
        large = TargetChoice(model.name, inflate=inflate).load(console)
        targets.append((large, max(1, COMPARE_PROMPTS // 3), (0.0,)))
    pairs: list[Pair] = []
    with console.task("compare", 2 * sum(len(heats) for *_, heats in targets), "runs") as advance:
        for target, count, heats in targets:
            pairs += _pairs(target, package, count, heats, advance)
    _show(console, pairs)
    dtypes = {str(t.dtype).removeprefix("torch.") for t, *_ in targets if t.inflated}
    if "bfloat16" in dtypes and any(p.identical is False for p in pairs):
        console.out("in bfloat16 near-ties may flip; --dtype float32 gives token identity")
    console.out("lossless check passed")
    return {"lossless": True, "comparisons": [pair.to_json() for pair in pairs]}


def _pairs(
    target: Target,
    package: Path,
    count: int,
    heats: tuple[float, ...],
    advance: Advance,
) -> Iterator[Pair]:
    from specctl.cli.options.loading import DraftChoice
    from specctl.runtime.generate import generate
    from specctl.runtime.sampling.sampling import Sampling
    from specctl.train.data.heldout import heldout_prompts

    draft = DraftChoice(str(package)).load(target)
    prompts = [p.ids for p in heldout_prompts(target, count)]
    name = target.name + (f" as {target.inflated}" if target.inflated else "")
    for heat in heats:
        setting = f"T={heat:g}" if heat else "greedy"
        costs = draft.costs(target, prompts, sampled=heat > 0, measure=True)
        sampling = Sampling(temperature=heat, max_new_tokens=COMPARE_TOKENS)
        generate(target, prompts[:1], sampling=sampling)  # pays for allocations
        plain = generate(target, prompts, sampling=sampling)
        advance(1, f"{name} {setting} plain")
        _speculate(target, draft, prompts[:1], sampling, costs)
        fast = _speculate(target, draft, prompts, sampling, costs)
        advance(1, f"{name} {setting} speculative")
        yield Pair(setting, name, plain, fast)


def _speculate(
    target: Target,
    draft: LoadedDraft,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    costs: CostTable | None,
) -> Generated:
    """With the drafter, its lengths chosen by what a round was measured to cost."""
    from specctl.runtime.generate import generate
    from specctl.runtime.measure.cost import equip

    chosen = equip(draft.policy, costs)
    return generate(
        target,
        prompts,
        drafter=draft.drafter,
        sampling=sampling,
        policy=chosen.policy,
        rule=draft.rule,
        chooser=chosen.chooser,
    )


def _show(console: Console, pairs: list[Pair]) -> None:
    columns = (
        "target", "sampling", "tau", "accepted per position", "plain tok/s", "specctl tok/s",
        "speed-up", "identical", "repetition",
    )  # fmt: skip
    rows = [
        (
            pair.target,
            pair.setting,
            f"{pair.fast.stats.tau:.2f}",
            " ".join(f"{share:.2f}" for share in pair.fast.stats.accepted_per_position),
            f"{pair.plain.stats.tokens_per_second:.0f}",
            f"{pair.fast.stats.tokens_per_second:.0f}",
            f"{pair.speedup:.2f}",
            pair.identical,
            f"{pair.fast.stats.repetition_rate:.2f}",
        )
        for pair in pairs
    ]
    console.table(columns, rows)
