"""Models that write pictures in an order of their own: each decodes what a forward without a cache,
written here by definition, gives."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from specctl.api.grid_images import grid_images
from specctl.api.zip_images import zip_images
from specctl.core.errors import (
    FileError,
    IncompatibleError,
    IntegrityError,
    RecipeError,
    SpecctlError,
)
from specctl.core.storage.grid_kinds import ANY_ORDER, GRID_KINDS, NEIGHBOURS
from specctl.images.any_order import AnyOrder, order_of, pass_sizes
from specctl.images.codebook import Codebook
from specctl.images.grid_folder import GridTarget, load_grid
from specctl.images.grid_shape import shape_from
from specctl.images.neighbours import Neighbours
from specctl.runtime.target.target import Target
from specctl.train.pretrain.grids import grid_loss
from specctl.train.pretrain.pictures import FIRST_CODE
from specctl.train.pretrain.recipe import PretrainRecipe
from specctl.train.pretrain.run import check_model, pretrain
from specctl_testing.images import CODES, GRID, small_net, small_pictures

SIDE, PROMPTS = 3, [4, 9]


def test_neighbours_decode_as_one_token_at_a_time() -> None:
    """Every place alone, from one forward over the tokens that are nearer to the corner, and no
    cache: what a pass over an anti-diagonal decides together is the same."""
    model = small_net(NEIGHBOURS, SIDE)
    assert isinstance(model, Neighbours)
    made = model.draw(torch.tensor(PROMPTS), [0, 1], 0.0)
    assert (made.passes, made.read) == (2 * SIDE - 1, SIDE**2)
    places = sorted(range(SIDE**2), key=lambda place: (sum(divmod(place, SIDE)), place))
    for prompt, found in zip(PROMPTS, made.ids_BL.tolist(), strict=True):
        tokens: dict[int, int] = {}
        for place in places:
            row, column = divmod(place, SIDE)
            seen = [p for p in tokens if sum(divmod(p, SIDE)) < row + column]
            far = torch.tensor([-1] + [sum(divmod(p, SIDE)) for p in seen])
            right, below = model(
                torch.tensor([[prompt] + [tokens[p] for p in seen]]),
                torch.tensor([0] + [p + 1 for p in seen]),
                far <= far[:, None],
            )
            parts = []
            if column or not place:
                parts.append(right[0, 1 + seen.index(place - 1) if place else 0])
            if row or not place:
                parts.append(below[0, 1 + seen.index(place - SIDE) if place else 0])
            tokens[place] = FIRST_CODE + int(sum(parts).argmax())
        assert [tokens[place] for place in range(SIDE**2)] == found


def known_of(model: AnyOrder, ids: list[int], at: list[int]) -> tuple[Tensor, Tensor]:
    return model.read(torch.tensor([ids]), torch.tensor([at]))


@pytest.mark.parametrize("passes", [1, 4, SIDE**2])
def test_any_order_with_a_cache_is_any_order_without(passes: int) -> None:
    model, seeds = small_net(ANY_ORDER, SIDE), [5, 6]
    assert isinstance(model, AnyOrder)
    made = model.draw(torch.tensor(PROMPTS), seeds, 0.0, passes)
    sizes = pass_sizes(SIDE**2, passes)
    assert (made.passes, sum(sizes)) == (passes, SIDE**2)
    for prompt, seed, found in zip(PROMPTS, seeds, made.ids_BL.tolist(), strict=True):
        order, ids, at = order_of(seed, SIDE**2).tolist(), [prompt], [0]
        for size in sizes:
            known = known_of(model, ids, at)
            wanted = order[len(at) - 1 : len(at) - 1 + size]
            for place in wanted:  # each alone: queries do not see each other
                logits = model.predict(torch.tensor([[place]]), known)
                ids.append(FIRST_CODE + int(logits.argmax()))
            at += wanted
        assert [ids[at.index(place)] for place in range(1, SIDE**2 + 1)] == found


def test_what_is_learned_is_what_is_decoded() -> None:
    """The logits of a training step, of each kind, are those of the decoding that its order means:
    greedy choices of a picture that was decoded greedily are that picture."""
    for kind in GRID_KINDS:
        model = small_net(kind, SIDE)
        made = model.draw(torch.tensor(PROMPTS), [0, 1], 0.0, None if kind == NEIGHBOURS else 9)
        rows = torch.cat([torch.tensor(PROMPTS)[:, None], made.ids_BL], 1)
        if isinstance(model, AnyOrder):  # in the order that was decoded, in the place of a new one
            at = torch.stack([order_of(seed, SIDE**2) for seed in (0, 1)])
            logits, codes = model.in_order(rows, at)
        else:
            logits, codes = model.training_logits(rows, torch.Generator())
        assert logits.argmax(-1).tolist() == codes.tolist()


def test_passes_begin_small_and_are_refused_where_there_are_too_many() -> None:
    sizes = pass_sizes(121, 16)
    assert sum(sizes) == 121
    assert sizes[0] == 1
    assert sizes == sorted(sizes)
    for wrong in (0, 10, 2.5):
        with pytest.raises(RecipeError, match="1 to 9"):
            pass_sizes(9, wrong)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="it takes 5"):
        small_net(NEIGHBOURS, SIDE).verification(5)
    any_order = small_net(ANY_ORDER, SIDE)
    assert any_order.verification(9) == any_order.verification(None) == "own-target:any-order"
    assert any_order.verification(4) == "approximate:arpg"


@pytest.mark.parametrize("kind", GRID_KINDS)
def test_a_model_is_trained_kept_and_read_again(kind: str, tmp_path: Path) -> None:
    final = pretrain(small_pictures(tmp_path / "recipe.yaml", kind), tmp_path)
    assert final.loss < math.log(CODES) - 0.1
    target = load_grid(tmp_path / "export")
    assert target.model.shape.grid == GRID
    rows = torch.tensor([[target.encode("7"), *[FIRST_CODE] * GRID**2]])
    first, _ = grid_loss(target.model, rows, 0)
    assert first.isfinite().all()
    assert torch.equal(first, grid_loss(target.model, rows, 0)[0])
    for words in ("7 7", "seven", "v3", "", "<|eos|>"):
        with pytest.raises(IncompatibleError, match="one word"):
            target.encode(words)
    config = target.model.shape.config()
    damage_and_refuse(tmp_path / "export", target.codebook)
    for name, wrong in (("hidden_size", 30), ("grid", 0), ("rope_theta", -1), ("codes", 10**6)):
        with pytest.raises(IncompatibleError, match=f"{name}|vocab_size"):
            shape_from(config | {name: wrong}, "config.json")
    with pytest.raises(IncompatibleError, match="half read"):  # no query would read what is known
        shape_from(config | {"model_type": ANY_ORDER, "num_hidden_layers": 1}, "config.json")
    other = {NEIGHBOURS: ANY_ORDER, ANY_ORDER: NEIGHBOURS}[kind]
    with pytest.raises(FileError, match="that of another model"):
        pretrain(small_pictures(tmp_path / "recipe.yaml", other), tmp_path, resume=True)


def damage_and_refuse(folder: Path, codebook: Codebook) -> None:
    """Everything that a folder may lack, or have of another model."""
    weights = load_file(folder / "model.safetensors")
    name = "embed_tokens.weight"
    config = json.loads((folder / "config.json").read_text())
    bad: dict[str, tuple[str, Callable[[Path], object]]] = {
        "model": ("finite", lambda path: save_file({**weights, name: weights[name] / 0}, path)),
        "model.safetensors": (r"config\.json describes", lambda path: path.write_bytes(b"0" * 64)),
        "tokenizer.json": ("no tokenizer", Path.unlink),
        "config.json": (
            r"weight: \[.* in the place of \[",  # before memory is taken for it
            lambda path: path.write_text(json.dumps({**config, "hidden_size": 2**19})),
        ),
    }
    for file, (found, damage) in bad.items():
        path = folder / ("model.safetensors" if file == "model" else file)
        whole = path.read_bytes()
        damage(path)
        with pytest.raises(IntegrityError, match=found):
            load_grid(folder)
        path.write_bytes(whole)
    replace(codebook, patch_KX=codebook.patch_KX[::-1].copy()).save(folder)
    with pytest.raises(IncompatibleError, match="codebook is that of another target"):
        load_grid(folder)
    codebook.save(folder)
    load_grid(folder)


def test_keys_of_a_recipe_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    raw = yaml.safe_load(small_pictures(tmp_path / "recipe.yaml", NEIGHBOURS).read_text())
    for part, more, found in (
        ("model", {"num_key_value_heads": 1}, "num_key_value_heads"),
        ("model", {"grid": 5}, r"model\.grid"),
        ("diffusion", {"init": None}, "model of pictures"),
        ("train", {"compile": True}, r"train\.compile"),
    ):
        recipe = PretrainRecipe(**raw | {part: raw.get(part, {}) | more})
        with pytest.raises(RecipeError, match=found):
            check_model(recipe)
    check_model(PretrainRecipe(**raw))


def test_no_prompts_are_no_pictures_and_no_temperature_is_guessed(
    make_target: Callable[..., Target],
) -> None:
    book = Codebook(np.zeros((CODES, 4), np.float32), SIDE, FIRST_CODE)
    model = GridTarget("x", small_net(ANY_ORDER, SIDE), None, book)
    for made in (grid_images(model, []), zip_images(make_target(), [], SIDE, 2)):
        assert (made.outputs, made.tokens) == ((), 0)
        assert "tokens per pass 0.00" in made.lines()[0]
    for wrong in (-1.0, math.nan):  # neither is greedy
        with pytest.raises(SpecctlError, match="temperature"):
            grid_images(model, [], temperature=wrong)
        with pytest.raises(SpecctlError, match="temperature"):
            zip_images(make_target(), [], SIDE, 2, temperature=wrong)
