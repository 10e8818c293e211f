"""Multi-candidate trees: who decides about another level."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.core.errors import RecipeError
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.stops.learned import write_stop
from specctl.runtime.stops.specdec_pp import SpecDecPp


def decision(path: Path, width: int, said: float) -> str:
    """A file of a network that gives every drafted token these log odds of acceptance."""
    net = SpecDecPp.new_net(width)
    with torch.no_grad():
        net[-1].weight.zero_()
        net[-1].bias.fill_(said)
    write_stop(path, "specdec-pp", net, {})
    return str(path)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_trained_network_decides_about_another_level(
    make_target: Any, tmp_path: Path, temperature: float
) -> None:
    """Sure of acceptance it drafts all levels, expecting rejection only the first; the answers to
    greedy requests are the same."""
    target, taken, answers = make_target(num_layers=2, vocab=24), {}, []
    drafter = SmallLm(SmallLmOptions(), target.spec)
    for name, said in (("sure", 9.0), ("unsure", -9.0)):
        file = decision(tmp_path / name, drafter.lm.spec.hidden_size, said)
        tree = {"policy": "mcsd", "branch": (2, 1, 1), "stop": "specdec-pp", "stop_file": file}
        engine = Engine(target, drafter, make_policy(tree), num_slots=2)
        sampling = Sampling(temperature, seed=1, max_new_tokens=12)
        found = engine.run([Request((3, 1, 4), sampling), Request((7, 7), sampling)])
        rounds = sum(one.stats.rounds for one in found)
        taken[name] = sum(one.stats.drafted for one in found) / rounds
        answers.append([one.tokens for one in found])
    assert taken["unsure"] <= 2.0
    assert taken["sure"] > 4.0  # six, but where a text ends
    assert temperature > 0 or answers[0] == answers[1]


@pytest.mark.parametrize(
    "fields", [{"confidence": 0.4, "stop": "svip"}, {"threshold": 0.3}, {"stop_file": "x"}]
)
def test_one_decision_at_a_time(fields: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="two decisions"):
        make_policy({"policy": "mcsd", **fields})
