"""Grouped acceptance: against its definition, its exact end, what it costs, where it is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specctl.core.errors import SpecctlError
from specctl.core.tree import NodeKind, QRows, chain_tree
from specctl.drafters import family
from specctl.drafters.training_free.prompt_lookup import PromptLookup, PromptLookupOptions
from specctl.runtime.engine.engine import Engine
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.noise import RoundNoise
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.verify import RULES
from specctl.runtime.verify.relaxed import relaxation

V, N = 9, 4


def accepted(
    tokens: list[int], p_TV: Any, q_TV: Any, u: list[float], size: int, spread: float
) -> int:
    """The number of accepted nodes, from the definition, one after the other."""
    for i, token in enumerate(tokens):
        order = sorted(range(V), key=lambda v: p_TV[i][v])
        at = order.index(token)
        group = [
            v
            for v in order[max(0, at - size) : at + size + 1]
            if abs(p_TV[i][v] - p_TV[i][token]) <= spread
        ]
        p, q = (sum(row[i][v] for v in group) for row in (p_TV, q_TV))
        if not (p_TV[i][token] > 0 and u[i] < p / q):
            return i
    return len(tokens)


def test_drafts_stand_by_the_mass_of_their_group() -> None:
    rng, more = np.random.default_rng(0), 0
    for seed in range(60):
        p_TV, q_TV = rng.dirichlet(np.full(V, 0.6), (2, N + 1))
        p_TV[:, 3] = 0  # cannot be written
        p_TV /= p_TV.sum(1, keepdims=True)
        tokens = [int(rng.choice(V, p=q_TV[i])) for i in range(N)]
        q = QRows(torch.from_numpy(q_TV)[None], None)
        tree = chain_tree(torch.tensor([tokens]), torch.ones(1, N).bool(), NodeKind.IID, q)
        scores_BTV = torch.from_numpy(p_TV).log()[None]
        noise = RoundNoise([seed], [0], [0])
        u = noise.accept_BT(N + 1)[0, 1:].tolist()
        counts = {}
        for size, spread in ((0, 1.0), (1, 1.0), (2, 0.1), (7, 0.15)):
            found = relaxation(f"grouped:{size}:{spread}")
            assert found is not None
            assert found.rule.judges is not None
            verdict = found.rule.judges(tree, scores_BTV, noise, found.values)
            counts[size] = int(verdict.num_accepted_B)
            assert counts[size] == accepted(tokens, p_TV, q_TV, u, size, spread)
        exact = RULES["chain"].run(tree, scores_BTV, noise)
        assert counts[0] == int(exact.num_accepted_B)
        more += counts[7] - counts[0]
    assert more > 15


def test_the_exact_end_is_speculative_sampling_and_groups_take_fewer_rounds(
    make_target: Any,
) -> None:
    target, found = make_target(num_layers=1, vocab=24), family("speculative-jacobi")
    drafter = found.build(found.options(), target.spec, None)
    policy = {"policy": "chain", "length": 4}

    def run(rule: str, temperature: float) -> Any:
        sampling = Sampling(temperature, seed=5, max_new_tokens=60, ignore_eos=True)
        return generate(
            target, [[1, 2], [3, 1]], drafter=drafter, sampling=sampling,
            policy=make_policy(policy), rule=rule, batch=2,
        )  # fmt: skip

    for temperature in (0.0, 1.0):
        exact, zero = run("chain", temperature), run("grouped:0", temperature)
        texts = [[o.token_ids for o in made.outputs] for made in (exact, zero)]
        assert texts[0] == texts[1]
        assert zero.stats.rounds == exact.stats.rounds
    grouped = run("grouped", 1.0)
    assert grouped.stats.verification == "approximate:grouped:7:0.15"
    assert grouped.stats.rounds < 0.95 * exact.stats.rounds
    lookup = PromptLookup(PromptLookupOptions(), target.spec)
    with pytest.raises(SpecctlError, match="chain"):
        Engine(target, lookup, make_policy({"policy": "direct"}), "grouped")
