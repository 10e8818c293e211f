"""A small language model as an ONNX graph with a cache, for ONNX Runtime.

The graph is written by optimum-onnx in a Python of its own, since its releases require older
versions of transformers than specctl does. It is read back by ONNX Runtime itself, in float32: all
ids at once, and half of them one by one through the cache.
Letters: S sequence, V target vocabulary.
"""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path

import numpy as np
import torch

from specctl.export.engines.onnxruntime import ENGINE, convert
from specctl.export.engines.process import check_installed, own_python, run_script
from specctl.export.formats import TARGET, ExportSource, Format, hf
from specctl.export.layouts.engines import gate
from specctl.export.package.manifest import WEIGHTS, check_files

TARGET_GRAPH = "target-onnx"


def write(source: ExportSource, folder: Path) -> None:
    """The graph, and the files of the transformers folder but its weights."""
    python = source.engine_python or own_python()
    with tempfile.TemporaryDirectory() as temp:
        plain, made = Path(temp) / "plain", Path(temp) / "made"
        plain.mkdir()
        hf.write(source, plain)
        convert(plain, made, python, Path(temp))
        for path in (*plain.iterdir(), *made.iterdir()):
            if path.name != WEIGHTS:
                (folder / path.name).write_bytes(path.read_bytes())


def check(source: ExportSource, folder: Path) -> None:
    """ONNX Runtime computes what the drafter computes, with and without the cache."""
    check_files(folder)
    ids_1S, python = hf.probe_ids(source), source.engine_python or own_python()
    ours = hf.own_logits(source, ids_1S)
    with tempfile.TemporaryDirectory() as temp:
        file = Path(temp) / "logits.npy"
        body = {"draft": str(folder.absolute()), "prompts": ids_1S.tolist(), "logits": str(file)}
        run_script("answer_onnxruntime", python, body, Path(temp))
        both_2SV = torch.from_numpy(np.load(file)).double()
    for theirs_SV in both_2SV:
        hf.compare_logits(source, theirs_SV[None], ours, gate)


def ready(engine_python: str | None) -> None:
    check_installed(ENGINE, engine_python or own_python())


def notes(source: ExportSource) -> tuple[str, ...]:
    return (
        "ONNX Runtime has no speculative decoding of its own, and transformers cannot cut the "
        "cache of optimum's models: the graph is for a loop of yours, such as --prove runs one.",
    )


def serve(source: ExportSource, folder: str) -> tuple[str, ...]:
    """The target becomes a graph as well; then both can be loaded."""
    convert_ = ["optimum-cli", "export", "onnx", "-m", TARGET, "--dtype", "fp32"]
    convert_ += ["--task", "text-generation-with-past", TARGET_GRAPH]
    code = (
        "from onnxruntime import InferenceSession as S; "
        f'target, draft = (S(f"{{one}}/model.onnx") for one in ("{TARGET_GRAPH}", "{folder}")); '
        "print([port.name for port in draft.get_inputs()])"
    )
    return shlex.join(convert_), shlex.join(["python", "-c", code])


FORMAT = Format(
    name="onnx",
    summary="an ONNX graph with a cache, for ONNX Runtime",
    families=("small-lm",),
    write=write,
    check=check,
    serve=serve,
    notes=notes,
    fits=hf.refuse_other_architectures,
    ready=ready,
)
