"""Gemma-4 assistants: imported, they say what transformers' own say, and texts stay the target's.

The target scales its layers and gives each an input of its own, so that it lends no layers; the
text is longer than its window.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from specctl.core.drafter import Outcome, RoundSeconds, RoundView, Space
from specctl.core.errors import IncompatibleError
from specctl.drafters.features.shared_kv import ORDER, SharedKv, SharedKvOptions
from specctl.export.formats import export
from specctl.export.formats.gemma4_assistant import _rope as written_rope
from specctl.export.imports import import_published
from specctl.export.imports.gemma4_assistant import FULL
from specctl.export.imports.gemma4_assistant import _rope as read_rope
from specctl.export.package.folder import load_drafter, save_package
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.measure.cost_table import CostTable
from specctl.runtime.policies import make_policy
from specctl.runtime.policies.length import LengthChooser
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl_testing.export.gemma4 import (
    CLUSTERS,
    TOP,
    VOCAB,
    WINDOW,
    Change,
    assistant,
    gemma4_target,
    published,
    their_logits,
)
from specctl_testing.models import build_model

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
DRAFTED = [7, 11, 2]


@pytest.fixture(scope="module")
def target() -> Target:
    return gemma4_target(2)


@pytest.fixture(scope="module")
def whole_target() -> Target:
    """One whose layers all have keys and values of their own."""
    return gemma4_target(0)


def imported(model: Any, target: Target, tmp_path: Path, change: Change | None = None) -> SharedKv:
    folder, package = published(model, tmp_path / "assistant", change), tmp_path / "package"
    report = import_published(folder, target, package, command=["specctl"])
    assert (report.format, report.engine) == ("gemma4-assistant", "transformers 5")
    drafter = load_drafter(package, target)
    drafter.bind(target.borrowed())
    assert isinstance(drafter, SharedKv)
    return drafter


@torch.no_grad()
def our_logits(drafter: SharedKv, target: Target, is_shared: bool) -> Tensor:
    """[N + 1, V] of a state that reads the target's own cache, or makes a copy of what is there."""
    lm, num_read = target.lm, len(TEXT) - 1
    kv, slot_1 = lm.new_kv(1, 32), torch.zeros(1, dtype=torch.long)
    kv.begin((0,), slot_1, slot_1, num_read, num_read, 0)
    masks, at_1T = lm.chain_masks(slot_1, num_read, num_read), torch.arange(num_read)[None]
    out = lm.forward(torch.tensor([TEXT[:-1]]), at_1T, masks, kv, drafter.needs().taps)
    space = Space(1, 24, 6, target.device, target.dtype, target_kv=kv if is_shared else None)
    state = drafter.open(space)
    state.start(0, TEXT, {tap: value[0] for tap, value in out.taps.items()})
    root_1 = torch.tensor(TEXT[-1:])
    view = RoundView((0,), slot_1, root_1, slot_1 + num_read, (TEXT,))
    said = [state.root(view)[0]]
    for at, token in enumerate(DRAFTED):
        said.append(state.expand(torch.tensor([[token]]), torch.tensor([[at - 1]]))[0, 0])
    return torch.stack(said)


@pytest.mark.parametrize("is_ordered", [False, True], ids=["plain", "ordered"])
def test_an_assistant_says_what_transformers_says(
    is_ordered: bool, target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = assistant(monkeypatch, is_ordered)
    theirs_NV = their_logits(model, target, TEXT, DRAFTED)
    monkeypatch.undo()
    drafter = imported(model, target, tmp_path)
    assert drafter.reads == (0, 0, 1)  # the last of each kind with keys of its own
    for is_shared in (False, True):
        ours_NV = our_logits(drafter, target, is_shared)
        assert torch.equal(ours_NV == -torch.inf, theirs_NV == -torch.inf)
        assert int((ours_NV[0] > -torch.inf).sum()) == (
            TOP * VOCAB // CLUSTERS if is_ordered else VOCAB
        )
        torch.testing.assert_close(ours_NV, theirs_NV, rtol=1e-4, atol=1e-4)
    assert len(TEXT) - 1 > WINDOW + 1  # a window that hides nothing would prove nothing


@pytest.mark.parametrize("is_ordered", [False, True], ids=["plain", "ordered"])
def test_an_assistant_goes_back_bit_for_bit(
    is_ordered: bool, target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every tensor, in the order of the tokens within each cluster; and it is imported again."""
    model = assistant(monkeypatch, is_ordered)
    monkeypatch.undo()
    drafter = imported(model, target, tmp_path)
    export(tmp_path / "package", "gemma4-assistant", tmp_path / "back", target)
    there = load_file(tmp_path / "back" / "model.safetensors")
    here = load_file(tmp_path / "assistant" / "model.safetensors")
    assert there.keys() == here.keys()
    assert all(torch.equal(there[n], here[n]) and there[n].dtype == here[n].dtype for n in here)
    second = tmp_path / "second"
    second.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(tmp_path / "back" / name, second / name)
    import_published(second, target, tmp_path / "again", command=["specctl"])
    again = load_drafter(tmp_path / "again", target)
    assert again.options == drafter.options
    read = [
        AutoConfig.for_model(**json.loads((tmp_path / name / "config.json").read_text())).to_dict()
        for name in ("assistant", "back")
    ]
    ours, theirs = (one.pop("text_config") | one for one in read)
    other = {key for key in ours | theirs if ours.get(key) != theirs.get(key)}
    unread = set() if is_ordered else {"num_centroids", "centroid_intermediate_top_k"}
    assert other <= unread | {"max_position_embeddings"}, "the latter is the target's"


def test_a_trained_one_goes_out_where_an_assistant_can_be_so(
    whole_target: Target, tmp_path: Path
) -> None:
    """Clusters made here; layers that engines would show something else are refused."""
    ways: dict[str, Any] = {
        "layers": 2, "reads": (2, 3), "head_dims": (8, 16), "windows": (WINDOW, 0),
        "rope_thetas": (1e4, 1e6), "rotated": (0, 2), "head_groups": 6, "head_top": 2,
    }  # fmt: skip

    def packaged(name: str, **other: Any) -> SharedKv:
        drafter = SharedKv(SharedKvOptions(**(ways | other)), whole_target.spec)
        drafter.bind(whole_target.borrowed())
        save_package(
            drafter, whole_target, tmp_path / name,
            serve={"policy": "chain", "length": 2}, recipe_digest="", acceptance=None, command=[],
        )  # fmt: skip
        return drafter

    drafter = packaged("fit")
    export(tmp_path / "fit", "gemma4-assistant", tmp_path / "out", whole_target)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    ordering_GQ = tensors["masked_embedding.token_ordering"].view(6, -1)
    assert drafter.router is not None
    for group, ids_Q in enumerate(ordering_GQ):
        assert ids_Q.tolist() == (drafter.router.group_K == group).nonzero()[:, 0].tolist()
    refused: list[tuple[str, dict[str, Any]]] = [
        ("is shown other layers", {"reads": (0, 3)}),
        ("other parts of a text", {"windows": (0, WINDOW), "reads": (3, 2), "head_dims": (16, 8)}),
        ("not of one size", {"head_groups": 5}),
    ]
    for at, (why, other) in enumerate(refused):
        packaged(f"{at}", **other)
        with pytest.raises(IncompatibleError, match=why):
            export(tmp_path / f"{at}", "gemma4-assistant", tmp_path / "not", whole_target)
    assert not (tmp_path / "not").exists()


def test_a_package_that_keeps_no_order_of_its_tokens_is_read(
    whole_target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As those of before do not: the tokens of a cluster stand in the order of their ids."""
    options = SharedKvOptions(reads=(2, 2), rope_thetas=(1e4, 1e4), rotated=(0, 0), head_groups=6)
    drafter, every = SharedKv(options, whole_target.spec), SharedKv.tensors
    drafter.bind(whole_target.borrowed())
    with monkeypatch.context() as older:
        older.setattr(
            SharedKv, "tensors", lambda self: {n: x for n, x in every(self).items() if n != ORDER}
        )
        save_package(
            drafter, whole_target, tmp_path / "package",
            serve={"policy": "chain", "length": 2}, recipe_digest="", acceptance=None, command=[],
        )  # fmt: skip
    assert ORDER not in load_file(tmp_path / "package" / "model.safetensors")
    found, here = load_drafter(tmp_path / "package", whole_target).tensors(), drafter.tensors()
    assert found.keys() == here.keys()
    assert all(torch.equal(found[name], here[name]) for name in here)


@pytest.mark.parametrize("width", [44, 94, 98])
def test_as_many_pairs_turn_as_before(whole_target: Target, width: int) -> None:
    """Numbers of pairs whose share of a head is no binary fraction are not rounded down."""
    for num in range(1, width // 2 + 1):
        options = SharedKvOptions(
            layers=1, head_dims=(width,), rope_thetas=(1e6,), rotated=(num,), reads=(3,)
        )
        rope = written_rope(SharedKv(options, whole_target.spec), [FULL], FULL)
        assert read_rope({"rope_parameters": {FULL: rope}}, FULL, width) == (1e6, num)


def test_of_a_target_without_shared_layers_the_last_ones_are_read(
    whole_target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = assistant(monkeypatch, False)
    monkeypatch.undo()
    drafter = imported(model, whole_target, tmp_path)
    assert drafter.reads == (2, 2, 3)
    ours = [our_logits(drafter, whole_target, is_shared) for is_shared in (False, True)]
    torch.testing.assert_close(*ours, rtol=1e-4, atol=1e-4)


def test_it_shows_what_it_caches_and_lends_no_layers(target: Target, whole_target: Target) -> None:
    """Keys by `key_value` are the cached ones although a residual changes between layers; a layer
    that reads another's cache has none to show."""
    with pytest.raises(IncompatibleError, match="a residual that changes"):
        whole_target.lm.check_lending()
    whole_target.lm.check_showing((2, 3))
    with pytest.raises(IncompatibleError, match="read another layer's cache"):
        target.lm.check_showing((1, 2))


class Recorder(LengthChooser):
    """Drafts as long as the policy allows and keeps what the rounds did."""

    first_is_free = False

    def __init__(self) -> None:
        super().__init__(CostTable({0: 1.0}, {0: 1.0}, "", "", 1))
        self.outcomes: list[Outcome] = []

    def length(self, batch: int) -> int:
        return 9

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        self.outcomes.append(outcome)


def test_texts_are_the_targets_and_q_is_what_was_drawn_from(
    target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rows of several lengths in one batch. Tokens outside the clusters have no chance at all."""
    model = assistant(monkeypatch, True)
    monkeypatch.undo()
    drafter = imported(model, target, tmp_path)
    prompts = (TEXT, [7], TEXT[3:8])
    greedy = Sampling(max_new_tokens=10, ignore_eos=True)
    requests = [Request(tuple(prompt), greedy) for prompt in prompts]
    plain = [row.tokens for row in Engine(target, num_slots=3).run(requests)]
    for policy in ("chain", "dynamic-tree"):
        engine = Engine(target, drafter, make_policy({"policy": policy}), num_slots=3)
        assert [row.tokens for row in engine.run(requests)] == plain
    recorder = Recorder()
    engine = Engine(target, drafter, make_policy({"policy": "chain"}), chooser=recorder)
    engine.run([Request(tuple(TEXT), Sampling(0.7, seed=1, max_new_tokens=9, ignore_eos=True))])
    said_NV = our_logits(drafter, target, True)
    tree = recorder.outcomes[0].tree
    assert tree.q is not None
    q_TV = tree.q.dense(VOCAB)[0]
    torch.testing.assert_close(q_TV[0], (said_NV[0].float() / 0.7).softmax(-1))
    for at, token in enumerate(tree.token_BN[0].tolist()):
        assert q_TV[at, token] > 0
        assert int((q_TV[at] > 0).sum()) == TOP * VOCAB // CLUSTERS


def without(*path: str) -> Change:
    """A configuration that does not say this."""

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for key in path[:-1]:
            config = config[key]
        del config[path[-1]]

    return change


def saying(**fields: Any) -> Change:
    """A configuration of the layers that says something else."""
    return lambda config, tensors: config["text_config"].update(fields)


def other_order(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """One token in two clusters."""
    ordering = tensors["masked_embedding.token_ordering"]
    ordering[0] = ordering[1]


REFUSED = [
    (without("use_ordered_embeddings"), "no use_ordered_embeddings"),
    (without("num_centroids"), "num_centroids: None"),
    (without("backbone_hidden_size"), "backbone_hidden_size: None"),
    (without("tie_word_embeddings"), "tie_word_embeddings: None"),
    (without("text_config", "sliding_window"), "sliding_window: None"),
    (without("text_config", "per_layer_config"), "global_head_dim: None"),
    (without("text_config", "hidden_activation"), "no text_config.hidden_activation"),
    (without("text_config", "rope_parameters", "full_attention"), "no text_config.rope_param"),
    (saying(final_logit_softcapping=30.0), "final_logit_softcapping: 30.0"),
    (saying(layer_types=["sliding_attention"] * 2), "layer_types"),
    (saying(layer_types=["full_attention", *["sliding_attention"] * 2]), "a full one"),
    (saying(vocab_size=64), "vocab_size: 64"),
    (other_order, "token_ordering begins"),
    (lambda config, tensors: tensors.pop("model.layers.1.layer_scalar"), "layers.1.layer_scalar"),
]


def test_what_is_not_said_or_is_another_thing_is_refused(
    target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = assistant(monkeypatch, True)
    monkeypatch.undo()
    for at, (change, said) in enumerate(REFUSED):
        folder = published(model, tmp_path / f"{at}", change)
        with pytest.raises(IncompatibleError) as caught:
            import_published(folder, target, tmp_path / "out", command=["specctl"])
        assert said in str(caught.value)
    llama = Target.from_model(build_model(num_layers=2, vocab=VOCAB, rms_norm_eps=1e-6))
    folder = published(model, tmp_path / "whole")
    with pytest.raises(IncompatibleError, match="reads the cache of a Gemma 4"):
        import_published(folder, llama, tmp_path / "out", command=["specctl"])
    assert not (tmp_path / "out").exists()
