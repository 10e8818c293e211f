"""llama.cpp's server on a GGUF file, with a draft if one is given: for load.py and export_llama.py.

Runs under a Python that has `xllamacpp` (a wheel of llama.cpp), prints the address of the server
and ends with its standard input:

    python load_llama.py MODEL.gguf USERS CONTEXT THREADS f16|f32 [DRAFT.gguf LENGTH]
"""

from __future__ import annotations

import sys

import xllamacpp


def main() -> None:
    path, draft = sys.argv[1], sys.argv[6:]
    users, context, threads = map(int, sys.argv[2:5])
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_parallel, params.n_ctx, params.cont_batching = users, context, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_gpu_layers, params.port = 0, 0
    cache = xllamacpp.ggml_type[f"GGML_TYPE_{sys.argv[5].upper()}"]
    params.cache_type_k = params.cache_type_v = cache
    if sys.argv[5] == "f32":  # the fused attention rounds to half precision inside
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if draft:
        kinds = xllamacpp.common_speculative_type
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        how = params.speculative.draft
        how.mparams.path, how.n_max, how.n_min, how.p_min = draft[0], int(draft[1]), 0, 0.0
        how.cpuparams.n_threads = how.cpuparams_batch.n_threads = threads
        how.n_gpu_layers, how.cache_type_k, how.cache_type_v = 0, cache, cache
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
