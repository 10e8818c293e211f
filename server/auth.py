"""Access: API keys, and the host names that this server answers to. Closed unless opened.

One middleware stands before every route, known or not: a route that is added later is closed by
itself. `/health` and `/ready` are open, for whoever watches the server holds no key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specctl.core.errors import FileError, SpecctlError, unreadable
from specctl.core.storage.bounded_read import read_text
from specctl.server.errors import ApiError

OPEN = frozenset({"/health", "/ready"})
DRAFTER = "/v1/drafter"
ADMIN = frozenset({DRAFTER})  # what an admin key opens, and no other key
VARIABLE = "SPECCTL_API_KEYS"
ADMIN_VARIABLE = "SPECCTL_ADMIN_KEYS"
LOOPBACK = frozenset({"localhost", "ip6-localhost"})


@dataclass(frozen=True, slots=True)
class Keys:
    """The digests of the keys that are let in; none at all lets everybody in."""

    digests: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, keys: Iterable[str]) -> Keys:
        return cls(tuple(hashlib.sha256(key.encode()).digest() for key in keys))

    def owner(self, offered: Iterable[str]) -> str | None:
        """A name for who offers a valid key, None for nobody. Takes the same time whichever key is
        offered: digests are compared, and all of them."""
        found = None
        for key in offered:
            digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
            for known in self.digests:
                if hmac.compare_digest(digest, known):
                    found = hashlib.sha256(b"owner:" + known).hexdigest()
        return found


def read_keys(
    file: Path | None, environment: Mapping[str, str], option: str = "--api-key-file"
) -> tuple[Keys, str | None]:
    """Keys of the file that an option names (one a line, # begins a comment) and of
    SPECCTL_API_KEYS (by commas); and a warning if others may read the file."""
    words = [word.strip() for word in environment.get(VARIABLE, "").split(",")]
    warning = None
    if file is not None:
        try:
            lines = read_text(file).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            do = "one key per line in UTF-8"
            raise unreadable("the file of keys", file, error, option, "a text file", do) from error
        words += [line.partition("#")[0].strip() for line in lines]
        if os.name == "posix" and file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            warning = f"others may read the keys in {file}: chmod 600 {file}"
    keys = [word for word in words if word]
    if any(not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise SpecctlError(
            "a key holds a character that no HTTP header can carry",
            where=str(file) if file is not None else VARIABLE,
            expected="printable ASCII without blanks",
            do="python -c 'import secrets; print(secrets.token_urlsafe(32))' makes a good one",
        )
    if file is not None and not keys:
        raise FileError(
            "the file of keys holds no key",
            where=str(file),
            expected="one key per line",
            do=f"write one, or leave {option} out",
        )
    return Keys.of(keys), warning


def is_loopback(host: str) -> bool:
    """Whether an address, or the name in a Host header, means this machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower().rstrip(".") in LOOPBACK


@dataclass(frozen=True, slots=True)
class Door:
    """What a request must show. `hosts`: the names that may stand in its Host header beside this
    machine's own; None lets any name in. A page of another site whose name points here (DNS
    rebinding) sends that site's name, so a server on loopback names its own. `browsed`: paths that
    people open by hand; a browser asks for the key there (as the password of HTTP Basic), and the
    page that it then shows may use it: `Sec-Fetch-Site` is a header that no script can write.
    `admin`: the keys of ADMIN's paths, which are closed without any."""

    keys: Keys = Keys()
    hosts: tuple[str, ...] | None = None
    browsed: frozenset[str] = frozenset()
    admin: Keys = Keys()

    def check(self, path: str, headers: Headers) -> str:
        """The owner of the request; ApiError if it is not let in."""
        host = headers.get("host", "")
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if self.hosts is not None and not is_loopback(name) and name.lower() not in self.hosts:
            message = f"this server does not answer to the host name {name[:100]!a}"
            raise ApiError(403, message, code="unknown_host")
        keys = self.admin if path in ADMIN and self.admin.digests else self.keys
        if not keys.digests or path in OPEN:
            return ""
        owner = keys.owner(self._offered(path, headers))
        if owner is None:
            raise self._unknown(path, headers)
        return owner

    def _offered(self, path: str, headers: Headers) -> list[str]:
        offered = headers.getlist("x-api-key")
        is_ours = path in self.browsed or headers.get("sec-fetch-site") == "same-origin"
        for value in headers.getlist("authorization"):
            scheme, _, key = value.partition(" ")
            if scheme.lower() == "bearer":
                offered.append(key.strip())
            elif scheme.lower() == "basic" and is_ours:
                offered.append(_password(key))
        return offered

    def _unknown(self, path: str, headers: Headers) -> ApiError:
        given = "authorization" in headers or "x-api-key" in headers
        message = "the API key is not valid" if given else "an API key is needed"
        ask = 'Basic realm="specctl: any name, the API key as password"'
        scheme = ask if path in self.browsed else "Bearer"
        return ApiError(
            401,
            f"{message}: send Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": scheme},
        )


def _password(word: str) -> str:
    try:
        return base64.b64decode(word, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


class AuthMiddleware:
    """The middleware: nothing behind it sees a request that the door refuses."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self.app, self.door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        assert scope["type"] == "http", "websockets are switched off"
        try:
            owner = self.door.check(scope["path"], Headers(scope=scope))
        except ApiError as error:
            await error.response(scope)(scope, receive, send)
            return
        scope.setdefault("state", {})["owner"] = owner
        await self.app(scope, receive, send)
