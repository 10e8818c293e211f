"""What a newcomer sees who follows README.md, command by command, where there is only Python.

    python benchmarks/newcomer.py --out runs/newcomer

Clones the repository into OUT/specctl, takes the commands of README's blocks in their order and
runs them there in a shell of its own, whose home is empty and whose PATH names the system alone,
and the environment that `make quickstart` made. `make test` is left out; a server is asked for its
models and stopped by Ctrl-C. OUT/transcript.md has every command, how it ended, how long it took
and the last lines that it printed. Exit code 1 if one of them failed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SYSTEM = "/usr/local/bin:/usr/bin:/bin"
LEFT_OUT = ("make test",)
BLOCK = re.compile(r"^```(sh|console|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHOWN, LONGEST = 14, 3600  # lines, seconds


def commands(text: str) -> list[str]:
    """Those of the blocks in their order; Python is given to the interpreter."""
    found = []
    for kind, body in BLOCK.findall(text):
        if kind == "python":
            found.append(f"python - <<'END'\n{body}END")
            continue
        lines = [line.removeprefix("$ ").partition("  #")[0].strip() for line in body.splitlines()]
        found += [line for line in lines if line and not line.startswith(LEFT_OUT)]
    return found


def run(command: str, folder: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """The exit code, and everything that it printed."""
    if " serve " in command:
        return serve(command, folder, environment)
    made = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, timeout=LONGEST, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    return made.returncode, made.stdout


def serve(command: str, folder: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """A server that answers, until it is told to stop."""
    log = folder / "server.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=folder, env=environment, stdout=file, stderr=file
        )
        said, until = "", time.monotonic() + 120
        while time.monotonic() < until and process.poll() is None and not said:
            time.sleep(1)
            if place := re.search(r"http://[\w.]+:\d+", log.read_text(errors="replace")):
                try:
                    with urllib.request.urlopen(f"{place[0]}/v1/models", timeout=5) as answer:
                        said = f"\n/v1/models: {answer.status}\n"
                except OSError:
                    continue
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
    return (code if said else 1), log.read_text(errors="replace") + said


def last_lines(text: str) -> Sequence[str]:
    """Without colours, and of a line that was written over what stood there in the end."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    lines = [line.rpartition("\r")[2].rstrip() for line in plain.splitlines()]
    return [line[:160] for line in lines if line][-SHOWN:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True)
    folder, home = out / "specctl", out / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    kept = {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "UV_", "LANG", "SSL"))}
    path = f"{folder / '.venv' / 'bin'}:{Path(sys.base_prefix) / 'bin'}:{SYSTEM}"
    environment = {**kept, "HOME": str(home), "PATH": path}
    failed, transcript = 0, out / "transcript.md"
    transcript.write_text(f"# README, followed with Python {sys.version.split()[0]}\n")
    for command in commands((folder / "README.md").read_text(encoding="utf-8")):
        print(command.splitlines()[0], flush=True)
        began = time.monotonic()
        code, text = run(command, folder, environment)
        failed += code not in (0, 130)
        told = [f"\n```\n$ {command}", *last_lines(text), "```", ""]
        told.append(f"exit code {code}, {time.monotonic() - began:.0f} s")
        with transcript.open("a") as file:
            file.write("\n".join(told) + "\n")
        print(f"  exit code {code}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
