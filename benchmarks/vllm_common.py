"""vLLM beside specctl: a server process on a checkpoint of the Hugging Face layout."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
START_SECONDS = 600
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(HERE),
}  # fmt: skip


class NoEngine(Exception):
    """vLLM does not start here."""


@contextmanager
def serving(
    python: str,
    model: Path,
    log: Path,
    *,
    dtype: str = "float32",
    longest: int = 1024,
    words: Sequence[str] = (),
    settings: Mapping[str, str] = {},
) -> Iterator[str]:
    """The address of a server on a free port. `longest` tokens are the most that a request may
    have, `words` more arguments of the server, `settings` more variables of its environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--dtype", dtype, "--port", str(port), "--max-model-len", str(longest),
        "--generation-config", "vllm", *words,
    ]  # fmt: skip
    environment = {**os.environ, **SETTINGS, **settings}
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=log.parent)
    try:
        yield _answering(f"http://127.0.0.1:{port}", server, log)
    finally:
        server.terminate()
        server.wait(60)


def _answering(url: str, server: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(START_SECONDS):
        try:
            urllib.request.urlopen(url + "/v1/models", timeout=1).read()
            return url
        except OSError:
            if server.poll() is not None:
                raise NoEngine(f"it ended:\n{log.read_text()[-3000:]}") from None
            time.sleep(1)
    raise NoEngine(f"it did not start in {START_SECONDS} s: {log}")
