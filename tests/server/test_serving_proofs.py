"""A slice of every proof of serving; `make proof-serving` runs them whole."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specctl.server import listen
from specctl.server.requests import body
from specctl.server.requests.limits import Limits
from specctl_testing.runtime.serving import StubService

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A module of benchmarks/ by name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def assert_proved(checks: Sequence[Any]) -> None:
    assert checks
    for check in checks:
        assert check.ok, f"{check.what}: {check.found}"  # whole, where pytest would cut it


@pytest.mark.proof
def test_whatever_the_schema_allows_or_forbids_is_answered_in_words(proof: Any) -> None:
    module = proof("proof_serve_fuzz")
    with module.stub_server() as server:
        assert_proved(module.prove_schema(server, 30, ("fuzzing",), seed=1))


def test_bytes_that_are_no_http_or_json_do_no_harm(
    proof: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = proof("proof_serve_fuzz")
    monkeypatch.setattr(listen, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(body, "BODY_SECONDS", 0.5)
    small = [kind for kind in module.INPUTS if "10 MiB" not in kind.name]
    monkeypatch.setattr(module, "INPUTS", small)
    with module.stub_server() as server:
        # the process of the tests has memory of its own that moves
        found = module.prove_bytes(server, 2 * len(small), slow=2, seed=1, growth=256 << 20)
        assert_proved(found)


def test_prompts_are_read_whole_or_refused_with_counts(proof: Any) -> None:
    module = proof("proof_serve_fuzz")
    with proof("serve_common").tiny_server() as server:
        assert_proved(module.prove_prompts(server, 7, seed=1))


@pytest.mark.parametrize("make_target", ["stub_target", "fallback_target"])
def test_every_script_comes_back_streamed_and_whole(proof: Any, make_target: str) -> None:
    module = proof("proof_serve_streams")
    target = getattr(module, make_target)()
    cases = module.echo_cases(random.Random(1), target, 12)
    with module.stub_server(module.EchoService(target=target)) as server:
        assert_proved(module.prove_streams(server, make_target, cases))


def test_streams_of_the_target_are_whole_and_clients_that_leave_take_nothing(proof: Any) -> None:
    module = proof("proof_serve_streams")
    limits = Limits(max_batch=4, max_new_tokens=400)
    with proof("serve_common").tiny_server(limits=limits) as server:
        cases = module.real_cases(random.Random(1), 4)
        assert_proved(module.prove_streams(server, "tiny", cases))
        assert_proved(module.prove_leaving(server, 8, at_once=8, seed=1))


def test_no_spelling_of_a_path_passes_the_door(proof: Any) -> None:
    module = proof("proof_serve_life")
    with proof("serve_common").stub_server(key=module.RIGHT) as server:
        assert_proved(module.prove_keys(server, every=5))


def test_a_server_that_is_told_to_end_finishes_what_it_has_begun(
    proof: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = proof("proof_serve_life")
    monkeypatch.setattr(module, "READY_SECONDS", 2.0)  # of a loaded machine

    def start() -> Any:
        return proof("serve_common").stub_server(StubService(text="so it goes\n" * 40, delay=0.05))

    assert_proved(module.prove_ending(start, runs=1, streams=6, seed=1))


def test_a_drafter_that_breaks_costs_no_answer(proof: Any) -> None:
    breaks = ("an exception", "NaN in its distribution")
    assert_proved(proof("proof_serve_life").prove_breaking(3, breaks))


def test_common_clients_agree_on_an_answer(proof: Any) -> None:
    clients = proof("serve_clients")
    with proof("serve_common").stub_server() as server:
        chats = (clients.urllib_chat, clients.curl_whole, clients.hub_chat, clients.httpx_stream)
        faults = clients.flow_faults(server, chats, clients.COMPLETIONS, (clients.openai_errors,))
        assert faults == [None] * 7


@pytest.mark.proof
def test_forty_streams_open_together_are_all_whole(proof: Any) -> None:
    assert_proved(proof("proof_serve_load").prove_streams(40))


@pytest.mark.proof
def test_a_crowd_is_refused_to_the_last_one(proof: Any) -> None:
    limits = Limits(max_batch=4, max_queue=4)
    answered, refused, waited = proof("proof_serve_load").prove_overload(5, limits, delay=0.6)
    assert_proved([answered, refused])
    assert waited.cases == 1  # how long is a matter of the machine: `make proof-serve-load`


@pytest.mark.proof
def test_users_and_a_soak_leave_nothing_behind(proof: Any) -> None:
    module = proof("proof_serve_load")
    with proof("serve_common").tiny_server() as server:
        assert_proved(module.prove_users(server, 6, 0.0, seed=1))
    with proof("serve_common").stub_server() as server:
        assert_proved(module.prove_soak(server, 60, 8, seed=1, warm=20))
