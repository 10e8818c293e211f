"""A server that is bound answers while its model is loaded, and goes on where it stood."""

from __future__ import annotations

import time

import httpx
import pytest

from specctl.server.listen import bind, url_of
from specctl.server.loading import answering
from specctl_testing.runtime.serving import StubService
from specctl_testing.runtime.web import error_of, running


def test_while_it_loads_a_server_says_so_and_then_serves_on_the_same_socket() -> None:
    bound = bind("127.0.0.1", 0)
    with answering(bound), httpx.Client(base_url=url_of(bound), timeout=10) as client:
        until = time.monotonic() + 10
        while time.monotonic() < until:
            try:
                alive = client.get("/health")
                break
            except httpx.ConnectError:  # its thread has only begun
                time.sleep(0.01)
        assert (alive.status_code, alive.json()) == (200, {"status": "loading"})
        refused = client.post("/v1/chat/completions", json={"messages": []})
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) > 0
        assert error_of(refused)["code"] == "loading"
        theirs = client.post("/v1/messages", json={}).json()
        assert theirs["error"] == {"type": "overloaded_error", "message": "the server is loading"}
        assert client.get("/ready").status_code == 503
    with running(StubService(), bound=bound) as server:
        assert server.url == url_of(bound)
        assert httpx.get(f"{server.url}/ready").status_code == 200


def test_what_fails_while_it_loads_leaves_the_port_to_others() -> None:
    bound = bind("127.0.0.1", 0)
    port = bound.getsockname()[1]
    with pytest.raises(ValueError, match="no model"), answering(bound):
        raise ValueError("no model")
    bound.close()
    bind("127.0.0.1", port).close()
