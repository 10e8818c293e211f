"""String-level rejection sampling: psi is the draft's own distribution of texts, and the target's
distribution stays.

Toys over two letters, small enough to write out every text: a target that speaks a, b and ab, and
drafts of single letters, of longer tokens, and with an end of text.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch

from specctl.core.errors import IncompatibleError
from specctl.core.tree import NodeKind
from specctl.runtime.cross_vocab.string_rejection import LIMIT, FirstTokenDistribution
from specctl.runtime.cross_vocab.token_bytes import Reader, TokenBytes
from specctl.runtime.cross_vocab.translate import translated
from specctl.runtime.proof.enumerate import Case, enumerate_case

TARGETS = {"a b ab": ["a", "b", "ab"], "long": ["a", "b", "aba", "bbaa"], "gaps": ["ab", "ba"]}
DRAFTS = {
    "letters": ["a", "b"],
    "longer": ["a", "b", "ba", "aab", "bb"],
    "twins": ["a", "b", "ab", "ab"],
    "ending": ["a", "bb", "ab", "b", "<end>"],
}
PAIRS = [(target, draft) for target in TARGETS for draft in DRAFTS]
END = "<end>"


def lexicon(words):
    eos = words.index(END) if END in words else None
    return TokenBytes(None, eos, {i: word.encode() for i, word in enumerate(words)}, {})


class Toy:
    """A draft whose distribution depends on everything it wrote, and a target with an end of
    text."""

    def __init__(self, target, draft, seed=0):
        self.seed, self.ours, self.theirs = seed, [*TARGETS[target], END], DRAFTS[draft]
        shared = {len(self.ours) - 1: self.theirs.index(END)} if END in self.theirs else {}
        reader = Reader(lexicon(self.theirs), lexicon(self.ours), shared)
        self.distribution = FirstTokenDistribution.of(reader, len(self.theirs), len(self.ours))
        self.longest = max(map(len, TARGETS[target]))
        self.fed = []

    def after(self, written):
        rng = np.random.default_rng([self.seed, *(token + 1 for token in written)])
        return rng.dirichlet(np.full(len(self.theirs), 0.7))

    def expand(self, token_BM, parent_BM):
        assert token_BM.shape == parent_BM.shape
        for token, parent in zip(token_BM[0].tolist(), parent_BM[0].tolist(), strict=True):
            self.fed.append((*(self.fed[parent] if parent >= 0 else ()), token))
        rows = [self.after(written) for written in self.fed[-token_BM.shape[1] :]]
        return torch.tensor(np.log(rows))[None]

    def psi(self):
        self.fed = []
        root_BU = torch.tensor(np.log(self.after(())))[None]
        return self.distribution.psi(root_BU, self.expand)[0].numpy()

    def first(self, text, is_over):
        """The longest target token that a text begins with; its end where nothing was written."""
        if not text and is_over:
            return len(self.ours) - 1
        fitting = [word for word in self.ours[:-1] if text.startswith(word)]
        return self.ours.index(max(fitting, key=len)) if fitting else None

    def texts(self, length, written=(), chance=1.0):
        """Every way to write `length` draft tokens, or to end before."""
        text = "".join(self.theirs[token] for token in written).partition(END)
        if len(written) == length or text[1]:
            yield written, chance, self.first(text[0], bool(text[1]))
            return
        for token, more in enumerate(self.after(written)):
            yield from self.texts(length, (*written, token), chance * more)

    def ways(self):
        """The same, each written no further than until its first token is decided."""
        full, shortest = list(self.texts(self.longest)), {}
        for length in range(1, self.longest + 1):
            decided = {}
            for written, _, first in full:
                decided.setdefault(written[:length], set()).add(first)
            for written, firsts in decided.items():
                if len(firsts) == 1 and not any(written[:n] in shortest for n in range(length)):
                    shortest[written] = firsts.pop()
        chances = {
            written: np.prod([self.after(written[:n])[u] for n, u in enumerate(written)])
            for written in shortest
        }
        return [(chances[written], first) for written, first in shortest.items()]


def distributions(seed, size, depth):
    rng, paths = np.random.default_rng(seed), [()]
    for _ in range(depth):
        paths += [(*path, x) for path in paths for x in range(size) if (*path, x) not in paths]
    return {path: rng.dirichlet(np.full(size, 0.8)) for path in paths}


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_psi_is_the_probability_of_every_text_that_begins_with_the_token(target, draft):
    toy = Toy(target, draft)
    expected = np.zeros(len(toy.ours))
    for _, chance, first in toy.texts(toy.longest):
        if first is not None:
            expected[first] += chance
    found = toy.psi()
    assert np.abs(found - expected).max() < 1e-12
    assert found.sum() == pytest.approx(1.0) or target == "gaps"
    assert target != "gaps" or found.sum() < 0.95  # texts that no token begins propose nothing
    assert len(toy.fed) == toy.distribution.num_nodes == len(set(toy.fed))


def test_sequences_are_read_in_steps_of_any_width(monkeypatch):
    whole = Toy("long", "longer").psi()
    monkeypatch.setattr("specctl.runtime.cross_vocab.string_rejection.AT_ONCE", 1)
    toy = Toy("long", "longer")
    assert toy.distribution.num_nodes > 4
    assert np.abs(toy.psi() - whole).max() < 1e-15
    assert all(b >= a for a, b in pairwise(toy.distribution.parent_N.tolist()))


@pytest.mark.parametrize("rule", ["chain", "block"])
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_the_emitted_distribution_is_exactly_the_targets(target, draft, rule):
    """The first token from psi, two certain ones behind it, against every coin."""
    toy = Toy(target, draft)
    psi, size = toy.psi(), len(toy.ours)
    q = {path: np.eye(size)[sum(path) % size] for path in distributions(0, size, 2)}
    q[()] = psi / psi.sum()
    case = Case("slrs", rule, NodeKind.IID, (-1, 0, 1), distributions(7, size, 3), q, size)
    exact = enumerate_case(case)
    assert exact.error < 1e-12
    assert exact.accepted > 0.2


def emitted(p, psi, proposals):
    """The distribution of a round's first token, if each proposal (chance, token, what the test
    takes for its probability) is accepted with min(1, p / told), and the rest comes from norm([p -
    psi]+)."""
    out, left = np.zeros_like(p), 1.0
    for chance, token, told in proposals:
        out[token] += chance * min(1.0, p[token] / told)
        left -= chance * min(1.0, p[token] / told)
    excess = np.maximum(p - psi, 0.0)
    return out + left * excess / excess.sum()


@pytest.mark.parametrize("target", ["a b ab", "long", "gaps"])
def test_the_probability_of_one_way_to_write_a_token_is_not_enough(target):
    for draft in DRAFTS:
        toy, apart = Toy(target, draft), 0.0
        psi, ways = toy.psi(), [way for way in toy.ways() if way[1] is not None]
        for seed in range(20):
            p = distributions(seed, len(toy.ours), 0)[()]
            summed = emitted(p, psi, [(chance, first, psi[first]) for chance, first in ways])
            naive = emitted(p, psi, [(chance, first, chance) for chance, first in ways])
            assert np.abs(summed - p).max() < 1e-12
            apart = max(apart, np.abs(naive - p).sum() / 2)
        if len(ways) == len({first for _, first in ways}):
            assert apart < 1e-12  # every token can be written in one way only
        else:
            assert apart > 0.01, (target, draft)


def accepted(rule, kind, p, psi):
    """How often a round's first draft is accepted; a POINT draft is the likeliest token of psi."""
    return enumerate_case(Case("", rule, kind, (-1,), p, {(): psi}, len(psi))).accepted


def test_rejection_accepts_at_least_as_much_as_comparing_the_same_strings():
    found = []
    for seed in range(40):
        toy = Toy("a b ab", "longer", seed)
        psi, p = toy.psi(), distributions(100 + seed, len(toy.ours), 1)
        rejected = accepted("chain", NodeKind.IID, p, psi)
        matched = accepted("target-only", NodeKind.IID, p, psi)
        greedy = accepted("target-only", NodeKind.POINT, p, psi)
        assert rejected >= matched - 1e-12
        found.append((rejected, matched, greedy))
    rejected, matched, greedy = np.mean(found, axis=0)
    assert rejected > matched + 0.1
    assert rejected > greedy + 0.1


def test_a_greedy_string_may_match_a_peaked_target_more_often():
    toy = Toy("a b ab", "longer")
    psi, p = toy.psi(), distributions(0, len(toy.ours), 1)
    p[()] = 0.9 * np.eye(len(psi))[psi.argmax()] + 0.1 * psi
    rejected, greedy = accepted("chain", NodeKind.IID, p, psi), p[()].max()
    assert greedy == pytest.approx(accepted("target-only", NodeKind.POINT, p, psi), abs=1e-12)
    assert greedy > rejected + 0.05


def test_a_draft_that_agrees_is_always_accepted():
    toy = Toy("a b ab", "longer")
    psi = toy.psi()
    p = distributions(0, len(psi), 1) | {(): psi}
    assert accepted("chain", NodeKind.IID, p, psi) == pytest.approx(1.0, abs=1e-12)
    assert accepted("target-only", NodeKind.POINT, p, psi) < 0.9


def test_too_many_sequences_are_refused_with_their_number(tiny_target):
    tokenizer = tiny_target.tokenizer
    with pytest.raises(IncompatibleError) as refused:
        translated(tiny_target.lm, tokenizer, tokenizer.eos_token_id, tiny_target, "slrs")
    number = int(str(refused.value.found).split()[0].replace(",", ""))
    assert number > 1_000 * LIMIT
    assert f"{LIMIT:,}" in str(refused.value.expected)
    assert "slem" in str(refused.value.do)
    assert "tli" in str(refused.value.do)
