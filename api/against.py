"""`specctl bench --against`: other ways to generate the same text, on the very same weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.core.errors import RecipeError, nearest

if TYPE_CHECKING:
    from specctl.api.arguments.drafting import LoadedDraft
    from specctl.runtime.measure.bench import Contender
    from specctl.runtime.target.target import Target

BASELINES = ("plain", "ngram", "hf")


def parse_against(text: str) -> tuple[str, ...]:
    """`ngram,hf` -> the baselines of that name."""
    wanted = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in wanted:
        if name not in BASELINES:
            raise RecipeError(
                f"unknown baseline {name!r}",
                where="--against",
                found=name,
                expected="one or more of " + ", ".join(BASELINES),
                do=f"--against {nearest(name, BASELINES, 1)}",
            )
    return wanted


def transformers_contenders(
    target: Target, drafts: Sequence[LoadedDraft], folder: Path
) -> Iterator[Contender]:
    """transformers' own generate: plain, and assisted by each draft that it can use, with as many
    drafted tokens a round. `folder` takes what must be written for that."""
    from transformers.utils import logging

    from specctl.runtime.measure.bench import transformers_contender
    from specctl.runtime.target.checkpoint import as_transformers

    logging.set_verbosity_error()  # it warns of what its own assisted generation does
    model, eos = as_transformers(target.lm), target.eos_ids
    yield transformers_contender("transformers plain", model, eos)
    for index, draft in enumerate(drafts):
        assert draft.drafter is not None, "a named drafter"
        assert draft.policy is not None, "a drafter comes with a policy"
        length = draft.policy.depth
        if draft.drafter.family == "prompt-lookup":
            extra: dict[str, Any] = {"prompt_lookup_num_tokens": length}
        elif draft.drafter.family == "small-lm":
            assistant = assistant_model(draft.name, target, folder / f"assistant{index}", length)
            extra = {"assistant_model": assistant}
        else:
            continue
        yield transformers_contender(f"transformers with {draft.name}", model, eos, **extra)


def cannot_assist(drafts: Sequence[LoadedDraft]) -> list[str]:
    """The drafts that transformers has no way to use."""
    known = ("prompt-lookup", "small-lm")
    return [d.name for d in drafts if d.drafter is not None and d.drafter.family not in known]


def assistant_model(name: str, target: Target, folder: Path, length: int) -> Any:
    """The draft as a transformers model that always drafts `length` tokens, as ours does."""
    from transformers import AutoModelForCausalLM

    from specctl.export.formats import export
    from specctl.export.package.find import Kind, locate
    from specctl.export.package.pretrained import inspect_folder
    from specctl.models.hf.quiet import quietly
    from specctl.runtime.target.folders.checkpoint_folder import from_folder
    from specctl.runtime.target.save_target import write_target
    from specctl.runtime.target.target import load_target

    found = locate(name)
    assert found.folder is not None, "a small-lm is a folder"
    source = found.folder
    if found.kind is Kind.GGUF:
        wide = load_target(str(source), dtype=target.dtype_name, device=str(target.device))
        source = folder
        source.mkdir(parents=True)
        write_target(wide, source)
    if found.kind is Kind.PACKAGE:
        export(source, "hf", folder, target)
        source = folder
    inspect_folder(source)
    with quietly():
        model: Any = from_folder(AutoModelForCausalLM, source, dtype=target.dtype)
    model = model.to(target.device).eval()
    model.generation_config.num_assistant_tokens = length
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model
