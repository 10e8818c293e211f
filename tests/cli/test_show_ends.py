"""`specctl show` names every end of a target's texts and where it comes from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import specctl.recipes
from specctl_testing.cli.ran import Run

TINY = Path(specctl.recipes.__path__[0]) / "tiny"


def test_show_names_the_ends_of_a_target_with_their_sources(run: Run) -> None:
    shown = run("show", "tiny", "--json").json["result"]["ends"]
    assert [(end["id"], end["token"]) for end in shown["ids"]] == [(1, "<|eos|>"), (5, "<|end|>")]
    assert shown["ids"][1]["sources"] == ["generation_config", "chat template"]
    assert (shown["of_turn"], shown["of_document"], shown["left_out"]) == (5, 1, [])
    text = " ".join(run("show", "tiny").out.split())
    assert "5 <|end|> (generation_config, chat template)" in text
    assert "an answer ends with <|end|>" in text
    assert "a document ends with <|eos|>" in text


def test_show_names_what_ends_nothing(run: Run, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 9999]}))
    text = " ".join(run("show", tmp_path).out.split())
    assert "ends nothing 9999 of generation_config (the model has 6,144 tokens)" in text
    assert "an answer ends with nothing in its chat template" in text
    result = run("show", tmp_path, "--json").json["result"]
    assert [end["id"] for end in result["ends"]["ids"]] == [1]
    assert result["ends"]["of_turn"] is None


def test_show_of_a_published_target_waits_for_its_files(run: Run) -> None:
    ran = run("show", "nobody/nothing-of-that-name")
    assert ran.code == 0, ran.err
    assert "known when its files are in the cache" in ran.out
