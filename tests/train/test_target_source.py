"""States from outside: the batch, the loss and the run that the target itself would have given."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from specctl.core.errors import FileError, IncompatibleError, IntegrityError
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import DataPart, Recipe
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.target.served import load_served
from specctl.runtime.target.target import Target
from specctl.train.data.prepare import prepare
from specctl.train.features.target_source import FromStates, InProcess, target_source
from specctl.train.run import train_draft
from specctl_testing.train.fake_endpoint import FAULTS, FakeEndpoint

LAYERS = (2, 4, 5, 8)  # eagle3's taps of the embedded target, and its last state
TEXT = "import os\n\n\ndef main(argv):\n    print(os.getcwd(), argv)\n    return {}\n\n\n"


def before_the_norm(target: Target, ids: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """[N, K, D] as vLLM's connector writes them, by transformers' own model: the last state of the
    residual stream, which its `hidden_states` hold behind the norm, is read in front of it."""
    from specctl.runtime.target.checkpoint import as_transformers

    model = as_transformers(target.lm)
    seen: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    try:
        with torch.no_grad():
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    finally:
        hook.remove()
    last = target.spec.num_layers
    return torch.stack([(seen[0] if k == last else states[k])[0] for k in layers], dim=1)


@contextmanager
def engine(target: Target, folder: Path, **spoiled: Any) -> Iterator[FakeEndpoint]:
    """A fake engine that writes what the connector writes."""
    layers: tuple[int, ...] = spoiled.pop("layers", LAYERS)

    def write(ids: list[int]) -> dict[str, Any]:
        if not layers:
            return {}
        path = folder / f"{abs(hash(tuple(ids)))}.safetensors"
        states = before_the_norm(target, ids, layers)
        save_file({"hidden_states": states, "token_ids": torch.tensor(ids)}, path)
        path.with_name(path.name + ".lock").touch()
        return {"kv_transfer_params": {"hidden_states_path": str(path)}}

    def greedy(ids: list[int], body: dict[str, Any]) -> list[int]:
        del body
        state = before_the_norm(target, ids, (target.spec.num_layers,))
        return [int(target.lm.lm_head(state[-1:, 0])[0].argmax())]  # type: ignore[attr-defined]

    folder.mkdir(exist_ok=True)
    fake = FakeEndpoint(target, greedy, more=write, **spoiled)
    with fake.serving():
        yield fake


def recipe_of(text: Path, **sets: Any) -> Recipe:
    small = {
        "data.source": text, "data.format": "text", "data.regenerate": "false",
        "data.text_tokens": 0, "train.steps": 2, "train.rows": 2, "train.seq_len": 32,
        "train.save_every": 2, "train.tau_every": 2, "train.log_every": 1, "vocab.size": "null",
        "data.limit_tokens": 150, "train.tau_prompts": 1, "train.tau_tokens": 2,
        "drafter.options": "{intermediate: 64}",
        "target.dtype": "float32",
    }  # fmt: skip
    small |= {name.replace("__", "."): value for name, value in sets.items()}
    return load_recipe("eagle3", sets=[f"{name}={value}" for name, value in small.items()])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.mkdir()
    for i in range(6):
        (path / f"{i}.txt").write_text(TEXT.format(i) * 4)
    return path


def losses(out: Path) -> list[float]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]


def test_a_run_on_states_of_an_engine_has_the_losses_of_one_in_process(
    tiny_target: Target, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train_draft(
        recipe_of(text), tmp_path / "here", target=tiny_target, reporter=SilentReporter()
    )
    expected = losses(whole.out)
    monkeypatch.setattr("specctl.train.run.load_target", None)  # no layer is loaded any more
    states = tmp_path / "states"
    with engine(tiny_target, states) as fake:
        outside = {"data__target_source": "endpoint", "data__states": fake.url}
        online = train_draft(recipe_of(text, **outside), tmp_path / "online")
        assert not list(states.iterdir())  # what was read is gone
        fake.turns = cycle(FAULTS)
        kept = recipe_of(text, data__features="offline", data__feature_dtype="fp32", **outside)
        offline = train_draft(kept, tmp_path / "offline")
    for made in (losses(online.out), losses(offline.out)):
        assert made[0] == pytest.approx(expected[0], abs=1e-5)  # of the very same weights
        assert made == pytest.approx(expected, rel=1e-4)  # Muon makes more of what rounding left
    assert len(expected) == 2
    assert online.tau is not None
    assert online.tau > 1.0
    tau = [json.loads(line) for line in (online.out / "metrics.jsonl").read_text().splitlines()]
    assert any("tau" in line for line in tau)


@pytest.mark.parametrize("by_rows", [False, True])
def test_a_batch_of_files_is_that_of_the_target(
    tiny_target: Target, text: Path, tmp_path: Path, by_rows: bool
) -> None:
    from specctl.core.drafter import Needs

    recipe = recipe_of(text)
    data = prepare(recipe, tiny_target, tmp_path / "run")
    batch, needs = data.batch([0, 1]), Needs((2, 8), teacher=True, teacher_rows=by_rows)
    states = tmp_path / "states"
    states.mkdir()
    number = 0
    for ids_S, document_S in zip(batch.ids_BS, batch.document_BS, strict=True):
        for document in document_S[document_S >= 0].unique().tolist():
            ids = ids_S[document_S == document].tolist()
            longer = [*ids, 7, 7]  # states look back only: those of a longer text will do
            found = before_the_norm(tiny_target, longer, (2, 8))
            file = {"hidden_states": found, "token_ids": torch.tensor(longer)}
            save_file(file, states / f"cmpl-{number}.safetensors")
            number += 1
    part = DataPart(regenerate=False, target_source="files", states=str(states))
    source = target_source(part, load_served("tiny"), SilentReporter())
    assert isinstance(source, FromStates)
    ours, theirs = source.read(batch, needs), InProcess(tiny_target).read(batch, needs)
    real = batch.document_BS >= 0
    for tap in needs.taps:
        assert torch.allclose(ours.taps[tap][real], theirs.taps[tap][real], atol=1e-5)
    if by_rows:
        assert ours.teacher_rows is not None
        assert theirs.teacher_rows is not None
        state, other = ours.teacher_rows.state_RD, theirs.teacher_rows.state_RD
        assert torch.allclose(state[real.flatten()], other[real.flatten()], atol=1e-5)
    else:
        assert ours.teacher_BSV is not None
        assert theirs.teacher_BSV is not None
        assert torch.allclose(ours.teacher_BSV[real], theirs.teacher_BSV[real], atol=1e-4)
    (states / "cmpl-0.safetensors").unlink()
    with pytest.raises(FileError, match="no file holds the states of a text"):
        target_source(part, load_served("tiny"), SilentReporter()).read(batch, needs)


@pytest.mark.parametrize(
    ("layers", "error", "match"),
    [
        ((), IncompatibleError, "writes no hidden states"),
        ((2, 4, 5), IntegrityError, "others than the drafter needs"),
        ((8, 5, 4, 2), IncompatibleError, "do not lead to what it says"),
    ],
)
def test_other_states_than_asked_for_are_refused(
    tiny_target: Target,
    text: Path,
    tmp_path: Path,
    layers: tuple[int, ...],
    error: Any,
    match: str,
) -> None:
    from specctl.core.drafter import Needs

    batch = prepare(recipe_of(text), tiny_target, tmp_path / "run").batch([0])
    with engine(tiny_target, tmp_path / "states", layers=layers) as fake:
        part = DataPart(regenerate=False, target_source="endpoint", states=fake.url)
        source = target_source(part, load_served("tiny"), SilentReporter())
        with pytest.raises(error, match=match) as caught:
            source.read(batch, Needs((2, 4, 5), teacher=True))
    assert "[2, 4, 5, 8]" in caught.value.do


@pytest.mark.parametrize(
    "fields",
    [
        {"target_source": "endpoint"},
        {"states": "http://a:1"},
        {"target_source": "files", "states": "x", "regenerate": True},
        {"target_source": "files", "states": "x", "on_policy": 0.5},
    ],
)
def test_sources_that_cannot_work_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DataPart(**({"regenerate": False} | fields))
