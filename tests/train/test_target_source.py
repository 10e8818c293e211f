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

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Needs
from specctl.core.errors import FileError, IncompatibleError, IntegrityError
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import DataPart, Recipe
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.target.checkpoint import as_transformers
from specctl.runtime.target.served import load_served
from specctl.runtime.target.target import Target, load_target
from specctl.train.data.prepare import prepare
from specctl.train.features.target_source import FromStates, InProcess, target_source
from specctl.train.run import train_draft
from specctl_testing.train.fake_endpoint import FAULTS, FakeEndpoint
from specctl_testing.train.sharded_targets import VOCAB, write_sharded
from specctl_testing.train.state_engine import before_the_norm, state_engine

LAYERS = (2, 4, 5, 8)  # eagle3's taps of the embedded target, and its last state
TEXT = "import os\n\n\ndef main(argv):\n    print(os.getcwd(), argv)\n    return {}\n\n\n"


@contextmanager
def engine(target: Target, folder: Path, **how: Any) -> Iterator[FakeEndpoint]:
    """A fake engine of the target that writes the states of LAYERS, or of `layers`."""
    layers: tuple[int, ...] = how.pop("layers", LAYERS)
    with state_engine(as_transformers(target.lm), target.tokenizer, folder, layers, **how) as fake:
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
    monkeypatch.setattr("specctl.train.run.load_part", None)  # no layer is loaded any more
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
        assert made == pytest.approx(expected, rel=1e-5)
    assert len(expected) == 2
    assert online.tau is not None
    assert online.tau > 1.0
    tau = [json.loads(line) for line in (online.out / "metrics.jsonl").read_text().splitlines()]
    assert any("tau" in line for line in tau)


@pytest.mark.parametrize("by_rows", [False, True])
def test_a_batch_of_files_is_that_of_the_target(
    tiny_target: Target, text: Path, tmp_path: Path, by_rows: bool
) -> None:
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
            found = before_the_norm(as_transformers(tiny_target.lm), longer, (2, 8))
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


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next", "falcon_h1"])
def test_states_of_sharded_targets_give_the_batch_of_the_target(kind: str, tmp_path: Path) -> None:
    """MLA with experts; hybrids, of which one multiplies its embedding and its logits."""
    folder = tmp_path / kind
    model = write_sharded(kind, folder)
    whole = load_target(str(folder), dtype="float32", is_read_only=True)
    served, needs = load_served(str(folder)), Needs((1, 3), teacher=True)
    assert served.fingerprint == whole.fingerprint
    ids, at = torch.randint(0, VOCAB, (1, 24)), torch.arange(24)[None]
    batch = TrainBatch(ids, torch.ones(1, 24).bool(), (at > 8).long(), at)
    with state_engine(model, served.tokenizer, tmp_path / "states", (1, 3, 4)) as fake:
        part = DataPart(regenerate=False, target_source="endpoint", states=fake.url)
        ours = target_source(part, served, SilentReporter()).read(batch, needs)
    theirs = InProcess(whole).read(batch, needs)
    assert ours.teacher_BSV is not None
    assert theirs.teacher_BSV is not None
    torch.testing.assert_close(ours.teacher_BSV, theirs.teacher_BSV, atol=1e-4, rtol=1e-4)
    for tap in needs.taps:
        torch.testing.assert_close(ours.taps[tap], theirs.taps[tap], atol=1e-5, rtol=1e-5)
    mine, others = served.lm.borrowed(), whole.lm.borrowed()
    assert mine.embed_scale == others.embed_scale
    assert torch.equal(mine.head_VD, others.head_VD)


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
