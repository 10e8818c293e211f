"""`specctl serve`: what it refuses before it loads anything, and one run from start to end."""

from __future__ import annotations

import importlib.util
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from specctl.cli.commands.serve import BATCHINGS, _learning_line
from specctl.cli.options.target_choice import TargetChoice
from specctl.core.errors import Exit
from specctl.runtime.batching import BATCHINGS as KNOWN
from specctl.server.listen import ECHO_SECONDS

NEVER_ENDS = {"1": -100, "5": -100}  # the tokens that end a text of the embedded target
Start = Callable[..., subprocess.Popen[str]]


def test_its_help_imports_neither_torch_nor_a_server() -> None:
    code = "import sys; from specctl.cli.main import main; main(['serve', '--help']); "
    code += "print(sorted({'torch', 'fastapi', 'uvicorn', 'transformers'} & set(sys.modules)))"
    environment = {"PYTHONPATH": "src", "PATH": ""}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert ran.stdout.splitlines()[-1] == "[]"
    assert "--api-key-file" in ran.stdout


def test_the_batch_policies_it_offers_are_those_that_exist() -> None:
    assert set(BATCHINGS) == {"auto", *KNOWN}


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("--host", "0.0.0.0"), Exit.USAGE, "--api-key-file"),
        (("--host", "::"), Exit.USAGE, "access.insecure_no_auth=true"),
        (
            ("--host", "no.such.host.invalid", "--set", "access.insecure_no_auth=true"),
            Exit.USAGE,
            "leave --host out",
        ),
        (("--api-key-file", "EMPTY"), Exit.FILE, "holds no key"),
        (("--api-key-file", "absent.txt"), Exit.FILE, "absent.txt"),
        (("--record", "absent/traffic.jsonl"), Exit.FILE, "--record"),
        (("--batching", "goodputt", "--draft", "auto"), Exit.USAGE, "--batching goodput"),
        (("--batching", "tetris"), Exit.USAGE, "--draft auto"),
        (("--set", "api.tool_parser=hermess"), Exit.RECIPE, "hermes"),
        (("--port", "70000"), Exit.USAGE, "specctl serve --help"),
        (("--max-batch", "0"), Exit.USAGE, "specctl serve --help"),
        (("--target", "tinny", "--port", "0"), Exit.USAGE, "tiny"),
    ],
)
def test_a_mistake_is_told_before_anything_is_loaded(
    run: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    code: Exit,
    told: str,
) -> None:
    monkeypatch.delenv("SPECCTL_API_KEYS", raising=False)
    monkeypatch.setattr("specctl.runtime.target.target.load_target", None)
    (tmp_path / "empty.txt").write_text("# no keys yet\n")
    words = tuple(str(tmp_path / "empty.txt") if word == "EMPTY" else word for word in words)
    ran = run("serve", *words, "--json")
    assert ran.code == code, ran.err
    assert told in ran.out + ran.err


def test_a_port_in_use_is_told_with_another_to_take(run: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ran = run("serve", "--port", taken.getsockname()[1])
    assert ran.code == Exit.RESOURCES
    assert "--port 0" in ran.err


def test_without_the_extra_it_says_what_to_install(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    absent = ("fastapi", "uvicorn")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in absent else find(name)
    )
    ran = run("serve")
    assert ran.code == Exit.USAGE
    assert "pip install 'specctl-toolkit[serve]'" in ran.err
    assert "no fastapi, uvicorn" in ran.err


def events(process: subprocess.Popen[str], kind: str) -> dict[str, Any]:
    """The next event of that kind on stdout."""
    assert process.stdout is not None
    found = (json.loads(line) for line in process.stdout)
    return next(event for event in found if event["event"] == kind)


def test_a_server_from_its_first_line_to_its_last(start: Start, tmp_path: Path) -> None:
    keys, traffic = tmp_path / "keys.txt", tmp_path / "traffic.jsonl"
    keys.write_text("the-key\n")
    keys.chmod(0o600)
    words = ("--name", "mine", "--max-batch", 2, "--max-len", 200, "--draft", "prompt-lookup")
    process = start("serve", *words, "--batching", "fixed", "--port", 0, "--jsonl",
                    "--api-key-file", keys, "--record", traffic)  # fmt: skip
    ready = events(process, "ready")
    assert (ready["slots"], ready["context"], ready["speculation"]) == (2, 200, "on")
    assert ready["url"] == f"http://127.0.0.1:{ready['port']}"
    assert ready["cache_bytes"] > 0
    with httpx.Client(base_url=ready["url"], timeout=60) as client:
        assert client.get("/v1/models").status_code == 401
        client.headers["Authorization"] = "Bearer the-key"
        assert client.get("/v1/models").json()["data"][0]["id"] == "mine"
        body = {"prompt": "import os\nimport", "max_tokens": 8, "temperature": 0}
        text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        body = {"prompt": "x", "max_tokens": 190, "stream": True, "logit_bias": NEVER_ENDS}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
    result = events(process, "result")
    assert process.wait(30) == 0
    assert result["ok"]
    assert result["result"]["tokens"] >= 198
    assert f"specctl distill --target tiny --data {traffic}" in result["next"]
    recorded = [json.loads(line) for line in traffic.read_text().splitlines()]
    assert recorded[0] == {"text": "import os\nimport" + text}
    assert process.stderr is not None
    logs = [json.loads(line) for line in process.stderr.read().splitlines()]
    assert [log["status"] for log in logs if log["event"] == "request"] == [401, 200, 200, 200]
    assert [log["event"] for log in logs if log["event"] != "request"] == ["ready", "draining"]


def test_kept_traffic_is_followed_by_the_command_that_learns_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kept, target = Path("traffic"), TargetChoice("tiny")
    for free in ("prompt-lookup", "none", "runs/a+prompt-lookup"):
        line = _learning_line(kept, free, target)
        assert line == "specctl distill --target tiny --data traffic"
    package = Path("runs/a/package")
    package.mkdir(parents=True)
    (package / "manifest.json").touch()
    follows = "specctl train-draft --target tiny --follow traffic --init runs/a --out runs/a-"
    assert _learning_line(kept, "runs/a/package", target) == follows + "2"
    Path("runs/a-2").mkdir()
    assert _learning_line(kept, "runs/a", target) == follows + "3"


@pytest.mark.proof
def test_a_second_signal_ends_it_where_it_stands(start: Start) -> None:
    process = start("serve", "--port", 0, "--jsonl", "--set", "limits.drain=300")
    url = events(process, "ready")["url"]
    body = {"prompt": "x", "max_tokens": 1000, "stream": True, "logit_bias": NEVER_ENDS}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()  # held: who drops it has left
        next(lines)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)  # an echo, as supervisors send it
        while httpx.get(f"{url}/ready").status_code != 503:
            time.sleep(0.01)
        time.sleep(ECHO_SECONDS)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM
