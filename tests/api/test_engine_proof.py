"""An export proved in an engine: what counts as the same, and what the card says of it."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from email.message import Message
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError

import pytest

from specctl.api import engine_proof
from specctl.api.engine_proof import EngineProof
from specctl.cli.commands.export import PROVERS
from specctl.core.errors import IncompatibleError, ResourceError, SpecctlError
from specctl.export.engines import Answers, EngineJob, ServingEngine, engines, find_engine
from specctl.export.engines import vllm as vllm_
from specctl.export.engines.process import check_installed, chosen_engine, run_host, started
from specctl.export.formats import FOLDER, formats
from specctl.export.package.folder import write_served
from specctl.export.package.manifest import CARD, check_files
from specctl.runtime.policies.chain import Chain
from specctl.runtime.policies.direct import Direct
from specctl.runtime.target.target import Target
from specctl_testing.export.engine_cases import exported, shaken

TEXTS = ((5, 6, 7), (8, 9, 10))
PROMPT = SimpleNamespace(ids=(1, 2))
OURS = Answers(TEXTS, drafted=100, accepted=40, rounds=20)


@pytest.fixture
def job(make_target: Any, tmp_path: Path) -> EngineJob:
    target: Target = make_target(num_layers=4, hidden=16, vocab=48)
    manifest = exported(shaken("eagle3", target), target, tmp_path / "out", "speculators")
    prompts = ((1, 2), (3, 4))
    folder = tmp_path / "out"
    return EngineJob(target, "T", folder, manifest, prompts, 3, 3, sys.executable, tmp_path)


def judged(job: EngineJob, plain: Answers, drafts: Answers) -> EngineProof:
    return engine_proof._judged(engines()["vllm"], job, (plain, drafts), (OURS, OURS))


def test_the_same_texts_and_the_same_acceptance_pass(job: EngineJob) -> None:
    proof = judged(job, Answers(TEXTS), replace(OURS, version="0.1"))
    assert proof.passed
    assert (proof.plain, proof.drafts, proof.ties) == (2, 2, 0)
    assert proof.there.share == 0.4
    assert proof.there.tau == 3.0


@pytest.mark.parametrize(
    ("plain", "drafts", "fault"),
    [
        (Answers(((5, 6, 11), TEXTS[1])), OURS, "prompt 0: vllm, plain"),
        (Answers(TEXTS), replace(OURS, ids=(TEXTS[0], (8, 9))), "prompt 1: vllm, drafted"),
        (Answers(TEXTS), replace(OURS, accepted=0), "accepted no drafted token"),
        (Answers(TEXTS), replace(OURS, accepted=30), "0.300 there, 0.400 here"),
        (Answers(TEXTS, misread=("it's",)), OURS, 'vllm reads "it\'s" as other tokens'),
    ],
)
def test_a_difference_is_a_fault(
    job: EngineJob, plain: Answers, drafts: Answers, fault: str
) -> None:
    proof = judged(job, plain, drafts)
    assert not proof.passed
    assert fault in "; ".join(proof.faults)


def test_texts_that_part_where_two_logits_tie_are_no_fault(
    job: EngineJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_proof, "TIE", 1e9)
    other = replace(OURS, ids=((5, 6, 11), TEXTS[1]))
    proof = judged(job, Answers(TEXTS), other)
    assert proof.passed
    assert (proof.drafts, proof.ties) == (1, 1)


def test_the_card_says_what_the_engine_did_and_the_folder_stays_whole(job: EngineJob) -> None:
    before = check_files(job.folder)
    write_served(job.folder, "vllm", "old words.")
    after = write_served(job.folder, "vllm", "16 of 16 texts.")
    assert check_files(job.folder) == after
    assert after.notes == (*before.notes, "Served by vllm: 16 of 16 texts.")
    assert "Served by vllm: 16 of 16 texts." in (job.folder / CARD).read_text()
    same = {name for name in before.files if name != CARD}
    assert {n: before.files[n] for n in same} == {n: after.files[n] for n in same}


@pytest.mark.parametrize("is_right", [True, False])
def test_an_export_is_proved_by_the_engine_that_is_named(
    is_right: bool, job: EngineJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[EngineJob] = []

    def answer(given: EngineJob, drafts: bool) -> Answers:
        asked.append(given)
        return replace(OURS, version="9.9") if is_right or not drafts else Answers(TEXTS[::-1])

    stand_in = ServingEngine("stand-in", "json", "ENV/bin/pip install it", ("speculators",), answer)
    monkeypatch.setitem(engines(), "stand-in", stand_in)
    monkeypatch.setattr(engine_proof, "heldout_prompts", lambda target, n: [PROMPT] * 2)
    monkeypatch.setattr(engine_proof, "_place", lambda target: "T")
    monkeypatch.setattr(engine_proof, "_ours", lambda job, package, drafts: OURS)
    events: list[Any] = []
    proof = engine_proof.prove_export(
        job.folder.with_name("out-package"),
        job.folder,
        engine="stand-in",
        target=job.target,
        progress=events.append,
    )
    assert proof.passed == is_right
    assert [given.folder for given in asked] == [job.folder] * 2
    assert not asked[0].scratch.exists()
    assert ("Served by stand-in: 9.9, 2 of 2" in (job.folder / CARD).read_text()) == is_right
    check_files(job.folder)
    assert [event["done"] for event in events if event["event"] == "progress"][-1] == 8


def test_specctl_drafts_as_long_a_chain_in_every_round(
    job: EngineJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def generate(target: Target, prompts: Any, **how: Any) -> Any:
        asked.update(how)
        return SimpleNamespace(
            stats=SimpleNamespace(drafted=6, accepted=2, rounds=2),
            outputs=[SimpleNamespace(token_ids=[1, 2, 3])],
        )

    monkeypatch.setattr(engine_proof, "generate", generate)
    ours = engine_proof._ours(job, job.folder, True)
    assert asked["adaptive"] is False  # whatever costs were measured on this machine before
    assert asked["policy"].depth == job.length
    assert ours == Answers(((1, 2, 3),), 6, 2, 2)


def test_vllm_is_started_with_the_words_of_the_card(job: EngineJob) -> None:
    *serve, flag, how = vllm_._command(job)
    assert (serve, flag) == (["vllm", "serve", "T"], "--speculative-config")
    assert f'"model": "{job.folder}"' in how
    assert '"method": "eagle3"' in how


def fake_python(folder: Path, does: str) -> str:
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{does}\n")
    file.chmod(0o755)
    return str(file)


def test_blocks_with_a_correction_run_in_vllms_second_runner(
    job: EngineJob, tmp_path: Path
) -> None:
    assert vllm_._second_runner(job) == {}
    manifest = job.manifest.model_copy(update={"family": "dflash2"})
    job = replace(job, manifest=manifest, python=fake_python(tmp_path, "echo 3.8.0"))
    found = vllm_._second_runner(job)
    assert (found["VLLM_USE_V2_MODEL_RUNNER"], found["TRITON_INTERPRET"]) == ("1", "1")
    (package,) = distributions(path=[found["PYTHONPATH"]])
    assert [point.name for point in package.entry_points.select(group="triton.backends")] == ["cpu"]
    compiled = replace(job, python=fake_python(tmp_path, "exit 1"))
    assert vllm_._second_runner(compiled) == {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    broken = replace(job, python=fake_python(tmp_path, "echo 3.9.0"))
    with pytest.raises(ResourceError, match=r"triton==3\.8\.0"):
        vllm_._second_runner(broken)


def test_a_server_that_answers_500_shows_its_log(
    job: EngineJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> Any:
        raise HTTPError("http://there", 500, "Internal Server Error", Message(), None)

    (job.scratch / "vllm-plain.log").write_text("EngineDeadError: of a kernel")
    running = nullcontext(SimpleNamespace(poll=lambda: None))
    monkeypatch.setattr(vllm_, "started", lambda *_: running)
    monkeypatch.setattr(vllm_, "wait_for", lambda *_: None)
    monkeypatch.setattr(vllm_, "post", refuses)
    with pytest.raises(ResourceError, match="Error 500") as said:
        vllm_.answer(job, drafts=False)
    assert "EngineDeadError: of a kernel" in str(said.value)


@pytest.mark.parametrize("drafts", [True, False])
def test_a_whole_checkpoint_is_served_in_the_place_of_the_target(
    drafts: bool, job: EngineJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(words: list[str], *_: Any) -> Any:
        raise RuntimeError(" ".join(words))

    monkeypatch.setattr(vllm_, "started", stopped)
    line = 'vllm serve OUT --speculative-config \'{"method": "mtp"}\''.replace("OUT", FOLDER)
    job = replace(job, manifest=job.manifest.model_copy(update={"served_by": (line,)}))
    place = job.folder if drafts else "T"
    with pytest.raises(RuntimeError, match=f"--model {place} ") as said:
        vllm_.answer(job, drafts)
    assert ("--speculative-config" in str(said.value)) == drafts


@pytest.mark.parametrize(("family", "kind"), [("medusa", Chain), ("prompt-lookup", Direct)])
def test_heads_that_we_serve_with_a_tree_are_proved_by_a_chain(
    family: str, kind: type, job: EngineJob
) -> None:
    served = {"policy": "direct", "length": 3}
    manifest = job.manifest.model_copy(update={"family": family, "serve": served})
    assert isinstance(engine_proof._policy(replace(job, manifest=manifest)), kind)


def test_engines_are_found_by_name_or_format() -> None:
    assert set(PROVERS) == set(engines())
    assert {to for engine in engines().values() for to in engine.reads} <= set(formats())
    assert find_engine(None, "gguf").name == "llama.cpp"
    assert find_engine("transformers", "hf").name == "transformers"
    assert chosen_engine(None, "hf", sys.executable).name == "transformers"  # the one there is
    with pytest.raises(IncompatibleError, match="vllm reads"):
        find_engine("vllm", "gguf")
    with pytest.raises(SpecctlError, match="--engine vllm"):
        find_engine("vlm", "hf")


def test_an_engine_that_is_not_there_is_named_with_its_install(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="pip install xllamacpp"):
        check_installed(engines()["llama.cpp"], str(tmp_path / "python"))
    missing = replace(engines()["vllm"], module="no_such_engine")
    with pytest.raises(ResourceError, match="cannot import no_such_engine"):
        check_installed(missing, sys.executable)


def test_an_engine_that_ends_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"KeyError: 'model'|ModuleNotFoundError"):
        run_host("llama_cpp", sys.executable, {}, tmp_path)


def test_what_an_engine_started_is_stopped_with_it(tmp_path: Path) -> None:
    beats = tmp_path / "beats"
    child = "trap '' TERM; while :; do echo >> beats; sleep 0.05; done"
    words = ["sh", "-c", f'sh -c "{child}" & sleep 60']

    def interrupted() -> None:
        deadline = time.monotonic() + 20
        while not beats.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        raise KeyboardInterrupt  # as Ctrl-C does

    with pytest.raises(KeyboardInterrupt), started(words, tmp_path / "log"):
        interrupted()
    seen = beats.stat().st_size
    time.sleep(0.3)
    assert 0 < seen == beats.stat().st_size
