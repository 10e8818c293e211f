"""generate(): continue prompts with a drafter, as `specctl generate` does."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from specctl.api.arguments.arguments import MOST_ROWS, check_count, check_settings
from specctl.api.arguments.attention_only import attention_only
from specctl.api.arguments.drafting import DRAFTING, DrafterLike, LoadedDraft, load_draft
from specctl.api.arguments.images import ImageLike, encode_with_images
from specctl.api.arguments.progress import Progress, as_reporter, warnings_of
from specctl.api.arguments.prompts import (
    EncodedPrompt,
    Prompt,
    are_chats,
    empty_answers,
    encode_prompts,
)
from specctl.api.arguments.targets import TargetLike, load_target, target_or_own
from specctl.api.failures import raises_user_errors
from specctl.core.errors import IncompatibleError, one_of_two
from specctl.core.messages.table import Table, Tabled
from specctl.runtime import generate as runtime
from specctl.runtime.generate import OnRound, OnTokens, Output
from specctl.runtime.measure.cost import equip, fitted_sizes
from specctl.runtime.measure.stats import Stats
from specctl.runtime.outline.answer import Outlining
from specctl.runtime.outline.writer import Chat, write_outlined
from specctl.runtime.policies.length import LengthChooser
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

SAMPLING = tuple(field.name for field in fields(Sampling))


@dataclass(frozen=True, slots=True, repr=False)
class GenerateResult(Tabled):
    """What was generated, in the order of the prompts, and what the run counted. `chooser` chose
    the draft lengths (None: they were fixed); `fitted` is what of the policy was fitted to measured
    costs; `note` is what is to be known of the drafter; `chat`: whether the prompts were turns of
    chats (None: some of them)."""

    outputs: tuple[Output, ...]
    stats: Stats
    draft: str
    note: str
    chooser: LengthChooser | None
    fitted: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    chat: bool | None = None

    @property
    def texts(self) -> list[str]:
        """The text of every continuation."""
        return [output.text for output in self.outputs]

    @property
    def text(self) -> str:
        """The text; of several prompts all of them, blank lines between."""
        return "\n\n".join(self.texts)

    def __str__(self) -> str:
        return "\n".join([self.text, *self.stats.lines(), *self._notes()])

    def table(self) -> Table:
        """A row for every prompt."""
        rows = [(o.prompt, o.text, len(o.token_ids), o.finish_reason) for o in self.outputs]
        notes = [*self.stats.lines(), *self._notes()]
        return Table(("prompt", "text", "tokens", "ended by"), rows, notes)

    def _notes(self) -> list[str]:
        return [f"warning: {text}" for text in self.warnings]

    def adaptive_json(self) -> dict[str, Any] | None:
        """What was chosen by measured costs."""
        fitted = {"fitted": dict(self.fitted)} if self.fitted else {}
        if self.chooser is None:
            return fitted or None
        figures = {"rounds": self.chooser.rounds, "rounds_off": self.chooser.rounds_off}
        return {**fitted, **figures, "acceptance": round(self.chooser.estimate(), 3)}

    def to_json(self) -> dict[str, Any]:
        return {
            "outputs": [output.to_json() for output in self.outputs],
            "stats": self.stats.to_json(),
            "chat": self.chat,
            "draft": self.draft,
            "note": self.note,
            "adaptive": self.adaptive_json(),
        }


@raises_user_errors
def generate(
    target: TargetLike,
    prompts: Prompt | Sequence[Prompt],
    drafter: DrafterLike = None,
    *,
    sampling: Sampling | Sequence[Sampling] | None = None,
    batch: int = 1,
    chat: bool | None = None,
    on_tokens: OnTokens | None = None,
    on_round: OnRound | None = None,
    outline: str | Outlining | None = None,
    images: Sequence[ImageLike] | Sequence[Sequence[ImageLike]] | None = None,
    drafts: bool | str | Sequence[bool | str] = True,
    progress: Progress = None,
    **settings: Any,
) -> GenerateResult:
    """Continue a prompt, or each of several; prompt i uses seed `sampling.seed + i`, or
    the settings at its place, which differ in seeds and processors alone. A chat model is given a
    text as a user's turn in its chat template; `chat` says so (True), or that the text goes on as
    it is (False).

    `settings` are fields of Sampling (`temperature=0.8`, `max_new_tokens=64`) and how to draft:
    `policy`, `length`, `nodes`, `rule`, `stop_rule`, `controller`, `parallel`, `adaptive`, and
    `allow` and `translate` of load_drafter. `on_tokens(index, new_ids)` is called as tokens come,
    `on_round(index, new_ids, accepted)` as well says how many of them were drafted. `outline`:
    "skeleton" or "skeleton-graph": chats are answered from an outline, all of whose points are
    written at once, which is approximate (docs/outlines.md). `images`: files, bytes or images of
    PIL, of the prompt or of each prompt, for a target that reads them (docs/images.md). `drafts`:
    of a team ("prompt-lookup+token-recycling") the member that drafts, by name, for all prompts or
    for each; False: nobody does.
    Lossless for every drafter of a lossless family, and independent of `batch`.
    """
    reporter = as_reporter(progress)
    check_count("batch", batch, MOST_ROWS)
    if outline is not None and not isinstance(outline, Outlining):
        outline = Outlining(str(outline))
    sampling, how = _split(sampling, settings)
    wanted = attention_only([drafter], *map(how.get, ("parallel", "policy", "rule")))
    shows = images is not None and not (isinstance(images, (list, tuple)) and not images)
    if shows and isinstance(target, (str, Path)):
        target = load_target(target, images=True)
    model = target_or_own(target, drafter, wanted=wanted)
    if drafts is not True and outline is not None:
        raise one_of_two(
            "the points of an outline are drafted for alike",
            "drafts and outline.kind",
            "leave out drafts",
        )
    if shows and outline is not None:
        raise one_of_two(
            "answers from an outline read no images",
            "images and outline.kind",
            "leave out outline.kind, or the images",
        )
    draft = load_draft(drafter, model, **how)
    if draft is not drafter:
        draft.announce(reporter)
    if draft.parallel and batch > 1:
        reporter.warn("--batch is ignored: drafting in parallel serves one prompt at a time")
    if batch > 1 and model.mixture is not None and (why := model.mixture.one_by_one):
        reporter.warn(f"--batch is ignored: {why} one prompt at a time")
    if images is not None and shows:
        encoded = encode_with_images(model, prompts, images, chat)
    else:
        encoded = encode_prompts(model, prompts, chat)
    ids, rows = [prompt.ids for prompt in encoded], min(batch, len(encoded))
    if outline is not None:
        rows, chats = outline.points, _chats(model, encoded, outline, draft)
        if batch > 1:
            reporter.warn("--batch is ignored: the points of one answer are decoded at once")
    first, _ = runtime.by_prompt(sampling, len(ids))
    costs = draft.costs(model, ids, rows, sampled=first.temperature > 0)
    chosen = equip(draft.policy, costs)
    writing: dict[str, Any] = {
        "drafter": draft.drafter,
        "sampling": sampling,
        "policy": chosen.policy,
        "rule": draft.rule,
        "chooser": chosen.chooser,
        "on_tokens": on_tokens,
        "on_round": on_round,
    }
    if outline is not None:
        made = write_outlined(model, chats, outline, **writing)
    else:
        writing["images"] = [prompt.images for prompt in encoded]
        writing |= {"batch": batch, "parallel": draft.parallel, "drafts": drafts}
        made = runtime.generate(model, ids, **writing)
    for warning in empty_answers(model, encoded, made.outputs):
        reporter.warn(warning)
    pairs = zip(made.outputs, encoded, strict=True)
    return GenerateResult(
        outputs=tuple(replace(output, prompt=prompt.text) for output, prompt in pairs),
        stats=made.stats,
        draft=draft.name,
        note="" if draft.drafter is None else draft.drafter.note,
        chooser=chosen.chooser,
        fitted=fitted_sizes(draft.policy, chosen.policy),
        warnings=warnings_of(reporter),
        chat=are_chats(encoded),
    )


def _chats(
    target: Target, prompts: Sequence[EncodedPrompt], how: Outlining, draft: LoadedDraft
) -> list[Chat]:
    """The prompts as conversations, which outlines are written in."""
    if draft.parallel:
        raise one_of_two(
            f"{how.kind} does not go with drafting beside the target",
            f"outline.kind={how.kind} and serve.parallel",
            "leave out serve.parallel",
        )
    if any(not prompt.messages for prompt in prompts):
        has_template = target.template_digest is not None
        raise IncompatibleError(
            "outlines are written in chats without tools",
            where="outline.kind",
            found="a prompt that is continued as it is, token ids, or tools",
            expected="a user's turn, or messages, in the target's chat template",
            do="--chat" if has_template else "leave out outline.kind, or name a chat model",
        )
    return [Chat(prompt.messages, prompt.ids, prompt.text) for prompt in prompts]


def _split(
    sampling: Sampling | Sequence[Sampling] | None, settings: Mapping[str, Any]
) -> tuple[Sampling | Sequence[Sampling], dict[str, Any]]:
    """Settings of sampling, and those of drafting."""
    known = (*SAMPLING, *DRAFTING)
    expected = "a field of specctl.Sampling, or one of " + ", ".join(DRAFTING)
    check_settings(settings, known, "specctl.generate", expected, "help(specctl.generate)")
    own = {name: value for name, value in settings.items() if name in SAMPLING}
    if isinstance(stop := own.get("stop"), str):
        own["stop"] = (stop,)
    elif "stop" in own and (stop is None or isinstance(stop, Collection)):
        own["stop"] = tuple(stop or ())
    how = {name: value for name, value in settings.items() if name in DRAFTING}
    if sampling is None or isinstance(sampling, Sampling):
        return replace(sampling or Sampling(), **own), how
    return [replace(one, **own) for one in sampling], how
