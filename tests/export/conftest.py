"""A toy trained family (a bigram table) and packages of it, beside the real families; heads as
other toolkits publish them, and a target of enough layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from specctl.core.drafter import Budget, Drafter, DraftState, Family, Needs, RoundView
from specctl.core.spec import ModelSpec
from specctl.core.tree import DraftTree, NodeKind, chain_tree
from specctl.core.vocab import VocabMap
from specctl.drafters import families
from specctl.export.package.folder import save_package
from specctl.export.package.manifest import CARD, MANIFEST, WEIGHTS, Manifest
from specctl.runtime.target.target import Target
from specctl_testing.export.engine_cases import Change, exported, shaken


@dataclass(frozen=True, slots=True)
class ToyOptions:
    """`taps` are asked for and not used; `scale` is there to be a float."""

    taps: tuple[int, ...] = ()
    borrow: bool = False
    scale: float = 1.0


class Toy(Drafter):
    family = "toy"

    def __init__(self, options: ToyOptions, spec: ModelSpec, vocab: VocabMap | None) -> None:
        super().__init__(options, spec, vocab)
        num_rows = spec.vocab_size if vocab is None else vocab.size
        self.module = nn.ModuleDict({"table": nn.Linear(spec.vocab_size, num_rows, bias=False)})

    def needs(self) -> Needs:
        return Needs(taps=self.options.taps, borrow=self.options.borrow)

    def open(self, space: Any) -> DraftState:
        del space
        return ToyState(self)


class ToyState(DraftState):
    """Greedy chain of bigrams."""

    def __init__(self, drafter: Toy) -> None:
        self.drafter = drafter

    def start(self, slot: int, tokens: Any, taps: Any) -> None:
        del slot, tokens, taps

    def observe(self, outcome: Any) -> None:
        del outcome

    def propose(self, view: RoundView, budget: Budget) -> DraftTree:
        table_VK = self.drafter.module["table"].weight.T
        best_V = table_VK.argmax(-1)
        if self.drafter.vocab is not None:
            best_V = self.drafter.vocab.ids_K[best_V]
        chain, token_B = [], view.root_B
        for _ in range(min(budget.depth, budget.nodes)):
            token_B = best_V[token_B]
            chain.append(token_B)
        if not chain:
            token_BN = view.root_B.new_zeros(len(view.slots), 0)
        else:
            token_BN = torch.stack(chain, dim=1)
        return chain_tree(token_BN, torch.ones_like(token_BN).bool(), NodeKind.POINT)


FAMILY = Family("toy", "bigram table", "none", ToyOptions, Toy, True, ("direct",))
SERVE = {"policy": "direct", "length": 3}


@pytest.fixture(autouse=True)
def _toy_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families(), "toy", FAMILY)


@pytest.fixture(scope="session")
def plain_target(make_target: Callable[..., Target]) -> Target:
    """A random target that claims a tokenizer, a template, a revision and an end of text."""
    made = make_target(num_layers=4, hidden=16, vocab=48)
    return replace(
        made,
        name="some/target",
        revision="a" * 40,
        tokenizer_fingerprint="b" * 64,
        template_digest="c" * 64,
        eos_ids=(2,),
    )


@pytest.fixture
def make_toy(plain_target: Target) -> Callable[..., Toy]:
    """make_toy(vocab=None, **options): a toy drafter that knows the target's likely next tokens."""

    def make(vocab: VocabMap | None = None, seed: int = 0, **options: Any) -> Toy:
        torch.manual_seed(seed)
        return Toy(ToyOptions(**options), plain_target.spec, vocab)

    return make


@pytest.fixture
def save(plain_target: Target, tmp_path: Path) -> Callable[..., Path]:
    """save(drafter, name="package", of=plain_target, **fields) -> the folder of its package."""

    def write(
        drafter: Drafter, name: str = "package", of: Target = plain_target, **fields: Any
    ) -> Path:
        out = tmp_path / name
        about: dict[str, Any] = {
            "serve": SERVE,
            "recipe_digest": "d" * 64,
            "acceptance": None,
            "command": ["specctl", "train-draft", "--target", "some/target"],
        }
        save_package(drafter, of, out, **{**about, **fields})
        return out

    return write


@pytest.fixture
def package(make_toy: Callable[..., Toy], save: Callable[..., Path]) -> Path:
    """A package of a toy with taps."""
    return save(make_toy(taps=(1, 3)))


@pytest.fixture
def reseal() -> Callable[..., None]:
    """reseal(folder, change): edit the manifest's fields and write a manifest that is whole again,
    as a mistaken (or hostile) writer could."""

    def edit(folder: Path, change: Callable[[dict[str, Any]], None] = lambda body: None) -> None:
        import hashlib

        body = json.loads((folder / MANIFEST).read_text())
        for name in list(body["files"]):
            data = (folder / name).read_bytes()
            body["files"][name] = {
                "sha256": hashlib.sha256(data).hexdigest(),
                "bytes": len(data),
            }
        change(body)
        (folder / MANIFEST).write_bytes(Manifest.seal(body).render())

    return edit


@pytest.fixture(scope="session")
def word_tokenizer() -> Any:
    """A tokenizer of 48 words, with an end of text at id 2."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, 48)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>"
    )


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    """Of eight layers: the engines' default layers are three different ones, [2, 4, 5]."""
    made: Target = make_target(num_layers=8, hidden=16, vocab=48, pad_token_id=9)
    return replace(made, name="some/target", eos_ids=(2,))


@pytest.fixture
def publish(target: Target, tmp_path: Path) -> Callable[..., tuple[Drafter, Path]]:
    """publish(to, change, **options): a random head, and a folder as another toolkit leaves it."""

    def make(
        to: str, change: Change | None = None, family: str = "eagle3", **options: Any
    ) -> tuple[Drafter, Path]:
        drafter, out = shaken(family, target, **options), tmp_path / "published"
        exported(drafter, target, out, to)
        for name in (MANIFEST, CARD):
            (out / name).unlink()
        config = json.loads((out / "config.json").read_text())
        tensors = load_file(out / WEIGHTS)
        if change is not None:
            change(config, tensors)
            (out / "config.json").write_text(json.dumps(config))
            save_file({n: t.contiguous() for n, t in tensors.items()}, out / WEIGHTS)
        return drafter, out

    return make
