"""Learn2PD's filter: what it learns from, what it keeps, and the recipe that trains it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from specctl.cli.main import main
from specctl.core.errors import IncompatibleError, RecipeError, SpecctlError
from specctl.diffusion.canvas import CanvasGuess
from specctl.diffusion.engine import denoise, verification_of
from specctl.diffusion.settings import DenoiseSettings
from specctl.diffusion.unmask.base import BlockStep
from specctl.diffusion.unmask.learned import LearnedUnmask, TokenFilter, read_filter
from specctl.train.pretrain.token_filter import (
    FilterRows,
    decoded_rows,
    filter_loss,
    filter_recipe,
    fit_filter,
)
from specctl_testing.diffusion import tiny_folder, tiny_target

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-learn2pd.yaml"
PROMPT = [3, 4, 5]


def test_rows_say_which_guesses_decoding_ended_with() -> None:
    target = tiny_target("dream")
    rows = decoded_rows(target, [PROMPT], block=4, new_tokens=8)
    assert rows.masked_BW.sum(-1).tolist() == [4, 3, 2, 1, 4, 3, 2, 1]
    assert (rows.confidence_BW[rows.masked_BW == 0] == 1).all()
    assert (rows.final_BW <= rows.masked_BW).all()
    assert (rows.final_BW.sum(-1) >= 1).all(), "what a pass keeps is final"
    assert rows.final_BW[3].sum() == 1, "the last guess of a block is kept"


def test_it_learns_a_rule_of_the_confidences() -> None:
    torch.manual_seed(0)
    confidence_BW = torch.rand(512, 4)
    final_BW = (confidence_BW > 0.6).float()
    rows = FilterRows(confidence_BW, torch.ones(512, 4), final_BW)
    model = TokenFilter(4, 32)
    fit_filter(model, rows, epochs=200, learning_rate=0.02)
    assert float(filter_loss(model, rows).detach()) < 0.15


def test_guesses_that_it_takes_for_final_stay(tmp_path: Path) -> None:
    model = TokenFilter(4, 2)
    with torch.no_grad():
        model.outer.weight.zero_()
        model.outer.bias.copy_(torch.tensor([-5.0, -5.0, 5.0, 5.0]))
    model.save(tmp_path)
    logits = torch.tensor([[3.0, 0], [2.0, 0], [1.0, 0]])
    guess = CanvasGuess(torch.tensor([10, 12, 14]), logits.argmax(-1), logits)
    step = BlockStep(first=10, last=14, step=0, count=1)
    found = LearnedUnmask(0.9, read_filter(tmp_path)).keep(guess, step)
    assert found.tolist() == [True, True, False], "the best one, and one taken for final"


def test_it_is_approximate_with_an_exact_end(tmp_path: Path) -> None:
    plain, target = DenoiseSettings(block=4), replace(tiny_target("dream"), folder=tmp_path)
    TokenFilter(4, 8).save(tmp_path)
    how = {"max_new_tokens": 8, "ignore_eos": True}
    exact = denoise(target, PROMPT, replace(plain, unmask="learn2pd:1"), **how)
    assert exact == denoise(target, PROMPT, plain, **how)
    loose = replace(plain, unmask="learn2pd:0")
    assert denoise(target, PROMPT, loose, **how).passes == 2
    assert verification_of(loose) == "approximate:learn2pd"
    with pytest.raises(IncompatibleError, match="another length"):
        denoise(target, PROMPT, replace(loose, block=8), **how)
    with pytest.raises(SpecctlError, match="no filter"):
        denoise(tiny_target("dream"), PROMPT, loose, **how)


def test_the_recipe_trains_one(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = yaml.safe_load(RECIPE.read_text())["filter"]
    body |= {"target": str(tiny_folder(tmp_path / "made")), "block": 4, "prompts": 4}
    body |= {"prompt_tokens": 4, "new_tokens": 8, "epochs": 3}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"filter": body}))
    texts = [f"import module_{n}\n" for n in range(4)]
    monkeypatch.setattr("specctl.train.pretrain.token_filter.training_texts", lambda *_: texts)
    out = tmp_path / "out"
    assert main(["pretrain", "--recipe", str(path), "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["result"]
    assert found["passes"] == 24
    assert read_filter(out / "export").block == 4
    shutil.copytree(tmp_path / "made", tmp_path / "export")
    for place, change, message in (
        (tmp_path, {}, "holds another model"),
        (out, {"target": str(out / "export")}, "would be overwritten"),
        (tmp_path / "few", {"prompts": 1}, "too few texts"),
    ):
        path.write_text(yaml.safe_dump({"filter": {**body, **change}}))
        assert main(["pretrain", "--recipe", str(path), "--out", str(place)]) != 0
        assert message in capsys.readouterr().err
    path.write_text(yaml.safe_dump({"filter": {**body, "epochs": 0}}))
    with pytest.raises(RecipeError, match="epochs"):
        filter_recipe(path)
