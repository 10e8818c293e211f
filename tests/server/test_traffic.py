"""Traffic that is kept to train on: whose, how much, who may read it, what a kill costs."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from specctl.cli.options.keeping import recorder_for
from specctl.core.errors import FileError, IncompatibleError, SpecctlError
from specctl.core.storage.traffic_files import Writer, newest_lines, segments, writer_of
from specctl.server.traffic import SEGMENTS, TrafficKeeper
from specctl_testing.runtime.web import make_app, post

GIB = 1 << 30
# The log is left out: it imports the whole server.
WRITER = """
import sys, types
from pathlib import Path
log = sys.modules["specctl.server.logs"] = types.ModuleType("logs")
log.log = print
from specctl.server.traffic import TrafficKeeper
keeper, number = TrafficKeeper(Path(sys.argv[1]), 1 << 20), 0
while True:
    keeper.put({"text": "x" * 100, "number": number})
    number += 1
    if number % 50 == 0:
        print(keeper.written, flush=True)
"""


def numbers(folder: Path, count: int = 10**6) -> list[int]:
    return [json.loads(line)["number"] for line in newest_lines(folder, count)]


def test_requests_that_opt_out_are_not_kept_and_others_are_for_the_owner(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    keeper = TrafficKeeper(folder, GIB)
    app = make_app(recorder=keeper)
    talk = {"messages": [{"role": "user", "content": "keep me"}]}
    hidden = {"messages": [{"role": "user", "content": "secret"}]}
    post(app, "/v1/chat/completions", talk)
    post(app, "/v1/completions", {"prompt": "keep me", "store": True})
    for path, body in (
        ("/v1/chat/completions", hidden),
        ("/v1/chat/completions", {**hidden, "stream": True}),
        ("/v1/completions", {"prompt": "secret"}),
        ("/v1/responses", {"input": "secret"}),
        ("/v1/messages", {**hidden, "max_tokens": 9}),
    ):
        assert post(app, path, {**body, "store": False}).status_code == 200
    assert post(app, "/v1/completions", {"prompt": "secret", "store": "no"}).status_code == 400
    keeper.close()
    kept = b"".join(newest_lines(folder, 100))
    assert (kept.count(b"keep me"), kept.count(b"secret")) == (2, 0)
    assert (keeper.written, keeper.dropped) == (2, 0)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_nothing_is_kept_unless_a_place_is_named(tmp_path: Path) -> None:
    assert recorder_for(None, None, None) is None
    with pytest.raises(SpecctlError, match="one place"):
        recorder_for(tmp_path / "a", tmp_path / "b", None)
    with pytest.raises(SpecctlError, match="not named"):
        recorder_for(None, None, 1.0)
    assert not list(tmp_path.iterdir())


def test_what_is_kept_never_exceeds_the_limit_and_is_the_newest(tmp_path: Path) -> None:
    limit, total = SEGMENTS * 200, 0
    for first in (0, 100):  # the second server finds what the first has left
        keeper = TrafficKeeper(tmp_path, limit)
        put = keeper._append

        def watched(line: bytes, put=put) -> None:
            nonlocal total
            put(line)
            total = max(total, sum(path.stat().st_size for path in segments(tmp_path)))

        keeper._append = watched
        for number in range(first, first + 100):
            keeper.put({"text": "x" * 20, "number": number})
        keeper.put({"text": "x" * 300})
        keeper.close()
        assert (keeper.written, keeper.dropped) == (100, 1)
    assert limit // 2 < total <= limit
    kept = numbers(tmp_path)
    assert kept == list(range(kept[0], 200))
    assert numbers(tmp_path, 3) == [197, 198, 199]


def test_one_folder_belongs_to_one_server(tmp_path: Path) -> None:
    keeper = TrafficKeeper(tmp_path, GIB)
    with pytest.raises(FileError, match="--keep-traffic"):
        TrafficKeeper(tmp_path, GIB)
    keeper.close()
    TrafficKeeper(tmp_path, GIB).close()
    assert len(segments(tmp_path)) == 1  # starts without traffic leave nothing behind


def test_a_folder_keeps_the_answers_of_one_target(tmp_path: Path) -> None:
    ours, other = Writer("tiny", "a" * 64), Writer("big", "b" * 64)
    keeper = TrafficKeeper(tmp_path, GIB)
    keeper.begin(other)
    keeper.begin(ours)  # nothing has been kept yet
    keeper.put({"text": "x", "number": 1})
    keeper.close()
    assert writer_of(tmp_path) == ours
    keeper = TrafficKeeper(tmp_path, GIB)
    with pytest.raises(IncompatibleError, match="another target"):
        keeper.begin(other)
    keeper.begin(ours)
    keeper.close()
    assert (writer_of(tmp_path), numbers(tmp_path)) == (ours, [1])
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_a_killed_server_loses_nothing_that_was_counted(tmp_path: Path) -> None:
    words = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        counted = 0
        for line in process.stdout:
            counted = int(line)
            if counted > 100:
                break
        process.send_signal(signal.SIGKILL)
    kept = numbers(tmp_path)
    assert len(kept) >= counted > 100
    assert kept == sorted(kept)
    with segments(tmp_path)[-1].open("ab") as file:
        file.write(b'{"text": "half')  # as a kill in mid-line leaves it
    keeper = TrafficKeeper(tmp_path, 1 << 20)
    keeper.put({"text": "x", "number": 10**6})
    keeper.close()
    assert numbers(tmp_path) == [*kept, 10**6]
