"""Training data of a run: `prepare` turns the recipe's source into packed rows in OUT/data.

The digest covers all that decides the rows: source text, tokenizer, chat template, settings and,
when the target wrote the answers, the target. Data are reused only if it is the same. The rows of a
run that goes on with more data are kept, and new ones are added (`rows/growth.py`).
"""

from __future__ import annotations

import datetime
import hashlib
import heapq
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from specctl.core.errors import RecipeError
from specctl.core.messages.printable import counted
from specctl.core.storage.files import digest_of, write_json
from specctl.recipes.schema import DataPart, Recipe
from specctl.runtime.measure.reporter import Reporter, SilentReporter
from specctl.runtime.target.target import Target
from specctl.runtime.target.templates.chat_turns import template_text, writes_date, written_on
from specctl.train.data.images.known_images import KnownImages
from specctl.train.data.images.shown_images import (
    ImageReader,
    ShownImage,
    check_vision,
    image_digests,
    image_sources,
    miscounted,
    no_images_here,
    places_read,
    stored,
    with_images_expanded,
)
from specctl.train.data.preparation import Preparation
from specctl.train.data.prompts.answers import WrittenAnswer
from specctl.train.data.prompts.prompts import cut_prompts
from specctl.train.data.prompts.suite_prompts import warn_of_suite
from specctl.train.data.records.chat import Encoded, Variables, encode_sample, thinking_switch
from specctl.train.data.records.layouts import field_choices
from specctl.train.data.records.records import Sample, without, without_images
from specctl.train.data.row_maker import WrittenTexts, write_documents
from specctl.train.data.rows.context import check_context, check_ids
from specctl.train.data.rows.growth import LearnedRows, unknown_documents
from specctl.train.data.rows.pack import Document, without_image_loss
from specctl.train.data.rows.rows import FORMAT, TokenData, read_manifest
from specctl.train.data.sources.defects import Defects
from specctl.train.data.sources.self_source import check_self, others_of, uses_self, with_file
from specctl.train.data.sources.shipped import check_corpus, check_own_answers
from specctl.train.data.sources.sources import read_samples
from specctl.train.data.written.endpoint import EndpointSettings, EndpointWriter
from specctl.train.data.written.own_answers import is_own, own_documents, say_writers
from specctl.train.data.written.regenerate import regenerate
from specctl.train.data.written.self_prompts import write_self_prompts
from specctl.train.data.written.writing_target import written_in
from specctl.train.distributed.ranks import Ranks

DAY = "date.json"  # in OUT/data: the day that the chat template writes
LATER = ("top_p", "top_k", "thinking")  # count where set, so that rows made before them stay
FEW = 7  # records that may be left out of however small a file

__all__ = ["TokenData", "encode_document", "prepare"]


def prepare(
    recipe: Recipe,
    target: Target,
    out: Path,
    console: Reporter | None = None,
    ranks: Ranks | None = None,
    learned: LearnedRows | None = None,
) -> TokenData:
    """The training rows of a recipe in OUT/data: reused if nothing that decides them has changed,
    else made anew; regeneration goes on where it was stopped. Rows that a run has `learned` are
    never made anew: they stay, and what is new comes to them. With `ranks` all of them call this:
    each has its share of the prompts answered, the first one writes the rows."""
    console = console if console is not None else SilentReporter()
    ranks = ranks if ranks is not None else Ranks()
    check_context(recipe.target.name, recipe.data, recipe.train.seq_len, target.spec)
    folder, data, defects = out / "data", recipe.data, Defects()
    name, origin = recipe.name, recipe.origin
    if data.regenerate and data.limit_tokens is not None:
        console.warn("data.limit_tokens is ignored while the target writes the answers")
    check_corpus(name, data, origin, target)
    check_self(data, target)
    manifest = None
    with ranks.together():  # nobody writes before all have looked
        manifest = read_manifest(folder)
        day = _day(data, target, out)
    if ranks.is_main:
        _keep_day(day, folder)
    made = Preparation(data, recipe.train.seq_len, target, recipe.target, day)
    data = with_questions(made, folder, console, ranks)
    known_images = KnownImages(folder)
    samples, source_digest = _select(data, target, defects, known_images)
    check_own_answers(name, data, origin, samples)
    warn_of_suite(recipe.train.tau_suite, samples, console)
    defects.tell_reading(console)
    settings = _settings(made, source_digest)
    digest = digest_of(settings)
    if learned is not None:
        learned.check(digest, settings, manifest)
        learned.begins()
    if manifest is not None and manifest.digest == digest:
        console.say(f"data: reusing {counted(manifest.rows, 'row')} ({digest[:12]})")
        if ranks.is_main:
            known_images.save()
        return TokenData(folder, manifest, image_sources(samples))
    before = None
    has_images = any(sample.images for sample in samples)
    if manifest is not None and learned is not None and (has_images or manifest.images):
        raise no_images_here("more data for a run that goes on", "choose another --out")
    if manifest is not None and learned is not None:
        with ranks.together():  # nobody replaces the rows before all have opened them
            before = TokenData(folder, manifest)
        learned.say(before, data.prompts if data.regenerate else None, console)
    _say_kinds(samples, console)
    say_writers(samples, target, data, console)
    known = (None if before is None else before.prompts()) or frozenset()
    there: list[Document] = []
    if data.regenerate:
        there = unknown_documents(own_documents(samples, target, data), known)
        samples = [sample for sample in samples if not is_own(sample, target, data)]
    own = unknown_documents(_own_words(made, samples, defects, console), known)
    answers: list[WrittenAnswer] = []
    if data.regenerate and (samples or not there):
        answers = answer_prompts(made, samples, folder, defects, console, ranks, before, len(there))
    with ranks.together():
        if ranks.is_main:
            texts = WrittenTexts(answers, there, own)
            place = (folder, digest, settings)
            write_documents(made, texts, place, before, defects, console)
            known_images.save()
    manifest = read_manifest(folder)
    assert manifest is not None, "the first rank has written it"
    return TokenData(folder, manifest)


def _own_words(
    made: Preparation, samples: Sequence[Sample], defects: Defects, console: Reporter
) -> list[Document]:
    """What is learned of the source's own words: all of it where the target writes nothing; beside
    answers up to `data.text_tokens`, where the source has any."""
    data = made.data
    if not data.regenerate:
        return _encoded(made, samples, defects, data.limit_tokens)
    if not data.text_tokens:
        return []
    try:
        return _encoded(made, samples, Defects(), data.text_tokens)
    except RecipeError as error:
        if error.where != "data.source":
            raise
    console.warn("data.text_tokens has no effect: the source has neither text nor answers")
    return []


def _day(data: DataPart, target: Target, out: Path) -> str | None:
    """The day that the chat template writes in this run: as the recipe says, else that on which its
    data were first prepared; None for a template that writes none."""
    if not writes_date(template_text(target.tokenizer)):
        return None
    path = out / "data" / DAY
    if data.date is None and path.exists():
        found: str = json.loads(path.read_text(encoding="utf-8"))["date"]
        return found
    return data.date or datetime.date.today().isoformat()


def _dated(made: Preparation, out: Path) -> Preparation:
    """The same with the day of the run in that folder."""
    return replace(made, day=_day(made.data, made.target, out))


def _keep_day(day: str | None, folder: Path) -> None:
    """Write down the day for the runs that continue this one."""
    if day is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / DAY, {"date": day})


def _say_kinds(samples: Sequence[Sample], console: Reporter) -> None:
    """Warn of what the samples hold that is not text."""
    for kind, count in Counter(kind for s in samples for kind in s.left_out).most_common():
        console.warn(f"data: {count:,} x {kind} left out: a drafter reads text alone")


def with_questions(made: Preparation, folder: Path, console: Reporter, ranks: Ranks) -> DataPart:
    """The recipe's data with a file in the place of the source `self`: as many questions of the
    target as the other sources lack, which are read and checked before. The first rank writes."""
    data, num_others = made.data, 0
    if not uses_self(data.source):
        return data
    others = others_of(data)
    if others is not None:
        known = KnownImages(folder)
        num_others = min(data.prompts, len(_select(others, made.target, Defects(), known)[0]))
    with ranks.together():
        if ranks.is_main:
            plan, writer = made.plan(), made.writer()
            write_self_prompts(writer, data.prompts - num_others, plan, folder, console)
    return with_file(data, folder)


def rows_digest(made: Preparation, out: Path) -> str:
    """The digest of the rows that `prepare` would return; nothing is written."""
    data = with_file(made.data, out / "data")
    _, source_digest = _select(data, made.target, Defects(), KnownImages(out / "data"))
    settings = _settings(_dated(made, out), source_digest)
    digest, there = digest_of(settings), read_manifest(out / "data")
    return there.identity if there is not None and there.digest == digest else digest


def _select(
    data: DataPart, target: Target, defects: Defects, known: KnownImages
) -> tuple[list[Sample], str]:
    """The samples to use and a digest of them. For regeneration: all that are the target's own
    answers, and as many others as lack to `prompts`, chosen by a seeded hash of their number, so
    that the choice needs no second reading; else all of them."""
    whole = hashlib.sha256()
    chosen: list[tuple[int, int, Sample]] = []
    there: list[tuple[int, int, Sample]] = []
    choices, number = field_choices(data, target.tokenizer), 0
    for number, sample in enumerate(
        read_samples(data.source, data.format, data.split, data.seed, defects, choices)
    ):
        sample = _seen(without(sample, data.drop), target, data, known)
        whole.update(sample.digest())
        key = hashlib.sha256(f"{data.seed}:{number}".encode()).digest()
        entry = (-int.from_bytes(key[:8], "big"), number, sample)
        if data.regenerate and is_own(sample, target, data):
            there.append(entry)
        elif not data.regenerate or len(chosen) < data.prompts:
            heapq.heappush(chosen, entry) if data.regenerate else chosen.append(entry)
        else:
            heapq.heappushpop(chosen, entry)
    while there and chosen and len(chosen) + len(there) > data.prompts:
        heapq.heappop(chosen)
    if not chosen and not there:
        raise RecipeError(
            "the data source holds nothing usable",
            where="data.source",
            found="; ".join(defects.lines()) or str(data.source),
            expected='text, or one JSON object a line (or a list of them) with "messages", '
            '"prompt" and "response", or "text"',
            do="correct the file or data.source",
        )
    check_share(defects, number + 1, data.max_left_out)
    if data.regenerate:
        defects.chose(number for _, number, _ in chosen)
    samples = [s for _, _, s in sorted([*chosen, *there], key=lambda entry: entry[1])]
    return samples, whole.hexdigest()


def _seen(sample: Sample, target: Target, data: DataPart, known: KnownImages) -> Sample:
    """The sample with its images named by their contents, or where the recipe leaves them out, as
    text alone. Raises FileError for an image that is not there, IncompatibleError where the target
    reads none."""
    if not sample.images:
        return sample
    if data.images == "drop":
        return without_images(sample)
    check_vision(target, sample.where)
    return replace(sample, image_digests=image_digests(sample.images, sample.where, known))


def reader_of(samples: Sequence[Sample], target: Target) -> ImageReader | None:
    """What reads the images of samples; None where they have none."""
    return ImageReader(target) if any(sample.images for sample in samples) else None


def check_share(defects: Defects, num_good: int, most: float) -> None:
    """RecipeError where a larger share of the records was left out than the recipe allows; a few
    are only warned of, with their reasons."""
    share = defects.num_records / max(1, defects.num_records + num_good)
    if share > most and defects.num_records > FEW:
        raise RecipeError(
            f"{share:.0%} of the records would be left out of the data",
            where="data.source",
            found="; ".join(defects.lines()),
            expected=f"at most {most:.0%} (data.max_left_out)",
            do="correct the data; or go on without them: "
            f"--set data.max_left_out={min(1.0, math.ceil(share * 100) / 100):g}",
        )


def _settings(made: Preparation, source_digest: str) -> dict[str, Any]:
    """All that decides the content of the rows."""
    data, target = made.data, made.target
    used = {"seed", "limit_tokens"} | ({"thinking"} if data.thinking is not None else set())
    writer = None
    if data.regenerate:
        used = {"seed", "prompts", "prompt_tokens", "new_tokens", "temperature", "greedy_share"}
        used |= {name for name in LATER if getattr(data, name) != getattr(DataPart(), name)}
        used |= {"text_tokens"} if data.text_tokens else set()
        here = written_in(made.part, target) if data.endpoint is None else EndpointWriter.name
        writer = [target.fingerprint, target.inflated, here]
    return {
        "format": FORMAT,
        "source": source_digest,
        "tokenizer": target.tokenizer_fingerprint,
        "template": target.template_digest,
        "writer": writer,
        "seq_len": made.seq_len,
        "train_on_prompt": data.train_on_prompt,
        **({} if made.day is None else {"date": made.day}),
        **data.model_dump(mode="json", include=used),
    }


def write_answers_alone(made: Preparation, out: Path, console: Reporter) -> list[WrittenAnswer]:
    """The answers that `prepare` would make rows of, kept in OUT/data, without the rows."""
    target = made.target
    check_context(made.part.name, made.data, None, target.spec)
    check_self(made.data, target)
    defects, folder = Defects(), out / "data"
    made = _dated(made, out)
    _keep_day(made.day, folder)
    data = with_questions(made, folder, console, Ranks())
    samples, _ = _select(data, target, defects, KnownImages(folder))
    if any(sample.images for sample in samples):
        raise no_images_here(
            "a file of answers, which holds token ids alone,",
            "specctl train-draft --data ..., which writes the answers itself",
        )
    defects.tell_reading(console)
    _say_kinds(samples, console)
    say_writers(samples, target, data, console)
    samples = [sample for sample in samples if not is_own(sample, target, data)]
    answers = answer_prompts(made, samples, folder, defects, console)
    defects.tell(console)
    return answers


def answer_prompts(
    made: Preparation,
    samples: Sequence[Sample],
    folder: Path,
    defects: Defects,
    console: Reporter,
    ranks: Ranks | None = None,
    before: TokenData | None = None,
    there: int = 0,
) -> list[WrittenAnswer]:
    """The target's answers to prompts of the samples, kept in `folder`: by the engine, or by the
    recipe's endpoint. Prompts of the rows that are there `before` count as answered, and are not
    answered again; so do as many as `there` are answers of the target in the data."""
    data, target, ranks = made.data, made.target, ranks if ranks is not None else Ranks()
    plan = made.plan()
    left_out, known = Defects(), frozenset[int]()
    if before is not None:
        first, known = before.manifest.answered, before.prompts() or known
        plan = replace(plan, prompts=plan.prompts - first, first=first)
        samples = Random(data.seed).sample(samples, len(samples))  # new ones from everywhere alike
    plan = replace(plan, prompts=plan.prompts - there)
    if plan.prompts <= 0:
        return []
    reader = reader_of(samples, target)
    prompts = cut_prompts(target, samples, plan, left_out, known, reader)
    check_share(left_out, len(samples) - left_out.num_records, data.max_left_out)
    defects.add(left_out)
    if len(prompts) < plan.prompts:
        console.warn(f"data: only {len(prompts):,} of {plan.prompts:,} prompts found in the source")
    if not prompts and (before is not None or there):
        return []
    if not prompts:
        raise _nothing_left(defects, "a prompt", "a larger train.seq_len gives long prompts room")
    writer = None
    if data.endpoint is not None:
        where = EndpointSettings.of(data.endpoint, data.endpoint_model, data.endpoint_requests)
        writer = EndpointWriter(target, where, console, ranks.size)
    if writer is None:
        target = made.writer()
    answers = regenerate(
        target, prompts, plan, folder, console=console, writer=writer, ranks=ranks, reader=reader
    )
    if len(answers) < len(prompts):
        defects.note("prompt without an answer", "data.endpoint", len(prompts) - len(answers))
    return answers


def _encoded(
    made: Preparation, samples: Sequence[Sample], defects: Defects, limit: int | None
) -> list[Document]:
    """Documents from the source's own words, up to `limit` tokens."""
    data, target = made.data, made.target
    documents: list[Document] = []
    num_tokens = num_read = 0
    dated = written_on(target.tokenizer, made.day) if made.day else {}
    variables = {**thinking_switch(target.tokenizer, data.thinking), **dated}
    left_out, reader = Defects(), reader_of(samples, target)
    for sample in samples:
        if limit is not None and num_tokens >= limit:
            break
        try:
            found = encode_documents(target, sample, data.train_on_prompt, variables, reader)
        except ValueError as error:
            left_out.note(str(error), sample.where)
            continue
        documents += found
        num_read += 1
        num_tokens += sum(len(document.ids) for document in found)
    if not documents:
        answers = (
            "the target answers them otherwise: --set data.regenerate=true"
            if not data.regenerate
            else "leave data.text_tokens out"
        )
        raise _nothing_left(left_out, "a sample with something to predict", answers)
    check_share(left_out, num_read, data.max_left_out)
    defects.add(left_out)
    return documents


def encode_document(target: Target, sample: Sample, train_on_prompt: bool = False) -> Document:
    """The first document of a sample."""
    return encode_documents(target, sample, train_on_prompt)[0]


def encode_documents(
    target: Target,
    sample: Sample,
    train_on_prompt: bool = False,
    variables: Variables | None = None,
    reader: ImageReader | None = None,
) -> list[Document]:
    """Token ids and loss mask of a sample; raw text counts whole and ends in EOS. A conversation
    whose beginning the chat template writes otherwise later gives several. Where a sample says
    itself what is learned, prompts are not. `variables`: what the chat template reads besides;
    `reader`: of the images, where a sample has some."""
    images, places = tuple[ShownImage, ...](), places_read(sample)
    if sample.images and reader is None:
        raise ValueError("the record holds images, which are not read here")
    if sample.images and reader is not None:
        images = reader.shown(sample.images, sample.image_digests, sample.where)
        sample = reader.as_taken(sample, target.tokenizer)
    if sample.ids:
        ours = target.tokenizer_fingerprint or ""
        if sample.tokenizer and not ours.startswith(sample.tokenizer):
            raise ValueError("the token ids are of another tokenizer")
        found = [Encoded(list(sample.ids), list(sample.mask))]
    elif sample.messages:
        encoded = encode_sample(target.tokenizer, sample, target.eos_ids, variables)
        found = encoded.documents()
    else:
        end = target.end_of_document
        ids = [*target.encode(sample.text), *([] if end is None else [end])]
        found = [Encoded(ids, [True] * len(ids))]
    is_marked = bool(sample.ids or sample.given)
    if images and reader is not None:
        written = max(one.ids.count(reader.vision.place) for one in found)
        if written < places:
            raise ValueError(miscounted(written, places))
        found = [with_images_expanded(one, images, reader) for one in found]
    is_whole = train_on_prompt and not is_marked
    return [_document(one, target, sample, is_whole, images) for one in found]


def _document(
    encoded: Encoded,
    target: Target,
    sample: Sample,
    is_whole: bool,
    images: Sequence[ShownImage] = (),
) -> Document:
    ids, mask = encoded.ids, [True] * len(encoded.ids) if is_whole else encoded.mask
    if len(ids) < 2:
        raise ValueError("shorter than two tokens")
    check_ids(ids, target)
    ids_N, mask_N = np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_)
    document = Document(ids_N, mask_N, sample.domain, images=stored(ids, images))
    return without_image_loss(document)


def _nothing_left(defects: Defects, wanted: str, do: str) -> RecipeError:
    return RecipeError(
        f"no sample of the data gave {wanted}",
        where="data.source",
        found="; ".join(defects.lines()),
        expected="conversations with an assistant turn, prompt/response pairs, or text",
        do=f"correct the data; {do}",
    )
