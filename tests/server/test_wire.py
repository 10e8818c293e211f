"""A real server on a socket: disconnects, draining, raw bytes, slow and rude clients."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time

import httpx
import pytest

from specctl.core.errors import ResourceError, SpecctlError
from specctl.runtime.sampling.grammar import GrammarError, GrammarSpec
from specctl.server import listen
from specctl.server.logs import CLIENT_LEFT
from specctl.server.requests import body
from specctl.server.requests import grammar_compiler as forms
from specctl.server.requests.limits import Limits
from specctl_testing.runtime.serving import StubService
from specctl_testing.runtime.web import Running, error_of, running

PATH = "/v1/completions"
LONG = StubService().text * 20


def raw(server: Running, data: bytes, is_all: bool = False) -> bytes:
    """What comes back for these bytes until the server hangs up, or has nothing more to say.
    `is_all`: the client hangs up behind them."""
    with server.connect() as client:
        client.settimeout(1.0)
        found = b""
        try:
            client.sendall(data)
            if is_all:
                client.shutdown(socket.SHUT_WR)
            while part := client.recv(65536):
                found += part
        except (TimeoutError, ConnectionError):
            pass
        return found


def request(content: bytes, *headers: bytes) -> bytes:
    """A POST of these bytes."""
    head = [b"POST /v1/completions HTTP/1.1", b"Host: 127.0.0.1", *headers]
    if not any(h.lower().startswith((b"content-length", b"transfer")) for h in headers):
        head.append(b"Content-Length: %d" % len(content))
    if not any(h.lower().startswith(b"content-type") for h in headers):
        head.append(b"Content-Type: application/json")
    return b"\r\n".join([*head, b"Connection: close", b"", content])


def wait_until(condition, seconds: float = 3.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


GARBAGE = {
    "truncated JSON": (request(b'{"prompt": "x'), b"400"),
    "bytes that are no UTF-8": (request(b'{"prompt": "\xff\xfe"}'), b"400"),
    "an empty body": (request(b""), b"400"),
    "a number": (request(b"1"), b"400"),
    "NaN": (request(b'{"prompt": "x", "temperature": NaN}'), b"400"),
    "an infinite number": (request(b'{"prompt": "x", "temperature": 1e309}'), b"400"),
    "a huge integer": (request(b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}"), b"400"),
    "a key that occurs twice": (request(b'{"prompt": "x", "prompt": "y"}'), b"400"),
    "half a surrogate pair": (request(b'{"prompt": "\\ud83d"}'), b"400"),
    "a NUL in the prompt": (request(b'{"prompt": "a\\u0000b"}'), b"200"),
    "endless keys": (request(json.dumps({f"k{i}": 0 for i in range(60_000)}).encode()), b"400"),
    "deep nesting": (request(b"[" * 500_000 + b"]" * 500_000), b"400"),
    "quotes that never close": (request(b'{"p": "' + b'\\"' * 400_000), b"400"),
    "brackets in a string": (request(b'{"prompt": "' + b"[" * 1000 + b'"}'), b"200"),
    "another type": (
        request(b"prompt=x", b"Content-Type: application/x-www-form-urlencoded"),
        b"415",
    ),
    "another charset": (request(b"{}", b"Content-Type: application/json; charset=utf-16"), b"415"),
    "a compressed body": (request(b"{}", b"Content-Encoding: gzip"), b"415"),
    "a body over the cap": (request(b'{"prompt": "' + b"x" * (1 << 20) + b'"}'), b"413"),
    "a body of 10 MiB": (request(b" " * (10 << 20)), b"413"),
    "a body over the cap in chunks": (
        request(b"110000\r\n" + b"x" * 0x110000 + b"\r\n0\r\n\r\n", b"Transfer-Encoding: chunked"),
        b"413",
    ),
    "no HTTP at all": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 9 + b"\r\n\r\n", b"400"),
    "a request line without an end": (b"G" * 70_000, b"400"),
    "two lengths": (request(b"{}", b"Content-Length: 2", b"Content-Length: 3"), b"400"),
    "a negative length": (request(b"{}", b"Content-Length: -1"), b"400"),
    "a length and chunks": (
        request(b"0\r\n\r\n", b"Content-Length: 9", b"Transfer-Encoding: chunked"),
        b"400",
    ),
    "an unknown method": (
        b"FOO / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
        b"405",
    ),
    "a websocket": (
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"200",
    ),
    "a path out of the page": (
        b"GET /page/../../app.py HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
        b"404",
    ),
}


@pytest.fixture(scope="module")
def server():
    with running(StubService()) as found:
        yield found


@pytest.mark.parametrize("name", GARBAGE)
def test_what_is_no_request_is_answered_with_an_error_in_shape(server: Running, name: str) -> None:
    sent, status = GARBAGE[name]
    got = raw(server, sent)
    head, _, content = got.partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == status, got[:300]
    if status != b"200":
        assert set(json.loads(content)["error"]) == {"message", "type", "param", "code"}
    assert httpx.get(f"{server.url}/ready").status_code == 200


def test_a_length_that_is_never_reached_is_a_client_that_left(server: Running) -> None:
    assert raw(server, request(b"{", b"Content-Length: 100"), is_all=True) == b""
    assert httpx.get(f"{server.url}/ready").status_code == 200


def test_a_head_that_dribbles_in_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "HEAD_SECONDS", 0.3)
    with running(StubService()) as server, server.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost")
        started = time.monotonic()
        assert client.recv(100) == b""
        assert time.monotonic() - started < 2


def test_a_body_that_dribbles_in_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_SECONDS", 0.3)
    with running(StubService()) as server, server.connect() as client:
        client.sendall(request(b"{", b"Content-Length: 100"))
        assert b" 408 " in client.recv(4096)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_rows_and_its_place_in_the_queue(stream: bool) -> None:
    service = StubService(delay=0.05, text=LONG, limits=Limits(max_batch=2, max_queue=8))
    with running(service) as server:
        clients = [server.connect() for _ in range(6)]
        sent = json.dumps({"prompt": "x", "max_tokens": 400, "stream": stream, "n": 1})
        for client in clients:
            client.sendall(request(sent.encode()))
        assert wait_until(lambda: service.status().running + service.status().waiting == 6)
        for client in clients:
            client.close()
        assert wait_until(lambda: service.status().running + service.status().waiting == 0, 1.0)
        assert service.counters.requests == {"cancelled": 6}
        assert httpx.post(f"{server.url}{PATH}", json={"prompt": "x"}).status_code == 200


def test_a_client_that_leaves_before_its_grammar_is_compiled_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, compiled = threading.Event(), []

    def slow(spec: GrammarSpec, target: object) -> None:
        compiled.append(spec)
        gate.wait(20)
        raise GrammarError("the grammar is not valid")

    monkeypatch.setattr(forms, "compile_grammar", slow)
    service = StubService()
    with running(service) as server:
        clients = [server.connect() for _ in range(forms.MOST_WAITING)]
        for at, client in enumerate(clients):
            grammar = {"type": "regex", "pattern": f"{at}"}
            sent = json.dumps({"prompt": "x", "max_tokens": 4, "grammar": grammar})
            client.sendall(request(sent.encode()))
        one_more = {"prompt": "x", "grammar": {"type": "regex", "pattern": "a"}}
        assert wait_until(lambda: len(compiled) == 1)
        for client in clients:
            client.close()
        left = f'status="{CLIENT_LEFT}"}} {len(clients)}.0'
        assert wait_until(lambda: left in httpx.get(f"{server.url}/metrics").text, 20.0)
        gate.set()
        assert httpx.post(f"{server.url}{PATH}", json=one_more).status_code == 400, "there is room"
        assert len(compiled) == 2, "the one that was compiled when its client left, and the new one"
        assert service.asks == []


def test_draining_finishes_what_runs_refuses_what_comes_and_leaves_with_0() -> None:
    service = StubService(delay=0.05, text=LONG)
    with running(service) as server:
        found: list[httpx.Response] = []

        def ask(stream: bool) -> None:
            body = {"prompt": "x", "max_tokens": 60, "stream": stream}
            found.append(httpx.post(f"{server.url}{PATH}", json=body, timeout=20))

        threads = [threading.Thread(target=ask, args=(i % 2 == 0,)) for i in range(6)]
        for thread in threads:
            thread.start()
        assert wait_until(lambda: service.status().running == 6)
        server.listener.end(signal.SIGTERM)
        assert wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        assert service.status().running == 6, "told while all of them still run"
        refused = httpx.post(f"{server.url}{PATH}", json={"prompt": "x"})
        assert (refused.status_code, error_of(refused)["code"]) == (503, "draining")
        for thread in threads:
            thread.join()
        server.thread.join(10)
        assert server.codes == [0]
        assert [response.status_code for response in found] == [200] * 6
        ends = [
            r.text.endswith("data: [DONE]\n\n")
            for r in found
            if "chunk" in r.text or r.text.startswith("data")
        ]
        assert ends == [True] * 3


def test_what_outlasts_the_drain_is_cut_with_an_error_and_the_exit_code_says_so() -> None:
    service = StubService(delay=0.2, text=LONG)
    with running(service, drain=0.3) as server:
        body = {"prompt": "x", "max_tokens": 300, "stream": True}
        with httpx.stream("POST", f"{server.url}{PATH}", json=body, timeout=20) as response:
            lines = response.iter_lines()
            next(lines)
            server.listener.end(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "stopped"
        server.thread.join(10)
        assert server.codes == [128 + signal.SIGTERM]


def test_an_engine_that_fails_ends_the_process_and_says_why() -> None:
    class Failing(StubService):
        def start(self) -> None:
            self.state, self.failure = "failed", "no memory for the caches"

    listener = listen.Listener(None, Failing(), listen.bind("127.0.0.1", 0), 1.0, False)
    with pytest.raises(ResourceError, match="no memory for the caches"):
        asyncio.run(listener.run(lambda: None))


def test_a_port_in_use_and_an_address_of_others_are_errors_in_words() -> None:
    taken = listen.bind("127.0.0.1", 0)
    taken.listen()
    with pytest.raises(ResourceError, match="--port 0"):
        listen.bind("127.0.0.1", taken.getsockname()[1])
    taken.close()
    with pytest.raises(ResourceError, match="cannot listen on 192"):
        listen.bind("192.0.2.1", 0)
    with pytest.raises(SpecctlError, match="no address of this machine"):
        listen.bind("no.such.host.invalid", 0)
