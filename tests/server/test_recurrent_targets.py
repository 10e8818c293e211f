"""Targets with recurrent layers behind HTTP: what a turn says is not changed by what was read
before it, however the turns before ended. And how many rows of them fit into memory."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import pytest
import torch

from specctl.core.drafter import tensor_bytes
from specctl.core.errors import ResourceError
from specctl.core.forward.slot_state import StateKV
from specctl.runtime.policies import make_policy
from specctl.runtime.target.target import Target
from specctl.server.engine_thread.service import Service, room_for
from specctl.server.requests.limits import Limits
from specctl_testing.hybrids import HYBRIDS, tiny_hybrid
from specctl_testing.models import build_model
from specctl_testing.runtime.knowing import Mirror
from specctl_testing.runtime.serving import stub_target
from specctl_testing.runtime.web import running

# Each with one of them, by turns; with the other it is a proof.
DELTA = [pytest.param("lfm2", marks=pytest.mark.proof), "qwen3_next"]
CONVOLUTION = ["lfm2", pytest.param("qwen3_next", marks=pytest.mark.proof)]
CHAT = "/v1/chat/completions"
CHAIN = {"policy": "chain", "length": 4}


@cache
def made(kind: str) -> tuple[Target, Any]:
    """A target with a chat template, and its twin in transformers."""
    tokenizer = stub_target().tokenizer
    model = build_model(kind, hidden=64, vocab=len(tokenizer), **HYBRIDS[kind])
    twin = copy.deepcopy(model)
    return Target.from_model(model, tokenizer), twin


class Chat:
    """A server of one row with a drafter that mostly agrees, as a client sees it."""

    def __init__(self, service: Service, client: httpx.Client) -> None:
        self.service, self.client = service, client

    def answered(self, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
        body = {"messages": messages, "max_tokens": 24, "temperature": 0, **fields}
        answer = self.client.post(CHAT, json={"ignore_eos": True, **body})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()["choices"][0]
        return found

    def says(self, messages: list[dict[str, str]], **fields: Any) -> str:
        return str(self.answered(messages, **fields)["message"]["content"])

    def alone(self, messages: list[dict[str, str]], **fields: Any) -> str:
        """Undrafted, and nothing is taken over."""
        before = self.service.counters.reused_tokens
        text = self.says(messages, draft=False, **fields)
        assert self.service.counters.reused_tokens == before
        return text

    def reusing(self, messages: list[dict[str, str]], **fields: Any) -> str:
        """Drafted, in a conversation of which something was read before."""
        before = self.service.counters.reused_tokens
        text = self.says(messages, prompt_cache_key="ours", **fields)
        assert self.service.counters.reused_tokens > before
        return text


def said(*texts: str) -> list[dict[str, str]]:
    """Turns of user and assistant by turns."""
    return [
        {"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)
    ]


@pytest.fixture
def chat(request: pytest.FixtureRequest) -> Iterator[Chat]:
    target, twin = made(request.param)
    limits = Limits(max_batch=1, max_len=256, prefill_chunk=32)
    service = Service(target, Mirror(twin, target.spec), make_policy(CHAIN), limits=limits)
    with running(service) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        while service.status().state == "loading":
            time.sleep(0.005)
        yield Chat(service, client)
    assert service.counters.accepted > service.counters.drafts


@pytest.mark.parametrize("chat", DELTA, indirect=True)
def test_turns_with_and_without_reuse_are_one_text(chat: Chat) -> None:
    first, again = said("add two numbers"), "and now three"
    answer = chat.says(first, prompt_cache_key="ours")
    assert answer == chat.alone(first)
    answer = chat.says(first, prompt_cache_key="ours")  # the other request took the slot
    second = said(first[0]["content"], answer, again)
    wanted = chat.alone(second)
    chat.says(first, prompt_cache_key="ours")
    assert chat.reusing(second) == wanted


@pytest.mark.parametrize("chat", CONVOLUTION, indirect=True)
def test_a_stop_string_in_mid_path_is_followed_by_the_right_turn(chat: Chat) -> None:
    first = said("write a loop")
    whole = chat.alone(first)
    for at in (3, 16):  # ends at several places of a path
        stop = whole[at : at + 2]
        ended = chat.answered(first, stop=[stop], prompt_cache_key="ours")
        assert ended["finish_reason"] == "stop"
        assert ended["message"]["content"] == whole[: whole.index(stop)]
        second = said("write a loop", ended["message"]["content"], "go on")
        text = chat.reusing(second)
        assert text == chat.alone(second)


@pytest.mark.parametrize("chat", DELTA, indirect=True)
def test_an_end_in_mid_path_is_followed_by_the_right_turn(chat: Chat) -> None:
    first = said("write a class")
    whole = chat.alone(first)
    drawn = chat.service.target.tokenizer.encode(whole, add_special_tokens=False)
    for token in drawn[3:13:5]:
        ended = chat.answered(first, stop_token_ids=[token], prompt_cache_key="ours")
        second = said("write a class", ended["message"]["content"], "go on")
        text = chat.reusing(second)
        assert text == chat.alone(second)


@pytest.mark.parametrize("chat", CONVOLUTION, indirect=True)
def test_a_cancelled_answer_is_followed_by_the_right_turn(chat: Chat) -> None:
    first = said("write a test")
    wanted = chat.alone(first, max_tokens=40)
    body = {"messages": first, "max_tokens": 160, "temperature": 0, "ignore_eos": True,
            "stream": True, "prompt_cache_key": "ours"}  # fmt: skip
    for pieces in (1, 4):
        with chat.client.stream("POST", CHAT, json=body) as answer:
            lines = (line for line in answer.iter_lines() if line)
            for _ in range(pieces):
                next(lines)
        until = time.monotonic() + 20
        while chat.service.status().running and time.monotonic() < until:
            time.sleep(0.005)
        assert chat.reusing(first, max_tokens=40) == wanted
    assert chat.service.counters.requests["cancelled"] == 2


# -- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next", "falcon_h1", "kimi_linear", "jamba"])
def test_a_row_is_counted_with_its_states_and_what_waits_for_them(kind: str) -> None:
    """Of what a slot takes, the states twice (a snapshot), and what the fed tokens leave pending
    until their path is known: as they are in a cache of several rows."""
    target, policy = Target.from_model(tiny_hybrid(kind)), make_policy(CHAIN)
    length, rows, fed = 64 + policy.nodes + 2, 3, policy.nodes + 1
    kv = target.lm.new_kv(rows, length)
    assert isinstance(kv, StateKV)
    caches = tensor_bytes([kv.key_ZJLE, kv.value_ZJLE])
    states = tensor_bytes([kv.state.conv, kv.state.recurrent])
    row_B, kept_B = torch.arange(rows), torch.zeros(rows, dtype=torch.long)
    kv.begin(tuple(range(rows)), row_B, kept_B, fed, fed)
    at_BT = torch.arange(fed).expand(rows, -1)
    target.lm.forward(at_BT, at_BT, target.lm.chain_masks(kept_B, fed, fed), kv)
    waiting = tensor_bytes([kv.state._inputs, kv.state._pending])
    rates = 0 if kind != "jamba" else tensor_bytes([x.rate_IY for x in kv.state._pending.values()])
    room = room_for(target, policy, Limits(max_len=64))
    taken = (caches + 2 * states + waiting - rates) // rows
    assert room.slot_bytes == pytest.approx(taken, rel=0.01)


def test_as_many_rows_are_admitted_as_states_and_prompts_leave_room_for() -> None:
    target, policy = Target.from_model(tiny_hybrid("qwen3_next")), make_policy(CHAIN)
    slot = room_for(target, policy, Limits(max_len=64)).slot_bytes
    chunk = 16 * target.lm.pending_bytes  # of the prompt tokens that a round reads
    assert slot > 2 * target.lm.state_bytes
    for memory, slots in ((3 * slot + chunk, 3), (3 * slot + chunk - 1, 2)):
        limits = Limits(max_len=64, memory=memory, prefill_chunk=16)
        assert room_for(target, policy, limits).slots == slots
    with pytest.raises(ResourceError, match="does not fit in memory"):
        room_for(target, policy, Limits(max_len=64, memory=slot, prefill_chunk=16))
