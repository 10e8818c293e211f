"""Real shapes of hybrids with random weights: plain speed, rounds and the memory of a slot.

    python benchmarks/hybrid_shapes.py
    python benchmarks/hybrid_shapes.py --shapes lfm2-1.2b --contexts 64 --tokens 8

Plain decoding is timed beside transformers' `generate` of the same model, in turns, and has to
write the same tokens. Rounds of chains and of binary trees are timed behind a context, with the
step that moves the states along the accepted path: as they are read here, and with a state made for
every node (`a state a node`), which is how most engines keep states that cannot be rolled back;
both have to give the same logits. Times are medians of CPU seconds of this process, ratios medians
of each turn's ratio with their quartiles.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from latent_cache import Step, in_turn
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from specctl.core.forward.slot_state import StateKV
from specctl.core.language_model import Feed
from specctl.core.tree import DraftTree, NodeKind
from specctl.models.recurrent import state_mixers
from specctl.models.recurrent.state_forms import DecayedInputs, FedTokens, parents_of
from specctl.models.recurrent.state_lm import StateLM
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.generate import default_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

WIDTHS = (1, 4, 8, 16)
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584,
        "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "vocab_size": 248_320, "tie_word_embeddings": True,
    },
    "lfm2-1.2b": {
        "model_type": "lfm2", "hidden_size": 2048, "intermediate_size": 12_288,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "vocab_size": 65_536,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class NodeStates:
    """The states [T, B, H, E, O] behind every fed token."""

    held_TBHEO: Tensor

    def after(self, state_BX: Tensor, path_BP: Tensor) -> Tensor:
        last_B = path_BP.gather(1, (path_BP >= 0).sum(1, keepdim=True) - 1)[:, 0]
        return self.held_TBHEO[last_B, torch.arange(len(last_B))]


def state_a_node(
    given: DecayedInputs, state_BHEO: Tensor, fed: FedTokens
) -> tuple[Tensor, NodeStates]:
    """`read_decayed` by a state for every token, each from its parent's: the gated delta rule
    (arXiv 2412.06464, equation 10). H heads, E key width, O value width."""
    assert given.beta_BHT is not None
    T = given.key_BHTE.shape[2]
    parent_T = [t - 1 for t in range(T)]
    if fed.ancestor_BTT is not None:
        parent_T = parents_of(fed.ancestor_BTT)[0].tolist()
    held = state_BHEO.new_empty(T, *state_BHEO.shape)
    outs = []
    for t, parent in enumerate(parent_T):
        key, query = given.key_BHTE[:, :, t, :, None], given.query_BHTE[:, :, t, None]
        state = held[parent] if parent >= 0 else state_BHEO
        torch.mul(state, given.log_decay_BHTX[:, :, t, :, None].exp(), out=held[t])
        said = key.transpose(2, 3) @ held[t]
        new = given.beta_BHT[:, :, t, None, None] * (given.value_BHTO[:, :, t, None] - said)
        held[t].add_(key * new)
        outs.append((query @ held[t])[:, :, 0])
    return torch.stack(outs, 2), NodeStates(held)


@contextmanager
def reading(read: Callable[..., Any] | None) -> Iterator[None]:
    """Recurrent layers of the gated delta rule read by that function."""
    if read is None:
        yield
        return
    own = state_mixers.read_decayed
    state_mixers.read_decayed = read
    try:
        yield
    finally:
        state_mixers.read_decayed = own


def model_of(shape: str) -> Any:
    torch.manual_seed(0)
    settings = dict(SHAPES[shape])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


class Rounds:
    """Rounds of one row behind a context of so many tokens."""

    def __init__(self, lm: StateLM, context: int, read: Callable[..., Any] | None) -> None:
        self.lm, self.read, self.context = lm, read, context
        kv = lm.new_kv(1, context + max(WIDTHS))
        assert isinstance(kv, StateKV)
        self.kv, self.slot_B = kv, torch.tensor([0])
        ids = torch.randint(0, lm.spec.vocab_size, (1, context))
        self._forward(ids, torch.arange(context)[None], 0, None)
        kv.keep(self.slot_B, torch.tensor([0]), torch.arange(context)[None])
        self.behind = kv.state.snapshot(0)

    def _forward(self, ids: Tensor, at: Tensor, kept: int, tree: DraftTree | None) -> Tensor:
        kept_B, span = torch.tensor([kept]), kept + ids.shape[1]
        self.kv.begin((0,), self.slot_B, kept_B, ids.shape[1], span)
        if tree is None:
            masks = self.lm.chain_masks(kept_B, ids.shape[1], span)
        else:
            masks = self.lm.tree_masks(tree, kept_B, span)
        only = (ids.shape[1] - 1,) if ids.shape[1] > max(WIDTHS) else None
        with torch.no_grad(), reading(self.read):
            out = self.lm.run(Feed(ids, at, masks, only=only), self.kv)
        assert out.logits_BTV is not None
        return out.logits_BTV

    def round(self, ids: Tensor, is_tree: bool) -> Tensor:
        """Feed a root and its nodes, and keep the root with half of the longest path. The next
        round begins where this one did: what puts the states back is not timed (`restore`)."""
        width = ids.shape[1]
        tree, path = None, list(range(width))
        at = self.context + torch.arange(width)[None]
        if is_tree:
            parents = torch.tensor([[(n - 1) // 2 if n else -1 for n in range(width - 1)]])
            ranks = (torch.arange(width - 1)[None] + 1) % 2
            tree = DraftTree(
                ids[:, 1:], parents, ranks, parents >= -1, NodeKind.POINT, width.bit_length()
            )
            at = tree.position_BT(torch.tensor([self.context]))
            path = [width - 1]
            while path[0]:
                path.insert(0, int(parents[0, path[0] - 1]) + 1)
        logits = self._forward(ids, at, self.context, tree)
        kept = path[: (len(path) + 1) // 2]
        self.kv.keep(self.slot_B, torch.tensor([self.context]), torch.tensor([kept]))
        return logits

    def restore(self) -> None:
        self.kv.state.restore(0, self.behind)


def ratio(over: list[float], under: list[float]) -> str:
    low, middle, high = statistics.quantiles([a / b for a, b in zip(over, under, strict=True)], n=4)
    return f"{middle:.2f}x [{low:.2f}, {high:.2f}]"


def plain(model: Any, context: int, tokens: int, repeats: int) -> None:
    """Greedy decoding by us and by transformers."""
    ids = torch.randint(0, model.config.vocab_size, (1, context))
    target = Target.from_model(model)
    sampling = Sampling(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
    request = Request(tuple(ids[0].tolist()), sampling)

    def ours() -> Tensor:
        engine = Engine(target, None, default_policy(None), "auto", num_slots=1)
        return torch.tensor(engine.run([request])[0].tokens)

    def theirs() -> Tensor:
        made: Tensor = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        return made[0, context:]

    same = int((ours() == theirs()).sum())
    spent = in_turn({"specctl": ours, "transformers": theirs}, repeats)
    cells = [f"{1e3 * tokens / statistics.median(each):.2f}" for each in spent.values()]
    print(
        f"\n{tokens} tokens behind a prompt of {context}, tokens a second with the prompt; ", end=""
    )
    print(f"{same} of {tokens} tokens the same\n\n| specctl | transformers | |\n|---|---|---|")
    print(f"| {' | '.join(cells)} | {ratio(spent['transformers'], spent['specctl'])} |", flush=True)


def rounds(lm: StateLM, context: int, repeats: int) -> None:
    """A line for every width, chains and trees."""
    ways = {"own": Rounds(lm, context, None)}
    if any(shape.recurrent for shape in lm.states):
        torch.manual_seed(1)
        ways["a state a node"] = Rounds(lm, context, state_a_node)
        ways["a state a node"].kv = ways["own"].kv
        ways["a state a node"].behind = ways["own"].behind
    alone: list[float] = []
    print(f"\nRounds behind {context} tokens\n\n| | specctl | of a token | a state a node | |")
    print("|---|---|---|---|---|")
    for width in WIDTHS:
        for is_tree in (False, True)[: 1 + (width > 1)]:
            ids = torch.randint(0, lm.spec.vocab_size, (1, width))
            steps: dict[str, Step] = {
                name: lambda way=way, ids=ids, is_tree=is_tree: way.round(ids, is_tree)
                for name, way in ways.items()
            }
            said = {}
            for name, step in steps.items():
                said[name] = step()
                ways[name].restore()
            wanted = said["own"]
            away = max(float((each - wanted).abs().max()) for each in said.values())
            assert away <= 1e-3 * float(wanted.abs().max()), f"{width}: {away:.2g} away"
            spent = in_turn(steps, repeats, ways["own"].restore)
            alone = alone or spent["own"]
            what = f"{'tree' if is_tree else 'chain'} of {width}" if width > 1 else "one token"
            cells = [what, f"{statistics.median(spent['own']):.0f} ms", ratio(spent["own"], alone)]
            for name in list(steps)[1:]:
                cells += [
                    f"{statistics.median(spent[name]):.0f} ms",
                    ratio(spent[name], spent["own"]),
                ]
            print(f"| {' | '.join(cells + ['-'] * (5 - len(cells)))} |", flush=True)


def memory(lm: StateLM) -> None:
    """What a slot and a node hold: counted from the shapes, and as they are held."""
    kv = lm.new_kv(2, 8)
    assert isinstance(kv, StateKV)
    held = sum(each[0].nbytes for each in (*kv.state.conv.values(), *kv.state.recurrent.values()))
    mib, state = 2**20, lm.row_shape.state_bytes(lm.dtype)
    print(f"states of a slot: {state / mib:.2f} MiB, held {held / mib:.2f}; ", end="")
    print(f"of a node {lm.row_shape.pending_bytes(lm.dtype) / mib:.3f} MiB, ", end="")
    rows, nodes = 16, 60
    ours = rows * (state + nodes * lm.row_shape.pending_bytes(lm.dtype)) / 2**30
    theirs = rows * (1 + nodes) * state / 2**30
    print(f"16 rows of 60 nodes {ours:.2f} GiB; with a state a node {theirs:.2f} GiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=[*SHAPES])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256])
    parser.add_argument("--tokens", type=int, default=32, help="of plain decoding")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    for shape in args.shapes:
        model = model_of(shape)
        number = sum(each.numel() for each in model.parameters())
        print(f"\n## {shape}: {number / 1e6:.0f}M parameters, float32\n")
        lm = StateLM(model)
        memory(lm)
        for context in args.contexts:
            plain(model, context, args.tokens, max(3, args.repeats // 2))
            rounds(lm, context, args.repeats)
        del model, lm
        gc.collect()


if __name__ == "__main__":
    main()
