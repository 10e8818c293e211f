"""First thing on a GPU: does everything compute there what it computes on the CPU?

    python benchmarks/gpu_checks.py --out runs/gpu
    python benchmarks/gpu_checks.py --out runs/gpu --dry-run

Cases: the tests marked gpu, then the tests of runtime and models with the GPU as the device that
`auto` chooses; attention of training (packed documents, one document, long rows, grouped heads,
float32, bfloat16, float16; queries that FlexAttention takes) against one dense softmax in float64;
the head loss; and every family: its loss and gradient on the device against those of the CPU in
float32, and its greedy text on the device, which must be the target's own. A case fails with what
was off by how much.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from gpu_common import LLAMA_8B, Cases, parser, spec_for
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from specctl import Sampling
from specctl.core.batch import TrainBatch
from specctl.core.drafter import Drafter
from specctl.core.forward.masks import document_mask
from specctl.core.language_model import Masks
from specctl.core.vocab import VocabMap
from specctl.drafters import families, family
from specctl.drafters.attention.attention import attend_seen
from specctl.drafters.attention.seen import KeySet, Seen
from specctl.drafters.states import recorded
from specctl.models.compiled import CompiledLM
from specctl.models.llama.fast_llama import FastLlama, LlamaModel
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.target.target import Target
from specctl.train.features.capture import to_device
from specctl_testing.models import build_model

HERE = Path(__file__).resolve().parents[1]
FOLDERS = (
    "tests/models", "tests/runtime/engine", "tests/runtime/verify", "tests/runtime/sampling",
    "tests/runtime/policies", "tests/runtime/target", "tests/drafters/test_contract.py",
)  # fmt: skip
MARKED = "tests/models", "tests/drafters"  # the folders of tests marked gpu
NOTHING_RAN = 5  # exit code of pytest
VOCAB = 24
KEPT = [0, 1, 2, 3, 5, 8, 11, 12, 13, 20, 21]
SMALL: dict[str, dict[str, Any]] = {n: {"layers": 2, "taps": (0, 2)} for n in ("dflash", "dspark")}
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [7], [11, 12, 11, 12, 11])
DEVIATION = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def tests(words: list[str], minutes: float) -> dict[str, Any]:
    """What pytest says in its last line; an error if anything failed."""
    threads = {"OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *words], cwd=HERE, capture_output=True, text=True, timeout=60 * minutes,
        env=os.environ | threads,
    )  # fmt: skip
    last = done.stdout.strip().splitlines()[-1:]
    if done.returncode not in (0, NOTHING_RAN):
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        raise RuntimeError(f"{last}: {failed[:8]}")
    return {"said": last[0] if last else ""}


# -- attention ----------------------------------------------------------------------------------

Shape = tuple[int, int, int, int, int]  # rows, query heads, key/value heads, length, head width
ATTENTIONS: dict[str, tuple[Shape, int]] = {  # and tokens of a document
    "any queries": ((2, 8, 2, 1000, 64), 190),  # not known to be rows of text: FlexAttention
    "packed documents": ((2, 8, 2, 1000, 64), 190),
    "a document a row": ((2, 8, 8, 512, 128), 512),
    "one long row": ((1, 4, 1, 4096, 64), 4096),
}


def dense(query: Tensor, sets: list[KeySet]) -> Tensor:
    """One softmax over all sets, every score in memory."""
    B, H, T, E = query.shape
    scores, values = [], []
    for keys in sets:
        key, value = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (keys.key, keys.value))
        score = query @ key.transpose(-1, -2) * E**-0.5
        own = torch.eye(T, dtype=torch.bool, device=query.device)
        mask = own if keys.seen is None else keys.seen.mask(key.shape[2])
        scores.append(score.masked_fill(~mask, -torch.inf))
        values.append(value)
    out = torch.cat(scores, -1).softmax(-1) @ torch.cat(values, 2)
    return out.transpose(1, 2).reshape(B, T, H * E)


def attention_case(
    shape: Shape, document: int, dtype: torch.dtype, device: torch.device, is_text: bool
) -> dict[str, float]:
    """Three unrolled steps: the largest deviations of output and gradients, as shares of the
    largest number."""
    B, H, J, S, E = shape
    torch.manual_seed(0)
    at = torch.arange(S, device=device).expand(B, S)
    seen = Seen.text(at // document)
    seen = seen if is_text else Seen(seen.first_BT, seen.last_BT)
    widths = [H, *([J] * 6)]
    given = [torch.randn(B, n, S, E, device=device).to(dtype) for n in widths]
    weight = torch.randn(B, S, H * E, device=device)

    def run(call: Any, kind: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(kind).requires_grad_() for x in given]
        pairs = zip(leaves[1::2], leaves[2::2], strict=True)
        sets = [KeySet(k, v, None if i else seen) for i, (k, v) in enumerate(pairs)]
        out = call(leaves[0], sets)
        (out * weight.to(kind)).sum().backward()
        return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]

    wanted, found = run(dense, torch.float64), run(attend_seen, dtype)
    off = [float((f.double() - w).abs().max() / w.abs().max()) for f, w in zip(found, wanted)]  # noqa: B905
    if max(off) > DEVIATION[dtype]:
        raise RuntimeError(f"off by {max(off):.3g} of the largest number: {off}")
    return {"output": off[0], "gradients": max(off[1:])}


# -- the target's layers -------------------------------------------------------------------------


def layers_case(dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Logits and cache of rounds against whole-row float64 on the CPU: rows of unequal length, in
    slots of their own, and rows that stand alike."""
    torch.manual_seed(0)
    shape = replace(LLAMA_8B, num_layers=3, hidden_size=256, vocab_size=300, num_heads=8,
                    num_kv_heads=2, head_dim=64, intermediate_size=700)  # fmt: skip
    there = FastLlama(LlamaModel(shape).to(device, dtype), spec_for(shape))
    here = FastLlama(LlamaModel(shape).double(), spec_for(shape))
    here.module.load_state_dict({n: w.double().cpu() for n, w in there.module.state_dict().items()})
    ids, worst = torch.randint(0, 300, (2, 40)), 0.0

    def off(slots: tuple[int, ...], rows: list[int], starts: list[int], count: int) -> float:
        """Of the logits of a round that feeds so many tokens of these rows."""
        kept = torch.tensor(starts, device=device)
        fed = torch.stack([ids[b, n : n + count] for b, n in zip(rows, starts, strict=True)])
        span, same = max(starts) + count, starts[0] if len({*starts}) == 1 else None
        kv.begin(slots, torch.tensor(slots, device=device), kept, count, span, same)
        at = kept[:, None] + torch.arange(count, device=device)
        out = there.forward(fed.to(device), at, there.chain_masks(kept, count, span), kv)
        found = []
        for b, (row, n) in enumerate(zip(rows, starts, strict=True)):
            text = ids[row : row + 1, : n + count]
            alone = here.document_masks(torch.zeros_like(text))
            whole = here.dense(text, torch.arange(n + count)[None], alone).logits_BTV
            assert whole is not None
            assert out.logits_BTV is not None
            away = out.logits_BTV[b].double().cpu() - whole[0, n:]
            found.append(float(away.abs().max() / whole.abs().max()))
        return max(found)

    for lengths, slots in (([20, 20], (0, 1)), ([20, 13], (0, 1)), ([20, 13], (3, 1))):
        kv = there.new_kv(4, 64)
        with torch.inference_mode():
            alone = [off((slots[b],), [b], [0], n) for b, n in enumerate(lengths)]
            six = off(slots, [0, 1], lengths, 6)
            worst = max(worst, *alone, six, off(slots, [0, 1], [n + 6 for n in lengths], 1))
    if not worst < 2 * DEVIATION[dtype]:
        raise RuntimeError(f"off by {worst:.3g} of the largest logit")
    return {"off": worst}


# -- families -----------------------------------------------------------------------------------


def drafter_of(name: str, target: Target) -> Drafter:
    """The same fresh weights wherever it is."""
    torch.manual_seed(5)
    found = family(name)
    vocab = VocabMap(torch.tensor(KEPT), VOCAB) if found.trainable else None
    drafter = found.build(found.options(**SMALL.get(name, {})), target.spec, vocab)
    drafter.to(target.device, target.dtype)
    if drafter.needs().borrow:
        drafter.bind(target.borrowed())
    return drafter


def batch_of(target: Target, drafter: Drafter) -> TrainBatch:
    """Two documents a row, and what the target says of them."""
    needs = drafter.needs()
    ids = torch.randint(0, VOCAB, (4, 24), generator=torch.Generator().manual_seed(0))
    at = torch.arange(24).expand(4, 24)
    plain = TrainBatch(ids, at % 12 >= 2, at // 12, at % 12)
    plain = to_device(plain, target.device)
    masks = Masks(document_mask(plain.document_BS))
    with torch.no_grad():
        out = target.lm.dense(plain.ids_BS, plain.position_BS, masks, needs.taps, needs.teacher)
    teacher = out.logits_BTV if needs.teacher else None
    return TrainBatch(
        plain.ids_BS, plain.loss_mask_BS, plain.document_BS, plain.position_BS, dict(out.taps),
        teacher,
    )  # fmt: skip


def loss_and_gradient(name: str, target: Target) -> tuple[float, Tensor]:
    drafter = drafter_of(name, target)
    torch.manual_seed(1)
    out = drafter.loss(batch_of(target, drafter))
    mean = out.sum / out.count
    mean.backward()  # type: ignore[no-untyped-call]
    parts = [p.grad.flatten() for p in drafter.trainable().values() if p.grad is not None]
    return float(mean.detach()), torch.cat(parts).double().cpu()


def is_random(name: str, target: Target) -> bool:
    """Whether another seed gives another loss: noise, dropout and anchors are drawn on the device,
    and differ between devices."""
    drafter = drafter_of(name, target)
    batch, found = batch_of(target, drafter), set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        out = drafter.loss(batch)
        found.add(float(out.sum.detach()))
    return len(found) > 1


def family_case(name: str, host: Target, there: Target) -> dict[str, Any]:
    """Its loss here and there, and its text there."""
    found: dict[str, Any] = {}
    if family(name).trainable:
        loss, gradient = loss_and_gradient(name, host)
        other, moved = loss_and_gradient(name, there)
        found["loss"], found["loss_there"] = loss, other
        found["is_random"] = is_random(name, host)
        off = float((gradient - moved).norm() / gradient.norm())
        found["gradient_off"] = off
        if not found["is_random"] and (abs(other - loss) > 1e-4 * abs(loss) or off > 1e-3):
            raise RuntimeError(f"loss {loss} here, {other} there; gradient off by {off}")
    setting = Sampling(temperature=0.0, max_new_tokens=24, ignore_eos=True)
    plain = generate(there, [*PROMPTS], sampling=setting, batch=2)
    policies = family(name).policies
    drafter = drafter_of(name, there)
    replayed = replace(there, lm=CompiledLM(there.lm, "eager"))
    for policy, how in product(policies, (there, replayed)) if drafter.lossless else ():
        made = generate(
            how, [*PROMPTS], drafter=drafter, sampling=setting, batch=2,
            policy=make_policy({"policy": policy}),
        )  # fmt: skip
        if [o.token_ids for o in made.outputs] != [o.token_ids for o in plain.outputs]:
            way = " from recordings" if how is replayed else ""
            raise RuntimeError(f"policy {policy}{way} wrote another text than the target alone")
    return {**found, "policies": len(policies)}


def main() -> None:
    args = parser(__doc__).parse_args()
    recorded.PATIENCE = 2  # drafters are recorded at once, too
    cases = Cases("checks", args)
    device = cases.device

    @cache
    def target(where: torch.device) -> Target:
        model = build_model(num_layers=3, vocab=VOCAB)
        return Target.from_model(model.to(where))

    marked = ("tests/models/test_compiled.py",) if cases.dry else MARKED
    cases.case("tests marked gpu", partial(tests, ["-m", "gpu", *marked], args.minutes))
    for name, (shape, document) in ATTENTIONS.items():
        for dtype in DEVIATION:
            if cases.dry and (shape[3] > 1000 or dtype == torch.float16):
                continue
            kind = str(dtype).removeprefix("torch.")
            cases.case(
                f"attention, {name}, {kind}",
                partial(attention_case, shape, document, dtype, device, name != "any queries"),
            )
    for dtype in DEVIATION:
        kind = str(dtype).removeprefix("torch.")
        cases.case(f"layers, {kind}", partial(layers_case, dtype, device))
    for name in ("eagle3", "medusa", "prompt-lookup") if cases.dry else sorted(families()):
        cases.case(
            f"family {name}",
            lambda name=name: family_case(name, target(torch.device("cpu")), target(device)),
        )
    folders = ("tests/runtime/stops/test_stops.py",) if cases.dry else FOLDERS
    for folder in folders:
        words = [folder] if cases.dry else ["-n", "6", folder]
        cases.case(f"tests {folder}", partial(tests, words, args.minutes))
    cases.finish()


if __name__ == "__main__":
    main()
