"""Decoding on a GPU with a target of the 8B's shape: what a round costs, and where the time goes.

    python benchmarks/gpu_decode.py --out runs/gpu
    python benchmarks/gpu_decode.py --out runs/gpu --dry-run

Weights are random and in bfloat16; the text of the target is known beforehand (`KnownText`), so
that an eagle3-shaped drafter does all of its work and yet has exactly as many tokens accepted as a
case asks for. Cases: bandwidth of the device; plain decoding, and the share of the bandwidth that
its weights and cache take; the target's forward over 0 to 63 nodes; rounds with the drafter at an
accepted length of 2, 3 and 4, greedy and drawn; each eagerly and from CUDA graphs, by batch and
context. `busy` is the share of a round in which the GPU computes (torch.profiler); the rest is the
host's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from statistics import median
from typing import Any

import torch
from gpu_common import (
    DRAFT_IDS,
    LLAMA_8B,
    SMALL,
    Cases,
    after,
    bandwidth,
    known_target,
    parser,
    seconds,
    weight_bytes,
)
from torch import Tensor

from specctl import Sampling
from specctl.core.drafter import Drafter, Space, StepState
from specctl.core.forward.masks import chain_mask
from specctl.core.language_model import Feed, LanguageModel, Masks
from specctl.core.vocab import VocabMap
from specctl.drafters import family
from specctl.drafters.states import recorded
from specctl.drafters.states.feature_state import FeatureState
from specctl.drafters.states.tree_layout import Fed
from specctl.models.compiled import CompiledLM
from specctl.models.llama.llama import LlamaShape
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.target.target import Target

MOST_CACHE = 40e9  # bytes of a KV cache that is tried
LENGTH = 5  # of a draft


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured."""

    contexts: tuple[int, ...] = (512, 4096, 16384)
    batches: tuple[int, ...] = (1, 16, 64, 4)
    nodes: tuple[int, ...] = (0, 1, 2, 4, 8, 16, 32, 63)
    accepted: tuple[int, ...] = (2, 3, 4)
    rounds: int = 40
    copied: int = 4_000_000_000


DRY = Sizes((16, 32), (1, 2), (0, 3), (2,), 6, 1_000_000)


@dataclass(frozen=True, slots=True)
class Rounds:
    """Median seconds of a round, and the tokens that a row emits in one."""

    seconds: float
    tau: float
    busy: float | None


def forward_call(lm: LanguageModel, batch: int, context: int, width: int) -> Callable[[], object]:
    """One forward of `width` tokens a row on top of `context` cached ones."""
    device = lm.device
    kv = lm.new_kv(batch, context + width)
    ids_BT = torch.randint(0, lm.spec.vocab_size, (batch, width), device=device)
    kept_B, slot_B = torch.full((batch,), context, device=device), torch.arange(batch).to(device)
    position_BT = kept_B[:, None] + torch.arange(width, device=device)

    @torch.inference_mode()
    def call() -> object:
        mask = chain_mask(kept_B, width, context + width)
        kv.begin(tuple(range(batch)), slot_B, kept_B, width, context + width, context)
        return lm.run(Feed(ids_BT, position_BT, Masks(mask)), kv)

    return call


def forced(drafter: Drafter, accepted: int) -> Drafter:
    """Its drafts are the target's own text for so many tokens, then another; its work stays."""
    opened, vocab_size = drafter.open, drafter.spec.vocab_size
    most = min(DRAFT_IDS, vocab_size)

    def open_forced(space: Space) -> StepState:
        state = opened(space)
        assert isinstance(state, FeatureState)
        newest, nodes, depth = state.newest, state.nodes, [0]

        def told(logits_BMK: Tensor, token_BM: Tensor) -> Tensor:
            said_BM = after(token_BM, vocab_size)
            said_BM = said_BM if depth[0] < accepted else (said_BM + 1) % most
            depth[0] += 1
            return logits_BMK.scatter(-1, said_BM[..., None], 1e4)

        def newest_told(fed: Fed, kept_B: Tensor) -> Tensor:
            depth[0] = 0
            return told(newest(fed, kept_B), fed.newest(fed.ids_BT))

        def nodes_told(token_BM: Tensor, *of: Any) -> Tensor:
            return told(nodes(token_BM, *of), token_BM)

        state.newest, state.nodes = newest_told, nodes_told  # type: ignore[method-assign]
        return state

    drafter.open = open_forced  # type: ignore[method-assign]
    return drafter


def eagle3(target: Target, accepted: int) -> Drafter:
    """Of the published shape, with fresh weights."""
    found, size = family("eagle3"), target.spec.vocab_size
    vocab = VocabMap(torch.arange(min(DRAFT_IDS, size)), size)
    torch.manual_seed(0)
    drafter = found.build(found.options(), target.spec, vocab).to(target.device, target.dtype)
    return forced(drafter, accepted)


def rounds_of(
    target: Target,
    drafter: Drafter | None,
    batch: int,
    context: int,
    sizes: Sizes,
    temperature: float = 0.0,
) -> Rounds:
    """Rounds of the real engine, once every row has been read."""
    policy = None if drafter is None else make_policy({"policy": "chain", "length": LENGTH})
    engine = Engine(target, drafter, policy, num_slots=batch, prefill_chunk=2048)
    each = (LENGTH + 1) * (2 * sizes.rounds + 8)
    setting = Sampling(temperature=temperature, max_new_tokens=each, ignore_eos=True)
    engine.open(context + each)
    if isinstance(lm := target.lm, CompiledLM):
        assert lm.is_recorded_upon(engine.reader.kv), "another engine still holds the cache"
    for index in range(batch):
        prompt = tuple((index + 3 * t) % target.spec.vocab_size for t in range(context))
        engine.submit(index, Request(prompt, setting))
    while len(engine.rows) < batch or any(row.num_rounds < 4 for row in engine.rows):
        engine.step()  # reads the prompts, warms up
    marks, emitted = [time.perf_counter()], 0
    for _ in range(sizes.rounds):
        emitted += sum(len(emission.tokens) for emission in engine.step())
        marks.append(time.perf_counter())
    spent = median(end - start for start, end in pairwise(marks))
    return Rounds(spent, emitted / (batch * sizes.rounds), busy_share(engine, sizes.rounds))


def busy_share(engine: Engine, rounds: int) -> float | None:
    """Share of the time in which the GPU computes; None on a CPU. The profiler slows the host down,
    so that this is a bound from below."""
    if engine.target.device.type != "cuda":
        engine.step()
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(min(10, rounds)):
            engine.step()
        torch.cuda.synchronize()
        spent = time.perf_counter() - began
    return 1e-6 * sum(event.self_device_time_total for event in found.key_averages()) / spent


def cache_bytes(shape: LlamaShape, batch: int, context: int) -> int:
    """Of keys and values in bfloat16."""
    width = shape.num_layers * shape.num_kv_heads * shape.head_dim
    return 2 * 2 * width * batch * context


def main() -> None:
    options = parser(__doc__)
    args = options.parse_args()
    cases = Cases("decode", args)
    sizes, shape = (DRY, SMALL) if cases.dry else (Sizes(), LLAMA_8B)
    device = cases.device

    @cache
    def made() -> Target:
        torch.manual_seed(0)
        return known_target(shape, torch.bfloat16, device)

    @cache
    def target_of(way: str) -> Target:
        if way == "eager":
            return made()
        return replace(made(), lm=CompiledLM(made().lm, "eager" if cases.dry else "inductor"))

    @cache
    def measured_bandwidth() -> float:
        known = cases.found["cases"].get("bandwidth", {}).get("bytes_per_second")
        return float(known or bandwidth(device, sizes.copied))

    def plain(way: str, batch: int, context: int) -> dict[str, Any]:
        found = rounds_of(target_of(way), None, batch, context, sizes)
        assert abs(found.tau - 1) < 1e-9, found
        read = weight_bytes(made().lm.module) + cache_bytes(shape, batch, context)
        return {
            "round_ms": 1e3 * found.seconds,
            "tokens_per_second": batch / found.seconds,
            "bandwidth_share": read / found.seconds / measured_bandwidth(),
            "busy": found.busy,
        }

    def drafted(
        way: str, accepted: int, batch: int, context: int, temperature: float = 0.0
    ) -> dict[str, Any]:
        target = target_of(way)
        # Whole chains at once: what is forced of a node depends on its depth.
        recorded.PATIENCE = None if way == "eager" else 1
        drafter = eagle3(target, accepted)
        found = rounds_of(target, drafter, batch, context, sizes, temperature)
        assert abs(found.tau - accepted - 1) < 1e-6, f"tau {found.tau}, wanted {accepted + 1}"
        return {
            "round_ms": 1e3 * found.seconds,
            "tau": found.tau,
            "tokens_per_second": batch * found.tau / found.seconds,
            "busy": found.busy,
        }

    def forwards(context: int) -> dict[str, Any]:
        lm, times = made().lm, 3 if cases.dry else 10
        each = {n: seconds(forward_call(lm, 1, context, n + 1), device, times) for n in sizes.nodes}
        return {f"{n} nodes, ms": 1e3 * spent for n, spent in each.items()}

    cases.case("bandwidth", lambda: {"bytes_per_second": measured_bandwidth()})
    for context in sizes.contexts:
        cases.case(f"forward, context {context}", lambda c=context: forwards(c))
    for batch, context, way in product(sizes.batches, sizes.contexts, ("graphs", "eager")):
        if cache_bytes(shape, batch, context) > MOST_CACHE:
            continue
        place = f"{way}, batch {batch}, context {context}"
        cases.case(f"plain, {place}", lambda w=way, b=batch, c=context: plain(w, b, c))
        for accepted in sizes.accepted:
            cases.case(
                f"eagle3 {accepted} accepted, {place}",
                lambda w=way, a=accepted, b=batch, c=context: drafted(w, a, b, c),
            )
        cases.case(
            f"eagle3 {sizes.accepted[0]} accepted at T = 0.8, {place}",
            lambda w=way, b=batch, c=context: drafted(w, sizes.accepted[0], b, c, 0.8),
        )
    cases.finish()


if __name__ == "__main__":
    main()
