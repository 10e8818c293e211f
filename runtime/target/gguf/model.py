"""A model in a GGUF file as one of transformers: built without storage by the file's configuration,
its numbers widened one parameter at a time.

In float32 they are the file's numbers; a narrower dtype rounds them, which is said. The file is
never held as a whole: beside the model there is one parameter, and the blocks of a piece of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from specctl.core.spec import check_spec
from specctl.core.storage.gguf_header import GgufHeader, read_header
from specctl.models.hf.hf_spec import spec_of
from specctl.models.weights.released import Released
from specctl.runtime.target.gguf.blocks import library
from specctl.runtime.target.gguf.config import fields_of
from specctl.runtime.target.gguf.tokens import id_named
from specctl.runtime.target.gguf.weights import GgufWeights

EXACT = {  # dtypes that hold every number of these types
    torch.float64: None,
    torch.float32: None,
    torch.bfloat16: {"BF16"},
    torch.float16: {"F16"},
}


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file whose header, configuration and table of tensors fit each other."""

    header: GgufHeader
    config: Any
    weights: GgufWeights

    @property
    def num_parameters(self) -> int:
        return self.header.weights


def open_gguf(path: Path) -> GgufFile:
    """The model that a file is, or is a part of; no weight is read. Raises for every file that
    cannot be a target, with the reason."""
    header = read_header(path)
    config = config_in(header)
    library()
    return GgufFile(header, config, GgufWeights(header))


def config_in(header: GgufHeader) -> Any:
    """The configuration of transformers."""
    fields = fields_of(header)
    config = AutoConfig.for_model(
        fields.pop("model_type"),
        **fields,
        bos_token_id=id_named(header, "bos"),
        eos_token_id=None,  # ends of text: tokens.py
        pad_token_id=id_named(header, "padding"),
    )
    check_spec(spec_of(config))
    return config


def is_matrix_of_layers(name: str) -> bool:
    """Whether a parameter is a matrix within the layers."""
    return name.endswith("_proj.weight")


def model_of(
    file: GgufFile, dtype: torch.dtype, device: torch.device, is_packed: bool = False
) -> Any:
    """The model on the device, in that dtype. `is_packed`: without the matrices of its layers and
    an LM head that is not the embedding, which are held as they are packed (packed.py)."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(file.config, dtype=dtype)
    for name, shape in file.weights.shapes.items():
        owner, leaf = name.rsplit(".", 1)
        if is_packed and (is_matrix_of_layers(name) or owner == "lm_head"):
            parameter = model.get_parameter(name)
            setattr(model.get_submodule(owner), leaf, Released.of(parameter))
            continue
        wide = torch.empty(tuple(shape), dtype=dtype)
        try:
            file.weights.fill(name, wide)
        except ValueError as error:  # the file shrank behind its header
            raise file.header.damaged(f"{name} cannot be read", str(error)[:120]) from None
        kept = nn.Parameter(wide.to(device), requires_grad=False)
        setattr(model.get_submodule(owner), leaf, kept)
    if file.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.model.rotary_emb = type(model.model.rotary_emb)(config=file.config).to(device)
    there = model.state_dict(keep_vars=True).items()
    left = [name for name, tensor in there if tensor.is_meta and type(tensor) is not Released]
    assert not left, f"tensors without a value: {left}"
    return model


def rounding_note(file: GgufFile, dtype: torch.dtype) -> str | None:
    """What is to be said of a dtype that does not hold the file's numbers; None where it does."""
    exact = EXACT.get(dtype, set())
    matrices = {t.kind.name for t in file.header.tensors.values() if len(t.shape) > 1}
    if exact is None or matrices <= exact:
        return None
    name = str(dtype).removeprefix("torch.")
    return (
        f"{file.header.path.name}: its numbers are rounded to {name}; --dtype float32 holds them "
        "exactly"
    )
