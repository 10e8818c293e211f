"""A target whose weights are elsewhere: in an engine that serves it, or in files of its states.

Training a drafter asks a target for its states and logits. Where both come from outside, the
configuration, the tokenizer and three tensors suffice: embedding, final norm and LM head, read by
name from the safetensors index, straight to the device, when they are first asked for. Nothing of
the layers is read but the few numbers that go into the fingerprint, which is that of the loaded
target.
Letters: D hidden width, V target vocabulary, X any axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from specctl.core.errors import IncompatibleError, IntegrityError
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Borrowed, Feed, LanguageModel, LmOut
from specctl.models.hf_spec import head_scale, spec_of
from specctl.recipes.targets import resolve
from specctl.runtime.sampling.generation_config import read_suggested
from specctl.runtime.target import hub
from specctl.runtime.target.checkpoint import (
    UNBUILDABLE,
    check_config,
    check_folder,
    load_tokenizer,
)
from specctl.runtime.target.checkpoint_folder import foreign_config, weight_files
from specctl.runtime.target.device import choose_device, choose_dtype
from specctl.runtime.target.target import (
    Target,
    eos_ids_of,
    fingerprint_of,
    template_digest,
    tokenizer_fingerprint,
)

NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")
CAPS = ("final_logit_softcapping", "logits_soft_cap")  # what is done to logits behind the product


class StoredWeights:
    """The tensors of a checkpoint folder by the names of its model, read in pieces."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place: dict[str, Path] = {}
        for path in weight_files(folder):
            with safe_open(path, framework="pt") as file:
                self.place |= dict.fromkeys(file.keys(), path)

    def stored_name(self, name: str, shape: Sequence[int]) -> str:
        """The name in the files of a parameter of the model; its prefix may be another (a text
        model inside a larger one)."""
        tail = name.removeprefix("model.")
        found = [key for key in self.place if key == name]
        found = found or [key for key in self.place if key == tail or key.endswith("." + tail)]
        for key in found:
            with safe_open(self.place[key], framework="pt") as file:
                if tuple(file.get_slice(key).get_shape()) == tuple(shape):
                    return key
        raise IncompatibleError(
            "the checkpoint stores its weights otherwise than transformers holds them",
            where=str(self.folder),
            found=f"no tensor {name} of shape {list(shape)}",
            expected="one tensor for each parameter of the model",
            do="train with the target in this process",
        )

    def whole(self, name: str, shape: Sequence[int], device: torch.device) -> Tensor:
        """A tensor on the device."""
        key = self.stored_name(name, shape)
        with safe_open(self.place[key], framework="pt", device=str(device)) as file:
            found: Tensor = file.get_tensor(key)
            return found

    def flat(self, name: str, shape: Sequence[int], start: int, count: int) -> Tensor:
        """`count` numbers from place `start` of the flattened tensor; only their rows are read."""
        key = self.stored_name(name, shape)
        width = math.prod(shape[1:])
        first = start // width
        last = -(-(start + count) // width)
        with safe_open(self.place[key], framework="pt") as file:
            rows: Tensor = file.get_slice(key)[first:last].reshape(-1)
        begin = start - first * width
        return rows[begin : begin + count]


class ServedLM(LanguageModel):
    """Embedding, final norm and LM head of a model that cannot be asked for anything else."""

    module: Any  # transformers' model, without storage

    def __init__(
        self,
        config: Any,
        weights: StoredWeights,
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
    resolved = resolve(name, revision)
    folder = resolved.path or hub.download(resolved, offline, check_config)
    config, where = check_folder(folder), choose_device(device)
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    weights = StoredWeights(folder)
    tokenizer = load_tokenizer(folder, config)
    count = sum(path.stat().st_size for path in weight_files(folder)) // stored.itemsize
    lm = ServedLM(config, weights, (), choose_dtype(dtype, where, stored, count), where)
    eos_ids = eos_ids_of(_with_generation(lm.module, folder), tokenizer)
    lm.spec = spec_of(config, eos_ids)
    commit = folder.name if resolved.path is None and folder.parent.name == "snapshots" else None
    return Target(
        name=name,
        revision=commit or resolved.revision,
        lm=lm,
        tokenizer=tokenizer,
        fingerprint=_fingerprint(lm, weights),
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        template_digest=template_digest(tokenizer),
        eos_ids=eos_ids,
        suggested=read_suggested(folder),
    )


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
