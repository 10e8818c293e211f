"""Target: a frozen language model, its tokenizer, and the identity drafters are bound to."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specctl.core.errors import IncompatibleError, one_of_two
from specctl.core.forward.attention_only import RECORDED, AttentionOnly
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Borrowed, LanguageModel
from specctl.core.messages.foreign_calls import calling_tokenizer
from specctl.core.spec import Identity, ModelSpec
from specctl.models.compiled import PATIENCE, CompiledLM
from specctl.models.hf.hf_lm import HfLM
from specctl.models.hf.hf_probe import check_reading
from specctl.models.hf.hf_spec import holds_states, spec_of
from specctl.models.hf.read_only import ReadingLM
from specctl.models.hf.spread import whole_weight
from specctl.models.llama.fast_llama import FastLlama, fast_llama_from_hf
from specctl.recipes.schema import TargetPart
from specctl.recipes.targets import resolve
from specctl.runtime.sampling.generation_config import Suggested
from specctl.runtime.target.checkpoint import Loaded, Spread, load_checkpoint
from specctl.runtime.target.placement.device import (
    FEW_BITS,
    LARGE,
    PACKED,
    choose_device,
    choose_dtype,
    refuse_idle_cuda,
)
from specctl.runtime.target.templates.chat_turns import as_taken
from specctl.runtime.target.templates.ends import NO_ENDS, EndsOfText, NamedEnds, ends_of
from specctl.runtime.target.templates.spoken_to import why_text
from specctl.runtime.target.variants.adapter import (
    Adapter,
    AppliedAdapter,
    combined_fingerprint,
    read_adapters,
    with_adapters,
)
from specctl.runtime.target.variants.few_bits import as_packed, check_alone, measured_in_few_bits
from specctl.runtime.target.variants.lora_folder import beside, load_model
from specctl.runtime.target.variants.mixture import Mixture
from specctl.runtime.target.variants.rounding import Rounding
from specctl.runtime.target.variants.row_adapters import RowAdapters
from specctl.runtime.target.variants.target_change import TargetChange
from specctl.runtime.target.vision import Vision, check_images_alone


@dataclass(frozen=True, slots=True)
class Target:
    """A model that is only ever read. `fingerprint` names its weights, whatever dtype they are
    loaded in; `inflated` is the size it was inflated to, None for the model as published;
    `changed` says how far it is from the target that a joint training made it of; `inside_of` is
    the kind of multimodal model whose text side it is; `suggested` the sampling that its checkpoint
    asks for; `adapters` what was added to the weights, in that order: `fingerprint` then covers
    them, and `base_fingerprint` is that of the weights alone; `spread` says how the weights are
    spread over devices, files or processes, None for one device; `ends` where each of `eos_ids`
    comes from; `notes` what is to be said of how its folder was read; `rounding` how far weights in
    few bits are from those that are stored, None where they are not in few bits; `mixture` the
    model beside it and the law of both, whose fingerprint is another than that of the weights
    alone; `beside` the models that write in turns with it (runtime/turns), and `lm` is then the
    target's own; `vision` what reads images for it, None where it reads text alone; `row_adapters`
    the adapters that requests choose."""

    name: str
    revision: str | None
    lm: LanguageModel
    tokenizer: Any
    fingerprint: str
    tokenizer_fingerprint: str | None
    template_digest: str | None
    eos_ids: tuple[int, ...]
    inflated: str | None = None
    changed: TargetChange | None = None
    inside_of: str | None = None
    suggested: Suggested | None = None
    adapters: tuple[AppliedAdapter, ...] = ()
    base_fingerprint: str | None = None
    spread: str | None = None
    ends: EndsOfText = NO_ENDS
    notes: tuple[str, ...] = ()
    rounding: Rounding | None = None
    mixture: Mixture | None = None
    beside: tuple[Target, ...] = ()
    vision: Vision | None = field(default=None, repr=False)
    row_adapters: RowAdapters | None = field(default=None, repr=False)

    @property
    def spec(self) -> ModelSpec:
        return self.lm.spec

    @property
    def identity(self) -> Identity:
        """What a memory of this target's token ids and habits is kept under."""
        return Identity(self.tokenizer_fingerprint, self.fingerprint)

    @property
    def end_of_turn(self) -> int | None:
        """The token that ends an answer of the assistant: what the chat template writes behind
        it, else what ends any text; None where nothing does."""
        return self._end(self.ends.of_turn, self.end_of_document)

    @property
    def end_of_document(self) -> int | None:
        """The token that ends a text that is no conversation; None where nothing does."""
        return self._end(self.ends.of_document, self.eos_ids[0] if self.eos_ids else None)

    @property
    def usual_ends(self) -> tuple[int, ...]:
        """The ends that a drafter must be able to propose, else it never proposes to stop."""
        others = set(self.ends.ids) - set(self.ends.usual)
        return tuple(end for end in self.eos_ids if end not in others)

    def _end(self, found: int | None, other: int | None) -> int | None:
        return found if found in self.eos_ids else other

    @property
    def is_chat(self) -> bool:
        """Whether a prompt is a user's turn to it where nobody says otherwise."""
        return self.why_text is None

    @property
    def why_text(self) -> str | None:
        """Why it continues prompts as texts where nobody says otherwise; None for a chat model."""
        return why_text(self.tokenizer, self.ends)

    @property
    def can_run(self) -> bool:
        """Whether it can be decoded with here; else drafters can be trained for it, no more."""
        return self.lm.can_run

    @property
    def is_recorded(self) -> bool:
        """Whether rounds are recorded on a GPU. One of ours that was loaded without is not, and
        feature-level drafters are not for it."""
        return not isinstance(self.lm, FastLlama) and self.mixture is None

    @property
    def device(self) -> torch.device:
        return self.lm.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm.dtype

    @property
    def dtype_name(self) -> str:
        """As `load_target` takes it."""
        bits = getattr(self.lm, "bits", None)
        if bits == "packed":
            return PACKED
        return f"int{bits}" if bits is not None else str(self.dtype).removeprefix("torch.")

    def new_kv(self, num_slots: int, max_len: int) -> SlotKV:
        """An empty cache for `num_slots` rows of at most `max_len` positions."""
        return self.lm.new_kv(num_slots, max_len)

    def borrowed(self) -> Borrowed:
        """The frozen embedding and LM head that a drafter may share."""
        return self.lm.borrowed()

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain text, with the special tokens the tokenizer puts in front."""
        tokenizer = self._tokenizer()
        with calling_tokenizer(f"target {self.name}"):
            return list(tokenizer.encode(text))

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Token ids of a conversation, up to where the assistant speaks next, with the `tools` that
        it may call; control tokens that are spelled in it are read as text."""
        from jinja2 import TemplateError

        from specctl.runtime.target.templates.chat_tokens import chat_tokens

        try:
            with calling_tokenizer(f"target {self.name}"):
                return chat_tokens(self, messages, tools=tools)
        except TemplateError as error:
            raise IncompatibleError(
                f"the chat template of target {self.name} does not take this conversation",
                found=str(error)[:200],
                expected="roles in an order that it knows",
                do="leave the system message out, or put it in front of the first user's",
            ) from error

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation as its template writes it, up to where the assistant speaks next. `tools`:
        functions that it may call, as OpenAI's API describes them; `variables`: what else the
        template reads, such as enable_thinking."""
        tokenizer = self._tokenizer()
        if self.template_digest is None:
            raise IncompatibleError(
                f"target {self.name} has no chat template",
                found="no template in its tokenizer",
                expected="a chat template",
                do="give plain prompts, or choose an instruction-tuned target",
            )
        from specctl.runtime.target.templates.bounded_templates import written

        return str(
            written(
                tokenizer,
                as_taken(tokenizer, messages),
                tools=list(tools) or None,
                add_generation_prompt=True,
                tokenize=False,
                **(variables or {}),
            )
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; end-of-text markers are left out."""
        spelled, tokenizer = self.ends.spelled, self._tokenizer()
        with calling_tokenizer(f"target {self.name}"):
            return str(
                tokenizer.decode(
                    [i for i in ids if i not in spelled] if spelled else list(ids),
                    skip_special_tokens=True,
                    clean_up_tokenization_spaces=False,
                )
            )

    def _tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise IncompatibleError(
                f"target {self.name} has no tokenizer",
                expected="a tokenizer beside the weights",
                do="give token ids instead of text, or load the target from a full folder",
            )
        return self.tokenizer

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any = None,
        name: str = "random",
        is_read_only: bool = False,
        named: Sequence[NamedEnds] | None = None,
        identity: str | None = None,
    ) -> Target:
        """A target around a transformers model, which is frozen and put in eval mode.
        `is_read_only`: one that cannot be run here may still be read, to train drafters for it;
        `named`: the ends of text that its file names, in the place of its configurations;
        `identity`: the fingerprint of its weights as they are stored, where they are not all here.
        """
        model.eval().requires_grad_(False)
        ends = ends_of(model, tokenizer, named)
        return cls(
            name=name,
            revision=None,
            lm=fast_llama_from_hf(model, ends.ids) or any_lm(model, ends.ids, is_read_only),
            tokenizer=tokenizer,
            fingerprint=fingerprint(model) if identity is None else identity,
            tokenizer_fingerprint=None if tokenizer is None else tokenizer_fingerprint(tokenizer),
            template_digest=None if tokenizer is None else template_digest(tokenizer),
            eos_ids=ends.ids,
            ends=ends,
        )


def any_lm(model: Any, eos_ids: tuple[int, ...] = (), is_read_only: bool = False) -> LanguageModel:
    """A model of transformers as it runs here, with recurrent states if it has some."""
    given = model.config._attn_implementation
    try:
        if not holds_states(type(model), model.config):
            return HfLM(model, eos_ids)
        from specctl.models.recurrent.state_lm import StateLM  # reads caches of newer transformers

        return StateLM(model, eos_ids)
    except IncompatibleError as error:
        if not is_read_only:
            raise
        model.set_attn_implementation(given)  # as it is read by transformers
        read = ReadingLM(model, eos_ids, error.found or error.what)
        check_reading(model)
        return read


def load_target(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    inflate: str | None = None,
    offline: bool = False,
    compile: bool | None = False,
    adapters: Sequence[str] = (),
    is_read_only: bool = False,
    device_map: str | None = None,
    tensor_parallel: bool = False,
    is_widened: bool = False,
    wanted: Sequence[AttentionOnly] = (),
    images: bool = False,
) -> Target:
    """The target called `name`: an alias such as "tiny" or "llama3-8b", a local folder or GGUF
    file, or a hub id. `inflate` names a size ("100m", "300m", "1b", "8b") to which a Llama-shaped
    target is blown up without changing its distribution, for measurements of speed. `compile`: its
    rounds are recorded in fixed shapes and replayed (CUDA graphs, torch.compile on the CPU); None:
    on a GPU, where the forward is our own, each shape that comes again. `adapters`: folders of LoRA
    adapters as peft writes them, each FOLDER or FOLDER@WEIGHT, added in order.
    `is_read_only`: also an architecture that cannot be run here, to train drafters for it.
    `device_map`: auto, balanced, cpu-offload, or a map as JSON text or in a file, by which its
    layers are spread over devices, host memory and files. `tensor_parallel`: over the processes of
    torchrun, which then all do the same; either way the forward is transformers' own.
    `dtype` "int8" or "int4": weights of 8 or 4 bits, another model than the published one
    (few_bits.py); "gguf": a GGUF file's matrices as it packs them, which "auto" takes on a CPU that
    reads them so, but where `is_widened`, to train with. `wanted`: what needs attention only.
    `images`: a multimodal target with its vision (vision.py); else its text side alone."""
    spread = Spread(device_map, tensor_parallel)
    _check_spread(spread, inflate, compile, adapters)
    check_alone(dtype, compile, spread.is_asked, inflate, adapters)
    if images:
        few = dtype if dtype in FEW_BITS or dtype == PACKED else None
        check_images_alone(compile, inflate, adapters, few, spread.is_asked)
    added = read_adapters(adapters)
    resolved = resolve(name, revision)
    if device == "auto":
        refuse_idle_cuda()
    where = choose_device(device)
    first = "float32" if inflate is not None else dtype
    is_packed = not (is_widened or compile or added)
    wanted = (RECORDED, *wanted) if compile else wanted
    how = first, where, offline, is_read_only, spread, is_packed, wanted, images
    found = load_model(resolved, lambda one: load_checkpoint(one, *how), offline)
    loaded = found.loaded
    if found.folders:
        adapters = beside(found.folders, adapters)
        _check_spread(spread, inflate, compile, adapters)
        added = read_adapters(adapters)
    target = _adapted(loaded, name, is_read_only, added)
    target = replace(
        target,
        revision=loaded.revision,
        inside_of=loaded.inside_of,
        suggested=loaded.suggested,
        spread=loaded.spread,
        notes=loaded.notes,
    )
    if loaded.whole is not None:
        target = replace(target, vision=Vision.beside(loaded.whole, target.lm))
    if loaded.packed is not None:
        target = as_packed(target, loaded.packed)
    del found, loaded  # what is released of the weights below is to be freed
    if inflate is not None:
        from specctl.runtime.target.variants.inflate import inflate as blow_up

        target = blow_up(target, inflate, choose_dtype(dtype, where, num_parameters=LARGE))
    if dtype in FEW_BITS:
        target = measured_in_few_bits(target, FEW_BITS[dtype])
    if compile is None and where.type == "cuda" and isinstance(target.lm, FastLlama):
        return replace(target, lm=CompiledLM(target.lm, patience=PATIENCE))
    return replace(target, lm=CompiledLM(target.lm)) if compile else target


def load_part(part: TargetPart, **more: Any) -> Target:
    """The target that a recipe names; `more` is for `load_target`, before what the recipe says."""
    asked = {name: getattr(part, name) for name in TargetPart.model_fields if name != "name"}
    return load_target(part.name, **{**asked, **more})


def _check_spread(
    spread: Spread, inflate: str | None, compile: bool | None, adapters: Sequence[str]
) -> None:
    """Refuse what needs all weights on one device."""
    words = {"--inflate": inflate, "target.compile": compile, "--adapter": adapters}
    given = [flag for flag, value in words.items() if value]
    if spread.is_asked and given:
        raise one_of_two(
            f"{given[0]} needs all weights of the target on one device",
            f"{given[0]} and target."
            + ("tensor_parallel" if spread.tensor_parallel else "device_map"),
            "merge the adapter first (peft: merge_and_unload, save_pretrained) and give that folder"
            if given[0] == "--adapter"
            else f"leave out {given[0]}",
        )


def _adapted(loaded: Loaded, name: str, is_read_only: bool, added: Sequence[Adapter]) -> Target:
    """A target around a model with these adapters: merged where our own forward runs it."""
    model, tokenizer, named = loaded.model, loaded.tokenizer, loaded.named
    if not added:
        return Target.from_model(model, tokenizer, name, is_read_only, named, _base(loaded))
    base = _base(loaded)
    is_fast = fast_llama_from_hf(model) is not None
    model = with_adapters(model, added, is_merged=is_fast)
    applied = tuple(one.applied for one in added)
    whole = combined_fingerprint(base, applied)
    made = Target.from_model(model, tokenizer, name, is_read_only, named, whole)
    return replace(made, adapters=applied, base_fingerprint=base)


def _base(loaded: Loaded) -> str:
    """The fingerprint of the weights as they are stored, without adapters."""
    stored = loaded.stored
    if stored is None:
        return fingerprint(loaded.model)
    return fingerprint_of(loaded.model.config, stored.shapes, stored.piece)


_CONFIG_FIELDS = (
    "model_type",
    "num_layers",
    "hidden_size",
    "vocab_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "norm_eps",
    "rope_theta",
)
_SLICE = 64
_NUM_SLICES = 4


def fingerprint(model: Any) -> str:
    """sha256 over the shape of the model and samples of every weight, in name order.

    Samples are hashed as bfloat16, so that one checkpoint has one fingerprint in every dtype.
    """
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}

    @lru_cache(maxsize=1)  # one that is spread is brought together once, and let go
    def flat(name: str) -> Tensor:
        return whole_weight(model, name).reshape(-1)

    return fingerprint_of(model.config, shapes, lambda name, at, n: flat(name)[at : at + n].cpu())


def fingerprint_of(
    config: Any,
    shapes: Mapping[str, Sequence[int]],
    piece: Callable[[str, int, int], Tensor],
) -> str:
    """The fingerprint of weights that need not be in memory: `piece(name, start, count)` gives
    numbers of the flattened weight."""
    spec = spec_of(config).to_json()
    about = {k: spec[k] for k in _CONFIG_FIELDS} | _rope_fields(config.get_text_config())
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, shape in sorted(shapes.items()):
        digest.update(f"{name}:{tuple(shape)}:".encode())
        last = max(math.prod(shape) - _SLICE, 0)
        starts = sorted({last * i // (_NUM_SLICES - 1) for i in range(_NUM_SLICES)})
        count = min(_SLICE, math.prod(shape))
        parts = torch.cat([piece(name, at, count) for at in starts])
        digest.update(
            parts.to(torch.bfloat16).cpu().view(torch.int16).numpy().astype("<i2").tobytes()
        )
    return digest.hexdigest()


def _rope_fields(text: Any) -> dict[str, Any]:
    """Numbers that change positions or reach; default rope adds nothing."""
    rope = getattr(text, "rope_parameters", None) or {}
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    found = {k: rope[k] for k in names if rope.get(k) is not None}
    window = getattr(text, "sliding_window", None)
    return found if window is None else {**found, "sliding_window": window}


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """sha256 over all of a tokenizer that decides which ids a text becomes."""
    body: dict[str, Any] = {"vocab": sorted(tokenizer.get_vocab().items())}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        full = json.loads(backend.to_str())
        body["merges"] = full["model"].get("merges")
        body |= {k: full.get(k) for k in ("added_tokens", "normalizer", "pre_tokenizer")}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def template_digest(tokenizer: Any) -> str | None:
    """sha256 of the chat template, None without one."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
