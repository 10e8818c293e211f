"""Who is let in: the matrix of every route and every kind of key, host names, files of keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from specctl.core.errors import FileError, SpecctlError
from specctl.server.auth import OPEN, Door, is_loopback, read_keys
from specctl_testing.runtime.keys import BASIC, KEYS, OFFERS, OTHER, RIGHT, routes
from specctl_testing.runtime.serving import StubService
from specctl_testing.runtime.web import ask, error_of, make_app


def test_every_route_but_health_asks_for_a_key() -> None:
    app = make_app(keys=KEYS)
    found = [*routes(app), ("GET", "/nothing"), ("POST", "/v1/audio"), ("GET", "/health/")]
    assert len(found) > 10
    for method, path in found:
        for name, (headers, is_right) in OFFERS.items():
            sent: Any = {key.encode(): value.encode("latin-1") for key, value in headers.items()}
            response = ask(app, method, path, headers=sent)
            if is_right or path in OPEN:
                assert response.status_code != 401, (method, path, name)
                continue
            assert response.status_code == 401, (method, path, name)
            assert response.headers["www-authenticate"]
            if path.startswith("/v1/messages"):
                assert response.json()["error"]["type"] == "authentication_error"
            elif method != "HEAD":
                assert error_of(response)["code"] == "invalid_api_key"


def test_only_health_and_ready_are_open() -> None:
    assert {"/health", "/ready"} == OPEN


def test_a_browser_may_give_the_key_as_a_password_for_the_page_alone() -> None:
    app = make_app(keys=KEYS)
    headers = {"Authorization": f"Basic {BASIC}"}
    assert ask(app, "GET", "/", headers=headers).status_code == 200
    assert ask(app, "GET", "/").headers["www-authenticate"].startswith("Basic ")
    assert ask(app, "GET", "/v1/models", headers=headers).status_code == 401
    assert ask(app, "GET", "/", headers={"Authorization": "Basic !"}).status_code == 401


def test_without_keys_everything_is_open() -> None:
    app = make_app()
    assert ask(app, "GET", "/v1/models").status_code == 200
    assert ask(app, "GET", "/").status_code == 200


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        ("127.0.0.1:8000", True),
        ("localhost", True),
        ("LOCALHOST:1", True),
        ("[::1]:8000", True),
        ("127.9.9.9", True),
        ("api.example.org", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:8000", False),
        ("192.168.0.7", False),
        ("", False),
    ],
)
def test_on_loopback_only_its_own_names_are_answered(host: str, is_known: bool) -> None:
    app = make_app(door=Door(hosts=("api.example.org",)))
    response = ask(app, "GET", "/v1/models", headers={"Host": host})
    assert response.status_code == (200 if is_known else 403)
    if not is_known:
        assert error_of(response)["code"] == "unknown_host"


def test_nothing_allows_pages_of_other_sites_to_read_an_answer() -> None:
    app = make_app()
    for method in ("GET", "POST", "OPTIONS"):
        response = ask(app, method, "/v1/models", headers={"Origin": "http://evil.example"})
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_is_loopback_knows_this_machine() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org")))


def test_keys_come_from_a_file_and_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("# ours\none  # of Ann\n\ntwo\n")
    file.chmod(0o600)
    keys, warning = read_keys(file, {"SPECCTL_API_KEYS": "three, four"})
    assert warning is None
    owners = [keys.owner([key]) for key in ("one", "two", "three", "four")]
    assert None not in owners
    assert len(set(owners)) == 4
    assert keys.owner(["# ours", "five", ""]) is None
    assert "one" not in repr(keys)


def test_a_file_of_keys_that_others_may_read_is_warned_about(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("one\n")
    file.chmod(0o644)
    assert "chmod 600" in str(read_keys(file, {})[1])


def test_a_file_without_keys_or_with_impossible_ones_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("# none\n")
    with pytest.raises(FileError, match="holds no key"):
        read_keys(file, {})
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(FileError, match="is not UTF-8 text"):
        read_keys(file, {})
    with pytest.raises(SpecctlError, match="printable ASCII"):
        read_keys(None, {"SPECCTL_API_KEYS": "sch\u00f6n"})


def test_every_key_is_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    from specctl.server import auth

    compared: list[int] = []
    equal = auth.hmac.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        compared.append(len(a))
        return equal(a, b)

    monkeypatch.setattr(auth.hmac, "compare_digest", counting)
    for key in (RIGHT, OTHER, "x" * 8192):
        KEYS.owner([key])
    assert compared == [32] * 6


def test_the_owner_reaches_the_service_only_as_a_digest() -> None:
    service = StubService()
    body = {"prompt": "x", "prompt_cache_key": "talk"}
    ask(
        make_app(service, keys=KEYS),
        "POST",
        "/v1/completions",
        json=body,
        headers={"X-Api-Key": RIGHT},
    )
    assert re.fullmatch(r"[0-9a-f]{64}", str(service.asks[0].conversation))
