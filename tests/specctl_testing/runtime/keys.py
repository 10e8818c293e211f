"""Keys that requests offer, right and wrong, and every route they may be offered to."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator

from fastapi import FastAPI
from starlette.routing import Route

from specctl.server.auth import Keys

RIGHT, OTHER = "right-key", "other-key"


KEYS = Keys.of([RIGHT, OTHER])


BASIC = base64.b64encode(f"me:{RIGHT}".encode()).decode()


OFFERS: dict[str, tuple[dict[str, str], bool]] = {
    "none": ({}, False),
    "wrong": ({"Authorization": "Bearer wrong-key"}, False),
    "right": ({"Authorization": f"Bearer {RIGHT}"}, True),
    "the other right one": ({"Authorization": f"bearer {OTHER}"}, True),
    "right as X-Api-Key": ({"X-Api-Key": RIGHT}, True),
    "wrong as X-Api-Key": ({"X-Api-Key": "wrong-key"}, False),
    "another scheme": ({"Authorization": f"Token {RIGHT}"}, False),
    "no scheme": ({"Authorization": RIGHT}, False),
    "a longer key": ({"Authorization": f"Bearer {RIGHT}x"}, False),
    "a shorter key": ({"Authorization": f"Bearer {RIGHT[:-1]}"}, False),
    "an empty key": ({"Authorization": "Bearer "}, False),
    "8 kB": ({"Authorization": "Bearer " + "x" * 8192}, False),
    "bytes": ({"X-Api-Key": "\xff\xfe"}, False),
}


def routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Every method and path that the app knows, as it knows them now."""
    for route in app.routes:
        assert isinstance(route, Route), f"{route} is no route: the matrix must learn about it"
        path = re.sub(r"\{[^}]*\}", "x", route.path)
        for method in sorted(route.methods or ()):
            yield method, path
