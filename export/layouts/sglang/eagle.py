"""EAGLE-1 as a flat checkpoint: `fc` and decoder layers; embedding and LM head are the target's.

HASS, CORAL and a bare FSPAD train the same net otherwise and are the same checkpoint. Its `fc` has
a bias, which SGLang has and vLLM has not: under vLLM's own name for the architecture its loader
would drop the bias without a word, and no weight could take it in for every token. The name here is
SGLang's, which vLLM does not know and refuses. SGLang would draft all of the target's ids; a
drafter of a trimmed vocabulary goes with a token map, a pickled list, which is not written here but
made by the first of the commands, from `d2t`.
Letters: K draft vocabulary.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from safetensors.torch import load_file

from specctl.core.errors import IncompatibleError
from specctl.drafters.features.eagle import BlindNet
from specctl.drafters.frames.feature_drafter import FeatureDrafter
from specctl.drafters.nets.routed import PREFIX
from specctl.drafters.nets.trunk import TrunkNet
from specctl.export.formats import ExportSource
from specctl.export.layouts.engines import (
    check_vocab,
    draft_length,
    refuse_axes,
    refuse_scaled_head,
    sglang_command,
)
from specctl.export.layouts.sglang.layout import Flat, FlatFolder, llama_config
from specctl.export.layouts.speculators.eagle3 import written_tensors
from specctl.export.package.manifest import WEIGHTS
from specctl.export.readers.sglang_eagle import ENGINE, SglangEagle
from specctl.export.readers.trial import (
    Trial,
    compare,
    drafted_logits,
    embedding_of,
    head_of,
    twin,
    without_router,
)

FED_BACK = 3
TOKEN_MAP = "token_map.pt"
MAKE_MAP = (
    "import sys, torch; from safetensors.torch import load_file; "
    "d2t = load_file(sys.argv[1])['d2t']; "
    "torch.save((d2t + torch.arange(len(d2t))).tolist(), sys.argv[2])"
)


def write(source: ExportSource) -> FlatFolder:
    drafter = source.drafter
    assert isinstance(drafter, FeatureDrafter)
    _refuse_other_nets(drafter)
    refuse_scaled_head(source, "SGLang")
    refuse_axes(source, "SGLang's EAGLE layer")
    net = drafter.module
    config = llama_config("LlamaForCausalLMEagle", source, net.shape, len(net.layers))
    return FlatFolder(config, written_tensors(source, (drafter.tap,)))


def _refuse_other_nets(drafter: FeatureDrafter) -> None:
    """Families on EAGLE's frame may carry other modules or mix otherwise."""
    plain = TrunkNet(drafter.module.shape, len(drafter.module.layers)).state_dict()
    own = {name for name in drafter.tensors() if not name.startswith(PREFIX)}
    other = sorted(own ^ set(plain))
    if other or isinstance(drafter.module, BlindNet):
        raise IncompatibleError(
            "the engine's EAGLE layer computes something else than this drafter",
            found=f"{drafter.family} with {other[0]}" if other else "read_tokens: false",
            expected="fc and decoder layers that read token and feature, and nothing else",
            do="--to specctl",
        )


def check(source: ExportSource, folder: Path) -> None:
    """SGLang drafts what the drafter drafts: on the target's last state, and on its own states."""
    trial, vocabulary = Trial.of(source, FED_BACK), source.manifest.vocabulary
    ours = drafted_logits(twin(source, without_router(source.drafter)), trial)
    map_K = None
    if source.drafter.vocab is not None:
        tables = load_file(folder / WEIGHTS)
        map_K = check_vocab(tables, vocabulary.draft_size, vocabulary.target_size)
    reader = SglangEagle(folder, embedding_of(source), head_of(source), map_K)
    compare(ENGINE, reader.drafted_logits(trial), ours)


def serve(source: ExportSource, folder: str, algorithm: str) -> tuple[str, ...]:
    command = sglang_command(algorithm, draft_length(source), folder)
    if source.drafter.vocab is None:
        return (command,)
    make = shlex.join(["python", "-c", MAKE_MAP, f"{folder}/{WEIGHTS}", TOKEN_MAP])
    return make, f"{command} --speculative-token-map {TOKEN_MAP}"


def notes(source: ExportSource) -> tuple[str, ...]:
    vllm = "For SGLang only: vLLM's EAGLE layer has no bias behind `fc`, and would drop this one."
    if source.drafter.vocab is None:
        return (vllm,)
    return (
        vllm,
        f"Without --speculative-token-map, SGLang drafts ids that this drafter never learned; the "
        f"first command makes {TOKEN_MAP} from the folder's own table.",
    )


FLAT = Flat("EAGLE", write, check, serve, notes)
