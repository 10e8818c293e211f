"""What every family owes (docs: adding a method), for each of `families()` without exception.

Targets are random and tiny; drafters are trained a few dozen steps where a test needs drafts that
are neither useless nor perfect.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from specctl.core import language_model
from specctl.core.batch import TrainBatch
from specctl.core.drafter import Budget, Drafter, Outcome, RoundSeconds, Space, StepState
from specctl.core.tree import DraftTree
from specctl.core.vocab import VocabMap
from specctl.drafters import families
from specctl.drafters.losses.align import ahead_mask
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.guard import Guard
from specctl.runtime.engine.request import Completion, Request
from specctl.runtime.measure.cost_table import CostTable
from specctl.runtime.policies import POLICIES, make_policy
from specctl.runtime.policies.length import LengthChooser
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

SIZE = 24
STEPS = 12  # of training
Drafted = tuple[list[Completion], list[Outcome]]
# Five layers are the published default; the contract is the same with two.
SMALL: dict[str, dict[str, Any]] = {
    name: {"layers": 2, "taps": (0, 2)}
    for name in ("dflare", "dflash", "dfly", "dspark", "domino", "xpress")
}
SMALL["flash"] = {"latents": None}  # queries learn from images alone: test_visual.py
SMALL["uno"] = {"loss": "kl"}  # a random target's next tokens cannot be foreseen: tv stays high
SMALL["jump"] = {"num_heads": 4, "stride": 1}
SMALL["domino"]["base_weight"] = 0.5  # at the first step the correction learns nothing, else
# As many candidates as tokens: what is outside them has no score to compare.
SMALL["dflash2"] = {"layers": 2, "taps": (0, 2), "candidates": SIZE}
SMALL["lilicorr"] = {**SMALL["dflash2"], "width": 32, "factor": 32, "num_heads": 3}
NAMES = sorted(families())
# Learn too little over the whole vocabulary in so few steps.
SLOWLY = ("k-forcing", "rasd", "small-lm", "sorted", "staged", "superposed")
TRAINED = [name for name in NAMES if families()[name].trainable]
# States that show logits behind each token; what proposes whole trees has tests of its own.
STEPWISE = [name for name in TRAINED if families()[name].policies[0] != "direct"]
GROWN = [(name, policy) for name in NAMES for policy in families()[name].policies]
# What a rule and a policy owe each other does not hang on the family: every family with its first
# policy, every policy with a family or two of unlike states.
TYPICAL = [
    (name, policy)
    for name, policy in GROWN
    if name in ("eagle3", "small-lm", "team") or policy == families()[name].policies[0]
]
# Whose 1,500 texts take more than two seconds.
SLOW = (
    "aded", "chimera", "clover", "dflare", "dflash", "dflash2", "dfly", "domino", "dspark",
    "easyspec", "falcon", "fspad", "glide", "goose", "gumiho", "jakiro", "jump", "k-forcing",
    "lilicorr", "moa", "mtp", "p-eagle", "pass", "ppd", "s3d", "shared-kv", "sorted", "superposed",
    "swift", "uno", "xpress",
)  # fmt: skip
# From whose logits a policy draws as it does from eagle3's and small-lm's, with every policy of
# theirs; or whose state is that of hydra, kangaroo, medusa or skip-layers.
ALIKE = (
    "blockwise", "calm", "coral", "del", "depth-decay", "eagle", "eesd", "flash", "hass",
    "hidden-transfer", "layer-skip", "m2r2", "mlp-speculator", "msd", "recurrent", "stand",
)  # fmt: skip
# Each of these policies draws from the other of the two.
OTHERWISE = {("eagle3", "chain"), ("eagle3", "static-tree"), ("small-lm", "dynamic-tree")}
SAMPLED = [
    pytest.param(*case, {}, marks=pytest.mark.proof)
    if case[0] in SLOW + ALIKE or case in OTHERWISE
    else (*case, {})
    for case in TYPICAL
]
# Heads that draw from two of the six tokens, with every policy of theirs.
SAMPLED += [
    pytest.param(name, policy, {"candidates": 2}, marks=pytest.mark.proof)
    for name, policy in GROWN
    if name in ("dflash2", "lilicorr")
]
# Options under which a loss holds nothing but distributions that drafting uses, all of one weight.
AS_SERVED = {
    "feature_weight": 0.0, "hidden_weight": 0.0, "noise": 0.0, "dropout": 0.0, "glance": 0.0,
    "passes": 1, "head_weight": None, "early_weight": 0.0, "base_weight": 0.0,
    "free_weight": 0.0, "choice_weight": 1.0, "penalty_weight": 0.0, "whole_blocks": False,
    "fresh_noise": False,
}  # fmt: skip


def spared(pairs: list[tuple[str, str]], *more: Any, typical: Any = ()) -> list[Any]:
    """What is not typical is a proof."""
    marks = {pair: typical if pair in TYPICAL else pytest.mark.proof for pair in pairs}
    return [pytest.param(*pair, *more, marks=mark) for pair, mark in marks.items()]


# Every policy of a family; over a trimmed vocabulary the family's first.
GREEDILY = spared(GROWN, False, typical=pytest.mark.fast)
GREEDILY += [(name, families()[name].policies[0], True) for name in TRAINED]
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4], [7], [11, 12, 11, 12, 11], [20, 2, 20], [8, 8])
ENDS = (PROMPTS[0], PROMPTS[-1])
KEPT = [0, 1, 2, 3, 5, 8, 11, 12, 13, 20, 21]


@pytest.fixture(autouse=True)
def exits_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification begins at the exit layer wherever it can, whatever that saves."""
    monkeypatch.setattr(language_model, "LEAST_SAVED", 0.0)


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    found: Target = make_target(num_layers=3, vocab=SIZE)
    return found


@pytest.fixture(scope="module", autouse=True)
def frozen(target: Target) -> dict[str, Tensor]:
    """The target's weights as they were before any test."""
    return {n: t.clone() for n, t in target.lm.module.state_dict().items()}


@dataclass(frozen=True, slots=True)
class Trained:
    """A drafter with the losses of its training, and the names of its tensors that it changed."""

    drafter: Drafter
    losses: tuple[float, ...] = ()
    moved: frozenset[str] = frozenset()


@pytest.fixture(scope="module")
def trained(target: Target, train_a_little: Any) -> Callable[..., Trained]:
    """trained(name, trimmed): each made once. Over a trimmed vocabulary a few steps show that it
    learns; what drafts over one is trained over the whole."""

    @cache
    def make(name: str, trimmed: bool) -> Trained:
        drafter = new_drafter(target, name, trimmed)
        if not drafter.trainable():
            return Trained(drafter)
        before = {n: t.clone() for n, t in drafter.tensors().items()}
        steps = 3 if trimmed and name not in SLOWLY else STEPS
        losses = train_a_little(target, drafter, steps)
        moved = {n for n, t in drafter.tensors().items() if not torch.equal(t, before[n])}
        return Trained(drafter, tuple(losses), frozenset(moved))

    return make


@pytest.fixture(scope="module")
def make_drafter(trained: Callable[..., Trained]) -> Callable[..., Drafter]:
    """make_drafter(name, trimmed=False): each made once."""

    @cache
    def make(name: str, trimmed: bool = False) -> Drafter:
        whole = trained(name, False).drafter
        return whole.trimmed(VocabMap(torch.tensor(KEPT), SIZE)) if trimmed else whole

    return make


@pytest.fixture(scope="module")
def greedy_run(target: Target, make_drafter: Any) -> Callable[..., Drafted]:
    """greedy_run(name, policy, trimmed, num_slots): what several tests look at, each run once. Two
    prompts after each other in one slot, all five in three."""

    @cache
    def found(name: str, policy: str, trimmed: bool, num_slots: int) -> Drafted:
        prompts = PROMPTS if num_slots > 1 else ENDS
        return run(target, make_drafter(name, trimmed), policy, prompts, num_slots, GREEDY)

    return found


def new_drafter(target: Target, name: str, trimmed: bool = False) -> Drafter:
    """Fresh weights; training-free families stay as they are under `trimmed`."""
    torch.manual_seed(5)
    found = families()[name]
    vocab = VocabMap(torch.tensor(KEPT), SIZE) if trimmed and found.trainable else None
    drafter = found.build(found.options(**SMALL.get(name, {})), target.spec, vocab)
    if drafter.needs().borrow:
        drafter.bind(target.borrowed())
    return drafter


@dataclass
class Recorder(LengthChooser):
    """Drafts as long as the policy allows and keeps every round's outcome."""

    first_is_free = False
    outcomes: list[Outcome] = field(default_factory=list)

    def length(self, batch: int) -> int:
        return 99

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        self.outcomes.append(outcome)


@dataclass
class Napper(Recorder):
    """Drafts in two rounds of five."""

    num_asked: int = 0

    def length(self, batch: int) -> int:
        self.num_asked += 1
        return 99 if self.num_asked % 5 in (1, 2) else 0


def run(
    target: Target,
    drafter: Drafter | None,
    policy: str,
    prompts: Sequence[Sequence[int]],
    num_slots: int,
    sampling: Sampling,
    **fields: Any,
) -> Drafted:
    recorder = Recorder(CostTable({0: 1.0}, {0: 1.0}, "", "", 1))
    engine = Engine(
        target,
        drafter,
        make_policy({"policy": policy, **fields}) if drafter is not None else None,
        num_slots=num_slots,
        chooser=recorder,
    )
    requests = [Request(tuple(prompt), sampling) for prompt in prompts]
    return engine.run(requests), recorder.outcomes


GREEDY = Sampling(max_new_tokens=14, ignore_eos=True)
SHORT = replace(GREEDY, max_new_tokens=6)  # where every round shows what is looked for


@pytest.fixture(scope="module")
def plain(target: Target) -> list[Completion]:
    """What the target writes alone, greedily."""
    return run(target, None, "chain", PROMPTS, 1, GREEDY)[0]


@pytest.mark.parametrize(("name", "policy", "trimmed"), GREEDILY)
def test_greedy_output_is_the_targets_whatever_the_batch(
    plain: list[Completion], greedy_run: Any, name: str, policy: str, trimmed: bool
) -> None:
    wanted = {p.request.tokens: p.tokens for p in plain}
    num_accepted = 0
    # Five prompts in three slots: rows leave and others take their slot. What is cut from the
    # vocabulary changes nothing about slots.
    for num_slots in (3,) if trimmed else (1, 3):
        drafted, outcomes = greedy_run(name, policy, trimmed, num_slots)
        assert [d.tokens for d in drafted] == [wanted[d.request.tokens] for d in drafted]
        num_accepted += sum(sum(o.num_accepted) for o in outcomes)
    assert num_accepted > 0


def exact_pairs(target: Target, prompt: Sequence[int], temperature: float) -> Tensor:
    """[V, V]: probability of the next two tokens."""
    rows = torch.tensor([[*prompt, token] for token in range(target.spec.vocab_size)])
    batch = TrainBatch(
        rows,
        torch.ones_like(rows, dtype=torch.bool),
        torch.zeros_like(rows),
        torch.arange(rows.shape[1]).expand_as(rows),
    )
    with torch.no_grad():
        out = target.lm.dense(rows, batch.position_BS, target.lm.document_masks(batch.document_BS))
    assert out.logits_BTV is not None
    distribution = (out.logits_BTV.double() / temperature).softmax(-1)
    return distribution[0, -2][:, None] * distribution[:, -1]


@pytest.mark.parametrize(("name", "policy", "more"), SAMPLED)
def test_sampled_pairs_follow_the_targets_distribution(
    make_target: Any, train_a_little: Any, name: str, policy: str, more: dict[str, Any]
) -> None:
    small = make_target(num_layers=3, vocab=6, hidden=32)
    torch.manual_seed(5)
    found = families()[name]
    drafter = found.build(found.options(**{**SMALL.get(name, {}), **more}), small.spec, None)
    if drafter.needs().borrow:
        drafter.bind(small.borrowed())
    if drafter.trainable():
        train_a_little(small, drafter, 12)
    prompt, count, temperature = [1, 2, 3, 1, 2, 3, 1, 2], 1500, 1.3
    fields = {"branch": (2, 1)} if policy == "static-tree" else {}
    recorder = Recorder(CostTable({0: 1.0}, {0: 1.0}, "", "", 1))
    engine = Engine(
        small,
        drafter,
        make_policy({"policy": policy, **fields}),
        num_slots=750,
        chooser=recorder,
    )
    requests = [
        Request(tuple(prompt), Sampling(temperature, seed=i, max_new_tokens=3, ignore_eos=True))
        for i in range(count)
    ]
    counts = torch.zeros(6, 6, dtype=torch.double)
    for completion in engine.run(requests):
        first, second = completion.tokens[:2]
        counts[first, second] += 1
    expected = exact_pairs(small, prompt, temperature) * count
    rare = expected < 5
    seen = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    used = wanted > 0
    statistic = float(((seen - wanted)[used] ** 2 / wanted[used]).sum())
    assert float(chi2.sf(statistic, int(used.sum()) - 1)) > 1e-3
    accepted = sum(sum(o.num_accepted) for o in recorder.outcomes)
    assert accepted > 0
    assert any(a < o.tree.depth for o in recorder.outcomes for a in o.num_accepted)


@pytest.mark.parametrize("name", [n for n in NAMES if "direct" in families()[n].policies])
def test_a_proposal_respects_its_budget(target: Target, make_drafter: Any, name: str) -> None:
    for nodes, depth in ((1, 1), (3, 2), (7, 3), (20, 5)):
        _, outcomes = run(
            target, make_drafter(name), "direct", PROMPTS[:3], 3, SHORT, nodes=nodes, length=depth
        )
        for outcome in outcomes:
            check_tree(outcome.tree, Budget(nodes, depth), SIZE)


def check_tree(tree: DraftTree, budget: Budget, size: int) -> None:
    assert tree.num_nodes <= budget.nodes
    assert tree.depth <= budget.depth
    depth_BT = tree.depth_BT()
    assert int(depth_BT[tree.fed_valid_BT()].max()) <= tree.depth
    probes = slice(tree.num_nodes - tree.num_probes, None)
    assert bool((depth_BT[:, 1:][:, probes] <= tree.probe_depth).all())
    assert not bool(tree.valid_BN[:, probes].any())
    at_N = torch.arange(tree.num_nodes)
    assert bool((tree.parent_BN < at_N).all())
    assert bool(((tree.token_BN >= 0) & (tree.token_BN < size)).all())
    for b in range(tree.token_BN.shape[0]):
        real = tree.valid_BN[b]
        children = set(
            zip(tree.parent_BN[b, real].tolist(), tree.token_BN[b, real].tolist(), strict=True)
        )
        assert len(children) == int(real.sum()), "two siblings carry one token"
        for node in at_N[real].tolist():
            parent = int(tree.parent_BN[b, node])
            assert parent < 0 or bool(real[parent]), "a valid node hangs on padding"


@pytest.mark.parametrize("name", TRAINED)
def test_loss_falls_and_only_trainable_tensors_move(
    target: Target, frozen: dict[str, Tensor], trained: Callable[..., Trained], name: str
) -> None:
    """By a fifth over the whole vocabulary, and from the first steps on over a trimmed one; or the
    reverse."""
    whole, trimmed = trained(name, False), trained(name, True)
    longer, other = (trimmed, whole) if name in SLOWLY else (whole, trimmed)
    assert longer.losses[-1] < 0.8 * longer.losses[0]
    assert other.losses[-1] < other.losses[0]
    for found in (whole, trimmed):
        assert found.moved == set(found.drafter.trainable())
    for n, t in target.lm.module.state_dict().items():
        assert torch.equal(t, frozen[n]), f"{n} of the target moved"
        assert not t.requires_grad


@pytest.mark.parametrize("name", TRAINED)
def test_no_loss_reads_the_state_behind_the_end_of_a_document(
    target: Target, make_batch: Any, name: str
) -> None:
    """A server keeps none of it: the last token of an answer was never fed."""
    drafter = new_drafter(target, name)
    batch = make_batch(target, drafter)
    after_BS = batch.document_BS.roll(-1, 1)
    after_BS[:, -1] = -1
    is_last_BS = (batch.document_BS >= 0) & (after_BS != batch.document_BS)
    teacher = batch.teacher_BSV
    cut = replace(
        batch,
        taps={k: v.masked_fill(is_last_BS[..., None], 0.0) for k, v in batch.taps.items()},
        teacher_BSV=None if teacher is None else teacher.masked_fill(is_last_BS[..., None], 0.0),
    )
    found = []
    for each in (batch, cut):
        torch.manual_seed(3)
        found.append(drafter.loss(each).sum)
    assert is_last_BS.sum() == 2 * len(batch.ids_BS)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", TRAINED)
def test_borrowed_pieces_are_not_among_the_stored_tensors(target: Target, name: str) -> None:
    drafter = new_drafter(target, name)
    borrowed = target.borrowed()
    owned = {t.data_ptr() for t in drafter.tensors().values()}
    assert not owned & {borrowed.embedding_VD.data_ptr(), borrowed.head_VD.data_ptr()}


@pytest.mark.parametrize(
    ("name", "trimmed"), [(n, False) for n in NAMES] + [(n, True) for n in TRAINED]
)
def test_saved_and_loaded_it_drafts_the_same(
    target: Target, make_drafter: Any, name: str, trimmed: bool
) -> None:
    drafter = make_drafter(name, trimmed)
    torch.manual_seed(99)
    twin = families()[name].build(drafter.options, target.spec, drafter.vocab)
    twin.load_tensors(drafter.tensors())
    policy = families()[name].policies[0]
    sampling = SHORT if trimmed else replace(SHORT, temperature=1.0)
    _, ours = run(target, drafter, policy, PROMPTS[:3], 3, sampling)
    _, theirs = run(target, twin, policy, PROMPTS[:3], 3, sampling)
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.tree.token_BN, b.tree.token_BN)
        assert a.num_accepted == b.num_accepted


@pytest.mark.parametrize("name", TRAINED)
def test_a_missing_or_unknown_tensor_is_refused(target: Target, name: str) -> None:
    drafter = new_drafter(target, name)
    tensors = drafter.tensors()
    first = next(iter(tensors))
    with pytest.raises(RuntimeError, match="Missing"):
        drafter.load_tensors({n: t for n, t in tensors.items() if n != first})
    with pytest.raises(RuntimeError, match="Unexpected"):
        drafter.load_tensors({**tensors, "stowaway": tensors[first]})


@pytest.mark.parametrize("trimmed", [False, True], ids=["full", "trimmed"])
@pytest.mark.parametrize("name", STEPWISE)
def test_training_scores_a_token_as_serving_does(
    target: Target, make_drafter: Any, capture_batch: Any, drive: Any, name: str, trimmed: bool
) -> None:
    """With one token to predict, the loss is made of the very distributions that drafting would
    use: one per training step or head j, which drafts that token j steps after the root, or one per
    exit."""
    trained = make_drafter(name, trimmed)
    options = {n: getattr(trained.options, n) for n in trained.options.__dataclass_fields__}
    options["loss"] = "ce"
    # a distance of states is no distribution; serving adds no noise and shows no answers; heads
    # follow the first pass in training
    for name_of, plain in AS_SERVED.items():
        if name_of in options:
            options[name_of] = plain
    drafter = families()[name].build(type(trained.options)(**options), target.spec, trained.vocab)
    drafter.load_tensors(trained.tensors())
    if drafter.needs().borrow:
        drafter.bind(target.borrowed())
    text = [3, 1, 4, 1, 5, 2, 11, 8, 5, 3]  # the last six are speakable under KEPT
    ids = torch.tensor([text])
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[0, -1] = True
    batch = TrainBatch(ids, mask, torch.zeros_like(ids), torch.arange(len(text))[None])
    assert int(ahead_mask(batch, 1).sum()) == 1
    out = drafter.loss(capture_batch(target, drafter, batch))
    steps = getattr(drafter.options, "num_heads", getattr(drafter.options, "ttt_steps", 1))
    decay = getattr(drafter.options, "decay", 1.0)
    label = text[-1] if drafter.vocab is None else int(drafter.vocab.to_draft()[text[-1]])
    served = 0.0
    for j, exit_at in itertools.product(range(steps), range(len(getattr(drafter, "exits", "1")))):
        if hasattr(drafter, "exits"):
            drafter.options = replace(drafter.options, only=exit_at)
        logits_TK = drive(target, drafter).chain_logits(text[:-1], len(text) - 1 - j)
        served -= decay**j * float(logits_TK[j].detach().log_softmax(-1)[label])
    assert float(out.sum) == pytest.approx(served, rel=1e-4)


@pytest.mark.parametrize(("name", "policy"), TYPICAL)
def test_a_used_slot_drafts_as_a_fresh_one(
    target: Target, make_drafter: Any, greedy_run: Any, name: str, policy: str
) -> None:
    drafter = make_drafter(name)
    if name == "token-recycling":  # its memory is shared on purpose: compare it frozen
        drafter = families()[name].build(families()[name].options(freeze=True), target.spec, None)
        torch.manual_seed(0)
        best = torch.stack([torch.randperm(SIZE)[:8] for _ in range(SIZE)])
        drafter.load_tensors({"matrix": best})
        _, after = run(target, drafter, policy, ENDS, 1, GREEDY)
    else:
        _, after = greedy_run(name, policy, False, 1)
    _, alone = run(target, drafter, policy, PROMPTS[-1:], 1, GREEDY)
    again = after[-len(alone) :]
    for a, b in zip(alone, again, strict=True):
        assert torch.equal(a.tree.token_BN, b.tree.token_BN)
        assert a.num_accepted == b.num_accepted


def row_drafts(outcome: Outcome) -> list[Any]:
    """What was drafted for each row that has a node: slot, tokens, depths, how many were kept."""
    tree, found = outcome.tree, []
    for b, valid_N in enumerate(tree.valid_BN):
        if valid_N.any():
            depth_N = tree.depth_BT()[b, 1:]
            nodes = tree.token_BN[b, valid_N].tolist(), depth_N[valid_N].tolist()
            found.append((outcome.view.slots[b], *nodes, outcome.num_accepted[b]))
    return found


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.proof), 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_a_drafter_that_slept_drafts_as_one_that_followed_every_round(
    target: Target, make_drafter: Any, name: str, temperature: float
) -> None:
    """Two rounds of five are drafted in; rows join and leave in all of them. A sampled row at its
    last token has no room for a draft: it sleeps, or stands in the tree without a node."""
    sampling = Sampling(temperature, max_new_tokens=10, ignore_eos=True)
    requests = [
        Request(tuple(prompt), replace(sampling, seed=i)) for i, prompt in enumerate(PROMPTS[:4])
    ]
    found = []
    for sleeps in (True, False):
        drafter, recorder = make_drafter(name), Napper(CostTable({0: 1.0}, {0: 1.0}, "", "", 1))
        policy = make_policy({"policy": families()[name].policies[0]})
        engine = Engine(target, drafter, policy, num_slots=3, chooser=recorder)
        engine.drafting.is_lazy &= sleeps
        texts = [row.tokens for row in engine.run(requests)]
        drafts = [row_drafts(outcome) for outcome in recorder.outcomes]
        found.append((texts, drafts))
        assert any(drafts)
        assert len(engine.drafting) == 0, "nothing is kept of rows that have left"
    assert found[0] == found[1]


@pytest.mark.parametrize(("name", "policy"), spared([pair for pair in GROWN if pair[0] in TRAINED]))
def test_a_trimmed_drafter_speaks_only_kept_ids(
    target: Target, make_drafter: Any, name: str, policy: str
) -> None:
    small = make_drafter(name, True)
    assert small.vocab is not None
    _, outcomes = run(target, small, policy, PROMPTS[:3], 3, SHORT)
    for outcome in outcomes:
        drafted = outcome.tree.token_BN[outcome.tree.valid_BN]
        assert set(drafted.tolist()) <= set(KEPT)


# A lattice is scored together: without some of its tokens the others score otherwise.
SCORED_APART = [name for name in STEPWISE if name != "lilicorr"]


@pytest.mark.parametrize("name", SCORED_APART)
def test_trimming_keeps_the_logits_of_kept_ids(
    target: Target, make_drafter: Any, drive: Any, name: str
) -> None:
    whole = make_drafter(name)
    small = whole.trimmed(VocabMap(torch.tensor(KEPT), SIZE))
    text = [3, 1, 4, 1, 5, 9]
    full_TV = drive(target, whole).chain_logits(text, 4)
    torch.testing.assert_close(drive(target, small).chain_logits(text, 4), full_TV[:, KEPT])
    smaller = small.trimmed(VocabMap(torch.tensor(KEPT[:5]), SIZE))
    torch.testing.assert_close(drive(target, smaller).chain_logits(text, 4), full_TV[:, KEPT[:5]])


@pytest.mark.parametrize("name", NAMES)
def test_a_family_describes_itself(name: str) -> None:
    found = families()[name]
    assert found.paper.startswith("https://")
    assert len(found.summary) > 100
    assert found.options.__dataclass_params__.frozen
    assert set(found.policies) <= set(POLICIES)


@pytest.mark.parametrize("name", NAMES)
def test_stepwise_families_and_only_they_are_grown_by_policies(target: Target, name: str) -> None:
    found = families()[name]
    state = new_drafter(target, name).open(Space(1, 16, 8, torch.device("cpu"), torch.float32))
    as_proposed = {"direct", "switch", "prompt-tree"}  # the last is direct, of a size that pays
    grown = set(found.policies) - as_proposed
    assert bool(grown) == isinstance(state, StepState)


@pytest.fixture(scope="module")
def undrafted(target: Target) -> tuple[list[Request], list[Sequence[int]]]:
    """Two short requests, and what the target writes by itself."""
    sampling = replace(GREEDY, max_new_tokens=4)
    requests = [Request(tuple(prompt), sampling) for prompt in PROMPTS[:2]]
    return requests, [row.tokens for row in Engine(target, num_slots=2).run(requests)]


@pytest.mark.parametrize(("name", "policy"), spared([pair for pair in GROWN if pair[0] in TRAINED]))
def test_nothing_is_drafted_from_weights_of_nan_and_every_row_is_counted(
    target: Target, undrafted: Any, name: str, policy: str
) -> None:
    """Whatever turns the logits into tokens, and whether or not it keeps a distribution of them."""
    drafter = new_drafter(target, name)
    with torch.no_grad():
        for weight in drafter.trainable().values():
            weight.fill_(torch.nan)
    guard, policy_ = Guard(target.spec.vocab_size, print), make_policy({"policy": policy})
    engine = Engine(target, drafter, policy_, num_slots=2, wrap_drafter=guard.wrap)
    requests, tokens = undrafted
    done = engine.run(requests)
    assert [row.tokens for row in done] == tokens
    assert guard.num_disabled == len(requests)
    assert [row.stats.drafted for row in done] == [0, 0]
