"""A slice of `make proof-joint`: whole sampled texts against the exact distribution; a wrong one
shows."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from specctl.runtime.proof.exact_distribution import ExactDistribution
from specctl.runtime.sampling.sampling import Sampling

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SLICE = [
    ("i.i.d. tree, spectr", "T=1"),
    ("refilled tree, sequoia", "top-k"),
    ("top plus one", "grammar"),
    ("two paths, multi-path", "penalties"),
    ("distinct tree, traversal", "end of text"),
    ("other tokenizer, tli tree", "end of context"),
    ("layer-skip", "T=1"),
    ("lfm2, chain", "penalties"),
    ("qwen3_5_text, distinct tree", "end of context"),
    ("falcon_h1, i.i.d. tree", "T=1"),
    ("mamba, eagle3", "end of text"),
]


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("proof_joint")


def test_the_proof_has_sixty_configurations_of_every_drafter_and_setting(proof: ModuleType) -> None:
    configurations = list(proof.configurations())
    assert len(set(configurations)) >= 60
    assert {draft for draft, _ in configurations} == set(proof.DRAFTS)
    assert {setting for _, setting in configurations} == set(proof.SAMPLINGS)
    served = {draft.rule for draft in proof.DRAFTS.values()}
    assert {"block", "chain", "spectr", "multi-round", "sequoia", "multi-path"} <= served


@pytest.mark.proof
def test_a_slice_of_the_configurations_has_the_targets_distribution(proof: ModuleType) -> None:
    checks = proof.prove(400, SLICE)
    assert len(checks) == len(SLICE)
    assert all(check.ok for check in checks), [check for check in checks if not check.ok]


def test_a_selection_that_accepts_too_readily_is_caught(
    proof: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    spectr = sys.modules["specctl.runtime.verify.spectr"]
    monkeypatch.setattr(spectr, "smallest_rho", lambda p_BK, q_BK, num_B1: torch.ones_like(num_B1))
    (check,) = proof.prove(1_000, [("i.i.d. tree, spectr", "T=1")])
    assert not check.ok


def test_the_distribution_of_texts_is_whole_and_ends_where_texts_end(proof: ModuleType) -> None:
    sampling = Sampling(temperature=1.0, max_new_tokens=3)
    distribution = ExactDistribution.of(proof.target(), [1, 2, 3], sampling)
    assert sum(distribution.chance.values()) == pytest.approx(1.0)
    assert all(len(text) == 3 or text[-1] == proof.EOS for text in distribution.chance)
    assert not any(proof.EOS in text[:-1] for text in distribution.chance)
    samples = list(distribution.chance)
    chosen = torch.multinomial(
        torch.tensor(list(distribution.chance.values())), 2_000, replacement=True,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert distribution.test([samples[int(i)] for i in chosen]).p_value > 1e-3
    assert distribution.test([(0, 0, 0, 0)]).p_value == 0.0
