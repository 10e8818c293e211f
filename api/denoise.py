"""denoise(): continue prompts with a masked diffusion model, as `specctl generate` does for one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from specctl.api.arguments.arguments import check_settings
from specctl.api.failures import raises_user_errors
from specctl.core.errors import IncompatibleError
from specctl.core.messages.table import Table, Tabled
from specctl.core.storage.diffusion_kinds import is_diffusion_folder
from specctl.diffusion import engine
from specctl.diffusion.folder import DiffusionTarget, load_diffusion
from specctl.diffusion.settings import DenoiseSettings
from specctl.recipes.targets import resolve
from specctl.runtime.generate import Output
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.placement.device import choose_device

TAKEN = ("temperature", "seed", "max_new_tokens", "ignore_eos")  # of Sampling
SETTINGS = tuple(field.name for field in fields(DenoiseSettings))
DTYPES = ("float32", "bfloat16", "float16")
OnText = Callable[[int, str], None]  # prompt, and its answer once it is complete


@dataclass(frozen=True, slots=True, repr=False)
class DenoiseResult(Tabled):
    """What was written, in the order of the prompts; `passes` of the model and the `positions`
    computed in them; `verification`: plain, lossless, or approximate with what it is so by."""

    outputs: tuple[Output, ...]
    passes: int
    positions: int
    seconds: float
    verification: str

    @property
    def texts(self) -> list[str]:
        """The text of every continuation."""
        return [output.text for output in self.outputs]

    @property
    def tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    def lines(self) -> tuple[str, ...]:
        """What it took."""
        return (
            f"tokens per pass {self.tokens / max(1, self.passes):.2f} | passes {self.passes:,} | "
            f"positions computed {self.positions:,}",
            f"{self.tokens:,} tokens in {self.seconds:.2f} s | verification {self.verification}",
        )

    def table(self) -> Table:
        """A row for every prompt."""
        rows = [(o.prompt, o.text, len(o.token_ids), o.finish_reason) for o in self.outputs]
        return Table(("prompt", "text", "tokens", "ended by"), rows, self.lines())

    def to_json(self) -> dict[str, Any]:
        return {
            "outputs": [output.to_json() for output in self.outputs],
            "stats": {
                "tokens": self.tokens,
                "passes": self.passes,
                "positions": self.positions,
                "seconds": round(self.seconds, 3),
                "verification": self.verification,
            },
        }


@raises_user_errors
def denoise(
    target: str | Path | DiffusionTarget,
    prompts: str | Sequence[Any],
    *,
    chat: bool | None = None,
    on_text: OnText | None = None,
    **settings: Any,
) -> DenoiseResult:
    """Continue a prompt, or each of several (texts, or conversations as lists of messages); prompt
    i uses seed `seed + i`. `target`: a folder in the layout of LLaDA or Dream, or what
    `load_diffusion` gave.

    `settings` are `temperature`, `seed`, `max_new_tokens` and `ignore_eos`, and how the canvas is
    denoised: `block`, `steps`, `unmask`, `reuse`, `ahead` (see DenoiseSettings).
    """
    known = (*TAKEN, *SETTINGS)
    check_settings(settings, known, "specctl.denoise", ", ".join(known), "help(specctl.denoise)")
    how = DenoiseSettings(**{k: v for k, v in settings.items() if k in SETTINGS})
    sampling = Sampling(**{k: v for k, v in settings.items() if k in TAKEN})
    model = target if isinstance(target, DiffusionTarget) else load_named(str(target))
    given = [prompts] if isinstance(prompts, str) else list(prompts)
    encoded = [_encoded(model, prompt, chat) for prompt in given]
    for _, ids in encoded:
        engine.check_prompt(model, ids, sampling.max_new_tokens)
    outputs, begin, passes, positions = list[Output](), time.perf_counter(), 0, 0
    for index, (text, ids) in enumerate(encoded):
        made = engine.denoise(
            model,
            ids,
            how,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed + index,
            ignore_eos=sampling.ignore_eos,
        )
        answer = model.decode(made.token_ids)
        outputs.append(Output(text, answer, made.token_ids, made.finish_reason))
        passes, positions = passes + made.passes, positions + made.positions
        if on_text is not None:
            on_text(index, answer)
    seconds = time.perf_counter() - begin
    kind = engine.verification_of(how)
    return DenoiseResult(tuple(outputs), passes, positions, seconds, kind)


def diffusion_folder(name: str) -> Path | None:
    """The folder that a target's name means, if it holds a masked diffusion model."""
    folder = resolve(name).path
    return folder if folder is not None and is_diffusion_folder(folder) else None


def load_named(name: str, device: str = "auto", dtype: str = "auto") -> DiffusionTarget:
    """The masked diffusion model of that name."""
    import torch

    folder = diffusion_folder(name)
    if folder is None:
        raise IncompatibleError(
            "the target is no masked diffusion model",
            where=name,
            found="another model_type, or no folder of this machine",
            expected="a folder whose config.json has model_type llada or Dream",
            do="specctl.generate continues prompts with causal models",
        )
    place = choose_device(device)
    if dtype == "auto":
        dtype = "float32" if place.type == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise IncompatibleError(
            "a masked diffusion model is not loaded in these numbers",
            where="--dtype",
            found=dtype,
            expected=f"auto, {', '.join(DTYPES)}",
            do="leave --dtype out",
        )
    return load_diffusion(folder, place, getattr(torch, dtype))


def _encoded(target: DiffusionTarget, prompt: Any, chat: bool | None) -> tuple[str, list[int]]:
    """The text by which results name a prompt, and its ids."""
    if isinstance(prompt, str):
        if target.is_chat if chat is None else chat:
            return prompt, target.encode_chat([{"role": "user", "content": prompt}])
        return prompt, target.encode(prompt)
    if prompt and all(isinstance(message, Mapping) for message in prompt):
        return str(prompt[-1].get("content", "")), target.encode_chat(prompt)
    return "", [int(token) for token in prompt]
