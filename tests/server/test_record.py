"""The request log to learn from: what training reads, what it may cost, who may read it."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from specctl.core.errors import FileError
from specctl.server.record import Recorder
from specctl.train.data.sources.defects import Defects
from specctl.train.data.sources.sources import read_samples
from specctl_testing.runtime.serving import StubService
from specctl_testing.runtime.web import make_app, post

ANSWER = StubService().text


def recorded(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_was_served_is_data_for_training_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    recorder = Recorder(path)
    app = make_app(recorder=recorder)
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "caf\u00e9"}]
    for stream in (False, True):
        post(app, "/v1/chat/completions", {"messages": talk, "stream": stream})
    post(app, "/v1/completions", {"prompt": "import os", "n": 2})
    recorder.close()
    defects = Defects()
    samples = list(read_samples(str(path), "auto", "train", 0, defects))
    assert not defects.counts
    answer = {"role": "assistant", "content": ANSWER}
    assert [list(sample.messages) for sample in samples[:2]] == [[*talk, answer]] * 2
    assert [sample.text for sample in samples[2:]] == ["import os" + ANSWER] * 2


def test_only_whole_answers_are_recorded(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "traffic.jsonl")
    for stream in (False, True):
        failing = make_app(StubService(fail_after=1), recorder=recorder)
        post(failing, "/v1/completions", {"prompt": "x", "stream": stream})
    recorder.close()
    assert recorded(tmp_path / "traffic.jsonl") == []


def test_nobody_else_may_read_it_and_links_are_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    path.write_text("")
    path.chmod(0o644)
    Recorder(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    for bad in (link, tmp_path / "absent" / "traffic.jsonl"):
        with pytest.raises(FileError, match="--record"):
            Recorder(bad)


def test_a_full_file_makes_room_and_one_older_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    recorder = Recorder(path, max_bytes=100)
    for number in range(20):
        recorder.put({"text": "x" * 20, "number": number})
    recorder.close()
    kept = [*recorded(tmp_path / "traffic.1.jsonl"), *recorded(path)]
    numbers = [record["number"] for record in kept]
    assert numbers == list(range(numbers[0], 20))
    assert all(file.stat().st_size <= 100 for file in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 2
    assert recorder.written == 20


def test_a_line_that_is_already_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    for number in range(2):
        recorder = Recorder(path)
        recorder.put({"text": "x", "number": number})
        recorder.close()
    assert [record["number"] for record in recorded(path)] == [0, 1]


def test_a_disk_that_fails_loses_lines_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specctl.server import record

    recorder = Recorder(tmp_path / "traffic.jsonl")
    app = make_app(recorder=recorder)

    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record.os, "write", full)
    assert post(app, "/v1/completions", {"prompt": "x"}).status_code == 200
    recorder.close()
    assert (recorder.written, recorder.dropped) == (0, 1)


def test_a_disk_that_is_slow_loses_lines_and_waits_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    from specctl.server import record

    gate, write = threading.Event(), record.os.write

    def slow(file: int, data: bytes) -> int:
        gate.wait(10)
        return write(file, data)

    monkeypatch.setattr(record.os, "write", slow)
    monkeypatch.setattr(record, "WAITING", 4)
    recorder = Recorder(tmp_path / "traffic.jsonl")
    for number in range(100):
        recorder.put({"number": number})
    assert recorder.dropped >= 95
    gate.set()
    recorder.close()
    assert recorder.written + recorder.dropped == 100


def test_a_line_that_the_disk_takes_a_part_of_is_dropped_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specctl.server import record

    recorder, write, room = Recorder(tmp_path / "traffic.jsonl"), record.os.write, [1, 5, 1]

    def nearly_full(file: int, data: bytes) -> int:
        part = room.pop(0)
        return write(file, data if part == 1 else data[:part])

    monkeypatch.setattr(record.os, "write", nearly_full)
    for number in range(3):
        recorder.put({"number": number})
    recorder.close()
    assert recorded(tmp_path / "traffic.jsonl") == [{"number": 0}, {"number": 2}]
    assert (recorder.written, recorder.dropped) == (2, 1)
