"""Kept features in training: batch, loss and step are those that the target would give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Needs
from specctl.core.storage.kept_features import AnswerFeatures, feature_files
from specctl.core.storage.traffic_files import Writer
from specctl.recipes.schema import DataPart
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.target.target import Target
from specctl.train.data.rows.pack import Document, pack
from specctl.train.data.rows.rows import TokenData, write_rows
from specctl.train.data.sources.defects import Defects
from specctl.train.distributed.ranks import Ranks
from specctl.train.features import served_features
from specctl.train.features.capture import capture, training_needs
from specctl.train.features.offline import Features, feature_source
from specctl.train.features.served_features import ServedFeatures
from specctl_testing.drafters.head_cases import make_heads

SEQ_LEN, LAYERS = 48, (0, 1, 2, 3)
ROUNDED = 2.0**-8


class Said(SilentReporter):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    found: Target = make_target(num_layers=3)
    return found


def text(number: int) -> tuple[int, ...]:
    rng = np.random.default_rng(number)
    return tuple(int(token) for token in rng.integers(1, 96, 17 + 2 * number))


def rows_of(folder: Path, count: int = 8) -> TokenData:
    documents = [
        Document(np.array(text(i), np.int32), np.arange(len(text(i))) > 0, "text")
        for i in range(count)
    ]
    write_rows(folder, pack(documents, SEQ_LEN, 0, 0), "0" * 64, {}, "source", Defects())
    return TokenData.open(folder)


def keep(
    target: Target,
    folder: Path,
    number: int,
    layers: tuple[int, ...] = LAYERS,
    fingerprint: str | None = None,
) -> Path:
    """As a server keeps the text of that number, of every third with a token more than it has."""
    ids = (*text(number), 7)[: len(text(number)) + (number % 3 == 0)]
    place = torch.arange(len(ids))[None]
    masks = target.lm.document_masks(torch.zeros_like(place))
    with torch.no_grad():
        out = target.lm.dense(torch.tensor([ids]), place, masks, layers, logits=False)
    states = {layer: out.taps[layer][0, :-1].bfloat16() for layer in layers}
    writer = Writer("random", fingerprint or target.fingerprint)
    folder.mkdir(exist_ok=True)
    return AnswerFeatures(writer, ids, 3, states).write(folder, number, b"%d" % number)


def source(target: Target, data: TokenData, folder: Path, needs: Needs) -> tuple[Features, Said]:
    said, part = Said(), DataPart(kept_features=str(folder))
    out = data.folder.parent
    return feature_source(part, 4, target, data, needs, out, said, Ranks()), said


@pytest.mark.parametrize("name", ["eagle3", "dflash", "mtp"])
def test_a_step_from_kept_features_is_that_of_the_target(
    target: Target, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all is kept no layer of the target runs; where some is, the others alone are read."""
    options = {"layers": 1, "taps": (0, 2)} if name == "dflash" else {}
    drafter = make_heads(target, name, **options)
    data, needs = rows_of(tmp_path / "data"), training_needs(drafter)
    rows = list(range(data.num_rows))
    whole = capture(target, data.batch(rows), needs)

    def step(batch: TrainBatch) -> tuple[float, torch.Tensor]:
        torch.manual_seed(1)
        drafter.module.zero_grad()
        out = drafter.loss(batch)
        (out.sum / out.count).backward()
        slopes = [p.grad.flatten() for p in drafter.trainable().values() if p.grad is not None]
        return float(out.sum.detach() / out.count), torch.cat(slopes)

    loss, slope = step(whole)
    read: list[tuple[int, ...]] = []

    def noted(target: Target, batch: TrainBatch, needs: Needs) -> TrainBatch:
        lengths = (batch.document_BS >= 0).sum(1).tolist()
        read.extend(tuple(ids[:n]) for ids, n in zip(batch.ids_BS.tolist(), lengths, strict=True))
        return capture(target, batch, needs)

    monkeypatch.setattr(served_features, "capture", noted)
    for number in range(8):
        keep(target, tmp_path / "all", number)
        if number % 2:
            keep(target, tmp_path / "half", number)
    for folder, count in (("half", 4), ("all", 8)):
        read.clear()
        features, said = source(target, data, tmp_path / folder, needs)
        batch = features(rows)
        assert set(read) == {text(i) for i in range(8) if i % 2 == 0 and folder == "half"}
        assert len(read) == 8 - count
        assert said.lines == [
            f"features: the server kept those of {count} of 8 texts, the target reads {8 - count}"
        ]
        is_real_BS = (batch.document_BS >= 0) & (batch.document_BS.roll(-1, 1) == batch.document_BS)
        for tap in needs.taps:
            torch.testing.assert_close(
                batch.taps[tap][is_real_BS],
                whole.taps[tap][is_real_BS],
                rtol=1.01 * ROUNDED,
                atol=1.01 * ROUNDED,
            )
        now, turned = step(batch)
        assert now == pytest.approx(loss, rel=5e-3)
        assert torch.cosine_similarity(turned, slope, dim=0) > 0.999
    nothing, _ = source(target, data, tmp_path / "absent", needs)
    same = nothing(rows)
    for tap in needs.taps:
        assert torch.equal(same.taps[tap], whole.taps[tap])


def test_what_does_not_fit_is_computed_again_and_counted(target: Target, tmp_path: Path) -> None:
    drafter = make_heads(target, "eagle3")
    data, needs = rows_of(tmp_path / "data"), training_needs(drafter)
    folder = tmp_path / "kept"
    keep(target, folder, 0)
    keep(target, folder, 1, fingerprint="b" * 64)
    keep(target, folder, 2, layers=(0, 3))
    torn = keep(target, folder, 3)
    torn.write_bytes(torn.read_bytes()[:-5])
    assert len(feature_files(folder)) == 4
    features, said = source(target, data, folder, needs)
    assert said.lines == [
        "features: the server kept those of 1 of 8 texts, the target reads 7; 1 file damaged; "
        "1 file of other layers; 1 file of another target"
    ]
    found = ServedFeatures(target, folder, needs)
    assert [found.find(text(i)) is not None for i in range(4)] == [True, False, False, False]
    assert found.find(text(0)[:-1]) is not None  # a text that was cut to the rows' length
    assert found.find((*text(0)[:16], 95, 94)) is None
    batch = features(list(range(data.num_rows)))
    whole = capture(target, data.batch(list(range(data.num_rows))), needs)
    assert torch.equal(batch.ids_BS, whole.ids_BS)
    assert torch.equal(batch.loss_mask_BS, whole.loss_mask_BS)


@pytest.mark.parametrize(
    "others",
    [{"features": "offline"}, {"on_policy": 0.5}, {"target_source": "files", "states": "x"}],
)
def test_they_go_with_text_that_is_read_online_here(others: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="kept_features goes with"):
        DataPart(kept_features="x", regenerate=False, **others)
