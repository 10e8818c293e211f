"""llama.cpp on GGUF files of every shape and kind of tokenizer that the exporter writes.

Random drafts are exported, llama.cpp's server (built by llama_common.py) loads
each file, and what it computes is compared with the exporter's reference reader, which `check`
relies on: the log probabilities of the best tokens after a prompt, and the ids of probe texts
wherever the file claims to split text as the tokenizer does. It fails (exit 1) on a difference.

    python benchmarks/export_llama_shapes.py --llama-server PATH
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from llama_common import serving
from transformers import LlamaConfig, LlamaForCausalLM

from specctl.core.vocab import VocabMap
from specctl.drafters import families
from specctl.export.formats import export
from specctl.export.formats.gguf import FILE
from specctl.export.layouts.llama_cpp.reader import GgufReader
from specctl.export.layouts.llama_cpp.tokens import PROBES
from specctl.export.package.folder import save_package
from specctl.runtime.target.target import Target

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from specctl_testing.export.gguf_cases import LLAMA3, QWEN2, byte_tokenizer, piece_tokenizer

VOCAB, BEST, NEAR = 384, 20, 2e-5
SMALL = {"layers": 2, "width": 64, "head_dim": 32, "heads": 4, "kv_heads": 2, "intermediate": 96}
PLAIN = {"rope_type": "default", "rope_theta": 5000.0}
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, PLAIN),
    "llama, untied": ({"tied": False}, PLAIN),
    "llama, biases": ({"attention_bias": True, "output_bias": True}, PLAIN),
    "llama, llama3 positions": ({}, STRETCHED),
    "llama, linear positions": ({}, {**PLAIN, "rope_type": "linear", "factor": 4.0}),
    "llama, biases of Qwen2": ({"attention_bias": True}, PLAIN),
    "qwen3": ({"qk_norm": True}, PLAIN),
}


def tokenizers() -> dict[str, Any]:
    return {
        "gpt-2": byte_tokenizer(None),
        "starcoder": byte_tokenizer(None, digits=True),
        "llama-bpe": byte_tokenizer(LLAMA3, ignore_merges=True),
        "smaug-bpe": byte_tokenizer(LLAMA3),
        "qwen2": byte_tokenizer(QWEN2),
        "sentencepiece": piece_tokenizer("prepend"),
        "sentencepiece, no blank first": piece_tokenizer("replace"),
    }


def random_target(rope: dict[str, Any], tokenizer: Any) -> Target:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        rope_parameters=rope,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    made = Target.from_model(LlamaForCausalLM(config))
    return replace(made, tokenizer=tokenizer, eos_ids=(1,))


def random_export(target: Target, options: dict[str, Any], is_trimmed: bool, room: Path) -> Path:
    kept_K = torch.tensor([0, 1, *range(2, VOCAB, 3)]) if is_trimmed else None
    vocab = None if kept_K is None else VocabMap(kept_K, VOCAB)
    family = families()["small-lm"]
    torch.manual_seed(1)
    drafter = family.build(family.options(**SMALL | options), target.spec, vocab)
    assert drafter.module is not None
    for name, weight in drafter.module.named_parameters():
        weight.data.normal_(std=0.15)
        if name.endswith("norm.weight"):
            weight.data.add_(1.0)
    about: dict[str, Any] = {"serve": {}, "recipe_digest": "", "acceptance": None, "command": []}
    save_package(drafter, target, room / "package", **about)
    export(room / "package", "gguf", room / "out", target)
    return room / "out" / FILE


def asked(url: str, place: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/{place}", json.dumps(body).encode(), headers=headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def error_of_logits(url: str, reader: GgufReader) -> float:
    """The largest difference of a log probability among the engine's best tokens. A prompt whose
    next token is a single byte gets no answer yet; another one is asked."""
    random = torch.Generator().manual_seed(2)
    for _ in range(20):
        ids = torch.randint(3, VOCAB, (48,), generator=random).tolist()
        body = {"prompt": ids, "n_predict": 1, "temperature": 0.0, "n_probs": BEST}
        answer = asked(url, "completion", body | {"cache_prompt": False})
        if "completion_probabilities" in answer:
            break
    ours_V = reader.logits(torch.tensor(ids))[-1].log_softmax(-1)
    theirs = answer["completion_probabilities"][0]["top_logprobs"]
    assert len(theirs) == BEST, len(theirs)
    return max(abs(float(ours_V[entry["id"]]) - entry["logprob"]) for entry in theirs)


def wrong_texts(url: str, reader: GgufReader) -> int:
    wrong = 0
    for text in PROBES:
        theirs = asked(url, "tokenize", {"content": text, "add_special": False})["tokens"]
        wrong += theirs != reader.tokens.encode(text)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-server", required=True, metavar="PATH", help="see llama_common.py")
    args = parser.parse_args()
    cases = [(f"{n}{', trimmed' * t}", how, t, None) for n, how in SHAPES.items() for t in (0, 1)]
    cases += [(name, SHAPES["llama"], 0, made) for name, made in tokenizers().items()]
    is_right = True
    for name, (options, rope), is_trimmed, tokenizer in cases:
        target = random_target(rope, tokenizer or byte_tokenizer(LLAMA3))
        with tempfile.TemporaryDirectory() as room:
            file = random_export(target, options, bool(is_trimmed), Path(room))
            reader = GgufReader(file)
            with serving(args.llama_server, file, 1, 256, 1, cache="f32") as url:
                error, wrong = error_of_logits(url, reader), wrong_texts(url, reader)
        is_right &= error <= NEAR and not wrong
        print(f"{name:36} log probabilities within {error:.1e}, {wrong} texts otherwise")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
