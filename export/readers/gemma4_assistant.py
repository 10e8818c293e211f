"""A Gemma-4 assistant as transformers 5 computes it: its own Gemma-4 layers, which read keys and
values of the target by the kind of the layer, from one position, in float64.

The layers are built behind one of each kind that makes keys and values, since transformers 5.23
refuses to build a model of sharing layers alone. Keys and values are random, one pair for each
position of the trial, and `GivenKv` shows our drafter the same.
Letters: B rows, D hidden width, G groups, O output width, Q picked rows, T fed tokens, V target
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from specctl.core.kv_cache import KVShape, SlotKV
from specctl.core.language_model import Borrowed, Feed, LanguageModel, LmOut
from specctl.export.formats import ExportSource
from specctl.export.readers.trial import CPU, Trial, head_of

ENGINE = "transformers 5"
KINDS = ("sliding_attention", "full_attention")
LAYER = "layers."


class GivenKv(LanguageModel):
    """A target of which nothing is there but what `layers` have cached of the trial's positions."""

    def __init__(self, lm: LanguageModel, layers: Sequence[int], length: int) -> None:
        random = torch.Generator().manual_seed(1)
        self.spec, self.module = lm.spec, nn.Linear(1, 1, dtype=torch.float64)
        self._shapes = {layer: lm.kv_shape(layer) for layer in layers}
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}
        for layer, shape in self._shapes.items():
            sizes = 2, 1, shape.key_heads, length, shape.key_width
            key, value = torch.randn(sizes, generator=random, dtype=torch.float64)
            self.pairs[layer] = key, value

    @property
    def kv_layers(self) -> tuple[KVShape, ...]:
        nothing = KVShape(0, 0, 0, 0)
        return tuple(self._shapes.get(i, nothing) for i in range(self.spec.num_layers))

    def key_value(
        self, state: Mapping[int, Tensor], position_BT: Tensor
    ) -> dict[int, tuple[Tensor, Tensor]]:
        at_T = position_BT[0]
        known = {i: pair for i, pair in self.pairs.items() if i in state}
        return {i: (key[:, :, at_T], value[:, :, at_T]) for i, (key, value) in known.items()}

    def run(self, feed: Feed, kv: SlotKV | None) -> LmOut:
        raise AssertionError("nothing is computed of it")

    def borrowed(self) -> Borrowed:
        raise AssertionError("it has no weights")


class AssistantReader:
    """The folder's tensors, by the names of the format, beside a target."""

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], source: ExportSource
    ) -> None:
        text = dict(config["text_config"])
        self.kinds, self.window = tuple(text["layer_types"]), int(text.get("sliding_window") or 0)
        self.model = AutoModel.from_config(_behind_makers(text)).double().eval()
        self.model.set_attn_implementation("eager")
        self.tensors = {name: x.double() for name, x in tensors.items() if x.is_floating_point()}
        self.layers = self.model.layers[len(KINDS) :]
        for index, layer in enumerate(self.layers):
            prefix = f"{LAYER}{index}."
            named = {n.removeprefix(prefix): x for n, x in self.tensors.items() if prefix in n}
            layer.load_state_dict(named)
        self.model.norm.weight.data = self.tensors["norm.weight"]
        self.ordering = tensors.get("masked_embedding.token_ordering")
        self.top = config.get("centroid_intermediate_top_k")
        borrowed = source.target.borrowed()
        rows_VD = borrowed.embedding_VD.detach() * borrowed.embed_scale
        self.embedding_VD = rows_VD.to(CPU, getattr(torch, source.manifest.dtype)).double()
        assert head_of(source).shape == self.embedding_VD.shape, "the target's state has one width"

    @torch.no_grad()
    def drafted_logits(
        self, trial: Trial, state_D: Tensor, shown: Mapping[str, tuple[Tensor, Tensor]]
    ) -> Tensor:
        """[N + 1, V]: behind the target's last state and the newest token, with what the target
        has cached of the tokens before that, by kind of layer."""
        said, position_11 = list[Tensor](), torch.tensor([[len(trial.ids) - 1]])
        for token in (trial.ids[-1], *trial.drafted):
            both_2D = torch.cat([self.embedding_VD[token], state_D])
            x_11O = (self.tensors["pre_projection.weight"] @ both_2D)[None, None]
            ready_O = self._through(x_11O, position_11, shown)
            state_D = self.tensors["post_projection.weight"] @ ready_O
            said.append(self._logits(ready_O))
        return torch.stack(said)

    def _through(
        self, x_11O: Tensor, position_11: Tensor, shown: Mapping[str, tuple[Tensor, Tensor]]
    ) -> Tensor:
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            x_11O = layer(
                x_11O,
                shared_kv_states=shown,
                position_embeddings=self.model.rotary_emb(x_11O, position_11, kind),
                attention_mask=self._mask(kind, shown[kind][0].shape[2]),
            )
        out_O: Tensor = self.model.norm(x_11O)[0, 0]
        return out_O

    def _mask(self, kind: str, num_keys: int) -> Tensor | None:
        """[1, 1, 1, T], added to scores: keys at most a window away from the newest one."""
        if kind != KINDS[0]:
            return None
        is_far_T = torch.arange(num_keys).flip(0) > self.window
        return torch.zeros(1, 1, 1, num_keys).double().masked_fill(is_far_T, -torch.inf)

    def _logits(self, ready_O: Tensor) -> Tensor:
        """[V]: -inf for tokens outside the best clusters, where there are any."""
        head_VO = self.tensors["embed_tokens.weight"]
        if self.ordering is None:
            return head_VO @ ready_O
        centroids_GO = self.tensors["masked_embedding.centroids.weight"]
        best = (centroids_GO @ ready_O).topk(int(self.top or 0)).indices
        ids_Q = self.ordering.view(len(centroids_GO), -1)[best].flatten()
        logits_V = torch.full((len(head_VO),), -torch.inf, dtype=torch.float64)
        logits_V[ids_Q] = head_VO[ids_Q] @ ready_O
        return logits_V


def _behind_makers(text: dict[str, Any]) -> Any:
    """The configuration with a layer of each kind in front, which has keys and values."""
    own, more = text["layer_types"], len(KINDS)
    if (given := text.get("per_layer_config")) is not None:
        shifted = {int(at) + more: dict(one) for at, one in given.items()}
        for at, kind in enumerate(KINDS):  # as those of its kind, which must be alike
            if kind in own and (one := shifted.get(own.index(kind) + more)) is not None:
                shifted[at] = one
        text["per_layer_config"] = shifted
    sizes = {"num_hidden_layers": len(own) + more, "num_kv_shared_layers": len(own)}
    kind = text.pop("model_type")
    return AutoConfig.for_model(kind, **{**text, **sizes, "layer_types": [*KINDS, *own]})
