"""What a user does first on a GPU: every command of a drafter's life, run as a user runs it.

    python benchmarks/gpu_commands.py --out runs/gpu
    python benchmarks/gpu_commands.py --out runs/gpu --dry-run

Each case is a chain of commands on the embedded target in a folder of its own; `--at-once` chains
run side by side, so that their seconds are no measurement. A case fails with the command that
failed and the end of what it said. `resume` kills a run halfway and continues it: its weights must
be those of the run that nobody killed, bit for bit on a CPU; on a GPU, where two runs that nobody
killed differ in their last bits, its losses.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import httpx
from gpu_common import Cases, parser
from safetensors.torch import load_file

SHORT = {
    False: ("train.steps=30", "data.prompts=100", "train.precision=bf16"),
    True: ("train.steps=2", "data.prompts=8"),
}
LESS = ("data.new_tokens=16", "data.text_tokens=4000", "train.tau_prompts=2", "train.tau_tokens=8")
PROMPT = "def read_lines(path):"
WIDE = "--num-prompts=4", "--max-new-tokens=32", "--repeats=1"
TIMEOUT = 240.0  # seconds of one command
Chain = Callable[["Commands"], dict[str, Any]]


class Commands:
    """Runs commands in a folder, and keeps what they say in its log."""

    def __init__(self, folder: Path, is_dry: bool) -> None:
        self.folder, self.is_dry = folder, is_dry
        self.device = "cpu" if is_dry else "cuda"
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "specctl", *words]
        return subprocess.Popen(
            command, cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip

    def __call__(self, *words: str) -> str:
        began = time.monotonic()
        process = self.start(*words)
        try:
            said, _ = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            said = process.communicate()[0] + f"\nstill running after {TIMEOUT:.0f} s"
        spent = time.monotonic() - began
        with (self.folder / "log").open("a") as log:
            log.write(f"$ specctl {' '.join(words)}  # {spent:.0f} s\n{said}\n")
        if process.returncode != 0:
            ended = f"specctl {' '.join(words)}: exit {process.returncode}"
            raise RuntimeError(f"{ended}: ...{said.strip()[-450:]}")
        return said

    def train(self, recipe: str, out: str, *more: str) -> None:
        sets = [f"--set={field}" for field in (*SHORT[self.is_dry], *LESS)]
        self("train-draft", "-t", "tiny", "-r", recipe, f"--device={self.device}", "-o", out, *sets,
             *more)  # fmt: skip

    def judge(self, package: str, *more: str) -> None:
        """Check it, see its text beside the target's own, and time it."""
        self("verify", package, "--level=compat", f"--device={self.device}")
        self("generate", PROMPT, "-d", package, "--compare", "--max-new-tokens=32",
             f"--device={self.device}")  # fmt: skip
        self("bench", package, *WIDE, f"--device={self.device}", *more)


def drafter(recipe: str, *more: str) -> Chain:
    """Train it, check it, time it."""

    def chain(run: Commands) -> dict[str, Any]:
        run.train(recipe, "run")
        run.judge("run/package", *more)
        return {}

    return chain


def eagle3(run: Commands) -> dict[str, Any]:
    run.train("eagle3", "run")
    run.judge("run/package", "--batch=4", "--dtype=bfloat16")
    shape = f"--device={run.device}", "--max-new-tokens=24"
    run("generate", PROMPT, "-d", "run/package", "--set=target.compile=true", "--compare", *shape)
    run("generate", PROMPT, "-d", "run/package", "--temperature=0.8", "--stats", *shape)
    run("bench", "run/package", *WIDE, "--set=target.compile=true", f"--device={run.device}")
    run("vocab-trim", "run", "--size=512", "-o", "trimmed", "--num-prompts=2",
        "--max-new-tokens=8", f"--device={run.device}")  # fmt: skip
    run("export", "run/package", "--to=vllm", "-o", "vllm")
    run("show", "run")
    return {}


def untrained(run: Commands) -> dict[str, Any]:
    run("doctor")
    names = "prompt-lookup", "token-recycling", "auto", "quantspec", "jacobi"
    for dtype in ("float32", "bfloat16", "float16"):  # fewer bits are read by CPUs alone
        run("generate", PROMPT, "-d", "prompt-lookup", f"--dtype={dtype}", "--compare",
            "--max-new-tokens=24", f"--device={run.device}")  # fmt: skip
    run("bench", *names, *WIDE, f"--device={run.device}")
    run(
        "bench",
        *names,
        *WIDE,
        f"--device={run.device}",
        "--set=target.compile=true",
        "--dtype=bfloat16",
    )
    return {}


def data(run: Commands) -> dict[str, Any]:
    """Answers, a plan, a prune with healing."""
    sets = [f"--set={field}" for field in LESS]
    run("regenerate", "-t", "tiny", "-r", "distill", "--prompts=8", "-o", "answers", *sets)
    run("plan", "-t", "tiny", "-r", "eagle3")
    run("prune", "-t", "tiny", "--layers=2", "--heal-steps=4", f"--device={run.device}",
        "-o", "pruned", *sets, "--set=data.prompts=8")  # fmt: skip
    return {}


def resume(run: Commands) -> dict[str, Any]:
    """A run that was killed, continued, is the run that was not."""
    saved = f"--set=train.save_every={1 if run.is_dry else 10}"
    run.train("eagle3", "whole", saved)
    sets = [saved, *(f"--set={field}" for field in (*SHORT[run.is_dry], *LESS))]
    words = ("train-draft", "-t", "tiny", "-r", "eagle3", f"--device={run.device}", "-o", "cut",
             *sets)  # fmt: skip
    process = run.start(*words)
    folder = run.folder / "cut"
    until = time.monotonic() + TIMEOUT
    while not any(folder.glob("checkpoints/*")) and process.poll() is None:
        if time.monotonic() > until:
            break
        time.sleep(0.2)
    if process.poll() is not None:
        raise RuntimeError(f"it ended before it was killed: {process.communicate()[0][-300:]}")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    run(*words)
    whole, cut = run.folder / "whole", run.folder / "cut"
    one, other = (load_file(each / "package" / "model.safetensors") for each in (whole, cut))
    differ = [name for name in one if not one[name].equal(other[name])]
    losses = [losses_of(each) for each in (whole, cut)]
    away = max(abs(mine / theirs - 1) for mine, theirs in zip(*losses, strict=True))
    if away > 0.01 or (differ and run.device == "cpu"):
        raise RuntimeError(f"{len(differ)} of {len(one)} weights differ, losses by {away:.2g}")
    return {"weights": len(one), "differ": len(differ), "losses_differ_by": away}


def losses_of(folder: Path) -> list[float]:
    """Of every report of a run."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def serve(run: Commands) -> dict[str, Any]:
    """Two answers of a server, one of them streamed."""
    process = run.start("serve", "-t", "tiny", "-d", "auto", "--port=18431",
                        f"--device={run.device}")  # fmt: skip
    url, said = "http://127.0.0.1:18431/v1", ""
    try:
        until = time.monotonic() + TIMEOUT
        while time.monotonic() < until and process.poll() is None:
            try:
                said = httpx.get(f"{url}/models", timeout=5).json()["data"][0]["id"]
                break
            except httpx.HTTPError:
                time.sleep(0.5)
        asked = {"model": said, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
        whole = httpx.post(f"{url}/completions", json=asked, timeout=60).json()
        with httpx.stream("POST", f"{url}/completions", json={**asked, "stream": True},
                          timeout=60) as lines:  # fmt: skip
            events = [line[6:] for line in lines.iter_lines() if line.startswith("data: {")]
        streamed = "".join(json.loads(e)["choices"][0]["text"] for e in events)
        text = whole["choices"][0]["text"]
        if text != streamed:
            raise RuntimeError(f"whole {text!r}, streamed {streamed!r}")
        return {"text": text}
    finally:
        process.send_signal(signal.SIGINT)
        try:
            (run.folder / "log").write_text(process.communicate(timeout=30)[0])
        except subprocess.TimeoutExpired:
            process.kill()


CHAINS: dict[str, Chain] = {
    "eagle3": eagle3,
    "resume": resume,
    "untrained": untrained,
    "distill": drafter("distill", "--against=hf", "--batch=2"),
    "serve": serve,
    "medusa": drafter("medusa"),
    "data": data,
    "dflash": drafter("dflash"),
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--at-once", type=int, default=8, help="chains side by side")
    args = options.parse_args()
    args.minutes = 60.0  # all chains run at once, and each of their commands has its own limit
    cases = Cases("commands", args)
    folder = args.out.resolve() / f"commands{'-dry' * cases.dry}"
    with ThreadPoolExecutor(args.at_once) as pool:
        wanted = [name for name in CHAINS if args.only in name]
        begun = {n: pool.submit(CHAINS[n], Commands(folder / n, cases.dry)) for n in wanted}
        names = {one: name for name, one in begun.items()}
        for one in as_completed(names):
            cases.case(names[one], one.result)
    cases.finish()


if __name__ == "__main__":
    main()
