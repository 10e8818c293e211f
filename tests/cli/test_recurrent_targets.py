"""What needs a target of attention alone is refused for one with recurrent layers, in one sentence,
from its configuration: none of its weights is there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import specctl
import specctl.recipes
from specctl.api.arguments.families import family_infos
from specctl.cli.commands.bench_families import recipes_of
from specctl.core.errors import IncompatibleError
from specctl.drafters import families
from specctl.export.package.folder import save_package
from specctl.recipes.load import load_recipe
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.generate import default_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.assemble import attention_only
from specctl.train.planning.plan import plan
from specctl.train.run import _load_target
from specctl_testing.cli.ran import Run
from specctl_testing.hybrids import tiny_hybrid

BORROWERS = sorted(name for name, info in family_infos().items() if info.borrows_layers)
FREE = [name for name, info in family_infos().items() if info.borrows_layers and not info.trainable]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid of which the configuration alone is there: what reads more fails otherwise."""
    folder = tmp_path_factory.mktemp("hybrid")
    tiny_hybrid("qwen3_next").config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(tiny_hybrid("qwen3_next"))


# -- by name -----------------------------------------------------------------------------------

GREEDY = Sampling(temperature=0.0, max_new_tokens=5, ignore_eos=True)
REQUESTS = [Request(prompt, GREEDY) for prompt in ((7, 8, 9, 7, 8), (1, 2, 3, 1))]


@pytest.fixture(scope="module")
def plain(target: Target) -> list[Sequence[int]]:
    return [each.tokens for each in Engine(target, num_slots=2).run(REQUESTS)]


@pytest.mark.parametrize("name", sorted(families()))
def test_a_family_works_or_is_refused_by_its_entry(
    name: str, target: Target, plain: list[Sequence[int]]
) -> None:
    """As a batch, with fresh weights: the text is the plain one."""
    family = families()[name]
    drafter = family.build(family.options(), target.spec, None)
    if family.borrows_layers:
        with pytest.raises(IncompatibleError, match="does not lend its layers"):
            Engine(target, drafter, default_policy(drafter))
        return
    engine = Engine(target, drafter, default_policy(drafter), num_slots=2)
    assert [each.tokens for each in engine.run(REQUESTS)] == plain


@pytest.mark.parametrize("name", FREE)
def test_drafters_that_run_its_layers_are_refused_unread(name: str, hybrid: Path) -> None:
    with pytest.raises(IncompatibleError, match=f"drafter {name} runs layers of the target"):
        specctl.generate(hybrid, "def", name)


@pytest.mark.parametrize("name", [name for name in BORROWERS if name not in FREE])
def test_drafters_that_run_its_layers_are_not_trained_for_it(name: str, hybrid: Path) -> None:
    recipe = load_recipe(recipes_of(name)[0], target=str(hybrid))
    with pytest.raises(IncompatibleError, match=f"drafter {name} runs layers of the target"):
        plan(recipe, flops_per_second=1e10)
    wanted = attention_only(recipe.drafter, recipe.serve)
    with pytest.raises(IncompatibleError, match=f"drafter {name} runs layers of the target"):
        _load_target(recipe.target, False, wanted, torch.device("cpu"))


# -- by command --------------------------------------------------------------------------------

LAYERS = "drafter layer-skip runs layers of the target"
EARLY = ("train-draft", "--recipe", "propd", "--set", "serve.early_layer=2", "--dry-run")
PARALLEL = "drafting in parallel needs a target whose cache can be rolled back"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("generate", "--draft", "prompt-lookup", "--set", "target.compile=true", "def"),
            "cannot be recorded",
        ),
        (("generate", "--draft", "prompt-lookup+layer-skip", "def"), LAYERS),
        (("generate", "--draft", "small-lm", "--set", "serve.parallel=true", "def"), PARALLEL),
        (("bench", "prompt-lookup", "layer-skip"), LAYERS),
        (("bench", "prompt-lookup", "--set", "serve.parallel=true"), PARALLEL),
        (("chat", "layer-skip"), LAYERS),
        (("serve", "layer-skip", "--port", "0"), LAYERS),
        (("verify", "layer-skip"), LAYERS),
        (("vocab-trim", "layer-skip", "--out", "OUT"), LAYERS),
        (("train-draft", "--recipe", "kangaroo", "--dry-run"), "drafter kangaroo runs layers"),
        (
            ("train-draft", "--recipe", "propd", "--set", "serve.early_layer=2", "--dry-run"),
            "half-way",
        ),
    ],
)
def test_a_command_refuses_it_unread(
    words: tuple[str, ...], said: str, hybrid: Path, run: Run, tmp_path: Path
) -> None:
    out = str(tmp_path / "out")
    ran = run(*(out if word == "OUT" else word for word in words), "--target", hybrid)
    assert ran.code == 5, ran.err
    [line] = [line for line in ran.err.splitlines() if said in line]
    assert line.startswith("error[5]: ")
    assert "attention alone" in ran.err


def test_a_package_says_what_it_needs(
    hybrid: Path, run: Run, tmp_path: Path, target: Target
) -> None:
    """Its family, and how it is served."""
    lookup = families()["prompt-lookup"]
    drafter = lookup.build(lookup.options(), target.spec, None)
    early = {"policy": "propd", "early_layer": 2}
    for serve, said in (({"parallel": True}, PARALLEL), (early, "half-way")):
        folder, made = tmp_path / next(iter(serve)), {"acceptance": None, "command": ("test",)}
        save_package(drafter, target, folder, serve=serve, recipe_digest="", **made)
        ran = run("generate", "--target", hybrid, "--draft", folder, "def")
        assert (ran.code, said in ran.err) == (5, True), ran.err
