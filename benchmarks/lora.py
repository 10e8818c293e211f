"""Our parametrizations against peft's layers, for LoRA on drafters: what peft's layers reach, and
what a training step takes.

    python benchmarks/lora.py

First table: additions with numbers in them are put on every trained family twice, as peft's layers
and as parametrizations, and the mean loss is compared with that of the merged drafter. Where
peft's loss is the untouched drafter's, its layers were never called. Second table: seconds of a
step (forward, backward, Adam) on a small Llama of transformers, whose forward does call its
modules: parametrizations, peft, and parametrizations under our own forward, with the difference of
the loss from peft's. Needs peft (extra `lora`).
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Drafter
from specctl.drafters import families
from specctl.models.llama.fast_llama import fast_llama_from_hf
from specctl.recipes.low_rank import LoraPart
from specctl.runtime.target.target import Target
from specctl.train.features.capture import capture
from specctl.train.step.lora import add, additions, attach, merge

RANK, VOCAB, STEPS = 8, 64, 24
PART = LoraPart(rank=RANK, alpha=16.0)


def llama(layers: int, width: int, vocab: int) -> Any:
    config = AutoConfig.for_model(
        "llama", vocab_size=vocab, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=3 * width,
        max_position_embeddings=512, initializer_range=0.1, bos_token_id=None, eos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def mean_loss(drafter: Drafter, batch: TrainBatch) -> float:
    torch.manual_seed(5)
    out = drafter.loss(batch)
    return float((out.sum / out.count).detach())


def reach(target: Target, name: str) -> tuple[float, float, float, int]:
    """How far the loss is from the merged drafter's: untouched, by peft, by ours; and how many of
    the additions peft has no layer for."""
    torch.manual_seed(3)
    drafter = families()[name].build(families()[name].options(), target.spec, None)
    if drafter.needs().borrow:
        drafter.bind(target.borrowed())
    with torch.no_grad():
        for parameter in drafter.trainable().values():
            parameter += 0.05 * torch.randn_like(parameter)
    ids_BS = torch.randint(0, VOCAB, (4, 24), generator=torch.Generator().manual_seed(1))
    at_BS = torch.arange(24).expand(4, 24)
    batch = TrainBatch(ids_BS, at_BS >= 2, torch.zeros_like(ids_BS), at_BS)
    batch = capture(target, batch, drafter.needs())
    untouched = mean_loss(drafter, batch)
    theirs = copy.deepcopy(drafter)
    attach(drafter, PART)
    with torch.no_grad():
        for _, addition in additions(drafter.module):
            addition.up_OR.normal_(std=0.1)
    ours = mean_loss(drafter, batch)
    factors = {name: copy.deepcopy(addition) for name, addition in additions(drafter.module)}
    lacking = with_peft(theirs.module, factors)
    by_peft = mean_loss(theirs, batch)
    merge(drafter.module)
    merged = mean_loss(drafter, batch)
    return abs(untouched - merged), abs(by_peft - merged), abs(ours - merged), lacking


def with_peft(module: Any, factors: dict[str, Any]) -> int:
    """peft's layers with those factors in place of the linear layers; how many it has none for."""
    linear = {n for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    named = {n.removesuffix(".weight"): f for n, f in factors.items()}
    known = {n: f for n, f in named.items() if n in linear}
    config = peft.LoraConfig(r=RANK, lora_alpha=16.0, target_modules=list(known))
    peft.inject_adapter_in_model(config, module)
    for name, factor in known.items():
        layer, rank = module.get_submodule(name), factor.down_RI.shape[0]
        with torch.no_grad():
            layer.lora_A["default"].weight.zero_()[:rank] = factor.down_RI
            layer.lora_B["default"].weight.zero_()[:, :rank] = factor.up_OR
    return len(named) - len(known)


def step_seconds(run: Callable[[], Tensor], parameters: list[nn.Parameter]) -> tuple[float, float]:
    """Median seconds of a step and the loss after all of them."""
    optimizer, taken, loss = torch.optim.Adam(parameters, lr=1e-3), [], 0.0
    for _ in range(STEPS):
        started = time.perf_counter()
        optimizer.zero_grad()
        out = run()
        out.backward()
        optimizer.step()
        taken.append(time.perf_counter() - started)
        loss = float(out.detach())
    return statistics.median(taken[4:]), loss


def speed(rows: int, length: int) -> None:
    model, vocab = llama(4, 256, 2048), 2048
    ids_BS = torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(2))
    at_BS = torch.arange(length).expand(rows, length)
    one_document_BS = torch.zeros_like(ids_BS)
    endings = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    part, found = replace_part(endings), []
    for name in ("peft's layers", "parametrizations", "parametrizations, our forward"):
        here = copy.deepcopy(model).requires_grad_(False)
        lm = fast_llama_from_hf(here) if "our" in name else None
        module = here if lm is None else lm.module
        if name.startswith("peft"):
            config = peft.LoraConfig(r=RANK, lora_alpha=16.0, target_modules=list(endings))
            peft.inject_adapter_in_model(config, module)
            for layer in module.modules():
                if hasattr(layer, "lora_A"):
                    start(layer.lora_A["default"].weight)
        else:
            add(module, dict(module.named_parameters()), part, "the model", "targets")
            for _, addition in additions(module):
                start(addition.down_RI)

        def run(here: Any = here, lm: Any = lm) -> Tensor:
            if lm is None:
                logits = here(input_ids=ids_BS).logits
            else:
                logits = lm.dense(ids_BS, at_BS, lm.document_masks(one_document_BS)).logits_BTV
            return nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten()
            )

        seconds, loss = step_seconds(run, [p for p in module.parameters() if p.requires_grad])
        found.append((name, seconds, loss))
    for name, seconds, loss in found:
        print(f"| {name} | {rows} x {length} | {1e3 * seconds:.1f} ms "
              f"| {seconds / found[0][1]:.2f} | {abs(loss - found[0][2]):.1e} |")  # fmt: skip


def replace_part(endings: tuple[str, ...]) -> LoraPart:
    return PART.model_copy(update={"targets": endings})


def start(down_RI: Any) -> None:
    """The same first numbers for either."""
    with torch.no_grad():
        generator = torch.Generator().manual_seed(down_RI.shape[1])
        down_RI.copy_(torch.randn(down_RI.shape, generator=generator) * down_RI.shape[1] ** -0.5)


def main() -> None:
    print(
        f"torch {torch.__version__}, peft {peft.__version__}, {torch.get_num_threads()} threads\n"
    )
    target = Target.from_model(llama(3, 32, VOCAB))
    print("| family | untouched | peft's layers | parametrizations | without a layer in peft |")
    print("|---|---|---|---|---|")
    for name, family in families().items():
        if family.trainable:
            off, theirs, ours, lacking = reach(target, name)
            print(f"| {name} | {off:.1e} | {theirs:.1e} | {ours:.1e} | {lacking} |")
    print("\n| step | tokens | seconds | against peft | loss from peft's |\n|---|---|---|---|---|")
    for rows, length in ((2, 64), (8, 256)):
        speed(rows, length)


if __name__ == "__main__":
    main()
