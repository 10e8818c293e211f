"""A server that speaks as vLLM's OpenAI API does, and misbehaves as it is told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from typing import Any

FAULTS = ("ok", "429", "ok", "500", "drop", "slow", "garbage", "503", "ok", "cut")


@dataclass
class FakeEndpoint:
    """What a server says and what it was asked. `answer(prompt ids, body)` gives new ids; `faults`
    are what befalls the requests in turn; `change` spoils a reply."""

    target: Any
    answer: Callable[[list[int], dict[str, Any]], list[int]]
    faults: Sequence[str] = ("ok",)
    retry_after: str | None = "0.01"
    change: Callable[[dict[str, Any]], None] = lambda choice: None
    names: tuple[str, ...] = ("served",)
    more: Callable[[list[int]], dict[str, Any]] = lambda prompt: {}
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    answered: list[tuple[int, ...]] = field(default_factory=list)
    times: list[tuple[str, float]] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    lock: Any = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.turns = cycle(self.faults)

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """What /v1/completions says."""
        prompt = body["prompt"]
        ids = self.target.encode(prompt) if isinstance(prompt, str) else list(prompt)
        new = self.answer(ids, body)[: body["max_tokens"]]
        is_over = bool(new) and new[-1] in body.get("stop_token_ids", ())
        choice = {
            "text": self.target.tokenizer.decode(new, skip_special_tokens=True),
            "finish_reason": "stop" if is_over else "length",
            "stop_reason": None,
            "token_ids": new,
            "prompt_token_ids": ids,
        }
        self.change(choice)
        return {"choices": [choice], "usage": {"prompt_tokens": len(ids)}, **self.more(ids)}

    @contextmanager
    def serving(self) -> Iterator[FakeEndpoint]:
        """The server on a free port, until the block ends."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *words: Any) -> None:
                pass

            def send(self, code: int, body: bytes, **headers: str) -> None:
                self.send_response(code)
                for name, value in {"content-length": str(len(body)), **headers}.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                models = [{"id": name, "max_model_len": 4096} for name in fake.names]
                self.send(200, json.dumps({"data": models}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if isinstance(body["prompt"], str):
                    return self.send(200, json.dumps(fake.reply(body)).encode())
                with fake.lock:
                    fault = next(fake.turns)
                    fake.asked.append(body)
                    fake.times.append((fault, time.monotonic()))
                    fake.num_open += 1
                    fake.most_open = max(fake.most_open, fake.num_open)
                try:
                    self.misbehave(fault, body)
                finally:
                    with fake.lock:
                        fake.num_open -= 1

            def misbehave(self, fault: str, body: dict[str, Any]) -> None:
                again = {} if fake.retry_after is None else {"retry_after": fake.retry_after}
                if fault.isdigit():
                    return self.send(int(fault), b"no", **again)
                if fault == "drop":
                    self.close_connection = True
                    return None
                if fault == "slow":
                    time.sleep(0.05)
                said = json.dumps(fake.reply(body)).encode()
                if fault == "garbage":
                    return self.send(200, said[: len(said) // 2])
                if fault == "cut":
                    self.send_response(200)
                    self.send_header("content-length", str(len(said)))
                    self.end_headers()
                    self.wfile.write(said[:20])
                    self.close_connection = True
                    return None
                with fake.lock:
                    fake.answered.append(tuple(body["prompt"]))
                return self.send(200, said)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
