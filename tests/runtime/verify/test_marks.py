"""What is not lossless is refused or marked: every illegal pair, and every approximate drafter."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from specctl.core.errors import RecipeError
from specctl.core.tree import NodeKind
from specctl.recipes.serve import ServePart
from specctl.runtime.engine.engine import Engine
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.proof import prove
from specctl.runtime.proof.proof_report import Check, Proof
from specctl.runtime.proof.sample_size import critical, noncentrality, samples_for, visible
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.verify import RULES, check_legal, default_rule, legal, legal_rules
from specctl.runtime.verify.choice import verification_of
from specctl.runtime.verify.relaxed import RELAXED
from specctl_testing.runtime.pairs import disturbed

SERVES: dict[NodeKind, dict[str, Any]] = {
    NodeKind.POINT: {"policy": "dynamic-tree"},
    NodeKind.IID: {"policy": "mcsd"},
    NodeKind.PATHS: {"policy": "paths"},
    NodeKind.WITHOUT_REPLACEMENT: {"policy": "static-tree"},
    NodeKind.REFILLED: {"policy": "sequoia"},
    NodeKind.TOP_PLUS_ONE: {"policy": "top-plus-one"},
}
FIELDS = {"num_layers": 1, "vocab": 16}


@pytest.fixture(scope="module")
def target(make_target: Any) -> Any:
    return make_target(**FIELDS)


@pytest.fixture
def drafter(make_target: Any, target: Any) -> Any:
    return disturbed(make_target, target, **FIELDS)


@pytest.mark.parametrize("kind", NodeKind)
def test_every_kind_of_draft_is_grown_by_a_policy(kind: NodeKind) -> None:
    policy = make_policy(SERVES[kind])
    assert policy.kind(sampled=True) is kind
    assert not policy.is_chain


@pytest.mark.parametrize("kind", NodeKind)
@pytest.mark.parametrize("rule", RULES)
def test_an_illegal_rule_is_refused_when_it_is_configured(
    target: Any, drafter: Any, rule: str, kind: NodeKind
) -> None:
    policy = make_policy(SERVES[kind])
    if legal(rule, kind, is_chain=False):
        assert Engine(target, drafter, policy, rule).rule == rule
        return
    with pytest.raises(RecipeError, match="is not lossless for trees") as refused:
        Engine(target, drafter, policy, rule)
    assert default_rule(kind, is_chain=False) in str(refused.value.do)
    with pytest.raises(RecipeError):
        check_legal(rule, kind, is_chain=False)


def test_a_recipe_may_name_every_rule_and_no_other() -> None:
    names, relaxed = ServePart.model_json_schema()["properties"]["rule"]["anyOf"]
    assert names["enum"] == ["auto", *RULES]
    assert all(re.search(relaxed["pattern"], f"{name}:0.5") for name in RELAXED)
    for wrong in ("flyer", "fly:", "fly:x", "block:0.5", "fly:1:2:3"):
        with pytest.raises(ValidationError):
            ServePart(rule=wrong)


def test_every_rule_names_its_paper_and_no_kind_is_without_a_rule() -> None:
    assert all(rule.paper.startswith("https://arxiv.org/") for rule in RULES.values())
    for kind in NodeKind:
        assert len(legal_rules(kind, is_chain=False)) >= 3
    assert {kind for rule in RULES.values() for kind in rule.kinds} == set(NodeKind)


def test_an_approximate_drafter_is_marked_in_every_output(target: Any, drafter: Any) -> None:
    drafter.lossless = False
    for sampled in (False, True):
        mark = verification_of("auto", drafter, make_policy({"policy": "chain"}), sampled, target)
        assert mark["class"] == "approximate"
    sampling = Sampling(temperature=1.0, max_new_tokens=4)
    made = generate(target, [[1, 2]], drafter=drafter, sampling=sampling)
    assert made.stats.verification == "approximate:block"
    assert made.to_json()["stats"]["verification"].startswith("approximate")


def test_verify_refuses_an_approximate_drafter_and_measures_it_when_asked(
    target: Any, drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = prove.ProofLevel(2, 6, samples=200, length=3, all_rules=False, enumeration="quick")
    monkeypatch.setitem(prove.LEVELS, "lossless", small)
    monkeypatch.setattr(prove, "_enumerated", lambda level: (1, 0.0))
    drafter.lossless = False
    with pytest.raises(RecipeError, match="approximate"):
        prove.verify(target, drafter)
    proof = prove.verify(target, drafter, approximate=True)
    assert proof.verification == proof.to_json()["verification"] == "approximate"


def test_only_what_is_about_the_distribution_is_not_judged_of_an_approximate_drafter() -> None:
    far = Check("distribution, Chain block", False, 100, 0.2, 0.0, "samples")
    torn = Check("cache rollback", False, 10)
    lossless = Proof("t", "f", "full", (far,))
    assert not lossless.passed
    assert "FAILED" in lossless.lines()[0]
    measured = replace(lossless, verification="approximate")
    assert measured.passed
    assert "differs" in measured.lines()[0]
    assert not replace(measured, checks=(far, torn)).passed


# -- how much a proof can see ---------------------------------------------------------------------


def test_critical_values_and_power_agree_with_scipy() -> None:
    from scipy.stats import chi2, ncx2

    for cells in (4, 16, 64, 256):
        limit = critical(cells - 1)
        assert chi2.sf(limit, cells - 1) == pytest.approx(1e-5, rel=1e-3)
        power = ncx2.sf(limit, cells - 1, noncentrality(cells))
        assert 0.985 < power < 0.999  # few cells are given a little more than they need


def test_the_samples_of_a_level_see_what_they_promise() -> None:
    assert visible(samples_for(0.1, 64), 64) <= 0.1
    assert samples_for(0.05) == pytest.approx(4 * samples_for(0.1), rel=0.05)
    assert visible(100, 1) == 1.0
    full = prove.LEVELS["full"]
    assert visible(full.samples, 64) <= 0.07
    assert visible(full.other_samples, 64) <= 0.15
    assert prove.LEVELS["lossless"].samples <= 4_000
