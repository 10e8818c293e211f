"""`specctl regenerate`: let the target write the answers, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.api.preflight import check_out, check_run
from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line
from specctl.cli.options.flags import Offline
from specctl.cli.options.recipe_flags import RecipeFlags
from specctl.cli.options.target_choice import not_in_step
from specctl.core.errors import RecipeError
from specctl.core.storage.hub_access import go_offline

if TYPE_CHECKING:
    from specctl.recipes.schema import TargetPart
    from specctl.runtime.target.target import Target

FILE = "answers.jsonl"


@dataclass(frozen=True, slots=True)
class AnswerFlags:
    """How the answers are sampled; what is left out is the recipe's."""

    prompts: Annotated[
        int | None, typer.Option("--prompts", min=1, help="Number of prompts to answer.")
    ] = None
    new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, help="Maximum tokens of an answer.")
    ] = None
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.0, help="Temperature of sampled answers.")
    ] = None
    top_p: Annotated[float | None, typer.Option("--top-p", help="Nucleus of sampled answers.")] = (
        None
    )
    top_k: Annotated[
        int | None, typer.Option("--top-k", min=1, help="Sample from the k likeliest tokens.")
    ] = None
    greedy_share: Annotated[
        float | None,
        typer.Option("--greedy-share", min=0.0, max=1.0, help="Share of answers that are greedy."),
    ] = None
    thinking: Annotated[
        bool | None,
        typer.Option(
            "--thinking/--no-thinking", help="Turn the thinking of the chat template on or off."
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        """The fields of the recipe that were given."""
        names = ("prompts", "new_tokens", "temperature", "top_p", "top_k", "greedy_share")
        given = {f"data.{name}": getattr(self, name) for name in (*names, "thinking")}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class _Run(RecipeFlags):
    """The flags of a run together with those of the answers."""

    answers: AnswerFlags = AnswerFlags()

    def _fields(self) -> dict[str, Any]:
        return {**RecipeFlags._fields(self), **self.answers.given()}


RUN, AS_RECIPE = RecipeFlags(), AnswerFlags()


def regenerate(
    console: Console,
    run: RecipeFlags = RUN,
    answers: AnswerFlags = AS_RECIPE,
    offline: Offline = False,
) -> None:
    """Let the target answer the prompts of the data, and write the answers to OUT/answers.jsonl.

    Every assistant turn of a conversation is written anew. With --endpoint a server of the target
    writes them, and no weights are loaded here. An interrupted run continues where it was. Train on
    the answers with --data OUT/answers.jsonl: what this target has written is not written again.

    Examples:

      specctl regenerate --target tiny --prompts 20 --max-new-tokens 32 --out runs/answers
      specctl regenerate --target qwen3-8b --data chats.jsonl --endpoint http://a:8000,http://b:8000
    """
    flags = {field.name: getattr(run, field.name) for field in fields(RecipeFlags)}
    recipe = _Run(**flags, answers=answers).load()
    if run.init is not None:
        raise RecipeError(
            "nothing is trained here",
            where="--init",
            found=run.init,
            expected="no weights to start from",
            do="leave --init out",
        )
    if not recipe.data.regenerate:
        raise RecipeError(
            "the recipe takes the data's own answers",
            where="data.regenerate",
            found="false",
            expected="true",
            do="--set data.regenerate=true",
        )
    out = run.folder(recipe.target.name, recipe.name)
    check_out(out)
    check_run(recipe, out)
    if recipe.target.tensor_parallel:
        raise not_in_step("target.tensor_parallel")
    if offline:
        go_offline()
    from specctl.train.data.preparation import Preparation
    from specctl.train.data.prepare import write_answers_alone
    from specctl.train.data.written.answers_file import write_answers
    from specctl.train.runs.kept import kept_in
    from specctl.train.saving.lock import locked

    console.kept = partial(kept_in, out)
    with locked(out, console):
        target = _target(recipe.target, recipe.data.endpoint)
        made = Preparation(recipe.data, recipe.train.seq_len, target, recipe.target)
        found = write_answers_alone(made, out, console)
        lines = write_answers(out / FILE, found, target, recipe.data.thinking)
    num_tokens = sum(answer.num_tokens for answer in found)
    path = out / FILE
    console.out(f"{path}: {lines:,} documents, {num_tokens:,} tokens written by the target")
    result = {
        "out": str(out),
        "answers": str(path),
        "conversations": len(found),
        "documents": lines,
        "tokens": num_tokens,
    }
    words = _training_words(run, recipe.target.name, recipe.data.thinking, path)
    console.done(result, next=[command_line("train-draft", *words)])


def _training_words(
    run: RecipeFlags, target: str, thinking: bool | None, answers: Path
) -> list[str]:
    """The flags of a run that learns these answers; those that said how they are written have done
    their work, and the folder holds them and no run."""
    sets = [word for word in run.sets or () if not word.startswith("data.")]
    if thinking is not None:  # without it the run would have them written anew
        sets.append(f"data.thinking={str(thinking).lower()}")
    kept = replace(run, sets=sets or None)
    words = kept.words(("target", "data", "endpoint", "out", "init"))
    return ["--target", target, "--data", str(answers), *words]


def _target(part: TargetPart, endpoint: str | None) -> Target:
    """The target; without its layers where a server answers."""
    if endpoint is not None and part.inflate is None:
        from specctl.runtime.target.served import load_served

        return load_served(part.name, revision=part.revision, dtype=part.dtype)
    from specctl.runtime.target.target import load_part

    return load_part(part, tensor_parallel=False)
