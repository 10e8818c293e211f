"""The page at `/`: the files beside this module, under a policy that lets nothing in from outside.

The files are open to everybody, for they know nothing: a key that is typed into the page goes into
the requests that it makes, and what those may do is decided where they arrive.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).with_name("page")
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # kept, but requested again after an update
}


def page_routes() -> list[Route]:
    """`/` and the files it needs; every one answers GET and HEAD without a key."""
    files = sorted(path for path in FOLDER.iterdir() if path.suffix in TYPES)
    return [
        _route("/" if path.name == "index.html" else f"/page/{path.name}", path) for path in files
    ]


def _route(address: str, path: Path) -> Route:
    body = path.read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {**HEADERS, "ETag": tag, "Content-Type": TYPES[path.suffix]}

    async def serve(request: Request) -> Response:
        known = tag in request.headers.get("if-none-match", "")
        return Response(b"" if known else body, 304 if known else 200, headers=headers)

    return Route(address, serve, methods=["GET"], name=f"page:{path.name}", include_in_schema=False)
