"""A Llama-shaped model as a GGUF file: names, hyperparameters and the order of rotated rows.

llama.cpp has one graph per `general.architecture`. `llama` rotates neighbours (2i, 2i + 1) while
transformers rotates halves (i, i + E/2), so rows of its query and key projections (and biases) are
reordered; `qwen3` rotates halves and takes the rows as they are. A draft of Qwen2's shape is
written for the `llama` graph, which has room for its biases, too: the graph `qwen2` demands
heads x width of a head = width of the model, which drafts (and widened ones) need not keep. Vectors
are float32, which norms and biases demand; matrices keep the dtype of the package.
Letters: E head width, H query heads, I input width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specctl.core.errors import IncompatibleError
from specctl.core.spec import ModelSpec
from specctl.drafters.nets.blocks import LayerShape
from specctl.export.layouts.llama_cpp import library
from specctl.export.layouts.llama_cpp.vocab import Vocabulary
from specctl.models.llama.fast_llama import LlamaShape
from specctl.models.llama.llama import default_inv_freq
from specctl.models.rope import rope_of
from specctl.runtime.target.gguf.weights import INNER, OUTER

KINDS = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F32"}
_FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16"}


@dataclass(frozen=True, slots=True)
class GgufModel:
    """Weights under their transformers names; `spec` gives positions, rope scaling and ids."""

    name: str
    shape: LlamaShape
    tensors: Mapping[str, Tensor]
    spec: ModelSpec


def architecture(shape: LlamaShape, max_positions: int) -> str:
    """The llama.cpp graph that computes this shape; a shape that none computes is refused."""
    is_windowed = shape.window is not None and shape.window < max_positions
    switches = (shape.qk_norm, shape.attention_bias, shape.output_bias)
    known = {
        (False, False, False): "llama",
        (False, True, True): "llama",
        (False, True, False): "llama",
        (True, False, False): "qwen3",
    }
    if is_windowed or switches not in known:
        raise IncompatibleError(
            "llama.cpp has no graph for this combination of switches",
            found="qk_norm {}, attention_bias {}, output_bias {}, window {}".format(
                *switches, shape.window
            ),
            expected="those of Llama, Qwen2 or Qwen3, attending to everything",
            do="--to hf or --to specctl",
        )
    return known[switches]


def write_gguf(path: Path, model: GgufModel, vocabulary: Vocabulary) -> None:
    """Write one file that llama.cpp loads."""
    gguf, arch = library(), architecture(model.shape, model.spec.max_positions)
    embedding = model.tensors["model.embed_tokens.weight"]
    kind = KINDS[str(embedding.dtype).removeprefix("torch.")]
    with new_file(path, arch, model.name, kind) as writer:
        writer.add_vocab_size(model.shape.vocab_size)
        write_sizes(writer, model.shape, model.spec, model.shape.num_layers)
        extra = _rope(writer, model, arch, gguf)
        vocabulary.write(writer)
        for name, tensor in {**tensors_of(model, arch), **extra}.items():
            add_tensor(writer, name, tensor, kind, gguf)


@contextmanager
def new_file(path: Path, arch: str, name: str, kind: str) -> Iterator[Any]:
    """The library's writer of a file with matrices of that kind, whole when the block ends."""
    gguf = library()
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[kind]])
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors_of(model: GgufModel, arch: str) -> dict[str, Tensor]:
    """Tensors under llama.cpp's names, rows in the order in which the graph rotates them."""
    heads = {"attn_q": model.shape.num_heads, "attn_k": model.shape.num_kv_heads}
    found = {}
    for name, tensor in model.tensors.items():
        stem, leaf = name.rsplit(".", 1)
        if stem in OUTER:
            found[f"{OUTER[stem]}.{leaf}"] = tensor
            continue
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        new = INNER[part]
        if arch == "llama" and new in heads:
            tensor = neighbours(tensor, heads[new])
        found[f"blk.{layer}.{new}.{leaf}"] = tensor
    return found


def neighbours(weight: Tensor, num_heads: int) -> Tensor:
    """[H E] or [H E, I]: rows i and i + E/2 of every head as rows 2i and 2i + 1."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()


def write_sizes(writer: Any, shape: LlamaShape | LayerShape, spec: ModelSpec, layers: int) -> None:
    """What every graph of llama.cpp reads of a model of that many layers of one shape."""
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)


def _rope(writer: Any, model: GgufModel, arch: str, gguf: Any) -> dict[str, Tensor]:
    """Scaled positions: `linear` as hyperparameters; `llama3` as divisors of the frequencies, a
    tensor that only the llama graph reads."""
    scaling, shape = model.spec.rope_scaling, model.shape
    kind = "default" if scaling is None else str(scaling.get("rope_type", "default"))
    if kind == "default":
        return {}
    if kind == "linear":
        assert scaling is not None
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(scaling["factor"]))
        return {}
    if kind == "llama3" and arch == "llama":
        scaled = rope_of(model.spec, shape.head_dim, shape.rope_theta).inv_freq
        plain = default_inv_freq(shape.head_dim, shape.rope_theta)
        return {"rope_freqs.weight": plain / scaled}
    raise IncompatibleError(
        f"scaled positions cannot be written for llama.cpp's {arch} graph",
        found=f"rope_type {kind}",
        expected="default or linear; llama3 for a draft of Llama's shape",
        do="--to hf or --to specctl",
    )


def add_tensor(writer: Any, name: str, tensor: Tensor, kind: str, gguf: Any) -> None:
    """Add one: whole numbers as they are, a matrix in the kind of that name ("F32", "BF16"), a
    vector in float32."""
    if tensor.dtype == torch.long:
        writer.add_tensor(name, tensor.numpy())
        return
    array = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
    qtype = gguf.GGMLQuantizationType[kind if tensor.dim() == 2 else "F32"]
    writer.add_tensor(name, gguf.quantize(array, qtype), raw_dtype=qtype)
