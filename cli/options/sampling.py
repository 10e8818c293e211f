"""How text is sampled: the flags for it, the target's own generation_config.json, and grammars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from specctl.cli.app.console import Console
from specctl.cli.app.settings import Setting
from specctl.cli.options.flags import DrawnSeed, sampling_option
from specctl.core.errors import IntegrityError, unknown

if TYPE_CHECKING:
    from specctl.runtime.sampling.generation_config import Suggested
    from specctl.runtime.sampling.grammar import Grammar
    from specctl.runtime.sampling.sampling import Sampling
    from specctl.runtime.target.target import Target

MODEL, NONE = "model", "none"

GenerationConfig = Annotated[
    str | None,
    Setting(
        "sample.generation_config",
        "model: sample as the target's generation_config.json says, except for what is set here; "
        "none: leave out the note about that file.",
        was="--generation-config",
        metavar="model|none",
    ),
]


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """How tokens are chosen, and where a text ends."""

    max_new_tokens: Annotated[
        int, sampling_option("--max-new-tokens", min=1, help="Maximum tokens to generate.")
    ] = 128
    temperature: Annotated[
        float | None, sampling_option("--temperature", min=0.0, help="0 = greedy (default).")
    ] = None
    top_k: Annotated[
        int | None,
        Setting("sample.top_k", "Sample from the k likeliest tokens.", was="--top-k", min=1),
    ] = None
    top_p: Annotated[
        float | None,
        Setting("sample.top_p", "Sample from the nucleus of mass p.", was="--top-p", min=0, max=1),
    ] = None
    min_p: Annotated[
        float | None,
        Setting(
            "sample.min_p",
            "Minimum probability, relative to the likeliest.",
            was="--min-p",
            min=0,
            max=1,
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        Setting(
            "sample.repetition_penalty",
            "Divide the scores of repeated tokens.",
            was="--repetition-penalty",
            min=0.01,
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        Setting(
            "sample.frequency_penalty",
            "Penalty per occurrence of a token.",
            was="--frequency-penalty",
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        Setting(
            "sample.presence_penalty", "Penalty for every token seen.", was="--presence-penalty"
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        Setting("sample.stop", "Stop before this text (repeatable).", was="--stop", metavar="TEXT"),
    ] = None
    ignore_eos: Annotated[
        bool, Setting("sample.ignore_eos", "Continue past end of text.", was="--ignore-eos")
    ] = False
    generation_config: GenerationConfig = None
    seed: DrawnSeed = 0

    def settle(self, console: Console, target: Target) -> Sampling:
        """The settings for that target, which may have its own; says what is done with those."""
        used = self.sampling(followed(console, target, self.generation_config))
        tell(console, target, self.generation_config, [used])
        tell_drawn(console, self, used)
        return used

    def sampling(self, suggested: Suggested | None = None) -> Sampling:
        """Checked settings for the runtime; what no flag says is as suggested."""
        from specctl.runtime.sampling.sampling import Sampling

        check_choice(self.generation_config)
        settings: dict[str, Any] = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
        }
        settings = settings if suggested is None else suggested.fill(settings)
        return Sampling(
            **{**settings, "temperature": settings["temperature"] or 0.0},
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            seed=self.seed,
            max_new_tokens=self.max_new_tokens,
            stop=tuple(self.stop or ()),
            ignore_eos=self.ignore_eos,
        )


def check_choice(choice: str | None) -> None:
    """Refuse another word, before anything loads."""
    if choice not in (None, MODEL, NONE):
        words, where = (MODEL, NONE), "--set sample.generation_config"
        raise unknown("generation config", choice, words, where)


def tell_drawn(console: Console, flags: SamplingFlags, used: Sampling) -> None:
    """Say which seed was drawn, where one was."""
    if flags.seed == -1 and not used.greedy:
        console.say(f"the seed is {used.seed} (--seed {used.seed} gives the same text)")


def followed(console: Console, target: Target, choice: str | None) -> Suggested | None:
    """What is to be followed; None where nothing is. One that cannot be is reported or refused."""
    if choice != MODEL:
        return None
    found = target.suggested
    if found is None:
        console.warn(f"{target.name} has no generation_config.json: there is nothing to follow")
        return None
    if found.wrong:
        raise IntegrityError(
            f"generation_config.json of {target.name} cannot be followed",
            where="sample.generation_config",
            found="; ".join(found.wrong),
            expected="values that sampling can have",
            do="correct the file, or leave sample.generation_config out and give the values",
        )
    if found.others:
        console.warn(
            f"generation_config.json of {target.name} also asks for {', '.join(found.others)}: "
            "that has no counterpart here and is not followed"
        )
    return found


def tell(
    console: Console, target: Target, choice: str | None, used: Sequence[Sampling], whose: str = ""
) -> None:
    """Say once what the file sets and what is done; nothing where that is the same."""
    from specctl.runtime.sampling.generation_config import described

    found, what = target.suggested, " and ".join(dict.fromkeys(map(described, used)))
    if found is None or choice == NONE:
        return
    if choice == MODEL:
        console.say(f"sampling by generation_config.json of {target.name} and flags: {what}{whose}")
        return
    if found.wrong:
        console.warn(
            f"generation_config.json of {target.name} has values that mean nothing: "
            + "; ".join(found.wrong)
        )
    ignored = [part for part in found.unlike(used[0]) if all(part in found.unlike(u) for u in used)]
    if ignored:
        console.say(
            f"generation_config.json of {target.name} asks for {', '.join(ignored)}; used: {what}"
            f"{whose} (--set sample.generation_config=model follows it, none is silent)"
        )


@dataclass(frozen=True, slots=True)
class GrammarFlags:
    """What an answer must look like."""

    file: Annotated[
        Path | None,
        sampling_option(
            "--grammar",
            help="Constrain answers to this JSON schema (.json), or to this .lark or .regex file.",
        ),
    ] = None

    def load(self, target: Target) -> Grammar | None:
        """The grammar, ready for that target; None if none was named."""
        if self.file is None:
            return None
        from specctl.runtime.sampling.grammar import GrammarSpec, compile_grammar

        return compile_grammar(GrammarSpec.read(self.file), target)
