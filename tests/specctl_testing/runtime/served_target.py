"""A target behind the server's application, in this process, with the drafter prompt-lookup."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import FastAPI

from specctl.drafters.training_free.prompt_lookup import PromptLookup, PromptLookupOptions
from specctl.runtime.target.target import Target
from specctl.server.app import create_app
from specctl.server.engine_thread.service import Service
from specctl.server.requests.limits import Limits

START = 60.0  # seconds until it is ready, at most


@contextmanager
def served(target: Target, max_batch: int = 1, max_len: int = 256) -> Iterator[FastAPI]:
    """The application once its engine is ready; `app.state.counters` has its counts."""
    drafter = PromptLookup(PromptLookupOptions(), target.spec)
    service = Service(target, drafter, limits=Limits(max_batch=max_batch, max_len=max_len))
    service.start()
    until = time.monotonic() + START
    while service.status().state != "ready" and time.monotonic() < until:
        time.sleep(0.01)
    app = create_app(service, "tiny")
    app.state.counters = service.counters
    try:
        yield app
    finally:
        service.stop()
