"""Proof: the page at / in a real browser, over a real server with the embedded target.

    apt-get install -y chromium-headless-shell
    PYTHONPATH=src python benchmarks/proof_page.py --shots runs/page

What the page shows is what the API answers; it stops when asked to; errors say what to do; it asks
nobody but its own server and runs nothing but its own files; it can be used by keyboard and by
screen readers; it fits a telephone and a wide window, in light and in dark. `--shots` keeps a
picture of every state. `--axe FILE` also runs axe-core's rules (`npm install axe-core`, then
node_modules/axe-core/axe.min.js), at 1280 and 390 px, in light and in dark.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from browser import Browser, Page
from page_checks import (
    Try,
    accessible,
    every_control_has_a_name,
    fits,
    hostile_text_stays_text,
    keyboard_reaches_everything,
    keys_are_kept_in_memory_only,
    page_options,
    runs_nothing_foreign,
    shows_what_the_api_answers,
    stops,
    talks,
    too_long_is_said,
)
from proof_common import Check, checked, report
from serve_common import Server, serve_process

KEY = "a-key-for-this-proof"
DRAFTED = ("--draft", "prompt-lookup", "--batching", "fixed")
SIZES = ((360, 740), (390, 844), (768, 1024), (1280, 800))


def attempt(what: str, page: Page, server: Server, body: Try) -> Check:
    try:
        found = body(page, server)
    except (AssertionError, OSError) as error:
        found = str(error)[:600]
    return checked(what, [found])


def open_page(browser: Browser, address: str) -> Page:
    page = browser.open(address)
    page.until("document.getElementById('state').textContent === 'ready'")
    return page


def faults(page: Page, server: Server) -> str | None:
    """What the browser complained of, and whom it asked, as long as the page was open."""
    thrown = page.happened(["Runtime.exceptionThrown"])
    logged = [e["entry"] for e in page.happened(["Log.entryAdded"])]
    bad = [e["text"] for e in logged if e["source"] in ("javascript", "security", "violation")]
    asked = [e["request"]["url"] for e in page.happened(["Network.requestWillBeSent"])]
    foreign = [url for url in asked if not url.startswith(server.url)]
    return f"{thrown} {bad} {foreign}" if thrown or bad or foreign or not asked else None


def prove(browser: Browser, folder: Path, shots: Path | None, axe: str | None) -> list[Check]:
    """Every check, each on a page of its own."""
    tries: list[tuple[str, Try]] = [
        ("shows the text, colours and figures of the API", shows_what_the_api_answers),
        ("chats: each answer is that of the whole conversation", talks),
        ("the button stops an answer and frees its row", stops(lambda page: page.click("#stop"))),
        ("Escape stops an answer and frees its row", stops(lambda page: page.press("Escape"))),
        ("text that looks like HTML stays text", hostile_text_stays_text),
        ("a prompt that is too long is said and kept", too_long_is_said),
        ("every control has a name for screen readers", every_control_has_a_name),
        ("Tab reaches every control, visibly", keyboard_reaches_everything),
    ]
    for dark in (False, True):
        for width, height in SIZES:
            name = f"fits {width} px, {'dark' if dark else 'light'}"
            tries.append((name, fits(width, height, dark, shots)))
        for width in (1280, 390) if axe is not None else ():
            name = f"axe-core finds nothing, {width} px, {'dark' if dark else 'light'}"
            tries.append((name, accessible(axe or "", width, dark)))
    checks = []
    with serve_process(folder, *DRAFTED) as server:
        for what, body in tries:
            page = open_page(browser, server.url)
            checks.append(attempt(what, page, server, body))
            checks.append(attempt("  no fault, nobody else asked", page, server, faults))
        page = open_page(browser, server.url)
        what = "the policy lets nothing foreign run"
        checks.append(attempt(what, page, server, runs_nothing_foreign))
    with serve_process(folder, *DRAFTED, key=KEY) as server:
        page = open_page(browser, server.url.replace("//", f"//me:{KEY}@"))
        checks.append(attempt("API keys", page, server, keys_are_kept_in_memory_only))
    return checks


def main() -> None:
    given, path, axe = page_options(__doc__)
    with tempfile.TemporaryDirectory() as folder, Browser(path) as browser:
        checks = prove(browser, Path(folder), given.shots, axe)
    report(checks, given.json)


if __name__ == "__main__":
    main()
