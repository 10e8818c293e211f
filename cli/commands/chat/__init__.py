"""`specctl chat`: talk with a target in the terminal, its answers drafted ahead."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from specctl.cli.app.console import Console, has_colours
from specctl.cli.app.follow_up import command_line
from specctl.cli.commands.chat.repl import ChatRepl, Interrupts, Lines, Look
from specctl.cli.commands.chat.session import ChatSession
from specctl.cli.options.flags import Compile
from specctl.cli.options.loading import DraftChoice
from specctl.cli.options.positional import Word
from specctl.cli.options.sampling import GrammarFlags, SamplingFlags
from specctl.cli.options.target_choice import OWN_ANSWERING, AnsweringChoice

LONG_ANSWERS = SamplingFlags(max_new_tokens=512)


def chat(
    console: Console,
    draft: DraftChoice,
    grammar: GrammarFlags,
    target: AnsweringChoice = OWN_ANSWERING,
    sampling: SamplingFlags = LONG_ANSWERS,
    drafter: Word = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    show_accepted: Annotated[
        bool, typer.Option("--show-accepted", help="Colour tokens that were drafted and accepted.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Show a line of statistics per answer.")
    ] = False,
    compiled: Compile = None,
) -> None:
    """Chat with a target in the terminal. Each turn is read once and stays in the cache.

    In a terminal, lines are turns and Ctrl-C stops an answer; /help lists the commands. Through a
    pipe, every line is a turn and the answers go to stdout.

    Examples:

      specctl chat auto
      specctl chat --target tiny --draft prompt-lookup --show-accepted --stats
      echo "write a loop" | specctl chat --max-new-tokens 32 --json
    """
    draft = draft.worded(drafter)
    sampling.sampling()  # what cannot be is refused before the target is read
    target = target.or_own(draft.draft)
    wanted = draft.wanted(draft.draft, may_be_parallel=False)
    model = target.load(console, compiled, wanted=wanted)
    settings = replace(sampling.settle(console, model), grammar=grammar.load(model))
    loaded = draft.load(model)
    loaded.announce(console)
    if loaded.parallel:
        console.warn("drafting in parallel is left out: a chat keeps its text in one engine")
    talk = ChatSession(model, loaded, settings)
    look = Look(show_accepted and _has_colours(console), stats)
    room = ChatRepl(console, talk, look, Lines(console))
    if system is not None:
        room.tell_system(system)
    room.open()
    with Interrupts() as interrupts:
        room.run(interrupts)
    words = [*target.words(), *draft.positional(), *draft.words()]
    console.done(room.to_json(), next=[command_line("serve", *words)])


def _has_colours(console: Console) -> bool:
    if has_colours(console):
        return True
    console.warn("--show-accepted is ignored: stdout is no terminal that shows colours")
    return False
