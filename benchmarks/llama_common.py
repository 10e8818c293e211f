"""llama.cpp beside specctl: its server, built for the CPU at hand, on a GGUF file.

The sources are those in the package llama-cpp-python. Building takes a C++ compiler, CMake and some
minutes; it prints the path that the benchmarks take as --llama-server:

    python benchmarks/llama_common.py runs/llama.cpp
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SOURCES = "llama-cpp-python==0.3.36"
SWITCHES = ("GGML_NATIVE=ON", "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF",
            "LLAMA_BUILD_UI=OFF", "CMAKE_BUILD_TYPE=Release")  # fmt: skip
STARTED_WITHIN = 120.0  # seconds


class NoServer(Exception):
    """llama.cpp does not start here, or cannot hold this target."""


def built_server(folder: Path) -> str:
    """The path of llama-server in that folder; built if it is not there yet."""
    server = folder / "build" / "bin" / "llama-server"
    if not server.exists():
        folder.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        name = SOURCES.split("=")[0]
        subprocess.run([*words, "--no-binary", name, "-d", str(folder), SOURCES], check=True)
        with tarfile.open(next(folder.glob("llama_cpp_python-*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        sources = next(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))
        switches = [f"-D{switch}" for switch in SWITCHES]
        build = ["cmake", "--build", str(folder / "build"), "--target", "llama-server", "-j"]
        made = ["cmake", "-S", str(sources), "-B", str(folder / "build"), *switches]
        subprocess.run(made, check=True, stdout=sys.stderr)
        subprocess.run([*build, str(os.cpu_count())], check=True, stdout=sys.stderr)
    return str(server)


@contextmanager
def serving(
    server: str,
    model: Path,
    users: int,
    context: int,
    threads: int,
    draft: Sequence[str] = (),
    cache: str = "f16",
    lookup: Sequence[int] = (),
) -> Iterator[str]:
    """The address of a server. `draft` is a GGUF file and how many tokens it drafts, `lookup` how
    long an n-gram of the text must be and how many tokens are copied behind it; `cache` is the type
    of keys and values (llama.cpp's own choice is f16)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings: dict[str, Any] = {
        "model": model, "parallel": users, "ctx-size": context, "threads": threads,
        "threads-batch": threads, "n-gpu-layers": 0, "host": "127.0.0.1", "port": port,
        "cache-type-k": cache, "cache-type-v": cache,
    }  # fmt: skip
    if cache == "f32":  # the fused attention rounds to half precision inside
        settings["flash-attn"] = "off"
    if draft:
        settings |= {
            "spec-type": "draft-simple", "spec-draft-model": draft[0], "spec-draft-ngl": 0,
            "spec-draft-n-max": draft[1], "spec-draft-n-min": 0, "spec-draft-p-min": 0.0,
            "spec-draft-threads": threads, "spec-draft-threads-batch": threads,
            "spec-draft-type-k": cache, "spec-draft-type-v": cache,
        }  # fmt: skip
    if lookup:
        settings |= {
            "spec-type": "ngram-simple", "spec-ngram-simple-size-n": lookup[0],
            "spec-ngram-simple-size-m": lookup[1],
        }  # fmt: skip
    words = [server, *(str(w) for name, value in settings.items() for w in (f"--{name}", value))]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process, url = subprocess.Popen(words, **quiet), f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + STARTED_WITHIN
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > until:
                raise NoServer(f"it did not start; run by hand: {' '.join(words)}")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """What a server answers to a JSON body."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return dict(json.load(answer))


def complete(url: str, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """A greedy answer to a prompt of ids, with the server's own figures."""
    body = {"prompt": list(prompt), "n_predict": tokens, "temperature": 0.0, "ignore_eos": True}
    return post(f"{url}/completion", body | {"return_tokens": True, "cache_prompt": False})


def main() -> None:
    parser = argparse.ArgumentParser(description="Build llama.cpp's server for this CPU.")
    parser.add_argument("folder", type=Path)
    print(built_server(parser.parse_args().folder.resolve()))


if __name__ == "__main__":
    main()
