"""The page at /docs: every route and field of the API, written from its own OpenAPI schema.

It is one file of HTML without scripts, and needs nothing but the style sheet of the page at `/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.routing import Route

from specctl.server.page import HEADERS

DOCS = "/docs"
Schema = Mapping[str, Any]


def docs_route(app: FastAPI) -> Route:
    """The route of that page. It is written at the first request."""
    written: list[str] = []

    async def serve(request: Request) -> Response:
        if not written:
            written.append(docs_page(app.openapi()))
        headers = {**HEADERS, "Content-Type": "text/html; charset=utf-8"}
        return Response(written[0], headers=headers)

    return Route(DOCS, serve, methods=["GET"], name="docs", include_in_schema=False)


def docs_page(schema: Schema) -> str:
    """The whole page for an OpenAPI schema."""
    routes = [
        (method.upper(), path, about)
        for path, methods in schema["paths"].items()
        for method, about in methods.items()
    ]
    used = sorted(_mentioned(schema, [about for _, _, about in routes]))
    parts = [
        HEAD,
        '<main class="reference"><nav aria-label="Routes"><ul>',
        *(f'<li><a href="#{_id(m, p)}">{m} {escape(p)}</a></li>' for m, p, _ in routes),
        "</ul></nav>",
        *(_route(schema, *route) for route in routes),
        "<h2>Objects</h2>",
        *(_object(schema, name) for name in used),
        "</main></body></html>",
    ]
    return "\n".join(parts)


HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>specctl: API</title>
<link rel="icon" href="page/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="page/style.css"></head><body>
<header><h1><img src="page/icon.svg" alt="" width="22" height="22">API</h1>
<p class="model">The schema itself is <a href="openapi.json">openapi.json</a>;
the page to try it is <a href="./">here</a>.</p></header>"""


def _id(method: str, path: str) -> str:
    return escape(f"{method}-{path.strip('/')}".replace("/", "-").replace("{", "").replace("}", ""))


def _route(schema: Schema, method: str, path: str, about: Schema) -> str:
    body = about.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    lines = [
        f'<section><h2 id="{_id(method, path)}"><code>{method} {escape(path)}</code></h2>',
        f"<p>{escape(about.get('description', about.get('summary', '')))}</p>",
    ]
    if body is not None:
        lines.append(_fields(schema, _resolved(schema, body)))
    codes = ", ".join(sorted(about.get("responses", {})))
    return "\n".join([*lines, f'<p class="note">Answers: {escape(codes)}</p></section>'])


def _object(schema: Schema, name: str) -> str:
    found = schema["components"]["schemas"][name]
    about = escape(" ".join(found.get("description", "").split()))
    head = f'<section><h3 id="{escape(name)}">{escape(name)}</h3><p>{about}</p>'
    return f"{head}{_fields(schema, found)}</section>"


def _fields(schema: Schema, found: Schema) -> str:
    """A table of the fields of an object."""
    fields = found.get("properties", {})
    if not fields:
        return ""
    needed = set(found.get("required", ()))
    rows = [
        f'<tr><th scope="row"><code>{escape(name)}</code>'
        f"{' <small>required</small>' if name in needed else ''}</th>"
        f"<td>{_kind(one)}</td><td>{escape(_about(one))}</td></tr>"
        for name, one in fields.items()
    ]
    heads = "".join(f'<th scope="col">{head}</th>' for head in ("Field", "Type", "Notes"))
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="group" aria-label="Fields">{table}</div>'


def _kind(one: Schema) -> str:
    """The type of a field, with its range."""
    if "$ref" in one:
        name = escape(one["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for key in ("anyOf", "oneOf"):
        if key in one:
            kinds = [_kind(each) for each in one[key] if each.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if "const" in one:
        return escape(repr(one["const"]))
    if "enum" in one:
        return escape(", ".join(map(repr, one["enum"])))
    if one.get("type") == "array":
        return f"list of {_kind(one.get('items', {}))}{_range(one)}"
    return escape(str(one.get("type", "any"))) + _range(one)


RANGES = (
    ("minimum", "&ge; "), ("exclusiveMinimum", "&gt; "), ("maximum", "&le; "),
    ("exclusiveMaximum", "&lt; "), ("maxLength", "length &le; "), ("maxItems", "items &le; "),
)  # fmt: skip


def _range(one: Schema) -> str:
    ranges = [f"{sign}{one[key]:,}" for key, sign in RANGES if key in one]
    return f" <small>{', '.join(ranges)}</small>" if ranges else ""


def _about(one: Schema) -> str:
    return " ".join(str(one.get("description", "")).split())


def _resolved(schema: Schema, one: Schema) -> Schema:
    name = one["$ref"].rpartition("/")[2] if "$ref" in one else None
    found: Schema = one if name is None else schema["components"]["schemas"][name]
    return found


def _mentioned(schema: Schema, roots: Any) -> set[str]:
    """The objects that these speak of, and those that they speak of."""
    found: set[str] = set()
    waiting = [roots]
    while waiting:
        for name in _references(waiting.pop()):
            if name not in found:
                found.add(name)
                waiting.append(schema["components"]["schemas"][name])
    return found


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"].rpartition("/")[2]
        for inner in value.values():
            yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)
