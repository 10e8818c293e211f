"""The engine against plain loops: identity, cuts, joining rows, caches."""

from __future__ import annotations

import pytest
import torch

from specctl.core.drafter import Budget, Needs, RoundSeconds, Space, StepState
from specctl.core.errors import RecipeError, SpecctlError
from specctl.core.language_model import Masks
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.generate import generate
from specctl.runtime.measure.cost import measure_costs
from specctl.runtime.measure.cost_table import CostTable
from specctl.runtime.policies import make_policy
from specctl.runtime.policies.length import FixedLength, LengthChooser
from specctl.runtime.sampling.sampling import Sampling

PROMPTS = ([3, 1, 4, 1, 5], [9, 2], [6], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4])


class RecomputeState(StepState):
    """Drafts with any language model by recomputing every prefix: cache-free, obviously right."""

    def __init__(self, lm, noise):
        self.lm, self.noise = lm, noise
        self.starts, self.ends, self.kept = [], [], {}

    def start(self, slot, tokens, taps):
        self.starts.append(slot)

    def end(self, slot):
        self.ends.append(slot)

    def observe(self, outcome):
        self.kept = outcome

    def _logits(self, rows):
        out = []
        for ids in rows:
            ids_1S = torch.tensor([ids])
            masks = self.lm.document_masks(torch.zeros_like(ids_1S))
            at = torch.arange(len(ids))[None]
            out.append(self.lm.dense(ids_1S, at, masks).logits_BTV[0, -1])
        noise = torch.Generator().manual_seed(len(rows[0]))
        return torch.stack(out) + self.noise * torch.randn(len(out), 1, generator=noise)

    def root(self, view):
        self.prefix = [list(t) for t in view.tokens]
        self.paths = [[] for _ in view.tokens]
        return self._logits(self.prefix)

    def expand(self, token_BM, parent_BM):
        rows = []
        for b, (tokens, parents) in enumerate(
            zip(token_BM.tolist(), parent_BM.tolist(), strict=True)
        ):
            known = list(self.paths[b])
            for token, parent in zip(tokens, parents, strict=True):
                path = [*(known[parent] if parent >= 0 else []), token]
                self.paths[b].append(path)
                rows.append(self._logits([self.prefix[b] + path])[0])
        return torch.stack(rows).reshape(*token_BM.shape, -1)


class RecomputeDrafter:
    """A stand-in drafter: `lm` drafts; with the target's own lm everything greedy is accepted."""

    family, module, vocab, lossless = "small-lm", None, None, True

    def __init__(self, lm, noise=0.0):
        self.lm, self.noise = lm, noise

    def needs(self):
        return Needs()

    def bind(self, borrowed):
        raise AssertionError("borrows nothing")

    def open(self, space: Space):
        self.state = RecomputeState(self.lm, self.noise)
        return self.state


def plain_greedy(target, prompt, count):
    state = RecomputeState(target.lm, 0.0)
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(state._logits([tokens])[0].argmax()))
    return tuple(tokens[len(prompt) :])


POLICIES = {
    "chain": {"policy": "chain", "length": 4},
    "static-tree": {"policy": "static-tree", "branch": (3, 2, 1)},
    "dynamic-tree": {"policy": "dynamic-tree", "length": 3, "nodes": 7, "beam": 3},
}


@pytest.fixture(scope="module")
def target(make_target):
    return make_target(num_layers=2, dtype=torch.float64)


@pytest.fixture(scope="module")
def other(make_target):
    return make_target(num_layers=1, seed=7, dtype=torch.float64)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafted_by", ["itself", "a stranger"])
def test_greedy_output_equals_a_plain_loop(target, other, policy, batch, drafted_by):
    drafter = RecomputeDrafter(target.lm if drafted_by == "itself" else other.lm)
    result = generate(
        target,
        PROMPTS,
        drafter=drafter,
        sampling=Sampling(max_new_tokens=11),
        policy=make_policy(POLICIES[policy]),
        batch=batch,
    )
    for prompt, output in zip(PROMPTS, result.outputs, strict=True):
        assert output.token_ids == plain_greedy(target, prompt, 11)
    if drafted_by == "itself":
        assert result.stats.tau > 2.4
        assert result.stats.accepted > 0


def test_plain_decoding_has_tau_one(target):
    result = generate(target, PROMPTS, sampling=Sampling(max_new_tokens=6), batch=2)
    assert result.stats.tau == 1.0
    assert result.stats.drafted == 0
    assert result.stats.tokens == 24


def test_plain_decoding_needs_one_forward_per_token(target, monkeypatch):
    forwards = []
    run = type(target.lm).run
    monkeypatch.setattr(
        type(target.lm), "run", lambda *args: (forwards.append(args[1].ids_BT.shape), run(*args))[1]
    )
    generate(target, PROMPTS[:1], sampling=Sampling(max_new_tokens=6))
    width = target.lm.run_width(1, len(PROMPTS[0]))
    assert forwards == [(1, width), *[(1, 1)] * 5]


def test_prompts_of_several_chunks_are_read_whole(target, monkeypatch):
    monkeypatch.setattr("specctl.runtime.engine.scheduler.CHUNK", 4)
    prompts = [list(range(n)) for n in (1, 4, 5, 8, 11)]
    result = generate(target, prompts, sampling=Sampling(max_new_tokens=4), batch=5)
    for prompt, output in zip(prompts, result.outputs, strict=True):
        assert output.token_ids == plain_greedy(target, prompt, 4)


@pytest.mark.parametrize("policy", POLICIES)
def test_target_only_text_depends_on_the_seed_alone(target, other, policy):
    sampling = Sampling(temperature=0.9, seed=5, max_new_tokens=9)
    plain = generate(target, PROMPTS, sampling=sampling)
    for drafter in (RecomputeDrafter(target.lm), RecomputeDrafter(other.lm)):
        for batch in (1, 3):
            spec = generate(
                target,
                PROMPTS,
                drafter=drafter,
                sampling=sampling,
                policy=make_policy(POLICIES[policy]),
                rule="target-only",
                batch=batch,
            )
            assert [o.token_ids for o in spec.outputs] == [o.token_ids for o in plain.outputs]


def test_a_drafter_equal_to_the_target_is_always_accepted_under_sampling(target):
    sampling = Sampling(temperature=1.0, max_new_tokens=16)
    for policy in ("chain", "static-tree"):
        result = generate(
            target,
            PROMPTS,
            drafter=RecomputeDrafter(target.lm),
            sampling=sampling,
            policy=make_policy(POLICIES[policy]),
        )
        assert result.stats.alpha > 0.99, policy


class Uneven(LengthChooser):
    """Every third round drafts nothing, the others one or four tokens."""

    def length(self, batch):
        self.rounds += 1
        return (0, 1, 4)[self.rounds % 3]

    def observe(self, outcome, seconds):
        pass


SHAPES = {
    **POLICIES,
    "stopped": {"policy": "chain", "length": 4, "confidence": 0.07},
    "bushy": {"policy": "dynamic-tree", "length": 4, "nodes": 4, "beam": 4},
}


@pytest.mark.parametrize("policy", SHAPES)
def test_a_position_is_tested_only_where_something_was_drafted_for_it(target, policy):
    """The target drafts for itself, so that whatever is tested is accepted: neither rounds without
    drafts, nor shorter drafts of some rows, nor the leaf of a branch count as a rejection."""
    made = generate(
        target,
        PROMPTS,
        drafter=RecomputeDrafter(target.lm),
        sampling=Sampling(max_new_tokens=24, ignore_eos=True),
        policy=make_policy(SHAPES[policy]),
        batch=3,
        chooser=Uneven(COSTS),
    )
    assert 1 < made.stats.tau < 4, "not every round drafts, and not every draft is deep"
    assert set(made.stats.accepted_per_position) == {1.0}
    assert made.stats.alpha == 1.0
    report = made.to_json()["stats"]["accepted_per_position"]
    assert report == [1.0] * len(made.stats.tested_at)


def test_eos_inside_an_accepted_run_ends_the_row(target):
    text = plain_greedy(target, PROMPTS[0], 12)
    eos = text[5]
    from dataclasses import replace

    ending = replace(target, eos_ids=(eos,))
    result = generate(
        ending,
        PROMPTS[:1],
        drafter=RecomputeDrafter(target.lm),
        sampling=Sampling(max_new_tokens=12),
        policy=make_policy({"policy": "chain", "length": 8}),
    )
    first = text.index(eos)
    assert result.outputs[0].token_ids == text[: first + 1]
    assert result.outputs[0].finish_reason == "eos"
    assert result.stats.tokens == first + 1


def test_the_limit_cuts_inside_a_round(target):
    for limit in (1, 2, 3, 7):
        result = generate(
            target,
            PROMPTS,
            drafter=RecomputeDrafter(target.lm),
            sampling=Sampling(max_new_tokens=limit),
            policy=make_policy({"policy": "chain", "length": 5}),
            batch=4,
        )
        assert {len(o.token_ids) for o in result.outputs} == {limit}
        assert {o.finish_reason for o in result.outputs} == {"length"}


def test_the_context_end_finishes_a_row(make_target):
    short = make_target(num_layers=1, max_position_embeddings=20)
    result = generate(
        short,
        [list(range(14)), [1, 2]],
        drafter=RecomputeDrafter(short.lm),
        sampling=Sampling(max_new_tokens=50),
        policy=make_policy({"policy": "chain", "length": 4}),
        batch=2,
    )
    assert [len(o.token_ids) for o in result.outputs] == [6, 18]
    assert {o.finish_reason for o in result.outputs} == {"context"}


def test_rows_join_and_leave_between_rounds(target):
    limits = [3, 17, 5, 9, 2, 11]
    prompts = [[i, i + 1] for i in range(6)]
    requests = [
        Request(tuple(p), Sampling(max_new_tokens=n)) for p, n in zip(prompts, limits, strict=True)
    ]
    drafter = RecomputeDrafter(target.lm)
    engine = Engine(target, drafter, make_policy(POLICIES["static-tree"]), num_slots=2)
    done = engine.run(requests)
    assert [c.tokens for c in done] == [
        plain_greedy(target, p, n) for p, n in zip(prompts, limits, strict=True)
    ]
    assert len(drafter.state.starts) == 6
    assert sorted(set(drafter.state.starts)) == [0, 1]


def test_the_kept_cache_equals_a_fresh_prefill_after_every_round(target, other):
    engine = Engine(
        target,
        RecomputeDrafter(other.lm, noise=0.5),
        make_policy(POLICIES["static-tree"]),
        num_slots=2,
    )
    requests = [Request(tuple(p), Sampling(max_new_tokens=12)) for p in PROMPTS[:2]]
    checked = 0

    def audit(row, new):
        nonlocal checked
        fresh = target.new_kv(1, 64)
        length = row.kept_len if row.finished is None else 0
        if length == 0:
            return
        ids = torch.tensor([row.tokens[:length]])
        start = torch.zeros(1, dtype=torch.long)
        fresh.begin((0,), start, start, length, length, 0)
        from specctl.core.forward.masks import chain_mask

        with torch.inference_mode():
            target.lm.forward(
                ids, torch.arange(length)[None], Masks(chain_mask(start, length, length)), fresh
            )
        for mine, theirs in zip(engine.reader.kv.key_ZJLE, fresh.key_ZJLE, strict=True):
            assert (mine[row.slot, :, :length] - theirs[0, :, :length]).abs().max() < 1e-9
        checked += 1

    engine.run(requests, audit)
    assert checked > 6


def test_an_illegal_rule_is_refused_before_anything_is_drafted(target):
    with pytest.raises(RecipeError, match="not lossless"):
        Engine(
            target, RecomputeDrafter(target.lm), make_policy(POLICIES["dynamic-tree"]), rule="block"
        )


def test_an_empty_prompt_and_a_foreign_token_are_refused(target):
    with pytest.raises(SpecctlError, match="empty"):
        generate(target, [[]])
    with pytest.raises(SpecctlError, match="vocabulary"):
        generate(target, [[10_000]])


def test_greedy_rule_refuses_a_temperature(target):
    with pytest.raises(RecipeError, match="greedy"):
        generate(target, [[1]], sampling=Sampling(temperature=1.0), rule="greedy")


def test_the_confidence_stop_shortens_chains_and_keeps_the_text(target, other):
    wanted = [plain_greedy(target, p, 10) for p in PROMPTS]
    drafted = []
    for confidence in (None, 0.5, 0.99):
        result = generate(
            target,
            PROMPTS,
            drafter=RecomputeDrafter(other.lm),
            sampling=Sampling(max_new_tokens=10),
            policy=make_policy({"policy": "chain", "length": 6, "confidence": confidence}),
            batch=2,
        )
        assert [o.token_ids for o in result.outputs] == wanted
        drafted.append(result.stats.drafted)
    assert drafted[0] > drafted[1] > drafted[2]


COSTS = CostTable(
    {0: 0.0, 1: 0.2, 2: 0.4, 4: 0.8}, {0: 1.0, 1: 1.05, 2: 1.1, 4: 1.2}, "cpu", "float32", 1
)


def test_the_chooser_turns_speculation_off_for_a_bad_drafter(target, other):
    chooser = LengthChooser(COSTS)
    sampling = Sampling(max_new_tokens=60)
    result = generate(
        target,
        PROMPTS[:1],
        drafter=RecomputeDrafter(other.lm, noise=5.0),
        sampling=sampling,
        policy=make_policy({"policy": "chain", "length": 4}),
        chooser=chooser,
    )
    assert chooser.rounds_off > chooser.rounds / 2
    assert result.outputs[0].token_ids == plain_greedy(target, PROMPTS[0], 60)


class OnTime(LengthChooser):
    """On a machine whose rounds take what the table says."""

    def observe(self, outcome, seconds):
        depth = outcome.tree.depth
        super().observe(outcome, RoundSeconds(COSTS.seconds(depth), 0.0, 0.0))


def test_the_chooser_drafts_long_for_a_good_drafter(target):
    chooser = OnTime(COSTS)
    generate(
        target,
        PROMPTS[:1],
        drafter=RecomputeDrafter(target.lm),
        sampling=Sampling(max_new_tokens=40),
        policy=make_policy({"policy": "chain", "length": 4}),
        chooser=chooser,
    )
    assert chooser.rounds_off == 0
    assert chooser.estimate() > 0.9


def test_a_fixed_length_probe_records_each_round(target):
    probe = FixedLength(COSTS, fixed=2)
    generate(
        target,
        PROMPTS[:1],
        drafter=RecomputeDrafter(target.lm),
        sampling=Sampling(max_new_tokens=12),
        policy=make_policy({"policy": "chain", "length": 4}),
        chooser=probe,
    )
    assert len(probe.draft_seconds) == len(probe.verify_seconds) >= 3


def test_a_probe_may_draft_now_and_then(target):
    probe = FixedLength(COSTS, fixed=2, every=4)
    made = generate(
        target,
        PROMPTS[:1],
        drafter=RecomputeDrafter(target.lm),
        sampling=Sampling(max_new_tokens=24, ignore_eos=True),
        policy=make_policy({"policy": "chain", "length": 4}),
        chooser=probe,
    )
    drafted = made.stats.rounds // 4
    assert drafted - 1 <= len(probe.draft_seconds) <= drafted, "the last one may be cut"
    assert made.stats.drafted == 2 * drafted


def test_a_budget_of_zero_decodes_plainly(target):
    assert Budget(0, 0).depth == 0
    result = generate(
        target,
        PROMPTS[:1],
        drafter=RecomputeDrafter(target.lm),
        sampling=Sampling(max_new_tokens=5),
        policy=make_policy({"policy": "chain", "length": 4}),
        chooser=FixedLength(COSTS, fixed=0),
    )
    assert result.stats.drafted == 0
    assert result.outputs[0].token_ids == plain_greedy(target, PROMPTS[0], 5)


def test_an_adaptive_engine_measures_itself_and_keeps_the_text(target):
    policy = make_policy({"policy": "chain", "length": 3})
    drafter = RecomputeDrafter(target.lm)
    chooser = LengthChooser(measure_costs(target, drafter, policy, [[1, 2, 3, 4]], rounds=16))
    assert sorted(chooser.costs.verify) == [0, 1, 2, 3]
    assert all(seconds > 0 for seconds in chooser.costs.verify.values())
    result = generate(
        target,
        PROMPTS[:1],
        drafter=RecomputeDrafter(target.lm),
        sampling=Sampling(max_new_tokens=20),
        policy=policy,
        chooser=chooser,
    )
    assert result.outputs[0].token_ids == plain_greedy(target, PROMPTS[0], 20)
