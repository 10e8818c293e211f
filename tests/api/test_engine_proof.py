"""An export proved in an engine: what counts as the same, and what the card says of it."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specctl.api import engine_proof
from specctl.api.engine_proof import EngineProof
from specctl.cli.commands.export import PROVERS
from specctl.core.errors import IncompatibleError, ResourceError, SpecctlError
from specctl.export.engines import Answers, EngineJob, engines, find_engine
from specctl.export.engines import vllm as vllm_
from specctl.export.engines.process import check_installed, run_host, started
from specctl.export.formats import formats
from specctl.export.package.folder import write_served
from specctl.export.package.manifest import CARD, check_files
from specctl.runtime.target.target import Target
from specctl_testing.export.engine_cases import exported, shaken

TEXTS = ((5, 6, 7), (8, 9, 10))
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


def test_vllm_is_started_with_the_words_of_the_card(job: EngineJob) -> None:
    flag, how = vllm_._speculative(job)
    assert flag == "--speculative-config"
    assert f'"model": "{job.folder}"' in how
    assert '"method": "eagle3"' in how


def test_engines_are_found_by_name_or_format() -> None:
    assert set(PROVERS) == set(engines())
    assert {to for engine in engines().values() for to in engine.reads} <= set(formats())
    assert find_engine(None, "gguf").name == "llama.cpp"
    assert find_engine("transformers", "hf").name == "transformers"
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
    with started(["sh", "-c", f'sh -c "{child}" & sleep 60'], tmp_path / "log"):
        deadline = time.monotonic() + 20
        while not beats.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    seen = beats.stat().st_size
    time.sleep(0.3)
    assert 0 < seen == beats.stat().st_size
