"""Training on a GPU at the 8B's shape: the seconds of a step, the share of the GPU, the memory.

    python benchmarks/gpu_train.py --out runs/gpu
    python benchmarks/gpu_train.py --out runs/gpu --dry-run

The target has random weights in bfloat16; recipes are llama3-8b-eagle3 and others of that target,
options and draft vocabulary as they stand there. A step: the target reads the rows, loss, backward
pass, update. `mfu`: floating-point operations that the code itself asks for (counted by
torch.utils.flop_counter in one step, work that is computed again included), by the peak of the data
sheet; `peak_over_plan`: most bytes of tensors over those of `specctl plan`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from gpu_common import LLAMA_8B, SMALL, Cases, known_target, parser, peak, reset_peak, seconds
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from specctl.core.batch import HeadRows, TrainBatch
from specctl.core.drafter import Drafter
from specctl.core.vocab import VocabMap
from specctl.drafters.losses.align import AlignedRows
from specctl.drafters.losses.head_losses import LinearHead, LossOptions, head_loss
from specctl.models.llama.llama import LlamaShape
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import Recipe
from specctl.runtime.target.target import Target
from specctl.train.assemble import build_drafter
from specctl.train.features.capture import capture
from specctl.train.init.initial import completed
from specctl.train.planning.hardware import GPUS
from specctl.train.planning.step_bytes import StepSettings, step_bytes
from specctl.train.step.compiled_layers import BACKEND, compile_layers
from specctl.train.step.optim import Gradient, build_optimizers

PARTS = ("target", "loss", "backward", "update")
RECIPES = ("llama3-8b-eagle3", "llama3-8b-eagle", "llama3.1-8b-dflash", "llama3-8b-medusa")
ROWS = ((1, 2048), (4, 2048), (8, 2048), (1, 8192), (1, 16_384))  # the first recipe; others: [1]
DRY_ROWS = ((1, 32), (2, 32))
DRY_SETS = {"llama3.1-8b-dflash": ("drafter.options.taps=[0,2]", "drafter.options.mask_id=null")}


def recipe_of(name: str, rows: int, seq_len: int, is_dry: bool, *more: str) -> Recipe:
    sets = [f"train.rows={rows}", f"train.seq_len={seq_len}", "drafter.init=null", *more]
    if is_dry:
        sets += ["vocab.size=64", *DRY_SETS.get(name, ())]
    return load_recipe(name, sets=sets)


def config_of(shape: LlamaShape) -> Any:
    """The shape as transformers writes it, for a plan."""
    return AutoConfig.for_model(
        "llama", vocab_size=shape.vocab_size, hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size, tie_word_embeddings=False,
    )  # fmt: skip


def _flops(products: int, query: int, ends: int) -> Callable[..., int]:
    """Of the flash kernel for packed documents, which the counter knows for equal heads alone:
    so many products of a causal triangle; where its queries and ends of documents are given."""

    def count(*args: Any, **kwargs: Any) -> int:
        _, num_heads, width = args[query].shape
        square = int(args[ends].long().diff().square().sum())
        return products * num_heads * width * square

    count._get_raw = True  # type: ignore[attr-defined]
    return count


DOCUMENTS = {
    torch.ops.aten._flash_attention_forward: _flops(2, 0, 3),
    torch.ops.aten._flash_attention_backward: _flops(5, 1, 6),
}


class Step:
    """One step of a recipe, its parts timed."""

    def __init__(self, recipe: Recipe, target: Target, backend: str) -> None:
        self.recipe, self.target, device = recipe, target, target.device
        size, vocab_size = recipe.vocab.size, target.spec.vocab_size
        vocab = None if size is None else VocabMap(torch.arange(int(size)), vocab_size)
        complete = completed(recipe.drafter, target.spec)
        self.drafter: Drafter = build_drafter(complete, recipe.train, target.spec, vocab)
        self.drafter.to(device, torch.float32)
        if self.drafter.needs().borrow:
            self.drafter.bind(target.borrowed())
        if recipe.train.compile:
            compile_layers(self.drafter.module, self.drafter.family, backend)
        trainable = self.drafter.trainable()
        sizes = frozenset({vocab_size, int(size or 0)})
        self.optimizers = build_optimizers(trainable, recipe.train, sizes)
        self.gradient = Gradient(trainable)
        shape = recipe.train.rows, recipe.train.seq_len
        at = torch.arange(shape[1], device=device).expand(shape).contiguous()
        ids = torch.randint(0, vocab_size, shape, device=device)
        everywhere = torch.ones(shape, dtype=torch.bool, device=device)
        self.batch = TrainBatch(ids, everywhere, torch.zeros_like(ids), at)

    def __call__(self, mark: Callable[[], float] = lambda: 0.0) -> list[float]:
        marks = [mark()]
        self.gradient.zero()
        full = capture(self.target, self.batch, self.drafter.needs())
        marks.append(mark())
        is_half = self.recipe.train.precision == "bf16"
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=is_half):
            out = self.drafter.loss(full)
        marks.append(mark())
        out.sum.backward()  # type: ignore[no-untyped-call]
        marks.append(mark())
        count = max(float(out.count), 1e-9)
        norm = self.gradient.norm(count)
        assert norm == norm, "the gradient is not finite"
        self.gradient.divide(count, norm)
        for optimizer in self.optimizers.values():
            optimizer.step()
        marks.append(mark())
        return [end - start for start, end in pairwise(marks)]


def planned_bytes(recipe: Recipe, shape: LlamaShape, target: Target) -> int:
    """What `specctl plan` says of a step: all that stays, and its highest phase."""
    rows = recipe.train.rows
    size = recipe.vocab.size
    settings = StepSettings(recipe.drafter, recipe.train, size if isinstance(size, int) else None)
    found = step_bytes(settings, config_of(shape), target.spec, "bfloat16", is_gpu=True, rows=rows)
    resident = found.target + found.weights + found.gradient + found.optimizer
    return resident + found.batch


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--no-plan", action="store_true", help="plans are traced on the host")
    args = options.parse_args()
    cases = Cases("train", args)
    shape, device = SMALL if cases.dry else LLAMA_8B, cases.device
    name = "h100" if cases.dry else cases.found["device"].lower()
    speed = next((gpu.speed for kind, gpu in GPUS.items() if kind in name.replace(" ", "")), None)

    @cache
    def target() -> Target:
        torch.manual_seed(0)
        return known_target(shape, torch.bfloat16, device)

    def mark() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def step_case(recipe: Recipe) -> dict[str, Any]:
        target()
        reset_peak(device)
        step = Step(recipe, target(), "eager" if cases.dry else BACKEND)
        began = time.perf_counter()
        step(mark)
        first = time.perf_counter() - began
        with FlopCounterMode(display=False, custom_mapping=DOCUMENTS) as counter:
            step()
        reset_peak(device)
        timed = [step(mark) for _ in range(2 if cases.dry else 5)]
        held = peak(device)
        plan = None if args.no_plan else planned_bytes(recipe, shape, target())
        parts = {f"{part}_s": median(one[i] for one in timed) for i, part in enumerate(PARTS)}
        whole = median(sum(one) for one in timed)
        operations = counter.get_total_flops()
        return {
            "first_step_s": first,
            "step_s": whole,
            **parts,
            "tokens_per_second": recipe.train.rows * recipe.train.seq_len / whole,
            "flops": operations,
            "mfu": None if speed is None else operations / whole / speed,
            "peak_bytes": held,
            "planned_bytes": plan,
            "peak_over_plan": None if held is None or plan is None else held / plan,
        }

    def head_case(tokens: int, vocab: int) -> dict[str, Any]:
        """The head loss alone, forward and gradients, and the share of its three products."""
        torch.manual_seed(0)
        width, half = shape.hidden_size, torch.bfloat16
        state = torch.randn(tokens, width, device=device, requires_grad=True)
        weight = torch.randn(vocab, width, device=device).mul_(width**-0.5).requires_grad_()
        source = HeadRows(
            torch.randn(tokens, width, device=device, dtype=half), weight.detach().to(half)
        )
        row = torch.arange(tokens, device=device)
        aim = AlignedRows(row, row % vocab, row, source)

        def loss() -> None:
            with torch.autocast(device.type, half):
                head_loss(state, LinearHead(weight), aim, None, LossOptions()).sum.backward()

        def product(source: HeadRows = source) -> None:
            torch.nn.functional.linear(source.state_RD, source.weight_VD)

        reset_peak(device)
        spent = seconds(loss, device, 2 if cases.dry else 10)
        held = peak(device)
        bare = seconds(product, device, 2 if cases.dry else 10)
        return {"loss_ms": 1e3 * spent, "of_four_products": 4 * bare / spent, "peak_bytes": held}

    cases.case("head loss", lambda: head_case(*((64, 96) if cases.dry else (8192, 32_000))))
    rows = DRY_ROWS if cases.dry else ROWS
    for index, recipe in enumerate(RECIPES):
        for count, length in rows if index == 0 else rows[1:2]:
            made = recipe_of(recipe, count, length, cases.dry)
            cases.case(f"{recipe}, {count} x {length}", lambda made=made: step_case(made))
    for count, length in rows:
        made = recipe_of(RECIPES[0], count, length, cases.dry, "train.compile=true")
        name = f"{RECIPES[0]}, {count} x {length}, compiled"
        cases.case(name, lambda made=made: step_case(made))
    cases.finish()


if __name__ == "__main__":
    main()
