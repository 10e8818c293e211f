"""Logs on stderr, one line per request: JSON, or short lines for people at a terminal. No prompts.

json.dumps writes control characters and everything beyond ASCII as escapes, so that nothing that a
client sends can end a line or move a terminal's cursor; lines for people are escaped alike. Whoever
polls (/health, /metrics, the page) is not logged, unless something is wrong.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specctl.server.errors import broken

LOG = logging.getLogger("specctl.server")
LOGGED = (LOG.name, "uvicorn.error", "asyncio")
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
CLIENT_LEFT = 499  # as nginx has it: nobody was there to read the answer
POLLED = frozenset({"/health", "/ready", "/metrics", "/v1/status"})
EXPECTED = frozenset({200, 304, 503})  # 503: not ready yet, which the log tells by itself
OnAnswered = Callable[[str, int], None]


class JsonLines(logging.Formatter):
    """A record as one JSON object. Of an exception: its type and where it came from, never its
    text, for that may quote a prompt."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "event": getattr(record, "event", record.name),
            **getattr(record, "fields", {}),
        }
        if not hasattr(record, "event"):
            first, *_ = record.getMessage().splitlines() or [""]  # further lines quote what failed
            line["message"] = first[:500]
        if record.exc_info and record.exc_info[0] is not None:
            frames = traceback.extract_tb(record.exc_info[2])[-12:]
            line["error"] = record.exc_info[0].__name__
            line["trace"] = [f"{f.filename}:{f.lineno} {f.name}" for f in frames]
        return json.dumps(line, default=str)


class ShortLines(logging.Formatter):
    """A record as one line for people: the time, what happened, and the figures that matter."""

    def format(self, record: logging.LogRecord) -> str:
        fields = dict(getattr(record, "fields", {}))
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        if getattr(record, "event", None) == "request":
            return f"{stamp}  {_request(fields)}"
        found = json.loads(JsonLines().format(record))
        for name in ("time", "level", "trace"):
            found.pop(name, None)
        event = found.pop("event")
        words = [_plain(str(found.pop("message")))] if "message" in found else []
        words += [f"{_plain(name)}={_plain(str(value))}" for name, value in found.items()]
        return "  ".join([stamp, record.levelname.lower(), _plain(str(event)), *words])


def _request(fields: dict[str, Any]) -> str:
    """One request: status, route, seconds, tokens, how fast, how many of a draft."""
    seconds = float(fields["seconds"])
    what = f"{_plain(fields['method'])} {_plain(fields['path'])}"
    parts = [f"{fields['status']}  {what:<26}  {seconds:7.2f} s"]
    if "completion_tokens" in fields:
        new = fields["completion_tokens"]
        parts.append(f"{fields['prompt_tokens']:,} + {new:,} tokens")
        parts.append(f"{new / max(seconds, 1e-6):,.0f}/s  tau {fields['tau']:.2f}")
    elif fields["status"] >= 400:
        parts.append(_plain(fields["request"]))
    return "  ".join(parts)


def _plain(text: str) -> str:
    """Printable ASCII, whatever a client sent."""
    return json.dumps(text)[1:-1]


def log(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """One line."""
    LOG.log(level, event, extra={"event": event, "fields": fields})


def send_logs(stream: TextIO, level: int = logging.INFO, as_json: bool = True) -> None:
    """Write the server's logs, and warnings of uvicorn and the event loop, to `stream`: as JSON, or
    as short lines for people."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if as_json else ShortLines())
    for name in LOGGED:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level if logger is LOG else max(level, logging.WARNING))


class RequestLog:
    """The outermost middleware: gives every request an id, logs it when it is over, and answers 500
    where the code behind it fails. `on_answered(route, status)` is for metrics."""

    def __init__(self, app: ASGIApp, on_answered: OnAnswered) -> None:
        self.app, self.on_answered = app, on_answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        offered = Headers(scope=scope).get("x-request-id", "")
        name = offered if REQUEST_ID.fullmatch(offered) else "req-" + secrets.token_hex(12)
        fields: dict[str, Any] = {}
        scope.setdefault("state", {}).update(request_id=name, log=fields)
        started, status = time.perf_counter(), 0

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = name
                headers.setdefault("x-content-type-options", "nosniff")
            await send(message)

        try:
            await self.app(scope, receive, named)
        except ClientDisconnect:
            status = CLIENT_LEFT
        except Exception:
            LOG.exception("failed", extra={"event": "failed", "fields": {"request": name}})
            if status == 0:
                await broken().response(scope)(scope, receive, named)
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            self.on_answered(route, status)
            is_poll = scope["path"] in POLLED or scope["path"].startswith("/page/")
            level = logging.DEBUG if is_poll and status in EXPECTED else logging.INFO
            log(
                "request",
                level,
                request=name,
                client=(scope.get("client") or ("", 0))[0],
                method=scope["method"][:16],
                path=scope["path"][:200],
                status=status,
                seconds=round(time.perf_counter() - started, 4),
                **fields,
            )
