"""Rows that choose a member of a team: they draft as with that drafter alone, whoever stands beside
them, and nobody else follows them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import specctl
from specctl.core.drafter import Drafter, StepState
from specctl.core.errors import SpecctlError
from specctl.core.tree import NodeKind, chain_tree, empty_tree
from specctl.drafters import family
from specctl.drafters.team import Team, TeamState
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.guard import Guard
from specctl.runtime.engine.request import Completion, Request
from specctl.runtime.engine.team_drafter import joined
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.policies.switch import Switch
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl_testing.models import with_weak_layers

MEMBERS = ("prompt-lookup", "small-lm", "eagle3", "quantspec")
PROMPTS = ([3, 1, 4, 1, 5, 3, 1, 4, 1], [7, 7, 1, 7], [11, 2, 11, 2, 11], [5, 9, 2])
COUNT = 24


@pytest.fixture(scope="module")
def target(make_model: Any) -> Target:
    """Of six layers the upper ones add little: drafts are accepted now and then."""
    model = with_weak_layers(make_model("llama", num_layers=6, vocab=24))
    return Target.from_model(model)


def member(target: Target, name: str) -> Drafter:
    torch.manual_seed(5)
    options = {"layers": 2, "width": 16} if name == "small-lm" else {}
    method = family(name)
    return method.build(method.options(**options), target.spec, None)


def team_of(target: Target) -> Team:
    return Team.of([member(target, name) for name in MEMBERS])


def switch(controller: str) -> Switch:
    """With room for all that members draft by themselves."""
    return Switch(controller, nodes=24, lengths=(2, 8))


def alone(target: Target, request: Request) -> Completion:
    """With the chosen drafter and nobody else."""
    if not isinstance(request.drafts, str):
        return Engine(target).run([request])[0]
    drafter = member(target, request.drafts)
    policy = make_policy({"policy": family(drafter.family).policies[0]})
    engine = Engine(target, drafter, policy, "target-only", prefill_chunk=64)
    return engine.run([replace(request, drafts=True)])[0]


def requests(heat: float) -> list[Request]:
    """Every choice several times, in turn, of several lengths."""
    choices = [*MEMBERS, True, False]
    return [
        Request(
            tuple(PROMPTS[i % len(PROMPTS)]),
            Sampling(heat, seed=i, max_new_tokens=COUNT - i % 5, ignore_eos=True),
            drafts=choices[i % len(choices)],
        )
        for i in range(2 * len(choices) + 2)
    ]


@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("controller", ["cascade", "auto"])
def test_a_row_drafts_as_with_its_choice_alone(
    target: Target, controller: str, heat: float
) -> None:
    wanted = requests(heat)
    how = {"num_slots": 5, "prefill_chunk": 64}  # no first token is taken from a prompt
    engine = Engine(target, team_of(target), switch(controller), "target-only", **how)
    done = engine.run(wanted)
    accepted = dict.fromkeys(MEMBERS, 0)
    for request, found in zip(wanted, done, strict=True):
        own = alone(target, request)
        assert found.tokens == own.tokens, request.drafts
        if isinstance(request.drafts, str):
            accepted[request.drafts] += found.stats.accepted
            # at its end a row of a batch may be drafted further than it needs
            assert found.stats.rounds == own.stats.rounds, request.drafts
            assert found.stats.drafted >= own.stats.drafted, request.drafts
        elif request.drafts is False:
            assert found.stats.drafted == 0
    assert all(accepted.values()), accepted


def test_nobody_else_follows_a_row(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    followed: dict[str, set[int]] = {name: set() for name in MEMBERS}
    opened = Team.open

    def watched(self: Team, space: Any) -> TeamState:
        state = opened(self, space)
        for name, own in zip(state.names, state.members, strict=True):
            for method in ("start", "observe", "root" if isinstance(own, StepState) else "propose"):
                monkeypatch.setattr(own, method, noting(name, method, getattr(own, method)))
        return state

    def noting(name: str, method: str, call: Any) -> Any:
        def noted(first: Any, *more: Any) -> Any:
            view = getattr(first, "view", first)
            followed[name].update([first] if method == "start" else view.slots)
            return call(first, *more)

        return noted

    monkeypatch.setattr(Team, "open", watched)
    wanted = [replace(r, drafts=MEMBERS[i]) for i, r in enumerate(requests(0.0)[:3])]
    Engine(target, team_of(target), switch("cascade"), num_slots=3).run(wanted)
    assert followed == {"prompt-lookup": {0}, "small-lm": {1}, "eagle3": {2}, "quantspec": set()}


def test_a_member_that_fails_costs_its_own_rows_their_drafts(target: Target) -> None:
    team, guard = team_of(target), Guard(target.spec.vocab_size, lambda text: None)
    module = team.members[1].module
    assert module is not None
    with torch.no_grad():
        for weight in module.parameters():
            weight.fill_(torch.nan)
    wanted = [
        replace(requests(0.0)[0], drafts=name)
        for name in ("small-lm", "prompt-lookup", "quantspec")
    ]
    how = {"num_slots": 3, "prefill_chunk": 64, "wrap_drafter": guard.wrap}
    done = Engine(target, team, switch("cascade"), "target-only", **how).run(wanted)
    assert guard.num_disabled == 1
    assert guard.why_off is None
    for request, found in zip(wanted[1:], done[1:], strict=True):
        assert found.stats.rounds == alone(target, request).stats.rounds
        assert found.stats.accepted > 0
    assert len({one.tokens for one in done}) == 1


def test_drawn_drafts_keep_their_distribution_beside_others(make_target: Any) -> None:
    """Under rule auto a member that draws its drafts is verified as such where it is alone in a
    round, and as the others where it is not."""
    small = make_target(num_layers=2, vocab=6)
    team = Team.of([member(small, "small-lm"), member(small, "prompt-lookup")])
    count, prompt, sampling = 800, (1, 2, 3, 1, 2), Sampling(1.2, max_new_tokens=3, ignore_eos=True)
    seen = torch.zeros(6)
    for names in (("small-lm",), ("small-lm", "prompt-lookup", True)):
        wanted = [
            Request(prompt, replace(sampling, seed=i), drafts=names[i % len(names)])
            for i in range(count)
        ]
        engine = Engine(small, team, Switch(lengths=(2, 4)), num_slots=200)
        done = engine.run(wanted)
        seen = torch.zeros(6).index_add_(
            0, torch.tensor([c.tokens[1] for c in done]), torch.ones(count)
        )
        plain = generate(small, [prompt] * count, sampling=replace(sampling, seed=7000), batch=200)
        other = torch.zeros(6).index_add_(
            0, torch.tensor([o.token_ids[1] for o in plain.outputs]), torch.ones(count)
        )
        assert float((seen - other).abs().sum() / 2 / count) < 0.08, names
        assert sum(c.stats.accepted for c in done)


def test_only_drafters_that_are_there_can_be_chosen(target: Target) -> None:
    request = requests(0.0)[0]
    team = Engine(target, team_of(target), Switch())
    with pytest.raises(SpecctlError, match="prompt-lookup, small-lm, eagle3, quantspec"):
        team.submit(0, replace(request, drafts="medusa"))
    with pytest.raises(SpecctlError, match="nothing drafts"):
        Engine(target).submit(0, request)
    one = Engine(target, member(target, "prompt-lookup"))
    assert one.run([request])[0].stats.drafted
    with pytest.raises(SpecctlError, match="prompt-lookup"):
        one.submit(0, replace(request, drafts="eagle3"))


def test_trees_of_some_rows_are_one_of_all() -> None:
    device = torch.device("cpu")
    long = chain_tree(torch.tensor([[4, 5, 6]]), torch.ones(1, 3).bool(), NodeKind.POINT)
    short = chain_tree(torch.tensor([[7], [8]]), torch.ones(2, 1).bool(), NodeKind.POINT)
    fork = replace(short, is_chain=False, expanded_BN=torch.tensor([[-1], [-1]]))
    tree = joined([((1,), long), ((3, 0), short), ((2,), empty_tree(1, device))])
    assert tree.is_chain
    assert tree.token_BN.masked_fill(~tree.valid_BN, 0).tolist() == [
        [8, 0, 0], [4, 5, 6], [0, 0, 0], [7, 0, 0],
    ]  # fmt: skip
    assert tree.depth == 3
    tree = joined([((1,), long), ((0, 2), fork)])
    assert not tree.is_chain
    assert tree.expanded_BN is not None
    assert tree.expanded_BN.tolist() == [[-1, 1, 2], [0, 1, 2], [-1, 1, 2]]


def test_a_prompt_chooses_in_python(tiny_target: Target) -> None:
    prompts, how = ["def add(a, b):\n", "x = 1\nx = 1\n", "import os\n"], {"max_new_tokens": 12}
    drafter = "prompt-lookup+token-recycling"
    plain = specctl.generate(tiny_target, prompts, **how)
    choices = ["prompt-lookup", "token-recycling", False]
    made = specctl.generate(tiny_target, prompts, drafter, drafts=choices, batch=3, **how)
    assert made.texts == plain.texts
    assert made.stats.drafted
    assert not specctl.generate(tiny_target, prompts, drafter, drafts=False, **how).stats.drafted
    for wrong, words in (("eagle3", "unknown drafter"), (["prompt-lookup"], "for each")):
        with pytest.raises(SpecctlError, match=words):
            specctl.generate(tiny_target, prompts, drafter, drafts=wrong, **how)
