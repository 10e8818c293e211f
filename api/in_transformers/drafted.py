"""custom_generate(): the decoding loop of transformers' `generate`, with a drafter.

    model.generate(**inputs, custom_generate=specctl.custom_generate("runs/eagle3"))

transformers prepares what it always does (the generation config, logits processors, padding), and
hands over before its own loop. What it prepared is honoured or refused by name: the result is that
of its loop, greedily token for token, sampled by distribution. The model is read and not frozen, so
it may be trained between two calls.
Letters: B rows, T tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    GenerationMode,
    MaxLengthCriteria,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from specctl.api.arguments.arguments import check_settings
from specctl.api.arguments.drafting import DRAFTING, DrafterLike, LoadedDraft, load_draft
from specctl.api.arguments.targets import tokenizer_of
from specctl.api.failures import raises_user_errors
from specctl.api.generate import generate
from specctl.core.errors import IncompatibleError, SpecctlError
from specctl.runtime.measure.stats import Stats
from specctl.runtime.sampling.sampling import DRAWN_SEEDS, Sampling
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.moving import MovingTarget

# What transformers adds for its own loop: of use there, and no matter here.
OF_THE_LOOP = {"attention_mask", "cache_position", "logits_to_keep", "past_key_values",
               "position_ids", "use_cache"}  # fmt: skip
# What remembers the steps before, or counts on all rows of the batch in every call.
OF_WHOLE_BATCHES = (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
WARPERS = (  # in the order in which specctl truncates
    (TemperatureLogitsWarper, "temperature"),
    (TopKLogitsWarper, "top_k"),
    (TopPLogitsWarper, "top_p"),
    (MinPLogitsWarper, "min_p"),
)
UNSEEN = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class Streamer(Protocol):
    """A streamer of transformers."""

    def put(self, value: Tensor) -> object: ...

    def end(self) -> object: ...


@raises_user_errors
def custom_generate(
    drafter: DrafterLike,
    *,
    stop: Sequence[str] = (),
    streamer: Streamer | None = None,
    tokenizer: Any = None,
    **settings: Any,
) -> CustomGenerate:
    """What `custom_generate` of transformers' `generate` takes. `settings` say how to draft, as
    those of `specctl.generate`: `policy`, `length`, `nodes`, `rule`, `allow` and so on.

    Strings to `stop` at and a `streamer` are given here, since transformers does not pass its
    own on to callables; `tokenizer` where the model's cannot be found where it was loaded from.
    """
    expected, remedy = "one of " + ", ".join(DRAFTING), "give it to model.generate() instead"
    check_settings(settings, DRAFTING, "specctl.custom_generate", expected, remedy)
    return CustomGenerate(drafter, settings, stop=stop, streamer=streamer, tokenizer=tokenizer)


def generate_drafted(
    model: Any, draft: DrafterLike = None, streamer: Streamer | None = None, **arguments: Any
) -> Any:
    """`model.generate(**arguments)` with a drafter; settings of drafting stand among the arguments.
    This is what the folder for `custom_generate=` runs."""
    if draft is None:
        raise SpecctlError(
            "no drafter was named",
            where="model.generate(custom_generate=...)",
            found="no argument draft",
            expected="a package, a run folder, or the name of one that needs no training",
            do='generate(..., draft="prompt-lookup")',
        )
    stop, tokenizer = arguments.pop("stop_strings", None) or (), arguments.pop("tokenizer", None)
    stop = (stop,) if isinstance(stop, str) else stop
    settings = {name: arguments.pop(name) for name in DRAFTING if name in arguments}
    drafted = custom_generate(draft, stop=stop, streamer=streamer, tokenizer=tokenizer, **settings)
    return model.generate(custom_generate=drafted, **arguments)


class CustomGenerate:
    """The loop, to be kept as long as its model: the drafter is loaded in the first call. `stats`
    are those of the newest call (tau, accepted tokens, seconds); `stop` may be changed between two
    calls."""

    def __init__(
        self,
        drafter: DrafterLike,
        settings: Mapping[str, Any],
        *,
        stop: Sequence[str] = (),
        streamer: Streamer | None = None,
        tokenizer: Any = None,
    ) -> None:
        self._drafter, self._settings = drafter, settings
        self._streamer, self._tokenizer = streamer, tokenizer
        self._ready: tuple[Any, MovingTarget, LoadedDraft] | None = None  # of the latest model
        self.stop = tuple(stop)
        self.stats: Stats | None = None

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """[B, T]: the prompts, and behind each its answer, padded on the right. IncompatibleError
        for what no drafter can follow: beams, scores, criteria that stop whole batches."""
        return self._run(
            model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
        )

    @raises_user_errors
    def _run(
        self,
        model: Any,
        input_BT: Tensor,
        processors: Sequence[Any],
        criteria: Sequence[Any],
        config: GenerationConfig,
        given: Mapping[str, Any],
    ) -> Tensor | GenerateDecoderOnlyOutput:
        _check_mode(config, criteria)
        prompts = _prompts(input_BT, given)
        padding = [
            row[: -len(prompt)] for row, prompt in zip(input_BT.tolist(), prompts, strict=True)
        ]
        sampling = replace(_sampling(config, processors, padding, input_BT), stop=self.stop)
        target, draft = self._beside(model)
        streamer = self._streamer
        if streamer is not None and len(prompts) > 1:
            raise _refused("a streamer with several prompts", "one prompt", "leave streamer out")
        if streamer is not None:
            streamer.put(input_BT.cpu())
        with torch.inference_mode():
            made = generate(
                target,
                prompts,
                draft,
                sampling=[_behind(sampling, i, ids) for i, ids in enumerate(padding)],
                batch=len(prompts),
                on_tokens=None if streamer is None else lambda _, new: _put(streamer, new),
            )
        if streamer is not None:
            streamer.end()
        self.stats = made.stats
        if any(output.finish_reason == "context" for output in made.outputs):
            warnings.warn("a text ended where the context of the model is full", stacklevel=4)
        answers = [torch.tensor(output.token_ids) for output in made.outputs]
        answer_BT = torch.nn.utils.rnn.pad_sequence(answers, True, _padding(config))
        sequences_BT = torch.cat([input_BT, answer_BT.to(input_BT)], dim=1)
        if config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences_BT)
        return sequences_BT

    def _beside(self, model: Any) -> tuple[Target, LoadedDraft]:
        """The model as a target with its weights of this moment, and the drafter."""
        if self._ready is None or self._ready[0] is not model or not self._ready[1].is_as_made:
            tokenizer = self._tokenizer or tokenizer_of(model)
            name = str(getattr(model, "name_or_path", "") or type(model).__name__)
            moving = MovingTarget(model, tokenizer, name)
            draft = load_draft(self._drafter, moving.now(), **self._settings)
            self._ready = model, moving, draft
        _, moving, draft = self._ready
        return moving.now(), draft


def _check_mode(config: GenerationConfig, criteria: Sequence[Any]) -> None:
    """Refuse what is another search than for one text, or reads what drafted text does not have."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise _refused(str(mode.value), "greedy search, or sampling", "num_beams=1")
    for name in UNSEEN:
        if getattr(config, name, None):
            raise _refused(f"{name}=True", "token ids alone", f"leave {name} out")
    for one in criteria:
        if not isinstance(one, (MaxLengthCriteria, EosTokenCriteria)):
            raise _refused(
                f"stopping criterion {type(one).__name__}, which is made for a token a step",
                "max_new_tokens and eos_token_id",
                "specctl.custom_generate(..., stop=[...]) for strings; else leave it out",
            )


def _refused(found: str, expected: str, do: str) -> IncompatibleError:
    return IncompatibleError(
        "a drafter cannot follow these arguments of generate()",
        where="custom_generate",
        found=found,
        expected=expected,
        do=do,
    )


def _prompts(input_BT: Tensor, given: Mapping[str, Any]) -> list[list[int]]:
    """The prompts without what pads them on the left."""
    others = sorted(name for name, value in given.items() if value is not None)
    others = [name for name in others if name not in OF_THE_LOOP]
    if others or not input_BT.shape[1]:
        found = ", ".join(others) or "no token ids"
        raise _refused(f"inputs beside text: {found}", "input_ids alone", "leave them out")
    cache = given.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        raise _refused("a cache that is filled", "an empty one", "leave past_key_values out")
    mask_BT = given.get("attention_mask")
    if mask_BT is None:
        mask_BT = torch.ones_like(input_BT)
    is_read_BT = mask_BT.bool()
    if (is_read_BT[:, :-1] & ~is_read_BT[:, 1:]).any():
        raise _refused(
            "an attention_mask with gaps or with padding on the right",
            "padding on the left",
            'tokenizer.padding_side = "left"',
        )
    _check_positions(given.get("position_ids"), is_read_BT)
    return [row[kept].tolist() for row, kept in zip(input_BT, is_read_BT, strict=True)]


def _check_positions(position_BT: Tensor | None, is_read_BT: Tensor) -> None:
    if position_BT is None:
        return
    usual_BT = (is_read_BT.long().cumsum(1) - 1).expand_as(position_BT)
    if (position_BT != usual_BT)[is_read_BT.expand_as(position_BT)].any():
        raise _refused("position_ids of your own", "those of the text", "leave position_ids out")


def _sampling(
    config: GenerationConfig,
    processors: Sequence[Any],
    padding: Sequence[Sequence[int]],
    input_BT: Tensor,
) -> Sampling:
    """The settings that the prepared processors stand for. Those before the temperature are called
    as they are, at every drafted token with the text before it."""
    lengths = [len(ids) for ids in padding]
    ends = config.eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or ())
    fields: dict[str, Any] = {"temperature": 1.0 if config.do_sample else 0.0}
    called: list[Any] = []
    stage = 0  # how many of the warpers cannot come any more
    for one in processors:
        name = type(one).__name__
        at = next((i for i, (kind, _) in enumerate(WARPERS) if isinstance(one, kind)), None)
        if isinstance(one, OF_WHOLE_BATCHES):
            raise _refused(
                f"{name}, which keeps count of the steps or rows of a batch",
                "processors that read the text of a row alone",
                "leave it out",
            )
        if at is None and stage:
            raise _refused(f"{name} behind the temperature", "top_k, top_p, min_p", "leave it out")
        if at is not None:
            if at < stage:
                raise _refused(f"{name} twice, or in another order", "each once", "leave it out")
            stage = at + 1
            if config.do_sample:  # the likeliest token stays it
                field = WARPERS[at][1]
                fields[field] = getattr(one, field)
        elif (
            type(one) is RepetitionPenaltyLogitsProcessor and not called and _is_plain(one, lengths)
        ):
            fields["repetition_penalty"] = float(one.penalty)
        else:
            called.append(one)
    seed = int(torch.randint(DRAWN_SEEDS, ())) if config.do_sample else 0
    most = int(config.max_length) - input_BT.shape[1]
    return Sampling(
        max_new_tokens=most,
        stop_token_ids=tuple(map(int, ends)),
        ignore_eos=True,
        processors=tuple(called),
        seed=seed,
        **fields,
    )


def _is_plain(penalty: RepetitionPenaltyLogitsProcessor, padding: Sequence[int]) -> bool:
    """Whether it reads all of a prompt but what pads it."""
    ignored = penalty.prompt_ignore_length
    if not isinstance(ignored, Tensor):
        return ignored is None
    if ignored.tolist() == list(padding):
        return True
    raise _refused(
        "a repetition penalty that ignores another part of each prompt",
        "prompt_ignore_length: one number, or None",
        "leave prompt_ignore_length out",
    )


@dataclass(frozen=True, slots=True)
class Padded:
    """A processor that is shown texts with what padded their prompt, so that places and lengths are
    those of the batch."""

    processor: Any
    padding: tuple[int, ...]

    def __call__(self, ids_NT: Tensor, scores_NV: Tensor) -> Tensor:
        before_NT = ids_NT.new_tensor(self.padding).expand(len(ids_NT), -1)
        found: Tensor = self.processor(torch.cat([before_NT, ids_NT], dim=1), scores_NV)
        return found


def _behind(sampling: Sampling, index: int, padding: Sequence[int]) -> Sampling:
    """The settings of one row, whose processors see what pads it."""
    shown = tuple(Padded(one, tuple(padding)) for one in sampling.processors)
    return replace(sampling, seed=sampling.seed + index, processors=shown)


def _padding(config: GenerationConfig) -> int:
    pad = config.pad_token_id
    if pad is None and config.eos_token_id is not None:
        ends = config.eos_token_id
        pad = ends if isinstance(ends, int) else ends[0]
    return 0 if pad is None else int(pad)


def _put(streamer: Streamer, new: Sequence[int]) -> None:
    """One token after another: streamers hold back what is half a character."""
    for token in new:
        streamer.put(torch.tensor([token]))
