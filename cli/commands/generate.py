"""`specctl generate`: continue prompts with a drafter; stream, count, compare with plain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.api.arguments.targets import target_json
from specctl.cli.app.console import ACCEPTED, PLAIN_COLOUR, Console, has_colours
from specctl.cli.app.follow_up import command_line, with_text
from specctl.cli.app.settings import Setting
from specctl.cli.commands.denoised import generate_denoised, is_denoised
from specctl.cli.commands.generated import check_forms, show_stats, tell_ends
from specctl.cli.commands.gridded import generate_gridded, is_gridded
from specctl.cli.commands.zipped import check_zipped, generate_zipped
from specctl.cli.options.denoising import DenoisingFlags
from specctl.cli.options.flags import Chat, Compile
from specctl.cli.options.loading import NO_DRAFTER, DraftChoice
from specctl.cli.options.measuring import chat_words
from specctl.cli.options.outlining import OutlineFlags, show_outlines, warn_of
from specctl.cli.options.picturing import ImageFlags
from specctl.cli.options.positional import looks_like_package
from specctl.cli.options.prompts import PromptText, read_prompts, tell_chat
from specctl.cli.options.sampling import GrammarFlags, SamplingFlags
from specctl.cli.options.target_choice import OWN, OWN_WRITING, TargetChoice, WritingChoice
from specctl.core.errors import SpecctlError
from specctl.runtime.measure.doubt import doubts

if TYPE_CHECKING:
    from specctl.api.arguments.drafting import LoadedDraft
    from specctl.api.generate import GenerateResult
    from specctl.runtime.measure.stats import Stats
    from specctl.runtime.outline.answer import Outlining
    from specctl.runtime.sampling.sampling import Sampling
    from specctl.runtime.target.target import Target

MUCH_REPETITION = 0.5  # share of four-token sequences that occurred before


def generate(
    console: Console,
    draft: DraftChoice,
    sampling: SamplingFlags,
    grammar: GrammarFlags,
    denoising: DenoisingFlags,
    outlines: OutlineFlags,
    images: ImageFlags,
    target: WritingChoice = OWN_WRITING,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DRAFTER] [PROMPT]",
            help="The drafter (a package or run folder, or a name; the same as --draft), and the "
            "text to continue (- reads standard input). A single argument is the text.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="One prompt per line, or JSONL (prompt or messages)."),
    ] = None,
    limit: Annotated[
        int | None,
        Setting("prompts.limit", "Use only this many prompts.", was="--limit", min=1),
    ] = None,
    chat: Chat = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also decode plainly, and show a table.")
    ] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Show statistics of the run.")] = False,
    batch: Annotated[int, typer.Option(min=1, max=256, help="Prompts decoded at once.")] = 1,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            help="An image for the prompt, where it says <image>, else in front (repeatable, in "
            "order); for a multimodal target.",
        ),
    ] = None,
    compiled: Compile = None,
) -> None:
    """Continue prompts. With a drafter the answers are the same, but faster.

    Text is written to stdout as it is generated. A terminal shows in colour what was drafted and
    accepted; --no-color leaves that out. The same seed gives the same answer.

    A chat model answers: a prompt is a user's turn in its chat template. --raw continues the text.

    Examples:

      specctl generate "def main("
      specctl generate --target model.gguf --draft auto --compare "Why is the sky blue?"
      specctl generate --draft prompt-lookup --compare "def add(self, other):"
      specctl generate runs/quickstart --temperature 0.8 --stats "class Tree:"
      specctl generate -f prompts.txt --batch 4 --json
      specctl generate --draft prompt-lookup --grammar person.json "data = "
      specctl generate --target llava-hf/llava-1.5-7b-hf --image cat.png "What is this?"
    """
    drafter, prompt = told_apart(words or (), file)
    draft = draft.worded(drafter)
    prompts = read_prompts(prompt, file, limit)
    sampling.sampling()  # what cannot be is refused before the target is read
    outline = outlines.outlining()
    drafts = draft.draft if draft.draft != NO_DRAFTER else None
    others = {"draft": drafts, "grammar": grammar.file, "compare": compare, "compile": compiled}
    others |= {"batch": batch > 1, "set outline.kind": outlines.kind, "image": bool(image)}
    given = [f"--{name}" for name, value in others.items() if value]
    given += [" ".join(draft.words())] if draft.words() else []
    if is_denoised(target, OWN, denoising):
        given += ["--set picture.*"] if images != ImageFlags() else []
        flags = sampling, denoising, prompts, chat, stats, given
        generate_denoised(console, target, *flags)
        return
    if is_gridded(target, OWN, images):
        given += ["--chat"] if chat else []
        generate_gridded(console, target, sampling, images, prompts, stats, given)
        return
    if compare and draft.draft == NO_DRAFTER:
        draft = replace(draft, draft="prompt-lookup")
        console.warn("--compare without --draft compares with prompt-lookup")
    target = target.or_own(draft.draft)
    codebook = images.codebook(target.name)
    if target.tensor_parallel:
        draft = draft.in_step()
    wanted = draft.wanted(draft.draft)
    model = target.load(console, compiled, is_in_step=True, wanted=wanted, images=bool(image))
    outline = outlines.with_small(outline, target)
    settings = replace(sampling.settle(console, model), grammar=grammar.load(model))
    if codebook is not None:
        images.check(codebook, model, prompts)
    if codebook is not None and images.window is not None:
        given += ["--chat"] if chat or any(prompt.messages for prompt in prompts) else []
        given += [f"--mix {target.mix}"] if target.mix else []
        given += ["target.tensor_parallel"] if target.tensor_parallel else []
        check_zipped(settings, given)
        generate_zipped(console, model, codebook, images, settings, prompts, stats)
        return
    loaded = draft.load(model)
    loaded.announce(console)
    if outline is not None:
        warn_of(console, outline)
    if any(not prompt.messages for prompt in prompts):
        tell_chat(console, model, chat)
    colours = has_colours(console) and loaded.drafter is not None
    how = batch, chat, colours, outline, tuple(image or ())
    job = GenerateJob(console, model, loaded, settings, prompts, *how)
    if compare:
        made, result = _compare(console, job)
    else:
        run = _stream(console, job)
        if stats:
            show_stats(console, run.stats)
        _tell_lengths(console, run)
        tell_ends(console, run.outputs, settings, model)
        made, result = run, job.to_json(run)
    show_outlines(console, made.outputs)
    console.result = result
    images.write(console, codebook, made.outputs)
    check_forms(made.outputs)
    console.done(result, next=[_next(target, draft, compare, chat, how[-1])])


def told_apart(words: Sequence[str], file: Path | None) -> tuple[str | None, str | None]:
    """Drafter and prompt of `[DRAFTER] [PROMPT]`. One word is the prompt, unless it is the folder
    of a package, which nobody continues."""
    if len(words) > 2:
        raise SpecctlError(
            "there are too many words",
            where="the command line",
            found=f"{len(words)} words: {' '.join(words)[:80]}",
            expected="a drafter and a prompt; a prompt of several words stands in quotes",
            do='specctl generate runs/NAME "def main("',
        )
    if len(words) == 2:
        return words[0], words[1]
    if words and looks_like_package(words[0]):
        return words[0], None
    return None, words[0] if words else None


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """All that one call of generate() needs."""

    console: Console
    target: Target
    draft: LoadedDraft
    sampling: Sampling
    prompts: Sequence[PromptText]
    batch: int
    chat: bool | None
    colours: bool = False
    outline: Outlining | None = None
    images: Sequence[Path] = ()

    def run(self, draft: LoadedDraft, on_round: Any = None) -> GenerateResult:
        from specctl.api.generate import generate as generate_

        return generate_(
            self.target,
            [_given(self.target, prompt) for prompt in self.prompts],
            draft,
            sampling=self.sampling,
            batch=self.batch,
            chat=self.chat,
            on_round=on_round,
            outline=self.outline,
            images=self.images or None,
            progress=self.console,
        )

    def to_json(self, run: GenerateResult) -> dict[str, Any]:
        return {**run.to_json(), "target": target_json(self.target)}


def _given(target: Target, prompt: PromptText) -> Any:
    """A prompt as generate() takes it; with tools, encoded."""
    if prompt.tools:
        from specctl.api.arguments.prompts import EncodedPrompt

        ids = target.encode_chat(prompt.messages, prompt.tools)
        return EncodedPrompt(tuple(ids), prompt.text, is_chat=True)
    return list(prompt.messages) or prompt.text


def _tell_lengths(console: Console, run: GenerateResult) -> None:
    """What was fitted; where speculation was switched off, how often and why."""
    if run.fitted:
        sizes = ", ".join(f"{name} {_short(value)}" for name, value in run.fitted.items())
        console.say(f"the tree was fitted to the measured costs: {sizes}")
    if run.chooser is None or run.chooser.rounds_off == 0:
        return
    basis = "" if run.stats.drafted else " (assumed: none was drafted)"
    console.say(
        f"speculation was off in {run.chooser.rounds_off:,} of {run.chooser.rounds:,} "
        f"rounds: with about {run.chooser.estimate():.0%} of drafted tokens accepted{basis}, plain "
        "decoding is faster here by the measured costs (--no-adaptive drafts all the same)"
    )


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _stream(console: Console, job: GenerateJob) -> GenerateResult:
    """Generate, writing text as it comes; rows decoded together are written when all are done."""
    from specctl.runtime.target.text.text_stream import TextStream, TokenDecoder

    decoder = TokenDecoder.of(job.target)
    streams = [TextStream(decoder, job.sampling.stop) for _ in job.prompts]
    is_live = job.batch == 1 or len(job.prompts) == 1
    current = -1
    tokens: list[list[int]] = [[] for _ in job.prompts]

    def show(index: int, new: tuple[int, ...], accepted: int) -> None:
        nonlocal current
        tokens[index] += new
        if not is_live:
            return
        if index != current:
            _open_output(console, job, index, after=current >= 0)
            current = index
        drafted = "".join(map(streams[index].add, new[:accepted]))
        if job.colours and drafted:
            console.colour(ACCEPTED)
            console.write(drafted)
            console.colour(PLAIN_COLOUR)
            drafted = ""
        console.write(drafted + "".join(map(streams[index].add, new[accepted:])))

    try:
        run = job.run(job.draft, show)
    except KeyboardInterrupt:
        _keep(console, job, tokens, is_live)
        raise
    for index, (stream, output) in enumerate(zip(streams, run.outputs, strict=True)):
        if index < current:
            continue
        if index != current:
            _open_output(console, job, index, after=index > 0)
        console.write(stream.end() if is_live else output.text)
    console.out()
    return run


def _keep(
    console: Console, job: GenerateJob, tokens: Sequence[Sequence[int]], is_live: bool
) -> None:
    """What was generated until Ctrl-C: written where it is not yet, and in the answer of --json.
    Whether a text was at its end is not known any more."""
    outputs: list[dict[str, Any]] = []
    for index, (prompt, ids) in enumerate(zip(job.prompts, tokens, strict=True)):
        if not ids:
            continue
        text = job.target.decode(ids)
        if not is_live:
            _open_output(console, job, index, after=bool(outputs))
            console.write(text)
        entry = {"prompt": prompt.text, "text": text, "token_ids": [*ids]}
        outputs.append({**entry, "finish_reason": None})
    console.out()
    console.result = {"outputs": outputs}


def _open_output(console: Console, job: GenerateJob, index: int, after: bool) -> None:
    if len(job.prompts) > 1:
        line = " ".join(job.prompts[index].text.split())[:70]
        console.write(("\n" if after else "") + f"[{index + 1}/{len(job.prompts)}] {line}\n")


def _compare(console: Console, job: GenerateJob) -> tuple[GenerateResult, dict[str, Any]]:
    """Plain and speculative decoding of the same prompts, side by side."""
    from specctl.api.arguments.drafting import PLAIN

    with console.task("compare", 4, "runs") as advance:
        runs = []
        for draft in (PLAIN, job.draft):
            job.run(draft)  # the first run of each pays for allocations and kernel choice
            advance(1)
            runs.append(job.run(draft))
            speed = runs[-1].stats.tokens_per_second
            advance(1, f"{draft.name} {speed:.0f} tokens/s")
    base, fast = runs
    same = [a.token_ids == b.token_ids for a, b in zip(base.outputs, fast.outputs, strict=True)]
    speedup = fast.stats.tokens_per_second / max(base.stats.tokens_per_second, 1e-9)
    identical = all(same) if job.sampling.temperature == 0 else None
    for index, output in enumerate(fast.outputs):
        _open_output(console, job, index, after=False)
        console.write(output.text + "\n")
    console.out()
    columns = ("", "tau", "tokens/s", "speed-up", "identical", "repetition")
    rows = [
        _row("plain", base.stats, 1.0, None),
        _row(job.draft.name, fast.stats, speedup, identical),
    ]
    console.table(columns, rows)
    show_stats(console, fast.stats)
    _tell_lengths(console, fast)
    tell_ends(console, fast.outputs, job.sampling, job.target)
    if job.sampling.temperature == 0 and fast.stats.repetition_rate > MUCH_REPETITION:
        console.say(
            f"{fast.stats.repetition_rate:.0%} of the text repeats itself, which makes drafting "
            "look better than it is; compare with --temperature 0.8, or with a prompt of yours"
        )
    if identical is False and not fast.stats.verification.startswith("approximate"):
        _explain_difference(console, job)
    why = doubts(speedup, fast.stats.tau, fast.stats.tokens)
    if why:
        console.warn(
            f"the speed-up of {speedup:.2f} is not reliable: {'; '.join(why)}; measure it with: "
            f"specctl bench --target {job.target.name} {job.draft.name}"
        )
    comparison = {
        "plain": base.stats.to_json(),
        "speculative": fast.stats.to_json(),
        "speedup": round(speedup, 3),
        "doubts": list(why),
        "identical": identical,
        "identical_outputs": sum(same) if identical is not None else None,
    }
    return fast, {**job.to_json(fast), "comparison": comparison}


def _row(name: str, stats: Stats, speedup: float, identical: bool | None) -> tuple[object, ...]:
    figures = (stats.tau, stats.tokens_per_second, speedup)
    shown = tuple(f"{figure:.2f}" for figure in figures)
    return (name, *shown, identical, f"{stats.repetition_rate:.2f}")


def _explain_difference(console: Console, job: GenerateJob) -> None:
    if str(job.target.dtype) == "torch.float32":
        console.warn("outputs differ in float32: run `specctl verify` and report the result")
        return
    console.warn(
        f"outputs differ in {str(job.target.dtype).removeprefix('torch.')}: several rows at once "
        "round differently from one row, so near-ties may flip; --dtype float32 gives identity"
    )


def _next(
    target: TargetChoice,
    draft: DraftChoice,
    compared: bool,
    chat: bool | None,
    images: Sequence[Path],
) -> str:
    spoken = [*chat_words(chat), *(word for image in images for word in ("--image", image))]
    is_plain = draft.draft == NO_DRAFTER
    if images or (is_plain and not compared):  # bench takes no images
        own = ["prompt-lookup"] if is_plain else [draft.draft, *draft.words()]
        return with_text("generate", *target.words(), "--draft", *own, *spoken, "--compare")
    words = [*draft.positional(), *draft.words(), *spoken]
    return command_line("bench", *target.measured_words(), *words)
