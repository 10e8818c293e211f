"""The material of `bench`: public suites, prompts of a file, texts, or held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specctl.api.arguments.prompts import Prompt, are_chats, encode_prompts
from specctl.core.errors import RecipeError, SpecctlError, nearest, one_of_two
from specctl.core.messages.printable import counted
from specctl.runtime.measure.questions import Question, question_of
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts
from specctl.train.data.prompts.suites import SuiteQuestion, evenly, read_suite

HELDOUT = 16


@dataclass(frozen=True, slots=True)
class BenchMaterial:
    """Questions, how they are read, and what is to be known of them."""

    questions: tuple[Question, ...]
    suites: tuple[str, ...] = ()
    chat: bool | None = False
    notes: tuple[str, ...] = ()


def bench_material(
    target: Target,
    prompts: Path | Prompt | Sequence[Prompt] | None,
    suites: Sequence[str],
    *,
    num_prompts: int | None,
    limit: int | None,
    domain: str | None,
    chat: bool | None,
) -> BenchMaterial:
    """The questions for the target. Suites exclude prompts; `limit` is of theirs, a category each,
    `num_prompts` of a file or the held-out prompts."""
    check_question_flags(suites, prompts is not None, num_prompts, limit)
    is_chat = target.is_chat if chat is None else chat
    if suites:
        return _of_suites(target, suites, limit, domain, is_chat)
    return _plain(target, prompts, num_prompts or HELDOUT, domain, is_chat)


def check_question_flags(
    suites: Sequence[str], has_prompts: bool, num_prompts: int | None, limit: int | None
) -> None:
    """Refuse what says nothing beside the suites, or without them."""
    if not suites:
        if limit is not None:
            raise _ignored("--limit", "without --suite", "give --num-prompts instead")
        return
    if has_prompts:
        raise one_of_two(
            "a suite and prompts of one's own were given",
            f"--suite {','.join(suites)} and prompts",
            "specctl bench prompt-lookup --prompts FILE   or   --suite NAME",
        )
    if num_prompts is not None:
        raise _ignored("--num-prompts", "with --suite", "give --limit, of every category")


def _plain(
    target: Target,
    prompts: Path | Prompt | Sequence[Prompt] | None,
    num_prompts: int,
    domain: str | None,
    is_chat: bool,
) -> BenchMaterial:
    if prompts is None or isinstance(prompts, Path):
        held = heldout_prompts(target, num_prompts, domain, prompts, is_chat)
        return BenchMaterial(tuple(Question(p.ids) for p in held), chat=is_chat)
    encoded = encode_prompts(target, prompts, is_chat)
    return BenchMaterial(tuple(Question(p.ids) for p in encoded), chat=are_chats(encoded))


def _of_suites(
    target: Target, suites: Sequence[str], limit: int | None, domain: str | None, is_chat: bool
) -> BenchMaterial:
    found, notes, names = list[Question](), list[str](), list[str]()
    several = len(suites) > 1
    for word in suites:
        suite = read_suite(word)
        names.append(suite.name)
        if suite.withheld:
            notes.append(
                f"{suite.name}: {counted(suite.withheld, 'question')} left out, whose text the "
                "suite does not ship"
            )
        chosen = evenly(_of_domain(suite.questions, domain, word), limit)
        if len(chosen) < len(suite.questions):
            of = f"{len(chosen):,} of {counted(len(suite.questions), 'question')}"
            how = f"at most {limit:,} of each category, at even distances" if limit else domain
            notes.append(f"{suite.name}: {of} ({how})")
        fitting, long = _fitting(target, chosen, is_chat, f"{suite.name} " if several else "")
        found += fitting
        if long:
            notes.append(
                f"{suite.name}: {counted(long, 'question')} left out, longer than the context of "
                f"{target.spec.max_positions:,} tokens"
            )
        later = sum(len(one.turns) > 1 for one in chosen)
        if later and not is_chat:
            notes.append(
                f"{suite.name}: of {counted(later, 'conversation')} only the first question, "
                "continued as a text"
            )
    if not found:
        raise SpecctlError(
            "no question of the suites fits the target",
            where="--suite",
            found="; ".join(notes),
            expected="questions shorter than the context",
            do="choose a target with a longer context, or another suite",
        )
    return BenchMaterial(tuple(found), tuple(names), is_chat, tuple(notes))


def _of_domain(
    questions: Sequence[SuiteQuestion], domain: str | None, word: str
) -> list[SuiteQuestion]:
    if domain is None:
        return list(questions)
    known = list(dict.fromkeys(one.category for one in questions))
    if domain not in known:
        raise SpecctlError(
            "the suite has no such category",
            where=f"--suite {word}",
            found=domain,
            expected="one of " + ", ".join(known),
            do=f"--domain {nearest(domain, known, 1)}",
        )
    return [one for one in questions if one.category == domain]


def _fitting(
    target: Target, questions: Sequence[SuiteQuestion], is_chat: bool, prefix: str
) -> tuple[list[Question], int]:
    """Questions with room for an answer behind the first turn, and how many have none."""
    found: list[Question] = []
    for one in questions:
        category = prefix + one.category
        if is_chat:
            question = question_of(target, one.turns, category)
        else:
            question = Question(tuple(target.encode(one.text)), category)
        if len(question.ids) < target.spec.max_positions:
            found.append(question)
    return found, len(questions) - len(found)


def _ignored(flag: str, when: str, do: str) -> RecipeError:
    return RecipeError(
        f"{flag} says nothing {when}",
        where="the command line",
        found=flag,
        expected="flags that choose what is measured",
        do=do,
    )
