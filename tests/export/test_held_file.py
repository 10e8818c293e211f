"""A package that holds a GGUF file: a draft model whose vocabulary is trimmed, still packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.api.arguments.drafting import load_drafter
from specctl.api.export import export
from specctl.api.generate import generate
from specctl.api.vocab_trim import VocabTrimResult, vocab_trim
from specctl.core.errors import IntegrityError
from specctl.drafters.lm.small_lm import SmallLm
from specctl.export.package.load import read_package
from specctl.export.package.manifest import read_manifest
from specctl.models.native.library import no_int8
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target, load_target
from specctl_testing.export.gguf_files import rewritten

PROMPT = "def f(x):\n    return x\n\ndef f(x):"
SIZE = 509  # no multiple of the 16 rows that are packed together
needs_packing = pytest.mark.skipif(no_int8() is not None, reason=f"not packed: {no_int8()}")
KINDS = {"tied Q8_0": ("Q8_0", False), "own head Q4_1": ("Q4_1", True)}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def file(request: Any, tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target packed, its head the embedding or its own."""
    kind, has_head = request.param
    kinds = {"token_embd.weight": "Q8_0", "_norm.weight": "F32", "weight": kind}
    path = tmp_path_factory.mktemp("held") / f"small-{kind}.gguf"
    return rewritten(tiny_gguf, path, kinds, has_head)


@pytest.fixture(scope="module")
def done(
    file: Path, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory
) -> VocabTrimResult:
    """The file with a trimmed vocabulary."""
    return vocab_trim(
        str(file), tmp_path_factory.mktemp("trimmed") / "out", target=tiny_target, size=SIZE,
        num_prompts=1, max_new_tokens=8, recipe="fr-spec",
    )  # fmt: skip


def logits(drafter: Any, ids: list[int]) -> Tensor:
    lm = drafter.lm
    ids_BS = torch.tensor([ids])
    with torch.no_grad():
        masks = lm.document_masks(torch.zeros_like(ids_BS))
        found = lm.dense(ids_BS, torch.arange(len(ids))[None], masks).logits_BTV
    assert found is not None
    return drafter.draft_logits(found)[0]


def text(target: Target, drafter: str | None) -> tuple[tuple[int, ...], float]:
    sampling = Sampling(max_new_tokens=24, ignore_eos=True)
    found = generate(target, [target.encode(PROMPT)], sampling=sampling, drafter=drafter)
    return tuple(found.outputs[0].token_ids), found.stats.tau


def test_kept_ids_have_the_logits_of_the_whole_file(
    done: VocabTrimResult, file: Path, tiny_target: Target
) -> None:
    whole, cut = (load_drafter(str(each), tiny_target) for each in (file, done.package))
    assert isinstance(cut, SmallLm)
    assert cut.vocab is not None
    assert cut.vocab.size == SIZE
    ids = tiny_target.encode(PROMPT)
    assert torch.equal(logits(cut, ids), logits(whole, ids)[:, cut.vocab.ids_K])


def test_its_text_is_that_of_plain_decoding(done: VocabTrimResult, tiny_target: Target) -> None:
    drafted, tau = text(tiny_target, str(done.package))
    assert drafted == text(tiny_target, None)[0]
    assert tau > 1.5
