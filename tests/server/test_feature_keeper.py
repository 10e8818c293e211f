"""Features kept beside traffic: they are the target's own, of those who agreed, bounded, whole."""

from __future__ import annotations

import asyncio
import json
import stat
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.cli.options.keeping import check_features, recorder_for
from specctl.core.errors import SpecctlError
from specctl.core.storage.kept_features import (
    AnswerFeatures,
    FeatureFile,
    copy_features,
    feature_files,
    text_key,
)
from specctl.core.storage.traffic_files import Writer, newest_lines, segments
from specctl.drafters.training_free.prompt_lookup import PromptLookup, PromptLookupOptions
from specctl.models.native.library import no_int8
from specctl.runtime.engine.row_features import RowFeatures, layers_kept
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target, load_target
from specctl.server.engine_thread.exchange import Drafting
from specctl.server.engine_thread.service import GenerateRequest, Service
from specctl.server.feature_keeper import FeatureKeeper
from specctl.server.requests.limits import Limits
from specctl_testing.drafters.head_cases import make_heads
from specctl_testing.runtime.service_requests import prompts_of, small_target
from specctl_testing.runtime.web import running

MIB = 1 << 20
ROUNDED = 2.0**-8  # a state in bfloat16, relative to itself
TREE = {"policy": "dynamic-tree", "length": 4, "nodes": 12, "beam": 4}


@pytest.fixture(scope="module")
def target(make_model: Any) -> Target:
    return small_target(make_model)


def drafter_for(target: Target, name: str) -> Any:
    options = {"layers": 1, "taps": (0, 2)} if name == "dflash" else {}
    return make_heads(target, name, **options)


def offline(target: Target, tokens: Sequence[int], layers: tuple[int, ...]) -> dict[int, Any]:
    """[L - 1, D] of each layer: what training computes, without a cache."""
    ids_1S = torch.tensor([list(tokens)])
    masks = target.lm.document_masks(torch.zeros_like(ids_1S))
    with torch.no_grad():
        position_1S = torch.arange(len(tokens))[None]
        out = target.lm.dense(ids_1S, position_1S, masks, layers, logits=False)
    return {layer: out.taps[layer][0, :-1].float() for layer in layers}


def check_own(target: Target, kept: RowFeatures, layers: tuple[int, ...], most: float) -> None:
    """All states are those of a forward over the row's text, but for their rounding."""
    states, tokens = kept.states(), list(kept.tokens)
    assert tuple(states) == layers
    for layer, expected_LD in offline(target, tokens, layers).items():
        assert states[layer].dtype == torch.bfloat16
        assert states[layer].shape == expected_LD.shape
        torch.testing.assert_close(states[layer].float(), expected_LD, rtol=most, atol=most)


def requests() -> list[GenerateRequest]:
    """Greedy and sampled rows of unlike lengths, of which two begin with what one has read."""
    made = [
        GenerateRequest(
            prompt,
            Sampling(0.9 * (i % 2), seed=i, max_new_tokens=4 + 3 * i, ignore_eos=True),
            keeps_features=i != 3,
        )
        for i, prompt in enumerate([(11,), *prompts_of(5)])
    ]
    long = tuple(range(20, 60))
    return made + [
        replace(made[-1], tokens=long + tail, conversation="one") for tail in ((61,), (62, 63), ())
    ]


async def answered(service: Service, given: Sequence[GenerateRequest]) -> list[Any]:
    """Their tickets, when all have ended: first those without a conversation, together."""
    service.start()
    while service.status().state == "loading":
        await asyncio.sleep(0.005)
    tickets = [await service.submit(each) for each in given if each.conversation is None]
    for ticket in tickets:
        assert [piece async for piece in ticket]
    for each in given:
        if each.conversation is not None:
            tickets.append(await service.submit(each))
            assert [piece async for piece in tickets[-1]]
    return tickets


@pytest.mark.parametrize(
    ("name", "policy", "chunk"),
    [("eagle3", TREE, None), ("dflash", {"policy": "chain", "length": 3}, 7), ("medusa", None, 7)],
)
def test_what_is_kept_is_what_training_would_compute(
    target: Target, name: str, policy: Any, chunk: int | None
) -> None:
    """In batches, with prompts in chunks and reused beginnings, chains and trees."""
    drafter = drafter_for(target, name)
    layers = layers_kept(drafter)
    assert target.spec.num_layers in layers
    limits = Limits(max_batch=3, max_len=256)
    limits = limits if chunk is None else replace(limits, prefill_chunk=chunk)
    made = None if policy is None else make_policy(policy)
    service = Service(target, drafter, made, limits=limits, keeps_features=True)
    tickets = asyncio.run(answered(service, requests()))
    service.stop()
    assert service.counters.reused_tokens >= 70
    assert service.counters.accepted > 0 or name == "eagle3"  # fresh weights
    kept = [ticket.features for ticket in tickets]
    assert [each is None for each in kept] == [i == 3 for i in range(len(tickets))]
    for given, each in zip(requests(), kept, strict=True):
        if each is not None:
            assert each.tokens[: len(given.tokens)] == list(given.tokens)
            check_own(target, each, layers, 1.01 * ROUNDED)


@pytest.mark.skipif(no_int8() is not None, reason=f"no compiled step: {no_int8()}")
def test_a_step_in_eight_bits_keeps_what_it_computed(tiny_target: Target) -> None:
    eight = load_target("tiny", dtype="int8")
    drafter = make_heads(eight, "eagle3")
    service = Service(eight, drafter, limits=Limits(max_len=256), keeps_features=True)
    request = GenerateRequest(tuple(range(10, 40)), Sampling(0.0, max_new_tokens=20))
    tickets = asyncio.run(answered(service, [replace(request, keeps_features=True)]))
    service.stop()
    kept, layers = tickets[0].features, layers_kept(drafter)
    check_own(eight, kept, layers, 1.01 * ROUNDED)  # read by that step without a cache
    whole = offline(tiny_target, kept.tokens, layers)
    for layer, state_LD in kept.states().items():
        error = (state_LD.float() - whole[layer]).norm() / whole[layer].norm()
        assert 1e-4 < error < 0.1, f"layer {layer}: {error}"


def test_nothing_is_kept_unless_the_server_keeps_it(target: Target) -> None:
    service = Service(target, drafter_for(target, "eagle3"), limits=Limits(max_len=256))
    tickets = asyncio.run(answered(service, requests()[:2]))
    service.stop()
    assert [ticket.features for ticket in tickets] == [None, None]


def test_another_drafter_has_features_of_its_own_layers_and_one_without_has_none(
    target: Target,
) -> None:
    first, second = drafter_for(target, "eagle3"), drafter_for(target, "dflash")
    assert layers_kept(first) != layers_kept(second)
    said: list[str] = []
    service = Service(
        target, first, limits=Limits(max_len=256), keeps_features=True, say=said.append
    )
    request = requests()[1]

    async def run() -> list[RowFeatures | None]:
        found = [(await answered(service, [request]))[0].features]
        for drafter in (second, PromptLookup(PromptLookupOptions(), target.spec)):
            drafting = Drafting(drafter, make_policy({"policy": "direct", "length": 3}), None, "x")
            await service.exchange(lambda drafting=drafting: drafting, 20.0)
            ticket = await service.submit(request)
            assert [piece async for piece in ticket]
            found.append(ticket.features)
        return found

    one, two, none = asyncio.run(run())
    service.stop()
    assert one is not None
    assert two is not None
    check_own(target, one, layers_kept(first), 1.01 * ROUNDED)
    check_own(target, two, layers_kept(second), 1.01 * ROUNDED)
    assert none is None
    assert any("no features are kept" in line for line in said)


def test_over_http_they_are_kept_of_those_whose_texts_are(target: Target, tmp_path: Path) -> None:
    keeper = FeatureKeeper(tmp_path / "kept", 8 * MIB)
    keeper.begin(Writer("small", target.fingerprint, "tok"))
    drafter = drafter_for(target, "eagle3")
    service = Service(target, drafter, limits=Limits(max_len=256), keeps_features=True)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    common = {"max_tokens": 9, "temperature": 0}
    with running(service, recorder=keeper) as server:
        import httpx

        def send(**body: Any) -> httpx.Response:
            route = "chat/completions" if "messages" in body else "completions"
            return httpx.post(f"{server.url}/v1/{route}", json={**common, **body}, timeout=60)

        talk = [{"role": "user", "content": "keep me"}]
        text = send(prompt="keep me, too").json()["choices"][0]["text"]
        assert send(prompt="keep me, too", stop=[text[2:4]]).status_code == 200
        assert send(messages=talk, stream=True, n=2).status_code == 200
        assert send(prompt="secret", store=False).status_code == 200
        assert send(messages=talk, store=False, stream=True).status_code == 200
        assert send(messages=talk, tools=[tool], tool_choice="none").status_code == 200
        with httpx.stream(
            "POST",
            f"{server.url}/v1/completions",
            json={"prompt": "cut off", "max_tokens": 200, "stream": True, "ignore_eos": True},
        ) as stream:
            next(stream.iter_lines())  # and no more: the request is cancelled
    keeper.close()
    lines = newest_lines(tmp_path / "kept", 100)
    files = feature_files(tmp_path / "kept")
    assert len(files) == len(lines) == keeper.features_kept == 4
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "kept").iterdir()} == {0o600}
    found = copy_features(tmp_path / "kept", tmp_path / "run", lines)
    for line in lines:
        file = found[text_key(line)]
        record = json.loads(file.record(is_whole=False))
        said = target.decode(file.ids[: file.prompt_len])
        assert ("keep me" in said, "secret" in said) == (True, False)
        assert record["tokenizer"] == "tok"
        assert record["loss_mask"].index(1) == file.prompt_len
        states = file.states(10**6, sorted(file.layers))
        for layer, expected_LD in offline(target, file.ids, tuple(sorted(file.layers))).items():
            torch.testing.assert_close(
                states[layer].float(), expected_LD, rtol=1.01 * ROUNDED, atol=1.01 * ROUNDED
            )


def row_features(number: int, count: int = 40) -> RowFeatures:
    state_XLD = torch.full((2, count - 1, 16), float(number), dtype=torch.bfloat16)
    return RowFeatures((1, 3), [number] * count, 3, [state_XLD[:, :5], state_XLD[:, 5:]])


def test_texts_and_features_together_stay_below_the_limit_and_the_oldest_go_first(
    tmp_path: Path,
) -> None:
    limit, most = 40_000, 0
    for first in (0, 30):  # the second server finds what the first has left
        keeper = FeatureKeeper(tmp_path, limit)
        keep = keeper._keep

        def watched(line: bytes, features: Any, keep: Any = keep) -> None:
            nonlocal most
            keep(line, features)
            most = max(most, sum(path.stat().st_size for path in tmp_path.iterdir()))

        keeper._keep = watched  # type: ignore[method-assign]
        keeper.begin(Writer("small", "a" * 64))
        for number in range(first, first + 30):
            keeper.put({"text": f"{number}"}, row_features(number))
            while keeper.written + keeper.dropped <= number - first or keeper._waiting:
                time.sleep(0.001)
        keeper.put({"text": "long"}, row_features(99, 2_000))
        keeper.close()
        assert (keeper.features_kept, keeper.features_dropped, keeper.dropped) == (30, 1, 0)
        assert keeper._waiting == 0
    files = [FeatureFile.open(path) for path in feature_files(tmp_path)]
    numbers = [file.ids[0] for file in files if file is not None]
    assert limit // 2 < most <= limit
    assert numbers == list(range(60 - len(numbers), 60))
    assert len(newest_lines(tmp_path, 100)) == 62 > len(numbers)  # texts outlive features
    (tmp_path / ".features-00000001-x.12.tmp").write_bytes(b"half")
    FeatureKeeper(tmp_path, limit).close()
    assert not list(tmp_path.glob(".features*"))
    recorder_for(None, tmp_path, 0.00001).close()  # type: ignore[union-attr]
    total = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert total <= 10_737  # also of a server that keeps none any more


def test_features_go_with_their_text_evicted_or_deleted(tmp_path: Path) -> None:
    """Texts without features, as of a drafter that learns from none, fill the share of texts."""
    keeper = FeatureKeeper(tmp_path, 80_000)
    keeper.begin(Writer("small", "a" * 64))
    for number in range(3):
        keeper.put({"text": f"{number}"}, row_features(number))
    for number in range(200):
        keeper.put({"text": f"{number:100}"})
    keeper.put({"text": "last"}, row_features(7))
    keeper.close()
    files, lines = feature_files(tmp_path), newest_lines(tmp_path, 1000)
    assert keeper.features_kept == 4
    assert [text_key(lines[-1])] == [path.name.split("-")[2] for path in files]
    for path in segments(tmp_path):
        path.unlink()
    FeatureKeeper(tmp_path, 80_000).close()
    assert not feature_files(tmp_path)


def test_a_file_that_is_torn_or_damaged_is_none(tmp_path: Path) -> None:
    states = row_features(1).states()
    answer = AnswerFeatures(Writer("small", "a" * 64), (1,) * 40, 3, states)
    path = answer.write(tmp_path, 1, b'{"text": "x"}\n')
    body = path.read_bytes()
    assert FeatureFile.open(path) is not None
    for at in (0, 7, 8, 100, len(body) // 2, len(body) - 1):
        path.write_bytes(body[:at])
        assert FeatureFile.open(path) is None, at
        path.write_bytes(body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :])
        assert FeatureFile.open(path) is None, at
    assert not copy_features(tmp_path, tmp_path / "run", [b'{"text": "x"}\n'])
    path.unlink()
    assert FeatureFile.open(path) is None


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("replace_file", OSError(28, "No space left on device")),
        ("save", RuntimeError("DefaultCPUAllocator: can't allocate memory")),
    ],
)
def test_a_disk_or_memory_that_fails_loses_features_and_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception
) -> None:
    def fails(*given: Any) -> None:
        raise error

    monkeypatch.setattr(f"specctl.core.storage.kept_features.{place}", fails)
    keeper = FeatureKeeper(tmp_path, MIB)
    keeper.begin(Writer("small", "a" * 64))
    for number in range(3):
        keeper.put({"text": f"{number}"}, row_features(number))
    keeper.close()
    assert (keeper.written, keeper.dropped) == (3, 0)
    assert (keeper.features_kept, keeper.features_dropped) == (0, 3)
    assert not feature_files(tmp_path)


def test_it_is_refused_where_nothing_would_learn_from_it(target: Target, tmp_path: Path) -> None:
    with pytest.raises(SpecctlError, match="--keep-traffic DIR"):
        recorder_for(None, None, None, keeps_features=True)
    with pytest.raises(SpecctlError, match="prompt-lookup, which does not learn"):
        check_features(target, PromptLookup(PromptLookupOptions(), target.spec), "prompt-lookup")
    with pytest.raises(SpecctlError, match="such as eagle3"):
        check_features(target, None, "none")
    check_features(target, drafter_for(target, "eagle3"), "eagle3")
