"""A headless Chromium, driven over its DevTools pipe: no library, no port.

`with Browser(find_browser()) as browser: page = browser.open("http://127.0.0.1:8000/")`. Messages
are JSON ended by a zero byte, on file descriptors 3 and 4 of the browser
(https://chromedevtools.github.io/devtools-protocol/).
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.core.errors import ResourceError

NAMES = (
    "chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome",
)  # fmt: skip
FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
)  # fmt: skip
ANSWER_SECONDS = 60.0
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, " ": 32}


def find_browser(given: str | None = None) -> str:
    """The path of a Chromium; without one an error that says how to get it."""
    names = NAMES if given is None else (given,)
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        raise ResourceError(
            "no Chromium was found, and this proof is about what one shows",
            where="--browser" if given else "PATH",
            found="none of " + ", ".join(names),
            expected="a Chromium, without or with its window",
            do="apt-get install -y chromium-headless-shell   (or give --browser PATH)",
        )
    return found


class Browser:
    """One process with a profile of its own, both gone at the end. One writer: the caller."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.events: list[dict[str, Any]] = []
        self._last = 0
        self._rest = b""

    def __enter__(self) -> Browser:
        self._profile = tempfile.mkdtemp(prefix="specctl-browser-")
        theirs_in, self._to = _pipe()
        self._from, theirs_out = _pipe(reading=True)
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        words = [self.path, *FLAGS, *sandbox, f"--user-data-dir={self._profile}", "about:blank"]
        log = os.open(os.path.join(self._profile, "log"), os.O_WRONLY | os.O_CREAT)
        actions = [(os.POSIX_SPAWN_DUP2, theirs_in, 3), (os.POSIX_SPAWN_DUP2, theirs_out, 4)]
        actions += [(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
        self.process = os.posix_spawn(
            self.path, words, os.environ, file_actions=actions, setsid=True
        )
        for end in (theirs_in, theirs_out, log):
            os.close(end)
        return self

    def open(self, address: str, **kept: Any) -> Page:
        """A new page at that address, with the events of its network, log and scripts."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.look(**kept)
        page.call("Page.navigate", url=address)
        page.until("document.readyState === 'complete'")
        return page

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a command; what happens meanwhile is appended to `events`."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            for answer in self._read(deadline):
                if answer.get("id") != self._last:
                    self.events.append(answer)
                    continue
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self, deadline: float) -> list[dict[str, Any]]:
        assert select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))[0], (
            "the browser does not answer: " + self._log()
        )
        piece = os.read(self._from, 1 << 20)
        assert piece, "the browser has ended: " + self._log()
        *whole, self._rest = (self._rest + piece).split(b"\0")
        return [json.loads(message) for message in whole]

    def _log(self) -> str:
        return Path(self._profile, "log").read_text(errors="replace")[-2000:]

    def __exit__(self, *about: object) -> None:
        os.close(self._to)
        os.close(self._from)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        shutil.rmtree(self._profile, ignore_errors=True)


@dataclass(slots=True)
class Page:
    """One tab of a browser."""

    browser: Browser
    session: str

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def look(self, *, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        """Size of the window, and the colours that the reader prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        given = {"expression": script, "returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", **given)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str, seconds: float = 30.0) -> None:
        """Waits until the expression is true."""
        deadline = time.monotonic() + seconds
        while not self.run(script):
            text = self.run("document.body ? document.body.innerText : ''")
            assert time.monotonic() < deadline, f"never came: {script}\nthe page says: {text}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        """A key, by the name that the page hears; modifiers: 1 Alt, 2 Ctrl, 8 Shift."""
        code = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"text": "\r" if key == "Enter" else key} if key in ("Enter", " ") else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", modifiers=modifiers, **code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", modifiers=modifiers, **code)

    def click(self, selector: str) -> None:
        """A press of the mouse in the middle of the first such element."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        spot = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **spot)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def happened(self, methods: Sequence[str]) -> list[dict[str, Any]]:
        """Parameters of the events of those names on this page, since it was opened."""
        self.run("1")  # what is on its way arrives
        mine = [e for e in self.browser.events if e.get("sessionId") == self.session]
        return [e["params"] for e in mine if e.get("method") in methods]


def _pipe(reading: bool = False) -> tuple[int, int]:
    """(theirs, ours) of a pipe, or (ours, theirs) if we are `reading`; theirs lies above the
    numbers that the browser wants."""
    reads, writes = os.pipe()
    theirs, ours = (writes, reads) if reading else (reads, writes)
    high = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 20)
    os.close(theirs)
    return (ours, high) if reading else (high, ours)
