"""Adapters that requests choose as their model: texts, names, pages, and what is not kept."""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from safetensors.torch import save_file

from specctl.cli.app.console import Console
from specctl.cli.main import main
from specctl.cli.options.serving import adapter_folders
from specctl.core.errors import Exit, SpecctlError
from specctl.core.storage.traffic_files import newest_lines
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.adapter import CONFIG, TENSORS, plain_config
from specctl.runtime.target.variants.row_adapted import with_row_adapters
from specctl.server.engine_thread.service import Limits, Service
from specctl.server.logs import LOG
from specctl.server.traffic import TrafficKeeper
from specctl_testing.runtime.web import error_of, events, make_app, post, request_all

PROMPT, COUNT = "def main(", 12
FOR_ANTHROPIC = {"anthropic-version": "2023-06-01"}


def write(target: Target, folder: Path, seed: int) -> str:
    """A folder in peft's format: random factors of rank 4 on every q_proj."""
    torch.manual_seed(seed)
    modules = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(target.spec.num_layers)]
    tensors = {}
    for layer, module in enumerate(modules):
        shape = target.lm.linear_at(layer, "q_proj")
        assert shape is not None
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(4, shape[1])
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(shape[0], 4)
    folder.mkdir()
    save_file(tensors, folder / TENSORS)
    (folder / CONFIG).write_text(json.dumps(plain_config(4, 1.0, None, ["q_proj"])))
    return str(folder)


@dataclass
class Served:
    target: Target
    app: FastAPI
    keeper: TrafficKeeper
    folder: Path


@pytest.fixture(scope="module")
def served(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    names = {name: write(tiny_target, folder / name, seed) for seed, name in enumerate("ab")}
    target = with_row_adapters(tiny_target, names)
    service = Service(target, limits=Limits(max_len=128, max_batch=4))
    keeper = TrafficKeeper(folder / "kept", 1 << 30)
    app = make_app(service, recorder=keeper)  # type: ignore[arg-type]
    while service.status().state == "loading":
        time.sleep(0.005)
    yield Served(target, app, keeper, folder / "kept")
    service.stop()


def test_the_model_of_a_request_is_the_adapter_that_writes_it(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOG.name)
    sampling, texts = Sampling(max_new_tokens=COUNT), {}
    ids = tuple(served.target.encode(PROMPT))
    body = {"prompt": PROMPT, "max_tokens": COUNT, "temperature": 0}
    for model in ("a", "tiny", "b"):
        adapter = None if model == "tiny" else model
        [done] = Engine(served.target).run([Request(ids, sampling, adapter=adapter)])
        answer = post(served.app, "/v1/completions", {**body, "model": model}).json()
        texts[model] = answer["choices"][0]["text"]
        assert texts[model] == served.target.decode(done.tokens)
        assert answer["model"] == model
    assert len(set(texts.values())) == 3
    assert post(served.app, "/v1/completions", body).json()["model"] == "tiny"
    streamed = post(served.app, "/v1/completions", {**body, "model": "b", "stream": True})
    chunks = [chunk for chunk in events(streamed) if chunk != "[DONE]"]
    assert "".join(choice["text"] for c in chunks for choice in c["choices"]) == texts["b"]
    assert {chunk["model"] for chunk in chunks} == {"b"}
    logged = [one.__dict__["fields"] for one in caplog.records if one.message == "request"]
    assert [line.get("adapter") for line in logged] == ["a", None, "b", None, "b"]
    page = request_all(served.app, [("GET", "/metrics", {})])[0].text.splitlines()
    counted = dict(line.rsplit(" ", 1) for line in page if line.startswith("specctl:adapter_"))
    for adapter, requests in (("", 2), ("a", 1), ("b", 2)):
        label = f'{{adapter="{adapter}"}}'
        found = {
            name: float(counted[f"specctl:adapter_{name}{label}"])
            for name in ("requests_total", "generation_tokens_total", "prompt_tokens_total", "tau")
        }
        assert found == {
            "requests_total": requests, "generation_tokens_total": requests * COUNT,
            "prompt_tokens_total": requests * len(ids), "tau": 1.0,
        }  # fmt: skip
    served.keeper.close()
    kept = [json.loads(line)["text"] for line in newest_lines(served.folder, 100)]
    assert kept == [PROMPT + texts["tiny"]] * 2, "what an adapter writes is not the target's"


def got(app: FastAPI, path: str, **request: Any) -> Any:
    """The body of a GET."""
    return request_all(app, [("GET", path, request)])[0].json()


def test_models_are_listed_in_both_shapes_and_others_refused(served: Served) -> None:
    listed = got(served.app, "/v1/models")["data"]
    assert [(one["id"], one.get("parent")) for one in listed] == [
        ("tiny", None), ("a", "tiny"), ("b", "tiny"),
    ]  # fmt: skip
    assert got(served.app, "/v1/models/b")["parent"] == "tiny"
    pages = {
        "limit=2": (["tiny", "a"], True), "limit=2&after_id=a": (["b"], False),
        "before_id=b&limit=1": (["a"], True), "after_id=c": ([], False),
    }  # fmt: skip
    for query, wanted in pages.items():
        page = got(served.app, f"/v1/models?{query}", headers=FOR_ANTHROPIC)
        assert ([one["id"] for one in page["data"]], page["has_more"]) == wanted, query
    refused = post(served.app, "/v1/completions", {"prompt": PROMPT, "model": "c"})
    assert refused.status_code == 404
    assert "'tiny' and 'a' and 'b' are" in error_of(refused)["message"]


@pytest.mark.parametrize("words", [["a"], ["=x"], ["a="], ["tiny=x"], ["a=x", "a=y"]])
def test_words_that_name_no_adapters_are_refused(words: list[str]) -> None:
    with pytest.raises(SpecctlError):
        adapter_folders(words, "tiny")
    assert adapter_folders(["a=x@0.5", "b=y=z"], "tiny") == {"a": "x@0.5", "b": "y=z"}


def test_a_rule_that_cannot_be_used_ends_the_start(tiny_target: Target, tmp_path: Path) -> None:
    """A service goes on without drafts where its engine refuses them; a command must not."""
    folder = write(tiny_target, tmp_path / "a", 0)
    words = ["--target", "tiny", "--dtype", "float32", "--port", "0", "--rule", "reflect"]
    words += ["--set", f"api.adapters=a={folder}"]
    errors = io.StringIO()
    code = main(["serve", "prompt-lookup", *words], Console(io.StringIO(), errors))
    assert code == Exit.USAGE
    assert "whole forwards" in errors.getvalue()
