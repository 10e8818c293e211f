"""From a checked request to what the service is asked: tokens, sampling, one ask per choice.

Reading a long prompt takes time, so it runs in a thread of its own, and the event loop goes on.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from specctl.runtime.sampling.generation_config import SETTINGS
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.server.chat_template import turns_of, written
from specctl.runtime.server.contract import GenerateRequest, Serving, TooLong, Unavailable
from specctl.runtime.server.errors import ApiError
from specctl.runtime.server.grammar_compiler import GrammarCompiler
from specctl.runtime.server.protocol import ChatRequest, Common, CompletionRequest
from specctl.runtime.target.chat_tokens import chat_tokens, spelled_controls
from specctl.runtime.target.prompt_limits import least_tokens

DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions, as OpenAI's API has it
LEAST_TEMPERATURE = 1e-3  # below: greedy; logits divided by less would leave float32
SEEDS = 1 << 63
DEFAULTS = Sampling(temperature=1.0)  # as OpenAI's API has it


@dataclass(frozen=True, slots=True)
class GeneratePlan:
    """All that one request asks: its choices in order, and the length of its prompts."""

    asks: tuple[GenerateRequest, ...]
    prompt_tokens: int


class RequestReader:
    """Makes plans. Stateless but for its threads."""

    def __init__(self, service: Serving, defaults: Sampling = DEFAULTS) -> None:
        self.service, self.defaults = service, defaults
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="specctl-prompts")
        self._forms = GrammarCompiler(service.target)

    async def plan(self, body: ChatRequest | CompletionRequest, owner: str) -> GeneratePlan:
        """The asks of a request; raises ApiError and SpecctlError for what cannot be served."""
        if (state := self.service.status().state) != "ready":
            raise Unavailable(state)
        self._check_counts(body)
        loop = asyncio.get_running_loop()
        prompts = await loop.run_in_executor(self._thread, self._prompts, body)
        sampling = await self._forms.hold(body, self._sampling(body))
        return self._plan(body, prompts, sampling, owner)

    def _plan(
        self,
        body: ChatRequest | CompletionRequest,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        owner: str,
    ) -> GeneratePlan:
        name = body.prompt_cache_key
        conversation = None if name is None else hashlib.sha256(f"{owner}:{name}".encode())
        asks: list[GenerateRequest] = []
        for tokens in prompts:
            room = self._room(body, len(tokens))
            for _ in range(body.n or 1):
                seed = (sampling.seed + len(asks)) % SEEDS
                asks.append(
                    GenerateRequest(
                        tuple(tokens),
                        replace(sampling, seed=seed, max_new_tokens=room),
                        None if conversation is None else conversation.hexdigest(),
                        _num_logprobs(body),
                    )
                )
        return GeneratePlan(tuple(asks), sum(map(len, prompts)))

    def _check_counts(self, body: ChatRequest | CompletionRequest) -> None:
        """The limits of this server, which may be narrower than what the protocol allows."""
        limits, prompts = self.service.limits, 1
        fits = self.service.status().slots + limits.max_queue
        if isinstance(body, CompletionRequest) and isinstance(body.prompt, list):
            prompts = 1 if isinstance(body.prompt[0], int) else len(body.prompt)
        choices = min(limits.max_n, fits)  # more than run and wait together never get in
        if (body.n or 1) * prompts > choices:
            message = f"n: at most {choices} choices are served per request"
            raise ApiError(400, message, param="n", code="invalid_value")
        if len(body.stops) > limits.max_stop:
            message = f"stop: at most {limits.max_stop} stop strings are served"
            raise ApiError(400, message, param="stop", code="invalid_value")
        asked, most = _wanted(body), limits.max_new_tokens
        if asked is not None and most is not None and asked > most:
            message = f"max_tokens: at most {most:,} tokens are generated per choice"
            raise ApiError(400, message, param="max_tokens", code="invalid_value")

    def _prompts(self, body: ChatRequest | CompletionRequest) -> list[list[int]]:
        """Token ids of every prompt; runs in the thread."""
        target = self.service.target
        if isinstance(body, ChatRequest):
            turns = turns_of(body.messages)
            text = written(target, turns)
            self._check_room(text, "messages")
            return [chat_tokens(target, turns, text)]
        given = body.prompt
        texts = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        for one in texts:
            if isinstance(one, str):
                self._check_room(one, "prompt")
        found = [target.encode(one) if isinstance(one, str) else list(one) for one in texts]
        size = target.spec.vocab_size
        for tokens in found:
            if not tokens or max(tokens) >= size:
                why = f"token ids are below {size:,}" if tokens else "it holds no token"
                raise ApiError(400, f"prompt: {why}", param="prompt", code="invalid_value")
            if not self.service.limits.control_tokens and spelled_controls(target, tokens):
                message = "prompt: it holds a control token of the target, which this server "
                message += "takes in no raw prompt; send messages to /v1/chat/completions"
                raise ApiError(400, message, param="prompt", code="control_token")
        return found

    def _check_room(self, text: str, field: str) -> None:
        """Refuse a text that cannot fit however it is split, before it is: that would take seconds,
        and nobody else's prompt would be read."""
        least = least_tokens(self.service.target.tokenizer, text)
        context = self.service.status().context
        if least > context:
            message = (
                f"{field}: {len(text):,} characters are at least {least:,} tokens; prompt and "
            )
            message += f"answer together have at most {context:,}"
            raise ApiError(400, message, param=field, code="context_length_exceeded")

    def _room(self, body: ChatRequest | CompletionRequest, num_prompt: int) -> int:
        """How many tokens a choice may have; TooLong if what was asked for cannot fit."""
        context, most = self.service.status().context, self.service.limits.max_new_tokens
        left = context - num_prompt
        wanted = _wanted(body)
        if wanted is not None and wanted > left:
            raise TooLong(num_prompt, context, wanted)
        if left < 1:
            raise TooLong(num_prompt, context, 1)
        if wanted is None:
            usual = DEFAULT_COMPLETION_TOKENS if isinstance(body, CompletionRequest) else left
            wanted = min(usual, left, left if most is None else most)
        return wanted

    def _sampling(self, body: Common) -> Sampling:
        vocab_size = self.service.target.spec.vocab_size
        bias = {int(name): value for name, value in (body.logit_bias or {}).items()}
        if bias and max(bias) >= vocab_size:
            message = f"logit_bias: token ids are below {vocab_size:,}"
            raise ApiError(400, message, param="logit_bias", code="invalid_value")
        asked = {name: getattr(body, name) for name in SETTINGS}
        asked = {n: getattr(self.defaults, n) if v is None else v for n, v in asked.items()}
        temperature, top_k = asked.pop("temperature"), asked.pop("top_k")
        return Sampling(
            **asked,
            temperature=temperature if temperature >= LEAST_TEMPERATURE else 0.0,
            top_k=None if top_k is None else min(top_k, vocab_size),
            frequency_penalty=body.frequency_penalty or None,
            presence_penalty=body.presence_penalty or None,
            logit_bias=bias or None,
            seed=secrets.randbelow(SEEDS) if body.seed is None else body.seed % SEEDS,
            stop=body.stops,
        )


def _wanted(body: ChatRequest | CompletionRequest) -> int | None:
    """The number of new tokens that the request names."""
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        return body.max_completion_tokens
    return body.max_tokens


def _num_logprobs(body: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(body, CompletionRequest):
        return body.logprobs
    return (body.top_logprobs or 0) if body.logprobs else None
