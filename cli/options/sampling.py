"""The sampling flags of a command that writes text, as one group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.cli.app.console import Console
from specctl.cli.options.flags import SAMPLING, MaxNewTokens, Seed, Temperature
from specctl.cli.options.generation_config import GenerationConfigFlag, check_choice, followed, tell

if TYPE_CHECKING:
    from specctl.runtime.sampling.generation_config import Suggested
    from specctl.runtime.sampling.sampling import Sampling
    from specctl.runtime.target.target import Target


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """How tokens are chosen, and where a text ends."""

    max_new_tokens: MaxNewTokens = 128
    temperature: Temperature = None
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", min=1, help="Keep the k likeliest.", rich_help_panel=SAMPLING),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p", min=0.0, max=1.0, help="Nucleus of mass p.", rich_help_panel=SAMPLING
        ),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            "--min-p",
            min=0.0,
            max=1.0,
            help="Least share of the top probability.",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            "--repetition-penalty",
            min=0.01,
            help="Divide repeated tokens' scores.",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        typer.Option("--frequency-penalty", help="Per occurrence.", rich_help_panel=SAMPLING),
    ] = None
    presence_penalty: Annotated[
        float | None,
        typer.Option("--presence-penalty", help="Once per token seen.", rich_help_panel=SAMPLING),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", help="End before this text (repeatable).", rich_help_panel=SAMPLING),
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Do not stop at EOS.", rich_help_panel=SAMPLING)
    ] = False
    generation_config: GenerationConfigFlag = None
    seed: Seed = 0

    def settle(self, console: Console, target: Target) -> Sampling:
        """The settings for that target, which may ask for some; says what is done with those."""
        used = self.sampling(followed(console, target, self.generation_config))
        tell(console, target, self.generation_config, [used])
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
