"""Folders of models that write pictures in an order of their own: config.json with the sizes,
model.safetensors, the tokenizer, and the codebook of the pictures.
Letters: K draft vocabulary (the codes), X any axes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from specctl.core.errors import IncompatibleError, IntegrityError
from specctl.core.storage.files import write_json
from specctl.core.storage.grid_kinds import ANY_ORDER, NEIGHBOURS
from specctl.core.storage.model_folder import CONFIG, refuse_stand_ins
from specctl.images.any_order import AnyOrder
from specctl.images.codebook import Codebook
from specctl.images.grid_net import GridNet
from specctl.images.grid_shape import GridShape, shape_from
from specctl.images.neighbours import Neighbours
from specctl.runtime.target.folders.checkpoint_folder import read_object

WEIGHTS = "model.safetensors"
NETS: dict[str, type[GridNet]] = {NEIGHBOURS: Neighbours, ANY_ORDER: AnyOrder}


@dataclass(frozen=True, slots=True)
class GridTarget:
    """A model that is only read, with its tokenizer and the codebook of its pictures."""

    name: str
    model: GridNet
    tokenizer: Any
    codebook: Codebook

    def encode(self, text: str) -> int:
        """The token of a prompt: one word that the model knows, and that is no patch and no mark
        such as the end of text."""
        ids = list(self.tokenizer.encode(text))
        shape, marks = self.model.shape, self.tokenizer.all_special_ids
        is_code = [0 <= token - shape.first_code < shape.codes for token in ids]
        if len(ids) != 1 or ids[0] in marks or any(is_code):
            raise IncompatibleError(
                "a prompt is none that a picture begins behind",
                where="the prompts",
                found=repr(text[:60]),
                expected="one word that names what the picture shows, such as 7",
                do="give one: docs/images-out.md",
            )
        return int(ids[0])

    def decode(self, ids: list[int]) -> str:
        """Text of token ids."""
        return str(self.tokenizer.decode(ids))


def build_net(shape: GridShape) -> GridNet:
    """The model of these sizes, with weights at random."""
    return NETS[shape.model_type](shape)


def save_grid(folder: Path, model: GridNet, tokenizer: Any) -> None:
    """Write a folder that `load_grid` reads, but for the codebook: float32 weights, config,
    tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    partial = folder / "model.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    write_json(folder / CONFIG, model.shape.config())
    tokenizer.save_pretrained(folder)
    partial.chmod(0o644)
    os.replace(partial, folder / WEIGHTS)


def load_grid(folder: Path) -> GridTarget:
    """The model of a folder, frozen, in float32 on the CPU. Raises FileError for what is missing,
    IncompatibleError for sizes that cannot be, IntegrityError for other weights or pictures."""
    refuse_stand_ins(folder)
    shape = shape_from(read_object(folder / CONFIG), str(folder / CONFIG))
    codebook = Codebook.load(folder)
    kept = codebook.grid, len(codebook.patch_KX), codebook.first_id
    if kept != (shape.grid, shape.codes, shape.first_code):
        raise _other(folder, f"grid, codes and first code {kept} in the codebook", shape)
    model = _read_model(folder, shape)
    tokenizer = _read_tokenizer(folder, shape)
    return GridTarget(str(folder), model.eval().requires_grad_(False), tokenizer, codebook)


def _read_model(folder: Path, shape: GridShape) -> GridNet:
    """The model with the weights of the folder. Their sizes are compared before memory is taken for
    those that config.json gives."""
    with torch.device("meta"):
        wanted = {name: p.shape for name, p in build_net(shape).named_parameters()}
    try:
        weights = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise _other(folder, str(error)[:200], shape) from error
    for name in sorted(wanted.keys() | weights.keys()):
        if name not in wanted or name not in weights or weights[name].shape != wanted[name]:
            found = list(weights[name].shape) if name in weights else "nothing"
            size = list(wanted[name]) if name in wanted else "nothing"
            raise _other(folder, f"{name}: {found} in the place of {size}", shape)
        if not weights[name].isfinite().all():
            raise _other(folder, f"{name}: values that are no finite numbers", shape)
    with torch.device("cpu"):
        model = build_net(shape)
    model.load_state_dict(weights)
    return model


def _read_tokenizer(folder: Path, shape: GridShape) -> Any:
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of the tokenizers library: any type may come
        raise _other(folder, f"no tokenizer: {error}"[:200], shape) from error
    if len(tokenizer) != shape.vocab_size:
        raise _other(folder, f"a tokenizer of {len(tokenizer):,} tokens", shape)
    return tokenizer


def _other(folder: Path, found: str, shape: GridShape) -> IntegrityError:
    return IntegrityError(
        "the folder's files are not those that its config.json describes",
        where=str(folder),
        found=found,
        expected=f"{WEIGHTS}, a tokenizer of {shape.vocab_size:,} tokens and a codebook of "
        f"{shape.grid} x {shape.grid} patches out of {shape.codes}, the first of them token "
        f"{shape.first_code}",
        do="make the folder again: specctl pretrain",
    )
