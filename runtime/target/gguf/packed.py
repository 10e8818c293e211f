"""The matrices of a GGUF file for the compiled step, which reads them as the file packs them.

Nothing is rounded but the inputs of each matrix, to 8 bits with a scale for every 32 of them, as in
llama.cpp. Rows of query and key go where transformers has them: whole rows, so that blocks stay.
"""

from __future__ import annotations

import torch

from specctl.models.native.library import no_int8
from specctl.models.native.packed import (
    FLOATS,
    TYPES,
    PackedMatrix,
    PackedWeights,
    are_finite,
    from_gguf,
)
from specctl.runtime.target.gguf.model import GgufFile, is_matrix_of_layers

PARTS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def is_packed(file: GgufFile) -> bool:
    """Whether any of its matrices takes fewer bytes than in 16 bits."""
    return bool(_types(file) & set(TYPES))


def why_not_packed(file: GgufFile, device: torch.device) -> str | None:
    """Why its matrices cannot be read as they are packed; None where they can be."""
    others = _types(file) - {*TYPES, *FLOATS}
    if others:
        return f"matrices in {', '.join(sorted(others))}"
    return f"device {device}" if device.type != "cpu" else no_int8()


def packed_weights(file: GgufFile) -> PackedWeights:
    """The matrices of every layer and the LM head, which may be the embedding's blocks."""
    layers = tuple(
        {name: _matrix(file, f"model.layers.{at}.{part}.weight") for name, part in PARTS.items()}
        for at in range(file.config.num_hidden_layers)
    )
    return PackedWeights(layers, _matrix(file, _head(file)))


def packed_note(file: GgufFile) -> str:
    """What is to be said of how they are read."""
    types = ", ".join(name for name in file.header.kinds() if name in _types(file))
    return (
        f"{file.header.path.name}: weights as they are packed ({types}), the inputs of each matrix "
        "rounded to 8 bits as in llama.cpp; --dtype float32 rounds nothing"
    )


def packed_bytes(file: GgufFile) -> int:
    """Of memory: the matrices as they are packed, all else in float32."""
    shapes, tensors = file.weights.shapes, file.weights.tensor
    wide = sum(tensors(name).count for name in shapes if not is_matrix_of_layers(name))
    return 4 * wide + sum(tensors(name).bytes for name in {*_matrices(file)})


def _head(file: GgufFile) -> str:
    return EMBEDDING if file.config.tie_word_embeddings else HEAD


def _matrices(file: GgufFile) -> list[str]:
    return [*filter(is_matrix_of_layers, file.weights.shapes), _head(file)]


def _types(file: GgufFile) -> set[str]:
    return {file.weights.tensor(name).kind.name for name in _matrices(file)}


def _matrix(file: GgufFile, name: str) -> PackedMatrix:
    tensor = file.weights.tensor(name)
    rows, columns = tensor.shape
    blocks = torch.from_numpy(file.weights.blocks(name))
    if not are_finite(blocks, tensor.kind.name):
        what = f"the numbers of {tensor.name} are not finite"
        raise file.header.damaged(what, "NaN or infinity in its scales", "finite numbers")
    return from_gguf(blocks, tensor.kind.name, rows, columns)
