"""Proof: the page of measured drafters (docs/results/index.html) in a real browser, as a file.

    apt-get install -y chromium-headless-shell
    PYTHONPATH=src python benchmarks/proof_results.py --shots runs/results

It shows every line of the CSV, filters and sorts them, fetches nothing from elsewhere, and fits a
telephone and a wide window. `--axe FILE` also runs axe-core's rules (`npm install axe-core`, then
node_modules/axe-core/axe.min.js), in light and in dark.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

from browser import Browser, Page
from page_checks import axe_finds, page_options
from proof_common import Check, checked, report

BOOK = Path(__file__).parents[1] / "docs" / "results"
VISIBLE = "[...document.querySelectorAll('tbody tr')].filter(r => !r.hidden)"
NAMES = f"{VISIBLE}.map(r => r.cells[0].textContent)"
SPEEDS = f"{VISIBLE}.map(r => Number(r.cells[7].dataset.value))"
Try = Callable[[Page, list[dict[str, str]]], str | None]


def shows_every_line(page: Page, lines: list[dict[str, str]]) -> str | None:
    names = [line["drafter"] for line in lines]
    return None if page.run(NAMES) == names else f"shows {page.run(NAMES)}"


def filters(page: Page, lines: list[dict[str, str]]) -> str | None:
    """By a word and by each choice, together."""
    name, setting = lines[-1]["drafter"], lines[-1]["setting"]
    page.run("document.querySelector('[data-search]').focus()")
    page.type(name)
    page.run(
        "(() => { const e = document.querySelector('[data-filter=setting]'); "
        f"e.value = {setting!r}; e.dispatchEvent(new Event('change')); }})()"
    )
    wanted = [x["drafter"] for x in lines if name in x["drafter"] and x["setting"] == setting]
    said = page.run("document.getElementById('shown').textContent")
    if page.run(NAMES) != wanted:
        return f"{page.run(NAMES)} are left of {wanted}"
    right = f"{len(wanted)} of {len(lines)} lines"
    return None if said == right else f"says {said!r}, not {right!r}"


def sorts(page: Page, lines: list[dict[str, str]]) -> str | None:
    """By speed, the fastest first and then the slowest, and says so to screen readers."""
    head = "document.querySelectorAll('thead th')[7]"
    for word, falls in (("descending", True), ("ascending", False)):
        page.run(f"{head}.querySelector('button').click()")
        if page.run(f"{head}.getAttribute('aria-sort')") != word:
            return f"is not said to be {word}"
        wanted = sorted((float(line["speedup"]) for line in lines), reverse=falls)
        if page.run(SPEEDS) != wanted:
            return f"{word}: {page.run(SPEEDS)}"
    return None


def fetches_nothing(page: Page, lines: list[dict[str, str]]) -> str | None:
    thrown = page.happened(["Runtime.exceptionThrown"])
    urls = [e["request"]["url"] for e in page.happened(["Network.requestWillBeSent"])]
    foreign = [url for url in urls if not url.startswith("file:")]
    return f"{thrown} {foreign}" if thrown or foreign else None


def fits(width: int, dark: bool, shots: Path | None, axe: str | None) -> Try:
    """Nothing but the table scrolls sideways; axe-core finds nothing."""

    def body(page: Page, lines: list[dict[str, str]]) -> str | None:
        page.look(width=width, height=800, dark=dark)
        if shots is not None:
            page.picture(shots / f"results-{width}-{'dark' if dark else 'light'}.png")
        wide = page.run("document.documentElement.scrollWidth")
        if wide > width:
            return f"{wide} px wide in {width}"
        return axe_finds(page, axe) if axe is not None else None

    return body


def main() -> None:
    given, path, axe = page_options(__doc__)
    with (BOOK / "results.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    tries: list[tuple[str, Try]] = [
        ("shows every line of the CSV", shows_every_line),
        ("filters by drafter and by sampling", filters),
        ("sorts by speed, both ways", sorts),
        ("nothing is fetched, nothing thrown", fetches_nothing),
    ]
    for dark in (False, True):
        for width in (360, 768, 1400):
            name = f"fits {width} px, {'dark' if dark else 'light'}"
            name += ", axe-core finds nothing" if axe is not None else ""
            tries.append((name, fits(width, dark, given.shots, axe)))
    checks: list[Check] = []
    with Browser(path) as browser:
        for what, body in tries:
            page = browser.open((BOOK / "index.html").as_uri())
            page.until("document.readyState === 'complete'")
            checks.append(checked(what, [body(page, lines)]))
    report(checks, given.json)


if __name__ == "__main__":
    main()
