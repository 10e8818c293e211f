"""A random Gemma-4 target and an assistant for it, by transformers' own classes.

transformers 5.23 refuses to build a model whose layers all share keys and values, as an
assistant's do: the property that refuses is replaced while one is built. No arithmetic is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma4TextConfig
from transformers.models.gemma4_assistant import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

from specctl.runtime.target.target import Target
from specctl_testing.models import build_model

VOCAB, WINDOW, CLUSTERS, TOP = 48, 5, 8, 3
KINDS = ["sliding_attention", "full_attention"] * 2
Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


def gemma4_target(num_shared: int) -> Target:
    """Four layers, the last `num_shared` of which read the cache of those before; factors of
    layers that are not 1, and an input of every layer of its own."""
    model = build_model(
        "gemma4_text",
        vocab=VOCAB,
        layer_types=KINDS,
        num_kv_shared_layers=num_shared,
        sliding_window=WINDOW,
        global_head_dim=16,
        hidden_size_per_layer_input=4,
        vocab_size_per_layer_input=VOCAB,
    )
    for at, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(0.7 + 0.2 * at)
    return Target.from_model(model)


def assistant(monkeypatch: pytest.MonkeyPatch, is_ordered: bool) -> Any:
    """Three layers of two kinds, narrower than the target, with as many heads as that has."""
    modes: Any = Gemma4TextConfig.kv_sharing_modes

    def all_reuse(config: Any) -> Any:
        shared, count = config.num_kv_shared_layers, config.num_hidden_layers
        return ["reuse"] * count if shared == count else modes.fget(config)

    monkeypatch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(all_reuse))
    text = Gemma4TextConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, global_head_dim=16,
        sliding_window=WINDOW, layer_types=[*KINDS[:1], *KINDS[:2]], num_kv_shared_layers=3,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=0,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    config = Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=32, use_ordered_embeddings=is_ordered,
        num_centroids=CLUSTERS, centroid_intermediate_top_k=TOP,
    )  # fmt: skip
    torch.manual_seed(3)
    model = Gemma4AssistantForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape) * (0.3 if weight.dim() > 1 else 0.2))
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(1.0)
        for at, layer in enumerate(model.model.layers):
            layer.layer_scalar.fill_(1.2 - 0.3 * at)
        if is_ordered:
            model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    return model


def published(model: Any, folder: Path, change: Change | None = None) -> Path:
    """Its folder, as transformers writes it, changed."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    if change is not None:
        change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@torch.no_grad()
def their_logits(model: Any, target: Target, text: list[int], drafted: list[int]) -> Tensor:
    """[N + 1, V]: transformers' assistant behind a text and behind each drafted token, beside the
    states and the cache of transformers' own target. Tokens that it masks are -inf."""
    read_1T = torch.tensor([text[:-1]])
    lm: Any = target.lm
    theirs = lm.module
    theirs.set_attn_implementation("eager")
    out = theirs(read_1T, output_hidden_states=True, use_cache=True, return_shared_kv_states=True)
    shown = dict(out.shared_kv_states or {})
    if not shown:  # no layer shares: transformers keeps none aside
        layers = out.past_key_values.layers
        shown = {kind: (one.keys, one.values) for kind, one in zip(KINDS, layers, strict=True)}
    state_11D, said = out.hidden_states[-1][:, -1:], list[Tensor]()
    for token in (text[-1], *drafted):
        embedded = theirs.get_input_embeddings()(torch.tensor([[token]]))
        step = model(
            inputs_embeds=torch.cat([embedded, state_11D], dim=-1),
            position_ids=torch.tensor([[len(text) - 1]]),
            shared_kv_states=shown,
        )
        state_11D, logits_V = step.last_hidden_state, step.logits[0, 0]
        if model.masked_embedding is not None:
            logits_V = logits_V.masked_fill(logits_V == logits_V.min(), -torch.inf)
        said.append(logits_V)
    theirs.set_attn_implementation(lm._implementation)
    return torch.stack(said)
