"""Drafts in the target's own cache: less is computed twice, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from specctl.core import language_model
from specctl.core.drafter import Drafter, Outcome, RoundSeconds
from specctl.core.language_model import LanguageModel, LmOut
from specctl.drafters import family
from specctl.drafters.states.borrowed_state import BorrowedState
from specctl.drafters.team import Team, TeamState
from specctl.models.hf.hf_lm import HfLM
from specctl.runtime.controllers.base import Arm
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request, Row
from specctl.runtime.engine.target_reader import shares_kv
from specctl.runtime.policies import make_policy
from specctl.runtime.policies.direct import Direct
from specctl.runtime.policies.switch import Switch
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.server.engine_thread.service import drafter_bytes
from specctl_testing.drafters.parallel_runs import decode
from specctl_testing.models import with_weak_layers
from specctl_testing.runtime.states import opened_states

CHAIN = make_policy({"policy": "chain", "length": 4})
PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6), (7,), (20, 2, 20), (8, 8))
EXITS = ("layer-skip", "kangaroo", "eesd", "m2r2")
SHARED = (*EXITS, "skip-layers", "depth-decay", "calm", "del", "jump")
MODELS = ("llama", "transformers", "gemma2")  # ours; its wrapper; windows
CASES = [("llama", name, heat) for name in EXITS[:2] for heat in (0.0, 1.0)]
CASES += [("llama", name, float(at % 2)) for at, name in enumerate(SHARED[2:])]
CASES += [("transformers", "layer-skip", 0.0), ("transformers", "kangaroo", 1.0)]
CASES += [("gemma2", "layer-skip", 1.0)]


@pytest.fixture(autouse=True)
def exits_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_model, "LEAST_SAVED", 0.0)


@pytest.fixture(scope="module")
def targets(make_model: Any) -> dict[str, Target]:
    """Six layers, of which the upper ones add little: drafts are accepted now and then."""
    found = {}
    for kind in MODELS:
        model = with_weak_layers(
            make_model("llama" if kind == "transformers" else kind, num_layers=6, vocab=24)
        )
        found[kind] = Target.from_model(model)
        if kind == "transformers":
            found[kind] = replace(found[kind], lm=HfLM(model))
    return found


def built(target: Target, name: str, **options: Any) -> Drafter:
    torch.manual_seed(5)
    if name in EXITS:
        options = {"layers": 2, **options}
    method = family(name)
    drafter = method.build(method.options(**options), target.spec, None)
    drafter.bind(target.borrowed())
    return drafter


def with_copy(drafter: Drafter) -> Drafter:
    """It keeps a copy of what the target caches."""
    needs = replace(drafter.needs(), copied=())
    drafter.needs = lambda: needs  # type: ignore[method-assign]
    return drafter


def drafts(outcomes: list[Outcome]) -> list[Any]:
    """What was drafted in each round, and how much of it was kept."""
    return [(o.tree.token_BN[o.tree.valid_BN].tolist(), o.num_accepted) for o in outcomes]


@contextmanager
def played(note: Callable[[Arm], None]) -> Iterator[None]:
    """`note` is told which arm of a switch played in each round that drafted."""
    observe = Switch.observe

    def noted(self: Switch, outcome: Outcome, seconds: RoundSeconds) -> None:
        if outcome.tree.num_nodes:
            note(self.arms[self.played])
        observe(self, outcome, seconds)

    with patch.object(Switch, "observe", noted):
        yield


@pytest.fixture
def resumed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each forward that drafting had begun: whether only the rest of it was run."""
    found: list[bool] = []
    resume = LanguageModel.resume

    def noted(self: LanguageModel, *args: Any) -> LmOut | None:
        out = resume(self, *args)
        found.append(out is not None)
        return out

    monkeypatch.setattr(LanguageModel, "resume", noted)
    return found


@pytest.mark.parametrize(("kind", "name", "heat"), CASES)
def test_drafts_and_texts_are_those_with_a_copy(
    targets: dict[str, Target], resumed: list[bool], kind: str, name: str, heat: float
) -> None:
    target = targets[kind]
    # A row takes another's slot; one row alone where the text is greedy.
    for slots in (3,) if heat else (1, 3):
        wanted = {"slots": slots, "policy": "chain", "length": 4, "temperature": heat}
        copied = decode(target, with_copy(built(target, name)), PROMPTS, tokens=10, **wanted)
        assert not resumed, "nothing lies in the target's cache"
        shared = decode(target, built(target, name), PROMPTS, tokens=10, **wanted)
        assert shared.answers == copied.answers
        assert drafts(shared.outcomes) == drafts(copied.outcomes)
        assert all(resumed)
        assert bool(resumed) == (name in EXITS)
        resumed.clear()
        assert isinstance(shared.state, BorrowedState)
        assert shared.state.shares_kv
        layers = range(len(shared.state.attention))
        assert not {*layers} & {*shared.outcomes[0].taps} or name == "del"
    if name == "layer-skip":
        num_drafted = sum(int(outcome.tree.valid_BN.sum()) for outcome in shared.outcomes)
        assert 0 < sum(sum(outcome.num_accepted) for outcome in shared.outcomes) < num_drafted


@pytest.mark.parametrize("name", ["layer-skip", "quantspec"])
@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_beside_copies_it_drafts_in_the_targets_cache_as_well(
    targets: dict[str, Target], name: str, heat: float
) -> None:
    """Whether it has drafted the text, copies have, or nobody has."""
    target = targets["llama"]
    prompts = ((3, 1, 4, 1, 5, 3, 1, 4, 1), (7,), (20, 2, 20, 2, 20), (8, 8))
    members = {"prompt-lookup": 0, name: 0}

    def team() -> Drafter:
        return Team.of([built(target, "prompt-lookup"), built(target, name)])

    def noted(arm: Arm) -> None:
        if arm.member is not None:
            members[[*members][arm.member]] += 1

    for slots in (1, 3):
        wanted = {"slots": slots, "policy": "switch", "length": 4, "temperature": heat}
        copied = decode(target, with_copy(team()), prompts, tokens=16, **wanted)
        with played(noted):
            shared = decode(target, team(), prompts, tokens=16, **wanted)
        assert shared.answers == copied.answers
        assert drafts(shared.outcomes) == drafts(copied.outcomes)
        assert isinstance(shared.state, TeamState)
        own = shared.state.members[1]
        assert isinstance(own, BorrowedState)
        assert own.shares_kv
        assert not shared.outcomes[0].taps
    assert all(members.values()), members


def test_taps_that_another_member_reads_are_still_asked_for(targets: dict[str, Target]) -> None:
    target = targets["llama"]
    alone, head = built(target, "quantspec"), built(target, "eagle3")
    team = Team.of([head, alone])
    assert set(team.needs().without_copy().taps) == set(head.needs().taps)
    assert set(team.needs().taps) == {*head.needs().taps, *alone.needs().taps}


def test_where_a_member_grows_trees_step_by_step_it_has_a_cache_of_its_own(
    targets: dict[str, Target],
) -> None:
    team = Team.of([built(targets["llama"], "prompt-lookup"), built(targets["llama"], "quantspec")])
    tree = make_policy({"policy": "static-tree", "branch": (2, 2)})
    assert shares_kv(team, Switch(arms=(Arm("copies", 0, Direct(4, 4)), Arm("chain", 1, CHAIN))))
    assert not shares_kv(team, Switch(arms=(Arm("tree", 1, tree),)))


@pytest.mark.parametrize("name", ["layer-skip", "kangaroo", "calm"])
def test_after_every_round_the_cache_holds_the_text(
    targets: dict[str, Target], resumed: list[bool], name: str
) -> None:
    """Of rejected tokens nothing is left in what is kept."""
    target, checked = targets["llama"], []
    engine = Engine(target, built(target, name), CHAIN, num_slots=2)

    def audit(row: Row, new: tuple[int, ...]) -> None:
        if row.finished is not None:
            return
        length, fresh = row.kept_len, target.new_kv(1, 64)
        ids_1S, start_1 = torch.tensor([row.tokens[:length]]), torch.zeros(1, dtype=torch.long)
        fresh.begin((0,), start_1, start_1, length, length, 0)
        masks = target.lm.chain_masks(start_1, length, length)
        target.lm.forward(ids_1S, torch.arange(length)[None], masks, fresh)
        for kept, store in (
            (engine.reader.kv.key_ZJLE, fresh.key_ZJLE),
            (engine.reader.kv.value_ZJLE, fresh.value_ZJLE),
        ):
            for mine, theirs in zip(kept, store, strict=True):
                own = mine[row.slot, :, :length]
                torch.testing.assert_close(own, theirs[0, :, :length], rtol=0, atol=2e-5)
        checked.append(length)

    sampling = Sampling(temperature=1.0, max_new_tokens=12, ignore_eos=True)
    requests = [Request(prompt, replace(sampling, seed=i)) for i, prompt in enumerate(PROMPTS)]
    engine.run(requests, audit)
    assert len(checked) > 8
    assert any(resumed) == (name != "calm")


def test_rows_that_did_not_draft_are_read_whole(
    targets: dict[str, Target], resumed: list[bool]
) -> None:
    target = targets["llama"]
    found = []
    for make in (with_copy, lambda drafter: drafter):
        engine = Engine(target, make(built(target, "layer-skip")), CHAIN, num_slots=2)
        sampling = Sampling(max_new_tokens=12, ignore_eos=True)
        requests = [Request(PROMPTS[0], sampling), Request(PROMPTS[2], sampling, drafts=False)]
        found.append([row.tokens for row in engine.run(requests)])
    assert found[0] == found[1]
    assert not resumed


def test_a_conversation_goes_on_in_its_slot(targets: dict[str, Target]) -> None:
    """What the slot holds of it is not read again, and drafts are those of the whole text."""
    target, taus, texts = targets["llama"], [], []
    for name in ("a", None):
        engine = Engine(target, built(target, "layer-skip"), CHAIN, max_len=64)
        engine.open(64)
        sampling = Sampling(max_new_tokens=10, ignore_eos=True)
        (first,) = engine.run([Request(PROMPTS[0], sampling, conversation=name)])
        text = (*PROMPTS[0], *first.tokens, 5)
        again = Request(text, sampling, conversation=name)
        reused = list[int]()
        (second,) = engine.run([again], lambda row, new, to=reused: to.append(row.reused_len))
        assert (reused[-1] > 0) == (name is not None)
        texts.append(second.tokens)
        taus.append((second.stats.rounds, second.stats.accepted))
    assert texts[0] == texts[1]
    assert taus[0] == taus[1]


def test_a_server_counts_no_copy(targets: dict[str, Target]) -> None:
    target = targets["llama"]

    def size(drafter: Drafter, policy: Any = CHAIN) -> int:
        return drafter_bytes(target, drafter, policy, 96)

    assert size(built(target, "layer-skip")) == 0
    copy = size(with_copy(built(target, "layer-skip")))
    taps, entry = 2 * 32 * 4, 2 * 2 * 2 * 8 * 4  # of two layers; keys and values
    assert copy == pytest.approx(taps * 96 + entry * (96 + CHAIN.nodes + 3), rel=0.02)
    with_adapter = size(with_copy(built(target, "kangaroo")))
    assert with_adapter - size(built(target, "kangaroo")) == copy
    tree = make_policy({"policy": "static-tree", "branch": (2, 1)})
    assert size(built(target, "layer-skip"), tree) == copy


@pytest.mark.parametrize("policy", ["chain", "dynamic-tree"])
def test_chains_are_drafted_in_the_targets_cache(targets: dict[str, Target], policy: str) -> None:
    drafter, is_chain = built(targets["llama"], "layer-skip"), policy == "chain"
    states = opened_states(drafter)
    engine = Engine(targets["llama"], drafter, make_policy({"policy": policy}))
    engine.open(32)
    assert isinstance(states[0], BorrowedState)
    assert (states[0].kv is engine.reader.kv) == is_chain
    assert engine.reader.taps == (() if is_chain else (0, 1))
