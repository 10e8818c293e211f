"""A routed LM head: groups, router, and drafts that are still lossless."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from specctl.core.drafter import Drafter
from specctl.core.errors import RecipeError
from specctl.core.vocab import VocabMap
from specctl.drafters import family
from specctl.drafters.nets.routed import RoutedHead, Router, balanced_groups, read_head
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

FAMILIES = ["eagle3", "small-lm"]
SIZE, GROUPS, TOP = 24, 6, 2
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [7], [11, 12, 11, 12], [20, 2, 20])
KEPT = VocabMap(torch.tensor([0, 1, 2, 3, 5, 8, 11, 12, 13, 20, 21]), SIZE)


@pytest.fixture(scope="module")
def target(make_target: Callable[..., Target]) -> Target:
    return make_target(num_layers=3, vocab=SIZE)


def fresh(target: Target, name: str, groups: int | None = GROUPS, top: int = TOP) -> Drafter:
    torch.manual_seed(5)
    found = family(name)
    options = found.options(head_groups=groups, head_top=top)
    drafter = found.build(options, target.spec, None)
    drafter.bind(target.borrowed())
    return drafter


@pytest.fixture(scope="module")
def trained(target: Target, train_a_little: Any) -> Callable[[str], Drafter]:
    made = {name: fresh(target, name) for name in FAMILIES}
    for drafter in made.values():
        train_a_little(target, drafter, 15)
    return made.__getitem__


def run(target: Target, drafter: Drafter | None, serve: dict[str, Any], slots: int) -> Any:
    policy = make_policy(serve) if drafter is not None else None
    engine = Engine(target, drafter, policy, num_slots=slots)
    sampling = Sampling(max_new_tokens=12, ignore_eos=True)
    return engine.run([Request(tuple(p), sampling) for p in PROMPTS])


# -- the head ---------------------------------------------------------------------------------


def test_groups_are_of_equal_size_and_hold_similar_rows() -> None:
    centres = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(40, 16, generator=torch.Generator().manual_seed(2))
    truth = torch.arange(40) % 4
    found = balanced_groups(centres[truth] + 0.05 * noise, 4)
    assert torch.bincount(found).tolist() == [10, 10, 10, 10]
    assert all(len(found[truth == t].unique()) == 1 for t in range(4))
    assert torch.bincount(balanced_groups(noise, 7)).tolist() == sorted(
        torch.bincount(balanced_groups(noise, 7)).tolist(), reverse=True
    )


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_routed_head_gives_the_full_logits_in_its_groups_and_nothing_elsewhere(
    rows: int,
) -> None:
    generator = torch.Generator().manual_seed(0)
    head_KD, state_QD = (torch.randn(n, 8, generator=generator) for n in (23, rows))
    router = Router(8, 23, 5, 2)
    router.arrange(head_KD)
    served = RoutedHead.of(router, head_KD)
    on_gpu = replace(served, weight_GKD=head_KD[served.row_GK])
    inside_NK = (router.picked(state_QD)[:, :, None] == router.group_K).any(1)
    wanted = (state_QD @ head_KD.T).masked_fill(~inside_NK, -torch.inf)
    torch.testing.assert_close(read_head(state_QD, served), wanted)
    torch.testing.assert_close(read_head(state_QD[None], on_gpu)[0], wanted)
    assert int(inside_NK.sum(1).max()) <= 10


def test_the_gathering_path_reads_nothing_back_to_the_host() -> None:
    router = Router(8, 24, 6, 2)
    served = RoutedHead.of(router, torch.randn(24, 8))
    weight = torch.empty(6, 4, 8, device="meta")
    on_meta = replace(
        served,
        router_GD=served.router_GD.to("meta"), weight_GKD=weight, row_GK=served.row_GK.to("meta"),
    )  # fmt: skip
    assert on_meta(torch.empty(3, 2, 8, device="meta")).shape == (3, 2, 24)


def test_options_that_pick_everything_or_nothing_are_refused(target: Target) -> None:
    for top in (0, 6):
        with pytest.raises(RecipeError, match="head_top"):
            fresh(target, "eagle3", top=top)
    with pytest.raises(RecipeError, match="more groups than rows"):
        fresh(target, "small-lm", groups=100)


def test_only_the_picked_share_of_the_head_counts_as_moved(target: Target) -> None:
    from specctl.train.vocab.measure import moved_bytes

    routed, plain = fresh(target, "eagle3"), fresh(target, "eagle3", groups=None)
    width = target.spec.hidden_size
    head, router = SIZE * width * 4, GROUPS * width * 4
    saved = moved_bytes(plain, target) - moved_bytes(routed, target)
    assert saved == head - head * TOP // GROUPS - router


# -- drafters with it -------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_the_router_learns_where_the_targets_mass_is_and_moves_nothing_else(
    target: Target, make_batch: Any, train_a_little: Any, name: str
) -> None:
    routed, plain = fresh(target, name), fresh(target, name, groups=None)
    batch = make_batch(target, routed)
    before = routed.loss(batch).metrics["routed"]
    for drafter in (routed, plain):
        train_a_little(target, drafter, 20)
    after = routed.loss(batch).metrics["routed"]
    assert float(after[0] / after[1]) > float(before[0] / before[1]) + 0.02
    ours, theirs = routed.tensors(), plain.tensors()
    assert set(ours) - set(theirs) == {"router.weight", "router.group_K"}
    assert "router.weight" in routed.trainable()
    alphas = [float(d.loss(batch).metrics["alpha"][0]) for d in (routed, plain)]
    assert alphas[0] == pytest.approx(alphas[1], rel=1e-4)


@pytest.mark.parametrize("trimmed", [False, True], ids=["full", "trimmed"])
@pytest.mark.parametrize(("name", "policy"), [("eagle3", "dynamic-tree"), ("small-lm", "chain")])
def test_greedy_output_is_the_targets(
    target: Target, trained: Callable[[str], Drafter], name: str, policy: str, trimmed: bool
) -> None:
    drafter = trained(name).trimmed(KEPT) if trimmed else trained(name)
    plain = run(target, None, {}, 1)
    for slots in (1, 3):
        drafted = run(target, drafter, {"policy": policy, "length": 3, "beam": 2}, slots)
        assert [d.tokens for d in drafted] == [p.tokens for p in plain]
        assert sum(sum(d.stats.accepted_at) for d in drafted) > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_a_routed_drafter_saved_and_loaded_drafts_the_same(
    target: Target, trained: Callable[[str], Drafter], name: str
) -> None:
    for drafter in (trained(name), trained(name).trimmed(KEPT)):
        twin = family(name).build(drafter.options, target.spec, drafter.vocab)
        twin.load_tensors(drafter.tensors())
        serve = {"policy": "chain", "length": 3}
        ours, theirs = (run(target, d, serve, 2) for d in (drafter, twin))
        assert [a.stats.accepted_at for a in ours] == [b.stats.accepted_at for b in theirs]


@pytest.mark.parametrize("name", FAMILIES)
def test_trimming_keeps_the_logits_of_kept_ids_in_the_picked_groups(
    target: Target, trained: Callable[[str], Drafter], drive: Any, name: str
) -> None:
    text = [3, 1, 4, 1, 5, 9]
    full_TV = drive(target, trained(name)).chain_logits(text, 4)[:, KEPT.ids_K]
    small = trained(name).trimmed(KEPT)
    small_TK = drive(target, small).chain_logits(text, 4)
    both = (full_TV > -torch.inf) & (small_TK > -torch.inf)
    assert bool(both.any(1).all())
    torch.testing.assert_close(small_TK[both], full_TV[both])
    assert bool((small_TK == -torch.inf).any()), "no group was left out"


@pytest.mark.parametrize(
    ("name", "policy", "rule"),
    [
        ("eagle3", "static-tree", "auto"), ("small-lm", "chain", "block"),
        ("small-lm", "chain", "target-only"),
    ],
)  # fmt: skip
def test_sampled_pairs_follow_the_targets_distribution(
    make_target: Callable[..., Target], train_a_little: Any, name: str, policy: str, rule: str
) -> None:
    """T = 1, a trimmed and routed head: 5 of 7 ids in 3 groups, one of which is read; chi-square
    of 800 pairs against their exact distribution."""
    small = make_target(num_layers=3, vocab=7, seed=4)
    drafter = fresh(small, name, groups=4, top=1)
    train_a_little(small, drafter, 12)
    drafter = drafter.trimmed(VocabMap(torch.tensor([0, 1, 2, 5, 6]), 7))
    prompt, count = (1, 2, 3), 800
    serve = {"policy": policy, "length": 2, "branch": (2, 1)}
    engine = Engine(small, drafter, make_policy(serve), rule, num_slots=400)
    requests = [
        Request(prompt, Sampling(1.0, seed=i, max_new_tokens=3, ignore_eos=True))
        for i in range(count)
    ]
    seen, accepted = torch.zeros(7, 7), 0
    for done in engine.run(requests):
        seen[done.tokens[0], done.tokens[1]] += 1
        accepted += sum(done.stats.accepted_at)
    expected = count * exact_pairs(small, prompt)
    keep = expected > 5
    observed = [*seen[keep].tolist(), float(seen[~keep].sum())]
    wanted = [*expected[keep].tolist(), max(float(expected[~keep].sum()), 1e-9)]
    scale = sum(observed) / sum(wanted)
    assert chisquare(observed, [w * scale for w in wanted]).pvalue > 1e-4
    assert accepted > 0


def exact_pairs(target: Target, prompt: tuple[int, ...]) -> torch.Tensor:
    V = target.spec.vocab_size
    ids_VS = torch.tensor([[*prompt, token] for token in range(V)])
    masks = target.lm.document_masks(torch.zeros_like(ids_VS))
    with torch.no_grad():
        out = target.lm.dense(ids_VS, torch.arange(ids_VS.shape[1]).expand_as(ids_VS), masks)
    assert out.logits_BTV is not None
    distribution = out.logits_BTV.double().softmax(-1)
    return (distribution[0, -2][:, None] * distribution[:, -1]).float()
