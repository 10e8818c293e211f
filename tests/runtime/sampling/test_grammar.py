"""Grammars: the distribution at every node, identity with plain decoding, and inputs that mean
harm."""

import json
import math
import re
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specctl.core.drafter import RoundView
from specctl.core.tree import DraftTree, NodeKind
from specctl.drafters import family
from specctl.drafters.lm.small_lm import SmallLm
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.proof.enumerate import Case, enumerate_case
from specctl.runtime.sampling import grammar_worker
from specctl.runtime.sampling.grammar import (
    Compiler,
    CompilerProcess,
    GrammarError,
    GrammarSpec,
    compile_grammar,
)
from specctl.runtime.sampling.grammar_mask import Walk
from specctl.runtime.sampling.sampling import Sampling, SamplingBatch
from specctl.runtime.target.target import Target, load_target

TOKENS = ("a", "b", "c", "ab", "ba", "<eos>")
V, EOS = len(TOKENS), len(TOKENS) - 1
PATTERN = "(ab|ba|a){1,2}c?"
LANGUAGE = [
    text
    for length in range(1, 6)
    for text in map("".join, product("abc", repeat=length))
    if re.fullmatch(PATTERN, text)
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}


def small_tokenizer():
    bpe = models.BPE({t: i for i, t in enumerate(TOKENS)}, [("a", "b"), ("b", "a")])
    backend = Tokenizer(bpe)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@pytest.fixture(scope="module")
def small(make_model):
    """A target of six tokens that speaks to everything."""
    return Target.from_model(make_model(vocab=V, eos_token_id=EOS), small_tokenizer())


@pytest.fixture(scope="module")
def grammar(small):
    return compile_grammar(GrammarSpec("regex", PATTERN), small)


def permitted(path):
    """What may follow, found by listing the language."""
    if EOS in path:
        return [EOS] if all(t == EOS for t in path[path.index(EOS) :]) else []
    text = "".join(TOKENS[t] for t in path)
    longer = [t for t in range(EOS) if any(word.startswith(text + TOKENS[t]) for word in LANGUAGE)]
    return longer + [EOS] * (text in LANGUAGE)


def is_reached(path):
    return all(token in permitted(path[:i]) for i, token in enumerate(path))


def bush(depth):
    """Every path of `depth` tokens as one tree."""
    paths = [p for length in range(1, depth + 1) for p in product(range(V), repeat=length)]
    at = {path: i for i, path in enumerate(paths)} | {(): -1}
    token = torch.tensor([[path[-1] for path in paths]])
    parent = torch.tensor([[at[path[:-1]] for path in paths]])
    ones = torch.ones_like(token, dtype=torch.bool)
    return [(), *paths], DraftTree(token, parent, token, ones, NodeKind.POINT, depth)


def view_of(text, prompt_len):
    end = torch.tensor([len(text) - 1])
    return RoundView((0,), torch.tensor([0]), torch.tensor([text[-1]]), end, (text,), (prompt_len,))


def logits_at(paths, seed):
    generator = torch.Generator().manual_seed(seed)
    return 2.0 * torch.randn(1, len(paths), V, generator=generator)


def distributions_of(grammar, temperature, seed, depth):
    """p at every node as the engine sees it, and q as a guided drafter drafts it."""
    paths, tree = bush(depth)
    batch = SamplingBatch([Sampling(temperature=temperature, grammar=grammar)], V)
    view = view_of([2, 2, 0], 3)
    scores = batch.scores(logits_at(paths, seed), tree, view)[0]
    guide, raw = batch.guide(view), logits_at(paths, seed + 1)
    q = [batch.draft_distribution(guide.root(raw[:, 0], None)[:, None])[0]]
    q.append(batch.draft_distribution(guide.expand(tree.token_BN, tree.parent_BN, raw[:, 1:]))[0])
    p = dict(zip(paths, scores.double().softmax(-1).numpy(), strict=True))
    q = {
        k: v / max(v.sum(), 1e-30)
        for k, v in zip(paths, torch.cat(q).double().numpy(), strict=True)
    }
    return p, q


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_every_node_has_the_distribution_of_its_own_text(grammar, temperature):
    p, q = distributions_of(grammar, temperature, seed=3, depth=3)
    paths = list(p)
    for distributions, seed in ((p, 3), (q, 4)):
        raw = logits_at(paths, seed)[0].double().numpy() / temperature
        reached = [i for i, path in enumerate(paths) if is_reached(path)]
        assert len(reached) > 12
        for i in reached:
            weights = np.exp(raw[i]) * np.isin(np.arange(V), permitted(paths[i]))
            assert distributions[paths[i]] == pytest.approx(weights / weights.sum(), abs=2e-7)
            assert set(np.flatnonzero(distributions[paths[i]])) == set(permitted(paths[i]))


@pytest.mark.parametrize(
    ("rule", "kind", "shape"),
    [
        ("chain", NodeKind.IID, (-1, 0)),
        ("block", NodeKind.IID, (-1, 0)),
        ("target-only", NodeKind.POINT, (-1, -1, 0)),
        ("one-hot", NodeKind.POINT, (-1, -1, 0)),
        ("recursive", NodeKind.WITHOUT_REPLACEMENT, (-1, -1, 0)),
        ("traversal", NodeKind.WITHOUT_REPLACEMENT, (-1, -1, 0)),
    ],
)
def test_the_distribution_with_a_drafter_is_the_distribution_without(grammar, rule, kind, shape):
    p, q = distributions_of(grammar, 1.0, seed=5, depth=3)
    found = enumerate_case(Case("grammar", rule, kind, shape, p, q, V))
    assert found.error <= 1e-9
    assert found.accepted > 0


def test_a_path_may_be_asked_for_in_any_order(grammar):
    paths, tree = bush(2)
    batch = SamplingBatch([Sampling(grammar=grammar)], V)
    text = [2, 0, 1, 0]
    first = batch.scores(logits_at(paths, 0), tree, view_of(text[:2], 1))
    later = batch.scores(logits_at(paths, 0), tree, view_of(text, 1))
    again = batch.scores(logits_at(paths, 0), tree, view_of(text[:2], 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)


@pytest.mark.parametrize("policy", ["chain", "static-tree", "dynamic-tree"])
def test_a_drafter_equal_to_the_target_is_always_accepted(small, policy):
    grammar = compile_grammar(GrammarSpec("regex", "(ab|ba|c){9,12}"), small)
    drafter = SmallLm.from_lm(small.lm, small.spec)
    grown = make_policy({"policy": policy})
    temperature = 1.0 if policy == "chain" else 0.0
    sampling = Sampling(temperature, grammar=grammar, max_new_tokens=40)
    [made] = Engine(small, drafter, grown).run([Request((0, 1), sampling)])
    assert made.finish_reason == "eos"
    assert len(made.tokens) >= 10
    assert made.stats.rounds == math.ceil(len(made.tokens) / (grown.depth + 1))


DRAFTS = [("prompt-lookup", {"policy": "direct"}), ("small-lm", {"policy": "chain", "length": 4})]
DRAFTS += [("small-lm", {"policy": "dynamic-tree", "nodes": 12, "length": 4})]


@pytest.mark.parametrize(("name", "policy"), DRAFTS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafting_changes_nothing_and_every_output_parses(tiny_target, name, policy, temperature):
    schema = compile_grammar(GrammarSpec.of_schema(SCHEMA), tiny_target)
    number = compile_grammar(GrammarSpec("regex", "-?[0-9]{2,9}"), tiny_target)
    if name == "small-lm":
        drafter = SmallLm.from_lm(tiny_target.lm, tiny_target.spec)
    else:
        chosen = family(name)
        drafter = chosen.build(chosen.options(), tiny_target.spec, None)
    texts = ["x = ", "data = {", "import json\n", "def f(n):"]
    held = [schema, number, None, schema]
    requests = [
        Request(
            tuple(tiny_target.encode(text)),
            Sampling(temperature, seed=i, max_new_tokens=48, grammar=one),
        )
        for i, (text, one) in enumerate(zip(texts, held, strict=True))
    ]
    plain = Engine(tiny_target, rule="target-only", num_slots=2).run(requests)
    engine = Engine(tiny_target, drafter, make_policy(policy), "target-only", num_slots=3)
    fast = engine.run(requests)
    assert [c.tokens for c in fast] == [c.tokens for c in plain]
    answers = [tiny_target.decode(c.tokens) for c in fast]
    assert {c.finish_reason for c, one in zip(fast, held, strict=True) if one} == {"eos"}
    assert set(json.loads(answers[0])) == set(json.loads(answers[3])) == {"name", "ok"}
    assert re.fullmatch("-?[0-9]{2,9}", answers[1])
    assert sum(c.stats.accepted for c in fast) > 0 or name == "prompt-lookup"


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("regex", "(" * 60_000 + "a" + ")" * 60_000, "too long"),
        ("regex", "(" * 20_000 + "a" + ")" * 20_000, "nested too deeply"),
        ("json_schema", '{"items":' * 5_000 + "{}" + "}" * 5_000, "nested too deeply"),
        ("lark", "start: " + "(" * 100 + '"a"' + ")" * 100, "nested too deeply"),
        ("regex", "*a", "not valid"),
        ("regex", "(a", "not valid"),
        ("lark", "start: nobody", "not valid"),
        ("json_schema", "{", "not valid JSON"),
        ("json_schema", '{"type": "wat"}', "not valid"),
        ("xml", "", "unknown kind"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_an_error(tiny_target, kind, text, says):
    with pytest.raises(GrammarError, match=says) as error:
        compile_grammar(GrammarSpec(kind, text), tiny_target)
    assert len(str(error.value)) < 600


def wide_schema(count):
    """An object whose matcher needs a place for every optional property at once."""
    return {
        "type": "object",
        "properties": {f"property_{i}": {"type": "string"} for i in range(count)},
    }


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec.of_schema(wide_schema(250)),
        GrammarSpec("regex", "a{100000}{100000}"),
        GrammarSpec("regex", "x(y|z)a{100000}{100000}"),
    ],
)
def test_a_grammar_whose_first_tokens_outgrow_the_limits_is_an_error(tiny_target, spec):
    with pytest.raises(GrammarError, match=r"max is 1000|too many expressions"):
        compile_grammar(spec, tiny_target)


def test_a_grammar_that_fits_the_limits_is_none(tiny_target):
    for spec in (GrammarSpec.of_schema(wide_schema(200)), GrammarSpec("regex", "(a{9}){9}|b")):
        compile_grammar(spec, tiny_target)


AMBIGUOUS = GrammarSpec("lark", 'start: s\ns: s s s | s s | "a" | "b"')


@pytest.mark.parametrize("name", [None, "small-lm"])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_text_whose_grammar_gave_up_has_not_ended(small, monkeypatch, name, ignore_eos):
    """The only token left is the end of the text; it must not pass for one."""
    monkeypatch.setitem(grammar_worker.LIMITS, "max_items_in_row", 60)
    grammar = Compiler(small.tokenizer, V, (EOS,)).compile(AMBIGUOUS)
    sampling = Sampling(
        grammar=grammar, max_new_tokens=200, ignore_eos=ignore_eos, logit_bias={EOS: -100.0}
    )
    request = Request((0, 1), sampling)
    [plain] = Engine(small).run([request])
    assert plain.finish_reason == "grammar"
    assert 5 < len(plain.tokens) < 100
    if name is not None:
        drafter = SmallLm.from_lm(small.lm, small.spec)
        [fast] = Engine(small, drafter, make_policy({"policy": "chain", "length": 4})).run(
            [request]
        )
        assert (fast.tokens, fast.finish_reason) == (plain.tokens, "grammar")
        assert fast.stats.accepted > 0


def test_the_end_of_a_text_is_permitted_where_its_grammar_accepts_it(grammar):
    for length in range(5):
        for path in product(range(EOS), repeat=length):
            if is_reached(path):
                assert grammar.accepts(path, EOS) == (EOS in permitted(path)), path
    assert not grammar.accepts([2, 2], EOS)


def test_a_grammar_may_name_the_end_itself(small):
    spec = GrammarSpec("lark", 'start: "a"+ <eos>')
    [made] = Engine(small).run(
        [
            Request(
                (0, 1),
                Sampling(
                    grammar=compile_grammar(spec, small), max_new_tokens=20, logit_bias={EOS: 50.0}
                ),
            )
        ]
    )
    assert (made.finish_reason, len(made.tokens)) == ("eos", 2)


def test_a_matcher_that_gave_up_at_a_draft_goes_on_along_the_text(small, monkeypatch):
    """What is only proposed does not end the text, and what follows it is not free."""
    monkeypatch.setitem(grammar_worker.LIMITS, "max_items_in_row", 60)
    walk = Walk(Compiler(small.tokenizer, V, (EOS,)).compile(AMBIGUOUS))
    text: list[int] = []
    while (mask_V := walk.mask_V((*text, 0)))[0]:
        text.append(0)
    assert mask_V.nonzero()[:, 0].tolist() == [EOS], "it gave up there"
    assert walk.mask_V((*text, 0, 0)) is None
    walk.follow(text[:3])
    assert walk.mask_V(())[0]
    assert walk.mask_V((0,))[0]


def test_brackets_that_are_text_do_not_count_as_nesting(tiny_target):
    compile_grammar(GrammarSpec("regex", r"\(" * 100), tiny_target)


def test_a_schema_given_as_values_must_be_json():
    loop: dict = {}
    loop["self"] = loop
    with pytest.raises(GrammarError, match="not JSON"):
        GrammarSpec.of_schema(loop)


def test_a_compiler_that_hangs_or_dies_is_replaced(small, monkeypatch, tmp_path):
    import specctl.runtime.sampling.grammar as module

    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os, sys, time, json\n"
        "for line in sys.stdin:\n"
        "    if 'hang' in line: time.sleep(60)\n"
        "    if 'die' in line: os.abort()\n"
        "    print(json.dumps({'error': None}), flush=True)\n"
    )
    monkeypatch.setattr(module.grammar_worker, "__file__", str(worker))
    monkeypatch.setattr(module, "SECONDS", 0.5)
    guard = CompilerProcess({})
    guard.check("fine")
    started = time.perf_counter()
    with pytest.raises(GrammarError, match=r"more than 0\.5 s"):
        guard.check("hang")
    assert time.perf_counter() - started < 5
    with pytest.raises(GrammarError, match="brought its compiler down"):
        guard.check("die")
    guard.check("fine")


def test_one_grammar_is_compiled_once(small):
    compiler = Compiler(small.tokenizer, V, (EOS,))
    spec = GrammarSpec("regex", "a+")
    assert compiler.compile(spec) is compiler.compile(spec)


def test_a_target_that_cannot_end_a_text_takes_no_grammar(small):
    for other in (replace(small, eos_ids=()), replace(small, tokenizer=None)):
        with pytest.raises(GrammarError, match="cannot be held"):
            compile_grammar(GrammarSpec("json_object"), other)


def test_a_missing_library_is_named(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GrammarError, match=r"specctl-toolkit\[grammar\]"):
        Compiler(small.tokenizer, V, (EOS,)).compile(GrammarSpec("regex", "a"))


def test_a_text_that_left_its_grammar_can_only_end(grammar):
    paths, tree = bush(1)
    batch = SamplingBatch([Sampling(grammar=grammar)], V)
    scores = batch.scores(logits_at(paths, 0), tree, view_of([2, 2], 1))[0]
    assert torch.isfinite(scores[0]).nonzero()[:, 0].tolist() == [EOS]


MEMORY_OF_ONE = """
import json, sys
from pathlib import Path
from specctl.runtime.sampling.grammar_worker import make_matcher, make_tokenizer
about, small, large = json.load(sys.stdin)
tokenizer = make_tokenizer(**about)
held = lambda: int(Path("/proc/self/statm").read_text().split()[1]) >> 8  # MiB of pages of 4 KiB
first = make_matcher(tokenizer, small)
before = held()
second = make_matcher(tokenizer, large)
print(first.get_error() or second.get_error() or held() - before)
"""


def test_an_expression_that_unfolds_takes_little_memory_for_a_stranger_may_send_many():
    target = load_target("tiny")
    about = Compiler(target.tokenizer, target.spec.vocab_size, target.eos_ids)._about
    sources = [GrammarSpec("regex", text).source() for text in ("a+", "a{100000}{100000}")]
    ran = subprocess.run(
        [sys.executable, "-c", MEMORY_OF_ONE],
        input=json.dumps([about, *sources]), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(ran.stdout) < 48, "MiB of one grammar"


def test_an_ambiguous_grammar_that_needs_ever_more_time_is_given_up(small, monkeypatch):
    monkeypatch.setitem(grammar_worker.LIMITS, "max_items_in_row", 60)
    spec = GrammarSpec("lark", 'start: s\ns: s s s | s s | "a" | "b"')
    walk = Walk(Compiler(small.tokenizer, V, (EOS,)).compile(spec))
    length = 0
    while walk.mask_V(())[0] and length < 100:
        length += 1
        walk.follow([0] * length)
    assert 5 < length < 100
    assert walk.mask_V(()).nonzero()[:, 0].tolist() == [EOS]


def test_what_a_batch_has_followed_is_not_followed_again(grammar, monkeypatch):
    """Rows leave and join, so that settings are made anew; a walk goes on where it was."""
    paths, tree = bush(1)
    texts = ([0, 0, 1], [0, 3])
    view = RoundView(
        (0, 1),
        torch.tensor([0, 1]),
        torch.tensor([1, 3]),
        torch.tensor([2, 1]),
        texts,
        (1, 1),
    )
    both = SamplingBatch([Sampling(grammar=grammar), Sampling(grammar=grammar)], V)
    trees = tree.of_rows(torch.tensor([0, 0]))
    known = both.scores(logits_at(paths, 0).expand(2, -1, -1), trees, view)
    monkeypatch.setattr(Walk, "_consume", lambda *_: pytest.fail("followed again"))
    one = SamplingBatch([Sampling(grammar=grammar)], V)
    one.inherit(both)
    guide = one.guide(view_of(texts[0], 1))
    assert torch.equal(guide.root(logits_at(paths, 0)[:, 0], None), known[:1, 0])


def test_a_file_says_by_its_ending_what_it_holds(tmp_path):
    path = tmp_path / "a.regex"
    path.write_text("a+\n")
    assert GrammarSpec.read(path) == GrammarSpec("regex", "a+")
    with pytest.raises(GrammarError, match="cannot tell"):
        GrammarSpec.read(tmp_path / "a.txt")
    with pytest.raises(GrammarError, match="cannot read"):
        GrammarSpec.read(tmp_path / "b.lark")
