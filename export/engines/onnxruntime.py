"""ONNX Runtime on the CPU. The target becomes ONNX by optimum-onnx, once a proof."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specctl.export.engines import Answers, EngineJob, ServingEngine
from specctl.export.engines.process import run_converted, run_script


def answer(job: EngineJob, drafts: bool) -> Answers:
    return run_converted("onnxruntime", job, drafts, convert)


def convert(folder: str | Path, out: Path, python: str, scratch: Path) -> Mapping[str, Any]:
    """The graph of a transformers folder at `out`, and the versions that wrote it. What the
    converter leaves out or invents is an error."""
    job = {"folder": str(folder), "out": str(out)}
    return run_script("convert_onnx", python, job, scratch)


ENGINE = ServingEngine(
    name="onnxruntime",
    module="optimum.onnxruntime",
    install="ENV/bin/pip install 'optimum-onnx[onnxruntime]'",
    reads=("onnx",),
    answer=answer,
)
