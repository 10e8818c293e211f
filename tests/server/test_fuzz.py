"""Requests that a machine makes up from the API's own schema, fitting and not: no 5xx, no answer
that the schema does not know, and every error in shape."""

from __future__ import annotations

from functools import cache

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import AcceptedNegativeData, ServerError
from schemathesis.openapi.checks import RejectedPositiveData

from specctl_testing.runtime.serving import StubService
from specctl_testing.runtime.web import make_app

CASES = 14  # per route that takes a body, fitting and not
KEYS = {"message", "type", "param", "code"}
POSTS = (
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "POST /v1/responses",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /tokenize",
    "POST /detokenize",
)


@cache
def api() -> schemathesis.BaseSchema:
    """The schema of an app that is ready; strings may hold NUL and halves of surrogate pairs."""
    app = make_app(StubService(text="ok"))
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    schema.config.generation.update(allow_x00=True)
    schema.config.generation.codec = None
    return schema


def operations() -> list[str]:
    return [found.ok().label for found in api().get_all_operations()]


def run(label: str, mode: GenerationMode, cases: int) -> list[int]:
    """The statuses of so many cases; raises for an answer that breaks the schema's promises."""
    operation = next(f.ok() for f in api().get_all_operations() if f.ok().label == label)
    statuses: list[int] = []

    @hypothesis.settings(
        max_examples=cases,
        database=None,
        deadline=None,
        derandomize=True,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def one(case: schemathesis.Case) -> None:
        response = case.call(headers={"Host": "127.0.0.1"})
        statuses.append(response.status_code)
        if response.status_code >= 400:
            error = response.json()["error"]
            shape = {"message", "type"} if "messages" in label else KEYS
            assert set(error) == shape, error
        try:
            case.validate_response(response)
        except BaseExceptionGroup as failures:
            # Fields may fit the schema one by one and not together, or not this target; and a body
            # that is too large is refused for that, whatever it holds.
            is_long = response.status_code == 413
            known = (
                (RejectedPositiveData, AcceptedNegativeData) if is_long else RejectedPositiveData
            )
            others = failures.split(known)[1]
            if others is not None:
                raise others from None

    one()
    return statuses


@pytest.mark.parametrize("label", POSTS)
def test_requests_that_fit_the_schema_are_served_or_refused_in_shape(label: str) -> None:
    statuses = run(label, GenerationMode.POSITIVE, CASES)
    assert set(statuses) <= {200, 400, 404}
    assert statuses.count(200) >= CASES // 6


@pytest.mark.parametrize("label", POSTS)
def test_requests_that_do_not_fit_are_400(label: str) -> None:
    statuses = run(label, GenerationMode.NEGATIVE, CASES)
    assert set(statuses) <= {400, 413, 415}
    assert statuses.count(413) <= 2


def test_every_other_route_keeps_its_promises() -> None:
    others = [label for label in operations() if label not in POSTS]
    assert len(others) == 8
    for label in others:
        assert set(run(label, GenerationMode.POSITIVE, 10)) <= {200, 404}


def test_the_check_for_5xx_is_one_that_runs() -> None:
    app = make_app(StubService(refuse=KeyError("x")))  # type: ignore[arg-type]
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    case = schema["/v1/completions"]["POST"].Case(body={"prompt": "x"})
    response = case.call(headers={"Host": "127.0.0.1"})
    with pytest.raises(BaseExceptionGroup) as found:
        case.validate_response(response, checks=[not_a_server_error])
    assert found.group_contains(ServerError)
