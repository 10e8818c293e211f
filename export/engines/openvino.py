"""OpenVINO GenAI on the CPU. The target becomes IR by optimum-intel, once a proof."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specctl.export.engines import Answers, EngineJob, ServingEngine
from specctl.export.engines.process import run_converted, run_script


def answer(job: EngineJob, drafts: bool) -> Answers:
    return run_converted("openvino", job, drafts, convert)


def convert(
    folder: str | Path,
    out: Path,
    python: str,
    scratch: Path,
    *,
    weights: str = "fp32",
    layers: list[int] | None = None,
) -> Mapping[str, Any]:
    """IR of a transformers folder at `out`, and the versions that wrote it. `layers` make it an
    EAGLE-3 draft. What the converter leaves out or invents is an error."""
    job = {"folder": str(folder), "out": str(out), "weights": weights, "layers": layers}
    return run_script("convert_openvino", python, job, scratch)


ENGINE = ServingEngine(
    name="openvino",
    module="openvino_genai",
    install="ENV/bin/pip install openvino-genai optimum-intel diffusers einops",
    reads=("openvino",),
    answer=answer,
)
