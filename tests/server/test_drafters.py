"""A drafter that a request chooses: on every route, the same texts, its own counts."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fastapi import FastAPI

from specctl.drafters import family
from specctl.drafters.team import Team
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies.switch import Switch
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.server.engine_thread.service import Limits, Service
from specctl.server.logs import LOG
from specctl_testing.runtime.web import error_of, make_app, post, request_all

MEMBERS = ("prompt-lookup", "small-lm", "eagle3")
PROMPT, COUNT = "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return", 24
TURN = [{"role": "user", "content": PROMPT}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": COUNT},
    "/v1/chat/completions": {"messages": TURN, "max_tokens": COUNT},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": COUNT},
    "/v1/messages": {"messages": TURN, "max_tokens": COUNT},
}


def got(app: FastAPI, path: str) -> Any:
    """The answer of a GET."""
    return request_all(app, [("GET", path, {})])[0]


def text_of(path: str, answer: dict[str, Any]) -> str:
    if path == "/v1/responses":
        return answer["output"][0]["content"][0]["text"]
    if path == "/v1/messages":
        return answer["content"][0]["text"]
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def served(target: Target, team: Team, **more: Any) -> Service:
    limits = Limits(max_len=192, max_batch=6)
    return Service(target, team, Switch(lengths=(2, 6)), limits=limits, **more)


@pytest.fixture(scope="module")
def service(tiny_target: Target) -> Iterator[Service]:
    members = []
    for name in MEMBERS:
        torch.manual_seed(3)
        options = {"layers": 1, "width": 32} if name == "small-lm" else {}
        found = family(name)
        members.append(found.build(found.options(**options), tiny_target.spec, None))
    service = served(tiny_target, Team.of(members), drafter_name="mine")
    yield service
    service.stop()


@pytest.fixture(scope="module")
def app(service: Service) -> FastAPI:
    app = make_app(service)  # type: ignore[arg-type]
    while service.status().state == "loading":
        time.sleep(0.005)
    assert service.status().speculation == "on"
    return app


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_whoever_is_chosen_the_text_is_the_targets(
    service: Service, app: FastAPI, heat: float
) -> None:
    """All choices on all routes, in one batch."""
    choices: list[Any] = [*MEMBERS, "mine", True, False, "none"]
    sent = [
        ("POST", path, {"json": {**body, "temperature": heat, "seed": 5, "draft": choice}})
        for path, body in BODIES.items()
        for choice in choices
    ]
    texts: dict[str, list[str]] = {path: [] for path in BODIES}
    for (_, path, _), answer in zip(sent, request_all(app, sent), strict=True):
        assert answer.status_code == 200, answer.text
        texts[path].append(text_of(path, answer.json()))
    for path, found in texts.items():
        assert len(set(found)) == 1, path
    ids = tuple(service.target.encode(PROMPT))
    [plain] = Engine(service.target).run(
        [Request(ids, Sampling(heat, seed=5, max_new_tokens=COUNT))]
    )
    assert texts["/v1/completions"][0] == service.target.decode(plain.tokens)
    assert set(service.counters.chosen) == set(MEMBERS)
    assert all(row.drafted for row in service.counters.chosen.values())
    assert service.counters.spec_disabled == 0


def test_what_is_chosen_is_seen(
    service: Service, app: FastAPI, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOG.name)
    before = service.counters.drafted
    for choice, drafts in (("none", False), (False, False), ("prompt-lookup", True)):
        body = {"prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "draft": choice}
        done = post(app, "/v1/completions", body).json()["specctl"]["stats"]
        assert (done["drafted"] > 0) is drafts
    logged = [one.__dict__["fields"] for one in caplog.records if one.message == "request"]
    assert [line.get("draft") for line in logged] == ["none", None, "prompt-lookup"]
    status = got(app, "/v1/status").json()
    assert (status["drafter"], status["drafters"]) == ("mine", list(MEMBERS))
    assert got(app, "/v1/models").json()["data"][0]["drafters"] == list(MEMBERS)
    found = service.counters.chosen["prompt-lookup"]
    assert found.drafted >= service.counters.drafted - before > 0
    metrics = got(app, "/metrics").text
    name = '{drafter="prompt-lookup"}'
    assert f"specctl:chosen_tokens_total{name} {float(found.tokens)}" in metrics
    assert f"specctl:chosen_accepted_tokens_total{name} {float(found.accepted)}" in metrics


def test_a_drafter_that_is_not_there_is_refused(app: FastAPI, tiny_target: Target) -> None:
    for path, body in BODIES.items():
        refused = post(app, path, {**body, "draft": "medusa"})
        assert refused.status_code == 400, path
        assert "'prompt-lookup', 'small-lm', 'eagle3'" in refused.text
    assert error_of(post(app, "/v1/completions", {"prompt": "x", "draft": "a"}))["param"] == "draft"
    for wrong in (3, "", ["eagle3"]):
        refused = post(app, "/v1/completions", {"prompt": "x", "draft": wrong})
        assert error_of(refused)["param"] == "draft"


def test_a_server_of_one_drafter_accepts_its_name(tiny_target: Target) -> None:
    found = family("prompt-lookup")
    one = found.build(found.options(), tiny_target.spec, None)
    for drafter, names in ((one, ["prompt-lookup"]), (None, [])):
        alone = Service(tiny_target, drafter, limits=Limits(max_len=96, max_batch=2))
        app = make_app(alone)  # type: ignore[arg-type]
        while alone.status().state == "loading":
            time.sleep(0.005)
        assert got(app, "/v1/status").json()["drafters"] == names
        codes = [
            post(
                app, "/v1/completions", {"prompt": "x", "max_tokens": 2, "draft": name}
            ).status_code
            for name in ("prompt-lookup", "none", "eagle3")
        ]
        assert codes == [200 if names else 400, 200, 400]
        alone.stop()
