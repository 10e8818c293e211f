"""P-EAGLE in the speculators format (`peagle`), read as vLLM reads it: a masked row has the
embedding of a token, `mask_token_id`, which becomes the drafter's own mask. Layers have the
target's shape.
Letters: D hidden width, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from torch import Tensor

from specctl.drafters.features.p_eagle import PEagle, PEagleOptions
from specctl.export.formats import ExportSource
from specctl.export.imports import Imported, Importer
from specctl.export.imports.blocks import own_mask
from specctl.export.imports.eagle3 import default_layers, read_taps
from specctl.export.imports.heads import (
    ELSEWHERE,
    REPAIR,
    check_value,
    count_of,
    filled,
    refused,
    vocabulary,
    with_head,
)
from specctl.export.imports.layers import check_layers, check_positions
from specctl.export.imports.published import Published
from specctl.export.imports.speculators import KIND, other_verifier
from specctl.export.readers.trial import Trial, compare, drafted_logits, embedding_of, twin
from specctl.export.readers.vllm_eagle3 import EMBEDDING, ENGINE, MASK, VllmEagle3, draft_config
from specctl.runtime.target.target import Target

TABLES = ("d2t", "t2d")


def knows(config: Mapping[str, Any], names: Set[str]) -> bool:
    return config.get(KIND) == "peagle"


def read(published: Published, target: Target) -> Imported:
    body, spec = published.config, target.spec
    config = draft_config(body)
    _check(config, target)
    rows = getattr(config, "draft_vocab_size", None) or count_of(config, "vocab_size")
    vocab = vocabulary(published.tensors, rows, spec.vocab_size)
    layers = default_layers(spec.num_layers)
    taps = getattr(config, "eagle_aux_hidden_state_layer_ids", layers)
    options = PEagleOptions(
        num_heads=config.length,
        layers=count_of(config, "num_hidden_layers"),
        taps=read_taps(taps, spec.num_layers),
    )
    head = with_head(published.tensors, rows, target)
    weights = _weights(head.tensors, config.pard_token, target)
    drafter = filled(lambda: PEagle(options, spec, vocab), weights)
    drafter.bind(target.borrowed())

    def prove(source: ExportSource) -> None:
        trial = Trial.of(source, config.length - 1, without=config.pard_token)
        with published.staged(head.tensors) as folder:
            theirs = VllmEagle3(folder, embedding_of(source)).drafted_logits(trial)
        compare(ENGINE, theirs, drafted_logits(twin(source, drafter), trial))

    notes = other_verifier(body, target) + head.notes
    return Imported(drafter, ENGINE, prove, config.length, notes)


def _check(config: Any, target: Target) -> None:
    """Our layers have the target's own shape and no further switches."""
    spec = target.spec
    check_layers(config, target)
    check_positions(config)
    why = "a layer of P-EAGLE here has the target's own shape"
    same = {
        "model_type": "llama",
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "intermediate_size": spec.intermediate_size,
        "norm_before_residual": False,
    }
    for key, expected in same.items():
        check_value(config, key, expected, why, ELSEWHERE)
    theta, width = config.rope_parameters["rope_theta"], getattr(config, "head_dim", None)
    if theta != spec.rope_theta or width not in (None, spec.head_dim):
        found = f"rope_theta: {theta}, head_dim: {width}"
        raise refused(why, found, f"{spec.rope_theta:g} and {spec.head_dim}", ELSEWHERE)


def _weights(tensors: Mapping[str, Tensor], mask_id: object, target: Target) -> dict[str, Tensor]:
    size = target.spec.vocab_size
    if not isinstance(mask_id, int) or isinstance(mask_id, bool) or not 0 <= mask_id < size:
        what = "config.json does not say which token a masked row has"
        raise refused(what, f"mask_token_id: {mask_id}", "an id of the target", REPAIR)
    found = {
        f"net.{name}" if name.startswith("layers.") else name: tensor
        for name, tensor in tensors.items()
        if name not in (*TABLES, EMBEDDING)
    }
    if MASK in found:
        found[MASK] = found[MASK].reshape(-1)
    own_D = own_mask(tensors.get(EMBEDDING), mask_id, target)
    if own_D is None:
        borrowed = target.borrowed()
        own_D = borrowed.embedding_VD[mask_id].detach().cpu() * borrowed.embed_scale
    like = found.get("fc.weight", own_D)
    return {**found, "mask": own_D.to(like.dtype).clone()}


IMPORTER = Importer("speculators-peagle", "speculators_model_type peagle", knows, read)
