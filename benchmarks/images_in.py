"""Drafting for a target that reads images: tau by drafter, on captions of rendered shapes.

A small LLaVA-shaped target (a CLIP tower, a projector, a Llama) is trained from nothing on images
of a coloured shape, and captions that say what is where. It then writes captions of the images that
drafters learn from, and of others that they are measured on:

- prompt-lookup, which learns nothing
- small-lm, a text-only draft model, from whose prompts the placeholders are dropped
- small-lm trained and served with the placeholders' ids in its prompts
- eagle3, which reads the target's states, those at the positions of the image as well
- eagle3 that is given zeros in the place of these states, in training and in drafting
- msd, whose rows of the image are the target's visual embeddings, in two stages (text alone, then
  a rising share of images); the same with these rows mixed as EAGLE's, and without stages
- flash, which compresses the image to two latents and drafts four tokens per forward; the same with
  all states of the image, and with one token per forward

Text alone is what the target writes to the same question without an image. The loss of a drafter
that is trained in stages counts text in their first half, all others learn from images throughout.
Chains of four tokens, greedy; tau is emitted tokens over rounds, with the standard error over
images (jackknife). Every drafted text must be the plain one.

    python benchmarks/images_in.py --out runs/images-in
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specctl.cli.commands.pretrain import recipe_path
from specctl.core.batch import TrainBatch
from specctl.core.drafter import Drafter
from specctl.core.forward.prompt_images import PromptImages
from specctl.core.language_model import Feed
from specctl.drafters import family
from specctl.drafters.features.msd import multimodal_share
from specctl.images.shapes import QUESTION, named, scene
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.image_rows import with_images
from specctl.runtime.engine.request import Completion, Request
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target, load_target
from specctl.train.pretrain.image_layouts import MARK
from specctl.train.pretrain.shapes import EXPORT, ShapesRecipe, shapes_recipe, train_shapes

PROMPT = f"{MARK} {QUESTION}"
CHAIN = {"policy": "chain", "length": 4}

Prompt = tuple[list[int], PromptImages]


def make_target(name: str, folder: Path, steps: int, count: int, lead: str = "") -> ShapesRecipe:
    """The recipe of that name with shapes alone and as a text that goes on behind an image; where
    FOLDER/export holds no target, it is trained in so many steps on `count` scenes."""
    found = shapes_recipe(recipe_path(name))
    assert found is not None
    changed = {"chat": False, "lead": lead, "what": ("shapes",), "steps": steps, "scenes": count}
    recipe = found.model_copy(update=changed)
    if not (folder / EXPORT / "config.json").is_file():
        report = train_shapes(recipe, folder)
        print(f"target: held-out loss {report.loss:.3f}, {report.seconds:.0f} s", flush=True)
    return recipe


def _picks(count: int, rows: int, steps: int) -> Iterator[list[int]]:
    rng = random.Random(1)
    for _ in range(steps):
        yield rng.sample(range(count), rows)


# -- what the target writes ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt with its image, or without one, and what the target wrote."""

    prompt: list[int]
    images: PromptImages | None
    text: tuple[int, ...]


def seen(target: Target, seeds: Sequence[int]) -> list[Prompt]:
    assert target.vision is not None
    ids = target.encode(PROMPT)
    return [target.vision.see(ids, [scene(seed).image]) for seed in seeds]


def run(
    target: Target,
    prompts: Sequence[tuple[list[int], PromptImages | None]],
    drafter: Drafter | None = None,
    temperature: float = 0.0,
) -> list[Completion]:
    policy = None if drafter is None else make_policy(CHAIN)
    if drafter is not None and drafter.family == "prompt-lookup":
        policy = make_policy({"policy": "direct"})
    engine = Engine(target, drafter, policy, num_slots=8)
    requests = [
        with_images(
            target,
            Request(tuple(ids), Sampling(temperature=temperature, seed=at, max_new_tokens=64)),
            images,
        )
        for at, (ids, images) in enumerate(prompts)
    ]
    return engine.run(requests)


# -- drafters --------------------------------------------------------------------------------------


def batch_of(target: Target, drafter: Drafter, rows: Sequence[Answered], how: str) -> TrainBatch:
    """What a drafter learns from: answers behind their images. `how`: "drop" leaves the
    placeholders out of what is read, "zeros" puts zeros in the place of the states there."""
    assert target.vision is not None
    whole = [[*row.prompt, *row.text] for row in rows]
    width = max(map(len, whole))
    ids_BT = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in whole])
    at_T = torch.arange(width).expand(len(rows), width)
    length_B1 = torch.tensor([[len(ids)] for ids in whole])
    prompt_B1 = torch.tensor([[len(row.prompt)] for row in rows])
    document_BT = torch.where(at_T < length_B1, 0, -1)
    masks, needs = target.lm.document_masks(document_BT), drafter.needs()
    is_image_BT, position_BT3 = torch.zeros_like(ids_BT, dtype=torch.bool), None
    for b, row in enumerate(rows):
        for span in () if row.images is None else row.images.spans:
            is_image_BT[b, span.first : span.end] = True
        found = None if row.images is None else row.images.positions(0, width)
        if found is not None:
            position_BT3 = (
                at_T[:, :, None].repeat(1, 1, 3) if position_BT3 is None else position_BT3
            )
            position_BT3[b] = found.T
    with torch.no_grad():
        feed = Feed(ids_BT, at_T, masks, needs.taps, True)
        images = [row.images for row in rows]
        out = target.lm.run(target.vision.feed(feed, images, [0] * len(rows)), None)
    taps = {tap: state.clone() for tap, state in out.taps.items()}
    mask_BT = (at_T >= prompt_B1) & (at_T < length_B1)
    logits_BTV = out.logits_BTV
    assert logits_BTV is not None
    if how == "zeros":
        for state in taps.values():
            state[is_image_BT] = 0.0
    if how == "drop":
        kept = (~is_image_BT).long().sort(dim=1, descending=True, stable=True).indices
        kept = kept[:, : int((~is_image_BT).sum(1).max())]
        ids_BT, document_BT, mask_BT = (x.gather(1, kept) for x in (ids_BT, document_BT, mask_BT))
        logits_BTV = logits_BTV.gather(1, kept[..., None].expand(-1, -1, logits_BTV.shape[-1]))
        at_T = at_T[:, : kept.shape[1]]
    teacher = logits_BTV.clone() if needs.teacher else None
    image_BT = is_image_BT if how == "images" else None
    batch = TrainBatch(ids_BT, mask_BT, document_BT, at_T, taps, teacher, image_BS=image_BT)
    return replace(batch, position_BS3=position_BT3)


def learn(
    target: Target,
    drafter: Drafter,
    answers: Sequence[Answered],
    how: str,
    steps: int,
    texts: Sequence[Answered] = (),
) -> Drafter:
    """Train a drafter on what the target wrote. With `texts`, which hold no images, in two stages:
    each row is one of `answers` with the chance of MSD's share, else one of them."""
    if drafter.needs().borrow:
        drafter.bind(target.borrowed())
    rate, begun = 3e-3, time.perf_counter()
    optimizer = torch.optim.AdamW(drafter.trainable().values(), lr=rate)
    rng = random.Random(2)
    for step, picked in enumerate(_picks(len(answers), 32, steps)):
        share = multimodal_share(step / steps) if texts else 1.0
        rows = [answers[i] if rng.random() < share else texts[i] for i in picked]
        batch = batch_of(target, drafter, rows, how)
        out = drafter.loss(replace(batch, progress=step / steps))
        loss = out.sum / out.count
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.trainable().values(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20, (steps - step) / (steps / 3))
        optimizer.step()
    seconds = time.perf_counter() - begun
    print(f"{drafter.family} ({how}): loss {float(loss.detach()):.3f}, {seconds:.0f} s", flush=True)
    return drafter


def small_lm(target: Target) -> Drafter:
    found = family("small-lm")
    return found.build(found.options(layers=1, width=64), target.spec, None)


def eagle3(target: Target) -> Drafter:
    found = family("eagle3")
    options = found.options(intermediate=192, ttt_steps=3, taps=(1, 2, 3))
    return found.build(options, target.spec, None)


def msd(target: Target, **options: Any) -> Drafter:
    found = family("msd")
    given = found.options(intermediate=192, staged=False, **options)  # rows are drawn by the share
    return found.build(given, target.spec, None)


def flash(target: Target, **options: Any) -> Drafter:
    found = family("flash")
    given = found.options(intermediate=192, **{"latents": 2, "stride": 4, **options})
    return found.build(given, target.spec, None)


class BlindDrafter:
    """A drafter whose rows are started with zeros for the target's states at images."""

    def __init__(self, drafter: Drafter, prompts: Sequence[tuple[list[int], PromptImages]]) -> None:
        self.drafter = drafter
        first = prompts[0][1].spans[0]
        self.first, self.end = first.first, first.end

    def made(self) -> Drafter:
        """The drafter, its states opened with that start."""
        drafter, opened = self.drafter, self.drafter.open

        def open_blind(space: Any) -> Any:
            state = opened(space)
            start = state.start

            def start_blind(slot: int, tokens: Sequence[int], taps: Any) -> None:
                blind = {tap: value.clone() for tap, value in taps.items()}
                for value in blind.values():
                    value[self.first : self.end] = 0.0
                start(slot, tokens, blind)

            state.start = start_blind
            return state

        drafter.open = open_blind  # type: ignore[method-assign]
        return drafter


# -- measures --------------------------------------------------------------------------------------


def tau(done: Sequence[Completion]) -> tuple[float, float]:
    """Emitted tokens over rounds, and its standard error (jackknife over texts)."""
    tokens, rounds = [c.stats.tokens for c in done], [c.stats.rounds for c in done]
    whole = sum(tokens) / sum(rounds)
    count = len(done)
    without = [(sum(tokens) - t) / (sum(rounds) - r) for t, r in zip(tokens, rounds, strict=True)]
    mean = statistics.fmean(without)
    spread = sum((one - mean) ** 2 for one in without) * (count - 1) / count
    return whole, spread**0.5


def right(target: Target, seeds: Sequence[int], done: Sequence[Completion]) -> tuple[float, float]:
    """The share of captions that name colours, shape, place and size of their image, all of them
    and nothing else; and the share of these words that captions name."""
    pairs = [
        (named(scene(seed).caption), named(target.decode(one.tokens)))
        for seed, one in zip(seeds, done, strict=True)
    ]
    shares = [len(true & said) / len(true) for true, said in pairs]
    return statistics.fmean(true == said for true, said in pairs), statistics.fmean(shares)


@dataclass(frozen=True, slots=True)
class Captions:
    """What drafters are measured on and learn from: prompts with images, the target's own captions
    of them, others that it drew, and how many of the captions are right."""

    prompts: list[Prompt]
    plain: list[Completion]
    lessons: list[Answered]
    right: dict[str, float]


def captions_of(
    target: Target, see: Callable[[Target, Sequence[int]], list[Prompt]], test: int, train: int
) -> Captions:
    """Captions by that target of so many images for the measure and for training. `see`: the
    prompts with the images of these seeds."""
    seeds = range(1_000_000, 1_000_000 + test)
    prompts = see(target, seeds)
    plain = run(target, prompts)
    given = see(target, range(2_000_000, 2_000_000 + train))
    written = run(target, given, temperature=0.7)
    lessons = [Answered(*p, c.tokens) for p, c in zip(given, written, strict=True)]
    share, words = right(target, seeds, plain)
    print(f"captions that are right {share:.2f}, of their words {words:.2f}", flush=True)
    return Captions(prompts, plain, lessons, {"right": share, "right_words": words})


def options(
    about: str | None, target_steps: int, steps: int, train: int
) -> argparse.ArgumentParser:
    """The flags of a benchmark of drafters on images, with these defaults."""
    parser = argparse.ArgumentParser(description=(about or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target-steps", type=int, default=target_steps)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--train", type=int, default=train)
    parser.add_argument("--test", type=int, default=64)
    return parser


def main() -> None:
    parser = options(__doc__, target_steps=800, steps=120, train=320)
    parser.add_argument("--only", default="", help="beginnings of drafters' names, with commas")
    flags = parser.parse_args()
    folder = flags.out / "target"
    make_target("tiny-shapes", folder, flags.target_steps, 4 * flags.train)
    target = load_target(str(folder / EXPORT), dtype="float32", device="cpu", images=True)
    assert target.vision is not None
    captions = captions_of(target, seen, flags.test, flags.train)
    prompts, plain, answers = captions.prompts, captions.plain, captions.lessons
    question = target.encode(QUESTION)
    unseen = run(target, [(question, None)] * flags.train, temperature=0.7)
    texts = [Answered(question, None, one.tokens) for one in unseen]
    swapped = run(target, [(p, prompts[at - 1][1]) for at, (p, _) in enumerate(prompts)])
    same = statistics.fmean(a.tokens == b.tokens for a, b in zip(plain, swapped, strict=True))
    print(f"the same with another image {same:.2f}", flush=True)
    with_ids = replace(target, vision=replace(target.vision, unsaid=()))
    lookup = family("prompt-lookup")
    cases: list[tuple[str, Callable[[], Drafter], Target]] = [
        ("prompt-lookup", lambda: lookup.build(lookup.options(), target.spec, None), target),
        ("small-lm, placeholders dropped",
         lambda: learn(target, small_lm(target), answers, "drop", flags.steps), target),
        ("small-lm, placeholders read",
         lambda: learn(target, small_lm(target), answers, "read", flags.steps), with_ids),
        ("eagle3, states at the image",
         lambda: learn(target, eagle3(target), answers, "states", flags.steps), target),
        ("eagle3, zeros at the image",
         lambda: BlindDrafter(
             learn(target, eagle3(target), answers, "zeros", flags.steps), prompts
         ).made(), target),
        ("msd, visual rows apart, two stages",
         lambda: learn(target, msd(target), answers, "images", flags.steps, texts), target),
        ("msd, visual rows mixed (EAGLE), two stages",
         lambda: learn(target, msd(target, decoupled=False), answers, "images", flags.steps, texts),
         target),
        ("msd, visual rows apart, one stage",
         lambda: learn(target, msd(target), answers, "images", flags.steps), target),
        ("msd, visual rows mixed (EAGLE), one stage",
         lambda: learn(target, msd(target, decoupled=False), answers, "images", flags.steps),
         target),
        ("flash, 2 latents, four tokens per forward",
         lambda: learn(target, flash(target), answers, "images", flags.steps), target),
        ("flash, all states, four tokens per forward",
         lambda: learn(target, flash(target, latents=None), answers, "images", flags.steps),
         target),
        ("flash, 2 latents, one token per forward",
         lambda: learn(target, flash(target, stride=1), answers, "images", flags.steps), target),
    ]  # fmt: skip
    rows: dict[str, Any] = {**captions.right, "same_with_another_image": same}
    for name, build, own in cases:
        if not name.startswith(tuple(flags.only.split(","))):
            continue
        torch.manual_seed(0)
        done = run(own, prompts, build())
        identical = [a.tokens for a in done] == [b.tokens for b in plain]
        mean, error = tau(done)
        rows[name] = {"tau": mean, "error": error, "identical": identical}
        print(f"{name}: tau {mean:.2f} +- {error:.2f}, identical {identical}", flush=True)
    (flags.out / "images_in.json").write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
