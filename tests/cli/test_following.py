"""train-draft --follow: from kept traffic to a package, and into a server."""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specctl.cli.options.following import (
    NEWEST,
    _check_writer,
    _newest,
    check_server,
    post_swap,
)
from specctl.cli.options.recipe_flags import TrainingFlags
from specctl.core.errors import IncompatibleError, ResourceError, SpecctlError
from specctl.core.storage.kept_features import AnswerFeatures, feature_files
from specctl.core.storage.traffic_files import Writer, note_writer, segment_path
from specctl.runtime.target.target import Target
from specctl.train.pretrain.data import train_tokenizer


class Admin(http.server.BaseHTTPRequestHandler):
    """In the place of a server: notes what it was sent, and answers with `code` and `body`."""

    code = 200
    body = b'{"drafter": "new"}'
    sent: list[tuple[str, str | None, Any]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.sent.append((self.path, self.headers["Authorization"], json.loads(body)))
        self.do_GET()

    def do_GET(self) -> None:
        self.send_response(self.code)
        self.send_header("Location", "http://127.0.0.1:1/")
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def admin() -> Iterator[tuple[str, type[Admin]]]:
    handler = type("Handler", (Admin,), {"sent": []})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()


def test_the_server_gets_the_package_and_the_key_follows_no_redirect(
    admin: Any, tmp_path: Path
) -> None:
    url, handler = admin
    assert post_swap(url, tmp_path / "package", "the-key,another") == {"drafter": "new"}
    assert handler.sent == [
        ("/v1/drafter", "Bearer the-key", {"path": str(tmp_path / "package"), "wait": 300.0})
    ]
    handler.code = 302
    with pytest.raises(SpecctlError, match="302"):
        post_swap(url, tmp_path / "package", "the-key")
    with pytest.raises(ResourceError, match="GET /v1/drafter"):
        post_swap("http://127.0.0.1:1", tmp_path / "package", "the-key")
    handler.code, handler.body = 200, b"<html>some other server</html>"
    with pytest.raises(SpecctlError, match="200: <html>some other"):
        post_swap(url, tmp_path / "package", "the-key")


@pytest.mark.parametrize(
    ("code", "body", "key", "said"),
    [
        (
            401,
            b'{"error": {"message": "the API key is not valid"}}',
            "k",
            "401: the API key is not.*head -n 1",
        ),
        (
            404,
            b'{"error": {"message": "there is no GET /v1/drafter"}}',
            "k",
            "access.admin_key_file",
        ),
        (200, b"[]", "k", "200: \\[\\]"),
        (200, b'{"drafter": null}', "two\nlines", "several lines"),
        (200, b'{"drafter": null}', " ,", "found: nothing"),
    ],
)
def test_a_swap_that_cannot_be_made_is_refused_before_the_training(
    admin: Any, code: int, body: bytes, key: str, said: str
) -> None:
    url, handler = admin
    handler.code, handler.body = code, body
    with pytest.raises(SpecctlError, match=said):
        check_server(url, key)


def test_addresses_that_are_none_and_servers_that_are_away_are_said(admin: Any) -> None:
    for url in ("http://[::1", "http://h:99999", "ftp://h", "h:8000", "http://h/v1"):
        with pytest.raises(SpecctlError, match="not the address"):
            check_server(url, "k")
    with pytest.raises(ResourceError, match="does not answer"):
        check_server("http://127.0.0.1:1", "k")
    check_server(admin[0], "k,another")


def test_traffic_of_another_target_is_not_learned_as_the_drafters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "specctl.export.package.manifest.read_manifest",
        lambda folder: SimpleNamespace(target=SimpleNamespace(name="tiny", fingerprint="a" * 64)),
    )
    flags = TrainingFlags()
    _check_writer(flags, tmp_path, tmp_path)  # a server of before did not say it
    note_writer(tmp_path, Writer("tiny", "a" * 64))
    _check_writer(flags, tmp_path, tmp_path)
    note_writer(tmp_path, Writer("other", "b" * 64))
    for refused in (flags, TrainingFlags(target="tiny")):
        with pytest.raises(IncompatibleError, match=r"answers of other.*--target other"):
            _check_writer(refused, tmp_path, tmp_path)
    _check_writer(TrainingFlags(target="other"), tmp_path, tmp_path)
    _check_writer(TrainingFlags(allow=["target"]), tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--swap", "http://h"), "--follow DIR"),
        (("--follow", "FOLDER", "--out", "OUT"), "--init names"),
        (("--follow", "FOLDER", "--init", "p"), "--out names"),
        (("--follow", "FOLDER", "--init", "p", "--out", "OUT", "--data", "x"), "--data"),
        (("--follow", "FOLDER", "--init", "p", "--out", "OUT", "-r", "eagle3"), "--recipe"),
        (("--follow", "FOLDER/no", "--init", "p", "--out", "OUT"), "kept traffic"),
        (("--follow", "FOLDER", "--init", "p", "--out", "OUT", "--swap", "http://h"), "admin key"),
    ],
)
def test_what_does_not_go_together_is_said_before_anything_is_loaded(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.delenv("SPECCTL_ADMIN_KEYS", raising=False)
    monkeypatch.setattr("specctl.runtime.target.target.load_target", None)
    out = str(tmp_path / "out")
    given = [word.replace("FOLDER", str(tmp_path)).replace("OUT", out) for word in words]
    ran = run("train-draft", *given)
    assert ran.code != 0
    assert said in ran.err


def test_the_newest_traffic_is_copied_once_for_a_run(tmp_path: Path) -> None:
    lines = [b'{"text": "%d"}\n' % number for number in range(NEWEST + 5)]
    segment_path(tmp_path, 1).write_bytes(b"".join(lines[:10]))
    segment_path(tmp_path, 2).write_bytes(b"".join(lines[10:]))
    out = tmp_path / "runs" / "next"
    kept = _newest(tmp_path, out)
    assert kept.read_bytes() == b"".join(lines[5:])
    assert kept.stat().st_mode & 0o077 == 0
    out.mkdir()
    segment_path(tmp_path, 3).write_bytes(b'{"text": "newer"}\n')
    assert _newest(tmp_path, out).read_bytes() == b"".join(lines[5:])


def keep_features(target: Target, folder: Path, number: int, line: bytes) -> None:
    """As a server keeps them whose target is read for its last state."""
    ids = target.encode(json.loads(line)["text"])
    place_1S = torch.arange(len(ids))[None]
    masks, last = target.lm.document_masks(torch.zeros_like(place_1S)), target.spec.num_layers
    with torch.no_grad():
        out = target.lm.dense(torch.tensor([ids]), place_1S, masks, (last,), logits=False)
    states = {last: out.taps[last][0, :-1].bfloat16()}
    writer = Writer("target", target.fingerprint, target.tokenizer_fingerprint)
    AnswerFeatures(writer, tuple(ids), 3, states).write(folder, number, line)


def test_a_drafter_goes_on_with_traffic_and_the_server_gets_what_is_better(
    run: Any, admin: Any, tmp_path: Path, make_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [
        f"def f{i}(x):\n    return x + {i}\n\nhello world, how are you {i}?\n" for i in range(60)
    ]
    tokenizer = train_tokenizer(texts, 300, 256)
    model = make_model(num_layers=1, hidden=16, vocab=len(tokenizer), eos_token_id=0)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "target")
    folder = tmp_path / "traffic"
    folder.mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    segment_path(folder, 1).write_text("".join(lines))
    small = [
        "--target", tmp_path / "target", "--steps", 2, "--set", "data.new_tokens=8",
        "--set", "data.prompt_tokens=6", "--set", "train.rows=4", "--set", "train.seq_len=48",
        "--set", "train.tau_prompts=2", "--set", "train.tau_tokens=6", "--set", "train.tau_every=2",
        "--set", "train.save_every=2",
    ]  # fmt: skip
    options = "drafter.options={layers: 1, width: 16, heads: 2, head_dim: 8}"
    made = run(
        "distill", *small, "--data", segment_path(folder, 1), "--out", tmp_path / "first",
        "--set", "drafter.init=null", "--set", options, "--set", "vocab.size=200",
        "--set", "data.regenerate=false",
    )  # fmt: skip
    assert made.code == 0, made.err
    url, handler = admin
    monkeypatch.setenv("SPECCTL_ADMIN_KEYS", "the-key")
    for number, line in enumerate(lines[:40]):
        keep_features(Target.from_model(model, tokenizer), folder, number, line.encode())
    torn = feature_files(folder)[-1]
    torn.write_bytes(torn.read_bytes()[:-1])
    out = tmp_path / "second"
    ran = run("train-draft", "--follow", folder, "--init", tmp_path / "first", "--out", out,
              "--swap", url, "--json", *small)  # fmt: skip
    assert ran.code == 0, ran.err
    result = ran.json["result"]
    assert result["is_better"] == (result["tau_after"] > result["tau_before"])
    assert result["swapped"] == result["is_better"] == bool(handler.sent)
    assert (result["records"], result["records_with_features"]) == (60, 39)
    said = re.search(r"the server kept those of (\d+) of (\d+) texts", ran.err)
    assert said is not None
    assert 0 < int(said[1]) < int(said[2])
    few = tmp_path / "few"
    few.mkdir()
    segment_path(few, 1).write_text(lines[0])
    ran = run("train-draft", "--follow", few, "--init", tmp_path / "first", "--out",
              tmp_path / "few-2", "--swap", url, "--json", *small)  # fmt: skip
    assert ran.code == 0, ran.err
    assert "too little traffic" in ran.err
    assert (ran.json["result"]["is_better"], ran.json["result"]["swapped"]) == (False, False)
    (tmp_path / "third.traffic.jsonl").write_text("of another run")
    monkeypatch.setattr("specctl.core.storage.kept_features.linked", None)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for more, said in (
        ((), ""),
        (("data.features=offline",), ""),
        (("data.nonsense=1",), "nonsense"),
    ):
        words = [word for each in more for word in ("--set", each)]
        planned = run("train-draft", "--follow", folder, "--init", tmp_path / "first", "--out",
                      tmp_path / "third", "--dry-run", "--json", *small, *words)  # fmt: skip
        assert (planned.code == 0) == (not said), planned.err
        assert said in planned.err
        if not said:
            plan = planned.json["result"]
            assert plan["recipe"]["data"]["source"] == str(folder)
            assert [one["name"] for one in plan["plan"]["data"]] == [str(folder)]
            assert plan["origin"]["data.source"] == "--follow"
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert (tmp_path / "second.features").stat().st_mode & 0o077 == 0
    assert (out / "package" / "manifest.json").is_file()
    records = [json.loads(x) for x in (tmp_path / "second.traffic.jsonl").open()]
    assert all("input_ids" in record for record in records[:39])
    assert records[39:] == [{"text": text} for text in texts[39:]]
