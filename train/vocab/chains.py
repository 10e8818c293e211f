"""Chains: what a drafter would say behind every position of texts that the target wrote.

A round of a chain starts at some token (the root) and is accepted as long as its drafts are the
target's own next tokens, so on an accepted path the drafter has read nothing but the target's text.
One pass that drafts from every root along the true text therefore sees every distribution that
decoding could meet, with the whole vocabulary or with any part of it (see `train.acceptance`).
Letters: R roots of one text (root r is followed by answer token r), L drafted tokens, K draft
vocabulary, V target vocabulary, S whole text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.drafter import Drafter, RoundView, Space, StepState
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import HeldoutPrompt

CHUNK_ELEMENTS = 2**24  # float32 draft logits made at once: 64 MiB


@dataclass(frozen=True, slots=True)
class TargetAnswer:
    """What the target wrote after a prompt; `limit` is how much it was allowed to write."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    domain: str
    limit: int


@dataclass(frozen=True, slots=True)
class ScoredChain:
    """One answer seen by both models. `draft_RLK` holds raw draft logits behind root r and l true
    tokens, of the distribution of answer token r + l (zeros past the end); `target_RV` the target's
    logits of answer token r; `label_R` the answer. A round from root r drafts `depth_R[r]`
    tokens."""

    draft_RLK: Tensor
    target_RV: Tensor
    label_R: Tensor
    depth_R: tuple[int, ...]
    domain: str

    @property
    def num_tokens(self) -> int:
        return self.label_R.numel()


def write_answers(
    target: Target,
    prompts: Sequence[HeldoutPrompt],
    new_tokens: int,
    temperature: float = 0.0,
    batch: int = 16,
) -> list[TargetAnswer]:
    """What the target writes after each prompt."""
    requests = [
        Request(p.ids, Sampling(temperature, seed=i, max_new_tokens=new_tokens))
        for i, p in enumerate(prompts)
    ]
    completions = Engine(target, num_slots=max(1, min(batch, len(requests)))).run(requests)
    return [
        TargetAnswer(prompt.ids, tuple(completion.tokens), prompt.domain, new_tokens)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def can_capture(drafter: Drafter, target: Target) -> bool:
    """Whether the drafter drafts token by token (others cannot be led along a given text)."""
    if drafter.needs().borrow:
        drafter.bind(target.borrowed())
    return isinstance(drafter.open(Space(1, 8, 1, target.device, target.dtype)), StepState)


@torch.inference_mode()
def capture_chains(
    target: Target, drafter: Drafter, answers: Sequence[TargetAnswer], length: int
) -> Iterator[ScoredChain]:
    """A Chain per answer, one at a time; the drafter must be stepwise."""
    if drafter.needs().borrow:
        drafter.bind(target.borrowed())
    for answer in answers:
        if answer.tokens:
            yield _capture(target, drafter, answer, length)


def _capture(target: Target, drafter: Drafter, answer: TargetAnswer, length: int) -> ScoredChain:
    text = [*answer.prompt, *answer.tokens]
    ids_1S = torch.tensor([text], device=target.device)
    at_1S = torch.arange(len(text), device=target.device)[None]
    masks = target.lm.document_masks(torch.zeros_like(ids_1S))
    out = target.lm.dense(ids_1S, at_1S, masks, drafter.needs().taps)
    assert out.logits_BTV is not None
    first = len(answer.prompt) - 1
    taps = {tap: value[0] for tap, value in out.taps.items()}
    size = target.spec.vocab_size if drafter.vocab is None else drafter.vocab.size
    step = max(1, CHUNK_ELEMENTS // (length * size))
    roots = range(first, len(text) - 1)
    parts = [
        _draft(drafter, target, text, taps, list(roots[i : i + step]), length)
        for i in range(0, len(roots), step)
    ]
    depths = [
        min(length, answer.limit - r - 1, len(answer.tokens) - r) for r in range(len(answer.tokens))
    ]
    return ScoredChain(
        torch.cat(parts),
        out.logits_BTV[0, first:-1],
        ids_1S[0, first + 1 :],
        tuple(depths),
        answer.domain,
    )


def _draft(
    drafter: Drafter,
    target: Target,
    text: list[int],
    taps: dict[int, Tensor],
    roots: list[int],
    length: int,
) -> Tensor:
    """[R, L, K]: logits from each of the roots (positions in `text`), one slot each."""
    R, device = len(roots), target.device
    state = drafter.open(Space(R, len(text) + length + 1, length, device, target.dtype))
    assert isinstance(state, StepState), "can_capture() says whether a drafter can be led"
    for slot, root in enumerate(roots):
        known = {tap: value[:root] for tap, value in taps.items()}
        state.start(slot, text[: root + 1], known)
    root_R = torch.tensor(roots, device=device)
    slots, tokens = tuple(range(R)), tuple(text[: root + 1] for root in roots)
    slot_R = torch.arange(R, device=device)
    text_S = F.pad(torch.tensor(text, device=device), (0, length))
    rows = [state.root(RoundView(slots, slot_R, text_S[root_R], root_R, tokens)).float()]
    for step in range(length - 1):
        token_R1 = text_S[root_R + 1 + step][:, None]
        parent_R1 = torch.full_like(token_R1, step - 1)
        rows.append(state.expand(token_R1, parent_R1)[:, 0].float())
    return torch.stack(rows, dim=1)
