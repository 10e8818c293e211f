"""Parameters of block drafters under their published names, and back from every spelling that
toolkits publish."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from specctl.core.errors import IncompatibleError

SHARED = {  # our prefix -> theirs; the mask has no place of its own
    "fc.": "fc.",
    "fc_norm.": "hidden_norm.",
    "net.layers.": "layers.",
    "norm.": "norm.",
}
OWN = {  # of a family's correction, as engines name it; of a family's stack, where it differs
    "dflash": {},
    "dflash2": {
        "selector.predecessor.weight": "candidate_selector.predecessor_codebook",
        "selector.successor.weight": "candidate_selector.successor_codebook",
        "selector.hidden.": "candidate_selector.hidden_projection.",
    },
    "dflare": {
        "fusion": "layer_fusion_weights",
    },
    "dfly": {
        "fc.": "context_proj.",
        "fc_norm.": "context_norm.",
        "norm.": "final_norm.",
        "fusion": "layer_fusion_weights",
        "correction.": "hidden_correction.",
    },
    "domino": {
        "memory.weight_ih": "prefix_gru.weight_ih_l0",
        "memory.weight_hh": "prefix_gru.weight_hh_l0",
        "down.": "embed_proj.0.",
        "up.": "embed_proj.2.",
    },
    "dspark": {
        "before.": "markov_head.markov_w1.",
        "bias.": "markov_head.markov_w2.",
        "gate.": "markov_head.gate_proj.",
        "joint.": "markov_head.joint_proj.",
        "confidence.": "confidence_head.proj.",
    },
    "lilicorr": {
        "lattice.feature_mlp.0.": "lilicorr.feature_norm.",
        "lattice.feature_mlp.1.": "lilicorr.feature_mlp.up_proj.",
        "lattice.feature_mlp.3.": "lilicorr.feature_mlp.down_proj.",
        "lattice.": "lilicorr.",
    },
    "xpress": {
        "before.": "xpress_head.w1.",
        "of_slot.": "xpress_head.down_h.",
        "of_block.": "xpress_head.down_g.",
        "joint.": "xpress_head.in_proj.",
        "mix": "xpress_head.mix.L",
        "gate.": "xpress_head.mlp.gate_proj.",
        "up.": "xpress_head.mlp.up_proj.",
        "down.": "xpress_head.mlp.down_proj.",
        "bias.": "xpress_head.w2.",
    },
}
OTHERS = {  # as other toolkits name it: their prefix -> ours
    "dflare": {  # AngelSpec
        "context_norm.": "fc_norm.",
        "final_norm.": "norm.",
    },
    "dfly": {  # vLLM, once it has read such a folder
        "fc.": "fc.",
        "hidden_norm.": "fc_norm.",
        "norm.": "norm.",
    },
    "dspark": {  # ModelOpt, without the modules around
        "markov_w1.": "before.",
        "markov_w2.": "bias.",
        "gate_proj.": "gate.",
        "joint_proj.": "joint.",
        "confidence_proj.": "confidence.",
    },
    "xpress": {  # speculators
        "refiner_head.token_embed.": "before.",
        "refiner_head.down_h.": "of_slot.",
        "refiner_head.down_g.": "of_block.",
        "refiner_head.in_proj.": "joint.",
        "refiner_head.mix_l": "mix",
        "refiner_head.mlp_gate.": "gate.",
        "refiner_head.mlp_up.": "up.",
        "refiner_head.mlp_down.": "down.",
        "refiner_head.readout.": "bias.",
    },
}
# LiLiCorr's layers have an MLP as well, which ModelOpt's trainer counts as we do.
_COUNTED = re.compile(r"^(lilicorr\.layers\.\d+\.mlp\.)([02])\.")
_NAMED = re.compile(r"^(lilicorr\.layers\.\d+\.mlp\.)(up_proj|down_proj)\.")
_PARTS = {"0": "up_proj", "2": "down_proj"}


def published_name(name: str, family: str) -> str:
    """Of one of a family's parameters; a name that is none of them as it is."""
    for ours, theirs in (SHARED | OWN[family]).items():
        if name.startswith(ours):
            found = theirs + name.removeprefix(ours)
            return _COUNTED.sub(lambda at: f"{at[1]}{_PARTS[at[2]]}.", found)
    return name


def own_tensors(tensors: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """Under our names, whatever the spelling; one that is none of the family's stays as it is."""
    found: dict[str, Tensor] = {}
    for theirs, tensor in tensors.items():
        name = _own_name(theirs, family)
        if name in found:
            raise IncompatibleError(
                "the folder holds a tensor under two names",
                found=ascii(theirs)[1:-1][:100],
                expected="one spelling of every name",
                do="keep the files of one version of the weights",
            )
        found[name] = tensor
    return found


def _own_name(name: str, family: str) -> str:
    parts = {named: counted for counted, named in _PARTS.items()}
    name = _NAMED.sub(lambda at: f"{at[1]}{parts[at[2]]}.", name)
    names = {theirs: ours for ours, theirs in (SHARED | OWN[family]).items()}
    for theirs, ours in (names | OTHERS.get(family, {})).items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name
