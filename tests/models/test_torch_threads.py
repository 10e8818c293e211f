"""Forwards in PyTorch run on fewer threads where other work makes more of them slower."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specctl.core.language_model import Feed, RunMasks
from specctl.models.native import threads as native_threads
from specctl.models.torch_threads import (
    CHOSEN,
    around_steps,
    forward_threads,
    forwards_of,
    may_choose,
    most_threads,
)
from specctl.runtime.generate import generate
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target


class Machine:
    """Two cores: 64 tokens take 1.3 s on one thread, and on two .8 s alone, 2.2 s beside a process
    that puts them off their cores."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.preempted, self.threads, self.is_busy = 0.0, 0, 2, True
        for name in CHOSEN:
            monkeypatch.delenv(name, raising=False)
        forget()
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.threads)
        monkeypatch.setattr(torch, "set_num_threads", lambda count: setattr(self, "threads", count))
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        monkeypatch.setattr(native_threads, "preemptions", lambda: self.preempted)

    def read(self, num_tokens: int) -> int:
        """On how many threads so many tokens of a prompt were read."""
        feed = a_feed(num_tokens)
        with forward_threads(feed, num_layers=4):
            ran = self.threads
            seconds = num_tokens / 64 * (1.3 if ran == 1 else 2.2 if self.is_busy else 0.8)
            self.now += seconds
            self.preempted += round(300 * seconds) if self.is_busy else 1
        assert self.threads == 2
        return ran


def forget() -> None:
    forwards_of.cache_clear()
    native_threads.forward_threads_of.cache_clear()


def a_feed(num_tokens: int) -> Feed:
    kept_B = torch.tensor([0])
    ids_BT = torch.zeros(1, num_tokens, dtype=torch.long)
    return Feed(ids_BT, ids_BT, RunMasks(kept_B, num_tokens, num_tokens, ()), (), True)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    yield Machine(monkeypatch)
    forget()


def test_prompts_of_all_lengths_are_read_on_one_thread_beside_a_busy_process(
    machine: Machine,
) -> None:
    rng = random.Random(0)
    ran = [machine.read(rng.randint(64, 500)) for _ in range(100)]
    assert ran.count(1) > 85
    machine.is_busy = False
    ran = [machine.read(rng.randint(64, 500)) for _ in range(300)]
    assert set(ran[-50:]) == {2}


def test_alone_all_threads_read(machine: Machine) -> None:
    machine.is_busy = False
    assert {machine.read(length) for length in range(64, 300)} == {2}


def test_only_forwards_of_generation_choose_and_only_where_nobody_has_chosen(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tiny_target: Target
) -> None:
    feed, kv = a_feed(4), tiny_target.lm.new_kv(1, 16)
    with torch.no_grad():
        assert may_choose(feed, kv)
        assert not may_choose(feed, None)
        for name in CHOSEN:
            monkeypatch.setenv(name, "2")
            assert not may_choose(feed, kv)
            monkeypatch.delenv(name)
        machine.threads = 1
        assert not may_choose(feed, kv)
        machine.threads = 2
    assert not may_choose(feed, kv)  # with gradients


@pytest.mark.parametrize("model_type", ["llama", "phi"])
def test_prompts_of_every_kind_of_model_are_read_so(
    model_type: str, monkeypatch: pytest.MonkeyPatch, make_target: Callable[..., Target]
) -> None:
    """Long ones, which the compiled step leaves to PyTorch: on a CPU with AVX512 they are longer
    than this model reads."""
    for name in CHOSEN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("specctl.models.native.step.most_rows", lambda *given: 32)
    target, most = make_target(model_type), torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    forget()
    generate(target, [[1, 2, 3] * 40], sampling=Sampling(0.0, max_new_tokens=2))
    assert native_threads.forward_threads_of(2).ended > 0
    torch.set_num_threads(most)
    forget()


def test_around_compiled_steps_no_more_threads_run_than_in_them(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps themselves may take all of them again."""
    native_threads.threads_of.cache_clear()
    with around_steps():
        assert (machine.threads, most_threads()) == (2, 2)
    monkeypatch.setattr(native_threads.threads_of(2), "at", 1)
    with around_steps():
        assert (machine.threads, most_threads()) == (1, 2)
        with around_steps():
            assert machine.threads == 1
        assert machine.threads == 1
    assert (machine.threads, most_threads()) == (2, 2)
    monkeypatch.setenv(CHOSEN[0], "2")
    with around_steps():
        assert machine.threads == 2
    native_threads.threads_of.cache_clear()


def test_rounds_on_fewer_threads_give_the_same_text(
    machine: Machine, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Sampling(0.0, max_new_tokens=24)
    expected = generate(tiny_target, [[1, 2, 3]], sampling=settings).outputs[0].token_ids
    native_threads.threads_of.cache_clear()
    monkeypatch.setattr(native_threads.threads_of(2), "at", 1)
    assert generate(tiny_target, [[1, 2, 3]], sampling=settings).outputs[0].token_ids == expected
    assert machine.threads == 2
    native_threads.threads_of.cache_clear()
