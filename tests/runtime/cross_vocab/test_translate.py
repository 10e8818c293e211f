"""Drafts of another tokenizer: the distribution stays the target's, and the ids are the right
ones."""

import json
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from specctl.core.errors import IncompatibleError, RecipeError
from specctl.core.tree import QRows
from specctl.export.package.folder import load_drafter
from specctl.runtime.cross_vocab.token_bytes import Shared, TokenBytes
from specctl.runtime.cross_vocab.translate import translated
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.proof.reference_checks import PairDistribution, WatchedPolicy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl_testing.runtime.foreign import LETTERS, drafter_of, make_tokenizer, renumbered

CHAIN, TREE = {"policy": "chain", "length": 3}, {"policy": "static-tree", "branch": (2, 2)}
PROMPTS = ["abcab dab", "eeab cad", "d", "ab ab ab ab ab cde"]


@pytest.fixture(scope="module")
def target(make_model):
    tokenizer = make_tokenizer(1, 24)
    return Target.from_model(make_model(num_layers=2, vocab=len(tokenizer)), tokenizer)


@pytest.fixture(scope="module")
def draft(make_model):
    tokenizer = make_tokenizer(2, 28)
    model = make_model(num_layers=1, vocab=len(tokenizer), seed=3)
    return Target.from_model(model, tokenizer, "draft")


@pytest.fixture(scope="module")
def twin(make_model, target):
    """The target itself, behind a renumbered tokenizer."""
    tokenizer, order = renumbered(target.tokenizer, 4)
    model = make_model(num_layers=2, vocab=len(tokenizer))
    with torch.no_grad():
        for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            old = weight.clone()
            weight[torch.tensor(order)] = old
    return Target.from_model(model, tokenizer, "twin")


def run(target, drafter, serve, samplings, prompts, rule="auto", slots=3):
    policy = WatchedPolicy(make_policy(serve))
    engine = Engine(target, drafter, policy, rule, num_slots=slots)
    requests = [Request(p, s) for p, s in zip(prompts, samplings, strict=True)]
    return engine.run(requests), policy.draws


def encoded(target):
    return [tuple(target.encode(text)) for text in PROMPTS]


# -- what tokens stand for ------------------------------------------------------------------------


def test_shared_tokens_stand_for_the_same_text(target, draft):
    ours, theirs = (
        TokenBytes.of(t.tokenizer, t.spec.vocab_size, t.eos_ids[0]) for t in (target, draft)
    )
    shared = Shared.of(theirs, ours)
    assert list(shared.target_ids) == sorted(set(shared.target_ids))
    assert len(LETTERS) < len(shared.target_ids) < min(len(ours.text_of), len(theirs.text_of))
    for t, d in zip(shared.target_ids, shared.draft_ids, strict=True):
        assert target.tokenizer.decode([t]) == draft.tokenizer.decode([d])
    assert any(t != d for t, d in zip(shared.target_ids, shared.draft_ids, strict=True))


def test_reading_and_spelling_keep_every_byte(tiny_target):
    lexicon = TokenBytes.of(tiny_target.tokenizer, tiny_target.spec.vocab_size, None)
    for text in ("def f(x):\n    return x", "na\u00efve \u2713 \U0001f600\n\n\t", " ", "'s 123"):
        whole = text.encode()
        for cut in (whole, whole[:-1], whole[1:]):  # the cuts may part a character
            assert lexicon.bytes_of(lexicon.read(cut)) == cut
            assert lexicon.bytes_of(lexicon.spell(cut)) == cut
        assert lexicon.read(whole) == tiny_target.tokenizer.encode(text, add_special_tokens=False)


def test_spaces_and_bytes_of_other_alphabets_are_understood():
    vocab = {"\u2581the": 0, "<0x0A>": 1, "s": 2, "\u2581": 3}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    lexicon = TokenBytes.of(PreTrainedTokenizerFast(tokenizer_object=bpe), 4, None)
    assert [lexicon.text_of[i] for i in range(4)] == [b" the", b"\n", b"s", b" "]
    assert lexicon.spell(b" the\ns") == [0, 1, 2]


# -- the distribution
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "serve"),
    [
        ("tli", CHAIN),
        ("tli", TREE),
        ("tli", {"policy": "dynamic-tree", "length": 3}),
        ("slem", {"policy": "direct", "length": 4}),
        ("slrs", CHAIN),
    ],
)
def test_greedy_output_is_the_targets(target, draft, twin, method, serve):
    sampling = Sampling(max_new_tokens=24, ignore_eos=True)
    prompts = encoded(target)
    plain, _ = run(target, None, {"policy": "direct"}, [sampling] * 4, prompts)
    for other in (draft, twin):
        drafter = drafter_of(other, target, method)
        found, _ = run(target, drafter, serve, [sampling] * 4, prompts)
        assert [c.tokens for c in found] == [c.tokens for c in plain]


@pytest.mark.parametrize(
    ("method", "serve"), [("tli", CHAIN), ("slem", {"policy": "direct"}), ("slrs", CHAIN)]
)
def test_a_renumbered_twin_is_accepted_greedily(target, twin, method, serve):
    sampling = Sampling(max_new_tokens=40, ignore_eos=True)
    found, _ = run(
        target, drafter_of(twin, target, method), serve, [sampling] * 4, encoded(target), slots=2
    )
    accepted = sum(c.stats.accepted for c in found)
    assert accepted > (0.9 if method == "tli" else 0.5) * sum(c.stats.drafted for c in found)


@pytest.mark.parametrize(
    ("method", "serve"),
    [("tli", CHAIN), ("tli", TREE), ("slem", {"policy": "direct"}), ("slrs", CHAIN)],
)
def test_sampled_output_has_the_targets_distribution(target, draft, method, serve):
    found, draws = distribution(target, drafter_of(draft, target, method), make_policy(serve))
    assert found.p_value > 1e-3
    assert found.cells > 25
    if method != "slem":
        assert abs(draws.z) < 4
        assert not draws.impossible
        assert draws.worst_sum < 1e-5


def distribution(target, drafter, policy, count=1_000):
    prompt, watched = tuple(target.encode("abcab")), WatchedPolicy(policy)
    sampling = Sampling(temperature=1.0, max_new_tokens=3, ignore_eos=True)
    engine = Engine(target, drafter, watched, num_slots=100)
    done = engine.run([Request(prompt, replace(sampling, seed=i)) for i in range(count)])
    assert sum(c.stats.accepted for c in done) > 0.02 * count
    return PairDistribution(target, prompt, sampling, count).test(
        [c.tokens for c in done]
    ), watched.draws


def test_sampled_strings_are_accepted_more_often_by_their_probability(target, twin):
    sampling = Sampling(temperature=1.0, max_new_tokens=12, ignore_eos=True)
    samplings = [replace(sampling, seed=i) for i in range(100)]
    prompts, per_round = encoded(target) * 25, {}
    for method, serve in (("slrs", CHAIN), ("slem", {"policy": "direct", "length": 3})):
        drafter = drafter_of(twin, target, method)
        done, _ = run(target, drafter, serve, samplings, prompts, slots=50)
        accepted = sum(c.stats.accepted for c in done)
        per_round[method] = accepted / (sum(len(c.tokens) for c in done) - accepted)
    assert per_round["slrs"] > 1.5 * per_round["slem"] > 0


class Misread:
    """A chain whose distribution is told to the verifier wrongly."""

    nodes, depth, is_chain = 3, 3, True

    def __init__(self, spoil):
        self.policy, self.spoil = make_policy(CHAIN), spoil

    def kind(self, sampled):
        return self.policy.kind(sampled)

    def grow(self, growth):
        tree = self.policy.grow(growth)
        return replace(tree, q=self.spoil(tree.q)) if tree.q is not None else tree


def in_order_of_the_vocabulary(target):
    """The head is pruned in the order of get_vocab(), the result scattered by ascending id: the
    permuted distribution that transformers 5.23 tells its verifier."""
    order = list(dict(sorted(target.tokenizer.get_vocab().items())).values())

    def spoil(q):
        place = {int(i): k for k, i in enumerate(q.ids_K)}
        return QRows(q.prob_BTK[..., [place[i] for i in order if i in place]], q.ids_K)

    return spoil


def masked_afterwards(q):
    """The distribution before it was renormalised on the shared tokens."""
    return QRows(q.prob_BTK * 0.6, q.ids_K)


@pytest.mark.parametrize("wrong", ["permuted", "not renormalised"])
def test_the_distribution_of_naive_masking_is_not_the_targets(target, draft, wrong):
    spoil = in_order_of_the_vocabulary(target) if wrong == "permuted" else masked_afterwards
    found, _ = distribution(target, drafter_of(draft, target, "tli"), Misread(spoil))
    assert found.p_value < 1e-9


# -- texts longer than the draft's context --------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "serve"), [("tli", TREE), ("slem", {"policy": "direct"}), ("slrs", CHAIN)]
)
def test_a_draft_with_a_short_context_reads_the_newest_part(make_model, target, method, serve):
    tokenizer = make_tokenizer(2, 12)
    model = make_model(num_layers=1, vocab=len(tokenizer), max_position_embeddings=64)
    drafter = drafter_of(Target.from_model(model, tokenizer), target, method)
    sampling = Sampling(max_new_tokens=90, ignore_eos=True)
    prompts = encoded(target)[:2]
    plain, _ = run(target, None, {"policy": "direct"}, [sampling] * 2, prompts)
    found, _ = run(target, drafter, serve, [sampling] * 2, prompts)
    assert [c.tokens for c in found] == [c.tokens for c in plain]


# -- how it is asked for --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(draft, make_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("draft")
    make_model(num_layers=1, vocab=len(draft.tokenizer), seed=3).save_pretrained(path)
    draft.tokenizer.save_pretrained(path)
    return path


def test_a_foreign_folder_is_refused_or_translated_as_asked(target, folder):
    with pytest.raises(IncompatibleError):
        load_drafter(folder, target)
    found = load_drafter(folder, target, translate="auto")
    assert "token-level intersection (tli)" in found.note
    assert found.vocab is not None
    assert found.policies[0] == "chain"
    assert load_drafter(folder, target, translate="slem").policies == ("direct",)
    with pytest.raises(RecipeError, match="auto, tli, slem"):
        load_drafter(folder, target, translate="tly")


def test_where_little_is_shared_strings_are_matched(make_model, target):
    alien = make_tokenizer(2, 28)
    parts = json.loads(alien.backend_tokenizer.to_str())
    swap = str.maketrans("abcde", "vwxyz")
    parts["model"]["vocab"] = {t.translate(swap): i for t, i in parts["model"]["vocab"].items()}
    parts["model"]["merges"] = [
        [one.translate(swap) for one in pair] for pair in parts["model"]["merges"]
    ]
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(parts)), eos_token="<eos>"
    )
    lm = Target.from_model(make_model(num_layers=1, vocab=len(other)), other).lm
    assert translated(lm, other, other.eos_token_id, target).policies == ("direct",)


def chatting(make_model, seed, size, document, turn, eos):
    """A random model with a chat template; `eos`: which of its two ends its tokenizer names."""
    tokenizer = make_tokenizer(seed, size, (document, turn))
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + '" + turn + "' }}{% endfor %}"
    tokenizer.eos_token = eos
    ends = tokenizer.convert_tokens_to_ids([document, turn])
    model = make_model(num_layers=1, vocab=len(tokenizer), eos_token_id=ends)
    return Target.from_model(model, tokenizer)


@pytest.mark.parametrize("eos", [("<eos>", "<end>"), ("<|im_end|>", "</s>"), ("<eos>", "</s>")])
def test_the_end_of_a_turn_stands_for_one_and_a_documents_for_a_documents(make_model, eos):
    target = chatting(make_model, 1, 24, "<eos>", "<|im_end|>", eos[0])
    draft = chatting(make_model, 2, 28, "</s>", "<end>", eos[1])
    found = translated(draft.lm, draft.tokenizer, draft.tokenizer.eos_token_id, target, "tli")
    pairs = dict(zip(found.vocab.ids_K.tolist(), found.draft_ids_K.tolist(), strict=True))
    assert pairs[target.end_of_turn] == draft.end_of_turn
    if eos[1] == "</s>":  # else nothing says that it is an end
        assert pairs[target.end_of_document] == draft.end_of_document
