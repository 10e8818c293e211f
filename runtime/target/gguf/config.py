"""The transformers configuration of a model in a GGUF file, from its fields and the shapes of its
tensors. Architectures are those whose graphs in llama.cpp are our own forward; others are refused
by name, and so is whatever such a graph would do besides.

A file has no word for two things that its tensors show: a head that is the embedding (no `output`),
and biases (a Qwen2 may be written for the llama graph, which has room for them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from specctl.core.errors import IncompatibleError
from specctl.core.storage.gguf_header import GgufHeader, GgufTensor

ARCHITECTURES = ("llama", "qwen2", "qwen3")
DRAFTS = ("eagle3", "dflash", "dspark")
NEIGHBOURS = ("llama",)  # graphs that rotate rows 2i and 2i + 1 of a head; others rotate halves
EMBEDDING, HEAD, FREQUENCIES = "token_embd.weight", "output.weight", "rope_freqs.weight"
MOST_LAYERS = 1024
BASE = 10000.0  # of positions, where a file does not say
# Llama 3.1 and later: wavelengths between these shares of the old context are scaled in part.
LOW, HIGH = 1.0, 4.0
OLD_CONTEXTS = tuple(1 << power for power in range(11, 18))


def check_kind(header: GgufHeader) -> None:
    """Refuse a file that is no model of a known architecture with weights and a tokenizer."""
    name = header.architecture
    kind = header.get("general.type", str, "model")
    if name == "clip" or kind == "mmproj":
        raise _refused(
            header, "the image part of a multimodal model (mmproj)",
            "give the file of the language model beside it",
        )  # fmt: skip
    if kind == "adapter":
        raise _refused(
            header, "a LoRA adapter",
            "give the model it was made for, and peft's own adapter with --adapter FOLDER",
        )  # fmt: skip
    if name in DRAFTS:
        raise _refused(
            header, f"a draft for llama.cpp (architecture {name})",
            "give the target's own file; specctl drafts with the package that the draft was "
            "exported from: --draft FOLDER",
        )  # fmt: skip
    if name not in ARCHITECTURES:
        raise _refused(
            header, f"architecture {ascii(name)[1:-1][:60] or 'not named'}",
            "give the folder of safetensors that the file was made from, where transformers knows "
            "the architecture",
        )  # fmt: skip
    if not header.tensors:
        raise header.damaged("the file holds no weights", "no tensors", "a whole model")


def _refused(header: GgufHeader, found: str, do: str) -> IncompatibleError:
    return IncompatibleError(
        "the GGUF file cannot be a target",
        found=found,
        expected=f"a language model of architecture {', '.join(ARCHITECTURES)}",
        do=do,
        where=str(header.path),
    )


def fields_of(header: GgufHeader) -> dict[str, Any]:
    """What a configuration of transformers says of this model, `model_type` with it; no torch."""
    check_kind(header)
    _refuse_others(header)
    arch = header.architecture
    width, heads = _size(header, "embedding_length"), _size(header, "attention.head_count")
    head = _size(header, "attention.key_length", width // heads)
    kv_heads = _size(header, "attention.head_count_kv", heads)
    layers = _size(header, "block_count")
    if layers > MOST_LAYERS:
        raise header.damaged("no model has so many layers", f"{layers:,}", f"{MOST_LAYERS:,}")
    for key, default in (
        ("attention.value_length", width // heads),
        ("rope.dimension_count", head),
    ):
        if _size(header, key, default) != head:
            found = f"{arch}.{key} {_size(header, key, default)}"
            raise _refused(header, f"{found}, heads of {head}", "choose another model")
    if heads % kv_heads:
        found = f"{heads} heads of queries, {kv_heads} of keys"
        raise header.damaged("the heads do not divide", found)
    sizes = {
        "vocab_size": _vocab_size(header, width),
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "intermediate_size": _size(header, "feed_forward_length"),
        "max_position_embeddings": _size(header, "context_length"),
        "rms_norm_eps": _number(header, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(header, head),
        "tie_word_embeddings": HEAD not in header.tensors,
    }
    return {"model_type": _model_type(header, layers), **sizes, **_biases(header, layers)}


def _size(header: GgufHeader, key: str, default: int | None = None) -> int:
    name = f"{header.architecture}.{key}"
    value = header.fields.get(name)
    if isinstance(value, list):
        if not value or len(set(map(str, value))) > 1:
            raise _refused(header, f"{name} that differs by layer", "choose another model")
        value = value[0]
    if value is None and default is not None:
        value = default
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise header.damaged(f"{name} is wrong", repr(value)[:40], "a positive number")
    return value


def _number(header: GgufHeader, key: str, default: float | None = None) -> float:
    name = f"{header.architecture}.{key}"
    found = header.need(name, float) if default is None else header.get(name, float, default)
    if not (math.isfinite(found) and found > 0):
        raise header.damaged(f"{name} is wrong", repr(found), "a positive number")
    return found


def _vocab_size(header: GgufHeader, width: int) -> int:
    """Rows of the embedding, which may be padded behind the tokens but never lack one."""
    embedding = header.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[1] != width:
        found = "none" if embedding is None else str(list(embedding.shape))
        raise header.damaged("the file has no embedding of its width", found, f"[tokens, {width}]")
    tokens = header.need("tokenizer.ggml.tokens", list) if has_tokenizer(header) else []
    if len(tokens) > embedding.shape[0]:
        raise IncompatibleError(
            "the vocabulary is longer than the embedding",
            found=f"{len(tokens):,} tokens, {embedding.shape[0]:,} rows",
            expected="a row for each token",
            do="take another file of the same model",
            where=str(header.path),
        )
    return embedding.shape[0]


def has_tokenizer(header: GgufHeader) -> bool:
    return "tokenizer.ggml.tokens" in header.fields


def _refuse_others(header: GgufHeader) -> None:
    """Whatever a graph would do that our forward of the same architecture does not."""
    arch = header.architecture
    zeros = ("expert_count", "expert_used_count", "attention.clamp_kqv", "attention.max_alibi_bias")
    for key in zeros:
        if header.fields.get(f"{arch}.{key}", 0) not in (0, 0.0):
            raise _refused(
                header, f"{arch}.{key} {header.fields[f'{arch}.{key}']}", "choose another model"
            )
    ones = ("logit_scale", "residual_scale", "embedding_scale", "attention.scale")
    for key in ones:
        if header.fields.get(f"{arch}.{key}", 0) not in (0, 0.0, 1.0):
            raise _refused(header, f"{arch}.{key}", "choose another model")
    window = header.fields.get(f"{arch}.attention.sliding_window", 0)
    if window and window < _size(header, "context_length"):
        raise _refused(header, f"a sliding window of {window}", "choose another model")
    if header.fields.get(f"{arch}.use_parallel_residual", False):
        raise _refused(header, "parallel residuals", "choose another model")


# -- what tensors show -----------------------------------------------------------------------------


def _model_type(header: GgufHeader, layers: int) -> str:
    arch = header.architecture
    has_few = (
        arch == "llama" and _has_bias(header, "attn_q") and not _has_bias(header, "attn_output")
    )
    return "qwen2" if has_few else arch


def _has_bias(header: GgufHeader, part: str) -> bool:
    return f"blk.0.{part}.bias" in header.tensors


def _biases(header: GgufHeader, layers: int) -> dict[str, Any]:
    if _model_type(header, layers) == "llama":
        return {
            "attention_bias": _has_bias(header, "attn_q"),
            "mlp_bias": _has_bias(header, "ffn_down"),
        }
    return {}


# -- positions -------------------------------------------------------------------------------------


def _rope(header: GgufHeader, head: int) -> dict[str, Any]:
    """`rope_parameters` of transformers."""
    arch = header.architecture
    base = _number(header, "rope.freq_base", BASE)
    plain: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    kind = header.get(f"{arch}.rope.scaling.type", str, "none")
    old = header.get(f"{arch}.rope.scale_linear", float, 1.0)  # its name in files of 2023
    factor = header.get(f"{arch}.rope.scaling.factor", float, old)
    divisors = header.tensors.get(FREQUENCIES)
    if kind == "linear" or (kind == "none" and f"{arch}.rope.scaling.type" not in header.fields):
        if factor not in (0.0, 1.0):
            plain |= {"rope_type": "linear", "factor": factor}
    elif kind != "none":
        raise _refused(
            header, f"scaled positions of type {ascii(kind)[1:-1][:40]} ({arch}.rope.scaling.type)",
            "give the folder of safetensors that the file was made from",
        )  # fmt: skip
    if divisors is None:
        return plain
    if plain["rope_type"] != "default" or arch not in NEIGHBOURS:
        raise _refused(header, f"{FREQUENCIES} beside other scaling", "choose another model")
    return _llama3(header, divisors, head, base)


def _llama3(header: GgufHeader, tensor: GgufTensor, head: int, base: float) -> dict[str, Any]:
    """The parameters of Llama 3's scaling that give these very divisors of the frequencies."""
    from specctl.runtime.target.gguf.blocks import numbers

    if tensor.shape != (head // 2,):
        raise header.damaged(
            f"{FREQUENCIES} is of another size", str(list(tensor.shape)), f"{head // 2}"
        )
    divisors = [float(value) for value in numbers(tensor, 0, 1).reshape(-1)]
    waves = [2 * math.pi * base ** (2 * i / head) for i in range(head // 2)]
    factor = float(f"{max(divisors):.6g}")
    for context in OLD_CONTEXTS:
        made = [_divisor(wave, factor, context) for wave in waves]
        pairs = zip(made, divisors, strict=True)
        if all(math.isclose(one, other, rel_tol=1e-5) for one, other in pairs):
            return {
                "rope_type": "llama3",
                "rope_theta": base,
                "factor": factor,
                "low_freq_factor": LOW,
                "high_freq_factor": HIGH,
                "original_max_position_embeddings": context,
            }
    raise _refused(
        header, f"divisors of frequencies ({FREQUENCIES}) that are not Llama 3's",
        "give the folder of safetensors that the file was made from",
    )  # fmt: skip


def _divisor(wave: float, factor: float, context: int) -> float:
    """By how much Llama 3 divides the frequency of that wavelength."""
    if wave < context / HIGH:
        return 1.0
    if wave > context / LOW:
        return factor
    share = (context / wave - LOW) / (HIGH - LOW)
    return 1 / ((1 - share) / factor + share)


def expected_shapes(fields: dict[str, Any]) -> dict[str, Sequence[int]]:
    """Name in transformers -> shape of every parameter of such a configuration."""
    width, head = fields["hidden_size"], fields["head_dim"]
    queries, keys = fields["num_attention_heads"] * head, fields["num_key_value_heads"] * head
    inner, vocab = fields["intermediate_size"], fields["vocab_size"]
    kind = fields["model_type"]
    matrices = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    with_bias = {name for name in matrices if fields.get("mlp_bias") and name.startswith("mlp")}
    if kind == "qwen2" or fields.get("attention_bias"):
        with_bias |= {f"self_attn.{part}_proj" for part in "qkv"}
    if fields.get("attention_bias"):
        with_bias.add("self_attn.o_proj")
    norms = {"input_layernorm": width, "post_attention_layernorm": width}
    if kind == "qwen3":
        norms |= {"self_attn.q_norm": head, "self_attn.k_norm": head}
    found: dict[str, Sequence[int]] = {"model.embed_tokens.weight": (vocab, width)}
    for layer in range(fields["num_hidden_layers"]):
        own = f"model.layers.{layer}."
        found |= {f"{own}{name}.weight": (size,) for name, size in norms.items()}
        found |= {f"{own}{name}.weight": shape for name, shape in matrices.items()}
        found |= {f"{own}{name}.bias": matrices[name][:1] for name in with_bias}
    found["model.norm.weight"] = (width,)
    if not fields["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocab, width)
    return found
