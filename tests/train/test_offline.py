"""Features on disk: the same losses as with the target at hand, whole shards or none, a cap."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specctl.core.batch import HeadRows, TrainBatch
from specctl.core.drafter import Needs
from specctl.core.errors import RecipeError, ResourceError
from specctl.core.storage.files import Disk
from specctl.core.vocab import VocabMap
from specctl.drafters import family as family_of
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import Recipe
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.target.target import Target
from specctl.train.data.rows.pack import Document, pack
from specctl.train.data.rows.rows import TokenData, write_rows
from specctl.train.data.sources.defects import Defects
from specctl.train.distributed.ranks import Ranks
from specctl.train.features import shards as shards_module
from specctl.train.features.capture import capture, training_needs
from specctl.train.features.kept import Form, decode, encode, read_target
from specctl.train.features.offline import feature_source
from specctl.train.features.shards import MOST_OPEN, ShardLayout, Shards, kept_shards
from specctl.train.metrics.metrics import read_log
from specctl.train.run import train_draft
from specctl.train.saving.tensorfile import tensor_chunks

SEQ_LEN, NUM_DOCUMENTS = 32, 30
BOTH = Needs(taps=(0, 2), teacher=True)


class Said(SilentReporter):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def target(make_target: Callable[..., Target]) -> Target:
    return make_target(num_layers=3)


@pytest.fixture
def data(tmp_path: Path, target: Target) -> TokenData:
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, SEQ_LEN, NUM_DOCUMENTS)
    documents = [
        Document(
            rng.integers(0, target.spec.vocab_size, n).astype(np.int32), np.arange(n) > 0, "text"
        )
        for n in lengths
    ]
    rows = pack(documents, SEQ_LEN, 0, 0)
    write_rows(tmp_path / "data", rows, "0" * 64, {}, "source", Defects())
    return TokenData.open(tmp_path / "data")


def recipe_of(**sets: Any) -> Recipe:
    fields = {"data.features": "offline", "data.feature_dtype": "fp32", "train.rows": 4}
    fields |= {key.replace("__", "."): value for key, value in sets.items()}
    return load_recipe("eagle3", sets=[f"{key}={value}" for key, value in fields.items()])


def source(
    recipe: Recipe, target: Target, data: TokenData, out: Path, needs: Needs = BOTH, **more: Any
) -> Callable[[list[int]], Any]:
    reporter = more.pop("reporter", SilentReporter())
    return feature_source(
        recipe.data, recipe.train.rows, target, data, needs, out, reporter, Ranks(), **more
    )


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several rows a shard, several shards a store."""
    monkeypatch.setattr("specctl.train.features.shards.SHARD_BYTES", 40_000)
    monkeypatch.setattr("specctl.train.features.shards.LEAST_ROWS", 1)


@pytest.mark.parametrize("by_rows", [False, True])
def test_kept_whole_features_are_those_of_the_target_bit_for_bit(
    target: Target, data: TokenData, tmp_path: Path, by_rows: bool
) -> None:
    needs = replace(BOTH, teacher_rows=by_rows)
    read = source(recipe_of(), target, data, tmp_path, needs)
    assert len(kept_shards(tmp_path / "features")) > 1
    rows = [3, 0, 5, 2]
    online, offline = capture(target, data.batch(rows), needs), read(rows)
    real_BS = online.document_BS >= 0
    for tap in BOTH.taps:
        assert torch.equal(offline.taps[tap][real_BS], online.taps[tap][real_BS])
    if by_rows:
        assert online.teacher_rows is not None
        at = real_BS.flatten().nonzero()[:, 0]
        assert torch.equal(offline.teacher_rows[at], online.teacher_rows[at])
    else:
        assert online.teacher_BSV is not None
        assert torch.equal(offline.teacher_BSV[real_BS], online.teacher_BSV[real_BS])


# What it costs a random target: total variation of its distribution, largest over all tokens,
# measured 0.0014 (bf16), 0.021 (fp8), 0.0005 (80 of 96 logits); error of a tap relative to the
# largest of its token, measured 0.0035 and 0.036 (half a step of the format: 2^-8 and 2^-4 of the
# number).
@pytest.mark.parametrize(
    ("dtype", "topk", "distribution", "taps"),
    [("bf16", None, 0.005, 0.004), ("fp8", None, 0.06, 0.05), ("fp32", 80, 0.002, 0.0)],
)
@pytest.mark.parametrize("plain_head", [True, False])
def test_features_kept_shorter_are_close(
    make_target: Callable[..., Target],
    dtype: str,
    topk: int | None,
    distribution: float,
    taps: float,
    plain_head: bool,
) -> None:
    target = make_target("llama" if plain_head else "gpt_neox", num_layers=3)
    part = recipe_of(data__feature_dtype=dtype).data.model_copy(update={"teacher_topk": topk})
    form = Form.of(part, target, BOTH)
    assert form.teacher == ("topk" if topk else "state" if plain_head else "logits")
    torch.manual_seed(1)
    ids_BS = torch.randint(0, target.spec.vocab_size, (2, 24))
    zeros = torch.zeros_like(ids_BS)
    batch = TrainBatch(ids_BS, ids_BS >= 0, zeros, torch.arange(24).expand(2, 24))
    raw = read_target(target, batch, form)[1]
    stored = encode(raw, form)
    assert sum(t.numel() * t.element_size() for t in stored.values()) == 24 * form.bytes_per_token
    found = decode(stored, form)
    for tap in BOTH.taps:
        wrong = (found[f"tap-{tap}"].float() - raw[f"tap-{tap}"]).abs()
        assert float((wrong / raw[f"tap-{tap}"].abs().amax(-1, keepdim=True)).max()) <= taps
    if "logits" in raw:
        p, q = raw["logits"].softmax(-1), found["logits"].float().softmax(-1)
        assert float((p - q).abs().sum(-1).max()) / 2 <= distribution


def run(target: Target, text: Path, out: Path, family: str = "eagle3", **sets: Any) -> list[float]:
    """The losses of a short run."""
    fields = {
        "data.source": text, "data.format": "text", "data.prompts": 24, "data.new_tokens": 16,
        "data.prompt_tokens": 8, "data.text_tokens": 0, "train.steps": 8, "train.rows": 4,
        "train.seq_len": 32, "train.log_every": 1, "train.tau_every": 8, "train.tau_prompts": 1,
        "train.tau_tokens": 4, "vocab.size": "null",
        **{key.replace("__", "."): value for key, value in sets.items()},
    }  # fmt: skip
    recipe = load_recipe(family, sets=[f"{key}={value}" for key, value in fields.items()])
    train_draft(recipe, out, target=target)
    return [line["loss"] for line in read_log(out / "metrics.jsonl") if "loss" in line]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text("\n\n".join(f"def f{i}(x):\n    return x + {i}" for i in range(300)))
    return path


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("eagle3", 40),
        ("distill", "null"),
        pytest.param("eagle3", "null", marks=pytest.mark.proof),
        pytest.param("distill", 40, marks=pytest.mark.proof),
    ],
)
def test_a_run_on_kept_features_has_the_very_losses_of_one_with_the_target(
    chat_target: Target, text: Path, tmp_path: Path, family: str, size: Any
) -> None:
    ids = {"vocab__size": size}
    online = run(chat_target, text, tmp_path / "online", family, **ids)
    whole = {"data__features": "offline", "data__feature_dtype": "fp32", **ids}
    assert run(chat_target, text, tmp_path / "offline", family, **whole) == online
    assert len(online) == 8
    assert kept_shards(tmp_path / "offline" / "features")


def test_a_drafter_of_few_ids_reads_only_their_columns_of_kept_features(
    target: Target, data: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab = VocabMap(torch.arange(12), target.spec.vocab_size)
    family = family_of("eagle3")
    drafter = family.build(family.options(taps=(0, 2), ttt_steps=2), target.spec, vocab)
    drafter.bind(target.borrowed())
    needs, rows = training_needs(drafter), [3, 0, 5]
    assert needs.teacher_log_z
    kept = source(recipe_of(), target, data, tmp_path, needs)(rows)
    online = capture(target, data.batch(rows), needs)
    widths = set[int]()
    product = HeadRows.__getitem__

    def counted(self: HeadRows, row_Q: torch.Tensor) -> torch.Tensor:
        widths.add(self.shape[1])
        return product(self, row_Q)

    with monkeypatch.context() as patch:
        patch.setattr(HeadRows, "__getitem__", counted)
        found = drafter.loss(kept)
    assert widths == {12}, "the target's other ids are not computed again"
    expected = drafter.loss(online)
    torch.testing.assert_close(found.sum, expected.sum)
    torch.testing.assert_close(found.metrics, expected.metrics)


def test_a_drafter_of_most_ids_has_the_logits_of_a_whole_batch(target: Target) -> None:
    family, size = family_of("eagle3"), target.spec.vocab_size
    for kept in (None, VocabMap(torch.arange(size // 2), size)):
        drafter = family.build(family.options(taps=(0, 2)), target.spec, kept)
        assert not training_needs(drafter).teacher_rows


# Largest relative difference of a loss within 8 steps; measured 2.2e-4, 2.1e-3 and 4.4e-3.
@pytest.mark.parametrize(
    ("dtype", "topk", "most"), [("bf16", "null", 1e-3), ("fp8", "null", 1e-2), ("bf16", 64, 2e-2)]
)
def test_a_run_on_features_kept_shorter_has_about_those_losses(
    chat_target: Target, text: Path, tmp_path: Path, dtype: str, topk: Any, most: float
) -> None:
    online = run(chat_target, text, tmp_path / "online")
    sets = {"data__features": "offline", "data__feature_dtype": dtype, "data__teacher_topk": topk}
    short = run(chat_target, text, tmp_path / "short", **sets)
    assert short != online
    assert short == pytest.approx(online, rel=most)


def damage(path: Path, how: str) -> None:
    body = path.read_bytes()
    if how == "truncated":
        path.write_bytes(body[: len(body) // 2])
    elif how == "flipped":
        path.write_bytes(body[:-9] + bytes([body[-9] ^ 1]) + body[-8:])
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["truncated", "flipped", "gone"])
@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_a_damaged_shard_is_never_read_and_written_again(
    target: Target, data: TokenData, tmp_path: Path, how: str, suffix: str
) -> None:
    whole = source(recipe_of(), target, data, tmp_path)(list(range(data.num_rows)))
    hit = kept_shards(tmp_path / "features")[1].file.with_suffix(suffix)
    before = kept_shards(tmp_path / "features")[1].file.read_bytes()
    read = source(recipe_of(), target, data, tmp_path)
    damage(hit, how)
    again = read(list(range(data.num_rows)))
    for tap in BOTH.taps:
        assert torch.equal(again.taps[tap], whole.taps[tap])
    reporter = Said()
    source(recipe_of(), target, data, tmp_path, reporter=reporter)
    assert "1 will be written" in reporter.lines[-1]
    assert hit.with_suffix(".safetensors").read_bytes() == before


class Fails(Disk):
    """Dies at its n-th call of a kind."""

    def __init__(self, call: str, number: int) -> None:
        self.call, self.left = call, number

    def _count(self, call: str) -> None:
        if call == self.call:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt

    def write(self, descriptor: int, data: memoryview) -> int:
        self._count("write")
        return super().write(descriptor, data[: max(1, len(data) // 2)])

    def replace(self, source: Path, to: Path) -> None:
        self._count("replace")
        super().replace(source, to)


@pytest.mark.parametrize("call", ["write", "replace"])
@pytest.mark.parametrize("number", [0, 1, 3, 6])
def test_whatever_stops_the_writing_the_next_run_goes_on_from_whole_shards(
    target: Target, data: TokenData, tmp_path: Path, call: str, number: int
) -> None:
    with pytest.raises(KeyboardInterrupt):
        source(recipe_of(), target, data, tmp_path, disk=Fails(call, number))
    there = len(kept_shards(tmp_path / "features"))
    reporter = Said()
    read = source(recipe_of(), target, data, tmp_path, reporter=reporter)
    assert f"{there} of " in reporter.lines[-1]
    rows = list(range(data.num_rows))
    online = capture(target, data.batch(rows), BOTH)
    real_BS = online.document_BS >= 0
    assert torch.equal(read(rows).taps[2][real_BS], online.taps[2][real_BS])
    assert not list((tmp_path / "features").rglob("*.tmp"))


def used_bytes(out: Path) -> int:
    return sum(path.stat().st_size for path in out.rglob("*.safetensors"))


def test_what_does_not_fit_under_the_cap_is_read_online(
    target: Target, data: TokenData, tmp_path: Path
) -> None:
    source(recipe_of(), target, data, tmp_path)
    whole = used_bytes(tmp_path / "features")
    cap = recipe_of(data__features_gb=0.6 * whole / 1e9)
    other = tmp_path / "other"
    other.mkdir()
    read = source(cap, target, data, other)
    assert 0.2 * whole < used_bytes(other / "features") <= 0.6 * whole
    rows = list(range(data.num_rows))
    online = capture(target, data.batch(rows), BOTH)
    real_BS = online.document_BS >= 0
    offline = read(rows)
    assert torch.equal(offline.taps[0][real_BS], online.taps[0][real_BS])
    assert torch.equal(offline.teacher_BSV[real_BS], online.teacher_BSV[real_BS])


def test_the_least_recently_used_shards_make_room(
    target: Target, data: TokenData, tmp_path: Path
) -> None:
    root = tmp_path / "features"
    source(recipe_of(), target, data, tmp_path)
    shards = kept_shards(root)
    for age, shard in enumerate(shards):
        os.utime(shard.file.with_suffix(".json"), (1e9 - age, 1e9 - age))
    oldest = kept_shards(root)[0].file
    assert oldest == shards[-1].file
    whole = used_bytes(root)
    less = recipe_of(data__features_gb=(whole - 1) / 1e9)
    source(less, target, data, tmp_path)
    assert not oldest.exists()
    assert len(kept_shards(root)) == len(shards) - 1
    source(recipe_of(data__features_gb=whole / 1e9), target, data, tmp_path, Needs(taps=(1,)))
    folders = {shard.file.parent for shard in kept_shards(root)}
    assert len(folders) == 2
    assert used_bytes(root) <= whole


def test_a_full_disk_is_seen_before_the_first_shard(
    target: Target, data: TokenData, tmp_path: Path
) -> None:
    class Full(Disk):
        def free(self, folder: Path) -> int:
            return 1000

    with pytest.raises(ResourceError, match="do not fit") as caught:
        source(recipe_of(), target, data, tmp_path, disk=Full())
    assert "data.features_gb" in caught.value.do
    assert not kept_shards(tmp_path / "features")


def test_other_features_lie_apart_and_a_drafter_without_features_is_refused(
    target: Target, data: TokenData, tmp_path: Path
) -> None:
    source(recipe_of(), target, data, tmp_path)
    source(recipe_of(data__feature_dtype="bf16"), target, data, tmp_path)
    assert len(list((tmp_path / "features").iterdir())) == 2
    with pytest.raises(RecipeError, match="no features to keep"):
        source(recipe_of(), target, data, tmp_path, Needs())
    with pytest.raises(RecipeError, match="ignored with features online"):
        recipe_of(data__features="online", data__teacher_topk=8)


def test_every_row_has_one_place() -> None:
    layout = ShardLayout(10, 4)
    assert [list(layout.rows(s)) for s in range(layout.num_shards)] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9],
    ]  # fmt: skip
    assert [layout.place(row) for row in (0, 5, 9)] == [(0, 0), (1, 1), (2, 1)]
    assert ShardLayout.of(3, 10**12).each == 1


def num_maps(folder: Path) -> int:
    """Files of a folder that this process has mapped."""
    return len({x.split()[-1] for x in Path("/proc/self/maps").open() if str(folder) in x})


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_a_thousand_shards_keep_few_maps_and_are_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, hashed = Shards(tmp_path, ShardLayout(1_000, 1)), list[Path]()
    for row in range(1_000):  # what `write` leaves
        tensors = {"tap-1": torch.full((2, 3), float(row)), "offsets": torch.tensor([0, 2])}
        body = b"".join(tensor_chunks(tensors))
        about = {"schema": shards_module.SCHEMA, "bytes": len(body)}
        about["sha256"] = hashlib.sha256(body).hexdigest()
        kept.file(row).write_bytes(body)
        kept.manifest(row).write_text(json.dumps(about))
    real = shards_module.file_entry
    monkeypatch.setattr(shards_module, "file_entry", lambda p: (hashed.append(p), real(p))[1])
    for start in range(0, 1_000, 8):
        rows = list(range(start, start + 8))
        for row, found in zip(rows, kept.read_rows(rows), strict=True):
            assert found is not None
            assert torch.equal(found["tap-1"], torch.full((2, 3), float(row)))
    assert 0 < num_maps(tmp_path) <= MOST_OPEN
    assert kept.read(0) is not None  # long closed, and opened again
    assert len(hashed) == 1_000


class FastDisk(Disk):
    """Without flushes, which are not what is tested."""

    def fsync(self, descriptor: int) -> None:
        del descriptor


def test_rows_announced_are_read_before_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Shards(tmp_path, ShardLayout(6, 2), FastDisk())
    for shard in range(3):
        kept.write(shard, {"tap-1": torch.full((4, 3), float(shard))}, [1, 3])
    kept.ahead([5, 0, 3])
    kept.ahead([5])
    for future in list(kept._coming.values()):
        future.result()
    monkeypatch.setattr(kept, "read", lambda row: pytest.fail(f"row {row} was not kept"))
    found = kept.read_rows([0, 3, 5])
    assert [row["tap-1"].shape[0] for row in found if row] == [1, 3, 3]
    assert [row["tap-1"][0, 0].item() for row in found if row] == [0.0, 1.0, 2.0]


def test_long_rows_share_a_shard() -> None:
    assert ShardLayout.of(100, 67_000_000).each == shards_module.LEAST_ROWS
    assert ShardLayout.of(100, 0).each == 100
