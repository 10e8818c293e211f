"""Commands on the embedded target: what they answer, and the journey from training to export."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specctl.api.vocab_trim import parse_size
from specctl.cli.app.launch import launch_command
from specctl.cli.options.prompts import read_prompts
from specctl.core.errors import Exit, RecipeError

SMALL = (
    "data.text_tokens=0", "data.prompts=12", "data.prompt_tokens=16", "data.new_tokens=16",
    "train.steps=4", "train.rows=4", "train.seq_len=32", "train.tau_every=2", "train.save_every=2",
    "train.tau_prompts=2", "train.tau_tokens=8", "serve.length=3",
)  # fmt: skip


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


GENERATE = ("generate", "--max-new-tokens", "12", "--set", "sample.ignore_eos=true")


def test_generate_answers_as_promised(run: Any) -> None:
    answer = run(*GENERATE, "def main(", "--draft", "prompt-lookup", "--json").json
    assert answer["ok"] is True
    (output,) = answer["result"]["outputs"]
    assert set(output) == {"prompt", "text", "token_ids", "finish_reason"}
    assert output["prompt"] == "def main("
    assert len(output["token_ids"]) == 12
    assert output["finish_reason"] == "length"
    stats = answer["result"]["stats"]
    promised = ("tau", "rounds", "drafted", "accepted", "accepted_per_position")
    for key in (*promised, "tokens_per_second", "verification"):
        assert key in stats
    assert stats["verification"].startswith("lossless")
    assert stats["tau"] == pytest.approx(12 / stats["rounds"], abs=1e-3)
    assert answer["result"]["target"]["name"] == "tiny"


def test_the_streamed_text_is_the_text_of_the_answer(run: Any) -> None:
    words = (*GENERATE, "import os\nimport ", "--temperature", "0.8", "--seed", "5")
    text = run(*words, "--json").json["result"]["outputs"][0]["text"]
    assert run(*words, "-q").out == text + "\n"


@pytest.mark.parametrize("draft", ["prompt-lookup", "token-recycling"])
def test_a_drafter_changes_no_greedy_answer(run: Any, draft: str) -> None:
    prompts = "import os\nimport sys\nclass Tree:\n"
    words = (*GENERATE, "--dtype", "float32", "-f", "-")
    plain = run(*words, "--json", stdin=prompts).json["result"]["outputs"]
    fast = run(*words, "--json", "--draft", draft, "--batch", "2", stdin=prompts).json["result"]
    assert [o["token_ids"] for o in fast["outputs"]] == [o["token_ids"] for o in plain]
    assert [o["prompt"] for o in plain] == prompts.splitlines()


def test_several_prompts_are_told_apart(run: Any) -> None:
    shown = run(*GENERATE, "-f", "-", stdin="import os\nimport sys\n")
    assert "[1/2] import os" in shown.out
    assert "[2/2] import sys" in shown.out
    batched = run(*GENERATE, "-f", "-", "--batch", "2", stdin="import os\nimport sys\n")
    assert batched.out == shown.out


def test_jsonl_prompts_may_be_texts_or_conversations(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "write a loop"}]
    lines = [{"prompt": "import os"}, {"messages": messages}, "class A:"]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    outputs = run(*GENERATE, "-f", file, "--json").json["result"]["outputs"]
    assert [o["prompt"] for o in outputs] == ["import os", "write a loop", "class A:"]


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path) -> None:
    for name in ("x.jsonl", "x.txt"):
        (tmp_path / name).write_bytes(b'\xef\xbb\xbf"def"\r\n')
    (record,) = read_prompts(None, tmp_path / "x.jsonl", None)
    (line,) = read_prompts(None, tmp_path / "x.txt", None)
    assert (record.text, line.text) == ("def", '"def"')


def test_a_revision_of_a_folder_is_not_ignored_silently(run: Any) -> None:
    ran = run("generate", "--set", "target.revision=nope", "--max-new-tokens", "2", "--json", "x")
    assert ran.code == 0
    assert any("target.revision is ignored" in warning for warning in ran.json["warnings"])


def test_text_ends_before_a_stop_string(run: Any) -> None:
    whole = run(*GENERATE, "import os", "--json").json["result"]["outputs"][0]["text"]
    mark = whole.strip()[2:5]
    words = (*GENERATE, "import os", "--set", f"sample.stop={mark}")
    (output,) = run(*words, "--json").json["result"]["outputs"]
    assert output["finish_reason"] == "stop"
    assert output["text"] == whole[: whole.index(mark)]
    assert run(*words, "-q").out == output["text"] + "\n"


@pytest.mark.parametrize("batch", ["1", "2"])
def test_a_full_context_is_said_and_what_ended_the_others(
    run: Any, tmp_path: Path, batch: str
) -> None:
    long = "x = 1; " * 200
    (tmp_path / "two.txt").write_text(f"{long}\ndef main(\n")
    words = (
        "generate",
        "-f",
        tmp_path / "two.txt",
        "--set",
        "sample.ignore_eos=true",
        "--batch",
        batch,
    )
    room = 1024 - tokens_of(long)
    ran = run(*words, "--max-new-tokens", str(room + 5))
    assert "ended by the full context of tiny (1), --max-new-tokens" in " ".join(ran.err.split())
    assert f"after {room} of {room + 5} new tokens" in " ".join(ran.err.split())
    ran = run(*words, "--max-new-tokens", str(room + 5), "--json")
    outputs = ran.json["result"]["outputs"]
    assert [o["finish_reason"] for o in outputs] == ["context", "length"]
    assert [len(o["token_ids"]) for o in outputs] == [room, room + 5]
    assert "1,024" in ran.json["warnings"][0]


def tokens_of(text: str) -> int:
    """How many tokens the embedded target reads of a text."""
    from specctl.runtime.target.target import load_target

    return len(load_target("tiny").encode(text))


def test_text_that_ends_as_asked_is_no_warning(run: Any) -> None:
    ran = run(*GENERATE, "def main(")
    assert "ended by --max-new-tokens 12" in ran.err
    assert "warning" not in ran.err
    stopped = run("generate", "def main(", "--set", "sample.stop=:", "--max-new-tokens", "40")
    assert "ended by a stop string" in stopped.err
    assert run(*GENERATE, "-q", "def main(").err == ""


def test_compare_shows_both_ways_and_that_they_agree(run: Any) -> None:
    words = (*GENERATE, "import os\nimport ", "--draft", "prompt-lookup", "--compare")
    shown = run(*words, "--dtype", "float32")
    for part in ("plain", "prompt-lookup", "tau", "tokens/s", "speed-up", "identical"):
        assert part in shown.out
    comparison = run(*words, "--dtype", "float32", "--json").json["result"]["comparison"]
    assert comparison["identical"] is True
    assert comparison["plain"]["tau"] == 1.0
    assert comparison["speedup"] > 0


def test_an_inflated_target_says_so_everywhere(run: Any) -> None:
    ran = run("generate", "--max-new-tokens", "2", "--inflate", "100m", "import os", "--json")
    assert ran.code == 0
    answer = ran.json
    assert "inflated" in answer["result"]["target"]["note"]
    assert any("inflated" in warning for warning in answer["warnings"])


def test_bench_answers_as_promised(run: Any, tmp_path: Path) -> None:
    words = ("bench", "--num-prompts", "2", "--max-new-tokens", "8", "--repeats", "1")
    answer = run(*words, "-d", "prompt-lookup", "--json", "-o", tmp_path / "b" / "bench.json").json
    rows = answer["result"]["rows"]
    assert [r["name"] for r in rows] == ["plain", "prompt-lookup"] * 2
    assert {r["setting"] for r in rows} == {"greedy", "T=0.8"}
    for row in rows:
        assert {"name", "tau", "tokens_per_second", "speedup", "repetition_rate"} <= set(row)
    assert rows[0]["speedup"] == 1.0
    assert json.loads((tmp_path / "b" / "bench.json").read_text()) == answer["result"]


def test_that_the_cores_were_busy_is_said(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    from specctl.models.native.threads import Threads, threads_of

    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    monkeypatch.setattr(Threads, "_judge", lambda *_: None)  # whatever this machine does meanwhile
    words = ("bench", "--num-prompts", "1", "--max-new-tokens", "4", "--repeats", "1")
    for at, used in ((0, 6), (2, 4)):
        monkeypatch.setattr(threads_of(6), "at", at)
        kept = tmp_path / f"{used}.json"
        shown = run(*words, "-d", "prompt-lookup", "--temperature", "0", "--out", kept)
        report = json.loads(kept.read_text())
        assert (report["threads"], report["threads_used"]) == (6, used)
        said = run(*GENERATE, "def main(", "--stats")
        for found in (shown.out + shown.err, said.out + said.err):
            assert ("the cores were busy" in found) == (used < 6)
    assert "the last steps ran on 4 of 6 threads, which was faster" in " ".join(found.split())


def test_a_missed_gate_exits_with_8_and_still_reports(run: Any) -> None:
    words = ("bench", "--num-prompts", "1", "--max-new-tokens", "4", "--repeats", "1")
    ran = run(*words, "-d", "prompt-lookup", "--temperature", "0", "--gate", "tau>=99", "--json")
    assert ran.code == Exit.GATE
    assert ran.json["ok"] is False
    assert ran.json["result"]["rows"]
    assert "tau" in ran.json["error"]["found"]


def test_doctor_never_shows_the_token(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_mine")
    ran = run("doctor", "--json", "-v")
    assert ran.code == 0
    assert "secret" not in ran.out + ran.err
    found = {check["name"]: check["found"] for check in ran.json["result"]["checks"]}
    assert "a token is set" in found["hub"]
    assert {"python", "torch", "memory", "cpu"} <= set(found)


def test_doctor_says_red_for_what_does_not_work(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_HOME", "/proc/nowhere")
    ran = run("doctor", "--quick", "--json")
    assert ran.code == Exit.RESOURCES
    assert ran.json["ok"] is False
    assert ran.json["result"]["state"] == "red"
    assert any("HF_HOME" in step for step in ran.json["next"])


def test_plan_tells_parameters_memory_disk_and_time(run: Any, tmp_path: Path) -> None:
    ran = run("plan", "-r", "distill", "-o", tmp_path / "none")
    assert " 0 B" not in ran.out, "what takes no room is not listed"
    answer = run("plan", "-r", "distill", "-o", tmp_path / "none", "--json").json
    plan = answer["result"]["plan"]
    assert plan["parameters"] >= plan["trainable"] > 0
    assert plan["memory_bytes"] > 0
    assert plan["disk_bytes"] > 0
    assert 0 < plan["seconds_range"][0] <= plan["seconds_range"][1]
    assert not (tmp_path / "none").exists()


def test_a_dry_run_plans_and_writes_nothing(run: Any, tmp_path: Path) -> None:
    words = ("train-draft", "-r", "medusa", "-o", tmp_path / "none", "--set", "train.steps=77")
    ran = run(*words, "--dry-run", "--json")
    assert ran.json["result"]["plan"]["steps"] == 77
    assert "--dry-run" not in ran.json["next"][0]
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry run"])
@pytest.mark.parametrize(
    "words", [("train-draft", "-r", "medusa"), ("distill",), ("prune", "--layers", "2")]
)
@pytest.mark.parametrize("key", ["train.seq_len", "data.new_tokens"])
def test_rows_and_answers_beyond_the_targets_context_are_refused_before_any_is_written(
    run: Any, tmp_path: Path, words: tuple[str, ...], dry: tuple[str, ...], key: str
) -> None:
    ran = run(*words, "-o", tmp_path / "run", "--set", f"{key}=1000000", *dry, "--json")
    error = ran.json["error"]
    assert (ran.code, error["where"], error["found"]) == (3, key, "1,000,000 tokens")
    assert "1,024" in error["expected"]
    assert key in error["do"]
    assert not list(tmp_path.rglob("*answers*"))
    assert not list(tmp_path.rglob("data/*"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps: its folder."""
    import sys

    from specctl.cli.app.console import Console
    from specctl.cli.main import main

    out = tmp_path_factory.mktemp("run") / "distill"
    words = ["distill", "--out", str(out), *sets(*SMALL), "--json"]
    kept = sys.argv
    sys.argv = ["specctl", *words]
    try:
        assert main(words, Console()) == 0
    finally:
        sys.argv = kept
    return out


@pytest.mark.fast
def test_training_ends_with_hash_acceptance_time_and_next(
    trained: Path, run: Any, tmp_path: Path
) -> None:
    suite = tmp_path / "mine.jsonl"
    suite.write_text('{"prompt": "What is a list?"}\n')
    ran = run("distill", "--out", trained, *sets(*SMALL, f"train.tau_suite={suite}"))
    assert ran.code == 0
    last = ran.out.splitlines()[-1]
    assert last.startswith("checkpoint ")
    for part in ("sha256", "acceptance tau", "k=3"):
        assert part in last
    assert f"Next: specctl verify {trained / 'package'}" in ran.err
    benched = f"specctl bench {trained / 'package'} --target tiny --suite {suite}"
    assert ran.err.split("Next: ")[1].strip() == benched
    assert "is left as it is" in ran.err


def test_a_run_and_its_package_can_be_shown(trained: Path, run: Any) -> None:
    shown = run("show", trained, "--json").json["result"]
    assert (shown["kind"], shown["last"]["step"]) == ("run", 4)
    assert shown["run"]["recipe"]["train"]["steps"] == 4
    package = run("show", trained / "package", "--json").json["result"]
    assert package["manifest"]["family"] == "small-lm"
    assert package["manifest"]["serve"]["length"] == 3
    assert package["manifest"]["acceptance"]["prompts"] == 2
    assert "small-lm" in run("show", trained / "package").out


def test_a_run_folder_can_be_named_as_a_recipe(trained: Path, run: Any) -> None:
    answer = run("recipes", "show", trained, "--json").json["result"]
    assert answer["recipe"]["train"]["steps"] == 4


def test_verify_finds_a_flipped_byte(trained: Path, run: Any, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(trained / "package", copy)
    assert run("verify", copy, "--level", "compat").code == 0
    weights = copy / "model.safetensors"
    body = bytearray(weights.read_bytes())
    body[-1] ^= 1
    weights.write_bytes(bytes(body))
    ran = run("verify", copy, "--level", "files", "--json")
    assert ran.code == Exit.INTEGRITY
    assert "model.safetensors" in ran.json["error"]["found"]


@pytest.mark.fast
def test_a_package_drafts_as_it_was_trained_to(trained: Path, run: Any) -> None:
    words = (*GENERATE, "--max-new-tokens", "24", "--dtype", "float32", "import os", "--json")
    plain = run(*words).json["result"]
    fast = run(*words, "--draft", trained / "package").json["result"]
    assert fast["outputs"][0]["token_ids"] == plain["outputs"][0]["token_ids"]
    longer = run(*words, "--draft", trained / "package", "--length", "5").json["result"]
    # The last rounds are cut to the row's room: nine in 24 tokens at worst, 21 nodes or 30.
    per_round, deeper = (
        each["stats"]["drafted"] / each["stats"]["rounds"] for each in (fast, longer)
    )
    assert 2 < per_round <= 3 < deeper <= 5
    # Positions are listed as far as drafts were tested.
    assert 0 < len(fast["stats"]["accepted_per_position"]) <= 3
    assert 0 < len(longer["stats"]["accepted_per_position"]) <= 5


def test_names_joined_by_a_plus_draft_as_a_team(trained: Path, run: Any) -> None:
    words = (*GENERATE, "--max-new-tokens", "24", "--dtype", "float32", "--json")
    plain = run(*words, "import os\n" * 3).json["result"]
    team = f"{trained}+prompt-lookup"
    made = run(*words, team, "import os\n" * 3).json["result"]
    assert made["outputs"][0]["token_ids"] == plain["outputs"][0]["token_ids"]
    arms = made["stats"]["controller"]["arms"]
    assert any(name.startswith("prompt-lookup") for name in arms), "as a word of its own, too"
    ran = run(*words, "--draft", f"{trained}+prompt-lokup", "x")
    assert (ran.code, ran.json["error"]["found"]) == (Exit.FILE, "'prompt-lokup'")


def test_trimming_writes_a_smaller_package(trained: Path, run: Any, tmp_path: Path) -> None:
    words = ("vocab-trim", "-d", trained / "package", "-o", tmp_path / "t", "--size", "512")
    ran = run(*words, "--num-prompts", "2", "--max-new-tokens", "8", "--json")
    assert ran.code == 0
    report = ran.json["result"]["report"]
    assert report["size"] == 512
    is_warned = any("512 ids are" in text for text in ran.json["warnings"])
    assert is_warned == (report["coverage"] < 0.95)
    assert any("the whole drafter is faster here" in text for text in ran.json["warnings"]) == (
        report["domains"][0]["gain"] < 1.0
    )
    manifest = run("show", tmp_path / "t" / "package", "--json").json["result"]["manifest"]
    assert manifest["vocabulary"]["draft_size"] == 512
    assert manifest["serve"]["length"] == 3
    assert (tmp_path / "t" / "trim.json").is_file()
    used = run(*GENERATE, "import os", "-d", tmp_path / "t" / "package", "--json")
    assert used.json["result"]["stats"]["verification"].startswith("lossless")


@pytest.mark.parametrize(("whole", "trimmed"), [(240.0, 212.0), (212.0, 240.0)])
def test_the_quickstart_goes_on_with_the_faster_draft_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: float, trimmed: float
) -> None:
    from specctl.cli.commands import quickstart_text as quickstart

    told: list[str] = []
    console: Any = SimpleNamespace(say=told.append)
    (tmp_path / "trimmed").mkdir()
    (tmp_path / "trimmed" / "of.json").write_text('{"digest": "d"}')
    measured = {"whole": whole, "trimmed": trimmed}
    monkeypatch.setattr(quickstart, "_rates", lambda model, packages: measured)
    model: Any = None
    chosen = quickstart._faster(console, model, tmp_path, tmp_path / "trimmed")
    wanted = tmp_path / ("package" if whole > trimmed else "trimmed/package")
    assert chosen == wanted
    assert "212" in told[-1]
    assert f"the {'whole' if whole > trimmed else 'trimmed'} one is used" in told[-1]
    monkeypatch.setattr(quickstart, "_rates", None)  # it was measured, and is kept
    assert quickstart._faster(console, model, tmp_path, tmp_path / "trimmed") == wanted


def test_an_export_loads_in_transformers_and_here(trained: Path, run: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "hf"
    ran = run("export", "-d", trained / "package", "--to", "hf", "-o", out, "--json")
    assert ran.code == 0
    assert "config.json" in ran.json["result"]["files"]
    assert AutoModelForCausalLM.from_pretrained(out).config.vocab_size > 0
    assert run(*GENERATE, "import os", "-d", out, "--json").code == 0


@pytest.mark.parametrize(
    ("text", "size"), [("auto", "auto"), ("2048", 2048), ("32k", 32000), ("4,096", 4096)]
)
def test_sizes_are_read(text: str, size: object) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-5", "2m", "1.5k"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(RecipeError):
        parse_size(text)


def test_gpus_are_started_by_accelerate_and_cpus_by_torch() -> None:
    gpus = launch_command(["train-draft", "--gpus", "2"], 2, is_cpu=False)
    assert gpus[2] == "accelerate.commands.launch"
    assert gpus[-4:] == ["specctl", "train-draft", "--gpus", "2"]
    assert launch_command(["distill"], 2, is_cpu=True)[2] == "torch.distributed.run"


@pytest.mark.proof
def test_two_processes_train_one_drafter(start: Any, tmp_path: Path) -> None:
    words = ("distill", "--out", tmp_path / "two", *sets(*SMALL), "--processes", "2", "--json")
    process = start(*words)
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors[-3000:]
    (line,) = out.splitlines()
    assert json.loads(line)["result"]["steps"] == 4
    assert (tmp_path / "two" / "package" / "manifest.json").is_file()


def test_the_exit_code_of_several_processes_is_the_first_ones(start: Any, tmp_path: Path) -> None:
    file = tmp_path / "taken"
    file.write_text("")
    process = start("distill", "--out", file, *sets(*SMALL), "--processes", "2", "--json")
    out, errors = process.communicate(timeout=240)
    assert process.returncode == Exit.FILE, errors[-3000:]
    assert json.loads(out)["ok"] is False


def test_quickstart_goes_from_nothing_to_a_table(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specctl.cli.commands import quickstart_text as quickstart
    from specctl.runtime.proof import prove
    from specctl.runtime.target.variants import inflate

    monkeypatch.setitem(inflate.SIZES, "25m", inflate.Size(25_000_000, 512, 10))
    level = prove.LEVELS["lossless"]
    small = replace(level, prompts=2, tokens=8, samples=100)
    monkeypatch.setitem(prove.LEVELS, "lossless", small)
    monkeypatch.setattr(quickstart, "TURNS", 1)
    for step in ("TRIM", "COMPARE"):
        monkeypatch.setattr(quickstart, f"{step}_PROMPTS", 3)
        monkeypatch.setattr(quickstart, f"{step}_TOKENS", 8)
    words = (
        "quickstart",
        "-t",
        "tiny",
        "--out",
        tmp_path / "q",
        "--inflate",
        "25m",
        *sets(*SMALL),
    )
    ran = run(*words)
    assert ran.code == 0, ran.err[-2000:]
    for heading in ("1/5", "2/5", "3/5", "4/5", "5/5"):
        assert f"== {heading}" in ran.err
    for part in ("tokens per pass", "speed-up", "tiny at the cost of 25M", "Verdict:"):
        assert part in ran.out
    assert "passed: greedy text is that of plain decoding (" in ran.err
    for bookkeeping in ("rows to train on", "embed_tokens", "Chain block", "q: z"):
        assert bookkeeping not in ran.err
    assert "Next: specctl generate" in ran.err
    assert (tmp_path / "q" / "quickstart.png").is_file()
    again = run(*words, "--json")
    assert again.code == 0
    assert again.json["result"]["lossless"] is True
    assert [c["target"] for c in again.json["result"]["comparisons"]][-1] == "tiny as 25m"
    assert "trimmed by an earlier run" in again.err
    assert "proved by an earlier run" in again.err
    assert "one is used" in ran.err
    kept = json.loads((tmp_path / "q" / "trimmed" / "of.json").read_text())
    assert set(kept["tokens_per_second"]) == {"whole", "trimmed"}
    assert again.json["result"]["package"].endswith("package")


def test_the_verdict_of_the_quickstart_speaks_of_gains_beyond_the_noise() -> None:
    from specctl.cli.commands.quickstart_text import Pair, middle_of, verdict

    def turn(name: str, setting: str, plain: float, fast: float, last: int = 2) -> Pair:
        def of(rate: float, *ids: int) -> Any:
            stats = SimpleNamespace(tokens_per_second=rate, tau=4.0, tokens=640)
            return SimpleNamespace(stats=stats, outputs=[SimpleNamespace(token_ids=ids)])

        return Pair(setting, name, of(plain, 1, 2), of(fast, 1, last))

    def pair(*given: Any) -> Pair:
        return middle_of([turn(*given)])

    turns = [turn("tiny", "greedy", 100, rate) for rate in (300, 90, 120)]
    assert (middle_of(turns).speedup, middle_of(turns).identical) == (1.2, True)
    assert middle_of([*turns[:2], turn("tiny", "greedy", 100, 120, last=3)]).identical is False
    assert middle_of([turn("tiny", "T=0.8", 100, 120, last=3)]).identical is None
    pairs = [pair("tiny", "greedy", 100, 102), pair("tiny", "T=0.8", 100, 300)]
    told = verdict([*pairs, pair("tiny as 300m", "greedy", 10, 29)])
    assert told.startswith(
        "Verdict: on a target of the cost of 300M parameters: 2.9x faster, identical text; "
        "on tiny itself: no gain (1.02x)"
    )
    assert "T=0.8" not in told


def test_a_tree_that_is_fitted_to_the_device_says_to_what(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "specctl.api.arguments.drafting.COST_ROUNDS", 16
    )  # of two, costs may be too vague
    words = (
        *GENERATE,
        "def main(",
        "--draft",
        "stand",
        "--set",
        "serve.policy=sequoia",
        "--adaptive",
    )
    ran = run(*words, "--json")
    fitted = ran.json["result"]["adaptive"]["fitted"]
    assert 1 <= fitted["nodes"] <= 24
    assert ran.json["result"]["outputs"][0]["finish_reason"] == "length"
    again = run(*words)  # by the same costs, which were kept
    assert f"fitted to the measured costs: nodes {fitted['nodes']}, " in " ".join(again.err.split())


@pytest.mark.parametrize("draft", ["prompt-lookup", "token-recycling"])
def test_a_drafter_of_whole_trees_refuses_a_policy_that_grows_them(run: Any, draft: str) -> None:
    ran = run(
        *GENERATE, "x", "--draft", draft, "--set", "serve.policy=sequoia", "--adaptive", "--json"
    )
    assert (ran.code, ran.json["error"]["where"]) == (3, "serve.policy")
    assert "direct" in ran.json["error"]["do"]


def test_an_adaptive_length_changes_no_greedy_answer(trained: Path, run: Any) -> None:
    words = (*GENERATE, "--dtype", "float32", "import os", "--json")
    plain = run(*words).json["result"]
    words = (*words, "--draft", trained / "package", "--adaptive")
    adaptive = run(*words).json["result"]
    assert adaptive["outputs"][0]["token_ids"] == plain["outputs"][0]["token_ids"]
