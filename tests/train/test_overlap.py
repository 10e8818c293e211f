"""train.overlap: the same losses, the next batch read while this one is learned, the target alone
while tau is measured."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.core.batch import TrainBatch
from specctl.core.errors import RecipeError
from specctl.drafters import family
from specctl.recipes.load import load_recipe
from specctl.runtime.target.target import Target
from specctl.train.features import target_source
from specctl.train.features.overlap import Overlapped, check_overlap
from specctl.train.metrics.metrics import read_log
from specctl.train.run import train_draft

CPU = torch.device("cpu")


def batch_of(rows: list[int]) -> TrainBatch:
    ids = torch.tensor(rows)[:, None]
    return TrainBatch(ids, ids >= 0, ids, ids)


def test_one_batch_is_read_ahead_in_the_order_announced() -> None:
    asked, gate = list[tuple[list[int], bool]](), threading.Event()

    def read(rows: list[int]) -> TrainBatch:
        is_ahead = threading.current_thread() is not threading.main_thread()
        if is_ahead:
            assert gate.wait(10)
        asked.append((rows, is_ahead))
        return batch_of(rows)

    overlapped = Overlapped(read, CPU)
    overlapped.ahead([3, 4])
    overlapped.ahead([5])
    assert overlapped([1, 2]).ids_BS.tolist() == [[1], [2]]  # while the first is being read
    gate.set()
    assert overlapped([3, 4]).ids_BS.tolist() == [[3], [4]]
    overlapped.settle()
    assert asked == [([1, 2], False), ([3, 4], True), ([5], True)]
    assert overlapped([5]).ids_BS.tolist() == [[5]]
    assert len(asked) == 3


def test_what_fails_ahead_is_raised_when_it_is_asked_for() -> None:
    def read(rows: list[int]) -> TrainBatch:
        raise OSError(f"rows {rows}")

    overlapped = Overlapped(read, CPU)
    overlapped.ahead([1])
    overlapped.settle()
    with pytest.raises(OSError, match=r"rows \[1\]"):
        overlapped([1])


def test_a_run_with_overlap_is_the_run_without(
    chat_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, real = set[str](), target_source.InProcess.read

    def noted(*args: Any) -> Any:
        threads.add(threading.current_thread().name.split("_")[0])
        return real(*args)

    monkeypatch.setattr(target_source.InProcess, "read", noted)
    text = tmp_path / "words.txt"
    text.write_text("\n\n".join(f"def f{i}(x):\n    return x + {i}" for i in range(100)))
    found = []
    for overlap in ("false", "true"):
        sets = [
            f"data.source={text}", "data.format=text", "data.prompts=12", "data.new_tokens=12",
            "data.prompt_tokens=8", "data.text_tokens=0", "train.steps=5", "train.rows=4",
            "train.accumulate=2", "train.seq_len=32", "train.log_every=1", "train.tau_every=2",
            "train.tau_prompts=1", "train.tau_tokens=4", "vocab.size=null",
            f"train.overlap={overlap}",
        ]  # fmt: skip
        out = tmp_path / overlap
        train_draft(load_recipe("eagle3", sets=sets), out, target=chat_target)
        lines = read_log(out / "metrics.jsonl")
        found.append([(m["step"], m.get("loss"), m.get("tau")) for m in lines])
    assert found[0] == found[1]
    assert len(found[0]) >= 7
    assert "overlap" in threads


def test_what_uses_the_target_meanwhile_is_refused(make_target: Any) -> None:
    spec = make_target(num_layers=4).spec
    recipe = load_recipe("eagle3", sets=["train.overlap=true"])
    kangaroo, eagle3 = (
        family(name).build(family(name).options(), spec, None) for name in ("kangaroo", "eagle3")
    )
    check_overlap(recipe.train, recipe.data, eagle3)
    with pytest.raises(RecipeError, match="kangaroo runs the target's layers"):
        check_overlap(recipe.train, recipe.data, kangaroo)
    written = load_recipe("eagle3", sets=["train.overlap=true", "data.on_policy=0.5"])
    with pytest.raises(RecipeError, match="not known a batch ahead"):
        check_overlap(written.train, written.data, eagle3)
    with pytest.raises(RecipeError, match="overlap needs a whole target"):
        load_recipe(
            "eagle3",
            sets=["train.overlap=true", "train.parallel=fsdp", "train.shard_target=true"],
        )
