"""Where first weights come from: nothing, the target, a package, a run, another shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import specctl.recipes
from specctl.core.drafter import Drafter
from specctl.core.errors import IncompatibleError, RecipeError
from specctl.core.vocab import VocabMap
from specctl.drafters import families
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions, options_of
from specctl.drafters.lm.staged import Staged
from specctl.models.llama.fast_llama import fast_llama_from_hf
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import Recipe
from specctl.runtime.target.target import Target
from specctl.train.init.initial import (
    Initial,
    check_fit,
    checkpoint_drafter,
    completed,
    initial_of,
    initialise,
    tensors_digest,
)
from specctl.train.planning.plan import plan
from specctl.train.prune.cut import prunable, spread_layers
from specctl.train.run import train_draft
from specctl.train.saving.checkpoint import Checkpoints
from specctl_testing.train.of_recipe import drafter_of

SMALL = {
    "data.text_tokens": 0, "data.prompts": 16, "data.new_tokens": 12, "data.prompt_tokens": 8,
    "train.steps": 4, "train.rows": 4, "train.seq_len": 32, "train.save_every": 2,
    "train.tau_every": 4, "train.tau_prompts": 2, "train.tau_tokens": 6, "train.log_every": 2,
    "drafter.options.layers": 2, "drafter.init": "null", "vocab.size": "null",
}  # fmt: skip


def small_recipe(text: Path, **sets: Any) -> Recipe:
    fields = SMALL | {"data.source": str(text), "data.format": "text"}
    fields |= {key.replace("__", "."): value for key, value in sets.items()}
    return load_recipe("distill", sets=[f"{key}={value}" for key, value in fields.items()])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n\n".join(f"def name_{i}(x):\n    return x + {i}\n" for i in range(200)))
    return path


@pytest.fixture(scope="module")
def target() -> Target:
    folder = Path(specctl.recipes.__path__[0]) / "tiny"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, intermediate_size=32, max_position_embeddings=128,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    return Target.from_model(LlamaForCausalLM(config), tokenizer)


def start(recipe: Recipe, out: Path, target: Target, **fields: Any) -> dict[str, Tensor]:
    """The drafter's tensors before its first step."""
    found: dict[str, Tensor] = {}

    def snoop(job: Any, progress: Any) -> Any:
        found.update({n: t.detach().clone() for n, t in job.drafter.tensors().items()})
        raise KeyboardInterrupt

    patch = pytest.MonkeyPatch()
    patch.setattr("specctl.train.run.train", snoop)
    with patch.context(), pytest.raises(KeyboardInterrupt):
        train_draft(recipe, out, target=target, **fields)
    patch.undo()
    return found


def test_layers_are_spread_evenly_with_the_first_and_the_last() -> None:
    assert spread_layers(8, 8) == tuple(range(8))
    assert spread_layers(8, 2) == (0, 7)
    assert spread_layers(9, 3) == (0, 4, 8)
    assert spread_layers(8, 1) == (0,)


def test_a_drafter_cut_from_the_target_has_its_weights_and_sizes(
    target: Target, text: Path, tmp_path: Path
) -> None:
    recipe = small_recipe(text, drafter__init="target", vocab__size=2048)
    found = start(recipe, tmp_path, target)
    module = target.lm.module
    theirs = module.state_dict()
    assert torch.equal(found["model.embed_tokens.weight"], theirs["model.embed_tokens.weight"])
    assert torch.equal(found["model.norm.weight"], theirs["model.norm.weight"])
    for new, old in enumerate((0, 2)):
        for name in ("self_attn.q_proj", "mlp.down_proj", "input_layernorm"):
            ours = found[f"model.layers.{new}.{name}.weight"]
            assert torch.equal(ours, theirs[f"model.layers.{old}.{name}.weight"])
    assert found["lm_head.weight"].shape == (2048, 16)
    rows = {tuple(row) for row in theirs["lm_head.weight"].tolist()}
    assert {tuple(row) for row in found["lm_head.weight"].tolist()} <= rows


def test_a_narrower_drafter_keeps_the_loudest_part_of_the_target(
    target: Target, text: Path, tmp_path: Path
) -> None:
    sizes = {"drafter.options.width": 12, "drafter.options.intermediate": 20}
    heads = {"drafter.options.heads": 1, "vocab.size": "null"}
    recipe = small_recipe(text, drafter__init="target", **sizes, **heads)
    found = start(recipe, tmp_path, target)
    embedding_VD = target.lm.module.model.embed_tokens.weight
    theirs = {tuple(column) for column in embedding_VD.T.tolist()}
    ours = {tuple(column) for column in found["model.embed_tokens.weight"].T.tolist()}
    assert len(ours) == 12
    assert ours < theirs
    assert found["model.layers.1.mlp.gate_proj.weight"].shape == (20, 12)
    assert found["model.layers.1.self_attn.q_proj.weight"].shape == (8, 12)
    assert found["model.layers.1.self_attn.k_proj.weight"].shape == (8, 12)


def test_from_layers_chooses_the_layers(target: Target, text: Path, tmp_path: Path) -> None:
    recipe = small_recipe(text, drafter__init="target", **{"drafter.options.from_layers": "[1, 2]"})
    found = start(recipe, tmp_path, target)
    theirs = target.lm.module.state_dict()
    name = "self_attn.q_proj.weight"
    assert torch.equal(found[f"model.layers.0.{name}"], theirs[f"model.layers.1.{name}"])


def test_what_cannot_be_cut_is_refused_with_the_option(
    make_target: Any, target: Target, text: Path, tmp_path: Path
) -> None:
    deep = small_recipe(text, drafter__init="target", **{"drafter.options.layers": 9})
    with pytest.raises(RecipeError, match=r"drafter\.options\.layers"):
        train_draft(deep, tmp_path / "a", target=target)
    ignored = small_recipe(text, **{"drafter.options.from_layers": "[0, 1]"})
    with pytest.raises(RecipeError, match="from_layers is ignored"):
        initial_of(ignored.drafter, target, None)
    eagle = load_recipe("eagle3", sets=["drafter.init=target"])
    with pytest.raises(RecipeError, match="family eagle3 cannot be cut"):
        initial_of(eagle.drafter, target, None)
    recipe = small_recipe(text, drafter__init="target")
    with pytest.raises(IncompatibleError, match="GemmaForCausalLM"):
        initial_of(recipe.drafter, make_target("gemma"), None)


class Shelf:
    """A loader that has one drafter, whatever it is asked for."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter

    def __call__(self, name: str, target: Target) -> Drafter:
        return self.drafter


def drafter_for(target: Target, seed: int = 3, **options: Any) -> SmallLm:
    torch.manual_seed(seed)
    return SmallLm(SmallLmOptions(**{"layers": 2, **options}), target.spec)


def test_a_warm_start_is_exact_and_cut_where_the_recipe_trims(
    target: Target, text: Path, tmp_path: Path
) -> None:
    shelf = Shelf(drafter_for(target))
    found = start(small_recipe(text, drafter__init="x"), tmp_path / "a", target, load=shelf)
    assert tensors_digest(found) == tensors_digest(shelf.drafter.tensors())
    recipe = small_recipe(text, drafter__init="x", vocab__size=2048)
    cut = start(recipe, tmp_path / "b", target, load=shelf)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(cut[name], found[name])
    assert cut["lm_head.weight"].shape[0] == 2048


def test_a_trimmed_initial_drafter_keeps_its_vocabulary(
    target: Target, text: Path, tmp_path: Path
) -> None:
    kept = torch.arange(0, target.spec.vocab_size, 3)
    small = drafter_for(target).trimmed(VocabMap(kept, target.spec.vocab_size))
    recipe = small_recipe(text, drafter__init="x")
    found = start(recipe, tmp_path, target, load=Shelf(small))
    assert torch.equal(found["lm_head.weight"], small.tensors()["lm_head.weight"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"layers": 3}, r"drafter\.options\.layers=3"),
        (
            {"intermediate": 24},
            r"model\.layers\.0\.mlp\.down_proj.*drafter\.options\.intermediate=24",
        ),
        ({"rope_theta": 5e5}, r"rotary.*drafter\.options\.rope_theta=500000"),
        ({"tied": False}, r"lm_head\.weight.*drafter\.options\.tied=False"),
    ],
)
def test_a_mismatch_names_the_tensor_and_the_option(
    target: Target, text: Path, tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    shelf = Shelf(drafter_for(target, **options))
    with pytest.raises(IncompatibleError, match=named):
        train_draft(small_recipe(text, drafter__init="x"), tmp_path, target=target, load=shelf)


def test_a_resume_from_other_initial_weights_is_refused(
    target: Target, text: Path, tmp_path: Path
) -> None:
    recipe = small_recipe(text, drafter__init="x")
    train_draft(recipe, tmp_path, target=target, load=Shelf(drafter_for(target)))
    other = Shelf(drafter_for(target, seed=4))
    with pytest.raises(IncompatibleError, match="the same init as when the run began"):
        train_draft(recipe, tmp_path, target=target, load=other)
    result = train_draft(recipe, tmp_path, target=target, load=other, allow=["init"])
    assert result.steps == 4


def test_a_run_without_a_package_gives_its_best_checkpoint(
    target: Target, text: Path, tmp_path: Path
) -> None:
    first = small_recipe(text, vocab__size=2048, drafter__init="target")
    train_draft(first, tmp_path / "first", target=target)
    saved = Checkpoints(tmp_path / "first" / "checkpoints", _silent()).load(4)
    drafter = checkpoint_drafter(tmp_path / "first", target)
    assert tensors_digest(drafter.tensors()) == tensors_digest(saved.tensors["model"])
    sizes = {
        k: v for k, v in options_of(target.lm.module.shape, target.spec).items() if k != "layers"
    }
    again = small_recipe(
        text, drafter__init=str(tmp_path / "first"),
        **{f"drafter.options.{k}": "null" if v is None else v for k, v in sizes.items()},
    )  # fmt: skip
    found = start(again, tmp_path / "second", target)
    assert torch.equal(found["lm_head.weight"], saved.tensors["model"]["lm_head.weight"])


def test_a_plan_counts_the_drafter_that_will_be_cut(target: Target, text: Path) -> None:
    recipe = small_recipe(text, drafter__init="target", **{"drafter.options.tied": False})
    made = completed(recipe.drafter, target.spec, initial_of(recipe.drafter, target, None))
    whole = SmallLm(SmallLmOptions(**made.options), target.spec)
    assert plan(recipe, target.spec, flops_per_second=1e9).parameters == sum(
        t.numel() for t in whole.tensors().values()
    )


def _silent() -> Any:
    from specctl.runtime.measure.reporter import SilentReporter

    return SilentReporter()


def test_what_cannot_be_begun_is_refused_before_the_target_writes(
    make_model: Any, target: Target, text: Path, tmp_path: Path
) -> None:
    """Answers take hours; a target that cannot be cut, or a shape that cannot be, is told first."""
    gemma = Target.from_model(make_model("gemma2", num_layers=2, vocab=6144), target.tokenizer)
    cut = small_recipe(text, drafter__init="target")
    with pytest.raises(IncompatibleError, match="no drafter can be cut"):
        train_draft(cut, tmp_path / "gemma", target=gemma)
    other = small_recipe(text, drafter__init=tmp_path / "other", drafter__options__width=24)
    whole = SmallLm.from_lm(prunable(target), target.spec)
    with pytest.raises(IncompatibleError, match="do not fit") as caught:
        train_draft(other, tmp_path / "wide", target=target, load=lambda name, target: whole)
    assert "drafter.options.width=16" in caught.value.do
    foreign = SmallLm.from_lm(gemma.lm, target.spec)  # as of a folder that --draft takes
    with pytest.raises(IncompatibleError, match="not trained here"):
        train_draft(other, tmp_path / "far", target=target, load=lambda name, target: foreign)
    odd = small_recipe(text, drafter__options__heads=3, drafter__options__kv_heads=2)
    with pytest.raises(RecipeError):
        train_draft(odd, tmp_path / "odd", target=target)
    assert not list(tmp_path.rglob("data"))


def test_a_plan_refuses_a_target_that_no_drafter_can_be_cut_from(
    make_model: Any, text: Path, tmp_path: Path
) -> None:
    make_model("gemma2", num_layers=2).config.save_pretrained(tmp_path)
    recipe = small_recipe(text, drafter__init="target", target__name=str(tmp_path))
    with pytest.raises(IncompatibleError) as caught:
        plan(recipe, flops_per_second=1e10)
    assert "drafter.init=null" in caught.value.do
    fresh = small_recipe(text, drafter__init="null", target__name=str(tmp_path))
    assert plan(fresh, flops_per_second=1e10).parameters > 0


def test_weights_padded_to_another_vocabulary_size_are_cut_or_stretched_to_fit(
    make_model: Any, target: Target, text: Path
) -> None:
    """Only rows differ that no token of the tokenizer names."""
    size = target.spec.vocab_size
    for padded in (size + 16, size - 16):
        lm = fast_llama_from_hf(make_model(num_layers=2, vocab=padded))
        assert lm is not None
        source = Initial("small", SmallLm.from_lm(lm, target.spec), "")
        shape = {**options_of(lm.module.shape, target.spec), "tied": False}
        shape = {name: value for name, value in shape.items() if value is not None}
        recipe = small_recipe(text, drafter__options=shape)
        check_fit(recipe.drafter, target.spec, source)
        drafter = drafter_of(recipe, target.spec, source.drafter.vocab)
        initialise(drafter, source, None)  # type: ignore[arg-type]
        kept = min(padded, size)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            found, given = drafter.tensors()[name], dict(lm.module.named_parameters())[name]
            assert torch.equal(found[:kept], given[:kept])
        assert drafter.tensors()["model.embed_tokens.weight"].shape[0] == size
        assert drafter.tensors()["lm_head.weight"].shape[0] == kept  # a missing id is never drafted


def test_a_memory_beside_the_weights_is_not_asked_for(make_target: Any) -> None:
    """A staged drafter begins from a small-lm, and the other way round; n-grams stay behind."""
    spec = make_target(num_layers=2, vocab=24).spec
    for kinds in ((Staged, SmallLm), (SmallLm, Staged)):
        torch.manual_seed(0)
        drafter, source = (kind(families()[kind.family].options(), spec) for kind in kinds)
        nothing: Any = None  # what a slice of the target would look at
        initialise(drafter, Initial("source", source, ""), nothing)
        for name, weight in drafter.module.state_dict().items():
            assert torch.equal(weight, source.module.state_dict()[name])
