"""An inflated target lends its layers: whoever runs them drafts what it drafts for the base."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core import language_model
from specctl.core.drafter import Drafter
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.language_model import Feed
from specctl.drafters import family
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants import inflate as module
from specctl.runtime.target.variants.inflate import InflatedLM, Size, inflate
from specctl_testing.drafters.parallel_runs import Ran, decode
from specctl_testing.models import with_weak_layers

LAYERS, LARGE, WIDTH = 6, 13, 32
PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6), (7,), (20, 2, 20), (8, 8))
CHAINS = (
    "layer-skip", "kangaroo", "eesd", "m2r2", "calm", "del", "depth-decay", "skip-layers", "swift",
    "easyspec", "s3d", "pass", "k-forcing", "quantspec", "uno", "jump",
)  # fmt: skip
TREES = ("layer-skip", "kangaroo", "m2r2", "hidden-transfer", "moa", "glide")
CASES = [*((name, "chain") for name in CHAINS), *((name, "dynamic-tree") for name in TREES)]
CASES += [("ppd", "direct")]
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"layers": 2} for name in ("layer-skip", "kangaroo", "eesd", "m2r2")},
    "moa": {"target_layers": 1},
    "quantspec": {"weight_bits": 16},
    "swift": {"window": 8, "every": 4},
}


@pytest.fixture(scope="module")
def targets(make_model: Any) -> tuple[Target, Target]:
    """Six layers, of which the upper ones add little, and the same within thirteen wider ones."""
    model = with_weak_layers(make_model("llama", num_layers=LAYERS, hidden=WIDTH, vocab=24))
    base = Target.from_model(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.SIZES, "1m", Size(1_000_000, 4 * WIDTH, LARGE))
        return base, inflate(base, "1m")


@pytest.fixture(autouse=True)
def exits_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_model, "LEAST_SAVED", 0.0)


def built(target: Target, name: str) -> Drafter:
    torch.manual_seed(5)
    method = family(name)
    drafter = method.build(method.options(**OPTIONS.get(name, {})), target.spec, None)
    drafter.bind(target.borrowed())
    return drafter


def drafts(ran: Ran) -> list[Any]:
    """What was drafted in each round, and how much of it was kept."""
    return [(o.tree.token_BN[o.tree.valid_BN].tolist(), o.num_accepted) for o in ran.outcomes]


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_drafts_and_texts_are_those_of_the_base(
    targets: tuple[Target, Target], name: str, policy: str
) -> None:
    base, large = (
        decode(
            target, built(target, name), PROMPTS, tokens=10, length=4, nodes=8, slots=3,
            policy=policy,
        )
        for target in targets
    )  # fmt: skip
    assert large.answers == base.answers
    assert drafts(large) == drafts(base)
    assert large.drafted > 0


def test_a_layer_stands_for_itself_and_the_identities_behind_it(
    targets: tuple[Target, Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together for all large layers, none twice: half of the layers cost half."""
    lm = targets[1].lm
    assert isinstance(lm, InflatedLM)
    ran = list[SubLayers]()
    run = type(lm.large).run

    def noted(self: Any, feed: Feed, kv: Any) -> Any:
        if not isinstance(self, InflatedLM) and feed.parts is not None:
            ran.append(feed.parts)
        return run(self, feed, kv)

    monkeypatch.setattr(type(lm.large), "run", noted)
    ids_11 = torch.zeros(1, 1, dtype=torch.long)
    for layer in range(LAYERS):
        for parts in (SubLayers((layer,), ()), SubLayers((), (layer,))):
            lm.run(Feed(ids_11, ids_11, lm.document_masks(ids_11), parts=parts), None)
    attention = [layer for parts in ran[::2] for layer in parts.attention]
    mlp = [layer for parts in ran[1::2] for layer in parts.mlp]
    assert attention == mlp == [*range(LARGE)]
    assert {len(parts.attention) for parts in ran[::2]} == {2, 3}
    assert not any(parts.mlp for parts in ran[::2])
    assert not any(parts.attention for parts in ran[1::2])


def test_a_copy_of_the_cache_is_as_large_as_what_it_copies(
    targets: tuple[Target, Target],
) -> None:
    """Of layers lent: all large layers that they stand for, and in the real ones what the target
    holds itself."""
    lm = targets[1].lm
    assert isinstance(lm, InflatedLM)
    whole, own = lm.new_kv(1, 8), lm.borrowed_kv((1, 5), 1, 8)
    at, zero = torch.arange(5)[None], torch.zeros(1, dtype=torch.long)
    for kv in (whole, own):
        kv.begin((0,), zero, zero, 5, 5, 0)
    masks = lm.chain_masks(zero, 5, 5)
    with torch.no_grad():
        taps = lm.run(Feed(at, at, masks, (1, 5)), whole).taps
        lm.write_kv(taps, at, own)
    sizes = [store.numel() for store in whole.key_ZJLE]
    lent = {2, 3, 10, 11, 12}
    assert [store.numel() for store in own.key_ZJLE] == [
        size if layer in lent else 0 for layer, size in enumerate(sizes)
    ]
    assert all(own.value_ZJLE[layer][:, :, :5].abs().sum() > 0 for layer in lent)
    for layer, large in ((1, 2), (5, 10)):
        for mine, theirs in zip(own.read(large), whole.read(large), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(lm.read_kv(layer, own), own.read(large), strict=True):
            assert torch.equal(mine, theirs[:, : lm.spec.num_kv_heads])


def test_what_verifying_from_an_exit_saves_is_counted_in_large_layers(
    targets: tuple[Target, Target],
) -> None:
    lm = targets[1].lm
    assert isinstance(lm, InflatedLM)
    assert lm._saved(2, 3) == lm.large._saved(4, 3) > targets[0].lm._saved(2, 3)
