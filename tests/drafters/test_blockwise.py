"""Blockwise: one layer, the target's head, the block; rescoring by counts and by a network."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.errors import RecipeError
from specctl.core.vocab import VocabMap
from specctl.drafters.heads.blockwise import BACKOFF, Blockwise, BlockwiseOptions, NgramCounts
from specctl.drafters.nets.rescore import NONE, Rescoring
from specctl_testing.drafters.head_cases import fit, make_heads, nearly_markov
from specctl_testing.drafters.parallel_runs import decode

HEADS, TOP = 3, 8
KINDS = ("none", "ngram", "neural")


def test_the_layer_alone_is_stored(make_target: Any) -> None:
    drafter = make_heads(make_target(), "blockwise", num_heads=3, hidden=16)
    assert {n: tuple(t.shape) for n, t in drafter.tensors().items()} == {
        "up.weight": (48, 32),
        "up.bias": (48,),
        "down.weight": (96, 48),
        "down.bias": (96,),
    }


def test_the_block_is_every_heads_best_token(make_target: Any, make_batch: Any) -> None:
    target = make_target()
    drafter = make_heads(target, "blockwise", num_heads=3)
    direct = decode(target, drafter, tokens=12, length=3)
    chain = decode(target, drafter, tokens=12, length=3, policy="chain")
    for one, other in zip(direct.outcomes, chain.outcomes, strict=True):
        assert torch.equal(one.tree.token_BN, other.tree.token_BN)
    assert direct.answers == decode(target, None, tokens=12).answers


def test_one_random_head_a_batch_is_the_whole_loss_on_average(
    make_target: Any, make_batch: Any
) -> None:
    target = make_target()
    whole = make_heads(target, "blockwise", num_heads=3, loss="kl")
    single = make_heads(target, "blockwise", num_heads=3, loss="kl", one_head=True)
    torch.nn.init.normal_(single.module.down.weight, std=0.1)  # heads that differ
    whole.load_tensors(single.tensors())
    batch = make_batch(target, single)
    sums = {round(float(single.loss(batch).sum.detach()), 3) for _ in range(30)}
    assert len(sums) == 3
    assert sum(sums) == pytest.approx(float(whole.loss(batch).sum.detach()), rel=1e-4)


# -- rescoring ------------------------------------------------------------


def rows_of(ids: list[list[int]], documents: list[list[int]] | None = None) -> TrainBatch:
    ids_BS = torch.tensor(ids)
    document_BS = torch.zeros_like(ids_BS) if documents is None else torch.tensor(documents)
    at_BS = torch.arange(ids_BS.shape[1]).expand_as(ids_BS)
    return TrainBatch(ids_BS, document_BS >= 0, document_BS, at_BS)


def test_counts_are_stupid_backoff_within_documents() -> None:
    text = [1, 2, 3, 1, 2, 3, 1, 2, 4]
    model = NgramCounts(3, vocab_size=10)
    model.loss(rows_of([[*text, 2, 5, 0]], [[0] * 9 + [1, 1, -1]]), None)
    pairs = Counter([*pairwise(text), (2, 5)])
    triples = Counter(zip(text, text[1:], text[2:], strict=False))
    ids_J = torch.tensor([3, 4, 5, 7])
    context_N = torch.tensor([1, 2])
    single = [(n + 1) / (11 + 10) for n in (2, 1, 1, 0)]
    seen = [
        triples[1, 2, 3] / pairs[1, 2],
        triples[1, 2, 4] / pairs[1, 2],
        BACKOFF * pairs[2, 5] / 4,  # seen after 2, never after 1, 2
        BACKOFF**2 * single[3],
    ]
    scored = model.score(context_N, ids_J, ids_J)
    torch.testing.assert_close(scored, torch.tensor(seen).log(), rtol=1e-4, atol=1e-4)
    fresh = model.score(torch.tensor([NONE, NONE]), ids_J, ids_J)
    expected = torch.tensor([BACKOFF**2 * share for share in single]).log()
    torch.testing.assert_close(fresh, expected, rtol=1e-4, atol=1e-4)


@dataclass(frozen=True)
class Trained:
    """Drafters with the same heads, by kind of rescoring; texts of the target and their prompts."""

    target: Any
    drafters: dict[str, Blockwise]
    prefixes: list[list[int]]
    answers: Tensor  # [P, HEADS]: what the target says after each prefix


@pytest.fixture(scope="module")
def trained(make_model: Any, capture_batch: Any) -> Trained:
    """Heads and rescorers that learned the same 60 texts of a target, and 8 more texts."""
    target = nearly_markov(make_model)
    prompts = torch.randint(0, 24, (68, 2), generator=torch.Generator().manual_seed(2)).tolist()
    ran = decode(target, None, prompts, tokens=30, slots=68, temperature=0.5)
    texts = [[*p, *a] for p, a in zip(prompts, ran.answers, strict=True)]
    drafters: dict[str, Blockwise] = {}
    for kind in KINDS:
        options = {"rescore": kind, "rescore_top": TOP, "order": 3, "rescore_width": 16}
        drafter = make_heads(target, "blockwise", num_heads=HEADS, loss="kl", **options)
        if kind == "none":
            fit(drafter, capture_batch(target, drafter, rows_of(texts[:60])), 60, 5e-3)
        else:
            heads = dict(drafters["none"].tensors())
            drafter.load_tensors({**drafter.tensors(), **heads})
            batch = capture_batch(target, drafter, rows_of(texts[:60]))
            fit(drafter, batch, 60 if kind == "neural" else 1, 5e-3)
            drafter.load_tensors({**drafter.tensors(), **heads})
        drafters[kind] = drafter
    prefixes = [text[:n] for text in texts[60:] for n in range(4, 28, 4)]
    greedy = decode(target, None, prefixes, tokens=HEADS + 1, slots=len(prefixes)).answers
    known = [[*prefix, answer[0]] for prefix, answer in zip(prefixes, greedy, strict=True)]
    return Trained(target, drafters, known, torch.tensor(greedy)[:, 1:])


def drafts(found: Trained, kind: str, drive: Any, round_view: Any) -> tuple[Tensor, Tensor]:
    """[P, HEADS] greedy chains, and [P, HEADS] whether the target's token is in each lattice."""
    one = drive(found.target, found.drafters[kind])
    num = len(found.prefixes)
    state = one.open(num)
    for slot, prefix in enumerate(found.prefixes):
        one.start(state, slot, prefix)
    logits_PK = state.root(round_view(dict(enumerate(found.prefixes))))
    tokens, reached = [], []
    for i in range(HEADS):
        tokens.append(logits_PK.argmax(-1))
        best_PT = state._logits_BPK[:, i].topk(TOP).indices
        reached.append((best_PT == found.answers[:, i, None]).any(-1))
        if i + 1 < HEADS:
            parent_P1 = torch.full((num, 1), i - 1)
            logits_PK = state.expand(tokens[-1][:, None], parent_P1)[:, 0]
    return torch.stack(tokens, 1), torch.stack(reached, 1)


def accepted(is_right_PH: Tensor) -> Tensor:
    """[P]: how many are right before the first that is not."""
    return is_right_PH.long().cumprod(1).sum(1)


@pytest.mark.parametrize("kind", ["ngram", "neural"])
@torch.no_grad()
def test_rescoring_lifts_acceptance_and_never_beats_the_lattice(
    trained: Trained, drive: Any, round_view: Any, kind: str
) -> None:
    raw_PH, lattice_PH = drafts(trained, "none", drive, round_view)
    rescored_PH, same_PH = drafts(trained, kind, drive, round_view)
    assert torch.equal(lattice_PH, same_PH)
    oracle_P = accepted(lattice_PH)
    raw_P, rescored_P = (accepted(x == trained.answers) for x in (raw_PH, rescored_PH))
    assert bool((oracle_P >= raw_P).all())
    assert bool((oracle_P >= rescored_P).all())
    assert float(rescored_P.float().mean()) > float(raw_P.float().mean()) + 0.1


def test_rescoring_removes_stutter() -> None:
    """Text alternates, so either token may come i places on and every head says the likelier one.
    Whoever has counted what follows what knows better."""
    model = NgramCounts(2, vocab_size=4)
    model.loss(rows_of([[1, 2] * 8]), None)
    rescoring = Rescoring(model, top=2, weight=0.5, vocab=None)
    logits_K = torch.tensor([-9.0, 0.1, 0.0, -9.0])
    drafted = [2]
    for _ in range(4):
        drafted.append(int(rescoring(logits_K[None], torch.tensor([[drafted[-1]]])).argmax()))
    assert drafted[1:] == [1, 2, 1, 2]
    assert int(logits_K.argmax()) == 1  # and 1, 1, 1, 1 without


@pytest.mark.parametrize("policy", ["direct", "chain", "merged-beams"])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_is_the_targets_however_it_is_rescored(
    trained: Trained, kind: str, policy: str
) -> None:
    prompts = [prefix[:6] for prefix in trained.prefixes[:5]]
    plain = decode(trained.target, None, prompts, tokens=12).answers
    ran = decode(
        trained.target, trained.drafters[kind], prompts, tokens=12, slots=3, length=3, policy=policy
    )
    assert ran.answers == plain
    if policy == "direct":  # the block of rescored heads is the rescored chain
        chain = decode(
            trained.target,
            *(trained.drafters[kind], prompts),
            tokens=12,
            slots=3,
            length=3,
            policy="chain",
        )
        for one, other in zip(ran.outcomes, chain.outcomes, strict=True):
            assert torch.equal(one.tree.token_BN, other.tree.token_BN)


@torch.no_grad()
def test_a_trimmed_drafter_is_rescored_over_kept_ids(trained: Trained, drive: Any) -> None:
    vocab = VocabMap(torch.arange(0, 24, 2), 24)
    text = trained.prefixes[0]
    for kind in ("ngram", "neural"):
        small = trained.drafters[kind].trimmed(vocab)
        logits_TK = drive(trained.target, small).chain_logits([*text, 4, 6], len(text))
        assert logits_TK.shape == (3, 12)
        assert logits_TK.isfinite().sum(-1).tolist() == [TOP] * 3


def test_impossible_rescoring_is_refused() -> None:
    with pytest.raises(RecipeError, match="unknown rescore"):
        BlockwiseOptions(rescore="lstm")
    with pytest.raises(RecipeError, match="too small"):
        BlockwiseOptions(rescore="ngram", order=1)
