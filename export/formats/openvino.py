"""A draft as OpenVINO's IR, which OpenVINO GenAI takes beside its target: a small language model of
its own, an EAGLE-3 layer or DFlash (`specctl.export.layouts.openvino`).

The IR is written by optimum-intel in a Python of its own, since its releases require older
versions of transformers than specctl does. It is read back by OpenVINO itself, in float32.
Letters: D hidden width, K draft vocabulary, N nodes, S sequence, T fed tokens.
"""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specctl.export.engines.openvino import ENGINE, convert
from specctl.export.engines.process import check_installed, own_python, run_script
from specctl.export.formats import TARGET, ExportSource, Format, hf
from specctl.export.layouts.engines import draft_length, gate
from specctl.export.layouts.openvino import dflash, eagle3
from specctl.export.package.manifest import check_files
from specctl.export.readers.trial import (
    Trial,
    compare,
    drafted_logits,
    head_of,
    over_targets,
    twin,
    without_router,
)

FED_BACK = 3  # states of the drafter's own that the check of EAGLE-3 compares
TOLERANCE = 1e-4  # of the largest logit: the engine computes in float32
TARGET_IR = "target-openvino"


def fits(source: ExportSource) -> None:
    """Refuse what OpenVINO's classes of trained drafters have no place for."""
    if source.manifest.family == "eagle3":
        eagle3.refuse(source)
    elif source.manifest.family == "dflash":
        dflash.refuse(source)
    else:
        hf.refuse_other_architectures(source)


def write(source: ExportSource, folder: Path) -> None:
    """What the converter reads lies in a folder that is gone afterwards."""
    python, family = source.engine_python or own_python(), source.manifest.family
    layers, is_drafter = None, family != "small-lm"
    with tempfile.TemporaryDirectory() as temp:
        plain, made = Path(temp) / "plain", Path(temp) / "made"
        plain.mkdir()
        if family == "eagle3":
            layers = eagle3.hidden_layers(source)
            eagle3.write(source, plain)
        elif family == "dflash":
            dflash.write(source, plain)
        else:
            hf.write(source, plain)
        weights = "fp16" if source.manifest.dtype == "float16" else "fp32"
        convert(
            plain, made, python, Path(temp), weights=weights, layers=layers, is_drafter=is_drafter
        )
        for path in made.iterdir():
            if is_drafter and path.name.startswith("tokenizer"):
                continue  # the converter's idea of one; the target's is what counts
            (folder / path.name).write_bytes(path.read_bytes())


def check(source: ExportSource, folder: Path) -> None:
    """OpenVINO computes what the drafter computes: EAGLE-3 behind random features and on its own
    states, DFlash over two rounds, as OpenVINO GenAI feeds them; a language model over random
    ids."""
    check_files(folder)
    if source.manifest.family == "eagle3":
        _check_eagle3(source, folder)
        return
    if source.manifest.family == "dflash":
        _check_dflash(source, folder)
        return
    ids_1S = hf.probe_ids(source)
    logits, _ = _read(source, folder, ids_1S[0].tolist())
    hf.compare_logits(source, logits[None], hf.own_logits(source, ids_1S), gate)


def _check_eagle3(source: ExportSource, folder: Path) -> None:
    trial, manifest = Trial.of(source, FED_BACK), source.manifest
    said_NK, info = _read(source, folder, [*trial.ids, *trial.drafted], trial)
    if info["eagle3"] != "True":
        raise gate(f"eagle3_mode is {info['eagle3']}", "True")
    rows_K = torch.arange(manifest.vocabulary.draft_size) + torch.tensor(info["d2t"])
    theirs = over_targets(said_NK, rows_K, manifest.vocabulary.target_size)
    ours = drafted_logits(twin(source, without_router(source.drafter)), trial)
    compare("OpenVINO", theirs, ours, TOLERANCE)


def _check_dflash(source: ExportSource, folder: Path) -> None:
    trial, mask_id = dflash.trial_of(source), dflash.mask_id(source)
    fed_TD = dflash.fed_TD(source, trial)
    said_ND, info = _read(source, folder, list(trial.ids), trial, fed_TD)
    if info["dflash"] != "True" or info["mask_token_id"] != str(mask_id):
        found = f"dflash_mode is {info['dflash']}, mask_token_id {info['mask_token_id']}"
        raise gate(found, f"True, {mask_id}")
    theirs = said_ND @ head_of(source).T
    compare(dflash.ENGINE, theirs, drafted_logits(twin(source, source.drafter), trial), TOLERANCE)


def _read(
    source: ExportSource,
    folder: Path,
    ids: list[int],
    trial: Trial | None = None,
    fed_TD: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Logits in float64, and what the reader found in the IR."""
    with tempfile.TemporaryDirectory() as temp:
        states, logits = Path(temp) / "states.npy", Path(temp) / "logits.npy"
        body: dict[str, Any] = {"folder": str(folder.absolute()), "ids": ids}
        body |= {"known": 0, "states": None, "block": None, "logits": str(logits)}
        if trial is not None:
            found = torch.stack([trial.states[k] for k in sorted(trial.states)])
            np.save(states, found.float().numpy())
            body |= {"known": len(trial.ids), "states": str(states)}
        if fed_TD is not None:
            block = Path(temp) / "block.npy"
            np.save(block, fed_TD.float().numpy())
            body["block"] = str(block)
        python = source.engine_python or own_python()
        info = run_script("read_openvino", python, body, Path(temp))
        return torch.from_numpy(np.load(logits)).double(), info


def ready(engine_python: str | None) -> None:
    check_installed(ENGINE, engine_python or own_python())


def notes(source: ExportSource) -> tuple[str, ...]:
    """What is known of drafters there and nowhere written."""
    if source.manifest.family == "dflash":
        number = dflash.num_places(source)
        return (
            "OpenVINO GenAI drafts blocks of DFlash greedily, one request at a time, without "
            f"prefix caching; num_assistant_tokens stays at the {number} that were trained.",
        )
    if source.manifest.family != "eagle3":
        return ()
    layers = ", ".join(map(str, eagle3.hidden_layers(source)))
    return (
        f"OpenVINO GenAI reads the outputs of layers {layers}: the list is in the IR "
        "(hidden_layers_list), no argument is needed.",
    )


def serve(source: ExportSource, folder: str) -> tuple[str, ...]:
    """The target becomes IR first."""
    convert_ = ["optimum-cli", "export", "openvino", "-m", TARGET, TARGET_IR]
    convert_ += ["--task", "text-generation-with-past", "--weight-format", "fp32"]
    is_dflash = source.manifest.family == "dflash"  # refuses prefix caching, LLMPipeline's default
    how = ", scheduler_config=g.SchedulerConfig()" if is_dflash else ""
    length = dflash.num_places(source) if is_dflash else draft_length(source)
    code = (
        f'import openvino_genai as g; draft = g.draft_model("{folder}", "CPU"); '
        f'pipe = g.LLMPipeline("{TARGET_IR}", "CPU", draft_model=draft{how}); '
        'print(pipe.generate("def main(", max_new_tokens=64, '
        f"num_assistant_tokens={length}))"
    )
    return shlex.join(convert_), shlex.join(["python", "-c", code])


FORMAT = Format(
    name="openvino",
    summary="OpenVINO's IR, for OpenVINO GenAI",
    families=("dflash", "eagle3", "small-lm"),
    write=write,
    check=check,
    serve=serve,
    notes=notes,
    fits=fits,
    ready=ready,
)
