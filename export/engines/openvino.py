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
    is_drafter: bool = False,
) -> Mapping[str, Any]:
    """IR of a transformers folder at `out`, and the versions that wrote it. `is_drafter`: of a
    class of the converter's own (EAGLE-3, DFlash); `layers` are written into the IR. What the
    converter leaves out or invents is an error."""
    job: dict[str, Any] = {"folder": str(folder), "out": str(out), "weights": weights}
    job |= {"layers": layers, "is_drafter": is_drafter}
    return run_script("convert_openvino", python, job, scratch)


ENGINE = ServingEngine(
    name="openvino",
    module="openvino_genai",
    install="ENV/bin/pip install openvino-genai optimum-intel diffusers einops",
    reads=("openvino",),
    answer=answer,
)
