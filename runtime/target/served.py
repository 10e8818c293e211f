"""A target whose weights are elsewhere: in an engine that serves it, or in files of its states.

Training a drafter needs the states and logits of a target. Where both come from outside, the
configuration, the tokenizer and three tensors suffice: embedding, final norm and LM head, read by
name from the safetensors index (or a GGUF file), straight to the device, when they are first
needed. Nothing of the layers is read but the few numbers that go into the fingerprint, which is
that of the loaded target.
Letters: D hidden width, V target vocabulary, X any axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from specctl.core.errors import IncompatibleError, IntegrityError
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Borrowed, Feed, LanguageModel, LmOut
from specctl.models.hf.hf_spec import head_scale, spec_of
from specctl.recipes.targets import ResolvedTarget, resolve
from specctl.runtime.sampling.generation_config import read_suggested
from specctl.runtime.target.checkpoint import (
    UNBUILDABLE,
    check_config,
    check_folder,
)
from specctl.runtime.target.folders import hub
from specctl.runtime.target.folders.checkpoint_folder import foreign_config, weight_files
from specctl.runtime.target.folders.folder_tokenizer import load_tokenizer
from specctl.runtime.target.gguf.model import GgufFile, open_gguf
from specctl.runtime.target.gguf.tokens import named_in, tokenizer_of
from specctl.runtime.target.gguf.weights import GgufWeights
from specctl.runtime.target.placement.device import choose_device, choose_dtype
from specctl.runtime.target.target import (
    Target,
    fingerprint_of,
    template_digest,
    tokenizer_fingerprint,
)
from specctl.runtime.target.templates.ends import EndsOfText, ends_of

# Experts as transformers holds them -> the matrices of one expert, as files have them.
EXPERTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")
CAPS = (  # what is done to logits behind the product
    "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap",
)  # fmt: skip


class StoredWeights:
    """The tensors of a checkpoint folder by the names of its model, read in pieces."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place: dict[str, Path] = {}
        self._files: dict[Path, Any] = {}
        self._names: dict[tuple[str, tuple[int, ...]], str | None] = {}
        for path in weight_files(folder):
            self._files[path] = safe_open(path, framework="pt")
            self.place |= dict.fromkeys(self._files[path].keys(), path)

    def whole(self, name: str, shape: Sequence[int], device: torch.device) -> Tensor:
        """A tensor on the device."""
        key = self._stored(name, shape)
        if key is None:
            raise self._missing(name, shape)
        with safe_open(self.place[key], framework="pt", device=str(device)) as file:
            found: Tensor = file.get_tensor(key)
            return found

    def flat(self, name: str, shape: Sequence[int], start: int, count: int) -> Tensor:
        """`count` numbers from place `start` of the flattened tensor; only their rows are read."""
        width = shape[-1]
        first, last = start // width, -(-(start + count) // width)
        begin = start - first * width
        return self._rows(name, shape, first, last).reshape(-1)[begin : begin + count]

    def _rows(self, name: str, shape: Sequence[int], first: int, last: int) -> Tensor:
        """Rows of a tensor whose axes but the last are counted as one."""
        key = self._stored(name, shape)
        if key is not None and len(shape) > 2:
            inner = math.prod(shape[1:-1])
            begin, end = first // inner, -(-last // inner)
            found = self._slice(key, begin, end).flatten(0, -2)
            return found[first - begin * inner : last - begin * inner]
        if key is not None:
            return self._slice(key, *((0, shape[0]) if len(shape) == 1 else (first, last)))
        return torch.cat([self._expert_row(name, shape, row) for row in range(first, last)])

    def _slice(self, key: str, first: int, last: int) -> Tensor:
        found: Tensor = self._files[self.place[key]].get_slice(key)[first:last]
        return found

    def _expert_row(self, name: str, shape: Sequence[int], row: int) -> Tensor:
        """A row of experts that the model holds as one tensor and the files one by one."""
        expert, inner = divmod(row, shape[1])
        owner, _, leaf = name.rpartition(".")
        for parts in EXPERTS.get(leaf, ()):
            height = shape[1] // len(parts)
            part, at = parts[inner // height], inner % height
            key = self._stored(f"{owner}.{expert}.{part}.weight", (height, shape[2]))
            if key is not None:
                return self._slice(key, at, at + 1)
        raise self._missing(name, shape)

    def _stored(self, name: str, shape: Sequence[int]) -> str | None:
        """The name in the files of a parameter of the model. Its prefix may be another (a text
        model inside a larger one); one of another shape is none."""
        key = (name, tuple(shape))
        if key not in self._names:
            self._names[key] = self._find(*key)
        return self._names[key]

    def _find(self, name: str, shape: tuple[int, ...]) -> str | None:
        for known in (name, name.replace(".mlp.", ".block_sparse_moe.")):
            tail = "." + known.removeprefix("model.")
            for key in [known] if known in self.place else self.place:
                if ("." + key).endswith(tail) and self._shape(key) == shape:
                    return key
        return None

    def _shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._files[self.place[key]].get_slice(key).get_shape())

    def _missing(self, name: str, shape: Sequence[int]) -> IncompatibleError:
        return IncompatibleError(
            "the checkpoint stores its weights otherwise than transformers holds them",
            where=str(self.folder),
            found=f"no tensor {name} of shape {list(shape)}",
            expected="one tensor for each parameter of the model, or for each expert",
            do="train with the target in this process",
        )


class ServedLM(LanguageModel):
    """Embedding, final norm and LM head of a model that cannot be asked for anything else."""

    module: Any  # transformers' model, without storage
    can_run = False

    def __init__(
        self,
        config: Any,
        weights: StoredWeights | GgufWeights,
        eos_ids: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config, self.weights = config, weights
        self.spec = spec_of(config, eos_ids)
        with foreign_config(UNBUILDABLE, str(weights.folder)), torch.device("meta"):
            self.module = AutoModelForCausalLM.from_config(config)
        self._dtype, self._device = dtype, device
        self._borrowed: Borrowed | None = None
        self._norm: nn.Module | None = None

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def has_plain_head(self) -> bool:
        """True where logits are the normed state times the head (`borrowed`), and nothing more."""
        text = self.config.get_text_config()
        return not any(getattr(text, name, None) for name in CAPS)

    def run(self, feed: Feed, kv: SlotKV | None) -> LmOut:
        raise self._elsewhere("one of its forwards")

    def new_kv(self, num_slots: int, max_len: int) -> SlotKV:
        raise self._elsewhere("to generate")

    def _elsewhere(self, found: str) -> IncompatibleError:
        return IncompatibleError(
            "the target's layers are not in this process",
            found=f"something asked the target for {found}",
            expected="states from the endpoint or from files",
            do="load the target here",
        )

    def borrowed(self) -> Borrowed:
        if self._borrowed is None:
            head: Any = self.module.get_output_embeddings()
            embedding = self._read(self.module.get_input_embeddings().weight)
            head_VD = embedding if self._is_tied() else self._read(head.weight)
            bias = getattr(head, "bias", None)
            scale = head_scale(self.config)
            self._borrowed = Borrowed(
                embedding,
                head_VD if scale == 1.0 else head_VD * scale,
                self.spec.embed_scale,
                None if bias is None else self._read(bias),
            )
        return self._borrowed

    @torch.no_grad()
    def normed(self, state_XD: Tensor) -> Tensor:
        """Last states behind the final norm, as the tap `num_layers` is; an engine hands them out
        before it."""
        if self._norm is None:
            self._norm = self._final_norm()
        found: Tensor = self._norm(state_XD.to(self._device, self._dtype))
        return found

    def _is_tied(self) -> bool:
        head = self.module.get_output_embeddings()
        return head.weight is self.module.get_input_embeddings().weight

    def _final_norm(self) -> nn.Module:
        inner = self.module.base_model
        inner = getattr(inner, "decoder", inner)
        for name in NORMS:
            norm = getattr(inner, name, None)
            if isinstance(norm, nn.Module):
                for leaf, parameter in list(norm.named_parameters(recurse=False)):
                    made = nn.Parameter(self._read(parameter), requires_grad=False)
                    setattr(norm, leaf, made)
                return norm
        raise IncompatibleError(
            f"the final norm of {type(self.module).__name__} is not found",
            expected="one of " + ", ".join(NORMS),
            do="train with the target in this process",
        )

    def _read(self, parameter: Tensor) -> Tensor:
        """The stored numbers of a parameter of the model, on the device and in its dtype."""
        named = self.module.named_parameters(remove_duplicate=False)
        name = next(name for name, each in named if each is parameter)
        found = self.weights.whole(name, parameter.shape, self._device)
        return found.to(self._dtype)


def load_served(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    offline: bool = False,
) -> Target:
    """The target of that name without its layers: tokenizer, identity, embedding, norm, head."""
    resolved, where = hub.with_file(resolve(name, revision), offline), choose_device(device)
    if resolved.file is not None:
        return _of_file(resolved, open_gguf(resolved.file), dtype, where)
    folder = resolved.path or hub.download(resolved, offline, _check_config)
    config = check_folder(folder, is_read_only=True)
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    weights = StoredWeights(folder)
    tokenizer = load_tokenizer(folder, config)
    count = sum(path.stat().st_size for path in weight_files(folder)) // stored.itemsize
    lm = ServedLM(config, weights, (), choose_dtype(dtype, where, stored, count), where)
    ends = ends_of(_with_generation(lm.module, folder), tokenizer)
    commit = folder.name if resolved.path is None and folder.parent.name == "snapshots" else None
    target = _around(resolved, lm, tokenizer, ends, _fingerprint(lm, weights))
    return replace(target, revision=commit or resolved.revision, suggested=read_suggested(folder))


def _of_file(resolved: ResolvedTarget, file: GgufFile, dtype: str, device: torch.device) -> Target:
    tokenizer = tokenizer_of(file.header)
    wanted = choose_dtype(dtype, device, None, file.num_parameters)
    lm = ServedLM(file.config, file.weights, (), wanted, device)
    ends = ends_of(lm.module, tokenizer, named_in(file.header))
    identity = fingerprint_of(file.config, file.weights.shapes, file.weights.piece)
    return _around(resolved, lm, tokenizer, ends, identity)


def _around(
    resolved: ResolvedTarget, lm: ServedLM, tokenizer: Any, ends: EndsOfText, identity: str
) -> Target:
    lm.spec = spec_of(lm.config, ends.ids)
    return Target(
        name=resolved.name,
        revision=resolved.revision,
        lm=lm,
        tokenizer=tokenizer,
        fingerprint=identity,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        template_digest=template_digest(tokenizer),
        eos_ids=ends.ids,
        ends=ends,
    )


def _check_config(folder: Path) -> Any:
    """Of a target that is never run here, only read."""
    return check_config(folder, is_read_only=True)


def _with_generation(module: Any, folder: Path) -> Any:
    """The model without storage, knowing how the checkpoint generates."""
    from transformers import GenerationConfig

    if (folder / "generation_config.json").exists():
        module.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return module


def _fingerprint(lm: ServedLM, weights: StoredWeights) -> str:
    shapes: Mapping[str, Sequence[int]] = {
        name: tuple(parameter.shape) for name, parameter in lm.module.named_parameters()
    }

    def piece(name: str, start: int, count: int) -> Tensor:
        return weights.flat(name, shapes[name], start, count)

    try:
        return fingerprint_of(lm.config, shapes, piece)
    except (OSError, ValueError) as error:
        raise IntegrityError(
            "the weights cannot be read",
            where=str(weights.folder),
            found=str(error).split("\n")[0][:160],
            do="fetch the checkpoint again",
        ) from error
