"""What other work on the machine costs every command: beside processes that compile, on one thread,
on all, and on as many as the command chooses.

    python benchmarks/busy_commands.py --neighbours 1 --repeats 3
    python benchmarks/busy_commands.py --neighbours 0 --only train-draft,distill

Each command is a process of its own, as a user starts it; ways take turns. Seconds of wall-clock
time, medians, the start of Python with them. One thread and all are OMP_NUM_THREADS, which PyTorch
keeps; the compiled step chooses in any way. The last column is what was chosen over the better of
the two.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from pairs import busy_neighbours

WAYS = ("one thread", "all threads", "chosen")
SIZES = ("--set", "data.prompts=48", "--set", "data.new_tokens=32")


def commands(target: str, steps: int) -> dict[str, tuple[str, ...]]:
    """The words of every command; OUT is a new folder each time, FILE sixteen prompts."""
    model = ("--target", target)
    trained = (*model, *SIZES, "--set", f"train.steps={steps}", "--out", "OUT")
    return {
        "generate": ("generate", *model, "--file", "FILE", "--max-new-tokens", "64"),
        "generate --draft": (
            "generate", *model, "--draft", "prompt-lookup", "--file", "FILE",
            "--max-new-tokens", "64",
        ),
        "long prompts": ("generate", *model, "--file", "LONG", "--max-new-tokens", "4"),
        "bench": ("bench", "prompt-lookup", *model, "--num-prompts", "8", "--repeats", "1"),
        "verify": ("verify", "prompt-lookup", *model, "--level", "compat"),
        "regenerate": (
            "regenerate", *model, "--prompts", "32", "--max-new-tokens", "48", "--out", "OUT",
        ),
        "train-draft": ("train-draft", "--recipe", "eagle3", *trained),
        "distill": ("distill", *trained),
    }  # fmt: skip


def seconds(words: tuple[str, ...], way: str, texts: dict[str, Path]) -> float:
    """Of one run of a command; an error where it fails."""
    threads = {"one thread": "1", "all threads": str(os.cpu_count())}
    given = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    if way in threads:
        given |= {"OMP_NUM_THREADS": threads[way], "MKL_NUM_THREADS": threads[way]}
    with tempfile.TemporaryDirectory(prefix="specctl-busy-") as folder:
        places = {"OUT": str(Path(folder) / "run")} | {name: str(at) for name, at in texts.items()}
        command = [sys.executable, "-m", "specctl", *(places.get(word, word) for word in words)]
        began = time.perf_counter()
        done = subprocess.run([*command, "--quiet"], env=given, capture_output=True, text=True)
        took = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.returncode}\n{done.stderr[-2000:]}")
    return took


def write_texts(folder: Path) -> dict[str, Path]:
    """Sixteen prompts, and eight of some 300 words."""
    short, long = folder / "short.txt", folder / "long.txt"
    begins = ("def", "class", "import", "for", "The", "Once", "print", "return")
    short.write_text("".join(f"{word} number {at}\n" for at in (1, 2) for word in begins))
    long.write_text("".join(" ".join([word, "is", "it"] * 90) + "\n" for word in begins))
    return {"FILE": short, "LONG": long}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--target", default="tiny")
    options.add_argument("--neighbours", type=int, default=1)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--steps", type=int, default=40, help="of training")
    options.add_argument("--only", default="", help="commands, with commas between")
    given = options.parse_args()
    wanted = [name for name in given.only.split(",") if name]
    print(f"| {given.target}, {given.neighbours} beside it | {' | '.join(WAYS)} | of the best |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, busy_neighbours(given.neighbours):
        texts = write_texts(Path(folder))
        for name, words in commands(given.target, given.steps).items():
            if wanted and name not in wanted:
                continue
            took: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(given.repeats):
                for way in WAYS:
                    took[way].append(seconds(words, way, texts))
            found = [median(took[way]) for way in WAYS]
            cells = " | ".join(f"{each:.1f}" for each in found)
            print(f"| {name} | {cells} | {found[-1] / min(found[:-1]):.2f} |", flush=True)


if __name__ == "__main__":
    main()
