"""What a checkpoint's generation_config.json asks for: read strictly, never a traceback."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from specctl.core.errors import IntegrityError
from specctl.runtime.measure.bench import setting_of, transformers_contender, unreported
from specctl.runtime.sampling.generation_config import (
    FILE,
    OTHERS,
    SETTINGS,
    Suggested,
    described,
    read_suggested,
    suggested_in,
)
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.checkpoint import as_transformers
from specctl.runtime.target.target import Target, load_target
from specctl.server.requests.generate_request import RequestReader
from specctl.server.requests.protocol import CompletionRequest

LLAMA = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 5]}
QWEN = {**LLAMA, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05, "max_new_tokens": 2048}
NOTHING = dict.fromkeys(SETTINGS)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({}, Suggested()),
        ({"eos_token_id": 1, "max_length": 4096, "use_cache": True}, Suggested()),
        (LLAMA, Suggested(True, 0.6, top_p=0.9)),
        (QWEN, Suggested(True, 0.6, 20, 0.8, repetition_penalty=1.05)),
        ({"do_sample": True}, Suggested(True, 1.0)),
        ({"do_sample": False, "temperature": 0.7}, Suggested(False, 0.7)),
        ({"top_k": 0, "top_p": 1, "min_p": 0.0, "repetition_penalty": 1.0}, Suggested()),
        ({"num_beams": 4}, Suggested(others=("num_beams 4",))),
        ({"suppress_tokens": [3], "bad_words_ids": []}, Suggested(others=("suppress_tokens [3]",))),
    ],
)
def test_what_a_file_asks_for(body: dict[str, Any], found: Suggested) -> None:
    assert suggested_in(body) == found


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", True),
        ("top_k", 2.5),
        ("top_k", -1),
        ("top_p", 3),
        ("top_p", [0.9]),
        ("min_p", 10**400),
        ("repetition_penalty", 0),
        ("do_sample", "yes"),
    ],
)
def test_a_value_that_means_nothing_is_named(field: str, value: Any) -> None:
    (wrong,) = suggested_in({field: value}).wrong
    assert wrong.startswith(f"{field} ")
    assert len(wrong) < 70


def test_settings_and_others_are_fields_that_transformers_has() -> None:
    known, defaults = vars(GenerationConfig()), GenerationConfig._get_default_generation_params()
    assert {*SETTINGS, "do_sample"} <= known.keys()
    assert known.keys() >= OTHERS.keys() - {"constraints", "force_words_ids"}
    for name, nothing in OTHERS.items():
        assert defaults.get(name, nothing) == nothing, name


BROKEN = {
    "no JSON": "{nonsense",
    "a list": "[1]",
    "nested": "[" * 100_000,
    "no UTF-8": b"\xff\xfe{",
    "an id that is a word": json.dumps({"eos_token_id": "x"}),
    "ids that are none": json.dumps({"eos_token_id": [1, True]}),
    "no ids": json.dumps({"eos_token_id": []}),
    "too large": "{" + " " * (1 << 20) + "}",
    "a type that transformers cannot read": json.dumps({"watermarking_config": {"x": 1}}),
    "lengths that are words": json.dumps({"max_new_tokens": "long"}),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=list(BROKEN))
def test_a_broken_file_is_refused_with_a_way_out(tmp_path: Path, content: str | bytes) -> None:
    (tmp_path / FILE).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(IntegrityError, match=r"generation_config\.json cannot be read") as caught:
        read_suggested(tmp_path)
    assert caught.value.where == str(tmp_path / FILE)
    assert "remove it" in caught.value.do


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE)
    with pytest.raises(IntegrityError, match="no regular file"):
        read_suggested(tmp_path)


def test_a_folder_without_the_file_asks_for_nothing(tmp_path: Path) -> None:
    assert read_suggested(tmp_path) is None


def test_a_loaded_target_has_what_its_folder_asks_for(tmp_path: Path) -> None:
    for file in (Path(__file__).parents[3] / "recipes" / "tiny").glob("*.*"):
        shutil.copyfile(file, tmp_path / file.name)
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).write_text(json.dumps(QWEN))
    target = load_target(str(tmp_path), dtype="float32")
    assert target.suggested == suggested_in(QWEN)
    assert target.eos_ids == (1, 5)
    (tmp_path / FILE).write_text("{nonsense")
    with pytest.raises(IntegrityError, match="cannot be read"):
        load_target(str(tmp_path), dtype="float32")


def test_flags_come_first_and_the_file_fills_the_rest() -> None:
    asked = suggested_in(QWEN)
    assert asked.fill(NOTHING) == {
        "temperature": 0.6, "top_k": 20, "top_p": 0.8, "min_p": None, "repetition_penalty": 1.05,
    }  # fmt: skip
    given = {**NOTHING, "temperature": 0.0, "top_p": 1.0}
    assert asked.fill(given) == {**asked.fill(NOTHING), "temperature": 0.0, "top_p": 1.0}
    assert Suggested(False, 0.7, top_p=0.9).fill(NOTHING)["temperature"] == 0.0
    assert Suggested().fill(NOTHING) == NOTHING


def test_what_is_not_done_is_told_apart_from_what_is() -> None:
    asked = suggested_in(QWEN)
    greedy = Sampling()
    assert asked.unlike(greedy) == (
        "temperature 0.6", "top_k 20", "top_p 0.8", "repetition_penalty 1.05",
    )  # fmt: skip
    same = Sampling(temperature=0.6, top_k=20, top_p=0.8, repetition_penalty=1.05)
    assert asked.unlike(same) == ()
    assert asked.unlike(replace(same, top_k=None)) == ("top_k 20",)
    assert Suggested(False, 0.7, top_p=0.9).unlike(greedy) == ()
    assert Suggested(others=("num_beams 4",)).unlike(greedy) == ("num_beams 4",)
    assert described(same) == "temperature 0.6, top_k 20, top_p 0.8, repetition_penalty 1.05"
    assert [setting_of(s) for s in (greedy, same)] == [
        "greedy", "T=0.6 top_k 20 top_p 0.8 repetition_penalty 1.05",
    ]  # fmt: skip
    assert setting_of(Sampling(temperature=0.8)) == "T=0.8"


def test_requests_are_sampled_by_the_defaults_of_the_server_where_they_say_nothing(
    tiny_target: Target,
) -> None:
    class Service:
        target = tiny_target

    service: Any = Service()
    plain = RequestReader(service)._sampling(CompletionRequest(prompt="x"))
    assert (plain.temperature, plain.top_k, plain.top_p) == (1.0, None, None)
    same = Sampling(temperature=0.6, top_k=10**6, top_p=0.8, repetition_penalty=1.05)
    desk = RequestReader(service, same)
    found = desk._sampling(CompletionRequest(prompt="x", top_p=None))
    size = tiny_target.spec.vocab_size
    assert (found.temperature, found.top_k, found.top_p) == (0.6, size, 0.8)
    assert found.repetition_penalty == 1.05
    said = CompletionRequest(
        prompt="x", temperature=0.0, top_k=3, top_p=1.0, repetition_penalty=1.0
    )
    found = desk._sampling(said)
    assert (found.temperature, found.top_k, found.top_p, found.repetition_penalty) == (0, 3, 1, 1)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_transformers_is_measured_without_what_the_checkpoint_asks_for(
    tiny_target: Target, temperature: float
) -> None:
    model, prompts = as_transformers(tiny_target.lm), [tiny_target.encode("import os\n")]
    sampling = Sampling(temperature=temperature, max_new_tokens=4)
    contender = transformers_contender("transformers", model, tiny_target.eos_ids)
    before = contender.run(prompts, sampling, unreported).token_ids
    model.generation_config.update(repetition_penalty=3.0, top_k=1, min_p=0.99)
    assert contender.run(prompts, sampling, unreported).token_ids == before
