"""The page, as far as it can be judged without a browser (benchmarks/proof_page.py has one)."""

from __future__ import annotations

import base64
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from specctl.server.app import create_app
from specctl.server.auth import Keys
from specctl.server.page import FOLDER, TYPES, page_routes
from specctl_testing.runtime import scripts
from specctl_testing.runtime.serving import StubService

FILES = sorted(FOLDER.iterdir())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
HTML = (FOLDER / "index.html").read_text(encoding="utf-8")
CSS = (FOLDER / "style.css").read_text(encoding="utf-8")
VOID = {"meta", "link", "img", "input", "br"}
NAMESPACE = "http://www.w3.org/2000/svg"
# Ways to run text, to parse text as HTML, or to keep a key beyond the tab.
FORBIDDEN = {
    "eval", "Function", "innerHTML", "outerHTML", "insertAdjacentHTML", "write", "localStorage",
    "sessionStorage", "indexedDB", "cookie", "cssText", "WebSocket", "XMLHttpRequest",
}  # fmt: skip


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(Starlette(routes=page_routes()), base_url="http://page")


class Reader(HTMLParser):
    """Elements with their attributes; whether every element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.inside: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.inside.append((self.open[-1], data))


@pytest.fixture(scope="module")
def page() -> Reader:
    reader = Reader()
    reader.feed(HTML)
    reader.close()
    assert not reader.open, f"never closed: {reader.open}"
    return reader


def addresses() -> list[str]:
    return ["/", *(f"/page/{path.name}" for path in FILES if path.name != "index.html")]


def test_every_file_of_the_folder_has_a_type_and_an_address(client: TestClient) -> None:
    assert {path.suffix for path in FILES} <= set(TYPES)
    assert {route.path for route in page_routes()} == set(addresses())


@pytest.mark.parametrize("address", addresses())
def test_files_are_served_with_their_type_under_a_strict_policy(
    client: TestClient, address: str
) -> None:
    answer = client.get(address)
    assert answer.status_code == 200
    suffix = Path(address).suffix or ".html"
    assert answer.headers["content-type"] == TYPES[suffix]
    assert answer.headers["x-content-type-options"] == "nosniff"
    rules = dict(
        rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; ")
    )
    assert rules["default-src"] == "'none'"
    allowed = {word for rule in rules.values() for word in rule.split()}
    assert allowed == {"'none'", "'self'", "'script'"}, "nothing remote, inline or evaluated"
    head = client.head(address)
    assert (head.status_code, head.content) == (200, b"")


@pytest.mark.parametrize("address", addresses())
def test_a_file_that_is_known_is_not_sent_again(client: TestClient, address: str) -> None:
    tag = client.get(address).headers["etag"]
    again = client.get(address, headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get(address, headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("address", ["/page/", "/page/../page.py", "/page/%2e%2e/page.py", "/x"])
def test_nothing_but_the_page_is_served(client: TestClient, address: str) -> None:
    assert client.get(address).status_code == 404


def test_with_keys_a_browser_asks_once_and_only_the_page_may_use_the_answer() -> None:
    """HTTP Basic opens the page and what the page itself asks, and nothing else."""
    client = TestClient(create_app(StubService(), "tiny", keys=Keys.of(["sesame"])))
    basic = {"Authorization": "Basic " + base64.b64encode(b"me:sesame").decode()}
    for address in addresses():
        refused = client.get(address)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic ")
        assert client.get(address, headers=basic).status_code == 200
    answers = {
        site: client.get("/v1/models", headers={**basic, **site_header(site)}).status_code
        for site in (None, "same-origin", "same-site", "cross-site", "none")
    }
    assert answers.pop("same-origin") == 200
    assert set(answers.values()) == {401}


def site_header(site: str | None) -> dict[str, str]:
    return {} if site is None else {"Sec-Fetch-Site": site}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_speaks_of_another_host(path: Path) -> None:
    text = path.read_text(encoding="ascii").replace(NAMESPACE, "")
    assert not re.findall(r"\w+://", text)
    assert not re.findall(r"""["'(]//""", text)


def test_what_the_page_asks_for_is_served(client: TestClient, page: Reader) -> None:
    links = [attrs[key] for _, attrs in page.elements for key in ("src", "href") if key in attrs]
    files = [link for link in links if link and not link.startswith("#")]
    assert {"page/app.js", "page/style.css"} <= set(files)
    for link in files:
        assert client.get("/" + link).status_code == 200, link
    assert not re.findall(r"url\(|@import", CSS)


def test_the_policy_has_nothing_inline_to_refuse(page: Reader) -> None:
    assert not [tag for tag, _ in page.inside if tag in ("script", "style")]
    for tag, attrs in page.elements:
        assert tag not in ("style", "iframe", "object", "embed", "base"), tag
        assert not [name for name in attrs if name == "style" or name.startswith("on")], (
            tag,
            attrs,
        )


def test_every_field_has_a_label_and_every_reference_a_target(page: Reader) -> None:
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    refs = [a[k] for _, a in page.elements for k in ("for", "aria-labelledby", "form") if k in a]
    refs += [str(a["href"])[1:] for _, a in page.elements if str(a.get("href")).startswith("#")]
    assert set(refs) <= set(ids)
    labelled = {attrs["for"] for tag, attrs in page.elements if tag == "label" and "for" in attrs}
    fields = [attrs for tag, attrs in page.elements if tag in ("input", "textarea")]
    named = [f["id"] for f in fields if f.get("type") not in ("checkbox", "radio")]
    assert set(named) <= labelled, "checkboxes and radios stand inside their labels"


def test_the_page_speaks_to_those_who_do_not_see_it(page: Reader) -> None:
    attrs = {a["id"]: a for _, a in page.elements if "id" in a}
    assert attrs["said"]["aria-live"] == "polite"
    assert attrs["error"]["role"] == "alert"
    assert ("html", {"lang": "en"}) in page.elements


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_whole_and_harmless(path: Path, page: Reader) -> None:
    found = list(scripts.tokens(path.read_text(encoding="ascii")))
    words = {token.text for token in found if token.kind == "word"}
    assert not words & FORBIDDEN
    ids = {attrs["id"] for _, attrs in page.elements if "id" in attrs}
    called = [
        found[i + 2].text.strip('"')
        for i, token in enumerate(found[:-2])
        if token.text in ("element", "set") and found[i + 1].text == "("
        if found[i + 2].kind == "string"
    ]
    assert set(called) <= ids


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_what_a_script_imports_is_exported(path: Path) -> None:
    text = path.read_text(encoding="ascii")
    for names, file in re.findall(r'import \{([^}]*)\} from "\./([^"]+)"', text):
        other = (FOLDER / file).read_text(encoding="ascii")
        kinds = r"export (?:async )?(?:function\*?|class|const) (\w+)"
        exported = re.findall(kinds, other)
        for name in re.findall(r"\w+", names):
            assert name in exported, f"{path.name} imports {name} from {file}"
            assert len(re.findall(rf"\b{name}\b", text)) > 1, f"{path.name} never uses {name}"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_that_lost_a_bracket_or_quote_is_noticed(path: Path) -> None:
    """The reader of scripts can fail: of each script, without any one of thirty of its brackets."""
    text = path.read_text(encoding="ascii")
    at, paired = 0, []
    for token in list(scripts.tokens(text)):
        at = text.index(token.text, at)
        if token.kind == "bracket" or token.kind == "string":
            paired.append(at)
        at += len(token.text)
    for at in random.Random(7).sample(paired, min(30, len(paired))):
        with pytest.raises(scripts.Broken):
            list(scripts.tokens(text[:at] + text[at + 1 :]))


def theme(number: int) -> dict[str, str]:
    """The colours of the light theme (0), or of the dark one (1)."""
    blocks = re.findall(r":root \{([^}]*)\}", CSS)
    return dict(re.findall(r"--([\w-]+): (#\w{6})", blocks[number]))


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("number", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(
    ("ink", "ground", "least"),
    [
        ("ink", "paper", 7), ("ink", "ground", 7), ("ink", "accepted", 7), ("soft", "paper", 4.5),
        ("soft", "ground", 4.5), ("bad", "bad-ground", 4.5), ("accent-ink", "accent", 4.5),
        ("field", "paper", 3), ("field", "ground", 3), ("accent", "ground", 3),
    ],
)  # fmt: skip
def test_text_stands_out_from_its_ground(number: int, ink: str, ground: str, least: float) -> None:
    """WCAG 2.2: 4.5 for text, 3 for the edges of fields; 7 for what is read at length."""
    colours = theme(number)
    bright, dim = sorted((luminance(colours[ink]), luminance(colours[ground])), reverse=True)
    assert (bright + 0.05) / (dim + 0.05) >= least


def test_style_is_whole_and_uses_what_it_defines() -> None:
    bare = re.sub(r"/\*[\s\S]*?\*/", "", CSS)
    assert bare.count("{") == bare.count("}")
    used, defined = set(re.findall(r"var\((--[\w-]+)", bare)), set(re.findall(r"(--[\w-]+):", bare))
    assert used - {"--share"} == defined, "--share is each bar's own"
