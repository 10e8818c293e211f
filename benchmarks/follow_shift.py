"""What a drafter that follows its traffic regains when the prompts shift.

A drafter learns from one kind of text of the embedded target (code), a server drafts with it, and
the prompts become another kind (docstrings). Traffic is kept, `train-draft --follow` goes on with
the drafter, and the server takes it over while it runs. Tau is that of the server's own answers to
held-out prompts of both kinds, greedy, before and after: the mean of the prompts with its standard
error, and the difference paired over prompts. The prompts of the measurement say store: false, and
none of them is in the traffic. Everything goes through the commands and routes of users.

    python benchmarks/follow_shift.py --out runs/follow [--steps 100] [--follow-steps 100]
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

from specctl.train.data.heldout import embedded_prompts

FIRST, SECOND = "code", "docstring"
KEY = "the-key-of-this-benchmark"
COMMAND = [sys.executable, "-m", "specctl"]


def prompts(domain: str) -> list[str]:
    lines = map(json.loads, embedded_prompts().read_text().splitlines())
    return [line["text"] for line in lines if line["domain"] == domain]


def run(*words: object) -> None:
    subprocess.run([*COMMAND, *map(str, words)], check=True, env=os.environ | KEYS)


KEYS = {"SPECCTL_ADMIN_KEYS": KEY}


@contextmanager
def server(package: Path, traffic: Path, folder: Path) -> Iterator[str]:
    """The address of a server that drafts with a package and keeps its traffic."""
    words = ["serve", "--target", "tiny", package, "--port", "0", "--jsonl", "--max-len", "512",
             "--batching", "fixed", "--keep-traffic", traffic, "--keep-traffic-limit", "0.01",
             "--drafter-folder", folder]  # fmt: skip
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


def answered(url: str, prompt: str, new_tokens: int, store: bool) -> float:
    """Tau of one greedy answer."""
    body = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "store": store}
    sent = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), sent)
    with urllib.request.urlopen(request, timeout=600) as response:
        return float(json.load(response)["specctl"]["stats"]["tau"])


def mean(values: Sequence[float]) -> str:
    """With its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):.3f} +- {error:.3f}"


def measured(url: str, count: int, new_tokens: int) -> dict[str, list[float]]:
    return {
        domain: [answered(url, prompt, new_tokens, False) for prompt in prompts(domain)[:count]]
        for domain in (FIRST, SECOND)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("runs/follow-shift"))
    parser.add_argument("--recipe", default="eagle3")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--follow-steps", type=int, default=100)
    parser.add_argument("--count", type=int, default=40, help="held-out prompts of each kind")
    parser.add_argument("--new-tokens", type=int, default=48)
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    data = out / "first.jsonl"
    rest = {domain: prompts(domain)[given.count :] for domain in (FIRST, SECOND)}
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in rest[FIRST]))
    run("train-draft", "--target", "tiny", "--recipe", given.recipe, "--data", data, "--steps",
        given.steps, "--out", out / "first", "--set", f"data.prompts={len(rest[FIRST])}",
        "--set", "data.text_tokens=0", "--set", f"train.tau_every={given.steps}",
        "--set", "serve.adaptive=false")  # fmt: skip
    with server(out / "first" / "package", out / "traffic", out) as url:
        before = measured(url, given.count, given.new_tokens)
        for prompt in rest[SECOND]:
            answered(url, prompt, given.new_tokens, True)
        run("train-draft", "--follow", out / "traffic", "--init", out / "first", "--swap", url,
            "--out", out / "second", "--steps", given.follow_steps,
            "--set", f"train.tau_every={given.follow_steps // 2}")  # fmt: skip
        after = measured(url, given.count, given.new_tokens)
    result: dict[str, Any] = {"before": before, "after": after}
    (out / "result.json").write_text(json.dumps(result) + "\n")
    print("| prompts | tau before | tau after | difference |")
    print("|---|---|---|---|")
    for domain in (FIRST, SECOND):
        gains = [b - a for a, b in zip(before[domain], after[domain], strict=True)]
        print(f"| {domain} | {mean(before[domain])} | {mean(after[domain])} | {mean(gains)} |")


if __name__ == "__main__":
    main()
