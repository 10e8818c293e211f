"""What is known of a run's data before the run: how many prompts there are, how long they and the
target's answers are, how many token ids they need.

A few prompts are answered and their answers thrown away. How long the answers of a target are
decides how many it can write in a given time, and only answering shows it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from specctl.core.errors import RecipeError
from specctl.recipes.schema import DataPart, Recipe
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.target.target import Target
from specctl.train.data.prepare import (
    answer_plan,
    encode_documents,
    field_choices,
    with_questions,
)
from specctl.train.data.prompts import cut_prompts
from specctl.train.data.records import Sample
from specctl.train.data.sources import HUB, Defects, find_source, names_of, read_samples
from specctl.train.data.written.answers import OVER, AnswerJob, PromptCut, sampling_of
from specctl.train.data.written.regenerate import EngineWriter
from specctl.train.data.written.self_source import check_self, others_of, uses_self
from specctl.train.data.written.writing_target import writing_target
from specctl.train.distributed.ranks import Ranks
from specctl.train.planning.work import QUESTION_TOKENS
from specctl.train.vocab.coverage import always_kept, count_tokens, fewest, ranking

LOOKED_AT = 1024  # prompts that are encoded
TRIED = 16  # of them that are answered
LEAST_ANSWER = 4  # tokens on average; a target that says less says nothing
GUESSED = 0.75  # of the longest answer, where no answer could be tried


@dataclass(frozen=True, slots=True)
class DataFacts:
    """`prompts`: records that can be answered, None where only a download would tell. Tokens:
    `prompt_tokens` of a prompt on average, `long_prompt` of the longest but one in twenty,
    `answer_tokens` of an answer on average. `tried`: answers that say so, of which a share `ended`
    by itself; 0: none, the length is a guess. `ids`: token ids that cover the share `coverage` of
    what was read and written."""

    prompts: int | None
    prompt_tokens: float
    long_prompt: int
    answer_tokens: float
    tried: int
    ended: float
    ids: int
    coverage: float

    @property
    def document_tokens(self) -> float:
        """Of a prompt with its answer."""
        return self.prompt_tokens + self.answer_tokens


def look_at_data(
    recipe: Recipe, target: Target | None, coverage: float, reporter: Reporter
) -> DataFacts:
    """The facts of a recipe's data, with answers of `target`; without one (it is too large to be
    read for a plan, or not here) lengths are those that the recipe allows."""
    data = recipe.data
    if uses_self(data.source):
        return _beside_questions(recipe, target, coverage, reporter)
    count, samples = _some(data)
    if target is None or target.tokenizer is None:
        guessed = GUESSED * data.new_tokens
        return DataFacts(
            count, data.prompt_tokens, data.prompt_tokens, guessed, 0, 0.0, 0, coverage
        )
    if not data.regenerate:
        return _of_documents(recipe, target, count, samples, coverage)
    cuts = _prompts(recipe, target, samples)
    lengths = sorted(len(cut.ids) for cut in cuts)
    answers = _tried(recipe, target, cuts[:TRIED], reporter)
    seen = [*(cut.ids for cut in cuts), *(ids for ids, _ in answers)]
    facts = DataFacts(
        prompts=count,
        prompt_tokens=sum(lengths) / len(lengths),
        long_prompt=lengths[int(0.95 * (len(lengths) - 1))],
        answer_tokens=sum(len(ids) for ids, _ in answers) / max(1, len(answers)),
        tried=len(answers),
        ended=sum(reason == OVER for _, reason in answers) / max(1, len(answers)),
        ids=_covering(seen, target, coverage),
        coverage=coverage,
    )
    return facts if answers else replace(facts, answer_tokens=GUESSED * data.new_tokens)


def _beside_questions(
    recipe: Recipe, target: Target | None, coverage: float, reporter: Reporter
) -> DataFacts:
    """The facts of data that the target adds questions to, as many as are wanted: those of the
    other sources, or of some questions that are written now and thrown away."""
    others = others_of(recipe.data)
    if others is not None:
        other = recipe.model_copy(update={"data": others})
        return replace(look_at_data(other, target, coverage, reporter), prompts=None)
    if target is None:
        ids = QUESTION_TOKENS
        guessed = GUESSED * recipe.data.new_tokens
        return DataFacts(None, ids, ids, guessed, 0, 0.0, 0, coverage)
    check_self(recipe.data, target)
    with tempfile.TemporaryDirectory(prefix="specctl-") as folder:
        few = recipe.data.model_copy(update={"prompts": TRIED})
        small = recipe.model_copy(update={"data": few})
        data = with_questions(small, target, Path(folder), None, reporter, Ranks())
        written = recipe.model_copy(update={"data": data})
        return replace(look_at_data(written, target, coverage, reporter), prompts=None)


def _of_documents(
    recipe: Recipe, target: Target, count: int | None, samples: Sequence[Sample], coverage: float
) -> DataFacts:
    """The facts of data whose own words are learned."""
    texts, said = list[Sequence[int]](), 0
    for sample in samples:
        try:
            documents = encode_documents(target, sample, recipe.data.train_on_prompt)
        except ValueError:
            continue
        texts += [document.ids.tolist() for document in documents]
        said += sum(int(document.mask.sum()) for document in documents)
    if not texts:
        raise _nothing(recipe, "no sample of the data can be learned", Defects())
    lengths, ids = sorted(map(len, texts)), _covering(texts, target, coverage)
    mean, answer = sum(lengths) / len(texts), said / len(texts)
    long = lengths[int(0.95 * (len(texts) - 1))]
    return DataFacts(count, mean - answer, long, answer, len(texts), 1.0, ids, coverage)


def _some(data: DataPart) -> tuple[int | None, list[Sample]]:
    """How many samples the sources hold, and some of them, drawn evenly. A data set of the hub is
    not read to its end."""
    is_far = any(find_source(n, data.format, data.split).kind == HUB for n in names_of(data.source))
    random, kept, count = Random(data.seed), list[Sample](), 0
    for sample in _samples(data):
        count += 1
        if len(kept) < LOOKED_AT:
            kept.append(sample)
        elif is_far:
            return None, kept
        elif (place := random.randrange(count)) < LOOKED_AT:
            kept[place] = sample
    return count, kept


def _samples(data: DataPart) -> Iterator[Sample]:
    choices = field_choices(data)
    return read_samples(data.source, data.format, data.split, data.seed, Defects(), choices)


def _prompts(recipe: Recipe, target: Target, samples: Sequence[Sample]) -> list[PromptCut]:
    plan = answer_plan(recipe, target, prompts=len(samples))
    defects = Defects()
    cuts = cut_prompts(target, samples, plan, defects)
    if cuts:
        return cuts
    raise _nothing(recipe, "no prompt of the data can be answered", defects)


def _nothing(recipe: Recipe, what: str, defects: Defects) -> RecipeError:
    return RecipeError(
        what,
        where="data.source",
        found="; ".join(defects.lines()) or str(recipe.data.source),
        expected="conversations that end before an assistant's turn, prompts, or text",
        do="correct the file",
    )


def _tried(
    recipe: Recipe, target: Target, cuts: Sequence[PromptCut], reporter: Reporter
) -> list[tuple[Sequence[int], str]]:
    """New ids and the finish reason of an answer to each prompt; none where the target writes no
    answers here."""
    data = recipe.data
    if not data.regenerate or data.endpoint is not None or not target.can_run:
        return []
    plan, target = answer_plan(recipe, target, prompts=len(cuts)), writing_target(recipe, target)
    longest = max(len(cut.ids) for cut in cuts) + plan.new_tokens
    writer = EngineWriter(target, longest, len(cuts))
    jobs = (AnswerJob(i, 0, cut.ids, sampling_of(i, plan)) for i, cut in enumerate(cuts))
    found: list[tuple[Sequence[int], str]] = []
    with reporter.task("trying the target's answers", len(cuts), "prompts") as advance:

        def done(job: AnswerJob, new_ids: Sequence[int], reason: str) -> None:
            del job
            found.append((new_ids, reason))
            advance(1)

        writer.write(jobs, done)
    _check_answers(target, found)
    return found


def _check_answers(target: Target, found: Sequence[tuple[Sequence[int], str]]) -> None:
    mean = sum(len(ids) for ids, _ in found) / len(found)
    if mean >= LEAST_ANSWER:
        return
    raise RecipeError(
        f"target {target.name} ends its answers at once: there is nothing to learn",
        where="data.source",
        found=f"{len(found)} answers of {mean:.1f} tokens on average",
        expected=f"at least {LEAST_ANSWER} tokens",
        do=f'look at what it says: specctl generate --target {target.name} "..."',
    )


def _covering(texts: Sequence[Sequence[int]], target: Target, coverage: float) -> int:
    """How many ids cover that share of the texts' tokens, measured on texts that were not ranked,
    as `vocab.size: auto` will find it."""
    documents = ((ids, "text") for ids in texts)
    counts, heldout = count_tokens(documents, target.spec.vocab_size)
    always = always_kept(target)
    return fewest(ranking(counts, always), heldout, always, coverage)
