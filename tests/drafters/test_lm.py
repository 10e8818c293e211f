"""LeanLM and HfLM: both are the same function, with and without a cache, on chains and trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specctl.core.errors import IncompatibleError
from specctl.core.forward.masks import chain_mask, tree_mask
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Feed, LanguageModel, LmOut, Masks
from specctl.core.tree import DraftTree, NodeKind
from specctl.models.hf.hf_lm import HfLM
from specctl.models.llama.fast_llama import fast_llama_from_hf
from specctl_testing.drafters.lm_cases import difference, random_ids, whole

MakeModel = Callable[..., Any]
LEAN = ("llama", "mistral", "qwen2", "qwen3")
OTHERS = ("gemma", "gemma2", "gemma3_text", "gpt_neox", "phi", "phi3", "gpt2", "gpt_oss")
OTHERS += ("stablelm", "falcon")
TAPS = (0, 1, 3, 4)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def feed_chain(
    lm: LanguageModel, kv: SlotKV, ids_BT: Tensor, kept: tuple[int, ...], **fields: Any
) -> LmOut:
    """Feed T tokens to each of the first B slots, row b on top of kept[b] positions."""
    B, T = ids_BT.shape
    kept_B, span = torch.tensor(kept), max(kept) + T
    kv.begin(tuple(range(B)), torch.arange(B), kept_B, T, span)
    masks = Masks(
        chain_mask(kept_B, T, span), {w: chain_mask(kept_B, T, span, w) for w in lm.windows}
    )
    return lm.forward(ids_BT, kept_B[:, None] + torch.arange(T), masks, kv, **fields)


def feed_tree(
    lm: LanguageModel, kv: SlotKV, root_B: Tensor, tree: DraftTree, kept: tuple[int, ...]
) -> Tensor:
    """Logits at every fed token of a tree."""
    ids_BT, depth_BT = tree.fed_token_BT(root_B), tree.depth_BT()
    B, T = ids_BT.shape
    kept_B, span = torch.tensor(kept), max(kept) + T
    kv.begin(tuple(range(B)), torch.arange(B), kept_B, T, span)
    ancestor = tree.ancestor_BTT()
    windows = {w: tree_mask(kept_B, ancestor, span, w, depth_BT) for w in lm.windows}
    masks = Masks(tree_mask(kept_B, ancestor, span), windows)
    logits_BTV = lm.forward(ids_BT, kept_B[:, None] + depth_BT, masks, kv).logits_BTV
    assert logits_BTV is not None
    return logits_BTV


def branching_tree(num_rows: int) -> DraftTree:
    """Root - {0, 1}; 0 - {2, 3}; 1 - 4; 4 - 5."""
    parent_BN = torch.tensor([-1, -1, 0, 0, 1, 4]).expand(num_rows, 6)
    token_BN = random_ids(num_rows, 6)
    rank_BN = torch.tensor([0, 1, 0, 1, 0, 0]).expand(num_rows, 6)
    return DraftTree(token_BN, parent_BN, rank_BN, rank_BN >= 0, NodeKind.POINT, 3)


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_logits_at_one_token_per_row_are_those_of_the_whole_forward(
    make_model: MakeModel, model_type: str
) -> None:
    model = make_model(model_type)
    ids_BS = random_ids(3, 9)
    position_BS = torch.arange(9).expand(3, 9)
    for lm in (HfLM(model), fast_llama_from_hf(model)):
        if lm is None:
            continue
        masks = lm.document_masks(torch.zeros_like(ids_BS))
        logits_BSV = lm.dense(ids_BS, position_BS, masks).logits_BTV
        feed = Feed(ids_BS, position_BS, masks, only=(8, 3, 5))
        only_B1V = lm.run(feed, None).logits_BTV
        assert logits_BSV is not None
        assert only_B1V is not None
        wanted = logits_BSV[torch.arange(3), torch.tensor([8, 3, 5])]
        torch.testing.assert_close(only_B1V[:, 0], wanted, rtol=1e-4, atol=1e-4)


def use_exact_norms(model: Any) -> Any:
    """Replace transformers' RMSNorm, which always computes in float32, by torch's own."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model


@pytest.mark.parametrize("model_type", [*LEAN, *OTHERS])
def test_hf_lm_equals_a_plain_transformers_call(make_model: MakeModel, model_type: str) -> None:
    model = make_model(model_type)
    model.set_attn_implementation("eager")  # the only one with every model's soft caps and sinks
    ids = random_ids(2, 14)
    with torch.no_grad():
        plain = model(ids, output_hidden_states=True)
        ours = whole(HfLM(model), ids, taps=TAPS)
    oracle = LmOut(plain.logits, {k: plain.hidden_states[k] for k in TAPS})
    assert difference(ours, oracle) < 1e-4


@pytest.mark.parametrize("model_type", [*LEAN, *OTHERS])
def test_hf_lm_on_a_cache_equals_one_forward(make_model: MakeModel, model_type: str) -> None:
    lm = HfLM(make_model(model_type))
    ids, kv = random_ids(2, 14), lm.new_kv(2, 20)
    with torch.no_grad():
        oracle = whole(lm, ids, taps=TAPS).logits_BTV
    first = feed_chain(lm, kv, ids[:, :9], (0, 0)).logits_BTV
    second = feed_chain(lm, kv, ids[:, 9:], (9, 9)).logits_BTV
    assert first is not None
    assert second is not None
    torch.testing.assert_close(torch.cat([first, second], 1), oracle, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", LEAN)
def test_lean_equals_transformers_in_float64(make_model: MakeModel, model_type: str) -> None:
    model = make_model(model_type, dtype=torch.float64)
    lean = fast_llama_from_hf(model)
    assert lean is not None
    use_exact_norms(model)  # which replaces their forwards
    ids = random_ids(2, 14)
    with torch.no_grad():
        assert difference(whole(lean, ids, taps=TAPS), whole(HfLM(model), ids, taps=TAPS)) < 1e-9


@pytest.mark.parametrize(
    "fields",
    [
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"head_dim": 16},
        {"rope_parameters": LLAMA3_ROPE},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
    ],
)
def test_lean_equals_transformers_for_every_switch(
    make_model: MakeModel, fields: dict[str, Any]
) -> None:
    model = make_model("llama", **fields)
    lean = fast_llama_from_hf(model)
    assert lean is not None
    ids = random_ids(2, 14)
    with torch.no_grad():
        assert difference(whole(lean, ids, taps=TAPS), whole(HfLM(model), ids, taps=TAPS)) < 1e-4


@pytest.mark.parametrize("model_type", [*LEAN, "gemma2", "gemma3_text", "gpt_neox", "phi"])
def test_a_tree_equals_each_of_its_paths(make_model: MakeModel, model_type: str) -> None:
    model = make_model(model_type)
    lm = fast_llama_from_hf(model) or HfLM(model)
    kept, kv = (9, 5), lm.new_kv(2, 20)
    ids, tree = random_ids(2, 10), branching_tree(2)
    feed_chain(lm, kv, ids[:, :9], (0, 0))
    root_B = torch.stack([ids[b, kept[b]] for b in range(2)])
    found = feed_tree(lm, kv, root_B, tree, kept)
    for b in range(2):
        for path in ([0, 1, 3], [0, 1, 4], [0, 2, 5, 6]):  # fed indices
            tokens = torch.cat([ids[b, : kept[b]], tree.fed_token_BT(root_B)[b, path]])
            with torch.no_grad():
                oracle = whole(lm, tokens[None]).logits_BTV
            assert oracle is not None
            torch.testing.assert_close(found[b, path], oracle[0, kept[b] :], atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma2"])
def test_kept_path_continues_as_if_it_had_been_fed_alone(
    make_model: MakeModel, model_type: str
) -> None:
    model = make_model(model_type)
    lm = fast_llama_from_hf(model) or HfLM(model)
    ids, tree, kv = random_ids(1, 9), branching_tree(1), lm.new_kv(1, 24)
    feed_chain(lm, kv, ids[:, :8], (0,))
    feed_tree(lm, kv, ids[:, 8], tree, (8,))
    kv.keep(torch.tensor([0]), torch.tensor([8]), torch.tensor([[0, 2, 5, 6]]))
    after = feed_chain(lm, kv, random_ids(1, 2), (12,)).logits_BTV
    kept = tree.fed_token_BT(ids[:, 8])[:, [0, 2, 5, 6]]
    with torch.no_grad():
        oracle = whole(lm, torch.cat([ids[:, :8], kept, random_ids(1, 2)], 1)).logits_BTV
    assert after is not None
    assert oracle is not None
    torch.testing.assert_close(after, oracle[:, -2:], atol=5e-5, rtol=1e-4)


def test_window_shorter_than_the_context_changes_the_logits(make_model: MakeModel) -> None:
    model, ids = make_model("mistral"), random_ids(1, 14)
    logits = []
    for window in (6, 99):
        model.config.sliding_window = window
        lm = fast_llama_from_hf(model)
        assert lm is not None
        assert lm.windows == (window,)
        with torch.no_grad():
            logits.append(whole(lm, ids).logits_BTV)
    narrow, wide = logits
    assert narrow is not None
    assert wide is not None
    assert torch.allclose(narrow[:, :6], wide[:, :6], atol=1e-5)
    assert not torch.allclose(narrow[:, 6:], wide[:, 6:], atol=1e-2)


def test_lean_shares_the_parameters_of_transformers(make_model: MakeModel) -> None:
    model = make_model("llama")
    lean = fast_llama_from_hf(model)
    assert lean is not None
    theirs = dict(model.named_parameters())
    assert all(p is theirs[name] for name, p in lean.module.named_parameters())
    assert set(lean.module.state_dict()) == set(model.state_dict())


def test_rotary_frequencies_survive_a_cast_to_bfloat16(make_model: MakeModel) -> None:
    lean = fast_llama_from_hf(make_model("llama", dtype=torch.bfloat16))
    assert lean is not None
    exact = 1.0 / (10000.0 ** (torch.arange(0, 8, 2) / 8))
    torch.testing.assert_close(lean.module.rotary.inv_freq, exact, atol=0, rtol=1e-6)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("gemma", {}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"hidden_act": "gelu"}),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        ),
    ],
)
def test_what_lean_cannot_do_is_left_to_transformers(
    make_model: MakeModel, model_type: str, fields: dict[str, Any]
) -> None:
    assert fast_llama_from_hf(make_model(model_type, **fields)) is None


def test_a_recurrent_model_is_refused_by_name() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(IncompatibleError, match="MambaForCausalLM"):
        HfLM(MambaForCausalLM(config))


def test_an_untested_architecture_that_ignores_positions_is_refused() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=96, hidden_size=16, n_layer=1, n_head=2)
    with pytest.raises(IncompatibleError, match="BloomForCausalLM"):
        HfLM(BloomForCausalLM(config).eval())


def test_key_value_shape_is_learned_where_the_config_hides_it() -> None:
    from transformers import FalconConfig, FalconForCausalLM

    torch.manual_seed(0)
    config = FalconConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    lm = HfLM(FalconForCausalLM(config).eval())
    assert lm.spec.num_kv_heads == 1
    ids, kv = random_ids(1, 9), lm.new_kv(1, 9)
    found = feed_chain(lm, kv, ids, (0,)).logits_BTV
    with torch.no_grad():
        torch.testing.assert_close(found, whole(lm, ids).logits_BTV, atol=1e-5, rtol=1e-5)


def test_borrowed_pieces_are_the_models_own_storage(make_model: MakeModel) -> None:
    model = make_model("llama")
    lean = fast_llama_from_hf(model)
    assert lean is not None
    assert lean.borrowed().head_VD.data_ptr() == model.lm_head.weight.data_ptr()
    embedding = model.model.embed_tokens.weight
    assert lean.borrowed().embedding_VD.data_ptr() == embedding.data_ptr()


@pytest.mark.parametrize("model_type", ["gemma", "gemma2", "gemma3_text", "llama", "gpt_neox"])
def test_scaled_embedding_is_tap_zero(make_model: MakeModel, model_type: str) -> None:
    lm = HfLM(make_model(model_type))
    ids, pieces = random_ids(1, 5), lm.borrowed()
    with torch.no_grad():
        tap = whole(lm, ids, taps=(0,), logits=False).taps[0]
    scaled = pieces.embedding_VD[ids] * pieces.embed_scale
    torch.testing.assert_close(tap, scaled, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", ["gemma", "gemma3_text", "llama", "gpt_neox", "phi"])
def test_borrowed_head_on_the_last_tap_gives_the_logits(
    make_model: MakeModel, model_type: str
) -> None:
    model = make_model(model_type)
    lm = fast_llama_from_hf(model) or HfLM(model)
    pieces = lm.borrowed()
    with torch.no_grad():
        out = whole(lm, random_ids(1, 5), taps=(4,))
    product = out.taps[4] @ pieces.head_VD.T
    product = product if pieces.head_bias_V is None else product + pieces.head_bias_V
    assert out.logits_BTV is not None
    torch.testing.assert_close(out.logits_BTV, product, atol=1e-4, rtol=1e-4)
