"""How SGLang 0.5.23 reads a Domino checkpoint (models/dflash.py, speculative/domino_utils.py): a
DFlash stack whose root predicts (`shift_label`), a GRU over the target's embeddings of the root and
of the drafted tokens, and `embed_proj` of [state of the row; state of the GRU], which corrects all
rows but the first `pure_draft_prefix_len`. Settings of the head stand in `dflash_config`; what is
said at the top as well must agree.

SGLang scores a pool of 2,048 tokens unless it is served with
--speculative-domino-candidate-pool-size 0; here all tokens are scored, as in training.
Letters: D hidden width, N nodes, V target vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.export.layouts.engines import gate
from specctl.export.readers.sglang_blocks import SglangBlocks
from specctl.export.readers.trial import Trial

DOMINO = "DominoDraftModel"
REQUIRED: dict[str, Any] = {
    "projector_type": "domino",
    "shift_label": True,
    "pure_draft_prefix_len": 1,
}
GRU, DOWN, UP = "prefix_gru.", "embed_proj.0.weight", "embed_proj.2.weight"


class SglangDomino(SglangBlocks):
    """The draft model beside a target with these embeddings and this head."""

    def __init__(self, folder: Path, embedding_VD: Tensor, head_VD: Tensor, layers: int) -> None:
        super().__init__(folder, DOMINO, embedding_VD, head_VD, layers)

    @property
    def anchor_speaks(self) -> bool:
        return True

    def _shapes(self) -> dict[str, list[int]]:
        for key, wanted in REQUIRED.items():
            if self.nested.get(key) != wanted:
                raise gate(f"{key}: {self.nested.get(key)}", f"{key}: {wanted}")
        for key in ("emb_dim", "gru_hidden_dim"):
            if getattr(self.config, key, self.nested[key]) != self.nested[key]:
                raise gate(f"two values of {key}", "one")
        state, rank, width = self.nested["gru_hidden_dim"], self.nested["emb_dim"], self.sizes.width
        own = {
            f"{GRU}weight_ih_l0": [3 * state, width],
            f"{GRU}weight_hh_l0": [3 * state, state],
            DOWN: [rank, width + state],
            UP: [self.config.vocab_size, rank],
        }
        return super()._shapes() | own

    @torch.no_grad()
    def drafted_logits(self, trial: Trial) -> Tensor:
        """[N + 1, V]."""
        state_ND = self.spoken(trial)
        read_ND = self.embedding_VD[torch.tensor([trial.ids[-1], *trial.drafted])]
        memory = nn.GRU(read_ND.shape[1], self.nested["gru_hidden_dim"], bias=False).to(read_ND)
        memory.load_state_dict(
            {f"{key}_l0": self.params[f"{GRU}{key}_l0"] for key in ("weight_ih", "weight_hh")}
        )
        seen = torch.cat([state_ND, memory(read_ND)[0]], dim=-1)
        added_NV = F.linear(F.silu(F.linear(seen, self.params[DOWN])), self.params[UP])
        added_NV[: REQUIRED["pure_draft_prefix_len"]] = 0.0
        return F.linear(state_ND, self.head_VD) + added_NV
