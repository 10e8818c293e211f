"""What makes an EAGLE-3 head draft further after few steps: one thing switched at a time.

Heads for the embedded target on the first batches of benchmarks/peers.py, the target's states read
once. Tau here is its expectation at every position of the target's own continuations of held-out
prompts (a chain of 5; greedy: matches, T = 0.8: products of alpha), which needs no decoding and is
steadier than decoding; the error is the standard error of the paired difference over prompts. Each
case is kept, the same command goes on.

    python benchmarks/eagle3_switches.py --out runs/peers-train --steps 50
    python benchmarks/eagle3_switches.py --out runs/peers-train --steps 40 --skip 72 \\
        --first "the recipe" --only "the recipe"
Letters: B rows, K draft vocabulary, S sequence, V target vocabulary.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peers import OPTIONS, recipe_of, rows_of
from torch import Tensor

from specctl import Sampling, generate, load_target
from specctl.core.batch import HeadRows, TrainBatch
from specctl.core.storage.files import write_json
from specctl.core.vocab import VocabMap
from specctl.drafters.features.eagle3 import Eagle3
from specctl.recipes.schema import TrainPart
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts
from specctl.train.data.rows.supply import Order
from specctl.train.features.capture import capture
from specctl.train.step.optim import Gradient, build_optimizers, learning_rate, set_learning_rate
from specctl.train.vocab.draft_vocab import draft_vocab

DEPTH = 5
TEMPERATURES = {"greedy": 0.0, "T = 0.8": 0.8}
NORMS = {"fc_norm": True, "norm_output": True}
RECIPE = {**NORMS, "lm_head": "frozen"}
BEFORE = {"attention_rate": 1.0, "momentum": 0.95}  # of the recipe when the first tables were made
# o_proj and down_proj are zero, fc is the highest tap and little more.
AS_IDENTITY = {**BEFORE, "identity": True}
FIRST = "EAGLE-3, the layer starts as the identity"
CASES: dict[str, dict[str, Any]] = {
    FIRST: AS_IDENTITY,
    "fc_norm, norm_output (EAGLE-3.1)": {**AS_IDENTITY, **NORMS},
    "norm_before_residual": {**AS_IDENTITY, "norm_before_residual": True},
    "all three norms": {**AS_IDENTITY, **NORMS, "norm_before_residual": True},
    "fc starts at 1 / the scale of the taps": {**AS_IDENTITY, "scaled": True},
    "fc starts and learns at that scale": {**AS_IDENTITY, "scaled": True, "slow": True},
    "LM head frozen": {**AS_IDENTITY, "lm_head": "frozen"},
    "steps weigh alike (decay 1)": {**AS_IDENTITY, "decay": 1.0},
    "EAGLE-3.1, LM head frozen": {**AS_IDENTITY, **NORMS, "lm_head": "frozen"},
    "EAGLE-3.1, LM head frozen, random start": {**BEFORE, **NORMS, "lm_head": "frozen"},
    "EAGLE-3, random start": BEFORE,
    "the recipe": RECIPE,
    "the recipe, norm_before_residual": {**RECIPE, "norm_before_residual": True},
    "the recipe, decay 1": {**RECIPE, "decay": 1.0},
    "the recipe, learning rate 1.4e-2": {**RECIPE, "learning_rate": 1.4e-2},
    "the recipe, attention at the rate": {**RECIPE, "attention_rate": 1.0},
    "the recipe, momentum .95": {**RECIPE, "momentum": 0.95},
    "the recipe, attention at the rate, momentum .95": {**RECIPE, **BEFORE},
    "the recipe, LM head learns": {**NORMS},
    "the recipe, LM head learns at .1 of the rate": {**NORMS, "vocab_rate": 0.1},
    "the recipe, loss lk_hybrid": {**RECIPE, "loss": "lk_hybrid"},
}
# Keys of a case that are fields of the recipe's `train`.
TRAINING = ("learning_rate", "vocab_rate", "attention_rate", "momentum")
OURS = ("identity", "scaled", "slow", *TRAINING)  # keys of a case that are no options of the family


class Bench:
    """The target, its states on the batches, and its continuations of held-out prompts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.target: Target = load_target("tiny", dtype="float32")
        recipe = recipe_of(args, 0)
        data = rows_of(args, recipe, self.target)
        vocab = draft_vocab(recipe.vocab, recipe.data, self.target, data)
        assert vocab is not None
        self.vocab: VocabMap = vocab
        self.settings: TrainPart = recipe.train
        self.needs = replace(Eagle3(OPTIONS, self.target.spec, vocab).needs(), teacher_rows=True)
        order, rows = Order(data.num_rows, 0), recipe.train.rows
        self.batches = [
            capture(self.target, data.batch(order.take(step * rows, rows)), self.needs)
            for step in range(args.steps)
        ]
        taps = self.batches[0].taps
        self.scale = float(taps[max(taps)][:, 1:].square().mean().sqrt())
        held = heldout_prompts(self.target, args.skip + args.prompts)[args.skip :]
        prompts = [list(p.ids)[-64:] for p in held]
        self.texts: dict[str, list[TrainBatch]] = {}
        for name, temperature in TEMPERATURES.items():
            how = Sampling(max_new_tokens=args.tokens, ignore_eos=True, temperature=temperature)
            found = generate(self.target, prompts, sampling=how, batch=24).outputs
            pairs = [(p, [*p, *o.token_ids]) for p, o in zip(prompts, found, strict=True)]
            self.texts[name] = [self._batch(pairs[i : i + 24]) for i in range(0, len(pairs), 24)]

    def _batch(self, pairs: list[tuple[list[int], list[int]]]) -> TrainBatch:
        """The mask marks what the target wrote."""
        B, S = len(pairs), max(len(text) for _, text in pairs)
        ids_BS, position_BS = torch.zeros(B, S, dtype=torch.long), torch.arange(S).expand(B, S)
        document_BS, mask_BS = torch.full((B, S), -1), torch.zeros(B, S, dtype=torch.bool)
        for row, (prompt, text) in enumerate(pairs):
            ids_BS[row, : len(text)] = torch.tensor(text)
            document_BS[row, : len(text)] = row
            mask_BS[row, len(prompt) : len(text)] = True
        return capture(self.target, TrainBatch(ids_BS, mask_BS, document_BS, position_BS),
                       self.needs)  # fmt: skip

    @torch.no_grad()
    def taus(self, drafter: Eagle3, name: str) -> Iterator[float]:
        """Per prompt: the mean over positions of 1 + sum_k prod_{j <= k} alpha_j."""
        temperature, ids_K = TEMPERATURES[name], self.vocab.ids_K
        for batch in self.texts[name]:
            B, S = batch.ids_BS.shape
            rows = batch.teacher_rows
            assert isinstance(rows, HeadRows)
            teacher_BSV = F.linear(rows.state_RD, rows.weight_VD).view(B, S, -1)
            count = S - 1 - DEPTH
            kept_BS = torch.ones(B, count)
            tau_BS = torch.ones(B, count)
            for step, normed_BSD in enumerate(drafter.unroll(batch, DEPTH)):
                draft_BSK = drafter.module.lm_head(normed_BSD)[:, :count]
                wanted_BSV = teacher_BSV[:, 1 + step : 1 + step + count]
                if temperature == 0.0:
                    alpha_BS = (ids_K[draft_BSK.argmax(-1)] == wanted_BSV.argmax(-1)).float()
                else:
                    p_BSK = (wanted_BSV / temperature).softmax(-1)[..., ids_K]
                    alpha_BS = torch.minimum(p_BSK, (draft_BSK / temperature).softmax(-1)).sum(-1)
                kept_BS = kept_BS * alpha_BS
                tau_BS = tau_BS + kept_BS
            wrote_BS = batch.loss_mask_BS[:, 2 : 2 + count] & batch.loss_mask_BS[:, -count:]
            yield from ((tau_BS * wrote_BS).sum(1) / wrote_BS.sum(1)).tolist()


def trained(bench: Bench, case: dict[str, Any], steps: int) -> Eagle3:
    """A head of that case after so many steps of the recipe's schedule."""
    torch.manual_seed(0)
    options = {key: value for key, value in case.items() if key not in OURS}
    drafter = Eagle3(replace(OPTIONS, **options), bench.target.spec, bench.vocab)
    drafter.bind(bench.target.borrowed())
    layer, fc = drafter.module.layer, drafter.module.fc.weight
    if case.get("identity"):
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
        fc.data.normal_(std=0.1 * fc.shape[1] ** -0.5)
        fc.data[:, -fc.shape[0] :] += torch.eye(fc.shape[0])
    if case.get("scaled"):
        fc.data.div_(bench.scale)
    changed = {key: case[key] for key in TRAINING if key in case}
    settings = bench.settings.model_copy(update={"steps": steps, **changed})
    sizes = frozenset({bench.target.spec.vocab_size, bench.vocab.size})
    optimizers = build_optimizers(drafter.trainable(), settings, sizes)
    if case.get("slow"):
        first = optimizers["muon"].param_groups[0]
        first["params"] = [p for p in first["params"] if p is not fc]
        optimizers["muon"].add_param_group({**first, "params": [fc], "share": 1.0 / bench.scale})
    gradient = Gradient(drafter.trainable())
    for step, batch in enumerate(bench.batches):
        gradient.zero()
        out = drafter.loss(batch)
        out.sum.backward()  # type: ignore[no-untyped-call]
        count = max(float(out.count), 1e-9)
        gradient.divide(count, gradient.norm(count), settings.clip)
        set_learning_rate(optimizers, learning_rate(step, settings))
        for optimizer in optimizers.values():
            optimizer.step()
    drafter.module.eval()
    return drafter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/peers-train"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--prompts", type=int, default=72)
    parser.add_argument("--skip", type=int, default=0, help="prompts: peers.py measures on 72")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--first", default=FIRST, help="the case that others are compared with")
    parser.add_argument("--only", default="", help="cases whose name contains this, and the first")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(rate=None)  # the recipe's
    args = parser.parse_args()
    kept = args.out / f"switches-{args.steps}.json"
    about = {key: getattr(args, key) for key in ("steps", "prompts", "skip", "tokens")}
    about["train"] = recipe_of(args, 0).train.model_dump(mode="json")
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {"about": about}
    if found["about"] != about:
        raise SystemExit(f"{kept} is of {found['about']}; give another --out")
    bench: Bench | None = None
    if args.first not in CASES:
        raise SystemExit(f"no case {args.first!r}; there are {list(CASES)}")
    for name, case in sorted(CASES.items(), key=lambda item: item[0] != args.first):
        if name in found or (args.only not in name and name != args.first):
            continue
        bench = bench or Bench(args)
        drafter = trained(bench, case, args.steps)
        found[name] = {setting: list(bench.taus(drafter, setting)) for setting in TEMPERATURES}
        write_json(kept, found)
        if not args.json:
            line(name, found, args.first)
    if args.json:
        print(json.dumps(found))


def line(name: str, found: dict[str, Any], first: str) -> None:
    text = f"{name:50s}"
    for setting in TEMPERATURES:
        tau_P = torch.tensor(found[name][setting])
        more_P: Tensor = tau_P - torch.tensor(found[first][setting])
        error = float(more_P.std() / len(more_P) ** 0.5)
        text += (
            f"  {setting} {float(tau_P.mean()):.3f} ({float(more_P.mean()):+.3f} +- {error:.3f})"
        )
    print(text, flush=True)


if __name__ == "__main__":
    main()
