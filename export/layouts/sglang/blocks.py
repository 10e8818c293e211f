"""Blocks as flat checkpoints (z-lab's layout): DFlash and DSpark, and what the layouts of other
corrections share with them. SGLang takes embedding, mask and LM head from the target: the drafter
must have been trained with a row of the target's embedding as its mask (option `mask_id`) and speak
all of the target's ids.

Layer ids count layers. DSpark's settings stand at the top level and inside `dflash_config`, since
SGLang looks for some of them in the one place and for some in the other. How slots of a block see
each other is written wherever an engine looks for it, once layers have a window: without a word
such layers are causal to engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specctl.core.errors import IncompatibleError
from specctl.drafters.blocks.dflash import InjectedBlocks
from specctl.drafters.blocks.dspark import DSpark
from specctl.export.formats import ExportSource
from specctl.export.layouts.blocks import (
    MARKOV,
    block_tensors,
    blocks_of,
    check_confidence,
    refuse_part,
    window_keys,
)
from specctl.export.layouts.engines import (
    dimensions,
    dtype_fields,
    layer_ids,
    refuse_scaled_head,
    rope_fields,
    sglang_command,
    special_ids,
    vllm_command,
)
from specctl.export.layouts.sglang.layout import Flat, FlatFolder
from specctl.export.readers.sglang_blocks import DFLASH, DSPARK, ENGINE, SglangBlocks
from specctl.export.readers.trial import Trial, compare, drafted_logits, embedding_of, head_of, twin


def write(source: ExportSource, engine: str = "SGLang") -> FlatFolder:
    drafter = blocks_of(source)
    own: dict[str, Any] = {}
    if isinstance(drafter, DSpark):
        own = {
            "sample_from_anchor": True,
            "markov_rank": drafter.options.rank,
            "markov_head_type": MARKOV[drafter.options.correction],
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    return folder_of(source, _architecture(source), own, is_twice=bool(own), engine=engine)


def folder_of(
    source: ExportSource,
    architecture: str,
    own: Mapping[str, Any],
    is_twice: bool = False,
    engine: str = "SGLang",
) -> FlatFolder:
    """A block of that architecture, with the keys of its correction inside `dflash_config`, and at
    the top level too if they are said twice."""
    drafter = blocks_of(source)
    refuse(source, engine)
    refuse_scaled_head(source, engine)
    spec, net = drafter.spec, drafter.net
    own = {
        "mask_token_id": drafter.options.mask_id,
        "target_layer_ids": layer_ids(sorted(drafter.own_taps), spec.num_layers),
        **own,
    }
    says_causal = drafter.is_causal or drafter.window is not None
    config = {
        "architectures": [architecture],
        "model_type": "qwen3",
        **dimensions(net.shape, source, len(net.layers)),
        **rope_fields(net.shape, source),
        **special_ids(source),
        **dtype_fields(source),
        "use_sliding_window": drafter.window is not None,
        **window_keys(drafter),
        "block_size": drafter.num_slots,
        "num_target_layers": spec.num_layers,
        **(own if is_twice else {}),
        **({"is_causal": drafter.is_causal} if says_causal else {}),
        "dflash_config": {**own, **causal_keys(drafter)},
    }
    return FlatFolder(config, block_tensors(source))


def causal_keys(drafter: InjectedBlocks) -> dict[str, bool]:
    """How slots attend inside `dflash_config`; `causal_head` is JetSpec's name for it."""
    return {"causal": drafter.is_causal, **({"causal_head": True} if drafter.is_causal else {})}


def _architecture(source: ExportSource) -> str:
    return DSPARK if isinstance(source.drafter, DSpark) else DFLASH


def refuse(source: ExportSource, engine: str) -> None:
    drafter = blocks_of(source)
    if drafter.options.mask_id is None:
        raise IncompatibleError(
            f"{engine} takes the mask of a block from the target's embedding",
            found="a mask vector of the drafter's own (mask_id: null)",
            expected="a drafter trained with a token's row as its mask",
            do="--to speculators (vLLM) for dflash and dspark, or train with "
            "--set drafter.options.mask_id=ID, the id of a token that no text contains",
        )
    refuse_part(source, engine)


def check(source: ExportSource, folder: Path) -> None:
    """SGLang drafts the block that the drafter drafts, and is as sure of it."""
    drafter = blocks_of(source)
    trial = Trial.of(source, int(drafter.options.num_heads) - 1, without=drafter.options.mask_id)
    layers, kind = drafter.spec.num_layers, _architecture(source)
    reader = SglangBlocks(folder, kind, embedding_of(source), head_of(source), layers)
    compare(ENGINE, reader.drafted_logits(trial), drafted_logits(twin(source, drafter), trial))
    if isinstance(drafter, DSpark):
        check_confidence(source, reader.confidences(trial), trial)


def serve(source: ExportSource, folder: str, algorithm: str) -> tuple[str, ...]:
    """SGLang takes the length of a block from config.json; said again, it is the places and the
    root."""
    command = sglang_command(algorithm, int(source.drafter.options.num_heads), folder)
    words = command.split(" --speculative-num-steps")[0]
    number = int(source.drafter.options.num_heads) + 1
    return (f"{words} --speculative-num-draft-tokens {number}",)


def serve_both(source: ExportSource, folder: str, algorithm: str) -> tuple[str, ...]:
    """SGLang's command, and vLLM's, which reads the same folder."""
    number = int(source.drafter.options.num_heads)
    return (*serve(source, folder, algorithm), vllm_command("dflash", number, folder))


DFLASH_FLAT = Flat("DFLASH", write, check, serve)
DSPARK_FLAT = Flat("DSPARK", write, check, serve)
