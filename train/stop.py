"""Stop: SIGINT, SIGTERM and SIGHUP end a training run after the step in hand, its state saved."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from specctl.core.errors import Exit, SpecctlError

KEPT = "finished parts are kept"
# The terminal was closed; not on every system.
HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)


class Interrupted(SpecctlError):
    """The run was asked to stop; its state is saved and `command` continues it."""

    exit = Exit.INTERRUPTED

    def __init__(self, what: str, command: str) -> None:
        super().__init__(what, do=command)
        self.command = command


class Stop:
    """Whether a signal asked the run to stop. One writer: the signal handler.

    Inside the loop (`is_deferred`) the first signal is only noted; before it, where every long job
    continues from what it has written, it raises at once. The second signal ends the process, but a
    second Ctrl-C where Python's own handler was set (a notebook) raises KeyboardInterrupt, and a
    second hang-up does nothing, since those of a shell and of its terminal arrive together.
    """

    def __init__(self, command: str) -> None:
        self.command = command
        self.is_requested = False
        self.is_deferred = False
        self._has_raised = False
        self._is_hosted = False

    def interrupted(self, saved: str) -> Interrupted:
        """The error to raise; `saved` says what was kept."""
        return Interrupted(f"stopped on request, {saved}", self.command)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == HANGUP:
            leave_terminal()
            if self.is_requested:
                return
        if self.is_requested:
            if self._is_hosted and number == signal.SIGINT:
                signal.default_int_handler(number, frame)
            os.write(2, b"\n")  # a progress bar may stand on the line
            os._exit(128 + number)
        self.is_requested = True
        if not self.is_deferred:
            self._has_raised = True
            raise self.interrupted(KEPT)

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        """Take the signals until the block ends (main thread only; elsewhere do nothing). A hang-up
        that is ignored (nohup) stays ignored.

        A library may put an error of its own in the place of ours, when the signal finds it at
        work (safetensors does while it reads); that ends as what it is, a stop."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        numbers = [signal.SIGINT, signal.SIGTERM, *hangup()]
        previous = {number: signal.signal(number, self._handle) for number in numbers}
        self._is_hosted = previous[signal.SIGINT] is signal.default_int_handler
        try:
            yield self
        except Exception as error:
            if not self._has_raised or isinstance(error, Interrupted):
                raise
            raise self.interrupted(KEPT) from error
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def hangup() -> list[signal.Signals]:
    """The signal of a closed terminal, where there is one that is not ignored."""
    if HANGUP is None or signal.getsignal(HANGUP) is signal.SIG_IGN:
        return []
    return [HANGUP]


def leave_terminal() -> None:
    """Let what is said from now on go nowhere, if the terminal is gone: each write to it would be
    an error in the place where it was tried."""
    for descriptor in (1, 2):
        try:
            is_device = stat.S_ISCHR(os.fstat(descriptor).st_mode)
        except OSError:  # closed before
            continue
        if is_device and not os.isatty(descriptor):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, descriptor)
            os.close(nothing)
