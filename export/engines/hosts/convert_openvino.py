"""A transformers folder becomes OpenVINO's IR by optimum-intel, in its own Python.

ENV/bin/python convert_openvino.py JOB ANSWERS

The job: {"folder": ..., "out": ..., "weights": "fp32" or "fp16", "is_drafter": ..., "layers": ids
or null}. `is_drafter`: EAGLE-3 or DFlash, whose classes are the converter's own. The `layers` of
EAGLE-3 go into the IR, where OpenVINO GenAI looks for them; DFlash's are written by the converter.
Whatever the converter had to invent ends it, and so does what it left aside.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

MODEL = "openvino_model.xml"
WRONG = ("| MISSING", "| UNEXPECTED", "| MISMATCH", "newly initialized")


def converted(folder: str, out: Path, weights: str, is_drafter: bool) -> None:
    tool = Path(sys.executable).with_name("optimum-cli")
    if not tool.exists():
        raise SystemExit(f"no {tool}: pip install optimum-intel diffusers einops")
    words = [str(tool), "export", "openvino", "-m", folder, "--weight-format", weights]
    words += ["--task", "text-generation-with-past"]
    if is_drafter:  # its class comes from optimum-intel itself, the draft has no tokenizer
        words += ["--trust-remote-code", "--disable-convert-tokenizer"]
    made = subprocess.run([*words, str(out)], capture_output=True, text=True, check=False)
    print(made.stdout, made.stderr, flush=True)
    printed = (made.stdout + made.stderr).splitlines()
    wrong = [line.strip() for line in printed if any(word in line for word in WRONG)]
    if made.returncode != 0 or wrong:
        raise SystemExit("the converter did not take the folder as it is: " + "; ".join(wrong))


def with_layers(out: Path, layers: list[int]) -> None:
    """The IR again, with the list in it."""
    import openvino

    beside = out / "again"
    beside.mkdir()
    model = openvino.Core().read_model(out / MODEL)
    model.set_rt_info(layers, ["hidden_layers_list"])
    openvino.save_model(model, beside / MODEL, compress_to_fp16=False)
    del model
    for path in beside.iterdir():
        path.replace(out / path.name)
    beside.rmdir()


def main() -> None:
    job_file, answer_file = map(Path, sys.argv[1:])
    job = json.loads(job_file.read_text())
    out = Path(job["out"])
    shutil.rmtree(out, ignore_errors=True)
    converted(job["folder"], out, job["weights"], job["is_drafter"])
    if job["layers"] is not None:
        with_layers(out, job["layers"])
    names = ("openvino", "optimum-intel", "transformers")
    answer_file.write_text(json.dumps({name: version(name) for name in names}))


if __name__ == "__main__":
    main()
