"""Prompts out of the data: stretches of text, and conversations up to where an assistant speaks."""

from __future__ import annotations

import hashlib
import json
import warnings
from array import array
from collections.abc import Collection, Sequence
from random import Random

from specctl.runtime.target.target import Target
from specctl.train.data.images.shown_images import ImageReader, ShownImage
from specctl.train.data.prompts.answers import AnswerPlan, Dialogue, PromptCut
from specctl.train.data.records.records import Sample
from specctl.train.data.rows.context import LEAST_PROMPT, check_ids
from specctl.train.data.rows.growth import ids_key
from specctl.train.data.sources.corpus import PROSE, regions
from specctl.train.data.sources.defects import Defects
from specctl.train.data.sources.self_source import is_question

EXTRA_PASSES = 2  # over the samples, where some gave nothing or the same again
CHARS_PER_TOKEN = 16  # text read for a prompt; more than any usual token is long


def cut_prompts(
    target: Target,
    samples: Sequence[Sample],
    plan: AnswerPlan,
    defects: Defects,
    known: Collection[int] = (),
    reader: ImageReader | None = None,
) -> list[PromptCut]:
    """`plan.prompts` prompts, evenly from the samples: conversations, to be answered turn by turn;
    of raw text a stretch of `prompt_tokens` from its beginning or from the start of a line. None is
    longer than the plan or the target's context leaves room for, and none is among the `known`
    ones (by `ids_key`). `reader`: of images, where samples have some."""
    room = longest_prompt(target, plan)
    cuts: list[PromptCut] = []
    seen: set[bytes] = set()
    names = [sample.digest().hex() if sample.text else "" for sample in samples]  # moved: the same
    passes = -(-(plan.prompts + plan.first) // max(len(samples), 1)) + EXTRA_PASSES
    for turn in range(passes):
        for sample, name in zip(samples, names, strict=True):
            if len(cuts) == plan.prompts:
                return cuts
            try:
                cut = _cut_prompt(target, sample, name, turn, plan, room, reader)
            except ValueError as error:
                if turn == 0:
                    defects.note(str(error), sample.where)
                continue
            key = prompt_key(cut)
            if key not in seen and ids_key(cut.ids) not in known:
                seen.add(key)
                cuts.append(cut)
    return cuts


def longest_prompt(target: Target, plan: AnswerPlan) -> int:
    """Tokens that a prompt may have."""
    room = target.spec.max_positions - plan.new_tokens
    return room if plan.longest is None else min(room, plan.longest)


def prompt_key(cut: PromptCut) -> bytes:
    """The same for prompts that ask for the same answers: what is rewritten does not count, nor
    what else a chat template writes around the messages, such as the day."""
    if cut.dialogue is None:
        return hashlib.sha256(array("i", cut.ids).tobytes()).digest()
    said = cut.dialogue.said([""] * len(cut.dialogue.turns))
    shown = [[image.sha256 for image in cut.images]] if cut.images else []
    body = json.dumps([said, cut.dialogue.tools, cut.dialogue.turns, *shown], sort_keys=True)
    return hashlib.sha256(b"chat:" + body.encode()).digest()


def _cut_prompt(
    target: Target,
    sample: Sample,
    name: str,
    turn: int,
    plan: AnswerPlan,
    room: int,
    reader: ImageReader | None,
) -> PromptCut:
    if sample.messages:
        images: tuple[ShownImage, ...] = ()
        if sample.images:
            assert reader is not None, "data with images are refused for a target without vision"
            images = reader.shown(sample.images, sample.image_digests, sample.where)
            sample = reader.as_taken(sample, target.tokenizer)
        dialogue = Dialogue.of(sample)
        if not dialogue.turns:
            raise ValueError("nothing stands before the assistant's turn")
        ids = dialogue.prompt(target.tokenizer, plan.variables(target.tokenizer), ())
        if images and reader is not None:
            places = reader.places(dialogue.said(()), target.tokenizer)
            ids = reader.expanded(ids, images, places)
        if len(ids) > room:
            raise ValueError(f"conversation of more than {room:,} tokens: no room for an answer")
        check_ids(ids, target)
        is_own = is_question(sample.where)
        return PromptCut(array("i", ids), sample.domain, dialogue, is_own, images)
    if not sample.text:
        raise ValueError("record has token ids alone, and neither messages nor text to answer")
    start = _line_start(sample.text, Random(f"{plan.seed}:{name}:{turn}"))
    text = sample.text[start : start + CHARS_PER_TOKEN * plan.prompt_tokens]
    ids = target.encode(text)[: min(plan.prompt_tokens, room)]
    if len(ids) < LEAST_PROMPT:
        raise ValueError("the text is shorter than two tokens")
    check_ids(ids, target)
    end = start + len(target.decode(ids))
    return PromptCut(array("i", ids), domain_at(sample, end))


def domain_at(sample: Sample, place: int) -> str:
    """The sample's domain; in Python files "docstring" or "code", as of the held-out prompts."""
    if not sample.where.endswith(".py"):
        return sample.domain
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the parsed file, e.g. a doubtful escape sequence
        try:
            found = regions(sample.text)
        except (SyntaxError, ValueError, RecursionError):
            return sample.domain
    place = min(place, len(sample.text))  # examples inside docstrings belong to no region
    return next((r.domain for r in found if r.begin < place <= r.end), PROSE)


def _line_start(text: str, random: Random) -> int:
    """The beginning one time in four, else the start of a line in the first nine tenths."""
    if random.random() < 0.25:
        return 0
    return text.rfind("\n", 0, random.randrange(max(1, len(text) * 9 // 10))) + 1
