"""FastDraft's stages (arXiv 2411.11055) where they are needed: answers are few, text is not."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.drafters import family
from specctl.drafters.lm.small_lm import SmallLm
from specctl.runtime.target.target import Target

VOCAB, STEPS, LAST = 48, 160, 40


def random_chain(source: torch.Generator) -> Tensor:
    """[V, V]: how a token is followed."""
    return (2.5 * torch.randn(VOCAB, VOCAB, generator=source)).softmax(-1)


def written(chain_VV: Tensor, answer_VV: Tensor, seed: int, rows: int = 8) -> TrainBatch:
    """Rows of 33 tokens as one chain writes them, with what the target, the other, thinks there."""
    source = torch.Generator().manual_seed(seed)
    columns = [torch.randint(0, VOCAB, (rows,), generator=source)]
    for _ in range(32):
        columns.append(torch.multinomial(chain_VV[columns[-1]], 1, generator=source)[:, 0])
    ids = torch.stack(columns, 1)
    return TrainBatch(
        ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids),
        torch.arange(33).expand(rows, 33), teacher_BSV=answer_VV[ids].log(),
    )  # fmt: skip


def small(target: Target, loss: str) -> SmallLm:
    torch.manual_seed(1)
    found = family("small-lm")
    shape = {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "head_dim": 8}
    drafter = found.build(found.options(loss=loss, **shape), target.spec, None)
    assert isinstance(drafter, SmallLm)
    return drafter


def trained(target: Target, batches: Iterable[TrainBatch]) -> SmallLm:
    drafter = small(target, "ce")
    optimizer = torch.optim.Adam(drafter.trainable().values(), lr=1e-2)
    for batch in batches:
        out = drafter.loss(batch)
        optimizer.zero_grad()
        (out.sum / out.count).backward()
        optimizer.step()
    return drafter


@torch.no_grad()
def acceptance(target: Target, drafter: SmallLm, batch: TrainBatch) -> float:
    asking = small(target, "kl")
    asking.module.load_state_dict(drafter.module.state_dict())
    total, count = asking.loss(batch).metrics["alpha"]
    return float(total / count)


@pytest.mark.proof
def test_text_first_and_answers_last_beat_either_alone(make_target: Callable[..., Target]) -> None:
    """After as many steps each: four batches of answers over and over, as much text of another
    writer as there are steps, and that text first."""
    source = torch.Generator().manual_seed(7)
    answers = random_chain(source)
    texts = 0.6 * answers + 0.4 * random_chain(source)
    target = make_target(num_layers=2, vocab=VOCAB)
    few = [written(answers, answers, 100 + i) for i in range(4)] * (STEPS // 4)
    many = [written(texts, answers, 1000 + i) for i in range(STEPS)]
    unseen = written(answers, answers, 5, rows=64)
    runs = (few, many, many[:-LAST] + few[:LAST])
    answers_alone, text_alone, both = (acceptance(target, trained(target, r), unseen) for r in runs)
    assert both > text_alone + 0.08
    assert text_alone > answers_alone + 0.08
