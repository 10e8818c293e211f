"""The HTTP server as an application: routes, what stands before them, and nothing of the engine.

A request goes through: log and id -> key and host -> strict body -> typed fields -> asks -> the
service; its pieces come back as one answer or as events. Every failure has OpenAI's error shape, on
the routes of Anthropic's API theirs.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse

from specctl import __version__
from specctl.runtime.sampling.sampling import Sampling
from specctl.server import errors
from specctl.server.auth import AuthMiddleware, Door, Keys
from specctl.server.docs_page import DOCS, docs_route
from specctl.server.drafter_route import Shelf, drafter_routes
from specctl.server.engine_thread.contract import GenerateRequest, Serving, Status, Ticket
from specctl.server.engine_thread.service import Service
from specctl.server.errors import ApiError, ErrorBody, MessagesErrorBody, is_for_anthropic
from specctl.server.logs import RequestLog
from specctl.server.metrics import TYPE, Metrics
from specctl.server.outlined_ticket import OutlinedTicket
from specctl.server.page import page_routes
from specctl.server.record import Recorder, chat_record, text_record
from specctl.server.replies.answers import ApiAnswer, Choice
from specctl.server.replies.message_parser import MessageParser
from specctl.server.replies.messages import MessagesAnswer
from specctl.server.replies.responses import ResponsesAnswer, repeated
from specctl.server.replies.shapes import ChatAnswer, TextAnswer
from specctl.server.replies.sse import (
    EventStream,
    cancel,
    collected,
    events_of,
    unless_gone,
)
from specctl.server.replies.tokens import TokenTexts
from specctl.server.requests.body import BodyReader, StrictRoute
from specctl.server.requests.chat_template import ChatStyle
from specctl.server.requests.generate_request import (
    DEFAULTS,
    GeneratePlan,
    RequestReader,
    may_be_kept,
)
from specctl.server.requests.messages_fields import CountRequest, MessagesRequest
from specctl.server.requests.protocol import ChatRequest, CompletionRequest
from specctl.server.requests.responses_fields import ResponsesRequest
from specctl.server.served_models import ServedModels
from specctl.server.token_routes import token_routes

REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody}
    for status in (400, 401, 403, 404, 405, 408, 413, 415, 429, 500, 503)
}

VERIFICATION = "X-Specctl-Verification"
EVENTS: dict[str, Any] = {"text/event-stream": {}}
ANSWERS: dict[int | str, dict[str, Any]] = {**REFUSALS, 200: {"content": EVENTS}}
REFUSED_MESSAGES: dict[int | str, dict[str, Any]] = {
    status: {"model": MessagesErrorBody} for status in REFUSALS
}
MESSAGES: dict[int | str, dict[str, Any]] = {**REFUSED_MESSAGES, 200: {"content": EVENTS}}


Body = ChatRequest | CompletionRequest | ResponsesRequest | MessagesRequest


@dataclass(frozen=True, slots=True)
class Front:
    """What the routes need: the service, and how it presents itself."""

    service: Serving
    models: ServedModels
    verification: str
    desk: RequestReader
    texts: TokenTexts
    recorder: Recorder | None

    async def answer(self, request: Request, body: Body) -> Response:
        """One answer, or a stream of events."""
        adapter = self.models.adapter_of(body.model)
        if adapter is not None:
            request.state.log["adapter"] = adapter
        asked = body if isinstance(body, ChatRequest | CompletionRequest) else body.as_chat()
        is_cut = isinstance(body, MessagesRequest)  # its clients name the most that they ever take
        planned = self.desk.plan(asked, request.state.owner, is_cut, adapter)
        plan = await unless_gone(planned, request.receive)
        request.state.ignored += plan.ignored
        if isinstance(body.draft, str):
            request.state.log["draft"] = body.draft
        answer = await self._submit(body, asked, plan)
        try:
            if not body.stream:
                whole = await unless_gone(collected(answer), request.receive)
                self._note(request, asked, answer)
                return JSONResponse(whole, headers=_marks(answer, plan))
            events = self._noted(request, asked, answer)
            first = await unless_gone(anext(events), request.receive)
        except BaseException:
            cancel(answer)
            raise
        stream = EventStream(answer, first, events)
        stream.headers.update(_marks(answer, plan))
        return stream

    async def _submit(
        self, body: Body, asked: ChatRequest | CompletionRequest, plan: GeneratePlan
    ) -> ApiAnswer:
        """The choices, each with its ticket; if one is refused, none is left behind."""
        choices: list[Choice] = []
        try:
            for index, one in enumerate(plan.asks):
                parser = MessageParser() if plan.parser is None else plan.parser()
                choices.append(Choice(index, await self._ticket(one, plan), parser=parser))
        except BaseException:
            for choice in choices:
                choice.ticket.cancel()
            raise
        first = plan.asks[0]
        about: dict[str, Any] = {
            "model": first.adapter or self.models.name,
            "texts": self.texts,
            "verification": self.verification
            if plan.outlined is None
            else plan.outlined.how.marked(self.verification),
            "prompt_tokens": plan.prompt_tokens,
            "tells_rounds": bool(asked.specctl),
            "tells_usage": asked.includes_usage,
            "has_logprobs": first.logprobs is not None,
            "choices": tuple(choices),
        }
        if isinstance(body, ResponsesRequest):
            return ResponsesAnswer(**about, asked=repeated(body, first.sampling))
        if isinstance(body, MessagesRequest):
            context = self.service.status().context
            return MessagesAnswer(**about, max_tokens=body.max_tokens, context=context)
        return (ChatAnswer if isinstance(body, ChatRequest) else TextAnswer)(**about)

    async def _ticket(self, request: GenerateRequest, plan: GeneratePlan) -> Ticket:
        if plan.outlined is None:
            return await self.service.submit(request)
        given = self.service, request, plan.outlined, self.desk.in_thread
        return await OutlinedTicket.submitted(*given)

    async def _noted(
        self, request: Request, body: ChatRequest | CompletionRequest, answer: ApiAnswer
    ) -> AsyncIterator[bytes]:
        """The events; what was answered is noted when the last one is asked for."""
        async for event in events_of(answer):
            yield event
        self._note(request, body, answer)

    def _note(
        self, request: Request, body: ChatRequest | CompletionRequest, answer: ApiAnswer
    ) -> None:
        """For the log: counts. For the record, if there is one: prompts and answers."""
        rows = [choice.ticket.stats for choice in answer.choices]
        tokens, rounds = sum(r.tokens for r in rows), sum(r.rounds for r in rows)
        used = answer.usage()
        used.pop("completion_tokens_details", None)
        request.state.log.update(used, tau=round(tokens / max(rounds, 1), 3))
        if self.recorder is None or any(choice.reason is None for choice in answer.choices):
            return
        adapter = answer.choices[0].ticket.ask.adapter
        if adapter is not None or not may_be_kept(body):  # an adapter's text is not the target's
            return
        for choice in answer.choices:
            text = "".join(choice.text)
            if isinstance(body, ChatRequest):
                turns = [{"role": m.role, "content": m.text} for m in body.messages]
                self.recorder.put(chat_record(turns, text), choice.ticket.features)
            else:
                prompt = self.service.target.decode(choice.ticket.ask.tokens)
                self.recorder.put(text_record(prompt, text), choice.ticket.features)


def _marks(answer: ApiAnswer, plan: GeneratePlan) -> dict[str, str]:
    """The header of an answer that its request made approximate."""
    return {} if plan.outlined is None else {VERIFICATION: answer.verification}


def create_app(
    service: Serving,
    name: str,
    *,
    door: Door | None = None,
    keys: Keys | None = None,
    recorder: Recorder | None = None,
    verification: str = "lossless",
    defaults: Sampling = DEFAULTS,
    style: ChatStyle | None = None,
    is_strict: bool = False,
    shelf: Shelf | None = None,
) -> FastAPI:
    """The application. `name`: what clients call the target. `keys` (or a whole `door`): who may
    ask; None lets everybody in. `verification`: lossless or approximate, told with every answer.
    `defaults`: how a request is sampled that does not say it. `style`: how the target writes tool
    calls and thoughts, if that is not to be read from its chat template. `is_strict`: requests with
    unknown fields are refused. `shelf`: the drafters that an admin key may exchange."""
    pages = page_routes()
    door = door if door is not None else Door(keys if keys is not None else Keys())
    browsed = frozenset(page.path for page in pages) | {DOCS}
    door = replace(door, browsed=browsed)
    metrics = Metrics(service, recorder)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.stop()

    app = FastAPI(
        title="specctl",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.bodies = BodyReader(service.limits.max_body, is_strict)
    app.router.route_class = StrictRoute
    texts = TokenTexts(service.target)
    desk = RequestReader(service, defaults, style)
    models = ServedModels(service, name, int(time.time()))
    front = Front(service, models, verification, desk, texts, recorder)
    _watch(app, service, metrics)
    _api(app, front)
    token_routes(app, front.desk, models.check)
    if shelf is not None and door.admin.digests:
        assert isinstance(service, Service), "a stub has no drafter to exchange"
        drafter_routes(app, service, shelf)
    app.router.routes.extend(pages)
    app.router.routes.append(docs_route(app))
    errors.install(app)
    app.add_middleware(AuthMiddleware, door=door)
    app.add_middleware(RequestLog, on_answered=metrics.answered)
    return app


def _api(app: FastAPI, front: Front) -> None:
    """The routes of OpenAI's and Anthropic's clients."""

    @app.get("/v1/models", responses=REFUSALS)
    async def models(
        request: Request,
        after_id: str | None = None,
        before_id: str | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    ) -> dict[str, Any]:
        """The target and its adapters; with a header `anthropic-version` in pages, in the shape of
        that API, else in OpenAI's."""
        if not is_for_anthropic(request.scope):
            return {"object": "list", "data": list(map(front.models.about, front.models.names))}
        return front.models.page(after_id, before_id, limit)

    @app.get("/v1/models/{model:path}", responses=REFUSALS)
    async def model(request: Request, model: str) -> dict[str, Any]:
        """That model, if it is served."""
        front.models.check(model)
        is_theirs = is_for_anthropic(request.scope)
        return (front.models.about_for_anthropic if is_theirs else front.models.about)(model)

    @app.post("/v1/completions", responses=ANSWERS)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continue a text."""
        return await front.answer(request, body)

    @app.post("/v1/chat/completions", responses=ANSWERS)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """Continue a conversation; with tools, perhaps by calling them."""
        return await front.answer(request, body)

    @app.post("/v1/responses", responses=ANSWERS)
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        """Continue a conversation, in the shape of OpenAI's Responses API. Nothing is stored."""
        return await front.answer(request, body)

    @app.post("/v1/messages", responses=MESSAGES)
    async def messages(request: Request, body: MessagesRequest) -> Response:
        """Continue a conversation, in the shape of Anthropic's Messages API."""
        return await front.answer(request, body)

    @app.post("/v1/messages/count_tokens", responses=REFUSED_MESSAGES)
    async def count_tokens(body: CountRequest) -> dict[str, int]:
        """How many tokens a conversation has in the target's template."""
        front.models.check(body.model)
        prompts = await front.desk.in_thread(front.desk.prompts, body.as_chat())
        return {"input_tokens": len(prompts.tokens[0])}

    @app.post("/v1/embeddings", responses=REFUSALS)
    async def embeddings() -> dict[str, Any]:
        """Refused: a language model that is drafted for gives no embeddings."""
        message = "embeddings are not served: this server generates text; use a model made for them"
        raise ApiError(404, message, code="unsupported_endpoint")


def _watch(app: FastAPI, service: Serving, metrics: Metrics) -> None:
    """What operators and the page ask."""

    @app.get("/health")
    async def health() -> dict[str, str]:
        """200 while the process answers."""
        if (state := service.status().state) == "failed":
            raise ApiError(503, "the engine has failed; restart the server", code=state)
        return {"status": state}

    @app.get("/ready", responses={503: {"model": ErrorBody}})
    async def ready() -> dict[str, str]:
        """200 while requests are taken."""
        if (state := service.status().state) != "ready":
            later = {"Retry-After": str(errors.RETRY_SECONDS)}
            raise ApiError(503, f"the server is {state}", code=state, headers=later)
        return {"status": state}

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The version of specctl."""
        return {"version": __version__}

    @app.get("/v1/status", responses=REFUSALS)
    async def status() -> Status:
        """Rows, queue and speculation."""
        return service.status()

    text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}

    @app.get("/metrics", responses={**REFUSALS, **text}, response_class=Response)
    async def scrape() -> Response:
        """Prometheus."""
        return Response(metrics.text(), media_type=TYPE)
