"""EAGLE-1 and EAGLE-2 heads (SafeAILab), and what trains the same net (HASS): `fc`, one layer
without an input norm, and perhaps a copy of the target's embedding.

Their config.json is that of a Llama of one layer, so `fc.weight` without EAGLE-3's norm tells the
format. EAGLE-2 changed how drafts grow and nothing that is stored; HASS and EAGLE cannot be
distinguished by what is stored either, and all become the family `eagle`. Of a missing key `bias`
SafeAILab makes a bias behind `fc`; where config.json says there is none, zeros are one.
Letters: K draft vocabulary, N nodes, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor

from specctl.drafters.features.eagle import Eagle, EagleOptions
from specctl.export.formats import ExportSource
from specctl.export.imports import Imported, Importer
from specctl.export.imports.heads import (
    ELSEWHERE,
    HEAD,
    REPAIR,
    check_embedding,
    check_head,
    check_value,
    count_of,
    filled,
    refused,
    vocabulary,
)
from specctl.export.imports.layers import check_layers, check_positions, derived_config
from specctl.export.imports.published import Published
from specctl.export.layouts.engines import LENGTH
from specctl.export.readers.sglang_eagle import ENGINE, SglangEagle
from specctl.export.readers.trial import (
    Trial,
    compare,
    drafted_logits,
    embedding_of,
    head_of,
    twin,
)
from specctl.runtime.target.target import Target

NAMES = ("LlamaForCausalLM", "LlamaForCausalLMEagle", "EagleLlamaForCausalLM")
WITHOUT_BIAS = "EagleLlamaForCausalLM"  # vLLM's name: its layer has none
JOINED, BIAS, EMBEDDING, TABLES = "fc.weight", "fc.bias", "embed_tokens.weight", ("d2t", "t2d")
NEEDED = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size",
)  # fmt: skip
FED_BACK = 3  # states of the drafter's own that the proof compares


def knows(config: Mapping[str, Any], names: Set[str]) -> bool:
    named = config.get("architectures")
    is_named = isinstance(named, list) and len(named) == 1 and named[0] in NAMES
    others = {"speculators_config", "speculators_model_type", "draft_vocab_size"} & config.keys()
    is_third = any(name.endswith("hidden_norm.weight") for name in names)  # EAGLE-3's
    return is_named and not others and JOINED in names and not is_third


def read(published: Published, target: Target) -> Imported:
    body = published.config
    tensors = {name.removeprefix("model."): t for name, t in published.tensors.items()}
    for key in NEEDED:
        if body.get(key) is None:
            what = "config.json does not say a size of the head"
            raise refused(what, f"no {key}", key, REPAIR, f"config.json:{key}")
    config = derived_config(body, "llama")
    _check(config, target)
    _with_bias(body, tensors)
    d2t = tensors.get("d2t")
    rows = target.spec.vocab_size if d2t is None else len(d2t)
    vocab = vocabulary(tensors, rows, target.spec.vocab_size)
    check_embedding(tensors.get(EMBEDDING), target)
    check_head(tensors.get(HEAD), vocab, target)  # it drafts with the target's
    weights = {n: t for n, t in tensors.items() if n not in (*TABLES, EMBEDDING, HEAD)}
    options = EagleOptions(intermediate=count_of(config, "intermediate_size"))
    drafter = filled(lambda: Eagle(options, target.spec, vocab), weights)
    drafter.bind(target.borrowed())
    staged: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle"], "bias": False}

    def prove(source: ExportSource) -> None:
        trial, ids_K = Trial.of(source, FED_BACK), None if vocab is None else vocab.ids_K.cpu()
        with published.staged(weights, **staged) as folder:
            theirs = SglangEagle(folder, embedding_of(source), head_of(source), ids_K)
            theirs_NV = theirs.drafted_logits(trial)
        compare(ENGINE, theirs_NV, drafted_logits(twin(source, drafter), trial))

    return Imported(drafter, ENGINE, prove, LENGTH, _notes(body))


def _check(config: Any, target: Target) -> None:
    """Our layer is one of the target's own shape, but for the MLP."""
    spec = target.spec
    check_layers(config, target, 1)
    check_positions(config)
    if getattr(config, "qkv_bias", False):
        raise refused("our layer has no such part", "qkv_bias: True", "qkv_bias: false", ELSEWHERE)
    why = "an EAGLE-1 layer here has the target's own attention"
    same = {
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
    }
    for key, expected in same.items():
        check_value(config, key, expected, why, ELSEWHERE)
    theta = config.rope_parameters["rope_theta"]
    if theta != spec.rope_theta:
        plain = f"{spec.rope_theta:g}, the target's"
        raise refused(why, f"rope_theta: {theta}", plain, ELSEWHERE, "config.json:rope_theta")


def _with_bias(body: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """`fc.bias`, as SafeAILab's loader takes it: there unless `bias` says false."""
    has_none = body.get("bias") is False or body.get("architectures") == [WITHOUT_BIAS]
    if has_none and BIAS in tensors:
        what = "config.json says that fc has no bias, and there is one"
        raise refused(what, f"{BIAS} beside bias: false", "one of them", REPAIR)
    if has_none:
        tensors[BIAS] = torch.zeros(tensors[JOINED].shape[0], dtype=tensors[JOINED].dtype)


def _notes(body: Mapping[str, Any]) -> tuple[str, ...]:
    if body.get("architectures") == ["LlamaForCausalLMEagle"]:
        return ()
    return ("EAGLE-1, EAGLE-2 and HASS store the same tensors: the package is of family eagle",)


IMPORTER = Importer("flat-eagle", "fc.weight and one layer of EAGLE-1 or HASS", knows, read)
