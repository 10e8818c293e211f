"""Several modules for multi-token prediction: what they draft is what transformers' own modules
draft, and what was accepted or rejected before leaves no trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from specctl.core.drafter import Outcome
from specctl.core.errors import RecipeError
from specctl.core.tree import NodeKind, chain_tree
from specctl.drafters.features.mtp import Mtp, MtpOptions
from specctl.drafters.features.mtp_state import ModulesState
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.mtp_checkpoint import own_module
from specctl.runtime.target.target import Target
from specctl_testing.drafters.head_cases import make_heads
from specctl_testing.export.mtp_cases import Tensors, checkpoint

TEXT = [5, 17, 3, 40, 8, 21, 33, 2, 9, 14, 6, 27, 11, 30, 1, 41, 16]
AFTER = [12, 34, 7, 19]  # drafted only
KNOWN = 6
NUM = 3
Carried = tuple[Target, Tensors, Mtp]


@pytest.fixture(scope="module")
def carried(tmp_path_factory: Any) -> Carried:
    folder: Path = tmp_path_factory.mktemp("glm")
    target, tensors = checkpoint("glm4_moe", folder, modules=NUM)
    return target, tensors, own_module(target)


def of_three(target: Target, **options: Any) -> Mtp:
    """Llama layers, every module another."""
    drafter = make_heads(target, "mtp", modules=NUM, ttt_steps=5, **options)
    assert isinstance(drafter, Mtp)
    return drafter


@torch.no_grad()
def test_it_drafts_what_transformers_drafts(carried: Carried, features: Any, drive: Any) -> None:
    """Logits and greedy tokens of three modules, by `MtpModel`, which reads the same checkpoint."""
    target, _, drafter = carried
    model = AutoModelForCausalLM.from_pretrained(target.name, attn_implementation="eager")
    own = r"model\.layers\.[2-4]\..*"  # transformers lists the released depths only
    model._keys_to_ignore_on_load_unexpected = {own}
    theirs = MtpModel.from_pretrained(model).eval()
    state_TD = features(target, TEXT[: KNOWN - 1], (drafter.tap,))[drafter.tap]
    ids_1T, at_1T = torch.tensor([TEXT[1:KNOWN]]), torch.arange(1, KNOWN)[None]
    cache = MtpCache(config=model.config.get_mtp_config())
    tokens, said_1NV, _ = theirs(ids_1T, state_TD[None], None, at_1T, cache)
    drafted = tokens[0].tolist()
    ours_NV = drive(target, drafter).chain_logits([*TEXT[:KNOWN], *drafted[:-1]], KNOWN)
    torch.testing.assert_close(ours_NV, said_1NV[0], rtol=1e-4, atol=1e-4)
    assert ours_NV.argmax(-1).tolist() == drafted


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: Any) -> Mtp:
    """Three modules that see five tokens, with attention sinks."""
    target, _ = checkpoint("mimo_v2_flash", tmp_path_factory.mktemp("mimo"), modules=NUM)
    return own_module(target)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["own", "shared", "windows and sinks"])
def test_training_unrolls_what_is_drafted(
    kind: str, windowed: Mtp, make_target: Any, make_batch: Any, drive: Any
) -> None:
    """Each module, and the last one used twice again."""
    target = make_target()
    drafter = of_three(target, shared=kind == "shared")
    if kind == "windows and sinks":
        options = replace(windowed.options, ttt_steps=5)
        layers = windowed.module
        drafter = Mtp(options, target.spec)
        drafter.load_tensors(layers.state_dict())
        drafter.bind(target.borrowed())
    batch = make_batch(target, drafter, rows=1, seq_len=40)
    steps, known = drafter.unroll(batch), 10
    ids = batch.ids_BS[0, : known + 4].tolist()  # of the first document, longer than the window
    served = drive(target, drafter).chain_logits(ids, known)
    assert len(served) == len(steps) == 5
    for i, step in enumerate(steps):
        trained = step.ready_BSD[0, known - 2] @ drafter.head_weight().T
        torch.testing.assert_close(served[i], trained, rtol=1e-4, atol=1e-4)


def test_every_depth_teaches_the_modules_before_it(make_target: Any, make_batch: Any) -> None:
    """The last depth's loss reaches the first module (eq. 21), as DeepSeek-V3 trains them."""
    target = make_target()
    drafter = of_three(target)
    batch = make_batch(target, drafter, rows=1, seq_len=24)
    steps = drafter.unroll(batch)
    steps[NUM - 1].ready_BSD.square().sum().backward()
    weights = [layer.self_attn.o_proj.weight for layer in drafter.module.layers]
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in weights)


def outcome_of(view: Any, drafted: list[int], accepted: int, taps: Any) -> Outcome:
    """A round that drafted that chain, of which so many tokens were right."""
    at = len(view.tokens[0])
    tokens = torch.tensor([drafted])
    tree = chain_tree(tokens, torch.ones_like(tokens, dtype=torch.bool), NodeKind.POINT)
    new = TEXT[at : at + accepted + 1]
    path, taken = torch.arange(accepted + 1)[None], slice(at - 1, at + accepted)
    mine = {tap: value[None, taken] for tap, value in taps.items()}
    return Outcome(
        view, tree, path, (accepted,), torch.tensor(new[-1:]), (tuple(new),), (None,), mine
    )


@torch.no_grad()
@pytest.mark.parametrize("start", [1, 2, 5])
def test_a_history_of_rejections_leaves_no_trace(
    start: int, make_target: Any, features: Any, drive: Any, round_view: Any
) -> None:
    """After drafts of which 0, 2, 1, 3 and 0 tokens were right, and a round without a draft, every
    module and the last one used again say what they say when the text is read at once."""
    target = make_target()
    drafter = of_three(target)
    hand = drive(target, drafter)
    taps = features(target, TEXT, (drafter.tap,))
    state = hand.open()
    assert isinstance(state, ModulesState)
    hand.start(state, 0, TEXT[:start])
    known = start
    for accepted in (0, 2, None, 1, 3, 0):
        view = round_view({0: TEXT[:known]})
        drafted = [*TEXT[known : known + (accepted or 0)], *(45, 46, 47, 44)[accepted or 0 :]]
        if accepted is not None:
            chained(state, view, drafted)
        state.observe(outcome_of(view, drafted, accepted or 0, taps))
        known += (accepted or 0) + 1
        said = chained(state, round_view({0: TEXT[:known]}), AFTER)
        fresh = hand.chain_logits([*TEXT[:known], *AFTER], known)
        torch.testing.assert_close(said, fresh, rtol=1e-4, atol=1e-5)


def chained(state: Any, view: Any, tokens: list[int]) -> Tensor:
    """Logits of the root and behind each of these tokens."""
    said = [state.root(view)[0]]
    for step, token in enumerate(tokens):
        said.append(state.expand(torch.tensor([[token]]), torch.tensor([[step - 1]]))[0, 0])
    return torch.stack(said)


@torch.no_grad()
@pytest.mark.parametrize("known", [1, 2, 6])
def test_a_branch_says_what_a_chain_says(
    known: int, make_target: Any, drive: Any, round_view: Any
) -> None:
    """Siblings and their children, also behind texts too short for the later modules."""
    target = make_target()
    drafter = of_three(target)
    hand = drive(target, drafter)
    state = hand.open()
    hand.start(state, 0, TEXT[:known])
    state.root(round_view({0: TEXT[:known]}))
    state.expand(torch.tensor([[12, 34]]), torch.tensor([[-1, -1]]))
    state.expand(torch.tensor([[7, 19]]), torch.tensor([[1, 0]]))  # below 34, below 12
    deep = state.expand(torch.tensor([[8, 4]]), torch.tensor([[2, 3]]))[0]
    for branch, said in (([34, 7, 8], deep[0]), ([12, 19, 4], deep[1])):
        alone = hand.chain_logits([*TEXT[:known], *branch], known)
        torch.testing.assert_close(said, alone[-1], rtol=1e-4, atol=1e-5)


def test_drafting_changes_no_text_and_batches_draft_alike(carried: Carried) -> None:
    """Three rows at once, chains and trees, from a target's own modules."""
    target, _, drafter = carried
    prompts = [TEXT[:4], TEXT[:7], [11]]
    sampling = Sampling(max_new_tokens=10, ignore_eos=True)
    plain = generate(target, prompts, sampling=sampling, batch=3)
    for policy in ({"policy": "chain", "length": 4}, {"policy": "dynamic-tree", "nodes": 6}):
        drawn = generate(
            target, prompts, drafter=drafter, sampling=sampling, policy=make_policy(policy), batch=3
        )
        assert [one.token_ids for one in drawn.outputs] == [one.token_ids for one in plain.outputs]


def test_modules_that_would_learn_nothing_are_refused() -> None:
    with pytest.raises(RecipeError, match="fewer steps are unrolled"):
        MtpOptions(modules=4)
