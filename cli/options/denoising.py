"""How a masked diffusion model denoises: settings that mean nothing for any other target."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from specctl.cli.app.settings import Setting
from specctl.cli.options.names import one_of


@dataclass(frozen=True, slots=True)
class DenoisingFlags:
    """Settings of `specctl generate` with a diffusion target."""

    block: Annotated[
        int | None,
        Setting("diffusion.block", "Tokens denoised together, 32 if left out.", min=1),
    ] = None
    steps: Annotated[
        int | None,
        Setting("diffusion.steps", "Passes over a block; one a token if left out.", min=1),
    ] = None
    unmask: Annotated[
        str | None,
        Setting(
            "diffusion.unmask",
            "Tokens that a pass keeps: static, threshold:T, entropy:T, explore:T:N, learn2pd:T "
            "(approximate but for static).",
            metavar="WAY",
            complete=one_of("static", "threshold:", "entropy:", "explore:", "learn2pd:"),
        ),
    ] = None
    reuse: Annotated[
        str | None,
        Setting(
            "diffusion.reuse",
            "What a pass takes from earlier ones: none, dkv:REFRESH, window:ACTIVE:BUFFER:REFRESH "
            "(approximate).",
            metavar="WAY",
            complete=one_of("none", "dkv:", "window:"),
        ),
    ] = None
    ahead: Annotated[
        int | None,
        Setting(
            "diffusion.ahead", "Steps drafted and verified in one pass (FreeDave, lossless).", min=0
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        """What was set, by the names of DenoiseSettings."""
        return {name: value for name, value in asdict(self).items() if value is not None}
