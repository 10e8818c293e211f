"""Latent attention: memory and time of rounds and of a prompt, ours beside transformers'.

    python benchmarks/latent_cache.py
    python benchmarks/latent_cache.py --contexts 4096 --layers 2 --dtype bfloat16

A random model of DeepSeek-V3's attention with an MLP in each layer. `expanded` is our cache with
the keys and values of all heads made anew in every forward, as transformers makes them. The three
are called in turn; times are medians, ratios medians of each turn's ratio with their quartiles.
What they say has to be the same.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from specctl.core.language_model import Feed
from specctl.models.hf.hf_lm import HfLM

WIDTHS = (1, 4, 16)
CHUNK = 512  # of a prompt, as the engine reads it
VOCABULARY = 4096
Step = Callable[[], Tensor]


def model_of(layers: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "deepseek_v3", num_hidden_layers=layers, first_k_dense_replace=layers, hidden_size=1024,
        intermediate_size=2816, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None,
        kv_lora_rank=256, qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=64,
        vocab_size=VOCABULARY, max_position_embeddings=1 << 15,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


class LargestMade(TorchDispatchMode):
    """Bytes of the largest tensor that is made while it is on; views and fills make none."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        there = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if _is_tensor(t)}
        out = func(*args, **(kwargs or {}))
        for made in filter(_is_tensor, tree_leaves(out)):
            if made.untyped_storage().data_ptr() not in there:
                self.bytes = max(self.bytes, made.untyped_storage().nbytes())
        return out


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


class Ours:
    """Our forward behind a context of so many tokens; `absorbs`: without heads."""

    def __init__(self, model: Any, ids: Tensor, room: int, absorbs: bool) -> None:
        self.lm, self.ids = HfLM(copy.deepcopy(model)), ids
        assert self.lm._absorbs, "this transformers does not keep latents"
        self.lm._absorbs = absorbs
        self.context = ids.shape[1]
        self.kv = self.lm.new_kv(1, self.context + room)
        self.prompt()

    def _feed(self, ids: Tensor, start: int) -> Tensor:
        kept_B, span = torch.tensor([start]), start + ids.shape[1]
        self.kv.begin((0,), torch.tensor([0]), kept_B, ids.shape[1], span, start)
        position_BT = start + torch.arange(ids.shape[1])[None]
        masks = self.lm.chain_masks(kept_B, ids.shape[1], span)
        last = (ids.shape[1] - 1,) if ids.shape[1] > max(WIDTHS) else None
        with torch.no_grad():
            out = self.lm.run(Feed(ids, position_BT, masks, only=last), self.kv)
        assert out.logits_BTV is not None
        return out.logits_BTV

    def prompt(self) -> Tensor:
        for start in range(0, self.context, CHUNK):
            logits = self._feed(self.ids[:, start : start + CHUNK], start)
        return logits[:, -1:]

    def round(self, ids: Tensor) -> Tensor:
        return self._feed(ids, self.context)

    def bytes_a_token(self) -> float:
        held = (*self.kv.key_ZJLE, *self.kv.value_ZJLE)
        return sum(each.nbytes for each in held) / self.kv.max_len


class Theirs:
    """transformers' forward and cache, cropped back after a round."""

    def __init__(self, model: Any, ids: Tensor) -> None:
        self.model, self.ids = copy.deepcopy(model), ids
        self.model.set_attn_implementation("sdpa")
        self.prompt()

    def prompt(self) -> Tensor:
        self.cache = DynamicCache(config=self.model.config)
        for start in range(0, self.ids.shape[1], CHUNK):
            logits = self._feed(self.ids[:, start : start + CHUNK], 1)
        return logits

    def _feed(self, ids: Tensor, keep: int) -> Tensor:
        with torch.no_grad():
            out = self.model(input_ids=ids, past_key_values=self.cache, logits_to_keep=keep)
        logits: Tensor = out.logits
        return logits

    def round(self, ids: Tensor) -> Tensor:
        logits = self._feed(ids, 0)
        self.cache.crop(-ids.shape[1])
        return logits

    def bytes_a_token(self) -> float:
        return sum(each.keys.nbytes + each.values.nbytes for each in self.cache.layers) / float(
            self.ids.shape[1]
        )


def in_turn(
    steps: dict[str, Step], repeats: int, after: Callable[[], object] = int
) -> dict[str, list[float]]:
    """CPU milliseconds of every step, called in turns; what comes `after` a step is not counted."""
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            began = time.process_time()
            step()
            spent[name].append(1e3 * (time.process_time() - began))
            after()
    return spent


def row(what: str, steps: dict[str, Step], repeats: int, bound: float) -> None:
    """One line of the table, checked first."""
    said = {name: step() for name, step in steps.items()}
    away = max(float((each - said["transformers"]).abs().max()) for each in said.values())
    size = float(said["transformers"].abs().max())
    assert away <= bound * size, f"{what}: {away:.2g} of {size:.2g} away"
    spent, largest = in_turn(steps, repeats), dict[str, float]()
    for name, step in steps.items():
        with LargestMade() as made:
            step()
        largest[name] = made.bytes / 2**20
    cells = [f"{statistics.median(spent[name]):.1f} ms ({largest[name]:.1f} MiB)" for name in steps]
    for name in ("expanded", "transformers"):
        pairs = zip(spent[name], spent["absorbed"], strict=True)
        low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
        cells.append(f"{middle:.2f}x [{low:.2f}, {high:.2f}]")
    print(f"| {what} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    model = model_of(args.layers, getattr(torch, args.dtype))
    bound = 1e-4 if args.dtype == "float32" else 0.1
    print("| | absorbed | expanded | transformers | expanded / absorbed | theirs / absorbed |")
    print("|---|---|---|---|---|---|")
    for context in args.contexts:
        ids = torch.randint(0, VOCABULARY, (1, context))
        ways: dict[str, Any] = {
            name: Ours(model, ids, max(WIDTHS), name == "absorbed")
            for name in ("absorbed", "expanded")
        }
        ways["transformers"] = Theirs(model, ids)
        for width in WIDTHS:
            fed = torch.randint(0, VOCABULARY, (1, width))
            steps: dict[str, Step] = {
                name: lambda way=way, fed=fed: way.round(fed) for name, way in ways.items()
            }
            row(f"{width} behind {context:,}", steps, args.repeats, bound)
        prompts = {name: way.prompt for name, way in ways.items()}
        row(f"prompt of {context:,}", prompts, max(3, args.repeats // 5), bound)
    config, each = model.config, model.dtype.itemsize
    heads = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    held = {name: way.bytes_a_token() for name, way in ways.items() if name != "expanded"}
    full = args.layers * config.num_attention_heads * heads * each
    print(f"\nbytes a token: {held}; with keys and values of all heads {full:,}")


if __name__ == "__main__":
    main()
