"""Denoising on random models: what is plain, what is lossless, and the exact ends of the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specctl.core.errors import RecipeError, SpecctlError
from specctl.diffusion.canvas import CanvasGuess
from specctl.diffusion.engine import Denoised, denoise, verification_of
from specctl.diffusion.settings import DenoiseSettings
from specctl.diffusion.unmask.base import BlockStep
from specctl.diffusion.unmask.entropy import EntropyUnmask
from specctl.diffusion.unmask.explore import ExploreUnmask
from specctl.diffusion.unmask.threshold import ThresholdUnmask
from specctl_testing.diffusion import MASK, tiny_target

LAYOUTS = ("llada", "dream")
PROMPTS = [[3 + (7 * k + j) % 30 for j in range(2 + k % 5)] for k in range(5)]
PLAIN = DenoiseSettings(block=8)


def run(layout: str, prompt: list[int], settings: DenoiseSettings, **how: Any) -> Denoised:
    how = {"max_new_tokens": 20, "ignore_eos": True, **how}
    return denoise(tiny_target(layout), prompt, settings, **how)


def reference(layout: str, prompt: list[int], block: int, steps: int, length: int) -> list[int]:
    """The plain greedy schedule once more, by lists and one position at a time."""
    target = tiny_target(layout)
    ids = [*prompt, *[MASK] * length]
    for first in range(len(prompt), len(ids), block):
        last = min(first + block, len(ids))
        size = last - first
        passes = min(steps, size)
        for step in range(passes):
            state = target.model(torch.tensor([ids]))[0]
            found = []
            for place in range(first, last):
                if ids[place] == MASK:
                    source = max(place - 1, 0) if layout == "dream" else place
                    p = target.model.logits(state[source]).softmax(-1)
                    found.append((float(p.max()), -place, int(p.argmax())))
            for _, place, token in sorted(found, reverse=True)[
                : size // passes + (step < size % passes)
            ]:
                ids[-place] = token
    return ids[len(prompt) :]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("steps", [8, 3])
def test_the_plain_schedule_keeps_the_most_confident_tokens(layout: str, steps: int) -> None:
    for prompt in PROMPTS[:4]:
        made = run(layout, prompt, replace(PLAIN, steps=steps))
        assert list(made.token_ids) == reference(layout, prompt, 8, steps, 20)
        assert made.passes == steps + steps + min(steps, 4)
        assert made.positions == made.passes * (len(prompt) + 20)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("steps", "ahead"), [(None, 1), (None, 4), (4, 3), (None, 40)])
def test_free_drafts_change_nothing_but_the_passes(
    layout: str, temperature: float, steps: int | None, ahead: int
) -> None:
    settings, saved = replace(PLAIN, steps=steps), 0
    for seed, prompt in enumerate(PROMPTS):
        how = {"temperature": temperature, "seed": seed, "ignore_eos": seed % 2 == 0}
        plain = run(layout, prompt, settings, **how)
        fast = run(layout, prompt, replace(settings, ahead=ahead), **how)
        assert (fast.token_ids, fast.finish_reason) == (plain.token_ids, plain.finish_reason)
        assert fast.passes <= plain.passes
        saved += plain.passes - fast.passes
    assert saved > 0, "drafted steps are never right"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "exact", "loose"),
    [
        ("unmask", "threshold:1", "threshold:0.05"),
        ("unmask", "explore:1:0", "explore:0.3:1"),
        ("reuse", "dkv:1", "dkv:16"),
        ("reuse", "window:20:0:1", "window:3:3:8"),
    ],
)
def test_each_way_has_an_exact_end_and_costs_less_at_the_other(
    layout: str, name: str, exact: str, loose: str
) -> None:
    cost: dict[str, int] = {}
    for prompt in PROMPTS:
        plain = run(layout, prompt, PLAIN)
        same = run(layout, prompt, replace(PLAIN, **{name: exact}))
        assert same.token_ids == plain.token_ids
        less = run(layout, prompt, replace(PLAIN, **{name: loose}))
        assert len(less.token_ids) == 20
        assert MASK not in less.token_ids
        cost["plain"] = cost.get("plain", 0) + plain.positions
        cost["less"] = cost.get("less", 0) + less.positions
    assert cost["less"] < 0.8 * cost["plain"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", [{"reuse": "window:8:0:1"}, {"reuse": "dkv:1"}, {"ahead": 3}])
def test_the_token_of_the_mask_in_a_prompt_is_text(layout: str, way: dict[str, Any]) -> None:
    prompt = [MASK, 5, MASK, 6]
    plain = run(layout, prompt, PLAIN, max_new_tokens=8)
    assert run(layout, prompt, replace(PLAIN, **way), max_new_tokens=8).token_ids == plain.token_ids
    small = run(layout, prompt, replace(PLAIN, reuse="window:1:0:4"), max_new_tokens=8)
    assert MASK not in small.token_ids


def test_a_threshold_keeps_all_that_are_confident_enough() -> None:
    passes = [
        run("dream", PROMPTS[0], replace(PLAIN, unmask=f"threshold:{t}")).passes
        for t in (1, 0.2, 0)
    ]
    assert passes[0] == 20
    assert passes[0] > passes[1] > passes[2]
    assert passes[2] == 3, "a pass for each block"


def test_entropy_decides_where_confidence_would_not() -> None:
    """The second is more confident, and less certain: the rest of it is spread out."""
    p = torch.full((3, 42), 0.35 / 41)
    p[0], p[1, 0], p[2, 0] = 0, 0.65, 0.65
    p[0, :2] = torch.tensor([0.6, 0.4])  # .67 nats
    guess = CanvasGuess(torch.arange(3), p.argmax(-1), p.log())
    block = BlockStep(first=0, last=2, step=0, count=1)
    assert guess.confidence_Q[1] > guess.confidence_Q[0]
    assert guess.entropy_Q.tolist() == pytest.approx([0.673, 1.947, 1.947], abs=1e-3)
    for threshold, kept in ((0, [1, 0, 0]), (0.7, [1, 0, 0]), (2, [1, 1, 0])):
        assert EntropyUnmask(threshold).keep(guess, block).tolist() == kept
    counts = [
        run("dream", PROMPTS[0], replace(PLAIN, unmask=f"entropy:{t}")).passes for t in (0, 2, 9)
    ]
    assert counts[0] == 20 > counts[1] > counts[2] == 3


def test_exploring_keeps_the_least_certain_and_exploits_beyond_the_block() -> None:
    logits = torch.tensor([[4.0, 0, 0], [1.0, 0, 0], [0.1, 0, 0], [9.0, 0, 0]])
    guess = CanvasGuess(torch.arange(4), logits.argmax(-1), logits)
    block = BlockStep(first=0, last=3, step=0, count=1)
    assert ExploreUnmask(1, 1).keep(guess, block).tolist() == [True, False, True, False]
    assert ExploreUnmask(0.99, 1).keep(guess, block).tolist() == [True, False, False, True]
    assert ThresholdUnmask(0.4).keep(guess, block).tolist() == [True, True, False, False]


def test_a_seed_gives_its_text_and_another_gives_another() -> None:
    texts = [run("llada", PROMPTS[0], PLAIN, temperature=1.0, seed=s).token_ids for s in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_draws_follow_the_model() -> None:
    """One masked token: over seeds its frequencies are the model's probabilities."""
    target, count = tiny_target("llada"), 300
    state = target.model(torch.tensor([[*PROMPTS[0], MASK]]))[0, -1]
    p = target.model.logits(state).softmax(-1)
    drawn = [
        denoise(target, PROMPTS[0], PLAIN, max_new_tokens=1, temperature=1.0, seed=s).token_ids[0]
        for s in range(count)
    ]
    seen = torch.bincount(torch.tensor(drawn), minlength=len(p)) / count
    assert float((seen - p).abs().sum()) / 2 < 0.14


@pytest.mark.parametrize("place", [0, 7, 8, 13])
def test_an_end_of_text_ends_after_its_block(place: int) -> None:
    target, how = tiny_target("dream"), {"max_new_tokens": 16, "temperature": 2.0, "seed": 3}
    whole = denoise(target, PROMPTS[0], PLAIN, ignore_eos=True, **how)
    end = whole.token_ids[place]
    at = whole.token_ids.index(end)
    made = denoise(replace(target, eos_ids=(end,)), PROMPTS[0], PLAIN, **how)
    assert made.token_ids == whole.token_ids[: at + 1]
    assert (made.finish_reason, made.passes) == ("eos", (at // 8 + 1) * 8)


@pytest.mark.parametrize(
    ("settings", "verification"),
    [
        ({}, "plain"),
        ({"steps": 4}, "plain"),
        ({"ahead": 4}, "lossless"),
        ({"unmask": "threshold:0.9"}, "approximate:threshold"),
        ({"unmask": "entropy:0.5"}, "approximate:entropy"),
        ({"reuse": "dkv:4"}, "approximate:dkv-cache"),
        ({"unmask": "threshold:0.9", "reuse": "window:8:8:4"}, "approximate:threshold+window"),
    ],
)
def test_results_say_what_they_are(settings: dict[str, Any], verification: str) -> None:
    assert verification_of(DenoiseSettings(**settings)) == verification


@pytest.mark.parametrize(
    "settings",
    [
        {"block": 0},
        {"steps": 33},
        {"ahead": -1},
        {"unmask": "threshold"},
        {"unmask": "threshold:2"},
        {"unmask": "entropy:-0.1"},
        {"unmask": "entropy:inf"},
        {"unmask": "best:1"},
        {"unmask": "explore:0.9:-1"},
        {"reuse": "dkv:0"},
        {"reuse": "window:1:2"},
        {"reuse": "dkv:inf"},
        {"unmask": "explore:0.9:inf"},
        {"unmask": 0.9},
        {"block": None},
        {"block": "many"},
        {"steps": float("inf")},
        {"steps": 4, "unmask": "threshold:0.9"},
        {"ahead": 2, "reuse": "dkv:2"},
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SpecctlError):
        DenoiseSettings(**settings)


def test_a_text_that_does_not_fit_is_refused() -> None:
    wrong = (([], 4, "is empty"), ([3] * 100, 40, "do not fit"), ([3, 40], 4, "vocabulary"))
    for prompt, new, message in (*wrong, ([-1], 4, "vocabulary")):
        with pytest.raises(SpecctlError, match=message):
            denoise(tiny_target(), prompt, PLAIN, max_new_tokens=new)
    with pytest.raises(RecipeError, match="unmask"):
        DenoiseSettings(unmask="threshold:x")
