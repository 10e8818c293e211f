"""Prompts that are kept in part: what is kept against transformers' own attention weights, texts
against forwards that see no more than that, the exact ends, refusals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.cli.options.target_choice import AnsweringChoice
from specctl.core.errors import IncompatibleError, RecipeError, SpecctlError
from specctl.drafters.training_free.prompt_lookup import PromptLookup, PromptLookupOptions
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.generate import Generated, generate
from specctl.runtime.kept_prompts import make_kept_prompts, spec_kv, spec_pc
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.mixed import in_turns
from specctl.runtime.target.variants.mixture import parse
from specctl_testing.models import build_model

VOCAB, LAYERS = 24, 2
GREEDY = Sampling(max_new_tokens=14)
DRAWN = Sampling(temperature=1.0, max_new_tokens=14, seed=5)
DIRECT = {"policy": "direct"}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=random).tolist()


def attentive(seed: int) -> Any:
    """A model whose next token is that of far ones: heads look sharply, and count much."""
    model = build_model("llama", LAYERS, vocab=VOCAB, seed=seed)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 3
        layer.self_attn.o_proj.weight.data *= 6
    return model


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """The target, and the model that chooses."""
    return attentive(0), attentive(1)


@pytest.fixture(scope="module")
def targets(models: tuple[Any, Any]) -> tuple[Target, Target]:
    return Target.from_model(models[0]), Target.from_model(models[1])


def kept(word: str, target: Target, beside: Target) -> Target:
    return in_turns(target, [beside], parse(f"{word}=m"))


def tokens(made: Generated) -> list[list[int]]:
    return [list(output.token_ids) for output in made.outputs]


@contextmanager
def eager(model: Any) -> Iterator[None]:
    """transformers' own attention, which gives its weights and takes a mask for each head."""
    given = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(given)


def attentions(model: Any, ids: Sequence[int]) -> list[Tensor]:
    """[H, T, T] of every layer."""
    with eager(model), torch.no_grad():
        out = model(torch.tensor([list(ids)]), output_attentions=True, use_cache=False)
    return [weights[0] for weights in out.attentions]


# -- SpecPC ----------------------------------------------------------------------------------------


def test_specpc_scores_are_the_largest_weights_of_the_last_tokens(
    models: tuple[Any, Any], targets: tuple[Target, Target]
) -> None:
    """Of upper layers alone; the weights of older tokens count less."""
    prompt = prompt_of(150)
    ramp_T1 = torch.linspace(0, 1, 64)[:, None]
    layers = attentions(models[1], prompt)[LAYERS // 2 :]
    wanted_L = torch.stack([(one[:, -64:] * ramp_T1).amax((0, 1)) for one in layers]).amax(0)
    found_L = spec_pc.scores(targets[1].lm, prompt, 1.0)
    torch.testing.assert_close(found_L, wanted_L, rtol=1e-4, atol=1e-6)
    first_L = (attentions(models[1], prompt)[0][:, -64:] * ramp_T1).amax((0, 1))
    found_L = spec_pc.scores(targets[1].lm, prompt, 0.5)
    torch.testing.assert_close(found_L, first_L, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model_type", ["gpt_neox", "phi", "granite", "qwen3"])
def test_attention_is_seen_in_other_architectures(model_type: str) -> None:
    """Rotated in part, scaled otherwise, with norms of queries."""
    more = {"attention_multiplier": 0.2} if model_type == "granite" else {}
    model = build_model(model_type, LAYERS, vocab=VOCAB, seed=3, **more)
    prompt = prompt_of(90)
    wanted_L = attentions(model, prompt)[1][:, -64:]
    wanted_L = (wanted_L * torch.linspace(0, 1, 64)[:, None]).amax((0, 1))
    found_L = spec_pc.scores(Target.from_model(model).lm, prompt, 1.0)
    torch.testing.assert_close(found_L, wanted_L, rtol=1e-3, atol=1e-5)


def places(score: Sequence[float], keep: int) -> list[int]:
    """The kept places by the paper's words: every step of its own, on lists."""
    length = len(score)
    smooth = [max(score[max(0, at - 31) : at + 33]) for at in range(length)]
    ranked = sorted(range(length), key=lambda at: -smooth[at])
    wanted = list(range(length - 64, length))
    for at in ranked[:keep]:
        near = sorted(range(at - 31, at + 33), key=lambda one: abs(one - at))
        wanted += [one for one in near if 0 <= one < length]
    return sorted(list(dict.fromkeys(wanted))[:keep])


def test_specpc_keeps_the_window_and_the_best_with_their_neighbours() -> None:
    score_L = torch.zeros(400)
    score_L[[50, 260]] = torch.tensor([0.5, 0.9])
    found = spec_pc.kept_places(score_L, 200)
    assert found[-64:] == list(range(336, 400))
    assert set(range(229, 293)) <= set(found)  # the best place and its neighbours
    assert len(found) == 200
    for seed in range(3):
        score_L = torch.rand(300, generator=torch.Generator().manual_seed(seed)) ** 8
        assert spec_pc.kept_places(score_L, 170) == places(score_L.tolist(), 170)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_specpc_answers_the_kept_tokens_as_a_prompt_of_their_own(
    targets: tuple[Target, Target], sampling: Sampling
) -> None:
    """In batches as well, and with drafts."""
    prompts = [prompt_of(190, 1), prompt_of(40, 2), prompt_of(150, 3)]
    whole = kept("specpc:128", *targets)
    chooser = make_kept_prompts(whole, None, None, "auto")
    assert isinstance(chooser, spec_pc.SpecPC)
    short = [list(chooser.shortened(tuple(prompt))) for prompt in prompts]
    assert [len(one) for one in short] == [128, 40, 128]
    wanted = tokens(generate(targets[0], short, sampling=sampling))
    assert wanted != tokens(generate(targets[0], prompts, sampling=sampling))
    for batch in (1, 3):
        made = generate(whole, prompts, sampling=sampling, batch=batch)
        assert tokens(made) == wanted
        assert made.stats.verification == "approximate:specpc:128:1"
        assert made.stats.kept is not None
        assert made.stats.kept.to_json() == {"prompt_tokens": 380, "kept_tokens": 296}
    lookup = PromptLookup(PromptLookupOptions(), targets[0].spec)
    if sampling is GREEDY:
        policy = make_policy(DIRECT)
        assert tokens(generate(whole, prompts, drafter=lookup, policy=policy)) == tokens(
            generate(targets[0], short, sampling=Sampling())
        )


# -- SpecKV ----------------------------------------------------------------------------------------


def kept_of(
    model: Any, prompt: Sequence[int], drafted: Sequence[int], keep: int
) -> list[list[set[int]]]:
    """The positions that each key/value head of each layer keeps, by the paper's words."""
    first, found = len(prompt) - 1 - spec_kv.WINDOW, []
    for weights in attentions(model, [*prompt, *drafted]):
        groups = weights[:, first:, :first].amax(1).unflatten(0, (2, -1)).amax(1)
        heads = []
        for score in groups.tolist():
            smooth = [max(score[max(0, at - 3) : at + 4]) for at in range(first)]
            best = sorted(range(first), key=lambda at: -smooth[at])[: keep - spec_kv.WINDOW]
            heads.append({*best, *range(first, first + spec_kv.WINDOW)})
        found.append(heads)
    return found


def logits_of(model: Any, prompt: Sequence[int], new: Sequence[int], seen: Any) -> Tensor:
    """[new + 1, V] behind the prompt and each new token, by one forward in which the prompt's last
    token and those behind it see of the prompt what each head keeps."""
    ids, root = [*prompt, *new], len(prompt) - 1
    low = torch.finfo(torch.float32).min
    causal = torch.full((len(ids), len(ids)), low).triu(1)

    def hook(heads: list[set[int]]) -> Any:
        mask = causal.repeat(4, 1, 1)
        for head, stays in enumerate(heads):
            gone = [at for at in range(root) if at not in stays]
            mask[2 * head : 2 * head + 2, root:, gone] = low
        return lambda module, args, kwargs: (args, {**kwargs, "attention_mask": mask[None]})

    with eager(model), torch.no_grad(), ExitStack() as held:
        for layer, heads in zip(model.model.layers, seen, strict=True):
            handle = layer.self_attn.register_forward_pre_hook(hook(heads), with_kwargs=True)
            held.callback(handle.remove)
        return model(torch.tensor([ids]), use_cache=False).logits[0, root:]  # type: ignore[no-any-return]


@pytest.mark.parametrize("lookahead", [0, 9])
def test_speckv_decodes_with_the_kept_keys_at_the_places_of_the_whole_prompt(
    models: tuple[Any, Any], targets: tuple[Target, Target], lookahead: int
) -> None:
    prompts = [prompt_of(150, 4), prompt_of(30, 5), prompt_of(120, 6)]
    whole = kept(f"speckv:64:{lookahead}", *targets)
    lookup = PromptLookup(PromptLookupOptions(), targets[0].spec)
    for drafter, policy in ((None, None), (lookup, make_policy(DIRECT))):
        made = generate(whole, prompts, sampling=GREEDY, drafter=drafter, policy=policy)
        assert made.stats.verification == f"approximate:speckv:64:{lookahead}"
        assert made.stats.kept is not None
        assert made.stats.kept.kept == 65 + 30 + 65
        for prompt, new in zip(prompts, tokens(made), strict=True):
            sampling = Sampling(max_new_tokens=max(1, lookahead))
            drafted = tokens(generate(targets[1], [prompt], sampling=sampling))[0][:lookahead]
            if len(prompt) - 1 <= 64:
                seen = [[set(range(len(prompt)))] * 2] * LAYERS
            else:
                seen = kept_of(models[0], prompt, drafted, 64)
            logits = logits_of(models[0], prompt, new, seen)
            assert new == logits[:-1].argmax(-1).tolist()
    plain = tokens(generate(targets[0], prompts, sampling=GREEDY))
    assert [one == other for one, other in zip(tokens(made), plain, strict=True)] == [
        False, True, False,
    ]  # fmt: skip


def test_speckvpc_keeps_keys_of_the_kept_tokens(
    models: tuple[Any, Any], targets: tuple[Target, Target]
) -> None:
    """What is drafted behind the whole prompt chooses both."""
    prompt = prompt_of(170, 7)
    made = generate(kept("speckvpc:64:128:9", *targets), [prompt, prompt[:50]], sampling=GREEDY)
    drafted = tokens(generate(targets[1], [prompt], sampling=Sampling(max_new_tokens=9)))[0]
    ramp_T1 = torch.cat([torch.linspace(0, 1, 64), torch.ones(9)])[:, None]
    layers = attentions(models[1], [*prompt, *drafted])[LAYERS // 2 :]
    every_L = torch.stack([(one[:, -73:] * ramp_T1).amax((0, 1)) for one in layers]).amax(0)
    short = [prompt[at] for at in places(every_L[:-9].tolist(), 128)]
    seen, new = kept_of(models[0], short, drafted, 64), tokens(made)
    assert new[0] == logits_of(models[0], short, new[0], seen)[:-1].argmax(-1).tolist()
    assert new[1:] == tokens(generate(targets[0], [prompt[:50]], sampling=GREEDY))
    assert made.stats.kept is not None
    assert made.stats.kept.to_json() == {"prompt_tokens": 220, "kept_tokens": 115}


def test_each_head_keeps_its_own_keys(models: tuple[Any, Any]) -> None:
    seen = kept_of(models[0], prompt_of(150, 4), [], 64)
    assert seen[0][0] != seen[0][1]
    assert seen[0] != seen[1]


def test_the_context_counts_dropped_positions(models: tuple[Any, Any]) -> None:
    short = Target.from_model(build_model("llama", 1, vocab=VOCAB, max_position_embeddings=110))
    made = generate(kept("speckv:64:4", short, short), [prompt_of(100)], sampling=GREEDY)
    assert made.outputs[0].finish_reason == "context"
    assert len(made.outputs[0].token_ids) == 10


@pytest.mark.parametrize("length", [110, 150])
def test_a_prompt_beyond_the_context_of_the_target_is_refused(length: int) -> None:
    """Whose room counts what it reads: of `speckvpc` the kept tokens."""
    short = Target.from_model(build_model("llama", 1, vocab=VOCAB, max_position_embeddings=110))
    shorter = Target.from_model(build_model("llama", 1, vocab=VOCAB, max_position_embeddings=180))
    long = Target.from_model(build_model("llama", 1, vocab=VOCAB, max_position_embeddings=400))
    prompt = prompt_of(length)
    for word in ("speckv:64:4", "speckv:64:0", "speckvpc:64:1e6:4"):
        with pytest.raises(SpecctlError, match="does not fit the target's context"):
            generate(kept(word, short, long), [prompt], sampling=GREEDY)
    made = generate(kept("speckvpc:64:128:9", shorter, long), [prompt_of(300)], sampling=GREEDY)
    assert len(made.outputs[0].token_ids) == 14
    pair = kept("speckvpc:64:128:9", shorter, long)
    chooser = make_kept_prompts(pair, None, None, "auto")
    assert isinstance(chooser, spec_kv.SpecKV)
    assert chooser.lookahead(Request(tuple(prompt_of(300)), GREEDY)) == 9


# -- both ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("word", ["specpc:190", "speckv:189", "speckvpc:1e6:190"])
def test_a_prompt_that_fits_is_answered_as_by_the_target_alone(
    targets: tuple[Target, Target], sampling: Sampling, word: str
) -> None:
    prompts = [prompt_of(190, 1), prompt_of(40, 2)]
    made = generate(kept(word, *targets), prompts, sampling=sampling)
    assert tokens(made) == tokens(generate(targets[0], prompts, sampling=sampling))
    assert made.stats.verification.startswith("approximate:spec")


def test_what_cannot_keep_a_part_is_refused(targets: tuple[Target, Target]) -> None:
    whole = kept("specpc:128", *targets)
    with pytest.raises(IncompatibleError, match="kept in part cannot be used here"):
        Engine(whole)
    with pytest.raises(IncompatibleError, match="kept in part"):  # before anything is read
        AnsweringChoice("no-such-model", mix="speckv=tiny")._mix()
    windowed = Target.from_model(build_model("mistral", 1, vocab=VOCAB))
    other = Target.from_model(build_model("gemma2", 1, vocab=VOCAB))
    for word, target, beside in (
        ("specpc", targets[0], windowed), ("speckv", windowed, targets[0]),
        ("specpc", targets[0], other), ("speckv", other, targets[0]),
    ):  # fmt: skip
        with pytest.raises(IncompatibleError):
            generate(kept(word, target, beside), [[1, 2]], sampling=GREEDY)
    lookup = PromptLookup(PromptLookupOptions(), targets[0].spec)
    with pytest.raises(SpecctlError, match="does not go with drafting beside"):
        generate(whole, [[1]], drafter=lookup, policy=make_policy(DIRECT), parallel=True)
    long = prompt_of(256)
    with pytest.raises(SpecctlError, match="chooses what is kept"):
        generate(whole, [long], sampling=GREEDY)
    for word in (
        "specpc:100",
        "specpc:200.5",
        "speckv:64:1.5",
        "specpc=a,b",
        "specpc:200:0",
        "speckvpc:64:64",
    ):
        with pytest.raises(RecipeError):
            parse(word if "=" in word else f"{word}=m")
