"""What a drafter that follows its traffic regains when the prompts shift.

A drafter learns from one kind of text of the embedded target (code), a server drafts with it, and
the prompts become another kind (docstrings). Traffic is kept, `train-draft --follow` goes on with
the drafter, and the server takes it over while it runs. Tau is that of the server's own answers to
held-out prompts of both kinds, greedy, before and after: the mean of the prompts with its standard
error, and the difference paired over prompts. The prompts of the measurement say store: false, and
none of them is in the traffic. Everything goes through the commands and routes of users.

With --features the server also keeps hidden states (traffic.features): the time of the training
steps is printed with them and, once more on the same rows, with states that are computed again.

With another target the first drafter is a run that exists (--start), and the kinds are two files
of prompts, one JSON object with `messages` a line: those that it knows, then those that come.

    python benchmarks/follow_shift.py --out runs/follow [--steps 100] [--follow-steps 100]
    python benchmarks/follow_shift.py --out runs/follow --target smollm2-135m --start runs/eagle3 \\
        --kinds specbench.jsonl,humaneval.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specctl.train.data.prompts.heldout import embedded_prompts

EMBEDDED = ("code", "docstring")
KEY = "the-key-of-this-benchmark"
COMMAND = [sys.executable, "-m", "specctl"]


Bodies = dict[str, list[dict[str, Any]]]  # kind of prompt: what a request says of each


def embedded_kinds() -> Bodies:
    lines = list(map(json.loads, embedded_prompts().read_text().splitlines()))
    return {
        kind: [{"prompt": line["text"]} for line in lines if line["domain"] == kind]
        for kind in EMBEDDED
    }


def kinds_of(files: Sequence[str], few: int) -> Bodies:
    """The prompts of each file, `few` spread over it: its questions may lie by category."""
    found: Bodies = {}
    for file in map(Path, files):
        lines = list(map(json.loads, file.read_text(encoding="utf-8").splitlines()))
        lines = lines[:: max(1, len(lines) // few)][:few]
        found[file.stem] = [{"messages": line["messages"]} for line in lines]
    return found


def run(*words: object) -> None:
    subprocess.run([*COMMAND, *map(str, words)], check=True, env=os.environ | KEYS)


KEYS = {"SPECCTL_ADMIN_KEYS": KEY}


@contextmanager
def server(
    target: str, package: Path, traffic: Path, folder: Path, length: int, features: bool
) -> Iterator[str]:
    """The address of a server that drafts with a package and keeps its traffic."""
    words = ["serve", "--target", target, package, "--port", "0", "--jsonl", "--max-len", length,
             "--batching", "fixed", "--keep-traffic", traffic,
             "--set", f"limits.keep_traffic={1.0 if features else 0.01}",
             "--set", f"traffic.features={str(features).lower()}",
             "--set", f"access.drafter_folder={folder}"]  # fmt: skip
    process = subprocess.Popen(
        [*COMMAND, *map(str, words)], stdout=subprocess.PIPE, text=True, env=os.environ | KEYS
    )
    assert process.stdout is not None
    try:
        events = (json.loads(line) for line in process.stdout)
        yield str(next(event for event in events if event["event"] == "ready")["url"])
    finally:
        process.terminate()
        process.communicate(timeout=60)


def answered(url: str, prompt: dict[str, Any], new_tokens: int, store: bool) -> float:
    """Tau of one greedy answer."""
    body = {**prompt, "max_tokens": new_tokens, "temperature": 0, "store": store}
    sent = {"Content-Type": "application/json"}
    route = "chat/completions" if "messages" in prompt else "completions"
    request = urllib.request.Request(f"{url}/v1/{route}", json.dumps(body).encode(), sent)
    with urllib.request.urlopen(request, timeout=600) as response:
        return float(json.load(response)["specctl"]["stats"]["tau"])


def mean(values: Sequence[float]) -> str:
    """With its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):.3f} +- {error:.3f}"


def measured(url: str, kinds: Bodies, count: int, new_tokens: int) -> dict[str, list[float]]:
    return {
        kind: [answered(url, prompt, new_tokens, False) for prompt in prompts[:count]]
        for kind, prompts in kinds.items()
    }


def start(out: Path, prompts: Sequence[dict[str, Any]], recipe: str, steps: int) -> Path:
    """The run of a drafter of the embedded target that learns from these prompts alone."""
    data = out / "first.jsonl"
    data.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    run("train-draft", "--target", "tiny", "--recipe", recipe, "--data", data, "--steps", steps,
        "--out", out / "first", "--set", f"data.prompts={len(prompts)}",
        "--set", "data.text_tokens=0", "--set", f"train.tau_every={steps}",
        "--set", "serve.adaptive=false")  # fmt: skip
    return out / "first"


def stepping(out: Path) -> float:
    """Seconds that the steps of a run took, without what it measured before and between them."""
    return float(json.loads((out / "finished.json").read_text())["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("runs/follow-shift"))
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--start", type=Path, default=None, help="a run of another target")
    parser.add_argument("--kinds", default="", help="two files of prompts, a comma between")
    parser.add_argument("--recipe", default="eagle3")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--follow-steps", type=int, default=100)
    parser.add_argument("--count", type=int, default=40, help="held-out prompts of each kind")
    parser.add_argument("--traffic", type=int, default=100, help="prompts of the second kind")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--max-len", type=int, default=512)
    parser.add_argument("--features", action="store_true", help="keep hidden states, too")
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    files = [file for file in given.kinds.split(",") if file]
    kinds = kinds_of(files, given.count + given.traffic) if files else embedded_kinds()
    first, second = kinds
    began = given.start or start(out, kinds[first][given.count :], given.recipe, given.steps)
    package, traffic = began / "package", out / "traffic"
    with server(given.target, package, traffic, out, given.max_len, given.features) as url:
        before = measured(url, kinds, given.count, given.new_tokens)
        for prompt in kinds[second][given.count : given.count + given.traffic]:
            answered(url, prompt, given.new_tokens, True)
        words = ["train-draft", "--follow", traffic, "--init", began]
        words += ["--steps", given.follow_steps]
        words += ["--set", f"train.tau_every={given.follow_steps // 2}"]
        run(*words, "--swap", url, "--out", out / "second")
        if given.features:
            run(*words, "--out", out / "again", "--set", "data.kept_features=null")
        after = measured(url, kinds, given.count, given.new_tokens)
    result: dict[str, Any] = {"before": before, "after": after}
    if given.features:
        result["seconds"] = {"kept": stepping(out / "second"), "again": stepping(out / "again")}
        print(f"seconds of {given.follow_steps} steps:", json.dumps(result["seconds"]))
    (out / "result.json").write_text(json.dumps(result) + "\n")
    print("| prompts | tau before | tau after | difference |")
    print("|---|---|---|---|")
    for kind in kinds:
        gains = [b - a for a, b in zip(before[kind], after[kind], strict=True)]
        print(f"| {kind} | {mean(before[kind])} | {mean(after[kind])} | {mean(gains)} |")


if __name__ == "__main__":
    main()
