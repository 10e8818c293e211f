"""A transformers folder becomes an ONNX graph with a cache by optimum-onnx, in its own Python.

ENV/bin/python convert_onnx.py JOB ANSWERS

The job: {"folder": ..., "out": ...}. Whatever the converter had to invent ends it, and so does what
it left aside. Weights are float32.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

WRONG = ("| MISSING", "| UNEXPECTED", "| MISMATCH", "newly initialized", "were not used")


def main() -> None:
    job_file, answer_file = map(Path, sys.argv[1:])
    job = json.loads(job_file.read_text())
    tool = Path(sys.executable).with_name("optimum-cli")
    if not tool.exists():
        raise SystemExit(f"no {tool}: pip install 'optimum-onnx[onnxruntime]'")
    shutil.rmtree(job["out"], ignore_errors=True)
    words = [str(tool), "export", "onnx", "-m", job["folder"], "--dtype", "fp32"]
    words += ["--task", "text-generation-with-past", job["out"]]
    made = subprocess.run(words, capture_output=True, text=True, check=False)
    print(made.stdout, made.stderr, flush=True)
    lines = (made.stdout + made.stderr).splitlines()
    wrong = [line.strip() for line in lines if any(word in line for word in WRONG)]
    if made.returncode != 0 or wrong:
        raise SystemExit("the converter did not take the folder as it is: " + "; ".join(wrong))
    names = ("onnxruntime", "optimum-onnx", "transformers")
    answer_file.write_text(json.dumps({name: version(name) for name in names}))


if __name__ == "__main__":
    main()
