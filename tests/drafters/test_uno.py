"""UNO: what its rows see and add, what a round is worth, and what peft makes of its factors."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.api.arguments.drafting import load_draft
from specctl.core.batch import TrainBatch
from specctl.core.errors import IncompatibleError, RecipeError
from specctl.core.forward.row_additions import RowAdditions
from specctl.core.language_model import Feed
from specctl.core.tree import NodeKind
from specctl.drafters.tokens.uno import Uno, UnoOptions
from specctl.models.hf.hf_lm import HfLM
from specctl.runtime.proof.enumerate import Case, enumerate_case
from specctl.runtime.target.target import Target
from specctl_testing.drafters.parallel_runs import decode

TEXT = [3, 1, 4, 1, 5, 9]


def made(target: Target, moved: float = 0.0, **options: Any) -> Uno:
    """`moved`: how far its additions are from none."""
    torch.manual_seed(0)
    drafter = Uno(UnoOptions(**options), target.spec, None)
    drafter.bind(target.borrowed())
    with torch.no_grad():
        for name, parameter in drafter.module.named_parameters():
            if name.endswith("up"):
                parameter.normal_(std=moved)
    return drafter


def logits(lm: Any, drafter: Uno, gate_T: Tensor | None) -> Tensor:
    """[T, V] of the text, with additions on the rows of the gate (None: without any)."""
    ids = torch.tensor([TEXT])
    added = () if gate_T is None else (RowAdditions(drafter.factors(), gate_T[None]),)
    masks = lm.document_masks(ids * 0)
    feed = Feed(ids, torch.arange(len(TEXT))[None], masks, added=added)
    with torch.no_grad():
        found: Tensor = lm.run(feed, None).logits_BTV
    return found[0]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_row_behind_a_shut_gate_is_the_targets_to_the_bit(make_model: Any, kind: str) -> None:
    """In both forwards, which agree on the open rows; rows in front of an open one never change."""
    model = make_model(kind, num_layers=2, vocab=24)
    target, own = Target.from_model(model), HfLM(model)
    drafter = made(target, moved=0.3)
    opens = torch.tensor([False, False, True, False, True, True])
    for lm in (target.lm, own):
        with torch.no_grad():
            plain = logits(lm, drafter, torch.zeros(6, dtype=torch.bool))
        mixed, every = logits(lm, drafter, opens), logits(lm, drafter, torch.ones_like(opens))
        assert torch.equal(mixed[:2], plain[:2])
        assert (mixed[2:] - plain[2:]).abs().amax(-1).min() > 1e-2, "keys and values of open rows"
        assert (every - mixed).abs().amax() > 1e-2
    torch.testing.assert_close(
        logits(target.lm, drafter, opens), logits(own, drafter, opens), rtol=1e-4, atol=1e-4
    )


def test_with_all_rows_open_it_is_what_peft_makes_of_the_factors(make_model: Any) -> None:
    peft = pytest.importorskip("peft", reason="peft, of the extra lora, is not installed")
    model = make_model("qwen3", num_layers=2, vocab=24)
    target = Target.from_model(model)
    drafter = made(target, moved=0.3, rank=4, alpha=12.0, targets=("q_proj", "o_proj", "down_proj"))
    ours = logits(target.lm, drafter, torch.ones(len(TEXT), dtype=torch.bool))
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=list(drafter.options.targets))
    wrapped = peft.get_peft_model(model, config)
    with torch.no_grad():
        for (layer, name), one in drafter.factors().items():
            part = wrapped.base_model.model.model.layers[layer]
            owner = part.mlp if name == "down_proj" else part.self_attn
            getattr(owner, name).lora_A["default"].weight.copy_(one.down)
            getattr(owner, name).lora_B["default"].weight.copy_(one.up)
        theirs = wrapped(torch.tensor([TEXT])).logits[0]
    wrapped.unload()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("policy", ["chain", "marginal-tree"])
def test_two_passes_emit_two_tokens_at_least_whatever_the_additions(
    make_target: Any, policy: str
) -> None:
    """The newest token's row is the target's own: greedily and at T = 1."""
    target = make_target("qwen3")
    drafter = made(target, moved=0.5, num_heads=4)
    plan = {"policy": policy, "length": 4, "slots": 2, "tokens": 24}
    ran = decode(target, drafter, **plan)
    assert ran.answers == decode(target, None, tokens=24).answers
    counts = [n for outcome in ran.outcomes[:-1] for n in outcome.num_accepted]
    assert min(counts) >= 1
    assert max(outcome.tree.num_nodes for outcome in ran.outcomes) >= 4


SHAPES = [("chain", NodeKind.IID, (-1, 0)), ("target-only", NodeKind.POINT, (-1, -1, 0))]


@pytest.mark.parametrize(("rule", "kind", "shape"), SHAPES, ids=["chain", "tree"])
@torch.no_grad()
def test_what_is_drafted_leaves_the_targets_distribution(
    make_target: Any, drive: Any, rule: str, kind: NodeKind, shape: tuple[int, ...]
) -> None:
    """Every draft and every coin, enumerated; q of the first token is p itself."""
    target, heat, prompt = make_target("llama", num_layers=2, vocab=4), 1.3, [1, 2, 3, 1]
    drafter, p, q = made(target, moved=0.5, num_heads=3), dict[Any, Any](), dict[Any, Any]()
    for path in (path for depth in range(3) for path in product(range(4), repeat=depth)):
        text = torch.tensor([[*prompt, *path]])
        masks, at = target.lm.document_masks(text * 0), torch.arange(text.shape[1])[None]
        row_V = target.lm.dense(text, at, masks).logits_BTV[0, -1]
        walked_NK = drive(target, drafter).chain_logits([*prompt, *path], len(prompt))
        p[path], q[path] = (
            (each.double() / heat).softmax(-1).numpy() for each in (row_V, walked_NK[-1])
        )
    assert abs(p[()] - q[()]).max() < 1e-6
    assert abs(p[1,] - q[1,]).max() > 1e-2
    assert enumerate_case(Case("uno", rule, kind, shape, p, q, 4)).error < 1e-12


def test_training_reads_noise_as_drafting_does_and_only_factors_learn(
    make_target: Any, make_batch: Any, drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of blocks behind anchors of a packed row; the noise that drafting has at a position."""
    target = make_target(num_layers=2, vocab=24)
    drafter = made(target, moved=0.3, num_heads=3, fresh_noise=False)
    batch = make_batch(target, drafter)
    anchor_BA = torch.tensor([[4, 12]]).expand(len(batch.ids_BS), -1)
    ready_BATD = drafter._read(batch, anchor_BA, drafter.lm)
    text = batch.ids_BS[0, :5].tolist()
    drafted_TK = drive(target, drafter).chain_logits([*text, 7, 7], 5)
    with torch.no_grad():
        torch.testing.assert_close(
            ready_BATD[0, 0] @ drafter.head_weight().T, drafted_TK, rtol=1e-4, atol=1e-4
        )
    assert all(n.endswith(("down", "up")) for n in drafter.trainable())


def test_stages_grow_and_their_noise_keeps_below_the_mask(
    make_target: Any, make_batch: Any
) -> None:
    target = make_target(num_layers=2, vocab=24)
    drafter = made(target, num_heads=5, stages=(1, 2, 4), mask_id=9)
    batch: TrainBatch = make_batch(target, drafter)
    for progress, count in ((0.0, 2), (0.5, 3), (0.99, 5)):
        metrics = drafter.loss(replace(batch, progress=progress)).metrics
        assert sum(name.startswith("alpha") for name in metrics) == count
        assert float(metrics["alpha"][0] / metrics["alpha"][1]) > 0.999
    drawn = drafter.noise(torch.zeros(4000, dtype=torch.long), is_fixed=False)
    assert sorted({*drawn.tolist()}) == list(range(1, 9))
    assert {*drafter.noise(torch.arange(4000), is_fixed=True).tolist()} == {*range(1, 9)}


def test_what_is_no_plan_and_what_has_no_such_matrices_are_refused(make_target: Any) -> None:
    with pytest.raises(RecipeError, match="stages grow"):
        UnoOptions(num_heads=5, stages=(2, 3))
    with pytest.raises(RecipeError, match="each named once"):
        UnoOptions(targets=("q_proj", "q_proj"))
    with pytest.raises(IncompatibleError, match=r"no place for additions.*do: choose pass"):
        made(make_target("gpt_neox"))
    with pytest.raises(IncompatibleError, match=r"q_proj none.*targets='\[o_proj, down_proj\]'"):
        made(make_target("phi3", num_layers=2, vocab=24))
    target = make_target(num_layers=2, vocab=24)
    with pytest.raises(RecipeError, match=r"expected: 2 to 24 .* mask_id: 24"):
        made(target, mask_id=99_999_999)
    for mask_id in (25, 99_999_999):  # the ids are the target's, also when it is set anew
        with pytest.raises(RecipeError, match="expected: 2 to 24"):
            load_draft(made(target), target, draft_options={"mask_id": mask_id})
    assert load_draft(made(target), target, draft_options={"mask_id": 24}).drafter is not None
    with pytest.raises(IncompatibleError, match="--dtype float32"):
        made(replace(target, lm=target.lm.in_bits("packed")))


def test_a_module_of_several_layers_takes_no_additions_and_hooks_go_with_the_forward(
    make_model: Any,
) -> None:
    model = make_model("qwen3", num_layers=2, vocab=24)
    target, lm = Target.from_model(model), HfLM(model)
    drafter = made(target, moved=0.3)
    with pytest.raises(RuntimeError):  # a gate of too few rows
        logits(lm, drafter, torch.ones(3, dtype=torch.bool))
    assert not any(part._forward_hooks for part in model.modules())
    model.model.layers[1].mlp = model.model.layers[0].mlp
    tied = HfLM(model)
    assert [tied.linear_at(layer, "up_proj") for layer in (0, 1)] == [None, None]
    assert tied.linear_at(1, "q_proj") is not None


def test_rows_of_noise_learn_and_the_newest_tokens_row_stays_exact(
    make_target: Any, make_batch: Any, train_a_little: Any
) -> None:
    target = make_target(num_layers=2, vocab=24)
    drafter, ahead = made(target, num_heads=3, loss="kl"), list[list[float]]()
    for steps in (0, 40):
        train_a_little(target, drafter, steps)
        torch.manual_seed(1)
        metrics = drafter.loss(make_batch(target, drafter)).metrics
        ahead.append([float(metrics[name][0] / metrics[name][1]) for name in ("alpha", "alpha/1")])
    assert ahead[0][0] > 0.999
    assert ahead[1][0] > 0.999
    assert ahead[1][1] > ahead[0][1] + 0.05
