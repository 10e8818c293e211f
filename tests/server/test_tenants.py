"""What a drafter remembers of answers stays with one API key, and within it with one tenant."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from specctl.core.errors import ResourceError
from specctl.drafters.training_free.suffix_decoding import SuffixDecoding, SuffixDecodingOptions
from specctl.runtime.policies.direct import Direct
from specctl.runtime.target.target import Target
from specctl.server.engine_thread.service import Limits, Service
from specctl.server.requests.responses_fields import ResponsesRequest
from specctl_testing.runtime.keys import KEYS, OTHER, RIGHT
from specctl_testing.runtime.serving import stub_target
from specctl_testing.runtime.web import running

LIMITS = Limits(max_batch=2, max_len=256)


@pytest.fixture(scope="module")
def target(make_model: Any) -> Any:
    tokenizer = stub_target().tokenizer
    model = make_model(num_layers=2, vocab=len(tokenizer), max_position_embeddings=512)
    return Target.from_model(model, tokenizer)


def test_no_key_and_no_tenant_drafts_from_the_answers_of_another(target: Any) -> None:
    drafter = SuffixDecoding(SuffixDecodingOptions(), target.spec)
    service = Service(target, drafter, Direct(length=16, nodes=16), limits=LIMITS)
    with running(service, keys=KEYS) as server, httpx.Client(base_url=server.url) as client:
        while service.status().state == "loading":
            time.sleep(0.005)

        def rounds(key: str, **more: str | bool) -> tuple[int, str]:
            """Rounds of one answer, and its text."""
            before = service.counters.rounds
            body = {"prompt": "def main(", "max_tokens": 40, "ignore_eos": True, "temperature": 0}
            header = {"X-Api-Key": key}
            answer = client.post("/v1/completions", json=body | more, headers=header)
            text = answer.json()["choices"][0]["text"]
            return service.counters.rounds - before, text

        unseen = rounds(RIGHT, draft=False)
        assert unseen[0] == 40
        cold = rounds(RIGHT)  # an answer without drafts left nothing
        warm = rounds(RIGHT)
        assert warm[0] < cold[0]
        for key, more in ((OTHER, {}), (RIGHT, {"tenant": "a"}), (OTHER, {"tenant": "a"})):
            assert rounds(key, **more) == cold
            assert rounds(key, **more) == warm
        assert unseen[1] == cold[1] == warm[1]


def test_a_request_of_the_responses_api_names_its_tenant_too() -> None:
    assert ResponsesRequest(input="x", tenant="a").as_chat().tenant == "a"


def test_what_tenants_may_take_is_counted_before_rows_are_admitted(target: Any) -> None:
    drafter = SuffixDecoding(SuffixDecodingOptions(tenants=2, max_tokens=1 << 18), target.spec)
    assert drafter.shared_bytes == 2 << 20
    room = Service(target, drafter, limits=LIMITS).room
    fits = Limits(memory=room.slot_bytes + drafter.shared_bytes, max_len=256)
    assert Service(target, drafter, limits=fits).room.slots == 1
    with pytest.raises(ResourceError) as caught:
        Service(target, drafter, limits=Limits(memory=room.slot_bytes, max_len=256))
    assert "2.10 MB for the drafter" in str(caught.value.expected)
