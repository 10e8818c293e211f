"""Everything that reads a checkpoint, of transformers or in GGUF: what is refused, and what it
loads.

Refused before transformers sees the folder: code in the checkpoint (`auto_map`), weights that are
only pickled. Refused before weights are read: architectures that cannot be run in rounds.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from specctl.core.errors import (
    IncompatibleError,
    IntegrityError,
    SpecctlError,
    is_out_of_memory,
    one_of_two,
)
from specctl.core.forward.attention_only import AttentionOnly
from specctl.core.language_model import LanguageModel
from specctl.core.spec import check_spec
from specctl.models.compiled import CompiledLM
from specctl.models.hf.hf_spec import refuse_stateful, refuse_with_states, spec_of
from specctl.models.llama.fast_llama import FastLlama
from specctl.models.native.packed import TYPES, PackedWeights
from specctl.recipes.targets import ResolvedTarget
from specctl.runtime.sampling.generation_config import Suggested, read_suggested
from specctl.runtime.target.folders import hub
from specctl.runtime.target.folders.checkpoint_folder import (
    check_size,
    foreign_config,
    from_folder,
    read_settings,
    stored_names,
    stored_shapes,
    straight_to,
    weight_files,
)
from specctl.runtime.target.folders.folder_tokenizer import load_tokenizer
from specctl.runtime.target.folders.stored_names import wrapper_note
from specctl.runtime.target.gguf.model import GgufFile, model_of, open_gguf, rounding_note
from specctl.runtime.target.gguf.packed import (
    is_packed,
    packed_bytes,
    packed_note,
    packed_weights,
    why_not_packed,
)
from specctl.runtime.target.gguf.tokens import named_in, tokenizer_of
from specctl.runtime.target.gguf.weights import GgufWeights
from specctl.runtime.target.multimodal import is_multimodal, load_text_side, text_config
from specctl.runtime.target.placement.device import PACKED, check_memory, choose_dtype
from specctl.runtime.target.placement.placement import Placement, place_target, read_device_map
from specctl.runtime.target.placement.quantised import (
    check_places,
    is_widened,
    quantisation,
    resident_bytes,
    stored_by_name,
)
from specctl.runtime.target.placement.tensor_parallel import (
    bytes_of_process,
    check_launched,
    check_plan,
    local_device,
    parallel_fields,
)
from specctl.runtime.target.templates.ends import NamedEnds
from specctl.runtime.target.vision import WholeModel, load_processor, no_vision

UNBUILDABLE = "transformers cannot build this configuration"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint in memory, the commit it came from where that is known, the kind of the
    multimodal model whose text side it is (None: it is the whole model), and the sampling that it
    asks for. `spread`: how its weights are spread, None for one device; `notes`: what is to be said
    of how it was read. Of a GGUF file: the ends that it `named`; the numbers that it has `stored`,
    which may be rounded in the model; and the matrices that are held as they are `packed`, which
    the model is then without. `whole`: the multimodal model, where its vision is wanted."""

    model: Any
    tokenizer: Any
    revision: str | None
    inside_of: str | None
    suggested: Suggested | None = None
    spread: str | None = None
    notes: tuple[str, ...] = ()
    named: tuple[NamedEnds, ...] | None = None
    stored: GgufWeights | None = None
    packed: PackedWeights | None = None
    whole: WholeModel | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """How a target's weights are to be spread: by a device map (see `placement`), or over the
    processes of torchrun."""

    device_map: str | None = None
    tensor_parallel: bool = False

    def __post_init__(self) -> None:
        if self.device_map is not None:
            read_device_map(self.device_map)
        if self.device_map is not None and self.tensor_parallel:
            raise one_of_two(
                "a device map and tensor parallelism were both asked for",
                f"target.device_map={self.device_map} and target.tensor_parallel",
                "leave out target.tensor_parallel (several processes) or target.device_map (one)",
            )
        if self.tensor_parallel:
            check_launched()

    @property
    def is_asked(self) -> bool:
        return self.device_map is not None or self.tensor_parallel


NOWHERE = Spread()


def load_checkpoint(
    resolved: ResolvedTarget,
    dtype: str = "auto",
    device: torch.device | None = None,
    offline: bool = False,
    is_read_only: bool = False,
    spread: Spread = NOWHERE,
    may_be_packed: bool = True,
    wanted: Sequence[AttentionOnly] = (),
    images: bool = False,
) -> Loaded:
    """Model and tokenizer of a resolved name; every failure says what to do next. One that is only
    read need not be fit to be run. `may_be_packed`: with dtype "auto" the matrices of a GGUF file
    are held as it packs them, where that can be had; `wanted`: what needs attention alone;
    `images`: the vision of a multimodal model is kept."""

    def check(folder: Path) -> Any:
        return check_config(folder, is_read_only, wanted)

    device = device or torch.device("cpu")
    resolved = hub.with_file(resolved, offline)
    if resolved.file is not None:
        if images:
            raise no_vision(resolved.name, None)
        return _load_gguf(resolved, resolved.file, dtype, device, spread, may_be_packed)
    if dtype == PACKED:
        raise IncompatibleError(
            f"the weights of target {resolved.name} are not packed as in a GGUF file",
            found=f"--dtype {PACKED}, and safetensors",
            expected="a GGUF file",
            do="--dtype int8, which packs them here, or --dtype auto",
        )
    folder = resolved.path or hub.download(resolved, offline, check)
    config = check_folder(folder, is_read_only, wanted)
    device = local_device(device) if spread.tensor_parallel else device
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    count = sum(p.stat().st_size for p in weight_files(folder)) // stored.itemsize
    chosen = choose_dtype(dtype, device, stored, count)
    what = f"the target {resolved.name}"
    fields, said = straight_to(device), None
    if spread.is_asked:
        fields, said = _spread_fields(config, folder, spread, device, chosen, what)
    else:
        need = count * chosen.itemsize
        if quantisation(config) is not None:
            files, count = weight_files(folder), num_parameters(config)
            need = resident_bytes(config, files, count, chosen.itemsize, device, str(folder))
        check_memory(need, chosen, device, what)
    suggested = read_suggested(folder)
    tokenizer = load_tokenizer(folder, config)
    kind = config.model_type if is_multimodal(config) else None
    if images and kind is None:
        is_whole = type(config) in AutoModelForImageTextToText._model_mapping
        raise no_vision(resolved.name, config.model_type if is_whole else None, False)
    processor = load_processor(folder, config) if images else None
    if processor is not None and not tokenizer.chat_template:
        tokenizer.chat_template = getattr(processor, "chat_template", None)
    model, full = _load_model(folder, chosen, kind is not None, fields)
    whole = None if processor is None else WholeModel(full, processor)
    commit = folder.name if resolved.path is None and folder.parent.name == "snapshots" else None
    note = wrapper_note(stored_names(weight_files(folder)))
    notes = (f"{resolved.name}: {note}",) if note else ()
    about = commit or resolved.revision, kind, suggested, said, notes
    return Loaded(model, tokenizer, *about, whole=whole)


def _load_gguf(
    resolved: ResolvedTarget,
    path: Path,
    dtype: str,
    device: torch.device,
    spread: Spread,
    may_be_packed: bool,
) -> Loaded:
    file = open_gguf(path)
    if spread.is_asked:
        raise IncompatibleError(
            f"the target {resolved.name} is a GGUF file, which is read whole on one device",
            where=str(path),
            found="target.tensor_parallel" if spread.tensor_parallel else "target.device_map",
            expected="a folder of safetensors, to spread it",
            do="give the folder of safetensors that the file was made from, or leave it on one "
            "device",
        )
    tokenizer = tokenizer_of(file.header)
    is_packed = _is_held_packed(resolved, file, dtype, device, may_be_packed)
    wanted = choose_dtype(PACKED if is_packed else dtype, device, None, file.num_parameters)
    need = packed_bytes(file) if is_packed else file.num_parameters * wanted.itemsize
    check_memory(need, wanted, device, f"the target {resolved.name}")
    note = packed_note(file) if is_packed else rounding_note(file, wanted)
    source = [hub.installed_note(resolved)] if resolved.installed is not None else []
    return Loaded(
        model_of(file, wanted, device, is_packed),
        tokenizer,
        resolved.revision,
        None,
        notes=(*source, *([] if note is None else [note])),
        named=tuple(named_in(file.header)),
        stored=file.weights,
        packed=packed_weights(file) if is_packed else None,
    )


def _is_held_packed(
    resolved: ResolvedTarget, file: GgufFile, dtype: str, device: torch.device, may_be_packed: bool
) -> bool:
    """Whether its matrices are held as the file packs them. Raises where that was asked for and
    cannot be had."""
    if dtype == "auto":
        return may_be_packed and is_packed(file) and why_not_packed(file, device) is None
    why = why_not_packed(file, device) if dtype == PACKED else None
    if why is not None:
        raise IncompatibleError(
            f"target {resolved.name} cannot be read as it is packed here",
            found=why,
            expected=f"matrices in {', '.join(TYPES)} and a CPU with AVX2 and a compiler",
            do="--dtype float32",
            where=str(file.header.path),
        )
    return dtype == PACKED


def _spread_fields(
    config: Any,
    folder: Path,
    spread: Spread,
    device: torch.device,
    dtype: torch.dtype,
    what: str,
) -> tuple[dict[str, Any], str | None]:
    """What `from_pretrained` is told of places or processes, once every place has room for its
    part, and how it is said; None where all of it is on one device."""
    if is_multimodal(config):
        raise IncompatibleError(
            f"{what} is inside a multimodal model, which is read whole on one device",
            where=str(folder),
            found="target.tensor_parallel" if spread.tensor_parallel else "target.device_map",
            expected="a language model alone, to spread it",
            do="let a server that has it answer (--endpoint), or save the language model alone",
        )
    if spread.tensor_parallel:
        size = check_launched()
        check_plan(config, size)
        check_memory(bytes_of_process(config, size, dtype.itemsize), dtype, device, what)
        return parallel_fields(size), f"tensor parallel over {size} processes"
    kept = None
    if quantisation(config) is not None and not is_widened(config, device, str(folder)):
        kept = stored_by_name(weight_files(folder))
    assert spread.device_map is not None
    with foreign_config(UNBUILDABLE, str(folder / "config.json")):
        placed: Placement = place_target(config, spread.device_map, device, dtype.itemsize, kept)
    placed.check(what)
    fields = placed.fields()
    if quantisation(config) is not None:
        check_places(config, fields["device_map"], str(folder))
    return fields, None if placed.is_one else placed.text()


def check_folder(
    folder: Path, is_read_only: bool = False, wanted: Sequence[AttentionOnly] = ()
) -> Any:
    """The transformers configuration of a folder that may be loaded; raises for every other."""
    config = check_config(folder, is_read_only, wanted)
    shapes = stored_shapes(weight_files(folder))
    where = str(folder / "config.json")
    with foreign_config(UNBUILDABLE, where):
        check_size(text_config(config) if is_multimodal(config) else config, shapes, where)
    return config


def num_parameters(config: Any) -> int:
    """Of the causal language model of a configuration, counted without storage."""
    text = text_config(config) if is_multimodal(config) else config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text)
    return sum(part.numel() for part in model.parameters())


def check_config(
    folder: Path, is_read_only: bool = False, wanted: Sequence[AttentionOnly] = ()
) -> Any:
    """The configuration of a folder whose weights need not be there yet."""
    config = _read_config(folder, read_settings(folder), is_read_only)
    refuse_with_states(config, wanted, str(folder / "config.json"))
    return config


def _read_config(folder: Path, raw: dict[str, Any], is_read_only: bool) -> Any:
    kind, where = raw.get("model_type"), str(folder / "config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a bad or unknown config
        raise IncompatibleError(
            f"transformers does not read this configuration (model_type {kind!r})",
            found=str(error).split("\n")[0][:160],
            expected="a model type known to the installed transformers",
            do="pip install -U transformers, or choose another target",
            where=where,
        ) from error
    with foreign_config(UNBUILDABLE, where):
        check_causal(config, where, is_read_only)
        check_spec(spec_of(config))
    return config


def check_causal(config: Any, where: str, is_read_only: bool = False) -> None:
    """Refuse what is no causal language model, or, unless it is only read, one that cannot be run
    in rounds."""
    text = text_config(config) if is_multimodal(config) else config
    try:
        model_class = AutoModelForCausalLM._model_mapping[type(text)]
    except KeyError:
        kind = config.model_type
        raise IncompatibleError(
            f"{kind} is not a causal language model",
            found=f"model_type {kind!r}",
            expected="a decoder-only model that transformers loads with AutoModelForCausalLM",
            do="choose a causal language model, or a multimodal one around a Llama, Qwen or Gemma",
            where=where,
        ) from None
    refuse_stateful(model_class, text, is_read_only, may_hold=True)


def _load_model(
    folder: Path, dtype: torch.dtype, has_more_than_text: bool, fields: Mapping[str, Any]
) -> tuple[Any, Any]:
    """The weights go from their files to their places one by one (`fields`): no process holds the
    whole model in host memory on the way. The causal model, and the one that it was taken out of.
    """
    full = None
    dispatch = getLogger("accelerate.big_modeling")
    level = dispatch.level
    dispatch.setLevel(ERROR)  # it warns that a device map does what it says
    try:
        if has_more_than_text:
            model, full, info = load_text_side(folder, dtype, fields)
        else:
            model, info = from_folder(
                AutoModelForCausalLM,
                folder,
                dtype=dtype,
                output_loading_info=True,
                **fields,
            )
    except SpecctlError:
        raise
    except Exception as error:  # a foreign checkpoint through a foreign reader: any type may come
        if is_out_of_memory(error):
            raise
        raise IntegrityError(
            "the weights cannot be loaded",
            found=str(error).split("\n")[0][:160],
            do="fetch the checkpoint again; quantised checkpoints need their own library",
            where=str(folder),
        ) from error
    finally:
        dispatch.setLevel(level)
    _check_complete(info, folder)
    return model, full


def _check_complete(info: Any, folder: Path) -> None:
    wrong = sorted(info["missing_keys"]) or sorted(str(m) for m in info.get("mismatched_keys", ()))
    if wrong:
        raise IntegrityError(
            "the checkpoint does not hold every weight of its configuration",
            found=f"{len(wrong)} missing or of another shape, first {wrong[0]}",
            expected="one tensor for each parameter",
            do="fetch the checkpoint again",
            where=str(folder),
        )


def as_transformers(lm: LanguageModel) -> Any:
    """transformers' own model over the very same parameters: the baseline of benchmarks and the
    oracle of tests. No weight is copied."""
    lm = lm.lm if isinstance(lm, CompiledLM) else lm
    if not isinstance(lm, FastLlama):
        return lm.module
    module, config = lm.module, _config_of(lm)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=lm.dtype)
    for name, parameter in module.named_parameters():
        owner, leaf = name.rsplit(".", 1)
        setattr(model.get_submodule(owner), leaf, parameter)
    model.lm_head.weight = module.head_weight
    rotary = type(model.model.rotary_emb)(config=config).to(lm.device)
    rotary.inv_freq = module.rotary.inv_freq.to(lm.device)
    rotary.attention_scaling = module.rotary.scale
    model.model.rotary_emb = rotary
    for name, part in model.named_modules():
        if name.endswith(("q_norm", "k_norm")):
            part.variance_epsilon = module.shape.qk_norm_eps or module.shape.norm_eps
    return model.eval()


def _config_of(lm: FastLlama) -> Any:
    """The configuration that the weights came with, else one of their shape."""
    if lm.config is None:
        return _llama_config(lm)
    config = copy.deepcopy(lm.config)
    config.eos_token_id = list(lm.spec.eos_ids) or None
    return config


def _llama_config(lm: FastLlama) -> Any:
    shape, spec = lm.module.shape, lm.spec
    assert shape.out_size is None, "transformers has no trimmed head"
    kind = "mistral" if shape.window is not None else "llama"
    if shape.attention_bias and not shape.output_bias:
        kind = "qwen2"
    return AutoConfig.for_model(
        "qwen3" if shape.qk_norm else kind,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        rms_norm_eps=shape.norm_eps,
        rope_theta=shape.rope_theta,
        tie_word_embeddings=shape.tied,
        attention_bias=shape.attention_bias,
        max_position_embeddings=spec.max_positions,
        bos_token_id=spec.bos_id,
        eos_token_id=list(spec.eos_ids) or None,
        pad_token_id=spec.pad_id,
        **({"sliding_window": shape.window} if kind == "mistral" else {}),
    )
