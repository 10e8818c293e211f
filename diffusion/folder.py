"""Folders of masked diffusion models: read in the layout of LLaDA or Dream, and written in it.

Code that a published folder names (`auto_map`) is never run: the forward is ours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from specctl.core.errors import FileError, IncompatibleError, IntegrityError
from specctl.core.storage.files import write_json
from specctl.core.storage.model_folder import CONFIG, refuse_stand_ins
from specctl.diffusion.model import MaskedLM
from specctl.diffusion.shape import DiffusionShape, shape_from
from specctl.runtime.target.folders.checkpoint_folder import read_object, weight_files
from specctl.runtime.target.templates.bounded_templates import written
from specctl.runtime.target.templates.chat_turns import as_taken
from specctl.runtime.target.templates.ends import NO_ENDS
from specctl.runtime.target.templates.spoken_to import why_text

GENERATION, WEIGHTS = "generation_config.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class DiffusionTarget:
    """A masked diffusion model that is only read, with its tokenizer and what ends a text."""

    name: str
    model: MaskedLM
    tokenizer: Any
    eos_ids: tuple[int, ...]
    folder: Path

    @property
    def shape(self) -> DiffusionShape:
        return self.model.diffusion

    @property
    def device(self) -> torch.device:
        return self.model.model.embed_tokens.weight.device

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain text."""
        return list(self.tokenizer.encode(text))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant speaks next."""
        if not self.tokenizer.chat_template:
            raise IncompatibleError(
                f"target {self.name} has no chat template",
                found="no template in its tokenizer",
                expected="a chat template",
                do="give plain prompts, or choose an instruction-tuned target",
            )
        text = written(
            self.tokenizer,
            as_taken(self.tokenizer, messages),
            tools=None,
            add_generation_prompt=True,
            tokenize=False,
        )
        return list(self.tokenizer.encode(str(text), add_special_tokens=False))

    @property
    def is_chat(self) -> bool:
        """Whether a prompt is a user's turn to it where nobody says otherwise."""
        return why_text(self.tokenizer, NO_ENDS) is None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def load_diffusion(
    folder: Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> DiffusionTarget:
    """The model of a folder with config.json, safetensors and a tokenizer, frozen. Raises FileError
    for what is missing, IncompatibleError for a configuration that is not computed here, and
    IntegrityError for tensors of another shape or name."""
    refuse_stand_ins(folder)
    config = read_object(folder / CONFIG)
    model = read_model(folder, device, dtype).eval().requires_grad_(False)
    ends = [config.get("eos_token_id")]
    if (folder / GENERATION).is_file():
        ends.append(read_object(folder / GENERATION).get("eos_token_id"))
    flat = [end for one in ends for end in (one if isinstance(one, list) else [one])]
    eos_ids = tuple(dict.fromkeys(end for end in flat if isinstance(end, int)))
    return DiffusionTarget(str(folder), model, read_tokenizer(folder), eos_ids, folder)


def read_model(
    folder: Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> MaskedLM:
    """The weights of a folder, to decode with or to train on; each goes into that dtype on its own,
    so that no second copy of the model is held."""
    shape = shape_from(read_object(folder / CONFIG), str(folder / CONFIG))
    with torch.device("meta"):
        model = MaskedLM(shape)
    stored = _sizes(folder)
    wanted = {shape.stored_name(name): (name, p.shape) for name, p in model.named_parameters()}
    wrong = next(
        (n for n, (_, size) in wanted.items() if n not in stored or stored[n] != [*size]), None
    )
    if wrong is not None:
        raise IntegrityError(
            "the weights are not those that config.json describes",
            where=str(folder),
            found=f"{wrong}: {stored.get(wrong, 'missing')}",
            expected=str(list(wanted[wrong][1])),
            do="fetch the folder again",
        )
    unknown = sorted(stored.keys() - wanted.keys() - {shape.stored_name("lm_head.weight")})
    if unknown := [name for name in unknown if not name.endswith("rotary_emb.inv_freq")]:
        raise IncompatibleError(
            "the folder has weights that are not computed here",
            where=str(folder),
            found=", ".join(unknown[:3]) + (f" and {len(unknown) - 3} more" * (len(unknown) > 3)),
            expected=f"the parts of a {shape.layout} model, by its config.json",
            do="take a checkpoint in the layout of LLaDA-8B or Dream-7B",
        )
    own = dict[str, Tensor]()
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for there in wanted.keys() & file.keys():
                tensor = file.get_tensor(there)
                own[wanted[there][0]] = tensor.to(device=device, dtype=dtype, copy=True)
    model.load_state_dict(own, assign=True)
    return model.to(device=device, dtype=dtype)  # what is no weight


def _sizes(folder: Path) -> dict[str, list[int]]:
    """The shape of each tensor of a folder, by its stored name; none is read."""
    sizes: dict[str, list[int]] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            sizes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return sizes


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder: tokenizer.json, or Qwen2's two files as Dream publishes them."""
    if (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return Qwen2Tokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    raise FileError(
        "the folder holds no tokenizer",
        where=str(folder),
        expected="tokenizer.json, or vocab.json and merges.txt",
        do="copy the tokenizer of the model into the folder",
    )


def save_diffusion(folder: Path, model: MaskedLM, tokenizer: Any, eos_ids: list[int]) -> None:
    """Write a folder that `load_diffusion` reads: bf16 weights, config, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = model.diffusion
    weights = {
        shape.stored_name(name): p.detach().to(torch.bfloat16).contiguous()
        for name, p in model.named_parameters()
    }
    partial = folder / "model.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    ends = {"eos_token_id": eos_ids[0]} if eos_ids else {}
    write_json(folder / CONFIG, {**shape.config, **ends, "dtype": "bfloat16"})
    write_json(folder / GENERATION, {"eos_token_id": eos_ids} if eos_ids else {})
    tokenizer.save_pretrained(folder)
    partial.chmod(0o644)
    os.replace(partial, folder / WEIGHTS)
