"""llama.cpp's server on the weights of a transformers folder (float32, Llama): for load.py.

Runs under a Python that has `xllamacpp` and `gguf` (both are wheels), prints the address of the
server and ends with its standard input:

    python load_llama.py FOLDER USERS CONTEXT THREADS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file: a length, a header, the bytes."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        raw = np.memmap(path, dtype=np.uint8, mode="r")
        size = int(np.frombuffer(raw[:8].tobytes(), dtype="<u8")[0])
        for name, about in json.loads(raw[8 : 8 + size].tobytes()).items():
            if name != "__metadata__":
                assert about["dtype"] == "F32", f"{name} is {about['dtype']}: use --dtype float32"
                begin, end = (8 + size + at for at in about["data_offsets"])
                found[name] = raw[begin:end].view("<f4").reshape(about["shape"])
    return found


def renamed(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def turned(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in the order of llama.cpp, which rotates neighbours."""
    rows, width = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, width)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, width))


def write(folder: Path, path: Path) -> None:
    """The model as GGUF. Its vocabulary is a list of names: it is only ever asked in token ids."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_token_merges(["t0 t1"])  # one is expected
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in tensors(folder).items():
        for part, count in heads.items():
            if part in name:
                weight = turned(weight, count)
        writer.add_tensor(renamed(name), np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    folder, users, context, threads = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    path = folder / "model.gguf"
    if not path.exists():
        write(folder, path)
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_parallel, params.n_ctx, params.cont_batching = users, context, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_gpu_layers, params.port = 0, 0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
