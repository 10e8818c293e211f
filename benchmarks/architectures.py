"""Which architectures of transformers can be targets: each one tiny, random and really tried.

    python benchmarks/architectures.py                          # the findings as a table
    python benchmarks/architectures.py falcon gpt_neo           # of some
    python benchmarks/architectures.py --write docs/targets.md  # into the document

`runs`: greedy answers of rows in one batch, with chain and tree drafts, are those of transformers'
`generate` (attention written out: not every kernel minds soft caps in every version), up to the end
of the context. `trained for`: rounds refuse it, but documents packed into rows are read as
transformers reads each alone, so that drafters can be trained for it and exported. `refused`:
neither; never a crash.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from specctl.core.errors import SpecctlError
from specctl.drafters import families
from specctl.runtime.generate import generate
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.checkpoint import check_causal
from specctl.runtime.target.target import Target

MOST = 4_000_000  # parameters of what still counts as tiny
CONTEXT = 48
PROMPTS = ((7, 8, 9, 7, 8, 9, 7, 8), (11, 12), tuple(range(50, 91)))
NEW_TOKENS = 8
BEGIN, END = "<!-- made by benchmarks/architectures.py -->", "<!-- end -->"

FIELDS: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": CONTEXT,
    "max_target_positions": CONTEXT,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "sliding_window": 6,
    "is_decoder": True,
    "encoder_layers": 1,
    "encoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_layers": 2,
    "decoder_ffn_dim": 64,
    "decoder_attention_heads": 4,
    "num_encoder_layers": 1,
    "num_encoder_attention_heads": 4,
    "num_decoder_layers": 2,
    "num_decoder_attention_heads": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "attention_chunk_size": 6,
    "rotary_dim": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
LATENT = {"head_dim": ..., "num_key_value_heads": 4}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# What one architecture needs beside or instead of that; ... leaves a field at its default.
OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 6},
    "gemma2": {"query_pre_attn_scalar": 8},
    "phi": {"partial_rotary_factor": 0.5},
    **dict.fromkeys(
        (
            "axk1",
            "axk2",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "minicpm3",
            "youtu",
        ),
        LATENT,
    ),
    **dict.fromkeys(
        (
            "camembert",
            "data2vec-text",
            "roberta",
            "roberta-prelayernorm",
            "xlm-roberta",
            "xlm-roberta-xl",
            "modernbert-decoder",
            "cwm",
            "whisper",
        ),
        IDS,
    ),
    **dict.fromkeys(
        (
            "afmoe",
            "cohere2",
            "cohere2_moe",
            "exaone4",
            "exaone_moe",
            "gemma3_text",
            "kolibri1",
            "ministral",
            "olmo3",
            "laguna",
            "mellum",
        ),
        MIXED,
    ),
    "bailing_hybrid": {**LATENT, "layer_types": ["linear_attention", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        **MIXED,
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), PLAIN_ROPE),
    },
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": CONTEXT,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {**LATENT, "layer_types": ["full_attention", "sliding_attention"]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_kv_shared_layers": 1,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "activation_sparsity_pattern": [0.0] * 3,
        "laurel_rank": 4,
    },
    "gemma4_text": {"num_kv_shared_layers": 0, **MIXED},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**LATENT, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {
        **LATENT,
        "head_dim": 8,
        "qk_head_dim": 16,
        "num_layers": 2,
        "num_hidden_layers": 4,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    "prophetnet": {"pad_token_id": 0, "num_decoder_layers": 2},
    "qwen4_exp_text": {
        **LINEAR,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 6},
    "reformer": {
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [16, 16],
        "attn_layers": ["local", "lsh"],
        "feed_forward_size": 64,
        "num_buckets": 4,
    },
    "roc_bert": {
        "pronunciation_vocab_size": 16,
        "shape_vocab_size": 16,
        "shape_embed_dim": 8,
        "pronunciation_embed_dim": 8,
    },
    "xlm": {
        "emb_dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "pad_token_id": 0,
        "n_words": 96,
        "causal": True,
    },
    "xlnet": {"d_head": 8, "d_inner": 64},
    "xlstm": {"num_heads": 2, "num_blocks": 2, "qk_dim_factor": 1.0},
    "xmod": {**IDS, "default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
    "qwen3_next": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR,
}


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bart, saved as a decoder": ("bart", {"is_encoder_decoder": False}),
    "mvp, saved as a decoder": ("mvp", {"is_encoder_decoder": False}),
    "whisper, saved as a decoder": ("whisper", {"is_encoder_decoder": False}),
    "falcon, ALiBi": ("falcon", {"alibi": True}),
    "opt, projected embedding": ("opt", {"word_embed_proj_dim": 16}),
    "bert, not a decoder": ("bert", {"is_decoder": False}),
    "gemma2, soft caps": (
        "gemma2",
        {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0},
    ),
    "qwen2, window": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    "gemma4_text, shared layers": ("gemma4_text", {"num_kv_shared_layers": 2, **GEMMA4}),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one architecture; `taps`: drafters may read its hidden states."""

    name: str
    verdict: str
    taps: bool = False
    why: str = ""


def names() -> list[str]:
    """Every architecture that transformers loads as a causal language model, and some variants."""
    return sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])


def kind_of(name: str) -> str:
    """The model type of an architecture or of a variant."""
    return VARIANTS[name][0] if name in VARIANTS else name


def tiny(name: str) -> Any | None:
    """A random model of that architecture, None where none so small can be made."""
    kind, more = VARIANTS.get(name, (name, {}))
    torch.manual_seed(0)
    try:
        config = _config(kind, more)
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if size > MOST:
            return None
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([PROMPTS[0]])).logits
            model.get_output_embeddings().weight.mul_(2.5 / logits.std())
    except Exception:  # it needs fields of its own, and whatever it raises means just that
        return None
    return model


def _config(kind: str, more: dict[str, Any]) -> Any:
    cls = type(AutoConfig.for_model(kind))
    known = set(inspect.signature(cls.__init__).parameters) | set(getattr(cls, "attribute_map", {}))
    for each in cls.__mro__:
        known |= set(getattr(each, "__annotations__", {}))
    fields = {k: v for k, v in FIELDS.items() if k in known} | OWN.get(kind, {}) | more
    return AutoConfig.for_model(kind, **{k: v for k, v in fields.items() if v is not ...})


def find(name: str) -> Finding:
    """Try one architecture. Anything but an answer or a refusal by name passes through."""
    model = tiny(name)
    if model is None:
        return Finding(name, "not tried", why="nothing tiny of it can be made here")
    oracle = copy.deepcopy(model)
    oracle.set_attn_implementation("eager")
    try:
        check_causal(_config(*VARIANTS.get(name, (name, {}))), name)
        target = Target.from_model(model)
    except SpecctlError as error:
        why = error.found or error.what
        cannot = why_unread(name, oracle)
        if cannot is not None:
            return Finding(name, "refused", why=why if cannot == why else f"{why}; {cannot}")
        return Finding(name, "trained for", why_unread(name, oracle, (1,)) is None, why)
    context = target.spec.max_positions  # a state space alone has none of its own
    wanted = [said(oracle, prompt, context) for prompt in PROMPTS]
    found = [answers(target, family) for family in ("prompt-lookup", "token-recycling")]
    assert all(each == wanted for each in found), f"{name}: {found} instead of {wanted}"
    try:
        tapped = answers(target, "medusa")
    except SpecctlError as error:
        return Finding(name, "runs", why=f"no drafters that read hidden states: {error.found}")
    assert tapped == wanted, f"{name} with taps: {tapped} instead of {wanted}"
    return Finding(name, "runs", taps=True)


def answers(target: Target, family: str) -> list[list[int]]:
    """Greedy answers to all prompts in one batch, with untrained drafts."""
    made = families()[family]
    drafter = made.build(made.options(), target.spec, None)
    if drafter.needs().borrow:
        drafter.bind(target.borrowed())
    sampling = Sampling(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    done = generate(target, PROMPTS, drafter=drafter, sampling=sampling, batch=len(PROMPTS))
    return [list(output.token_ids) for output in done.outputs]


def said(oracle: Any, prompt: tuple[int, ...], context: int = CONTEXT) -> list[int]:
    """What transformers says to one prompt."""
    most = min(NEW_TOKENS, context - len(prompt))
    ids = torch.tensor([prompt])
    whole = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=most,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    found: list[int] = whole[0, len(prompt) :].tolist()
    return found


def why_unread(name: str, oracle: Any, taps: tuple[int, ...] = ()) -> str | None:
    """Why training may not read it, with these hidden states; None where it may, and then reads
    documents packed into one row as each is alone."""
    documents = (PROMPTS[2][:9], PROMPTS[0])
    ids = torch.tensor([[i for document in documents for i in document]])
    position = torch.tensor([[i for document in documents for i in range(len(document))]])
    number = torch.tensor([[n for n, document in enumerate(documents) for _ in document]])
    try:
        check_causal(_config(*VARIANTS.get(name, (name, {}))), name, is_read_only=True)
        lm = Target.from_model(tiny(name), is_read_only=True).lm
        if taps:
            lm.borrowed()
        with torch.no_grad():
            packed = lm.dense(ids, position, lm.document_masks(number), taps).logits_BTV
            alone = [oracle(input_ids=torch.tensor([each])).logits[0] for each in documents]
    except SpecctlError as error:
        return error.found or error.what
    assert packed is not None
    torch.testing.assert_close(packed[0], torch.cat(alone), atol=2e-3, rtol=1e-3)
    return None


def table(findings: Iterable[Finding]) -> str:
    """The findings in Markdown."""
    rows = [
        f"| {each.name} | {each.verdict} | {'yes' if each.taps else ''} | {each.why} |"
        for each in findings
    ]
    kinds = "| Architecture | Verdict | Drafters may read hidden states | Why |"
    return "\n".join([kinds, "|---|---|---|---|", *rows])


def read_table(text: str) -> dict[str, Finding]:
    """The findings that a document holds, by name."""
    inside = text.split(BEGIN)[1].split(END)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in inside.splitlines()]
    cells = [row for row in rows if len(row) == 4][2:]
    return {name: Finding(name, verdict, taps == "yes", why) for name, verdict, taps, why in cells}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", type=Path, help="a document with the two marks in it")
    args = parser.parse_args()
    findings = [find(name) for name in args.names or names()]
    counts = dict.fromkeys(("runs", "trained for", "refused", "not tried"), 0)
    for each in findings:
        counts[each.verdict] += 1
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    made = f"transformers {transformers.__version__}: {told}.\n\n{table(findings)}"
    if args.write is None:
        print(made)
        return
    before, rest = args.write.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    args.write.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    main()
