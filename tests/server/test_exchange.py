"""Another drafter while a server runs: no answer changes or is lost, and a refusal leaves all."""

from __future__ import annotations

import asyncio
import gc
import os
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from specctl.cli.app.console import Console
from specctl.cli.commands.serve import _name_in, _shelf
from specctl.cli.options.loading import DraftChoice
from specctl.core.drafter import DraftState, Space
from specctl.core.errors import ResourceError, SpecctlError
from specctl.drafters.training_free.prompt_lookup import PromptLookup
from specctl.export.package.folder import save_package
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.team_drafter import drafter_names
from specctl.runtime.policies import make_policy
from specctl.runtime.policies.base import Policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.server.auth import Door, Keys
from specctl.server.drafter_route import Shelf
from specctl.server.engine_thread.exchange import Drafting
from specctl.server.engine_thread.service import Busy, GenerateRequest, Limits, Service
from specctl.server.errors import ApiError
from specctl_testing.drafters.head_cases import make_heads
from specctl_testing.runtime.keys import KEYS, RIGHT
from specctl_testing.runtime.service_requests import (
    alone,
    collect,
    drafter_of,
    requests_of,
    served,
    small_target,
    tokens_of,
)
from specctl_testing.runtime.web import error_of, make_app, request_all, running

CHAIN: Policy = make_policy({"policy": "direct", "length": 5})
LONG = GenerateRequest((10, 11, 10, 11), Sampling(max_new_tokens=400, ignore_eos=True))


@pytest.fixture(scope="module")
def target(make_model: Any) -> Target:
    return small_target(make_model)


def another(target: Target, name: str = "suffix-automaton") -> Drafting:
    return Drafting(drafter_of(target, name), CHAIN, None, name)


def test_answers_before_behind_and_during_an_exchange_are_what_they_are_alone(
    target: Target,
) -> None:
    """Also of requests that have chosen the drafter which leaves while they wait."""
    requests = requests_of(18)

    async def run() -> tuple[list[Any], list[str | None], Service]:
        names: list[str | None] = []
        async with served(target, drafter_of(target), CHAIN, max_batch=3) as service:
            answers = []
            for at in range(3):
                own = requests[6 * at : 6 * at + 6]
                tasks = [asyncio.create_task(collect(service, request)) for request in own[:4]]
                await asyncio.sleep(0.02)  # some are being decoded
                name = ("suffix-automaton", "prompt-lookup", "copyspec")[at]
                change = asyncio.create_task(
                    service.exchange(lambda name=name: another(target, name), 60)
                )
                await asyncio.sleep(0)
                old = replace(own[4], drafts=drafter_names(service.drafting.drafter)[0])
                late = asyncio.create_task(collect(service, old))
                tasks += [late, asyncio.create_task(collect(service, own[5]))]
                now = await change
                names += [now.name, service.status().drafter]
                answers += await asyncio.gather(*tasks)
            return answers, names, service

    answers, names, service = asyncio.run(run())
    for request, pieces in zip(requests, answers, strict=True):
        assert tokens_of(pieces) == alone(target, request).token_ids
    assert names == [n for n in ("suffix-automaton", "prompt-lookup", "copyspec") for _ in "ab"]
    assert service.counters.exchanges == 3
    assert service.counters.requests == {"length": 18}
    assert service.counters.drafts > 0


def test_drafter_and_caches_of_before_are_free_when_the_new_ones_are_reserved(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of the drafter a moment later: it would be put back if that failed."""
    service = Service(target, drafter_of(target), CHAIN, limits=Limits(max_batch=1, max_len=64))
    drafter, caches = weakref.ref(service.drafting.drafter), list[Any]()
    reserve, held = Engine.open, list[int]()

    def opened(engine: Engine, context: int) -> None:
        if engine.drafter is None:  # it warms the target up
            reserve(engine, context)
            return
        gc.collect()
        held.append(sum(cache() is not None for cache in caches))
        reserve(engine, context)
        caches.extend([weakref.ref(engine.reader.kv), weakref.ref(engine.drafting.state)])
        if len(held) == 2:
            raise RuntimeError("out of memory")

    async def run() -> None:
        service.start()
        while service.status().state == "loading":
            await asyncio.sleep(0.005)
        for name in ("too-large", "suffix-automaton", "copyspec"):
            await collect(service, GenerateRequest((10, 11), Sampling(max_new_tokens=4)))
            with suppress(RuntimeError) if name == "too-large" else nullcontext():
                known = "copyspec" if name == "too-large" else name
                await service.exchange(lambda known=known: another(target, known), 60)

    monkeypatch.setattr(Engine, "open", opened)
    asyncio.run(run())
    gc.collect()
    assert held == [0] * 5  # the second one fails, and what was there comes back
    assert drafter() is None
    service.stop()


class Broken(PromptLookup):
    """Cannot be opened."""

    def open(self, space: Space) -> DraftState:
        raise RuntimeError("no memory of its own")


@pytest.mark.parametrize("fails", ["when it is prepared", "when it is opened", "for its size"])
def test_what_cannot_serve_leaves_the_drafter_of_before(
    target: Target, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def prepare() -> Drafting:
        if fails == "when it is prepared":
            raise SpecctlError("a torn package")
        if fails == "when it is opened":
            options = drafter_of(target).options
            return Drafting(Broken(options, target.spec, None), CHAIN, None, "broken")
        found = another(target)
        monkeypatch.setattr(type(found.drafter), "shared_bytes", 1 << 60)
        return found

    kinds = {"for its size": ResourceError, "when it is opened": ResourceError}

    async def run() -> tuple[Any, Any, Service]:
        async with served(target, drafter_of(target), CHAIN, max_batch=2) as service:
            with pytest.raises(kinds.get(fails, SpecctlError)):
                await service.exchange(prepare, 60)
            before = service.counters.drafted
            requests = requests_of(4)
            answers = await asyncio.gather(*(collect(service, request) for request in requests))
            assert service.counters.drafted > before
            return requests, answers, service

    requests, answers, service = asyncio.run(run())
    for request, pieces in zip(requests, answers, strict=True):
        assert tokens_of(pieces) == alone(target, request).token_ids
    assert service.status().drafter == "prompt-lookup"
    assert service.counters.exchanges == 0


def test_an_exchange_that_waits_too_long_is_given_up_and_holds_nobody(target: Target) -> None:
    async def run() -> None:
        async with served(target, drafter_of(target), CHAIN, max_batch=1) as service:
            waited = list[float]()
            service.on_finish.append(lambda found: waited.append(found.queue_seconds))
            ticket = await service.submit(LONG)
            await anext(aiter(ticket))  # it is being decoded
            change = asyncio.create_task(service.exchange(lambda: another(target), 0.05))
            await asyncio.sleep(0)
            with pytest.raises(Busy, match="exchanged already"):
                await service.exchange(lambda: another(target), 60)
            held = await service.submit(requests_of(1)[0])
            gone = await service.submit(requests_of(1)[0])
            gone.cancel()
            with pytest.raises(Busy, match="under way"):
                await change
            ticket.cancel()
            assert [piece async for piece in held][-1].finish_reason == "length"
            assert [piece async for piece in gone] == []
            assert max(waited) > 0.04  # what the exchange held is counted, too
            assert service.status().drafter == "prompt-lookup"

    asyncio.run(run())


ADMIN = "key-of-who-runs-it"


def shelf_of(root: Path, target: Target) -> Shelf:
    def load(path: Path) -> Callable[[], Drafting]:
        if not (path / "drafter").exists():
            raise SpecctlError("this is no package", found=path.name)
        return lambda: another(target, (path / "drafter").read_text())

    return Shelf(root, load)


def test_the_route_takes_the_admin_key_and_the_folder_alone(target: Target, tmp_path: Path) -> None:
    root = tmp_path / "drafters"
    for folder in (root / "new", tmp_path / "secret"):
        folder.mkdir(parents=True)
        (folder / "drafter").write_text("suffix-automaton")
    (root / "empty").mkdir()
    os.symlink(tmp_path / "secret", root / "link")
    service = Service(target, drafter_of(target), CHAIN, limits=Limits(max_batch=2, max_len=256))
    door = Door(KEYS, admin=Keys.of([ADMIN]))
    with (
        running(service, door=door, shelf=shelf_of(root, target)) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        while service.status().state == "loading":
            time.sleep(0.005)

        def send(path: str, key: str | None = ADMIN, **more: Any) -> httpx.Response:
            header = {} if key is None else {"Authorization": f"Bearer {key}"}
            return client.post("/v1/drafter", json={"path": path, **more}, headers=header)

        for key in (None, RIGHT, "nonsense"):
            assert send("new", key).status_code == 401
        outside = ("../secret", str(tmp_path / "secret"), "link", "missing", "new/drafter", "a\0b")
        for path in outside:
            refused = send(path)
            assert refused.status_code == 404, path
            assert "secret" not in error_of(refused)["message"].replace(repr(path), "")
        assert send("empty").status_code == 400
        assert send("new", wait=0).status_code == 400
        assert service.status().drafter == "prompt-lookup"
        changed = send("new")
        assert changed.status_code == 200, changed.text
        header = {"Authorization": f"Bearer {ADMIN}"}
        shown = client.get("/v1/drafter", headers=header).json()
        assert shown["drafter"] == changed.json()["drafter"] == "suffix-automaton"
        assert abs(shown["since"] - time.time()) < 60
        assert client.get("/v1/models", headers=header).status_code == 401


def test_a_folder_that_is_gone_is_no_fault_of_the_server(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "drafters", lambda path: pytest.fail("there is nothing to load"))
    with pytest.raises(ApiError, match="it cannot be read: No such file"):
        shelf.find("new")


def test_a_package_is_served_by_the_servers_flags_under_its_name_in_the_folder(
    target: Target, tmp_path: Path
) -> None:
    """A relative folder; flags that do not fit the package refuse it."""
    drafter = make_heads(target, "eagle3")
    about: dict[str, Any] = {"recipe_digest": "", "acceptance": None, "command": []}
    package = tmp_path / "drafters" / "new" / "package"
    package.parent.mkdir(parents=True)
    serve = {"policy": "dynamic-tree", "length": 5}
    save_package(drafter, target, package, serve=serve, **about)
    os.symlink(tmp_path / "drafters", tmp_path / "link")
    service = Service(target, drafter_of(target), CHAIN, limits=Limits(max_batch=1, max_len=64))

    def drafting(**flags: Any) -> Drafting:
        given = (DraftChoice("prompt-lookup", **flags), service, "fixed", "lossless")
        shelf = _shelf(Console(), tmp_path / "link", *given)
        assert shelf is not None
        return shelf.load(shelf.find("new/package"))()

    at_start = (str(package), "new/package"), ("prompt-lookup",) * 2, (str(tmp_path),) * 2
    for given, name in at_start:  # so that it can be posted to come back
        assert _name_in(tmp_path / "link", given) == name
    found = drafting()
    assert (found.name, found.policy.depth, found.policy.is_chain) == ("new/package", 5, False)
    found = drafting(policy="chain", length=2, draft_options=["head_rank=4"])
    assert (found.name, found.policy.depth, found.policy.is_chain) == ("new/package", 2, True)
    assert found.drafter is not None
    assert found.drafter.options.head_rank == 4
    with pytest.raises(SpecctlError, match=r"drafter\.options\.max_match"):
        drafting(draft_options=["max_match=4"])


def test_without_an_admin_key_there_is_no_such_route() -> None:
    app = make_app()
    for method in ("GET", "POST"):
        assert request_all(app, [(method, "/v1/drafter", {})])[0].status_code == 404
