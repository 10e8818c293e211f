"""EAGLE-3 as a flat checkpoint: config.json and one tensor per parameter, no prefix (SafeAILab's
layout, from which SGLang, vLLM, TensorRT-LLM and llama.cpp's converter all start).

It is written for two engines at once. The list of layers stands twice: at the top it counts hidden
states (vLLM), inside `eagle_config` it counts layers (SGLang). `norm_before_residual` is written
because engines disagree on what its absence means. The layer is called `midlayer`, SafeAILab's
name: SGLang and vLLM read `layers.0` as well, but OpenVINO's converter knows `midlayer` only and
would draft with a random layer, saying no more than "newly initialized".
Letters: D hidden width, V target vocabulary.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from specctl.core.errors import IncompatibleError
from specctl.drafters.features.eagle3 import Eagle3
from specctl.export.formats import TARGET, ExportSource
from specctl.export.layouts.engines import (
    draft_length,
    hidden_state_ids,
    layer_ids,
    refuse_window,
    sglang_command,
    vllm_command,
)
from specctl.export.layouts.sglang.layout import Flat, FlatFolder, llama_config
from specctl.export.layouts.speculators.eagle3 import written_tensors
from specctl.export.readers import trtllm_eagle3, vllm_eagle3
from specctl.export.readers.sglang_eagle import ENGINE, SglangEagle3
from specctl.export.readers.trial import (
    Trial,
    compare,
    drafted_logits,
    embedding_of,
    head_of,
    twin,
    without_router,
)
from specctl.export.readers.trtllm_eagle3 import TrtllmEagle3
from specctl.export.readers.vllm_eagle3 import VllmEagle3, flat_config

FED_BACK, LAYER = 3, "midlayer"


def write(source: ExportSource) -> FlatFolder:
    drafter = source.drafter
    assert isinstance(drafter, Eagle3)
    options, spec = drafter.options, drafter.spec
    _refuse(source, drafter)
    taps = sorted(options.taps or ())
    config = {
        **llama_config("LlamaForCausalLMEagle3", source, drafter.module.shape, 1),
        "draft_vocab_size": source.manifest.vocabulary.draft_size,
        "num_aux_hidden_states": len(taps),
        "eagle_aux_hidden_state_layer_ids": hidden_state_ids(taps, spec.num_layers),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": layer_ids(taps, spec.num_layers),
        },
        "fc_norm": options.fc_norm,
        "norm_output": options.norm_output,
        "norm_before_fc": False,
        "norm_before_residual": False,
    }
    tensors = written_tensors(source, options.taps)
    return FlatFolder(config, {_theirs(name): tensor for name, tensor in tensors.items()})


def _theirs(name: str) -> str:
    return name.replace("layers.0.", f"{LAYER}.", 1) if name.startswith("layers.0.") else name


def _refuse(source: ExportSource, drafter: Eagle3) -> None:
    if drafter.options.qk_norm:
        raise IncompatibleError(
            "a flat EAGLE-3 checkpoint has no norm on queries and keys",
            found="qk_norm: true",
            expected="qk_norm: false",
            do="--to speculators (vLLM), or train with --set drafter.options.qk_norm=false",
        )
    if drafter.options.norm_before_residual:
        raise IncompatibleError(
            "SGLang keeps the un-normed state as residual, whatever config.json says",
            found="norm_before_residual: true",
            expected="norm_before_residual: false",
            do="--to speculators (vLLM), or train with "
            "--set drafter.options.norm_before_residual=false",
        )
    if len(drafter.options.taps or ()) == 1:
        raise IncompatibleError(
            "SGLang takes features as wide as the drafter for the drafter's own states",
            found=f"one tap, {list(drafter.options.taps or ())}",
            expected="two taps or more",
            do="--to speculators (vLLM), or train with more taps",
        )
    # TensorRT-LLM reads the same folder, and sees the whole text whatever config.json says.
    refuse_window(source, ENGINE)


def check(source: ExportSource, folder: Path) -> None:
    """SGLang, vLLM and TensorRT-LLM draft what the drafter drafts: behind random features, and on
    its own states."""
    trial, embedding_VD = Trial.of(source, FED_BACK), embedding_of(source)
    ours = drafted_logits(twin(source, without_router(source.drafter)), trial)
    compare(ENGINE, SglangEagle3(folder, embedding_VD).drafted_logits(trial), ours)
    vllm = VllmEagle3(folder, embedding_VD, flat_config)
    compare(vllm_eagle3.ENGINE, vllm.drafted_logits(trial), ours)
    trt = TrtllmEagle3(folder, embedding_VD, head_of(source), _layers(source))
    compare(trtllm_eagle3.ENGINE, trt.drafted_logits(trial), ours)


def _layers(source: ExportSource) -> list[int]:
    """What TensorRT-LLM's settings name: layers whose outputs are read."""
    taps = sorted(source.manifest.taps.indices)
    return layer_ids(taps, source.manifest.model_spec.num_layers)


def serve(source: ExportSource, folder: str, algorithm: str) -> tuple[str, ...]:
    """TensorRT-LLM reads no list of layers from the folder: without one in its settings it takes
    1, N // 2 - 1 and N - 4, whatever the drafter was trained with."""
    length = draft_length(source)
    how = {
        "decoding_type": "Eagle3",
        "max_draft_len": length,
        "speculative_model": folder,
        "eagle3_layers_to_capture": _layers(source),
    }
    settings = json.dumps({"speculative_config": how})  # JSON is YAML
    return (
        sglang_command(algorithm, length, folder),
        vllm_command("eagle3", length, folder),
        shlex.join(["python", "-c", f"open('trtllm.yaml', 'w').write({settings!r})"]),
        shlex.join(["trtllm-serve", TARGET, "--config", "trtllm.yaml"]),
    )


FLAT = Flat("EAGLE3", write, check, serve)
