"""A target spread over the processes that called this, against the same target in one piece: it
decodes in step, and is read in turns for rows that differ by process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

import specctl.recipes
from specctl.drafters import families
from specctl.models.hf.spread import is_piece
from specctl.recipes.schema import TargetPart
from specctl.runtime.generate import generate
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target, load_target
from specctl.train.distributed.in_step import InStepLM, in_step
from specctl.train.distributed.ranks import Ranks
from specctl_testing.models import build_model


def write_target(folder: Path) -> None:
    """A random Llama under the embedded tokenizer."""
    build_model(vocab=6144).save_pretrained(folder)
    tiny = Path(specctl.recipes.__path__[0]) / "tiny"
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)


def compared(folder: str, ranks: Ranks) -> list[dict[str, Any]]:
    """What each process finds."""
    plain = load_target(folder, dtype="float32", device="cpu")
    spread = load_target(folder, dtype="float32", device="cpu", tensor_parallel=True)
    read = in_step(TargetPart(name=folder, tensor_parallel=True), spread, ranks)
    rows = 1 + ranks.rank  # the second process has more of them
    ids_BS = torch.arange(rows * 12).view(rows, 12) + 40 * ranks.rank
    document_BS = torch.tensor([[0] * 7 + [1] * 5] * rows)
    position_BS = torch.tensor([[*range(7), *range(5)]] * rows)
    with torch.no_grad():
        found, wanted = (
            lm.dense(ids_BS, position_BS, lm.document_masks(document_BS), (1, 3))
            for lm in (read.lm, plain.lm)
        )
    pairs = [(found.logits_BTV, wanted.logits_BTV)]
    pairs += [(found.taps[tap], wanted.taps[tap]) for tap in (1, 3)]
    whole, own = read.borrowed(), plain.borrowed()
    assert wanted.logits_BTV is not None
    assert isinstance(read.lm, InStepLM)
    product = whole.head_VD @ states(read.lm, ids_BS, position_BS, document_BS).mT
    pairs.append((product.mT, wanted.logits_BTV))
    report = {
        "same answers": answers(spread) == answers(plain),
        "same fingerprint": spread.fingerprint == plain.fingerprint,
        "same shape": spread.spec.num_kv_heads == plain.spec.num_kv_heads,
        "own heads": spread.lm.kv_layers[0].key_heads,
        "pieces": sum(is_piece(p) for p in spread.lm.module.parameters()),
        "away": [float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None],
        "same head": torch.equal(whole.head_VD, own.head_VD),
        "same embedding": torch.equal(whole.embedding_VD, own.embedding_VD),
        "can run": [spread.can_run, read.can_run],
        "plain head": read.lm.has_plain_head,
    }
    return ranks.gather(report)


@torch.no_grad()
def states(lm: InStepLM, ids_BS: Tensor, position_BS: Tensor, document_BS: Tensor) -> Tensor:
    """[B, S, D]: the last states, which the head takes to logits."""
    last = lm.spec.num_layers
    out = lm.dense(ids_BS, position_BS, lm.document_masks(document_BS), (last,), logits=False)
    return out.taps[last]


def answers(target: Target) -> list[tuple[int, ...]]:
    made = families()["medusa"]
    torch.manual_seed(0)
    drafter = made.build(made.options(), target.spec, None)
    drafter.bind(target.borrowed())
    sampling = Sampling(max_new_tokens=10, ignore_eos=True, temperature=0.0)
    done = generate(target, [[5, 6, 7, 5], [9]], drafter=drafter, sampling=sampling, batch=2)
    return [tuple(output.token_ids) for output in done.outputs]
