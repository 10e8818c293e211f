"""What the idea of a self-speculating system is worth: its drafter with and without it.

A study is a list of arms, drafters in greedy chains of five tokens without a stop rule (PPD: as its
recipe serves, or with other rows a round; K-Forcing: at temperature 1, beside other ways to train
it), on the same held-out prompts of the embedded target.
Where an arm is trained or searched for, the study is run for several seeds, which make other
batches of the same rows (searches: other texts). Printed of each arm: acceptance of the first token
and tokens per round with their standard errors over prompts, tokens per round less those of the
study's first arm (or of the arm that is named), and what the system says of itself (layers run,
bytes kept), seed by seed. Differences are paired over prompts, each prompt's figures being means
over seeds; they are `level` within two standard errors, or where seeds disagree about the sign.
In the studies of PRICED, arms draft with unequal parts of the target, or stop at unequal lengths.
They are compared by tokens a forward pass instead: a drafted token costs the share of the target's
attentions and MLPs that it ran through, and what the drafter adds of its own.
Arms are written to OUT/STUDY-SEED.json as they are measured; run again, it goes on with what is
missing.

    python benchmarks/self_ablations.py --study calm [--out runs/self] [--prompts 40] [--tokens 48]
    python benchmarks/self_ablations.py --study ppd --seeds 2
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from ablations import compare
from quality import write
from self_speculation import SEARCHED, package
from torch import Tensor

from specctl import load_drafter, load_target
from specctl.core.drafter import Drafter, DraftState, Outcome, RoundView, Space
from specctl.drafters import family
from specctl.drafters.self_speculation.calm import CalmState
from specctl.drafters.self_speculation.quantspec import QuantSpecState
from specctl.drafters.self_speculation.skip_layers import SkipLayersOptions
from specctl.drafters.states.borrowed_state import BorrowedState
from specctl.drafters.tokens.ppd import PpdState
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.measure.stats import add_counts, shares
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts

CHAIN = {"policy": "chain", "length": 5}


@dataclass(frozen=True, slots=True)
class Arm:
    """A drafter. `context`: every prompt follows so many held-out tokens in all; `trained`: its
    weights and options, but for those given here, are those of OUT/runs/TRAINED-SEED/package, which
    is trained now if it is not there (by RECIPE with `sets` in it; None: by the recipe of that
    name); `changed`: it drafts for that run's target, which learned, too. Sampled at `heat` under
    `rule`. `beside`: the arm that it is compared with (None: the study's first). `draws`: the
    attentions and MLPs that are skipped are drawn at random instead, so many times, as many of each
    as `trained` skips. `own`: layers of the drafter's own. `measures`: chances of PPD's guesses are
    those of this drafter, on other held-out prompts."""

    name: str
    family: str
    options: dict[str, Any] = field(default_factory=dict)
    context: int | None = None
    trained: str | None = None
    changed: str | None = None
    serve: dict[str, Any] = field(default_factory=lambda: CHAIN)
    recipe: str | None = None
    sets: tuple[str, ...] = ()
    heat: float = 0.0
    rule: str = "auto"
    beside: str | None = None
    draws: int = 0
    own: int = 0
    measures: bool = False


def calm() -> Iterator[Arm]:
    """Thresholds, and every token at one exit."""
    exits = (4, 5, 6, 7)
    yield Arm("threshold 0.5", "calm", {"exits": exits, "threshold": 0.5})
    for threshold in (0.1, 0.3, 0.7, 0.9, 1.0):
        yield Arm(f"threshold {threshold}", "calm", {"exits": exits, "threshold": threshold})
    yield Arm("0.5, no decay", "calm", {"exits": exits, "threshold": 0.5, "decay": None})
    for threshold in (0.94, 0.96, 0.98):
        options = {"exits": exits, "measure": "state", "threshold": threshold, "decay": None}
        yield Arm(f"state {threshold}", "calm", options)
    for layers in exits:
        yield Arm(f"all leave at {layers}", "calm", {"exits": (layers,)})


def quantspec() -> Iterator[Arm]:
    """Lengths of the text, and what is rounded."""
    for context in (512, 64, 256, 960):
        both = {"kv_bits": 4}
        yield Arm(f"weights and cache, {context} tokens before", "quantspec", both, context)
    for name, options in {
        "weights alone": {"kv_bits": 16},
        "cache alone": {"kv_bits": 4, "weight_bits": 16},
        "cache alone, one group in full": {"kv_bits": 4, "weight_bits": 16, "recent": 1},
        "cache alone, nothing in full": {"kv_bits": 4, "weight_bits": 16, "recent": 0},
        "both, nothing in full": {"kv_bits": 4, "recent": 0},
        "both, cache of 8 bits": {"kv_bits": 8},
    }.items():
        yield Arm(f"{name}, 512 before", "quantspec", options, 512)


def easyspec() -> Iterator[Arm]:
    """Sizes of a group, with and without exact keys of the answer."""
    for group in (4, 1, 2, 3, 7):
        yield Arm(f"groups of {group}", "easyspec", {"group": group})
    for group in (2, 4):
        options = {"group": group, "calibrate": False}
        yield Arm(f"groups of {group}, not calibrated", "easyspec", options)


def ppd() -> Iterator[Arm]:
    """Rows a round; as many prompt tokens behind every token as have room; one guess a place; and
    prompt tokens that have learned nothing."""

    def rows(nodes: int) -> dict[str, Any]:
        return {"policy": "direct", "length": 3, "nodes": nodes}

    yield Arm("24 rows", "ppd", {}, trained="ppd", serve=rows(24))
    yield Arm("24 rows, measured chances", "ppd", {}, trained="ppd", serve=rows(24), measures=True)
    for nodes in (4, 8, 12, 16, 48):
        yield Arm(f"{nodes} rows", "ppd", {}, trained="ppd", serve=rows(nodes))
    for nodes in (24, 12, 48):
        for behind in (1, 2, 3):
            name, even = f"{behind} behind each, {nodes} rows", {"behind_each": behind}
            planned, serve = f"{nodes} rows", rows(nodes)
            yield Arm(name, "ppd", even, trained="ppd", serve=serve, beside=planned)
    chain = {"chances": ((0.3,), (0.2,), (0.15,))}
    yield Arm("one guess a place, 24 rows", "ppd", chain, trained="ppd", serve=rows(24))
    yield Arm("untrained, 24 rows", "ppd", {}, serve=rows(24))


def k_forcing() -> Iterator[Arm]:
    """Temperature 1: the noise shared, hidden, or kept from the slots; another way to train."""
    name, serve = "k-forcing", {"policy": "direct", "length": 5}

    def arm(title: str, run: str = name, rule: str = "inverse-cdf", **more: Any) -> Arm:
        options = {"noise": "constant"} if run == "kf-still" else {}
        return Arm(title, name, options, None, run, None, serve, name, rule=rule, **more)

    yield arm("noise shared", heat=1.0)
    never = ("drafter.options.noise=constant",)
    yield arm("trained without noise", "kf-still", heat=1.0, sets=never)
    once = ("drafter.options.progressive=false",)
    yield arm("all slots at once", "kf-once", heat=1.0, sets=once)
    yield arm("noise not shared (rule target-only)", rule="target-only", heat=1.0)
    yield arm("greedy", heat=0.0)


def sdsat() -> Iterator[Arm]:
    """Look-ahead tokens and target, each as it learned with the other and without."""
    serve = {"policy": "chain", "length": 3}
    alike = ("target.dtype=float32",)  # as sdsat has it: both learn from the same rows

    def arm(name: str, trained: str, changed: str | None) -> Arm:
        return Arm(name, "pass", {}, None, trained, changed, serve, sets=alike)

    yield arm("tokens and target", "sdsat", "sdsat")
    yield arm("tokens alone, as pass", "pass", None)
    yield arm("tokens of pass, target of sdsat", "pass", "sdsat")
    yield arm("tokens of sdsat, target as it was", "sdsat", None)


def lexical_unit() -> Iterator[Arm]:
    """Pads and target, verified and taken from a probability on; other ways to train."""
    name, serve = "lexical-unit", {"policy": "direct", "length": 3, "nodes": 15}

    def arm(title: str, run: str | None = name, keep: float | None = None) -> Arm:
        everywhere = ("drafter.options.unit=0",) if run == "lu-everywhere" else ()
        return Arm(title, name, {"keep": keep}, None, run, run, serve, name, everywhere)

    for run, title in {
        name: "",
        None: ", untrained",
        "lu-everywhere": ", learned everywhere",
    }.items():
        yield arm(f"verified{title}", run)
        for keep in (0.9, 0.7, 0.5, 0.3):
            yield arm(f"kept from {keep}{title}", run, keep)


def draft_verify() -> Iterator[Arm]:
    """Sets of as many attentions and MLPs as the search leaves out, searched for and drawn."""
    name = "draft-verify"
    yield Arm("searched", "skip-layers", {}, trained=name)
    yield Arm("drawn at random", "skip-layers", {}, trained=name, draws=5)


def swift() -> Iterator[Arm]:
    """Half of the sub-layers between first and last layer, found while serving. Ask for 256 tokens,
    as the search needs an answer to learn from."""
    for name, more in {
        "search in every answer": {},
        "no search": {"enough": 1e-9},  # over when the first set has its score
        "one search for all answers": {"scope": "process"},
        "a set tried after every token": {"every": 1},
    }.items():
        yield Arm(name, "swift", {"ratio": 0.5, **more})


def unified_skip() -> Iterator[Arm]:
    """As many layers of eight, chosen in other ways: evenly spread, a block in the middle left out,
    the block behind the first one left out, and the first ones alone (an early exit)."""
    for count in (4, 5, 6):
        first, out = f"{count} layers, evenly spread", 8 - count
        yield Arm(first, "skip-layers", {"keep": count / 8}, beside=first)
        for name, start in (
            ("block in the middle", (count + 1) // 2),
            ("block behind the first", 1),
        ):
            block = tuple(range(start, start + out))
            skipped = {"skip_attention": block, "skip_mlp": block}
            yield Arm(f"{count} layers, {name} left out", "skip-layers", skipped, beside=first)
        yield Arm(f"{count} layers, the first ones", "layer-skip", {"layers": count}, beside=first)


def schedules() -> Iterator[Arm]:
    """Fewer layers for every further token, beside four layers for each, lowest and uppermost ones
    of the same kinds: in chains of five (6, 5, 4, 3, 2 layers are 20, too), and as the recipes
    serve."""
    stopped = {"policy": "chain", "length": 4, "stop": "draft-verify", "threshold": 0.6}
    recipes = {
        "skip-decode": {"schedule": "skip-decode"},
        "d3": {"schedule": "d3", "alpha": 0.85},
    }
    falls = {"skip-decode": ((0.75, 0.25), (0.625, 0.375)), "d3": ((0.75, 0.375), (0.625, 0.375))}
    for name, options in recipes.items():
        for how, serve in (("", CHAIN), (", served", stopped)):
            equal = f"{name}, 4 for all{how}"
            for share in (0.5, 0.375, 0.625, 0.75):
                same = {**options, "most": share, "least": share}
                title = f"{name}, {round(8 * share)} for all{how}"
                yield Arm(title, "depth-decay", same, serve=serve, beside=equal)
            for most, least in falls[name]:
                falling = {**options, "most": most, "least": least}
                title = f"{name}, {round(8 * most)} to {round(8 * least)}{how}"
                yield Arm(title, "depth-decay", falling, serve=serve, beside=equal)


def early_exits() -> Iterator[Arm]:
    """Exit and length by DEL beside fixed ones, and FREE's threshold beside fixed lengths: of the
    embedded target, and of the one that learned to be read early."""
    for run, what in (("layer-skip-trained", "early exits"), (None, "as it was")):

        def arm(name: str, family: str, first: str, serve: Any, **options: Any) -> Arm:
            title = f"{name} ({what})"  # noqa: B023
            return Arm(title, family, options, changed=run, serve=serve, beside=first)  # noqa: B023

        chosen, free = f"del ({what})", f"free, 5 layers ({what})"
        yield arm("del", "del", chosen, {"policy": "chain", "length": 8})
        stopped = {"policy": "chain", "length": 8, "stop": "beta-mixture"}
        yield arm("free, 5 layers", "layer-skip", free, stopped, layers=5)
        for layers in (3, 4, 5, 6, 7):
            for length in (1, 2, 3, 4):
                fixed = {"policy": "chain", "length": length}
                beside = free if layers == 5 else chosen
                yield arm(f"{layers} layers, {length}", "layer-skip", beside, fixed, layers=layers)


def eesd() -> Iterator[Arm]:
    """Thompson sampling ends drafts, or a length does, or a threshold of confidence."""

    def arm(name: str, **serve: Any) -> Arm:
        return Arm(name, "eesd", {}, None, "eesd", None, {"policy": "chain", **serve}, own=1)

    yield arm("thompson", length=8, stop="thompson")
    for length in (1, 2, 3, 4, 5, 8):
        yield arm(f"length {length}", length=length)
    for threshold in (0.2, 0.4, 0.6, 0.8):
        yield arm(f"confidence {threshold}", length=8, confidence=threshold)


def unverified() -> Iterator[Arm]:
    """Methods that answer by themselves: tokens taken unverified from a probability on. Beside
    each, the same as a drafter."""
    stopped = {"policy": "chain", "length": 8}
    arms: dict[str, tuple[str, dict[str, Any]]] = {
        "free, 5 layers": ("layer-skip", {"layers": 5}),
        "calm": ("calm", {"exits": (4, 5, 6, 7), "threshold": 0.9}),
        "unified-skip, 6 layers": ("skip-layers", {"keep": 0.75}),
        "skip-decode, 6 to 4 layers": ("depth-decay", {"most": 0.75, "least": 0.5}),
        "d3, 6 to 4 layers": ("depth-decay", {"schedule": "d3", "most": 0.75, "least": 0.5}),
    }
    for name, (method, options) in arms.items():
        yield Arm(name, method, options, serve={**stopped, "confidence": 0.7}, beside=name)
        for least in (0.9, 0.7, 0.5, 0.0):
            # the draft ends behind the first token that is not taken
            serve = {**stopped, "confidence": least} if least else stopped
            taken = {**options, "unverified": least}
            yield Arm(f"{name}, from {least}", method, taken, serve=serve, beside=name)


STUDIES: dict[str, Callable[[], Iterator[Arm]]] = {
    "calm": calm,
    "quantspec": quantspec,
    "easyspec": easyspec,
    "ppd": ppd,
    "k-forcing": k_forcing,
    "sdsat": sdsat,
    "lexical-unit": lexical_unit,
    "draft-verify": draft_verify,
    "swift": swift,
    "unified-skip": unified_skip,
    "schedules": schedules,
    "early-exits": early_exits,
    "eesd": eesd,
    "unverified": unverified,
}
PRICED = ("schedules", "early-exits", "eesd", "unverified")


@dataclass(slots=True)
class Rounds:
    """Of every round of a prompt: tokens answered before it, and whether its first was accepted;
    and the forward passes of the target that its drafts cost, with so many layers of its own."""

    own: int = 0
    seen: dict[tuple[int, ...], list[tuple[int, bool]]] = field(default_factory=dict)
    spent: dict[tuple[int, ...], float] = field(default_factory=dict)

    def watch(self, state: DraftState) -> None:
        started, observed = state.start, state.observe
        prompts: dict[int, tuple[int, ...]] = {}

        def start(slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
            prompts[slot] = tuple(tokens)
            started(slot, tokens, taps)

        def observe(outcome: Outcome) -> None:
            view = outcome.view
            for slot, drafted in zip(
                view.slots, outcome.tree.valid_BN.sum(1).tolist(), strict=True
            ):
                cost = self.spent.get(prompts[slot], 0.0) + self.cost(state, slot, drafted)
                self.spent[prompts[slot]] = cost
            rows = zip(view.slots, view.kept_len_B.tolist(), outcome.num_accepted, strict=True)
            for slot, known, accepted in rows:
                rounds = self.seen.setdefault(prompts[slot], [])
                rounds.append((known - len(prompts[slot]), accepted > 0))
            observed(outcome)

        state.start, state.observe = start, observe  # type: ignore[method-assign]

    def cost(self, state: DraftState, slot: int, drafted: int) -> float:
        """Of a draft by layers of the target: a token is read by the layers that are asked for its
        place."""
        if not isinstance(state, BorrowedState):
            return 0.0
        layers = state.lm.spec.num_layers
        shares = [state.parts_of(slot, place).share(layers) for place in range(drafted)]
        return sum(shares) + drafted * self.own / layers

    def by_third(self, tokens: int) -> str:
        """Acceptance of first tokens in the first and the last third of the answers."""
        rows = []
        for rounds in self.seen.values():
            early = [float(ok) for at, ok in rounds if at < tokens / 3]
            late = [float(ok) for at, ok in rounds if at >= 2 * tokens / 3]
            if early and late:
                rows.append((mean(early), mean(late)))
        first, last, less = (
            spread([pick(row) for row in rows])
            for pick in (lambda r: r[0], lambda r: r[1], lambda r: r[1] - r[0])
        )
        return f"alpha by third of the answer {first}, {last}: {less}"


def drafter_of(
    target: Target, arm: Arm, rounds: Rounds, folder: Path | None
) -> tuple[Drafter, list[DraftState]]:
    """The drafter, with the weights of a package where its arm is trained, and the states that it
    opens."""
    method, states = family(arm.family), list[DraftState]()
    if folder is None:
        drafter = method.build(method.options(**arm.options), target.spec, None)
    else:
        found = load_drafter(str(folder), own_target(folder.parent))
        options = replace(found.options, **arm.options)
        drafter = method.build(options, target.spec, found.vocab)
        drafter.load_tensors(found.tensors())
    opened = drafter.open

    def recorded(space: Space) -> DraftState:
        states.append(opened(space))
        rounds.watch(states[-1])
        return states[-1]

    drafter.open = recorded  # type: ignore[method-assign]
    return drafter, states


def package_of(arm: Arm, seed: int, args: argparse.Namespace) -> Path | None:
    """The package of an arm with weights, trained now if it is not there, on the rows of the
    study's first."""
    if arm.trained is None:
        return None
    first = next(STUDIES[args.study]())
    is_search = arm.trained in SEARCHED
    rows = None if is_search else f"{first.trained or first.changed}-0"
    sets = (f"{'data' if is_search else 'train'}.seed={seed}", *arm.sets)
    return package(arm.recipe or arm.trained, args.out, f"{arm.trained}-{seed}", sets, rows)


def chances_of(
    target: Target, arm: Arm, folder: Path | None, args: argparse.Namespace
) -> tuple[tuple[float, ...], ...]:
    """How often the guess of each level and rank is the token that the target says there, where
    those of the levels before were among the ranks; over prompts that nothing is measured on."""
    drafter, states = drafter_of(target, arm, Rounds(), folder)
    guessed, opened = list[tuple[tuple[int, ...], list[list[int]]]](), drafter.open

    def recorded(space: Space) -> DraftState:
        state = opened(space)
        assert isinstance(state, PpdState)
        guesses_of = state._guesses

        def guesses(view: RoundView) -> Tensor:
            best_BWC = guesses_of(view)
            for tokens, slot, best in zip(view.tokens, view.slots, best_BWC.tolist(), strict=True):
                guessed.append((tuple(tokens), best[: int(state.level_Z[slot])]))
            return best_BWC

        state._guesses = guesses  # type: ignore[method-assign]
        return state

    drafter.open = recorded  # type: ignore[method-assign]
    engine = Engine(target, drafter, make_policy(arm.serve), num_slots=8)
    prompts = prompts_of(target, 2 * args.prompts, None)[args.prompts :]
    sampling = Sampling(0.0, max_new_tokens=args.tokens, ignore_eos=True)
    done = engine.run([Request(one, sampling) for one in prompts])
    texts = [(*prompt, *row.tokens) for prompt, row in zip(prompts, done, strict=True)]
    (state,) = states
    assert isinstance(state, PpdState)
    visits, hits = [0] * len(state.chances), [[0] * state.num_ranks for _ in state.chances]
    for known, levels in guessed:
        text = next(text for text in texts if text[: len(known)] == known)
        for level, (ranks, token) in enumerate(zip(levels, text[len(known) :], strict=False)):
            visits[level] += 1
            if token not in ranks:
                break
            hits[level][ranks.index(token)] += 1
    counts = zip(hits, visits, strict=True)
    return tuple(tuple((hit + 0.1) / (seen + 1) for hit in row) for row, seen in counts)


def own_target(run: Path) -> Target:
    """The target of a run: the one it changed, or the embedded one."""
    changed = run / "target"
    return load_target(str(changed) if changed.exists() else "tiny", dtype="float32")


def prompts_of(target: Target, count: int, context: int | None) -> list[tuple[int, ...]]:
    """Held-out prompts, each behind those before it where a context is asked for."""
    ids = [prompt.ids for prompt in heldout_prompts(target, 200)]
    if context is None:
        return ids[:count]
    found = []
    for i in range(count):
        text, at = list[int](), i
        while len(text) < context:
            text, at = [*ids[at], *text], (at - 1) % len(ids)
        found.append(tuple(text[-context:]))
    return found


def drawn(arm: Arm, skipped: SkipLayersOptions, layers: int, seed: int) -> Iterator[Arm]:
    """Arms that leave out as many attentions and MLPs as a search did, never of the first layer."""
    coins, upper = random.Random(seed), range(1, layers)
    for _ in range(arm.draws):
        out = {
            name: tuple(sorted(coins.sample(upper, len(getattr(skipped, name) or ()))))
            for name in ("skip_attention", "skip_mlp")
        }
        yield replace(arm, options=out, trained=None, draws=0)


def measure(target: Target, arm: Arm, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """What an arm was measured to be, by prompt; means over draws, where it is drawn."""
    if not arm.draws:
        return once(target, arm, seed, args)
    skipped = load_drafter(str(package_of(arm, seed, args)), target).options
    arms = drawn(arm, skipped, target.spec.num_layers, seed)
    found = [once(target, each, seed, args) for each in arms]
    figures = {key: pooled([one[key] for one in found]) for key in ("tau", "alpha", "rate")}
    each_tau = " ".join(f"{mean(one['tau']):.2f}" for one in found)
    return {**figures, "said": f"tau of each {each_tau}"}


def once(target: Target, arm: Arm, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per round, tokens per forward pass and acceptance of the first token, by prompt."""
    rounds = Rounds(arm.own)
    folder = package_of(arm, seed, args)
    if arm.changed is not None:
        package_of(replace(arm, trained=arm.changed), seed, args)
        target = own_target(args.out / "runs" / f"{arm.changed}-{seed}")
    if arm.measures:
        arm = replace(arm, options={"chances": chances_of(target, arm, folder, args)})
    drafter, states = drafter_of(target, arm, rounds, folder)
    engine = Engine(target, drafter, make_policy(arm.serve), arm.rule, num_slots=8)
    sampling = Sampling(arm.heat, max_new_tokens=args.tokens, ignore_eos=True)
    prompts = prompts_of(target, args.prompts, arm.context)
    requests = [
        Request(one, replace(sampling, seed=1000 * seed + i)) for i, one in enumerate(prompts)
    ]
    done = engine.run(requests)
    tau = [row.stats.tokens / row.stats.rounds for row in done]
    if arm.family == "k-forcing":
        tested = add_counts(row.stats.tested_at for row in done)
        alpha = shares(add_counts(row.stats.accepted_at for row in done), tested)
        by_place = " ".join(f"{one:.2f}" for one in alpha)
        return {
            "tau": tau,
            "alpha": [row.stats.accepted_at[0] / row.stats.tested_at[0] for row in done],
            "said": f"alpha by place {by_place}; {mean(tau) / 2:.2f} tokens a forward",
        }
    state = states[-1]  # of CALM, what was spent is that of its deepest exit
    of_deepest = state.mean_exit / state.exits[-1] if isinstance(state, CalmState) else 1.0
    found = {
        "tau": tau,
        "alpha": [
            sum(row.stats.accepted_at[:1]) / max(1, sum(row.stats.tested_at[:1])) for row in done
        ],
        "rate": [
            row.stats.tokens / (row.stats.rounds + of_deepest * rounds.spent.get(prompt, 0.0))
            for row, prompt in zip(done, prompts, strict=True)
        ],
    }
    if arm.measures:
        rows = "; ".join(" ".join(f"{one:.3f}" for one in row) for row in arm.options["chances"])
        return {**found, "said": f"chances {rows}"}
    if not drafter.lossless:
        plain = Engine(target, None, None, num_slots=8).run(requests)
        pairs = zip(done, plain, strict=True)
        return {**found, "said": as_plain([(one.tokens, two.tokens) for one, two in pairs])}
    return {**found, "said": said(states[-1]) or rounds.by_third(args.tokens)}


def as_plain(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str:
    """How much of approximate answers is plain decoding's, and how much before they part."""
    same = [mean([float(a == b) for a, b in zip(*pair, strict=True)]) for pair in pairs]
    parts = [
        next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0]))
        / len(pair[0])
        for pair in pairs
    ]
    return f"as plain decoding: {spread(same)} of the tokens, {spread(parts)} before they part"


def said(state: DraftState) -> str:
    if isinstance(state, CalmState):
        return f"{state.mean_exit:.2f} layers a token"
    if isinstance(state, QuantSpecState):
        return f"{state.kv_bytes() / state.kv.num_slots / 1024:,.0f} KiB of cache a row"
    return ""


def spread(values: Sequence[float]) -> str:
    return f"{mean(values):.2f} +- {stdev(values) / len(values) ** 0.5:.2f}"


def pooled(seeds: Sequence[Sequence[float]]) -> list[float]:
    """Means over seeds, prompt by prompt or place by place."""
    return [mean(each) for each in zip(*seeds, strict=True)]


def above(pairs: Sequence[tuple[Sequence[float], Sequence[float]]], digits: int = 2) -> str:
    """What the first of each seed's pair has above the second, with its standard error over
    prompts: more, less, or level."""
    found = compare(pairs)
    word = {"reproduced": "more", "opposite": "less"}.get(found["verdict"], "level")
    return f"{found['difference']:+.{digits}f} +- {found['error']:.{digits}f}, {word}"


def line(
    arm: Arm, arms: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], by: str
) -> str:
    """The row of an arm, its seeds averaged prompt by prompt; `others` are those of `beside`, which
    it is compared with `by` a figure."""
    keys = ("alpha", "tau", "rate") if by == "rate" else ("alpha", "tau")
    figures = " | ".join(spread(pooled([one[key] for one in arms])) for key in keys)
    less = above([(a[by], b[by]) for a, b in zip(arms, others, strict=True)])
    less += f" ({arm.beside})" if arm.beside else ""
    own = "; ".join(dict.fromkeys(one["said"] for one in arms))
    return f"| {arm.name} | {figures} | {less} | {own} |"


def seeds_of(arms: Sequence[Arm], seeds: int) -> range:
    """Those of a study: one where nothing is trained."""
    return range(seeds if any(arm.trained or arm.changed for arm in arms) else 1)


def measured(
    target: Target, arms: Sequence[Arm], seed: int, args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """The figures of every arm for a seed, those that are missing measured now."""
    file = args.out / f"{args.study}-{seed}.json"
    found: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    for arm in arms:
        if arm.name not in found:
            found[arm.name] = measure(target, arm, seed, args)
            write(file, found)
            print(f"{arm.name}, seed {seed}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--study", choices=STUDIES, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/self"))
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--seeds", type=int, default=2, help="of training; else one run")
    args = parser.parse_args()
    target, arms = load_target("tiny", dtype="float32"), list(STUDIES[args.study]())
    seeds = [measured(target, arms, seed, args) for seed in seeds_of(arms, args.seeds)]
    by = "rate" if args.study in PRICED else "tau"
    priced = "tokens a forward pass | " if by == "rate" else ""
    print(f"| arm | alpha of the first token | tau | {priced}less the first arm's | |")
    print("|---" * (6 if priced else 5) + "|")
    for arm in arms:
        other = arm.beside or arms[0].name
        print(line(arm, *([found[name] for found in seeds] for name in (arm.name, other)), by))


if __name__ == "__main__":
    main()
