"""Models of transformers folders, trimmed: packaged for our runtime, exported at full width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.core.errors import IncompatibleError
from specctl.core.vocab import VocabMap
from specctl.drafters.lm.small_lm import SmallLm
from specctl.export.formats import export
from specctl.export.package.folder import load_drafter
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

SIZE = 48
KEPT = VocabMap(torch.tensor([0, 1, 2, 3, 5, 8, 13, 21, 30, 40, 47]), SIZE)
KINDS: dict[str, dict[str, Any]] = {
    "tied": {"model_type": "llama", "tie_word_embeddings": True},
    "untied": {"model_type": "llama"},
    "biased": {"model_type": "qwen2"},
    "normed": {"model_type": "qwen3"},
    "windowed": {"model_type": "mistral"},
    "more rows": {"model_type": "llama", "vocab": 64},
    "more rows, tied": {"model_type": "llama", "vocab": 64, "tie_word_embeddings": True},
    "fewer rows": {"model_type": "llama", "vocab": 48 - 1},
}


@pytest.fixture
def target(plain_target: Target) -> Target:
    return replace(plain_target, tokenizer_fingerprint=None)


@pytest.fixture
def sibling(make_model: Callable[..., Any], tmp_path: Path) -> Callable[[str], Path]:
    def write(kind: str) -> Path:
        sizes = {"num_layers": 2, "hidden": 16, "vocab": SIZE, "seed": 3, **KINDS[kind]}
        make_model(**sizes).save_pretrained(tmp_path / "sibling")
        return tmp_path / "sibling"

    return write


def kept_ids(kind: str) -> VocabMap:
    fewer = KINDS[kind].get("vocab", SIZE) < SIZE
    return VocabMap(KEPT.ids_K[:-1], SIZE) if fewer else KEPT


def decode(target: Target, drafter: Any) -> list[tuple[int, ...]]:
    policy = make_policy({"policy": "chain", "length": 3}) if drafter is not None else None
    sampling = Sampling(max_new_tokens=10, ignore_eos=True)
    requests = [Request(p, sampling) for p in ((3, 1, 4), (7, 8, 9, 10))]
    return [done.tokens for done in Engine(target, drafter, policy).run(requests)]


def logits(drafter: Any, ids_1S: torch.Tensor) -> torch.Tensor:
    masks = drafter.lm.document_masks(torch.zeros_like(ids_1S))
    with torch.no_grad():
        out = drafter.lm.dense(ids_1S, torch.arange(ids_1S.shape[1])[None], masks)
    return drafter.draft_logits(out.logits_BTV)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sibling_is_trimmed_packaged_and_read_back(
    kind: str, sibling: Any, target: Target, plain_target: Target, save: Any
) -> None:
    drafter = load_drafter(sibling(kind), target, allow=["padding"])
    assert isinstance(drafter, SmallLm)
    kept = kept_ids(kind)
    back = load_drafter(save(drafter.trimmed(kept)), plain_target)
    assert back.vocab is not None
    assert back.vocab.digest() == kept.digest()
    ids_1S = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 46, 45]])
    torch.testing.assert_close(
        logits(back, ids_1S), logits(drafter, ids_1S)[..., kept.ids_K], atol=1e-5, rtol=1e-5
    )
    assert decode(target, back) == decode(target, None)


@pytest.mark.parametrize("kind", ["tied", "more rows", "biased"])
def test_a_trimmed_sibling_is_exported_at_full_width_with_cut_rows_unreachable(
    kind: str, sibling: Any, target: Target, plain_target: Target, save: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    drafter = load_drafter(sibling(kind), target, allow=["padding"])
    small = drafter.trimmed(KEPT)
    out = tmp_path / "hf"
    export(save(small), "hf", out, plain_target)
    model = AutoModelForCausalLM.from_pretrained(out)
    ids_1S = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.no_grad():
        wide_1SV = model(ids_1S).logits
    assert wide_1SV.shape[-1] == SIZE
    torch.testing.assert_close(
        wide_1SV[..., KEPT.ids_K], logits(small, ids_1S), atol=1e-4, rtol=1e-4
    )
    distribution = wide_1SV.softmax(-1)
    assert float(distribution[..., ~KEPT.t2d()].max()) == 0.0


def test_padding_is_only_accepted_when_asked_for(sibling: Any, target: Target) -> None:
    with pytest.raises(IncompatibleError, match="--allow padding"):
        load_drafter(sibling("more rows"), target)
