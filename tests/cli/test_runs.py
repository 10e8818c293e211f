"""specctl runs: folders of runs made here, told how they stand, continued, compared, tidied."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from specctl.api.arguments.recipe import folder_name
from specctl.cli.app.console import Console
from specctl.cli.commands import runs as runs_command
from specctl.cli.commands.runs import resuming_words
from specctl.cli.main import main
from specctl.core.errors import Exit
from specctl.runtime.measure.reporter import SilentReporter
from specctl.train.runs.folders import find_runs, read_run
from specctl.train.saving.lock import live_holder, locked

SMALL = (
    "data.text_tokens=0", "data.regenerate=false", "data.limit_tokens=2000",
    "vocab.selector=fr-spec",
    "train.steps=6", "train.rows=4", "train.seq_len=32", "train.tau_every=3", "train.save_every=1",
    "train.tau_prompts=2", "train.tau_tokens=8", "serve.length=3", "train.log_every=1",
    "train.keep=3",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run in it; copied, never changed."""
    out = tmp_path_factory.mktemp("runs") / "all" / "medusa"
    sets = [word for setting in SMALL for word in ("--set", setting)]
    words = ["train-draft", "--recipe", "medusa", "--out", str(out), *sets, "--set",
             "vocab.size=256", "--quiet"]  # fmt: skip
    kept = sys.argv
    sys.argv = ["specctl", *words]
    try:
        assert main(words, Console()) == 0
    finally:
        sys.argv = kept
    return out.parent


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    """`finished`, `interrupted` after step 5, and `damaged`."""
    folder = tmp_path / "runs"
    for name in ("finished", "interrupted", "damaged"):
        shutil.copytree(made / "medusa", folder / name, symlinks=True)
    shutil.rmtree(folder / "interrupted" / "checkpoints" / "step000006")
    shutil.rmtree(folder / "interrupted" / "package")
    for path in (folder / "damaged").glob("checkpoints/step*/state.json"):
        path.write_text("{}")
    (folder / "no-run").mkdir()
    return folder


def states(answer: dict[str, Any]) -> dict[str, str]:
    return {Path(run["path"]).name: run["state"] for run in answer["result"]["runs"]}


def test_runs_are_found_and_told_how_they_stand(
    run: Any, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = run("runs", "ls", runs, "--json").json
    expected = {name: name for name in ("finished", "interrupted", "damaged")}
    assert states(answer) == expected
    (one,) = [r for r in answer["result"]["runs"] if r["state"] == "interrupted"]
    assert (one["step"], one["steps"], one["family"]) == (5, 6, "medusa")
    assert one["tau"] >= 1.0
    assert one["bytes"] > 1000
    assert answer["next"] == [f"specctl runs resume {runs / 'interrupted'}"]
    with locked(runs / "finished", SilentReporter()):
        answer = run("runs", "ls", runs, "--json").json
        assert states(answer)["finished"] == "running"
    monkeypatch.setenv("COLUMNS", "300")  # one line a run, however long the folder's name
    assert len(run("runs", "ls", runs).out.splitlines()) == 5


def test_looking_at_runs_loads_no_torch(runs: Path) -> None:
    import subprocess

    code = (
        "import sys; from specctl.cli.main import main\n"
        f"for words in (['runs', 'ls', {str(runs)!r}], ['runs', 'clean', {str(runs)!r}],"
        f" ['runs', 'compare', {str(runs / 'finished')!r}, {str(runs / 'damaged')!r}]):\n"
        "    assert main(words) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    source = Path(__file__).parents[2] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)


def test_a_run_is_shown_with_the_health_of_its_checkpoints(run: Any, runs: Path) -> None:
    result = run("runs", "show", runs / "finished", "--json").json["result"]
    assert [c["damage"] for c in result["checkpoints"]] == [None] * len(result["checkpoints"])
    assert any(c["best"] for c in result["checkpoints"])
    weights = runs / "finished" / "checkpoints" / "step000006" / "model.safetensors"
    body = bytearray(weights.read_bytes())
    body[-1] ^= 1
    weights.write_bytes(body)
    shown = run("runs", "show", runs / "finished")
    assert "model.safetensors does not match its hash" in shown.out
    assert "does not match" not in run("runs", "show", runs / "finished", "--sizes").out


def test_an_interrupted_run_is_continued_as_it_was_started(
    run: Any, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    record = (runs / "interrupted" / "run.yaml").read_bytes()
    ran = run("runs", "resume", runs / "interrupted", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["schema"] == "specctl.train-draft/1"
    assert ran.json["result"]["steps"] == 6
    assert read_run(runs / "interrupted").state == "finished"
    assert (runs / "interrupted" / "run.yaml").read_bytes() == record
    left, right = (
        runs / name / "checkpoints" / "step000006" / "model.safetensors"
        for name in ("interrupted", "finished")
    )
    assert left.read_bytes() == right.read_bytes()


def test_a_run_that_lost_its_checkpoints_stays_damaged_until_a_restart_is_allowed(
    run: Any, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = runs / "damaged"
    shutil.rmtree(folder / "package")
    log = (folder / "metrics.jsonl").read_bytes()
    saves = sorted(path.name for path in (folder / "checkpoints").iterdir())
    for _ in range(2):
        ran = run("runs", "resume", folder, "--json")
        assert ran.code == Exit.INTEGRITY
        assert "--allow restart" in ran.json["error"]["do"]
        assert (folder / "metrics.jsonl").read_bytes() == log
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == saves
        assert read_run(folder).state == "damaged"
    assert run("runs", "clean", folder, "--yes", "--json").json["result"]["deleted"] == []
    ran = run("runs", "resume", folder, "--allow", "restart", "--json")
    assert ran.code == 0, ran.err
    assert read_run(folder).state == "finished"


def test_a_finished_run_keeps_its_package_and_its_proof_whatever_is_asked(
    run: Any, runs: Path
) -> None:
    folder = runs / "finished"
    (folder / "package" / "proof.json").write_text('{"kept": true}')

    def files() -> dict[Path, bytes]:
        found = (path for path in folder.rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in found}

    before, words = files(), [word for setting in SMALL for word in ("--set", setting)]
    again = ("train-draft", "--recipe", "medusa", "--out", folder, *words, "--set",
             "vocab.size=256", "--json")  # fmt: skip
    for asked in (("runs", "resume", folder, "--json"), again):
        ran = run(*asked)
        assert ran.code == 0, ran.err
        assert "left as it is" in ran.err
        assert files() == before
    assert ran.json["result"]["package"] == str(folder / "package")


def test_a_run_that_was_killed_before_it_was_packaged_is_not_finished(run: Any, runs: Path) -> None:
    shutil.rmtree(runs / "finished" / "package")
    assert read_run(runs / "finished").state == "interrupted"
    assert run("runs", "resume", runs / "finished", "--json").code == 0
    assert read_run(runs / "finished").state == "finished"


def test_a_running_run_is_not_resumed(run: Any, runs: Path) -> None:
    with locked(runs / "interrupted", SilentReporter()):
        ran = run("runs", "resume", runs / "interrupted", "--json")
    assert ran.code == Exit.FILE
    assert str(os.getpid()) in ran.json["error"]["found"]


def record(folder: Path, command: str) -> None:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"command": command}))


def test_a_run_goes_on_with_its_processes_and_by_its_own_command(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = runs / "interrupted"
    record(folder, "specctl distill -t tiny --processes=2 --set train.steps=9 -o elsewhere")
    again = ["distill", "--recipe", str(folder), "--out", str(folder), "--processes", "2"]
    assert resuming_words(read_run(folder)) == again
    monkeypatch.chdir(runs)
    record(folder, "specctl prune --layers 2 --out interrupted")
    assert resuming_words(read_run(folder)) == ["prune", "--layers", "2", "--out", "interrupted"]
    monkeypatch.chdir(runs.parent)
    with pytest.raises(Exception, match="another folder from here"):
        resuming_words(read_run(folder))


def test_runs_are_compared_by_recipe_and_by_figures(run: Any, runs: Path) -> None:
    path = runs / "damaged" / "run.yaml"
    tree = yaml.safe_load(path.read_text())
    tree["recipe"]["train"]["learning_rate"] = 0.5
    path.write_text(yaml.safe_dump(tree))
    words = ("runs", "compare", runs / "finished", runs / "damaged")
    result = run(*words, "--json").json["result"]
    assert list(result["recipe"]) == ["train.learning_rate"]
    assert result["recipe"]["train.learning_rate"][1] == 0.5
    assert result["figures"]["state"] == ["finished", "damaged"]
    assert result["figures"]["loss"][0] > 0
    assert "train.learning_rate" in run(*words).out
    assert run("runs", "compare", runs / "finished").code == Exit.USAGE


def test_cleaning_lists_first_and_never_takes_the_best_the_newest_or_a_running_run(
    run: Any, runs: Path
) -> None:
    saves = runs / "finished" / "checkpoints"
    (saves / ".tmp-step000009").mkdir()
    (saves / "damaged-step000002").mkdir()
    before = {c.step: c.is_best for c in read_run(runs / "finished").saves}
    assert len(before) > 2
    words = ("runs", "clean", runs / "finished", "--keep", "1")
    listed = run(*words, "--json").json["result"]
    assert listed["deleted"] == []
    assert (saves / ".tmp-step000009").exists()
    with locked(runs / "finished", SilentReporter()):
        held = run(*words, "--yes", "--json").json["result"]
    assert held["found"] == held["deleted"] == []
    done = run(*words, "--yes", "--json").json["result"]
    assert sorted(done["deleted"]) == sorted(entry["path"] for entry in listed["found"])
    after = {c.step for c in read_run(runs / "finished").saves}
    assert after == {max(before)} | {step for step, is_best in before.items() if is_best}
    names = {p.name for p in saves.iterdir()}
    assert names == {f"step{step:06d}" for step in after} | {"latest"}
    assert live_holder(runs / "finished") is None


def test_the_newest_lines_are_shown_and_new_ones_followed(
    run: Any, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = runs / "interrupted"
    lines = run("runs", "tail", folder, "-n", "2", "--json").json["result"]["lines"]
    assert len(lines) == 2
    assert "step 6" in run("runs", "tail", folder, "-n", "1").out
    monkeypatch.setattr(runs_command, "POLL", 0.02)
    log = folder / "metrics.jsonl"

    def trainer() -> None:
        time.sleep(0.1)
        kept = [line for line in log.read_text().splitlines() if json.loads(line)["step"] <= 5]
        beside = log.with_suffix(".new")  # as a run does that goes on from step 5
        beside.write_text("\n".join(kept) + "\n")
        beside.replace(log)
        time.sleep(0.1)
        with log.open("a") as file:
            file.write('{"step": 6, "loss": 1.25}\n{"step": 7, "lo')
            file.flush()
            time.sleep(0.1)
            file.write('ss": 0.75}\n')
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        while not is_over.wait(5):  # one that arrives in a finalizer is lost
            os.kill(os.getpid(), signal.SIGINT)

    is_over = threading.Event()
    writer = threading.Thread(target=trainer)
    writer.start()
    ran = run("runs", "tail", folder, "-n", "0", "--follow")
    is_over.set()
    writer.join()
    assert ran.code == 0
    assert ran.out.splitlines() == ["step 6: loss 1.25", "step 7: loss 0.75"]
    assert "Traceback" not in ran.err


def test_following_ends_with_the_run(run: Any, runs: Path) -> None:
    ran = run("runs", "tail", runs / "finished", "-n", "1", "--follow")
    assert ran.code == 0
    assert len(ran.out.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("ls", "ABSENT"), Exit.FILE),
        (("show", "no-run"), Exit.FILE),
        (("tail", "no-run"), Exit.FILE),
        (("resume", "no-run"), Exit.FILE),
        (("clean", "ABSENT"), Exit.FILE),
        (("tail", "finished", "--follow"), Exit.USAGE),
    ],
)
def test_mistakes_are_answered_with_something_to_do(
    run: Any, runs: Path, words: tuple[str, ...], code: int
) -> None:
    ran = run("runs", words[0], runs / words[1], *words[2:], "--json")
    assert ran.code == code
    assert ran.json["error"]["do"].startswith("specctl runs")


def test_folders_inside_a_run_are_not_runs(runs: Path) -> None:
    (runs / "finished" / "half").mkdir()
    assert [p.name for p in find_runs(runs)] == ["damaged", "finished", "interrupted"]


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("tiny", "tiny"),
        ("org/model", "org--model"),
        ("./model", "model"),
        ("../all/./model/", "all--model"),
        ("/models/.cache/m", "models--.cache--m"),
        (".hidden/m", "hidden--m"),
        ("..", None),
    ],
)
def test_no_target_makes_a_hidden_run_folder(target: str, name: str | None) -> None:
    assert folder_name(target) == (name or Path.cwd().parent.name)


def test_a_run_in_a_hidden_folder_is_listed_and_others_are_not_looked_into(runs: Path) -> None:
    (runs / "finished").rename(runs / ".--model-medusa")
    shutil.copytree(runs / "damaged", runs / ".venv" / "run", symlinks=True)
    names = [path.name for path in find_runs(runs)]
    assert names == [".--model-medusa", "damaged", "interrupted"]


@pytest.mark.parametrize(
    "mistake",
    [
        ("--target", "./nowhere"),
        ("--target", "tyni"),
        ("--data", "EMPTY"),
        ("--set", "drafter.options.num_heads=0"),
    ],
)
def test_a_mistake_leaves_no_run_behind(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: tuple[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("{}\n")
    words = [word.replace("EMPTY", "empty.jsonl") for word in mistake]
    sets = [word for setting in SMALL for word in ("--set", setting)]
    ran = run("train-draft", "--recipe", "medusa", *sets, *words, "--out", "runs/new")
    assert ran.code not in (0, 1), ran.err
    assert not (tmp_path / "runs" / "new").exists()
    assert run("runs", "ls", tmp_path, "--json").json["result"]["runs"] == []
