"""From a checked request to what the service is asked: tokens, sampling, one ask per choice.

Reading a long prompt takes time, so it runs in a thread of its own, and the event loop goes on.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from specctl.core.forward.prompt_images import PromptImages
from specctl.runtime.outline.answer import USUAL_POINTS, OutlinedAnswer, Outlining, Turn
from specctl.runtime.outline.row_text import plain_ids
from specctl.runtime.sampling.generation_config import SETTINGS
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.templates.chat_tokens import chat_tokens, spelled_controls
from specctl.runtime.target.text.image_prompts import turn_tokens
from specctl.runtime.target.text.prompt_limits import least_tokens
from specctl.runtime.target.text.stop_strings import special_tokens
from specctl.server.engine_thread.contract import (
    GenerateRequest,
    Serving,
    TooLong,
    Unavailable,
)
from specctl.server.errors import ApiError
from specctl.server.replies.answer_form import answer_form, shown_ids
from specctl.server.replies.message_parser import MessageParser
from specctl.server.requests.chat_template import ChatStyle, Written, written
from specctl.server.requests.grammar_compiler import GrammarCompiler
from specctl.server.requests.image_fields import read_images
from specctl.server.requests.protocol import (
    ChatRequest,
    Common,
    CompletionRequest,
)

T = TypeVar("T")
DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions, as OpenAI's API has it
LEAST_TEMPERATURE = 1e-3  # below: greedy; logits divided by less would leave float32
SEEDS = 1 << 63
PLAIN = "none"  # the drafter of a request that wants none
DEFAULTS = Sampling(temperature=1.0)  # as OpenAI's API has it


def may_be_kept(body: ChatRequest | CompletionRequest) -> bool:
    """Whether its text may be kept for training, which knows no tools and no text that is not drawn
    from the target, and what the target computes for it."""
    if isinstance(body, ChatRequest) and (
        body.has_tools or body.has_images or body.outline is not None
    ):
        return False
    return body.store is not False


@dataclass(frozen=True, slots=True)
class Prompts:
    """What the target reads: token ids of every prompt; whether a template has opened the thoughts
    of the answer already; the conversation that they were written from, if it is one, and its
    images."""

    tokens: Sequence[Sequence[int]]
    is_thinking: bool = False
    said: Written | None = None
    images: PromptImages | None = None


@dataclass(frozen=True, slots=True)
class GeneratePlan:
    """All that one request asks: its choices in order, the length of its prompts, a parser for the
    text of each choice (chats only), the fields of the request that this target makes nothing of,
    and the one answer that is to be written from an outline."""

    asks: tuple[GenerateRequest, ...]
    prompt_tokens: int
    parser: Callable[[], MessageParser] | None = None
    ignored: tuple[str, ...] = ()
    outlined: OutlinedAnswer | None = None


class RequestReader:
    """Makes plans. Stateless but for its threads."""

    def __init__(
        self, service: Serving, defaults: Sampling = DEFAULTS, style: ChatStyle | None = None
    ) -> None:
        self.service, self.defaults = service, defaults
        self.style = style if style is not None else ChatStyle.of(service.target)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="specctl-prompts")
        self._forms = GrammarCompiler(service.target)

    async def plan(
        self,
        body: ChatRequest | CompletionRequest,
        owner: str,
        is_cut: bool = False,
        adapter: str | None = None,
    ) -> GeneratePlan:
        """The asks of a request; raises ApiError and SpecctlError for what cannot be served.
        `is_cut`: of more tokens than there is room for, those that fit are generated. `adapter`:
        who writes the answer; None: the target itself."""
        if (state := self.service.status().state) != "ready":
            raise Unavailable(state)
        self._check_counts(body, is_cut)
        sampling = self._sampling(body)
        prompts = await self.in_thread(self.prompts, body)
        held = await self._forms.hold(
            lambda: answer_form(body, self.style, prompts.is_thinking),
            body.form_field or "tools",
            sampling,
        )
        return self._plan(body, prompts, held, owner, is_cut, adapter)

    async def in_thread(self, work: Callable[..., T], *given: Any) -> T:
        """What needs the tokenizer, which one thread may use at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *given)

    def _plan(
        self,
        body: ChatRequest | CompletionRequest,
        prompts: Prompts,
        sampling: Sampling,
        owner: str,
        is_cut: bool,
        adapter: str | None,
    ) -> GeneratePlan:
        owner = owner if adapter is None else f"{owner}:{adapter}"
        name = body.prompt_cache_key
        conversation = None if name is None else hashlib.sha256(f"{owner}:{name}".encode())
        tenant = hashlib.sha256(f"tenant of {owner}:{body.tenant or ''}".encode()).hexdigest()
        asks: list[GenerateRequest] = []
        shown, drafts = self._shown(body), self._drafts(body)
        for tokens in prompts.tokens:
            room = self._room(body, len(tokens), is_cut)
            for _ in range(body.n or 1):
                seed = (sampling.seed + len(asks)) % SEEDS
                asks.append(
                    GenerateRequest(
                        tuple(tokens),
                        replace(
                            sampling,
                            seed=seed,
                            max_new_tokens=room,
                            processors=self._processors(body, len(tokens)),
                        ),
                        None if conversation is None else conversation.hexdigest(),
                        _num_logprobs(body),
                        shown,
                        drafts,
                        bool(body.include_stop_str_in_output),
                        tenant,
                        may_be_kept(body) and adapter is None,
                        images=prompts.images,
                        adapter=adapter,
                    )
                )
        ignored: list[str] = []
        if isinstance(body, ChatRequest):
            ignored += self.style.variables_of(body)[1] + self.style.unread_thoughts(body)
        length, parser = sum(map(len, prompts.tokens)), self._parser(body, prompts.is_thinking)
        outlined = self._outlined(body, prompts, asks[0].sampling)
        return GeneratePlan(tuple(asks), length, parser, tuple(ignored), outlined)

    def _drafts(self, body: Common) -> bool | str:
        """Whether anything drafts, and which of the server's drafters if the request says it."""
        wanted, now = body.draft, self.service.status()
        if not isinstance(wanted, str):
            return wanted is not False
        if wanted == PLAIN:
            return False
        if wanted == now.drafter:
            return True
        if wanted in now.drafters:
            return wanted
        known = ", ".join(map(ascii, now.drafters)) or "no drafter"
        message = f"draft: there is no drafter {wanted[:100]!a} here, but {known}; {PLAIN!a} or "
        message += "false decodes plainly"
        raise ApiError(400, message, param="draft", code="drafter_not_found")

    def _outlined(
        self, body: ChatRequest | CompletionRequest, prompts: Prompts, sampling: Sampling
    ) -> OutlinedAnswer | None:
        """The answer from an outline that a request names."""
        if not isinstance(body, ChatRequest) or body.outline is None:
            return None
        said, target = prompts.said, self.service.target
        assert said is not None, "a chat was written"
        if prompts.is_thinking:
            message = "outline: this target's template opens its thoughts in front of the answer; "
            message += "switch them off (chat_template_kwargs), or leave outline out"
            raise ApiError(400, message, param="outline", code="unsupported_parameter")
        how = Outlining(body.outline, body.outline_points or USUAL_POINTS)

        def encode(turns: Sequence[Turn], begun: str) -> tuple[list[int], list[int]]:
            own = [dict(turn) for turn in turns]
            text = written(target, own, (), said.variables)
            said_ids = chat_tokens(target, own, text, (), said.variables)
            return said_ids, plain_ids(target, begun)

        context = self.service.status().context
        return OutlinedAnswer(said.turns, prompts.tokens[0], sampling, how, encode, context)

    def _parser(self, body: Common, is_thinking: bool) -> Callable[[], MessageParser] | None:
        """What takes the text of a chat apart."""
        if not isinstance(body, ChatRequest):
            return None
        names = frozenset(tool.function.name for tool in body.called)
        format = self.style.tool_format if names else None
        tags, id_chars = self.style.think_tags, None if format is None else format.id_chars

        def make() -> MessageParser:
            calls = None if format is None else format.parser(names)
            return MessageParser(tags, is_thinking, calls, id_chars)

        return make

    def _shown(self, body: Common) -> frozenset[int]:
        if body.skip_special_tokens is False:
            return frozenset(special_tokens(self.service.target.tokenizer))
        if not isinstance(body, ChatRequest):
            return frozenset()
        return shown_ids(self.style, bool(body.called))

    def _processors(self, body: Common, num_prompt: int) -> tuple[Any, ...]:
        """min_tokens: until then, nothing that ends a text is drawn."""
        if not body.min_tokens:
            return ()
        from transformers import MinNewTokensLengthLogitsProcessor

        target = self.service.target
        ends = [*target.eos_ids, *(body.stop_token_ids or ())]
        if not ends:
            return ()
        length = min(body.min_tokens, target.spec.max_positions)
        return (
            MinNewTokensLengthLogitsProcessor(num_prompt, length, ends, device=str(target.device)),
        )

    def _check_tools(self, body: Common) -> None:
        """Refuse tools where nobody could read the calls."""
        if isinstance(body, ChatRequest) and body.called and self.style.tool_format is None:
            message = "tools are not supported with this target: its chat template writes calls in "
            message += "no format known here; start the server with --set api.tool_parser=NAME"
            raise ApiError(400, message, param="tools", code="unsupported_parameter")

    def _check_counts(self, body: ChatRequest | CompletionRequest, is_cut: bool) -> None:
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
        wanted, most = _wanted(body), limits.max_new_tokens
        if wanted is not None and most is not None and wanted > most and not is_cut:
            message = f"max_tokens: at most {most:,} tokens are generated per choice"
            raise ApiError(400, message, param="max_tokens", code="invalid_value")

    def prompts(self, body: ChatRequest | CompletionRequest) -> Prompts:
        """Token ids of every prompt; runs in the thread."""
        target = self.service.target
        if isinstance(body, ChatRequest):
            self._check_tools(body)
            images = read_images(target, body.messages) if body.has_images else []
            said = self.style.write(target, body)
            self.check_room(said.text, "messages")
            how = said.text, said.tools, said.variables
            tokens, seen = turn_tokens(target, said.turns, images, *how, self._check_length)
            tags = self.style.think_tags
            is_thinking = tags is not None and said.text.rstrip().endswith(tags[0])
            return Prompts([tokens], is_thinking, said, seen)
        given = body.prompt
        texts = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        for one in texts:
            if isinstance(one, str):
                self.check_room(one, "prompt")
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
        return Prompts(found)

    def check_room(self, text: str, field: str) -> None:
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

    def _check_length(self, num_prompt: int) -> None:
        """Refuse a prompt with images before they are read, which takes far more than a text."""
        if num_prompt >= (context := self.service.status().context):
            raise TooLong(num_prompt, context, 1)

    def _room(self, body: ChatRequest | CompletionRequest, num_prompt: int, is_cut: bool) -> int:
        """How many tokens a choice may have; TooLong if what was wanted cannot fit."""
        context, most = self.service.status().context, self.service.limits.max_new_tokens
        left = context - num_prompt
        wanted = _wanted(body)
        if left < 1 and (is_cut or wanted is None):
            raise TooLong(num_prompt, context, 1)
        if wanted is not None and is_cut:
            wanted = min(wanted, left, left if most is None else most)
        if wanted is not None and wanted > left:
            raise TooLong(num_prompt, context, wanted)
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
        ends = tuple(body.stop_token_ids or ())
        if ends and max(ends) >= vocab_size:
            message = f"stop_token_ids: token ids are below {vocab_size:,}"
            raise ApiError(400, message, param="stop_token_ids", code="invalid_value")
        settings = {name: getattr(body, name) for name in SETTINGS}
        settings = {n: getattr(self.defaults, n) if v is None else v for n, v in settings.items()}
        temperature, top_k = settings.pop("temperature"), settings.pop("top_k")
        return Sampling(
            **settings,
            temperature=temperature if temperature >= LEAST_TEMPERATURE else 0.0,
            top_k=None if top_k is None or top_k < 1 else min(top_k, vocab_size),
            frequency_penalty=body.frequency_penalty or None,
            presence_penalty=body.presence_penalty or None,
            logit_bias=bias or None,
            seed=secrets.randbelow(SEEDS) if body.seed in (None, -1) else body.seed % SEEDS,
            stop=body.stops,
            stop_token_ids=ends,
            ignore_eos=bool(body.ignore_eos),
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
