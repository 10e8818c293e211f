"""Features at a URL (fsspec's memory:// here): those of a folder, fetched whole or not at all, in a
cache of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

from specctl.core.drafter import Needs
from specctl.core.errors import NetworkError, RecipeError
from specctl.recipes.load import load_recipe
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.target.target import Target
from specctl.train.data.rows.pack import Document, pack
from specctl.train.data.rows.rows import TokenData, write_rows
from specctl.train.data.sources.defects import Defects
from specctl.train.distributed.ranks import Ranks
from specctl.train.features import remote_shards
from specctl.train.features.capture import capture
from specctl.train.features.offline import feature_source
from specctl.train.features.shards import Shards, kept_shards
from specctl.train.saving.fingerprint import config_fields

URL = "memory://bucket/features"
BOTH = Needs(taps=(0, 2), teacher=True)
SEQ_LEN = 32


@pytest.fixture(scope="module")
def target(make_target: Callable[..., Target]) -> Target:
    return make_target(num_layers=3)


@pytest.fixture
def data(tmp_path: Path, target: Target) -> TokenData:
    rng = np.random.default_rng(0)
    documents = [
        Document(rng.integers(0, target.spec.vocab_size, n).astype(np.int32), np.arange(n) > 0, "t")
        for n in rng.integers(5, SEQ_LEN, 30)
    ]
    write_rows(tmp_path / "data", pack(documents, SEQ_LEN, 0, 0), "0" * 64, {}, "s", Defects())
    return TokenData.open(tmp_path / "data")


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Small shards, an empty store, no waiting between tries."""
    monkeypatch.setattr("specctl.train.features.shards.SHARD_BYTES", 40_000)
    monkeypatch.setattr("specctl.train.features.shards.LEAST_ROWS", 1)
    monkeypatch.setattr(remote_shards, "PAUSE", 0.0)
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


class Counts(SilentReporter):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def source(target: Target, data: TokenData, out: Path, *sets: str) -> tuple[Any, str]:
    fields = ["data.features=offline", "data.feature_dtype=fp32", "train.rows=4"]
    recipe = load_recipe("eagle3", sets=[*fields, f"data.features_at={URL}", *sets])
    said = Counts()
    return feature_source(
        recipe.data, recipe.train.rows, target, data, BOTH, out, said, Ranks()
    ), said.lines[-1]


def same(read: Any, target: Target, data: TokenData) -> bool:
    """Whether all rows are read as the target itself would read them."""
    rows = list(range(data.num_rows))
    online, found = capture(target, data.batch(rows), BOTH), read(rows)
    real_BS = online.document_BS >= 0
    assert online.teacher_BSV is not None
    return torch.equal(found.taps[2][real_BS], online.taps[2][real_BS]) and torch.equal(
        found.teacher_BSV[real_BS], online.teacher_BSV[real_BS]
    )


def files(store: Any, suffix: str) -> list[str]:
    return sorted(path for path in store.store if path.endswith(suffix))


def test_features_at_a_url_are_those_of_the_target_for_every_machine(
    target: Target, data: TokenData, tmp_path: Path, store: Any
) -> None:
    read, said = source(target, data, tmp_path / "one")
    num = len(files(store, ".safetensors"))
    assert num > 3
    assert f"0 of {num} shards are there, {num} will be written" in said
    assert same(read, target, data)
    again, said = source(target, data, tmp_path / "other")  # a machine with an empty cache
    assert f"{num} of {num} shards are there, 0 will be written" in said
    assert not kept_shards(tmp_path / "other" / "features")
    assert same(again, target, data)
    assert len(kept_shards(tmp_path / "other" / "features")) == num


def test_the_cache_keeps_to_its_size(
    target: Target, data: TokenData, tmp_path: Path, store: Any
) -> None:
    cap = 100_000
    read, _ = source(target, data, tmp_path, f"data.features_gb={cap / 1e9}")
    sizes = [len(store.cat(path)) for path in files(store, ".safetensors")]
    assert sum(sizes) > 2 * cap
    for start in range(0, data.num_rows, 2):
        read(list(range(start, min(data.num_rows, start + 2))))
        kept = kept_shards(tmp_path / "features")
        assert 0 < sum(shard.bytes for shard in kept) <= cap
    assert same(read, target, data)


@pytest.mark.parametrize("how", ["flipped", "no manifest", "no file"])
def test_what_is_damaged_at_the_store_is_read_online_and_written_again(
    target: Target, data: TokenData, tmp_path: Path, store: Any, how: str
) -> None:
    source(target, data, tmp_path / "one")
    name = files(store, ".safetensors")[1]
    whole = store.cat(name)
    if how == "flipped":
        store.pipe(name, whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    else:
        store.rm(name if how == "no file" else name.replace(".safetensors", ".json"))
    read, said = source(target, data, tmp_path / "other")
    assert same(read, target, data)
    _, later = source(target, data, tmp_path / "third")
    assert ", 1 will be written" in (later if how == "flipped" else said)
    assert store.cat(name) == whole


def test_a_cached_shard_that_is_damaged_or_dropped_is_fetched_again(
    target: Target, data: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source(target, data, tmp_path)
    first, second, *_ = kept_shards(tmp_path / "features")
    first.file.write_bytes(b"x" * first.bytes)
    read, _ = source(target, data, tmp_path)
    checked = Shards._is_whole

    def dropping(self: Shards, shard: int) -> bool:
        """As another process that needs the room."""
        found = checked(self, shard)
        if self.file(shard) == second.file:
            second.drop()
        return found

    monkeypatch.setattr(Shards, "_is_whole", dropping)
    monkeypatch.setattr(read.batch.__self__.source, "read", None)  # nothing is read online
    assert len(read(list(range(data.num_rows))).ids_BS) == data.num_rows


def test_a_shard_that_is_dropped_while_shards_are_listed_is_left_out(
    target: Target, data: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by another process that needs the room, of which the manifest is gone and the file not
    yet."""
    source(target, data, tmp_path)
    root = tmp_path / "features"
    first, *others = kept_shards(root)
    listed = type(root).glob

    def dropping(self: Path, pattern: str) -> list[Path]:
        found = list(listed(self, pattern))
        first.file.with_suffix(".json").unlink()
        return found

    monkeypatch.setattr(type(root), "glob", dropping)
    assert [shard.file for shard in kept_shards(root)] == [shard.file for shard in others]


def test_a_store_that_fails_is_asked_again_and_then_named(
    target: Target, data: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source(target, data, tmp_path / "one")
    read, _ = source(target, data, tmp_path / "other")
    system, calls = type(fsspec.filesystem("memory")), [0]
    real = system.cat_file

    def failing(self: Any, *args: Any, **fields: Any) -> bytes:
        calls[0] += 1
        if calls[0] % 2:
            raise TimeoutError("slow down")
        found: bytes = real(self, *args, **fields)
        return found

    monkeypatch.setattr(system, "cat_file", failing)
    assert len(read([0]).ids_BS) == 1
    monkeypatch.setattr(system, "cat_file", lambda *args, **fields: 1 / 0)
    with pytest.raises(NetworkError, match="cannot be reached") as caught:
        read([data.num_rows - 1])
    assert URL in caught.value.text()


def test_places_that_cannot_be_are_refused_and_a_place_may_change(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="reads nowhere://"):
        remote_shards.ObjectStore("nowhere://bucket")
    with pytest.raises(RecipeError, match="ignored with features online"):
        load_recipe("eagle3", sets=[f"data.features_at={URL}"])
    offline = ["data.features=offline", f"data.features_at={tmp_path}"]
    kept = load_recipe("eagle3", sets=offline)
    assert config_fields(kept) == config_fields(load_recipe("eagle3", sets=offline[:1]))


def test_a_folder_may_be_named(target: Target, data: TokenData, tmp_path: Path) -> None:
    place = tmp_path / "shared"
    read, _ = source(target, data, tmp_path / "run", f"data.features_at=file://{place}")
    assert same(read, target, data)
    assert kept_shards(place)
    assert not (tmp_path / "run").exists()
