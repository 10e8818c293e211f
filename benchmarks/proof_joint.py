"""Sampled texts of every drafter under every kind of sampling against the target's exact
distribution.

python benchmarks/proof_joint.py [--samples 20000] [--json]
python benchmarks/proof_joint.py --single-models --rows 1 --samples 1000

A configuration is a drafter with a policy and a rule, and a sampling setting, on small random
models of 8 tokens, Llamas and four kinds with recurrent layers: temperatures, truncations,
penalties, banned words, a grammar mask, ends of text inside a draft, limits inside a draft, the end
of the context. Texts of up to three tokens go through the engine (batched, cached, with rollbacks);
the distribution of all of them is listed exactly. `--rows` says how many are decoded together, and
`--single-models` leaves out drafters beside the target. Fails (exit code 8) if any text is
impossible, or any test is significant after Holm's correction at a family-wise 0.001, or a drafter
is never accepted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from proof_common import Check, parser, report
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LogitsProcessor,
    PreTrainedTokenizerFast,
)

from specctl.core import language_model
from specctl.core.drafter import Drafter
from specctl.core.vocab import VocabMap
from specctl.drafters import families
from specctl.drafters.frames.self_drafter import SelfDrafter
from specctl.drafters.lm.small_lm import SmallLm
from specctl.drafters.team import Team
from specctl.runtime.cross_vocab.translate import translated
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.proof.exact_distribution import ExactDistribution
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

FAMILY_WISE = 1e-3
CONTEXT, EOS = 20, 7
ROWS = 250


class Alternates(LogitsProcessor):
    """A grammar: even and odd tokens take turns."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        parity = torch.arange(scores.shape[-1], device=scores.device) % 2
        return scores.masked_fill(parity == input_ids[:, -1:] % 2, -torch.inf)


SAMPLINGS: dict[str, dict[str, Any]] = {
    "T=1": {},
    "T=0.3": {"temperature": 0.3},
    "T=0.7": {"temperature": 0.7},
    "T=1.5": {"temperature": 1.5},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.2},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    "bad words": {"bad_words": ((1, 2), (5,))},
    "bias": {"logit_bias": {3: 1.5, 6: -2.0}},
    "grammar": {"processors": (Alternates(),)},
    "end of text": {"ignore_eos": False},
    "two tokens": {"max_new_tokens": 2},
    "end of context": {"prompt": [1, 4] * (CONTEXT // 2 - 1)},
}


RECURRENT: dict[str, dict[str, Any]] = {  # one architecture of each kind of state
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8},
    "falcon_h1": {
        "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_ssm": 32,
        "mamba_chunk_size": 8},
    "mamba": {"state_size": 8},
}  # fmt: skip


def letters_model(names: str, seed: int, layers: int = 4, kind: str = "llama") -> Target:
    """A random model whose tokens are letters."""
    vocab = {name: i for i, name in enumerate(names)}
    words = Tokenizer(models.WordLevel(vocab, unk_token=names[0]))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    torch.manual_seed(seed)
    fields: dict[str, Any] = {
        "vocab_size": len(names), "hidden_size": 16, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32,
        "max_position_embeddings": CONTEXT, "initializer_range": 0.3, "bos_token_id": None,
        "eos_token_id": EOS, "pad_token_id": None, "tie_word_embeddings": False,
    }  # fmt: skip
    fields |= RECURRENT.get(kind, {})
    fields["num_hidden_layers"] = len(fields.get("layer_types", range(layers)))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields)).eval()
    with torch.no_grad():
        std = model(torch.randint(0, len(names), (4, 12))).logits.std()
        model.lm_head.weight.mul_(1.5 / std)
    return Target.from_model(model, PreTrainedTokenizerFast(tokenizer_object=words))


@cache
def target(kind: str = "llama") -> Target:
    return letters_model("abcdefgh", 0, kind=kind)


@cache
def disturbed() -> SmallLm:
    """The target with a disturbed LM head: agrees often, not always."""
    lm = letters_model("abcdefgh", 0).lm
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        weight = dict(lm.module.named_parameters())["lm_head.weight"]
        weight += 0.5 * weight.std() * torch.randn(weight.shape, generator=generator)
    return SmallLm.from_lm(lm, target().spec)


def fresh(name: str, *, kind: str = "llama", **options: Any) -> Drafter:
    family = families()[name]
    torch.manual_seed(3)
    return family.build(family.options(**options), target(kind).spec, None)


def trimmed() -> Drafter:
    return disturbed().trimmed(VocabMap(torch.tensor([0, 2, 3, 4, 7]), 8))


def foreign(method: str) -> Drafter:
    other = letters_model("hxfcydaz", 5)
    return translated(other.lm, other.tokenizer, None, target(), method)


def team() -> Drafter:
    return Team.of([fresh("prompt-lookup"), disturbed()])


def copies_and_4_bits() -> Drafter:
    return Team.of([fresh("prompt-lookup"), fresh("quantspec")])


@dataclass(frozen=True, slots=True)
class Draft:
    """A drafter with how it is served, and for a target of which architecture."""

    make: Callable[[], Drafter]
    serve: dict[str, Any]
    rule: str = "auto"
    kind: str = "llama"


CHAIN, TREE = {"policy": "chain", "length": 3}, {"policy": "static-tree", "branch": (2, 2)}
MANY = {"policy": "mcsd", "branch": (3, 2)}
TEAM = {"policy": "switch", "controller": "cascade", "length": 3, "lengths": (2, 3), "nodes": 3}
DRAFTS: dict[str, Draft] = {
    "chain, block": Draft(disturbed, CHAIN, "block"),
    "chain, token-level": Draft(disturbed, CHAIN, "chain"),
    "chain, target-only": Draft(disturbed, CHAIN, "target-only"),
    "distinct tree, traversal": Draft(disturbed, TREE, "traversal"),
    "distinct tree, recursive": Draft(disturbed, TREE, "recursive"),
    "i.i.d. tree, multi-round": Draft(disturbed, MANY, "multi-round"),
    "i.i.d. tree, spectr": Draft(disturbed, MANY, "spectr"),
    "i.i.d. tree, traversal": Draft(disturbed, MANY, "traversal"),
    "refilled tree, sequoia": Draft(disturbed, {"policy": "sequoia", "nodes": 8}, "sequoia"),
    "top plus one": Draft(disturbed, {"policy": "top-plus-one", "branch": (3, 2)}),
    "two paths, multi-path": Draft(disturbed, {"policy": "paths", "length": 3}, "multi-path"),
    "dynamic tree": Draft(disturbed, {"policy": "dynamic-tree", "length": 3, "beam": 2}),
    "dynamic tree, one-hot": Draft(
        disturbed, {"policy": "dynamic-tree", "length": 3, "beam": 2}, "one-hot"
    ),
    "trimmed chain": Draft(trimmed, CHAIN),
    "trimmed tree": Draft(trimmed, TREE),
    "other tokenizer, tli": Draft(lambda: foreign("tli"), CHAIN),
    "other tokenizer, tli tree": Draft(lambda: foreign("tli"), TREE),
    "other tokenizer, slem": Draft(lambda: foreign("slem"), {"policy": "direct"}),
    "eagle3": Draft(lambda: fresh("eagle3"), CHAIN),
    "medusa": Draft(lambda: fresh("medusa"), TREE),
    "prompt-lookup": Draft(lambda: fresh("prompt-lookup"), {"policy": "direct"}),
    "token-recycling": Draft(lambda: fresh("token-recycling"), {"policy": "direct"}),
    "copies and a model": Draft(team, TEAM),
    "copies and 4 bits": Draft(copies_and_4_bits, TEAM),
    "speculative-jacobi": Draft(lambda: fresh("speculative-jacobi"), CHAIN),
    "jacobi": Draft(lambda: fresh("jacobi"), {"policy": "direct", "length": 3}),
    "tr-jacobi": Draft(lambda: fresh("tr-jacobi"), {"policy": "direct", "length": 3, "nodes": 8}),
    "mtp": Draft(lambda: fresh("mtp"), CHAIN),
    "quantspec, groups of 4": Draft(
        lambda: fresh("quantspec", kv_bits=4, kv_group=4, recent=1), CHAIN
    ),
    "easyspec, not calibrated": Draft(lambda: fresh("easyspec", calibrate=False), CHAIN),
}


def borrowing() -> Iterator[tuple[str, Draft]]:
    """Every family that runs the target's own layers, as its first policy grows it."""
    for name, method in families().items():
        drafter = fresh(name)
        if isinstance(drafter, SelfDrafter):
            yield name, Draft(partial(fresh, name), {"policy": method.policies[0], "length": 3})


def recurrent(kind: str) -> Iterator[tuple[str, Draft]]:
    """Chains, trees, and heads that read hidden states, for a target of that architecture."""
    yield f"{kind}, chain", Draft(disturbed, CHAIN, "block", kind)
    yield f"{kind}, distinct tree", Draft(disturbed, TREE, "traversal", kind)
    yield f"{kind}, i.i.d. tree", Draft(disturbed, MANY, "multi-round", kind)
    yield f"{kind}, medusa", Draft(partial(fresh, "medusa", kind=kind), TREE, kind=kind)
    yield f"{kind}, eagle3", Draft(partial(fresh, "eagle3", kind=kind), CHAIN, kind=kind)


DRAFTS.update(borrowing())
for architecture in RECURRENT:
    DRAFTS.update(recurrent(architecture))
SINGLE_MODELS = [  # the target drafts for itself
    *(name for name, _ in borrowing()), "speculative-jacobi", "jacobi", "tr-jacobi", "mtp",
    "quantspec, groups of 4", "easyspec, not calibrated", "copies and 4 bits",
]  # fmt: skip
EACH = 3  # sampling settings of every drafter; together they take every setting in turn


# Too short for drafts that are guessed in the round before, or begin behind a first plain round;
# and what leaves no chance to the padding that Jacobi's guesses begin as.
SHORT = {"two tokens", "end of context"}
TOO_SHORT = dict.fromkeys(("ppd", "lexical-unit", "copies and a model", "copies and 4 bits"), SHORT)
TOO_SHORT["jacobi"] = {*SHORT, "top-k", "top-p", "min-p"}


def configurations() -> Iterator[tuple[str, str]]:
    for i, draft in enumerate(DRAFTS):
        names = [name for name in SAMPLINGS if name not in TOO_SHORT.get(draft, ())]
        yield from ((draft, names[(EACH * i + j) % len(names)]) for j in range(EACH))


@dataclass(frozen=True, slots=True)
class Found:
    """What one configuration showed."""

    name: str
    p_value: float
    cells: int
    accepted: int


def run(draft: str, setting: str, samples: int, rows: int = ROWS) -> Found:
    """Sample a configuration, so many rows at a time, and test it."""
    how, fields = DRAFTS[draft], dict(SAMPLINGS[setting])
    prompt = tuple(fields.pop("prompt", [1, 2, 3, 1, 2]))
    fields = {"temperature": 1.0, "max_new_tokens": 3, "ignore_eos": True, **fields}
    model = target(how.kind)
    distribution = ExactDistribution.of(model, prompt, Sampling(**fields))
    engine = Engine(model, how.make(), make_policy(how.serve), how.rule, num_slots=rows)
    requests = [Request(prompt, Sampling(**fields, seed=i)) for i in range(samples)]
    with patch.object(language_model, "LEAST_SAVED", 0.0):  # verify from exits, however small
        done = engine.run(requests)
    test = distribution.test([completion.tokens for completion in done])
    accepted = sum(completion.stats.accepted for completion in done)
    return Found(f"{draft}; {setting}", test.p_value, test.cells, accepted)


def prove(
    samples: int, chosen: Iterable[tuple[str, str]] | None = None, rows: int = ROWS
) -> list[Check]:
    """One check a configuration, Holm's correction over all of them."""
    found = [run(*each, samples, rows) for each in chosen or configurations()]
    checks, limit_reached = [], False
    for rank, one in enumerate(sorted(found, key=lambda each: each.p_value)):
        limit_reached = limit_reached or one.p_value > FAMILY_WISE / (len(found) - rank)
        wrong = "" if limit_reached else f"p = {one.p_value:.2g} over {one.cells} cells"
        if one.accepted == 0:
            wrong = wrong or "nothing was ever accepted, so nothing was tested"
        checks.append(Check(one.name, samples, int(bool(wrong)), found=wrong))
    return checks


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--samples", type=int, default=20_000)
    given.add_argument("--rows", type=int, default=ROWS, help="decoded together")
    given.add_argument("--single-models", action="store_true")
    options = given.parse_args()
    chosen = configurations()
    if options.single_models:
        chosen = (each for each in chosen if each[0] in SINGLE_MODELS)
    report(prove(options.samples, chosen, options.rows), options.json)


if __name__ == "__main__":
    sys.exit(main())
