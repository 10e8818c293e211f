"""dParallel: the masks and the loss of certainty-forcing distillation, the texts that it learns
from, and the recipe."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from specctl.cli.main import main
from specctl.core.errors import DivergedError, RecipeError
from specctl.diffusion.certainty import BlockRows, block_rows, certainty_loss
from specctl.diffusion.engine import denoise
from specctl.diffusion.folder import load_diffusion
from specctl.diffusion.settings import DenoiseSettings
from specctl.runtime.measure.reporter import SilentReporter
from specctl.train.pretrain.dparallel import (
    certainty_figures,
    certainty_step,
    distill,
    dparallel_recipe,
)
from specctl.train.pretrain.trajectories import Trajectories, prompt_windows, written
from specctl_testing.diffusion import MASK, tiny_folder, tiny_masked, tiny_target

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-dparallel.yaml"
START, BLOCK = 3, 4
IDS = 3 + (torch.arange(13) * 5 + torch.arange(6)[:, None]) % 30  # answers of two and a half blocks


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_rows_are_masked_as_decoding_by_blocks_leaves_them() -> None:
    seen = set[int]()
    ids_BS = IDS.repeat(40, 1)
    one, other = block_rows(ids_BS, START, BLOCK, MASK, seeded())
    for row, ids_S in enumerate(ids_BS):
        masked = one.masked_BS[row] | other.masked_BS[row]
        assert not (one.masked_BS[row] & other.masked_BS[row]).any()
        places = masked.nonzero()[:, 0].tolist()
        first = places[0]
        seen.add(first)
        assert places == list(range(first, min(first + BLOCK, len(ids_S)))), "one whole block"
        for half in (one, other):
            read_S = half.ids_BS[row]
            assert torch.equal(read_S[:first], ids_S[:first]), "the prompt and earlier blocks"
            assert (read_S[first + BLOCK :] == MASK).all(), "later blocks"
            block = slice(first, first + BLOCK)
            assert torch.equal(read_S[block] == MASK, half.masked_BS[row][block])
    assert seen == {3, 7, 11}
    share = one.masked_BS.sum() / (one.masked_BS.sum() + other.masked_BS.sum())
    assert 0.4 < share < 0.6
    mostly, rest = block_rows(ids_BS, START, BLOCK, MASK, seeded(), rate=0.9)
    assert mostly.masked_BS.sum() > 5 * rest.masked_BS.sum()


@pytest.mark.parametrize("layout", ["llada", "dream"])
def test_the_loss_is_the_equation(layout: str) -> None:
    """Once more by lists: one position at a time, mean by row, then over rows."""
    model = tiny_masked(layout)
    rows, _ = block_rows(IDS, START, BLOCK, MASK, seeded(1))
    # some labels are what the model guesses, so that there is something to be certain of
    ids_BS = IDS.clone()
    cross, sure, right, count = list[float](), list[float](), 0, 0
    for row, masked_S in enumerate(rows.masked_BS):
        state = model(rows.ids_BS[row][None])[0]
        losses, entropies = list[float](), list[float]()
        for place in masked_S.nonzero()[:, 0].tolist():
            logits = model.logits(state[place - 1 if layout == "dream" else place])
            if (row + place) % 2:
                ids_BS[row, place] = logits.argmax()
            losses.append(-float(logits.softmax(-1)[ids_BS[row, place]].log()))
            if logits.argmax() == ids_BS[row, place]:
                p = (logits / 0.5).softmax(-1).tolist()
                entropies.append(-sum(x * torch.tensor(x).log().item() for x in p if x > 0))
        right, count = right + len(entropies), count + len(losses)
        cross.append(sum(losses) / max(1, len(losses)))
        sure.append(sum(entropies) / max(1, len(entropies)))
    found = certainty_loss(model, rows, ids_BS, temperature=0.5)
    assert float(found.consistency) == pytest.approx(sum(cross) / len(cross), rel=1e-4)
    assert float(found.certainty) == pytest.approx(sum(sure) / len(sure), rel=1e-3)
    assert (found.right, found.masked) == (right, count)
    assert 0 < right < count


def test_certainty_flows_to_masked_positions_that_are_right_and_to_no_others() -> None:
    torch.manual_seed(0)
    table_BSV = torch.randn(2, 6, 5).requires_grad_()
    labels_BS = table_BSV[..., :4].argmax(-1)
    labels_BS[:, 1::2] = (labels_BS[:, 1::2] + 1) % 4  # every other guess is wrong
    masked_BS = torch.tensor([[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0]]).bool()

    class TableModel(SimpleNamespace):
        """States are logits; like a real model it never guesses the mask (4)."""

        def __call__(self, ids_BS: Tensor) -> Tensor:
            return table_BSV

        def logits(self, state: Tensor) -> Tensor:
            out = state + 0.0
            out[..., 4] = -torch.inf
            return out

        def source(self, place: Tensor) -> Tensor:
            return place

    model: Any = TableModel()
    found = certainty_loss(model, BlockRows(labels_BS, masked_BS), labels_BS, 0.5)
    (certain,) = torch.autograd.grad(found.certainty, table_BSV, retain_graph=True)
    (consistent,) = torch.autograd.grad(found.consistency, table_BSV)
    is_right = masked_BS & (torch.arange(6) % 2 == 0)
    assert torch.equal(certain.abs().sum(-1) > 0, is_right)
    assert torch.equal(consistent.abs().sum(-1) > 0, masked_BS)
    assert certain.isfinite().all()
    assert consistent.isfinite().all(), "the mask has a logit of -inf"
    best_QV, label_Q = certain[is_right], labels_BS[is_right]
    assert (best_QV.gather(1, label_Q[:, None]) < 0).all(), "down the gradient: more certain"


@pytest.mark.parametrize("layout", ["llada", "dream"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_those_of_the_plain_schedule(layout: str, temperature: float) -> None:
    target, block = tiny_target(layout), 4
    prompts = [[3 + (7 * row + place) % 30 for place in range(3)] for row in range(3)]
    plain = DenoiseSettings(block=block)
    how: dict[str, Any] = {"max_new_tokens": 10, "temperature": temperature}
    alone = [
        denoise(target, prompt, plain, seed=5 + row, ignore_eos=True, **how).token_ids
        for row, prompt in enumerate(prompts)
    ]
    end = alone[0][2]
    target = replace(target, eos_ids=(end,))
    found = written(target, prompts, block, 10, temperature=temperature, seed=5)
    assert found.start == 3
    for row, prompt in enumerate(prompts):
        made = denoise(target, prompt, plain, seed=5 + row, **how).token_ids
        assert found.ids_BS[row].tolist() == [*prompt, *made, *[end] * (10 - len(made))]
    assert (found.ids_BS[0, 5:] == end).all()


def test_prompts_begin_with_a_line_and_are_all_different() -> None:
    texts = ["".join(f"{chr(97 + n)}{m:02d}\n" for m in range(40)) for n in range(3)]
    found = prompt_windows(lambda text: [ord(c) for c in text], texts, 20, 8, seed=0)
    assert len({tuple(prompt) for prompt in found}) == 20
    assert {len(prompt) for prompt in found} == {8}
    assert {chr(prompt[0]) for prompt in found} == {"a", "b", "c"}
    with pytest.raises(RecipeError, match="that many prompts"):
        prompt_windows(lambda text: [ord(c) for c in text], texts, 500, 8, seed=0)


def recipe_file(path: Path, **changes: Any) -> Path:
    body = yaml.safe_load(RECIPE.read_text())["dparallel"]
    path.write_text(yaml.safe_dump({"dparallel": {**body, "device": "cpu", **changes}}))
    return path


def test_both_masks_and_both_terms_are_learned_from(tmp_path: Path) -> None:
    """The gradient of a step is that of the sum, divided by the batches that are added up."""
    model = tiny_masked("dream").requires_grad_(True)
    ids_BS = written(tiny_target("dream"), IDS[:, :START].tolist(), BLOCK, 10).ids_BS
    for weight in (0.0, 2.0):
        path = recipe_file(tmp_path / "r.yaml", block=BLOCK, entropy_weight=weight, accumulate=4)
        recipe = dparallel_recipe(path)
        assert recipe is not None
        model.zero_grad()
        loss = certainty_step(model, ids_BS, START, recipe, seeded(2))
        parts = [
            certainty_loss(model, rows, ids_BS, recipe.entropy_temperature)
            for rows in block_rows(ids_BS, START, BLOCK, MASK, seeded(2))
        ]
        assert sum(part.right for part in parts) > 0
        expected = sum((p.consistency + weight * p.certainty for p in parts), torch.zeros(()))
        assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
        norm = model.model.norm.weight
        (gradient,) = torch.autograd.grad(expected, norm)
        assert norm.grad is not None
        assert torch.allclose(norm.grad, gradient / 4)


def test_held_out_figures_are_of_rows_that_have_what_is_measured(tmp_path: Path) -> None:
    """A text of which nothing is guessed rightly does not make the model look more certain."""
    model, ids_BS = tiny_masked("llada"), IDS[:1].clone()
    recipe = dparallel_recipe(recipe_file(tmp_path / "r.yaml", block=1))  # one half has nothing
    assert recipe is not None
    masked_BS = torch.zeros_like(ids_BS).bool()
    masked_BS[:, 12] = True
    rows = BlockRows(ids_BS.masked_fill(masked_BS, MASK), masked_BS)
    likeliest = model.logits(model(rows.ids_BS)[:, 12]).argmax(-1)
    for label, right in ((likeliest, 1.0), ((likeliest + 1) % 30, 0.0)):
        ids_BS[:, 12] = label
        one = certainty_loss(model, rows, ids_BS, 1.0)
        found = certainty_figures(model, Trajectories(ids_BS, 12), recipe)
        assert found.cross_entropy == pytest.approx(float(one.consistency), rel=1e-5)
        assert found.entropy == pytest.approx(float(one.certainty), rel=1e-5)
        assert found.right == right


def test_it_becomes_certain_of_its_own_texts(tmp_path: Path) -> None:
    """Nearer to them than before by the same threshold, in fewer passes."""
    target, count = tiny_target("llada"), 6
    prompts = [[3 + row, 9] for row in range(count)]
    texts = written(target, prompts, BLOCK, 8)
    path = recipe_file(
        tmp_path / "r.yaml", block=BLOCK, batch=count, epochs=60, learning_rate=0.003
    )
    recipe = dparallel_recipe(path)
    assert recipe is not None
    model = tiny_masked("llada").requires_grad_(True)
    losses = distill(model, texts, recipe, SilentReporter())
    assert losses[-1] < losses[0] / 4
    student = replace(target, model=model.requires_grad_(False))
    passes, equal = [0, 0], [0, 0]
    for row, prompt in enumerate(prompts):
        for index, one in enumerate((target, student)):
            made = denoise(
                one, prompt, DenoiseSettings(block=BLOCK, unmask="entropy:0.5"),
                max_new_tokens=8, ignore_eos=True,
            )  # fmt: skip
            passes[index] += made.passes
            equal[index] += int((torch.tensor(made.token_ids) == texts.ids_BS[row, 2:]).sum())
    assert passes[1] < 0.7 * passes[0]
    assert equal[1] > equal[0]


def test_a_model_of_nan_is_not_written(tmp_path: Path) -> None:
    texts = written(tiny_target("llada"), [[3, 9], [4, 9]], BLOCK, 8)
    model = tiny_masked("llada").requires_grad_(True)
    recipe = dparallel_recipe(recipe_file(tmp_path / "r.yaml", block=BLOCK))
    assert recipe is not None
    with torch.no_grad():
        model.model.norm.weight[0] = torch.inf
    before = model.model.embed_tokens.weight.detach().clone()
    with pytest.raises(DivergedError, match="not finite"):
        distill(model, texts, recipe, SilentReporter())
    assert torch.equal(model.model.embed_tokens.weight, before)


@pytest.mark.parametrize("lora", [None, {"rank": 8, "alpha": 8.0}])
def test_the_recipe_distills_a_folder(
    lora: dict[str, Any] | None, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny_folder(tmp_path / "made")
    texts = ["".join(f"import module_{n}\n" for n in range(200))]
    monkeypatch.setattr("specctl.train.pretrain.dparallel.training_texts", lambda *_: texts)
    sizes = {"block": 4, "prompts": 16, "prompt_tokens": 4, "new_tokens": 8, "batch": 4}
    path = recipe_file(
        tmp_path / "recipe.yaml", target=str(made), epochs=4, accumulate=2, lora=lora, **sizes
    )
    before, out = (made / "model.safetensors").read_bytes(), tmp_path / "out"
    assert main(["pretrain", "--recipe", str(path), "--out", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    found = said["result"]
    assert found["texts"] == 14
    assert found["after"]["right"] != found["before"]["right"]
    assert "diffusion.unmask=entropy:0.5" in said["next"][0]
    assert (made / "model.safetensors").read_bytes() == before
    old, new = (dict(load_diffusion(f).model.named_parameters()) for f in (made, out / "export"))
    moved = {name for name in old if not torch.equal(old[name], new[name])}
    assert old.keys() == new.keys()
    assert any("q_proj.weight" in name for name in moved)
    assert ("model.embed_tokens.weight" in moved) is (lora is None), "additions: hidden ones alone"
    losses = json.loads((out / "dparallel.json").read_text())["losses"]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    made_files = {f.name: f.read_bytes() for f in (out / "export").iterdir()}
    again = recipe_file(tmp_path / "again.yaml", target=str(out / "export"), lora=lora, **sizes)
    assert main(["pretrain", "--recipe", str(again), "--out", str(out)]) != 0
    assert "would be overwritten" in capsys.readouterr().err
    assert made_files == {f.name: f.read_bytes() for f in (out / "export").iterdir()}
    (out / "dparallel.json").unlink()
    assert main(["pretrain", "--recipe", str(path), "--out", str(out)]) != 0
    assert "holds another model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mask_rate": 1.0}, "mask_rate"),
        ({"prompts": 2}, "prompts"),
        ({"entropy_temperature": 0}, "entropy_temperature"),
        ({"lora": {"rank": 0}}, "lora.rank"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_recipes_that_mean_nothing_are_refused(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=f"dparallel.{named}"):
        dparallel_recipe(recipe_file(tmp_path / "recipe.yaml", **change))
