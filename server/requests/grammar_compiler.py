"""Answers of a fixed form: the grammar of a request, compiled for the target.

Compiling a stranger's grammar may take its two seconds (`runtime/sampling/grammar.py` bounds it, in
another process), so it has a thread of its own: prompts are read meanwhile, and few may wait for
it. Who is cancelled while waiting gives the place back, and the grammar is not compiled for nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from specctl.runtime.sampling.grammar import Grammar, GrammarError, GrammarSpec, compile_grammar
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.server.engine_thread.contract import Busy
from specctl.server.errors import ApiError

MOST_WAITING = 16  # requests whose grammar is not compiled yet
RETRY_SECONDS = 2


class GrammarCompiler:
    """Compiles the grammars of requests, one at a time."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="specctl-grammars")
        self._waiting = 0

    async def hold(
        self, make: Callable[[], GrammarSpec | None], field: str, sampling: Sampling
    ) -> Sampling:
        """The sampling held to the form that `make` gives, if it gives one. ApiError says what is
        wrong with the grammar, naming `field`; Busy that too many are waited for."""
        try:
            spec = make()
            if spec is None:
                return sampling
            if self._waiting >= MOST_WAITING:
                raise Busy(RETRY_SECONDS, "too many grammars are being compiled")
            self._waiting += 1
            loop = asyncio.get_running_loop()
            work = loop.run_in_executor(self._thread, self._compile, spec)
            work.add_done_callback(self._done)
            return replace(sampling, grammar=await work)
        except GrammarError as error:
            why = "; ".join(part for part in (error.what, error.found, error.expected) if part)
            message = f"{field}: {why}"
            raise ApiError(400, message, param=field, code="invalid_grammar") from error

    def _compile(self, spec: GrammarSpec) -> Grammar:
        return compile_grammar(spec, self.target)

    def _done(self, work: object) -> None:
        self._waiting -= 1
