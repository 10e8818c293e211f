"""How text is sampled: the flags for it, the target's own generation_config.json, and grammars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from specctl.cli.app.console import Console
from specctl.cli.options.flags import DrawnSeed, sampling_option
from specctl.core.errors import IntegrityError, SpecctlError, one_of_two, unknown

if TYPE_CHECKING:
    from specctl.runtime.sampling.generation_config import Suggested
    from specctl.runtime.sampling.grammar import Grammar
    from specctl.runtime.sampling.sampling import Sampling
    from specctl.runtime.target.target import Target

MODEL, NONE = "model", "none"

GenerationConfigFlag = Annotated[
    str | None,
    sampling_option(
        "--generation-config",
        metavar="model|none",
        help="model: where no flag says otherwise, sample as in the target's "
        "generation_config.json; none: leave out the note about that file.",
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
        int | None, sampling_option("--top-k", min=1, help="Sample from the k likeliest tokens.")
    ] = None
    top_p: Annotated[
        float | None,
        sampling_option("--top-p", min=0.0, max=1.0, help="Sample from the nucleus of mass p."),
    ] = None
    min_p: Annotated[
        float | None,
        sampling_option(
            "--min-p", min=0.0, max=1.0, help="Minimum probability, relative to the likeliest."
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        sampling_option(
            "--repetition-penalty", min=0.01, help="Divide the scores of repeated tokens."
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        sampling_option("--frequency-penalty", help="Penalty per occurrence of a token."),
    ] = None
    presence_penalty: Annotated[
        float | None, sampling_option("--presence-penalty", help="Penalty for every token seen.")
    ] = None
    stop: Annotated[
        list[str] | None, sampling_option("--stop", help="Stop before this text (repeatable).")
    ] = None
    ignore_eos: Annotated[
        bool, sampling_option("--ignore-eos", help="Continue past end of text.")
    ] = False
    generation_config: GenerationConfigFlag = None
    seed: DrawnSeed = 0

    def settle(self, console: Console, target: Target) -> Sampling:
        """The settings for that target, which may have its own; says what is done with those."""
        used = self.sampling(followed(console, target, self.generation_config))
        tell(console, target, self.generation_config, [used])
        if self.seed == -1 and not used.greedy:
            console.say(f"the seed is {used.seed} (--seed {used.seed} gives the same text)")
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
        words, flag = (MODEL, NONE), "--generation-config"
        raise unknown("generation config", choice, words, flag, kind=SpecctlError)


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
            where="--generation-config",
            found="; ".join(found.wrong),
            expected="values that sampling can have",
            do="correct the file, or leave --generation-config out and give the flags",
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
            f"{whose} (--generation-config model follows it, none is silent)"
        )


@dataclass(frozen=True, slots=True)
class GrammarFlags:
    """What an answer must look like; at most one of them."""

    json_schema: Annotated[
        Path | None, sampling_option("--json-schema", help="Constrain answers to this JSON schema.")
    ] = None
    file: Annotated[
        Path | None,
        sampling_option("--grammar", help="Constrain answers to this .lark or .regex file."),
    ] = None

    def load(self, target: Target) -> Grammar | None:
        """The grammar, ready for that target; None if none was named."""
        if self.json_schema is None and self.file is None:
            return None
        if self.json_schema is not None and self.file is not None:
            given = f"--json-schema {self.json_schema} and --grammar {self.file}"
            raise one_of_two("two grammars for one answer", given, "leave one out")
        from specctl.runtime.sampling.grammar import GrammarSpec, compile_grammar

        if self.json_schema is not None:
            return compile_grammar(GrammarSpec.read(self.json_schema, "json_schema"), target)
        assert self.file is not None
        return compile_grammar(GrammarSpec.read(self.file), target)
