"""An LM head read in two steps: rough scores choose candidates, whose rows alone are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from specctl.api.arguments.drafting import load_draft
from specctl.core.drafter import Drafter
from specctl.core.errors import RecipeError
from specctl.core.tree import NodeKind
from specctl.core.vocab import VocabMap
from specctl.drafters import families, family
from specctl.drafters.nets.shortlist import (
    SMOOTHING,
    Shortlist,
    ShortlistHead,
    check_shortlist,
    how_head_is_read,
    rough_head,
)
from specctl.export.package.folder import load_drafter, save_package
from specctl.export.readers.trial import Trial, drafted_logits
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.proof.cases import make_case
from specctl.runtime.proof.enumerate import Case, enumerate_case
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.vocab.measure import moved_bytes

SIZE, RANK, COUNT = 24, 6, 5
SMALL: dict[str, dict[str, Any]] = {
    name: {"layers": 2, "taps": (0, 2)}
    for name in ("dflash", "dflash2", "domino", "dspark", "lilicorr", "xpress")
}
SMALL["dflash2"]["candidates"] = 3
SMALL["lilicorr"] |= {"candidates": 3, "width": 32, "factor": 32}
WHOLE = ("sorted", "superposed")  # they read their head in ways of their own
NAMES = sorted(n for n in families() if families()[n].trainable and n not in WHOLE)
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [7], [11, 12, 11, 12])


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def target(make_target: Callable[..., Target]) -> Target:
    return make_target(num_layers=3, vocab=SIZE)


def build(target: Target, name: str, **options: Any) -> Drafter:
    torch.manual_seed(5)
    own = {**SMALL.get(name, {}), **options}
    drafter = family(name).build(family(name).options(**own), target.spec, None)
    if drafter.needs().borrow:
        drafter.bind(target.borrowed())
    return drafter


def run(target: Target, drafter: Drafter | None, policy: str, slots: int, **fields: Any) -> Any:
    made = None if drafter is None else make_policy({"policy": policy, **fields})
    sampling = Sampling(max_new_tokens=6, ignore_eos=True)
    requests = [Request(tuple(prompt), sampling) for prompt in PROMPTS]
    return Engine(target, drafter, made, num_slots=slots).run(requests)


# -- the head ---------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [1e9, 4.0])
def test_rough_scores_are_the_truncated_decomposition_of_the_head_without_its_mean(
    smoothing: float,
) -> None:
    """Of its rows times the square roots of their weights."""
    weight_KD = randn(50, 12).double() + 3.0
    share_K = 1.0 / (torch.arange(50) + smoothing)
    share_K = (share_K / share_K.sum()).double()
    centred = weight_KD - share_K @ weight_KD
    right = torch.linalg.svd(share_K.sqrt()[:, None] * centred, full_matrices=False)[2][:4]
    rough = rough_head(weight_KD.float(), 4, smoothing)
    found = (rough.up_KO @ rough.down_OD).double()
    torch.testing.assert_close(found, centred @ right.T @ right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 4])
def test_candidates_have_the_logits_of_the_head_and_nothing_else_has_any(rows: int) -> None:
    weight_KD, state_QD = randn(40, 12), randn(rows, 12, seed=1)
    wanted = state_QD @ weight_KD.T
    head = ShortlistHead.of(weight_KD, Shortlist(3, 7))
    found = head(state_QD[None])[0]
    chosen = found > -torch.inf
    assert chosen.sum(-1).tolist() == [7] * rows
    torch.testing.assert_close(found[chosen], wanted[chosen])
    rough = rough_head(weight_KD, 3, SMOOTHING)
    best = (state_QD @ rough.down_OD.T @ rough.up_KO.T).topk(7, dim=-1).indices
    assert bool(chosen.gather(1, best).all())
    torch.testing.assert_close(head._gathered(best, state_QD), wanted.gather(1, best))
    every = ShortlistHead.of(weight_KD, Shortlist(3, 40))
    torch.testing.assert_close(every(state_QD), wanted)


def test_a_head_of_low_rank_around_a_mean_row_keeps_every_likeliest_token() -> None:
    """Of the rank of the rough scores: one candidate is enough, whatever the mean row is."""
    weight_KD = randn(200, 5, seed=2) @ randn(5, 16, seed=3) + 4.0 * randn(16, seed=4)
    state_RD = randn(64, 16, seed=5)
    found = ShortlistHead.of(weight_KD, Shortlist(5, 1))(state_RD)
    assert torch.equal(found.argmax(-1), (state_RD @ weight_KD.T).argmax(-1))


def test_a_trained_head_keeps_its_likeliest_token_where_a_random_one_loses_it(
    tiny_target: Target,
) -> None:
    """An eighth of the width and an eighth of the rows, at the states of a text."""
    weight_KD, last = tiny_target.borrowed().head_VD.float(), tiny_target.spec.num_layers
    ids_1S = torch.tensor([tiny_target.encode("def mean(values):\n    return sum(values)\n" * 4)])
    masks = tiny_target.lm.document_masks(torch.zeros_like(ids_1S))
    with torch.no_grad():
        at_1S = torch.arange(ids_1S.shape[1])[None]
        out = tiny_target.lm.dense(ids_1S, at_1S, masks, (last,), logits=False)
    shortlist = Shortlist(weight_KD.shape[1] // 8, len(weight_KD) // 8)

    def recall(weight_KD: Tensor) -> float:
        state_SD = out.taps[last][0].float()
        best = (state_SD @ weight_KD.T).argmax(-1)
        found = ShortlistHead.of(weight_KD, shortlist)(state_SD)
        return float((found.gather(1, best[:, None]) > -torch.inf).float().mean())

    assert recall(weight_KD) > 0.97
    assert recall(randn(*weight_KD.shape)) < 0.9


# -- the distribution -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "kind", "shape"),
    [
        ("chain", NodeKind.WITHOUT_REPLACEMENT, "chain-2"),
        ("block", NodeKind.WITHOUT_REPLACEMENT, "chain-2"),
        ("traversal", NodeKind.WITHOUT_REPLACEMENT, "two-two-left"),
        ("recursive", NodeKind.WITHOUT_REPLACEMENT, "two-two-left"),
    ],
)
def test_the_output_distribution_is_the_targets_by_enumeration(
    rule: str, kind: NodeKind, shape: str
) -> None:
    """V = 5, C = 2, T = 0.7; the whole head's softmax in place of q would not be lossless."""
    case, head = make_case(rule, kind, shape, "random", 5), ShortlistHead.of
    weight_KD = randn(5, 8, seed=6)

    def q_of(count: int) -> dict[tuple[int, ...], np.ndarray]:
        read = head(weight_KD, Shortlist(2, count))
        rows = {path: read(randn(1, 8, seed=11 + i)) for i, path in enumerate(case.q)}
        return {at: (row[0].double() / 0.7).softmax(-1).numpy() for at, row in rows.items()}

    short = q_of(2)
    assert {int((q > 0).sum()) for q in short.values()} == {2}
    own = Case(case.name, rule, kind, case.shape, case.p, short, 5)
    exact = enumerate_case(own)
    assert exact.error <= 1e-12
    assert exact.accepted > 0.1
    assert enumerate_case(own, given_q=q_of(5)).error > 1e-3


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("eagle3", "static-tree"),
        pytest.param("small-lm", "chain", marks=pytest.mark.proof),
        pytest.param("dflash", "chain", marks=pytest.mark.proof),
        pytest.param("dflash", "marginal-tree", marks=pytest.mark.proof),
    ],
)
def test_sampled_pairs_follow_the_targets_distribution(
    make_target: Callable[..., Target], train_a_little: Any, name: str, policy: str
) -> None:
    """V = 5, C = 2, T = 1.3: chi-square of 600 pairs against their exact distribution."""
    small = make_target(num_layers=3, vocab=5, seed=4)
    drafter = build(small, name, head_rank=2, head_candidates=2)
    train_a_little(small, drafter, 8)
    count, temperature = 600, 1.3
    fields = {"branch": (2, 1)} if policy == "static-tree" else {}
    engine = Engine(
        small, drafter, make_policy({"policy": policy, "length": 2, **fields}), num_slots=200
    )
    seen, accepted = torch.zeros(5, 5), 0
    how = [Sampling(temperature, seed=i, max_new_tokens=3, ignore_eos=True) for i in range(count)]
    for done in engine.run([Request((1, 2, 3), each) for each in how]):
        seen[done.tokens[0], done.tokens[1]] += 1
        accepted += sum(done.stats.accepted_at)
    ids_VS = torch.tensor([[1, 2, 3, token] for token in range(5)])
    masks = small.lm.document_masks(torch.zeros_like(ids_VS))
    with torch.no_grad():
        out = small.lm.dense(ids_VS, torch.arange(4).expand_as(ids_VS), masks)
    assert out.logits_BTV is not None
    p = (out.logits_BTV.double() / temperature).softmax(-1)
    wanted = count * p[0, -2][:, None] * p[:, -1]
    rare = wanted < 5
    observed = [*seen[~rare].tolist(), float(seen[rare].sum())]
    assert chisquare(observed, [*wanted[~rare].tolist(), float(wanted[rare].sum())]).pvalue > 1e-4
    assert accepted > 0


# -- drafters with it -------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_trained_family_drafts_from_its_candidates_and_writes_what_the_target_would(
    target: Target, drive: Any, name: str
) -> None:
    short = build(target, name, head_rank=RANK, head_candidates=COUNT)
    policy = families()[name].policies[0]
    plain = run(target, None, policy, 1)
    drafted = run(target, short, policy, 2)
    assert [d.tokens for d in drafted] == [p.tokens for p in plain]
    if policy == "direct":
        return
    text = [3, 1, 4, 1, 5, 9]
    found = drive(target, short).chain_logits(text, 4)
    whole = drive(target, build(target, name)).chain_logits(text, 4)
    chosen = found > -torch.inf
    if name not in ("jakiro", "dflash2", "lilicorr"):  # these go on from the head's logits
        assert int(chosen.sum(-1).max()) <= COUNT
        torch.testing.assert_close(found[chosen], whole[chosen], rtol=1e-4, atol=1e-4)
    assert not bool(chosen.all())
    assert bool(chosen.any(-1).all())


@pytest.mark.parametrize("name", ["medusa", "p-eagle", "blockwise", "dflash"])
def test_a_tree_of_more_siblings_than_candidates_is_padded(target: Target, name: str) -> None:
    """Fewer candidates than the tree has siblings: the rest of it is padding."""
    short = build(target, name, head_rank=RANK, head_candidates=1)
    plain = run(target, None, "chain", 1)
    drafted = run(target, short, "static-tree", 3, branch=(3, 2))
    assert [d.tokens for d in drafted] == [p.tokens for p in plain]


def test_a_package_keeps_it_and_any_trained_drafter_takes_it_when_served(
    target: Target, drive: Any, tmp_path: Any
) -> None:
    text, trained = [3, 1, 4, 1, 5, 9], build(target, "eagle3")
    served = load_draft(
        trained, target, draft_options=[f"head_rank={RANK}", f"head_candidates={COUNT}"]
    ).drafter
    assert served is not None
    assert trained.options.head_rank is None
    about: dict[str, Any] = {"serve": {}, "recipe_digest": "", "acceptance": None, "command": []}
    assert "rank 6 choose 5 of 24 rows" in str(how_head_is_read(served))
    assert how_head_is_read(trained) is None
    save_package(served, target, tmp_path / "package", **about)
    loaded = load_drafter(tmp_path / "package", target)
    loaded.bind(target.borrowed())
    assert (loaded.options.head_rank, loaded.options.head_candidates) == (RANK, COUNT)
    ours, theirs = (drive(target, one).chain_logits(text, 4) for one in (served, loaded))
    torch.testing.assert_close(ours, theirs)
    assert int((ours > -torch.inf).sum(-1).max()) == COUNT


def test_a_head_trimmed_below_its_candidates_is_read_whole(target: Target, drive: Any) -> None:
    kept = VocabMap(torch.tensor([0, 1, 2, 3]), SIZE)
    short = build(target, "eagle3", head_rank=RANK, head_candidates=COUNT).trimmed(kept)
    assert bool((drive(target, short).chain_logits([3, 1, 2], 2) > -torch.inf).all())


def test_weights_that_change_are_decomposed_again(target: Target, drive: Any) -> None:
    drafter = build(target, "medusa", head_rank=RANK, head_candidates=COUNT)
    before = drive(target, drafter).chain_logits([3, 1, 4], 3)
    with torch.no_grad():
        for head in drafter.own_heads():  # type: ignore[attr-defined]
            head.weight.mul_(-1.0)
    after = drive(target, drafter).chain_logits([3, 1, 4], 3)
    assert not torch.equal(before > -torch.inf, after > -torch.inf)


def test_exports_compare_the_whole_head(target: Target, features: Any) -> None:
    """Engines have no shortlist."""
    short, ids = build(target, "eagle3", head_rank=RANK), (3, 1, 4, 1)
    short.options = replace(short.options, head_candidates=COUNT)
    states = {tap: s.double() for tap, s in features(target, ids[:-1], short.needs().taps).items()}
    short.to(torch.device("cpu"), torch.float64)
    assert bool((drafted_logits(short, Trial(ids, (5, 9), states)) > -torch.inf).all())


def test_what_a_call_reads_is_counted(target: Target) -> None:
    whole, short = build(target, "eagle3"), build(target, "eagle3", head_rank=2, head_candidates=3)
    D = target.spec.hidden_size
    saved = moved_bytes(whole, target) - moved_bytes(short, target)
    assert saved == 4 * (SIZE * D - 2 * (SIZE + D) - 3 * D)
    borrows = moved_bytes(build(target, "dflash", head_rank=2, head_candidates=3), target)
    assert moved_bytes(build(target, "dflash"), target) - borrows == saved


# -- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("eagle3", {"head_rank": 32}, "cost as much as the LM head"),
        ("dflash", {"head_rank": 8, "head_candidates": SIZE + 1}, "more candidates than"),
        ("eagle3", {"head_rank": 8, "head_groups": 4, "head_top": 2}, "in two steps"),
        ("sorted", {"head_rank": 8}, "in two steps"),
        ("superposed", {"head_rank": 8}, "in two steps"),
        ("lilicorr", {"head_rank": 8, "head_candidates": 2}, "more tokens than have a score"),
    ],
)
def test_what_does_not_fit_the_head_is_refused(
    target: Target, name: str, options: dict[str, int], said: str
) -> None:
    with pytest.raises(RecipeError, match=said):
        check_shortlist(build(target, name, **options))
    given = {k: v for k, v in options.items() if k in ("head_rank", "head_candidates")}
    plain = build(target, name, **{k: v for k, v in options.items() if k not in given})
    with pytest.raises(RecipeError, match=said) as refused:
        load_draft(plain, target, draft_options=given)
    assert refused.value.where.startswith("--set drafter.options.head_")
    assert "write" not in refused.value.do  # there is no recipe to write it into
    with pytest.raises(RecipeError) as refused:
        load_draft(plain, target, draft_options={"no_such": 1})
    assert refused.value.where == "--set drafter.options.no_such"


def test_candidates_and_smoothing_without_a_rank_are_refused(target: Target) -> None:
    for given in ({"head_candidates": 8}, {"head_smoothing": 8.0}):
        with pytest.raises(RecipeError, match="have no rank"):
            build(target, "medusa", **given)
    assert replace(build(target, "medusa").options, head_rank=8).shortlist(100) == Shortlist(8, 100)
