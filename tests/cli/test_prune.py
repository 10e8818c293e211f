"""`specctl prune` from its flags to packages, once per way of cutting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specctl.api.prune import parse_heads, parse_width
from specctl.core.errors import RecipeError
from specctl.recipes.load import load_recipe
from specctl.runtime.target.target import load_target
from specctl.train.prune.cut import prunable
from specctl.train.prune.healing import healings, plan_healing
from specctl.train.prune.shapes import DraftShape

SMALL = (
    "data.prompts=8", "data.new_tokens=16", "data.prompt_tokens=16", "data.text_tokens=0",
    "train.rows=2", "train.seq_len=48", "train.tau_prompts=2", "train.tau_tokens=8",
)  # fmt: skip


def words(out: Path, *more: str) -> list[str]:
    text = out.parent / "text.txt"
    text.write_text("\n\n".join(f"def name_{i}(x):\n    return x + {i}\n" for i in range(60)))
    settings = [word for setting in SMALL for word in ("--set", setting)]
    return ["prune", "--out", str(out), "--data", str(text), *settings, *more, "--json"]


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        (None, (None, None)),
        ("192", (192, None)),
        ("0.5", (128, None)),
        ("mlp=320", (None, 320)),
        ("0.75,mlp=0.5", (192, 320)),
    ],
)
def test_widths_are_numbers_or_shares_of_the_targets(
    spec: str | None, found: tuple[int | None, int | None]
) -> None:
    assert parse_width(spec, 256, 640) == found


@pytest.mark.parametrize(
    ("spec", "found"),
    [(None, (None, None)), ("4", (4, 1)), ("2/2", (2, 2)), ("6", (6, 2)), ("0.5/1", (4, 1))],
)
def test_heads_leave_as_whole_groups_or_evenly(
    spec: str | None, found: tuple[int | None, int | None]
) -> None:
    assert parse_heads(spec, 8, 2) == found


@pytest.mark.parametrize("spec", ["x=3", "0", "257", "1.5", "mpl=3", "many", "1,2"])
def test_a_width_that_means_nothing_is_refused(spec: str) -> None:
    with pytest.raises(RecipeError, match="--width"):
        parse_width(spec, 256, 640)


def test_a_cut_without_healing_is_a_package_and_a_report(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "cut"
    flags = ("--layers", "3", "--width", "192,mlp=0.5", "--heads", "2", "--heal-steps", "0")
    ran = run(*words(out, *flags))
    assert ran.code == 0, ran.err
    answer = ran.json["result"]
    after = answer["prune"]["after"]
    assert (after["num_layers"], after["hidden_size"], after["intermediate_size"]) == (3, 192, 320)
    assert (after["num_heads"], after["num_kv_heads"]) == (2, 1)
    assert 0.0 < answer["prune"]["alpha"] < 1.0
    assert answer["tau"] >= 1.0
    manifest = json.loads((out / "cut" / "manifest.json").read_text())
    assert manifest["options"]["width"] == 192
    draft = str(out / "cut")
    exported = run("export", "--draft", draft, "--to", "hf", "-o", str(tmp_path / "hf"), "--json")
    assert exported.code == 0, exported.err


def test_another_commands_run_is_left_as_it_is(run: Any, tmp_path: Path) -> None:
    (tmp_path / "run.lock").touch()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").write_text("{}")
    ran = run("prune", "--layers", "2", "--out", tmp_path, "--json")
    assert (ran.code, ran.json["error"]["where"]) == (4, str(tmp_path))
    assert (tmp_path / "data" / "manifest.json").read_text() == "{}"
    assert not (tmp_path / "cut").exists()


def test_a_dry_run_names_the_scoring_and_writes_nothing(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "none"
    given = ["prune", "--layers", "2", "--two-step", "--out", str(out), "--dry-run"]
    ran = run(*given, "--json")
    assert ran.code == 0, ran.err
    plans = ran.json["result"]["plans"]
    assert list(plans) == ["prune-1", "prune-2"]
    for plan in plans.values():
        assert "scoring what matters" in [part["name"] for part in plan["parts"]]
    assert ran.json["next"] == [f"specctl prune --layers 2 --two-step --out {out}"]
    assert not out.exists()
    refused = run(*given, "--search", "--json")
    assert (refused.code, refused.json["error"]["where"]) == (3, "--dry-run")


def test_cutting_nothing_keeps_the_target_whole(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In 8 bits, as drafters are read, it is the target but for rounding.
    monkeypatch.setenv("SPECCTL_INT8", "0")
    flags = ("--layers", "8", "--heal-steps", "0", "--set", "target.dtype=float32")
    answer = run(*words(tmp_path / "whole", *flags)).json["result"]
    assert answer["prune"]["alpha"] == pytest.approx(1.0, abs=1e-5)
    assert answer["prune"]["layers"] == list(range(8))
    # 8 tokens a prompt at k = 5: a round of 6, then the rest
    assert answer["tau"] == 4.0


def test_two_steps_distil_in_between_and_go_on_where_they_stopped(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "two"
    flags = ("--layers", "1", "--two-step", "--heal-steps", "4")
    ran = run(*words(out, *flags))
    assert ran.code == 0, ran.err
    assert ran.err.count("starts from") == 2
    answer = ran.json["result"]
    half = json.loads((out / "half" / "prune.json").read_text())
    assert half["after"]["num_layers"] == answer["prune"]["before"]["num_layers"] == 3
    assert answer["prune"]["after"]["num_layers"] == 1
    assert answer["steps"] == 2
    again = run(*words(out, *flags))
    assert again.err.count("is left as it is") == 2
    assert again.json["result"]["tau"] == answer["tau"]
    other = run(*words(out, "--layers", "2", "--heal-steps", "4"))
    assert other.code == 4
    assert "holds another cut" in other.err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--importance", "luck"), "importance"),
        (("--recipe", "eagle3"), "small-lm"),
        (("--layers", "9", "--heal-steps", "0"), "layers"),
        (("--two-step", "--heal-steps", "0"), "two-step"),
    ],
)
def test_flags_that_cannot_be_are_refused(
    run: Any, tmp_path: Path, flags: tuple[str, ...], named: str
) -> None:
    ran = run(*words(tmp_path / "no", *flags))
    assert ran.code == 3
    assert named in json.dumps(ran.json["error"])


def test_a_search_ranks_shapes_by_predicted_speed(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specctl.cli.commands.shapes.ROUNDS", 2)
    monkeypatch.setattr("specctl.cli.commands.shapes.LENGTHS", (1, 3))
    table = tmp_path / "alphas.json"
    shapes = [(layers, width) for layers in (1, 2) for width in (64, 256)]
    rows = [{"layers": d, "width": w, "alpha": 0.3 + d * w / 2000} for d, w in shapes]
    table.write_text(json.dumps(rows))
    out = tmp_path / "search"
    flags = ("--search", "--depths", "1,2", "--widths", "64,256", "--table", str(table))
    ran = run(*words(out, *flags))
    assert ran.code == 0, ran.err
    answer = ran.json["result"]
    rates = [row["tokens_per_second"] for row in answer["ranking"]]
    assert len(rates) == 4
    assert rates == sorted(rates, reverse=True)
    assert set(answer["latency"]["step_seconds"]) == {"1x64", "1x256", "2x64", "2x256"}
    assert answer["latency"]["r2"] <= 1.0
    assert json.loads((out / "shapes.json").read_text())["ranking"] == answer["ranking"]
    assert "specctl prune --target tiny --layers" in ran.json["next"][0]
    assert "drafts of 4 shapes are timed" in ran.err
    bad = run(*words(out, "--search", "--depths", "many"))
    assert bad.code == 3


@pytest.mark.proof
def test_a_search_heals_every_shape_and_ranks_by_what_it_measured(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"ROUNDS": 2, "LENGTHS": (1, 3), "PROMPTS": 3, "TOKENS": 8}.items():
        monkeypatch.setattr(f"specctl.cli.commands.shapes.{name}", value)
    out = tmp_path / "healed"
    grid = ("--search", "--depths", "1,2", "--widths", "64,128", "--heal-steps", "1")
    ran = run(*words(out, *grid))
    assert ran.code == 0, ran.err
    assert "4 of 4 shapes are healed for 1 steps" in ran.err
    found = ran.json["result"]
    reached = found["acceptance"]["reached_per_position"]
    assert set(reached) == {"1x64", "1x128", "2x64", "2x128"}
    for row in found["ranking"]:
        share_at = reached[f"{row['layers']}x{row['width']}"]
        assert row["tau"] == pytest.approx(1 + sum(share_at[: row["length"]]))
    assert found["acceptance"]["left_out_r2"] is None  # four shapes determine four coefficients
    shapes = [DraftShape(layers, width) for layers in (1, 2, 3) for width in (64, 128)]
    target = load_target("tiny")
    runs = healings(load_recipe(str(out / "1x64")), shapes, prunable(target).module.shape, 1)
    left = plan_healing(runs, target, out)
    assert left.shapes == 2  # the same search with one depth more
    assert 0 < left.least <= left.most
