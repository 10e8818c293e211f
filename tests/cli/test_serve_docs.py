"""docs/serve.md: its clients get answers, its flags and metrics exist."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from specctl.cli.options.loading import DraftChoice
from specctl.runtime.target.target import Target
from specctl.server.engine_thread.service import Service
from specctl.server.requests.chat_template import ChatStyle
from specctl_testing.cli import commands
from specctl_testing.runtime.web import running

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
ADDRESS = "http://localhost:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


CLIENTS = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("curl")]
STARTS = re.findall(r"specctl serve [^\n`]*", "".join(blocks("ini") + blocks("dockerfile")))


@pytest.fixture(scope="module")
def address(tiny_target: Target) -> Iterator[str]:
    """A server like that of the page's first command, in this process."""
    loaded = DraftChoice("prompt-lookup").load(tiny_target)
    service = Service(tiny_target, loaded.drafter, loaded.policy)
    with running(service, style=ChatStyle.of(tiny_target, "hermes")) as server:
        yield server.url


def curl(command: str, address: str) -> httpx.Response:
    """What such a command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("-s", action="store_true")
    parser.add_argument("-N", action="store_true")
    parser.add_argument("-H", action="append", default=[])
    parser.add_argument("-d")
    given = parser.parse_args(shlex.split(command.replace("$(cat keys.txt)", "any-key"))[1:])
    headers = dict(line.split(": ", 1) for line in given.H)
    method, url = "GET" if given.d is None else "POST", given.url.replace(ADDRESS, address)
    assert url.startswith(address)
    return httpx.request(method, url, headers=headers, content=given.d, timeout=120)


def test_bodies_are_sent_as_what_the_server_accepts() -> None:
    """Also those for servers that no test starts."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages).replace("\\\n", "")
    sent = [line for line in text.splitlines() if line.startswith("curl") and " -d " in line]
    assert len(sent) > 6
    assert [line for line in sent if '-H "Content-Type: application/json"' not in line] == []


@pytest.mark.parametrize("command", CLIENTS)
def test_what_curl_is_shown_to_ask_is_answered(command: str, address: str) -> None:
    ran = curl(command, address)
    assert ran.status_code == 200, ran.text
    if '"stream": true' in command:
        assert ran.text.rstrip().endswith("data: [DONE]")
        return
    answer = ran.json()
    assert answer["object"] in ("list", "text_completion", "chat.completion")
    if "json_schema" in command:
        assert isinstance(json.loads(answer["choices"][0]["text"])["age"], int)
    if "yes|no" in command:
        assert answer["choices"][0]["text"] in ("yes", "no")


def test_the_client_of_openai_streams(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks("python"):
        exec(compile(block.replace(ADDRESS, address), "serve.md example", "exec"), {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("flags", STARTS)
def test_commands_in_files_of_other_programs_are_understood(flags: str) -> None:
    words: list[str] = shlex.split(flags)
    assert commands.why_not(words[1:]) is None, commands.why_not(words[1:])


def test_the_container_starts_what_is_understood() -> None:
    found: list[Any] = [
        json.loads(line) for line in re.findall(r"^CMD (\[.*\])$", PAGE, re.MULTILINE)
    ]
    assert found
    for words in found:
        assert commands.why_not(words[1:]) is None, commands.why_not(words[1:])


def test_every_flag_and_metric_of_the_page_exists(address: str) -> None:
    flags = set(re.findall(r"`(--[a-z-]+)`", PAGE))
    missing = [f for f in flags if not commands.has_flag("serve", f)]
    assert not missing
    scraped = httpx.get(address + "/metrics", timeout=60).text
    names = re.findall(r"`(specctl:\w+)`", PAGE)
    assert len(names) > 10
    unknown = [
        name for name in names if not re.search(rf"^{name}(_bucket)?[ {{]", scraped, re.MULTILINE)
    ]
    optional = ("features_dropped", "features_kept", "record_dropped")
    of_some = tuple(f"specctl:{what}_" for what in ("adapter", "chosen"))  # and test_drafters.py
    kept = sorted(name for name in unknown if not name.startswith(of_some))
    assert kept == [f"specctl:{name}_total" for name in optional], "where it is kept"
