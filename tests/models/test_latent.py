"""Latent attention in rounds: the cache keeps latents, and nothing is expanded to heads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specctl.core.drafter import Drafter
from specctl.core.tree import DraftTree, NodeKind
from specctl.drafters.features.mtp import Mtp
from specctl.drafters.lm.small_lm import SmallLm
from specctl.models.hf import latent
from specctl.models.hf.hf_lm import HfLM
from specctl.models.hf.latent import LatentHeads
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.mtp_checkpoint import own_module
from specctl.runtime.target.target import Target
from specctl.train.run import train_draft
from specctl_testing.export.mtp_cases import checkpoint
from specctl_testing.models import build_model
from specctl_testing.runtime.twins import greedy_text, twins
from specctl_testing.train.small_runs import Talk, random_target, small_recipe, words

WIDTHS: dict[str, Any] = {  # no two alike, so that taking one for another shows
    "kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 10, "num_key_value_heads": 4, "head_dim": ...,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.8,
    "original_max_position_embeddings": 64,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v2": WIDTHS | EXPERTS | {"q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": WIDTHS | EXPERTS | {"rope_parameters": YARN},
    "minicpm3": WIDTHS,
    "youtu": WIDTHS,
}
CHUNK = 24  # of a prompt: more than is absorbed of these widths
VOCAB, NEW = 96, 20
PROMPTS = ((7, 8, 9, 7, 8), tuple(range(40, 70)), (11, 12, 13, 14) * 13)
TREE = (-1, -1, 0, 1, 2, 2)  # node indices; fed index = node index + 1
BOUND, WRONG = 1e-4, 1e-2  # of the standard deviation of logits


def tiny(kind: str, vocab: int = VOCAB) -> Any:
    fields = {name: value for name, value in KINDS[kind].items() if value is not ...}
    return build_model(kind, num_layers=3, vocab=vocab, **fields | {"head_dim": 4})


@pytest.fixture
def absorbed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens a row of every attention whose keys and values were not expanded."""
    widths, values = list[int](), LatentHeads.values

    def counted(self: LatentHeads, out_BHTE: Tensor) -> Tensor:
        widths.append(out_BHTE.shape[2])
        return values(self, out_BHTE)

    monkeypatch.setattr(LatentHeads, "values", counted)
    return widths


class Rounds:
    """Rows of three lengths in slots in another order: a padded prompt, then rounds of a tree."""

    def __init__(self, lm: HfLM, oracle: Any) -> None:
        self.lm, self.oracle = lm, oracle
        self.kv, self.slots = lm.new_kv(4, 64), (2, 0, 3)
        self.draw = torch.Generator().manual_seed(5)
        self.texts = [self.tokens(length) for length in (11, 4, 7)]
        ids = torch.tensor([text + self.tokens(14 - len(text)) for text in self.texts])
        self.forward(ids, torch.arange(14).expand(3, -1), torch.zeros(3, dtype=torch.long), None)

    def tokens(self, count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=self.draw).tolist()

    def forward(self, ids: Tensor, at: Tensor, kept_B: Tensor, tree: DraftTree | None) -> Tensor:
        width, span = ids.shape[1], int(kept_B.max()) + ids.shape[1]
        self.kv.begin(self.slots, torch.tensor(self.slots), kept_B, width, span)
        chain = self.lm.chain_masks(kept_B, width, span)
        masks = chain if tree is None else self.lm.tree_masks(tree, kept_B, span)
        out = self.lm.forward(ids, at, masks, self.kv).logits_BTV
        assert out is not None
        return out

    def round(self, paths: tuple[tuple[int, ...], ...]) -> float:
        """How far any logits are from a plain forward of the node's own path."""
        kept_B = torch.tensor([len(text) for text in self.texts])
        fed = torch.tensor([self.tokens(7) for _ in self.texts])
        parents = torch.tensor(TREE).expand(3, -1)
        ranks = torch.tensor([0, 1, 0, 0, 0, 1]).expand(3, -1)
        tree = DraftTree(fed[:, 1:], parents, ranks, parents >= -1, NodeKind.POINT, 3)
        found, worst = self.forward(fed, tree.position_BT(kept_B), kept_B, tree), 0.0
        for b, text in enumerate(self.texts):
            for t in range(7):
                path = [t]
                while path[0]:
                    path.insert(0, TREE[path[0] - 1] + 1)
                with torch.no_grad():
                    whole = self.oracle(input_ids=torch.tensor([text + fed[b, path].tolist()]))
                away = (found[b, t] - whole.logits[0, -1]).abs().max() / whole.logits[0, -1].std()
                worst = max(worst, float(away))
            self.texts[b] = text + fed[b, [t for t in paths[b] if t >= 0]].tolist()
        self.kv.keep(torch.tensor(self.slots), kept_B, torch.tensor(paths))
        return worst


@cache
def made(kind: str) -> tuple[Target, Any]:
    """A target, and its twin in transformers."""
    return twins(tiny(kind))


@cache
def said(kind: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
    return greedy_text(made(kind)[1], prompt, NEW)


@pytest.mark.parametrize("kind", KINDS)
def test_every_node_gets_the_logits_of_its_own_path(kind: str, absorbed: list[int]) -> None:
    target, oracle = made(kind)
    absorbed.clear()
    assert isinstance(target.lm, HfLM)
    rounds = Rounds(target.lm, oracle)
    paths = (0, -1, -1, -1), (0, 2, 4, -1), (0, 1, 3, 6)
    assert max(rounds.round(paths), rounds.round(paths[::-1]), rounds.round(paths)) < BOUND
    assert absorbed == [14] * 3 + [7] * 9


def drafter_of(kind: str) -> Drafter:
    """The target with other weights in its last layer: right often, and wrong often."""
    model = copy.deepcopy(made(kind)[1])
    with torch.no_grad():
        draw = torch.Generator().manual_seed(1)
        for weight in model.model.layers[-1].mlp.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=draw)
    return SmallLm.from_lm(HfLM(model), made(kind)[0].spec)


GROWN = ({"policy": "chain", "length": 4}, {"policy": "static-tree", "branch": (3, 2, 1)})


@pytest.mark.parametrize(
    ("kind", "policy"),
    [  # every kind, as a chain or as a tree; the others are proofs
        pytest.param(kind, policy, marks=[pytest.mark.proof] if (i + j) % 2 else [])
        for i, kind in enumerate(KINDS)
        for j, policy in enumerate(GROWN)
    ],
)
def test_greedy_text_is_that_of_transformers(
    kind: str, policy: dict[str, Any], absorbed: list[int]
) -> None:
    """In batches of one and three; one prompt takes three pieces, which are expanded."""
    greedy = Sampling(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
    requests, drafter = [Request(prompt, greedy) for prompt in PROMPTS], drafter_of(kind)
    absorbed.clear()
    for slots in (1, 3):
        engine = Engine(
            made(kind)[0], drafter, make_policy(policy), num_slots=slots, prefill_chunk=CHUNK
        )
        done = engine.run(requests)
        assert [each.tokens for each in done] == [said(kind, prompt) for prompt in PROMPTS]
        taken = [each.stats.accepted / each.stats.rounds for each in done]
        assert min(taken) > 0.0  # some are accepted,
        assert min(taken) < 3.0  # and some are not
    assert absorbed
    assert max(absorbed) < CHUNK


def test_a_second_turn_reads_what_the_first_left() -> None:
    target, drafter = made("deepseek_v3")[0], drafter_of("deepseek_v3")
    engine = Engine(target, drafter, make_policy({"policy": "chain", "length": 4}), num_slots=1)
    engine.open(120)
    text, reused = PROMPTS[0], list[int]()
    for _ in range(2):
        request = Request(text, Sampling(0.0, max_new_tokens=NEW, ignore_eos=True), "ours")
        (done,) = engine.run([request], lambda row, new: reused.append(row.reused_len))
        assert done.tokens == said("deepseek_v3", text)
        text = (*text, *done.tokens, 3, 4)
    assert (reused[0], reused[-1]) == (0, len(PROMPTS[0]) + NEW - 1)


def without_rotary(self: LatentHeads, query_BHTE: Tensor) -> Tensor:
    right = QUERIES(self, query_BHTE)
    right[..., self.key_HEI.shape[2] :] = 0
    return right


def by_another_width(self: LatentHeads, query_BHTE: Tensor) -> Tensor:
    """As though scores were divided by the root of the latent's width, not of the head's."""
    right = QUERIES(self, query_BHTE)
    return right * (query_BHTE.shape[-1] / right.shape[-1]) ** 0.5


def plain_for_rotated(self: LatentHeads, query_BHTE: Tensor) -> Tensor:
    rotary = query_BHTE.shape[-1] - self.key_width
    return torch.cat([QUERIES(self, query_BHTE)[..., :-rotary], query_BHTE[..., :rotary]], dim=-1)


QUERIES = LatentHeads.queries


@pytest.mark.parametrize("wrong", [without_rotary, by_another_width, plain_for_rotated])
def test_a_wrong_form_is_found_on_loading_and_not_used(
    wrong: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch, absorbed: list[int]
) -> None:
    model, oracle = tiny("deepseek_v3"), made("deepseek_v3")[1]
    paths = ((0, 1, 3, 6),) * 3
    monkeypatch.setattr(LatentHeads, "queries", wrong)
    with pytest.warns(UserWarning, match=r"slower rounds.*DeepseekV3ForCausalLM"):
        lm = HfLM(model)
    absorbed.clear()
    assert Rounds(lm, oracle).round(paths) < BOUND
    assert not absorbed
    lm._absorbs = True
    assert Rounds(lm, oracle).round(paths) > WRONG


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_keeps_the_latent_and_the_rotated_key(dtype: torch.dtype) -> None:
    lm = HfLM(tiny("deepseek_v3").to(dtype))
    kv = lm.new_kv(2, 10)
    stores = (*kv.key_ZJLE, *kv.value_ZJLE)
    size = sum(store.numel() * store.element_size() for store in stores)
    assert size == 2 * 10 * lm.spec.num_layers * (16 + 4) * dtype.itemsize


def test_transformers_own_forward_is_as_it_was(absorbed: list[int]) -> None:
    """The method of the class steps aside only while a forward of ours runs."""
    target, oracle = made("deepseek_v3")
    ids = torch.tensor([PROMPTS[1]])
    absorbed.clear()
    with torch.no_grad():
        cached = oracle(input_ids=ids, use_cache=True)
        plain = oracle(input_ids=ids, use_cache=False)
    assert torch.equal(cached.logits, plain.logits)
    at = torch.arange(ids.shape[1])[None]
    found = target.lm.dense(ids, at, target.lm.document_masks(torch.zeros_like(ids)))
    torch.testing.assert_close(found.logits_BTV, plain.logits, atol=1e-4, rtol=1e-4)
    assert not absorbed


@pytest.mark.parametrize("way", ["hook", "bias", "another kind"])
def test_what_is_added_to_a_projection_is_not_left_out(way: str, absorbed: list[int]) -> None:
    model = tiny("deepseek_v3")
    for layer in model.model.layers:
        up, part = layer.self_attn.kv_b_proj, layer.self_attn
        if way == "hook":
            up.register_forward_hook(lambda module, args, out: out * 1.5)
        elif way == "bias":
            up.bias = nn.Parameter(torch.randn(up.weight.shape[0]))
        else:
            part.kv_b_proj = nn.Sequential(up, nn.Tanh())
    oracle = copy.deepcopy(model)
    oracle.set_attn_implementation("eager")
    assert Rounds(HfLM(model), oracle).round(((0, 1, 3, 6),) * 3) < BOUND
    assert not absorbed


def test_the_widths_decide_how_many_tokens_are_absorbed() -> None:
    """DeepSeek-V3: 512 (128 + 128) products saved a position and head, 832 - 0 more a token."""
    module = nn.Module()
    for name, width in {
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    }.items():  # fmt: skip
        setattr(module, name, width)
    assert 157 < latent._most_fed(module) < 158
    module.kv_lora_rank = 64  # a latent narrower than a head: always
    assert latent._most_fed(module) == float("inf")


def test_eagle3_is_trained_for_it_and_drafts(tmp_path: Path, absorbed: list[int]) -> None:
    tokenizer, left = random_target(0).tokenizer, list[Drafter]()
    model = tiny("deepseek_v3", vocab=len(tokenizer))
    oracle = copy.deepcopy(model)
    target = Target.from_model(model, tokenizer)
    recipe = small_recipe("eagle3", words(tmp_path), **{"train.steps": 2, "data.prompts": 12})
    train_draft(
        recipe, tmp_path / "run", target=target, reporter=Talk(),
        package=lambda drafter, *_: left.append(drafter),
    )  # fmt: skip
    check_text(target, left[0], oracle, absorbed)


def test_its_own_module_drafts_by_latents(tmp_path: Path, absorbed: list[int]) -> None:
    """Multi-token prediction of DeepSeek-V3, whose module has a cache of latents as well."""
    target, _ = checkpoint("deepseek_v3", tmp_path)
    drafter = own_module(target)
    assert isinstance(drafter, Mtp)
    kept = drafter.module.shape.kv
    assert (kept.key_heads, kept.key_width, kept.value_width) == (1, 16, 8)
    oracle = copy.deepcopy(target.lm.module)
    in_module = check_text(target, drafter, oracle, absorbed)
    assert in_module > target.spec.num_layers  # attentions a round: the target's and the module's


def check_text(target: Target, drafter: Drafter, oracle: Any, absorbed: list[int]) -> float:
    """Greedy text with that drafter; the absorbed attentions of a round."""
    oracle.set_attn_implementation("eager")
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    how = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = oracle.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, 6:]
    greedy = Sampling(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
    absorbed.clear()
    policy = make_policy({"policy": "chain", "length": 3})
    (done,) = Engine(target, drafter, policy).run([Request(ids[0].tolist(), greedy)])
    assert done.tokens == tuple(wanted.tolist())
    return len(absorbed) / done.stats.rounds
