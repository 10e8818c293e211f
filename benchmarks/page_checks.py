"""What proof_page.py tries on an open page. Every check returns None, or what is wrong."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from browser import Page, find_browser
from proof_common import parser
from serve_common import Server

from specctl.core.errors import SpecctlError

PROMPT = "def main(arguments):\n    "
TEXT = "document.querySelector('.turn:last-of-type .answer').textContent"
IDLE = "!document.getElementById('send').disabled"
Try = Callable[[Page, Server], str | None]


def ask(server: Server, path: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON that the API answers with."""
    heard = server.hear(path, body)
    assert heard.status == 200, heard
    return heard.json()


def send(page: Page, text: str, *, wait: bool = True) -> None:
    """Type a prompt and send it; `wait` for the whole answer."""
    page.run("document.getElementById('prompt').focus()")
    page.type(text)
    page.press("Enter")
    if wait:
        page.until(IDLE, 60)


def set_field(page: Page, name: str, value: str) -> None:
    """Type into a field, in the place of what it holds."""
    page.run(f"(() => {{ const e = document.getElementById('{name}'); e.focus(); e.select(); }})()")
    page.type(value)
    page.run(f"document.getElementById('{name}').dispatchEvent(new Event('change'))")


def choose(page: Page, mode: str) -> None:
    page.click(f"label:has(input[value={mode}])")


def shows_what_the_api_answers(page: Page, server: Server) -> str | None:
    """A greedy completion: the same text, its colours and figures those of the API."""
    choose(page, "completion")
    set_field(page, "temperature", "0")
    set_field(page, "max-tokens", "48")
    send(page, PROMPT)
    body = {"prompt": PROMPT, "max_tokens": 48, "temperature": 0}
    answer = ask(server, "/v1/completions", body)
    text, stats = answer["choices"][0]["text"], answer["specctl"]["stats"]
    if page.run(TEXT) != text:
        return f"shows {page.run(TEXT)!r}, the API answers {text!r}"
    coloured = page.run(
        "[...document.querySelectorAll('.answer .accepted')].map(e => e.textContent).join('')"
    )
    if not coloured or coloured == text:
        return f"colours nothing or everything: {coloured!r}"
    tau = page.run("document.getElementById('tau').textContent")
    bars = page.run("document.querySelectorAll('#bars li').length")
    if tau != f"{stats['tau']:.2f}" or bars != len(stats["accepted_per_position"]):
        return f"tau {tau} and {bars} bars instead of {stats}"
    return None


def talks(page: Page, server: Server) -> str | None:
    """A chat of two turns: the second answer knows the first."""
    choose(page, "chat")
    set_field(page, "temperature", "0")
    set_field(page, "max-tokens", "16")
    messages: list[dict[str, str]] = []
    for text in ("write a loop", "and a class"):
        send(page, text)
        messages.append({"role": "user", "content": text})
        body = {"messages": messages, "max_tokens": 16, "temperature": 0}
        answer = ask(server, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
        if page.run(TEXT) != answer:
            return f"shows {page.run(TEXT)!r}, the API answers {answer!r}"
        messages.append({"role": "assistant", "content": answer})
    return None


def stops(how: Callable[[Page], None]) -> Callable[[Page, Server], str | None]:
    """An answer that is stopped half way: its row is free within a second."""

    def try_it(page: Page, server: Server) -> str | None:
        set_field(page, "max-tokens", "900")
        send(page, "import os\n" * 8, wait=False)
        page.until("document.querySelector('.turn:last-of-type .answer').textContent.length > 40")
        how(page)
        page.until(IDLE, 5)
        summary = page.run("document.querySelector('.turn:last-of-type .summary').textContent")
        if "stopped" not in summary:
            return f"says {summary!r}"
        time.sleep(1)
        running = ask(server, "/v1/status")["running"]
        return f"{running} rows still run" if running else None

    return try_it


def hostile_text_stays_text(page: Page, server: Server) -> str | None:
    del server
    set_field(page, "max-tokens", "1")
    send(page, "<img src=x onerror=\"document.title='hit'\"><script>document.title='hit'</script>")
    made = page.run("document.querySelectorAll('.turn img, .turn script').length")
    return (
        f"{made} elements were made of text"
        if made or page.run("document.title") == "hit"
        else None
    )


def runs_nothing_foreign(page: Page, server: Server) -> str | None:
    """The policy refuses inline scripts, evaluation, other hosts and being framed."""
    del server
    page.run(
        "(() => { const s = document.createElement('script');"
        " try { s.text = \"document.title='hit'\" } catch (e) {}"
        " document.body.append(s); s.remove(); })()"
    )
    other = page.run("fetch('http://127.0.0.1:9/').then(() => 'sent', (e) => e.message)")
    violations = page.happened(["Log.entryAdded"])
    said = " ".join(entry["entry"]["text"] for entry in violations)
    if page.run("document.title") == "hit" or other == "sent":
        return "an inline script ran, or another host was asked"
    return None if "Content Security Policy" in said else f"nothing was refused: {said!r}"


def too_long_is_said(page: Page, server: Server) -> str | None:
    del server
    set_field(page, "max-tokens", "900")
    page.run("document.getElementById('prompt').value = 'word '.repeat(20000)")
    send(page, "x")
    said = page.run("document.getElementById('error').textContent")
    kept = page.run("document.getElementById('prompt').value.length")
    is_told = "tokens" in said and "1,024" in said and kept > 90000
    return None if is_told else f"says {said!r} and keeps {kept} characters"


def every_control_has_a_name(page: Page, server: Server) -> str | None:
    del server
    roles = ("button", "textbox", "spinbutton", "radio", "checkbox", "region", "image")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    found = [n for n in nodes if not n["ignored"] and n["role"]["value"] in roles]
    bare = [n["role"]["value"] for n in found if not n.get("name", {}).get("value")]
    return f"without a name: {bare} of {len(found)}" if bare or len(found) < 10 else None


def keyboard_reaches_everything(page: Page, server: Server) -> str | None:
    """Tab visits every control once and shows where it is."""
    del server
    page.run(
        "document.getElementById('settings').open = true; document.querySelector('.skip').focus()"
    )
    visited: list[str] = []
    for _ in range(40):
        page.press("Tab")
        where = page.run(
            "(() => { const e = document.activeElement; const s = getComputedStyle(e.matches("
            "'.switch input') ? e.nextElementSibling : e); return [e.id || e.name || e.tagName,"
            " s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2]; })()"
        )
        if where[0] == "BODY" and visited:
            break
        if where[0] not in ("BODY", "HTML") and not where[1]:
            return f"nobody sees that {where[0]} is focused"
        visited.append(where[0])
    wanted = {"transcript", "prompt", "clear", "send", "SUMMARY", "mode", "temperature", "top-p"}
    missing = (wanted | {"max-tokens", "seed", "key", "colours"}) - set(visited)
    return f"Tab never came to {sorted(missing)}: {visited}" if missing else None


def accessible(axe: str, width: int, dark: bool) -> Try:
    """axe-core (github.com/dequelabs/axe-core) finds nothing, with an answer on the page."""

    def try_it(page: Page, server: Server) -> str | None:
        del server
        page.look(width=width, height=900, dark=dark)
        send(page, PROMPT)
        return axe_finds(page, axe)

    return try_it


def page_options(doc: str | None) -> tuple[argparse.Namespace, str, str | None]:
    """The options of a proof in a browser, the browser's path, and axe-core's source, if given.
    Exits where there is no browser."""
    options = parser(doc)
    options.add_argument("--browser", help="a Chromium; the first on PATH if not given")
    options.add_argument("--shots", type=Path, help="keep pictures in this folder")
    options.add_argument("--axe", type=Path, help="axe.min.js of axe-core, to run its rules too")
    given = options.parse_args()
    axe = given.axe.read_text(encoding="utf-8") if given.axe is not None else None
    try:
        path = find_browser(given.browser)
    except SpecctlError as error:
        print(f"error[{int(error.exit)}]: {error.text()}", file=sys.stderr)
        sys.exit(error.exit)
    if given.shots is not None:
        given.shots.mkdir(parents=True, exist_ok=True)
    return given, path, axe


def axe_finds(page: Page, axe: str) -> str | None:
    """What axe-core finds on a page as it is."""
    page.run(f"{axe}; 0")
    found = page.run(
        "axe.run().then(r => r.violations.map(v => v.id + ': ' + v.nodes[0].html.slice(0, 99)))"
    )
    return "; ".join(found) or None


def fits(width: int, height: int, dark: bool, shots: Path | None) -> Callable[..., str | None]:
    """Nothing leaves the window sideways, and nothing is too small to read or to press."""

    def try_it(page: Page, server: Server) -> str | None:
        del server
        page.look(width=width, height=height, dark=dark)
        page.run("document.getElementById('settings').open = true")
        choose(page, "completion")
        set_field(page, "temperature", "0")  # drawn answers may be short
        page.run("document.getElementById('settings').open = innerWidth > 600; scrollTo(0, 0)")
        set_field(page, "max-tokens", "900")
        send(page, "class Tree:\n    def insert(self, key):\n", wait=False)
        page.until("document.getElementById('tokens').textContent > 40")
        if shots is not None:
            name = f"{'dark' if dark else 'light'}-{width}"
            page.picture(shots / f"{name}.png")
            page.picture(shots / f"{name}-whole.png", whole=True)
        page.press("Escape")
        page.until(IDLE, 5)
        wide = page.run("document.documentElement.scrollWidth")
        small = page.run(
            "[...document.querySelectorAll('body *')].filter(e => e.childElementCount === 0 &&"
            " e.textContent.trim() && parseFloat(getComputedStyle(e).fontSize) < 11)"
            ".map(e => e.className || e.tagName)"
        )
        ground = page.run("getComputedStyle(document.body).backgroundColor")
        is_dark = int(ground.removeprefix("rgb(").split(",")[0]) < 100
        wrong = wide > width or small or is_dark != dark
        return f"{wide} px wide, too small {small}, ground {ground}" if wrong else None

    return try_it


def keys_are_kept_in_memory_only(page: Page, server: Server) -> str | None:
    """The page was opened with the key. A wrong one in its field is refused in words; the right one
    works and is nowhere else."""
    set_field(page, "key", "wrong")
    send(page, "import os")
    said = page.run("document.getElementById('error').textContent")
    if "API key" not in said or page.run("document.activeElement.id") != "key":
        return f"says {said!r} to a wrong key, and stays at {page.run('document.activeElement.id')}"
    set_field(page, "key", server.key or "")
    set_field(page, "max-tokens", "8")
    page.run("document.getElementById('prompt').value = ''")
    send(page, "import os")
    if not page.run(TEXT) or page.run("!document.getElementById('error').hidden"):
        return "the right key does not work: " + page.run(
            "document.getElementById('error').textContent"
        )
    held = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href,"
    held = page.run(held + " document.documentElement.outerHTML])")
    return "the key is kept outside its field" if (server.key or "") in held else None
