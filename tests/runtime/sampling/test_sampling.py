"""Sampling settings: equal to transformers' processors, evaluated along each node's own path."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specctl.core.drafter import RoundView
from specctl.core.errors import SpecctlError
from specctl.core.tree import DraftTree, NodeKind, empty_tree
from specctl.runtime.sampling.sampling import Sampling, SamplingBatch

V = 40
TEXTS = ([3, 7, 7, 1], [9, 2, 9, 2, 9, 5])


def view_of(texts=TEXTS):
    root_B = torch.tensor([text[-1] for text in texts])
    kept_B = torch.tensor([len(text) - 1 for text in texts])
    slots = tuple(range(len(texts)))
    return RoundView(slots, torch.tensor(slots), root_B, kept_B, tuple(texts))


def fork(num_rows=2):
    """root -> 7 -> (2, 9), root -> 1."""
    token_BN = torch.tensor([[7, 1, 2, 9]]).expand(num_rows, 4)
    parent_BN = torch.tensor([[-1, -1, 0, 0]]).expand(num_rows, 4)
    rank_BN = torch.tensor([[0, 1, 0, 1]]).expand(num_rows, 4)
    return DraftTree(token_BN, parent_BN, rank_BN, token_BN > 0, NodeKind.POINT, 2)


PATHS = [[], [7], [1], [7, 2], [7, 9]]


def logits(num_rows=2, num_fed=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(num_rows, num_fed, V, generator=generator)


def ours(samplings, logits_BTV, tree=None, texts=TEXTS):
    batch = SamplingBatch(samplings, V)
    return batch.scores(logits_BTV, tree or fork(len(samplings)), view_of(texts))


def theirs(processors, logits_BTV):
    """transformers' processors on every node's own text."""
    out_BTV = torch.empty_like(logits_BTV)
    for b, text in enumerate(TEXTS):
        for t, path in enumerate(PATHS):
            ids = torch.tensor([[*text, *path]])
            out_BTV[b, t] = LogitsProcessorList(processors)(ids, logits_BTV[b, t : t + 1].clone())[
                0
            ]
    return out_BTV


KNOBS = {
    "temperature": ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
    "top-k": ({"temperature": 1.0, "top_k": 5}, [TopKLogitsWarper(5)]),
    "top-k beyond the vocabulary": ({"temperature": 1.0, "top_k": 99}, [TopKLogitsWarper(99)]),
    "top-p": ({"temperature": 1.0, "top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "tiny top-p": ({"temperature": 1.0, "top_p": 1e-6}, [TopPLogitsWarper(1e-6)]),
    "min-p": ({"temperature": 1.0, "min_p": 0.1}, [MinPLogitsWarper(0.1)]),
    "repetition": (
        {"temperature": 1.0, "repetition_penalty": 1.7},
        [RepetitionPenaltyLogitsProcessor(1.7)],
    ),
    "bias": (
        {"temperature": 1.0, "logit_bias": {3: 2.5, 9: -math.inf}},
        [SequenceBiasLogitsProcessor({(3,): 2.5, (9,): -math.inf})],
    ),
    "bad words": (
        {"temperature": 1.0, "bad_words": ((4,), (7, 2), (1, 7, 9), (9, 5, 1, 0), (8, 8))},
        [NoBadWordsLogitsProcessor([[4], [7, 2], [1, 7, 9], [9, 5, 1, 0], [8, 8]])],
    ),
    "everything": (
        {
            "temperature": 0.6,
            "top_k": 12,
            "top_p": 0.9,
            "min_p": 0.02,
            "repetition_penalty": 1.3,
            "logit_bias": {5: 1.0},
            "bad_words": ((7, 2),),
        },
        [
            SequenceBiasLogitsProcessor({(5,): 1.0}),
            RepetitionPenaltyLogitsProcessor(1.3),
            NoBadWordsLogitsProcessor([[7, 2]]),
            TemperatureLogitsWarper(0.6),
            TopKLogitsWarper(12),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.02),
        ],
    ),
}


@pytest.mark.parametrize("knob", KNOBS)
def test_a_knob_equals_transformers_at_every_node(knob):
    settings, processors = KNOBS[knob]
    for seed in range(20):
        logits_BTV = logits(seed=seed)
        found = ours([Sampling(**settings)] * 2, logits_BTV)
        assert torch.equal(found, theirs(processors, logits_BTV))


def test_ties_at_the_edge_of_top_k_are_kept():
    logits_BTV = torch.zeros(1, 1, V)
    logits_BTV[0, 0, :4] = torch.tensor([2.0, 1.0, 1.0, 1.0])
    tree = empty_tree(1, torch.device("cpu"))
    scores = ours([Sampling(temperature=1.0, top_k=2)], logits_BTV, tree, TEXTS[:1])
    assert torch.isfinite(scores[0, 0]).nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert torch.equal(scores[0], TopKLogitsWarper(2)(None, logits_BTV[0]))


def test_each_row_has_its_own_settings():
    logits_BTV = logits()
    first = Sampling(temperature=0.5, top_k=3, repetition_penalty=1.5)
    second = Sampling(temperature=1.5, top_p=0.7, min_p=0.05, bad_words=((9, 5, 7),))
    both = ours([first, second], logits_BTV)
    for b, one in enumerate((first, second)):
        alone = ours([one], logits_BTV[b : b + 1], fork(1), TEXTS[b : b + 1])
        assert torch.equal(both[b], alone[0])


def test_processors_of_transformers_see_each_nodes_own_text():
    logits_BTV = logits()
    processors = (RepetitionPenaltyLogitsProcessor(1.7), NoBadWordsLogitsProcessor([[7, 2]]))
    found = ours([Sampling(temperature=1.0, processors=processors)] * 2, logits_BTV)
    assert torch.equal(found, theirs(processors, logits_BTV))


def test_penalties_count_the_drafted_tokens_on_the_path():
    logits_BTV = torch.zeros(2, 5, V)
    settings = Sampling(temperature=1.0, frequency_penalty=0.5, presence_penalty=0.25)
    scores = ours([settings] * 2, logits_BTV)
    assert scores[0, 0, 7].item() == -0.5 * 2 - 0.25
    assert scores[0, 1, 7].item() == -0.5 * 3 - 0.25
    assert scores[0, 2, 7].item() == -0.5 * 2 - 0.25
    assert scores[0, 4, 7].item() == -0.5 * 3 - 0.25
    assert scores[0, 4, 9].item() == -0.5 - 0.25
    assert scores[0, 3, 9].item() == 0.0


def test_greedy_rows_without_processors_return_the_logits_untouched():
    logits_BTV = logits()
    assert ours([Sampling(), Sampling()], logits_BTV) is logits_BTV


def test_greedy_rows_keep_their_processed_logits():
    logits_BTV = logits()
    found = ours([Sampling(repetition_penalty=1.7)] * 2, logits_BTV)
    assert torch.equal(found, theirs([RepetitionPenaltyLogitsProcessor(1.7)], logits_BTV))


def test_half_precision_logits_become_float32_scores():
    scores = ours([Sampling()] * 2, logits().bfloat16())
    assert scores.dtype == torch.float32


def test_a_greedy_row_among_sampled_rows_has_a_one_hot_distribution():
    logits_BTV = logits()
    logits_BTV[0, 0, 5] = logits_BTV[0, 0, 8] = 50.0  # a tie: the lowest id wins
    mixed = ours([Sampling(), Sampling(temperature=0.9)], logits_BTV)
    distribution_TV = mixed[0].softmax(-1)
    assert distribution_TV[0, 5] == 1.0
    assert torch.equal(distribution_TV.sum(-1), torch.ones(5))
    assert torch.equal(distribution_TV.argmax(-1), logits_BTV[0].argmax(-1))
    assert torch.equal(mixed[1], logits_BTV[1] / torch.tensor(0.9))


def test_the_logits_are_never_changed_in_place():
    for settings, _ in KNOBS.values():
        logits_BTV = logits()
        before = logits_BTV.clone()
        ours([Sampling(**settings)] * 2, logits_BTV)
        assert torch.equal(logits_BTV, before)


def test_the_draft_distribution_takes_the_rows_temperature_and_cuts():
    logits_BMK = logits(2, 3)
    batch = SamplingBatch([Sampling(temperature=0.5), Sampling(temperature=2.0, top_k=4)], V)
    prob_BMK = batch.draft_distribution(logits_BMK)
    assert torch.allclose(prob_BMK[0], (logits_BMK[0] / 0.5).softmax(-1))
    assert ((prob_BMK[1] > 0).sum(-1) == 4).all()
    assert torch.allclose(prob_BMK.sum(-1), torch.ones(2, 3))


def test_the_draft_distribution_of_greedy_rows_is_one_hot():
    logits_BMK = logits(2, 3)
    for second in (Sampling(), Sampling(temperature=1.0)):
        prob_BMK = SamplingBatch([Sampling(), second], V).draft_distribution(logits_BMK)
        assert torch.equal(prob_BMK[0].argmax(-1), logits_BMK[0].argmax(-1))
        assert torch.equal(prob_BMK[0].amax(-1), torch.ones(3))


def test_the_draft_distribution_of_a_trimmed_head_never_speaks_banned_ids():
    ids_K = torch.tensor([2, 4, 6, 30])
    batch = SamplingBatch([Sampling(temperature=1.0, bad_words=((6,),))], V)
    prob_BMK = batch.draft_distribution(torch.zeros(1, 1, 4), ids_K)
    assert torch.allclose(prob_BMK[0, 0], torch.tensor([1 / 3, 1 / 3, 0.0, 1 / 3]))


def test_scores_run_on_the_meta_device():
    tree = fork()
    fields = (tree.token_BN, tree.parent_BN, tree.rank_BN, tree.valid_BN)
    meta = DraftTree(*(x.to("meta") for x in fields), NodeKind.POINT, 2)
    settings = Sampling(temperature=0.6, top_k=12, top_p=0.9, min_p=0.02)
    batch = SamplingBatch([settings, Sampling()], V, "meta")
    scores = batch.scores(logits().to("meta"), meta, view_of())
    assert scores.shape == (2, 5, V)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": math.inf},
        {"logit_bias": {3: math.nan}},
        {"logit_bias": {-1: 1.0}},
        {"bad_words": ((),)},
        {"seed": -2},
        {"max_new_tokens": 0},
        {"stop": "a string"},
        {"processors": ("not callable",)},
    ],
)
def test_a_value_out_of_range_is_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises(SpecctlError, match=name):
        Sampling(**wrong)


def test_an_id_outside_the_vocabulary_is_refused():
    with pytest.raises(SpecctlError, match=r"token id 40 .* ids below 40"):
        SamplingBatch([Sampling(logit_bias={V: 1.0})], V)


@pytest.mark.parametrize("seed", [-1, None])
def test_a_seed_of_minus_one_or_none_is_drawn_once(seed):
    drawn = [Sampling(seed=seed) for _ in range(4)]
    assert len({one.seed for one in drawn}) == 4
    assert all(0 <= one.seed < 1 << 32 for one in drawn)
    assert replace(drawn[0], temperature=0.5).seed == drawn[0].seed
