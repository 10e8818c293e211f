"""Reflection: one forward that reads a chain, a prompt and the chain again (rule reflect).

    root x1 .. xn | prompt | x1 .. xn

is an ordinary causal run, so nothing needs a mask of its own: the first n + 1 outputs are those
that the round would have, and the outputs from the prompt's last token on are the second reading's,
for the same places. What the run wrote behind the draft is never read again. Rows draft unequally;
the prompt stands behind each row's own drafts. A row without a draft, or without room for both
readings in its context, is read once, as trees are, and drafts with probes behind them.
Letters: B rows, N nodes, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specctl.core.errors import IncompatibleError
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Feed, LanguageModel, LmOut
from specctl.core.messages.foreign_calls import calling_tokenizer
from specctl.core.tree import DraftTree
from specctl.runtime.target.target import Target
from specctl.runtime.verify.relaxed import Relaxation

PROMPT = "\nIs that right? The same once more, checked:\n"
NEVER = -1e6  # logit of an id that a reading masks: infinities would make fused logits no numbers


def reflection_of(target: Target, relaxed: Relaxation | None) -> Reflection | None:
    """The second reading that a relaxed rule wants, if its weight is not 0."""
    if relaxed is None or not relaxed.rule.reads_again or relaxed.values[0] == 0:
        return None
    if target.lm.state_bytes:
        raise IncompatibleError(
            "rule reflect needs a target whose cache can be rolled back",
            found=f"{target.name}, with recurrent states",
            expected="a target of attention alone",
            do="leave --rule out",
        )
    return Reflection(target.lm, prompt_ids(target), relaxed.values[0])


def prompt_ids(target: Target) -> tuple[int, ...]:
    """The prompt between the readings; none without a tokenizer, and nothing of it that the target
    has no embedding for."""
    if target.tokenizer is None:
        return ()
    with calling_tokenizer(f"target {target.name}"):
        ids = target.tokenizer.encode(PROMPT, add_special_tokens=False)
    return tuple(token for token in ids if token < target.spec.vocab_size)


def fused(own_BTV: Tensor, again_BTV: Tensor, weight: float) -> Tensor:
    """[B, T, V]: the logits of both readings, with this weight of the second one; what neither can
    write stays impossible."""
    both_BTV = own_BTV.clamp(min=NEVER).lerp(again_BTV.clamp(min=NEVER), weight)
    return both_BTV.masked_fill_(torch.maximum(own_BTV, again_BTV) == -torch.inf, -torch.inf)


@dataclass(frozen=True, slots=True)
class Reflection:
    """Reads chains twice, with this weight of the second reading."""

    lm: LanguageModel
    prompt: tuple[int, ...]
    weight: float

    def forward(self, feed: Feed, tree: DraftTree, kv: SlotKV) -> tuple[DraftTree, LmOut]:
        """The round's own taps and cache entries, and the logits of both readings."""
        if not tree.num_nodes or not tree.is_chain:
            return tree, self.lm.run(feed, kv)
        count_B1, num_fed = tree.valid_BN.sum(1, keepdim=True), tree.num_nodes + 1
        ids_BT = self._twice(feed.ids_BT, count_B1)
        width, start_B1 = ids_BT.shape[1], kv.aim.start_B1
        out = self.lm.run(self._aimed(feed, ids_BT, kv), kv)
        assert out.logits_BTV is not None
        own_BTV = out.logits_BTV[:, :num_fed].float()
        at_BT = count_B1 + len(self.prompt) + torch.arange(num_fed, device=ids_BT.device)
        row_B1 = torch.arange(len(ids_BT), device=ids_BT.device)[:, None]
        again_BTV = out.logits_BTV[row_B1, at_BT.clamp(max=width - 1)].float()
        end_B1 = start_B1 + 1 + 2 * count_B1 + len(self.prompt)
        is_read_BT = at_BT <= 2 * count_B1 + len(self.prompt)
        is_read_BT = is_read_BT & (count_B1 > 0) & (end_B1 <= self.lm.spec.max_positions)
        both_BTV = fused(own_BTV, again_BTV, self.weight)
        logits_BTV = torch.where(is_read_BT[:, :, None], both_BTV, own_BTV)
        return tree, LmOut(logits_BTV, {tap: out.taps[tap][:, :num_fed] for tap in feed.taps})

    def _twice(self, ids_BT: Tensor, count_B1: Tensor) -> Tensor:
        """[B, 2 N + 1 + prompt]: root and drafts, the prompt, the drafts; padding behind them."""
        num_fed, num_prompt = ids_BT.shape[1], len(self.prompt)
        prompt_T = torch.tensor(self.prompt, dtype=ids_BT.dtype, device=ids_BT.device)
        source_BT = torch.cat([ids_BT, prompt_T.expand(len(ids_BT), -1)], dim=1)
        at_T = torch.arange(2 * num_fed - 1 + num_prompt, device=ids_BT.device)
        behind_BT = at_T - count_B1  # 1 .. prompt, then the drafts again
        again_BT = (behind_BT - num_prompt).clamp(max=num_fed - 1)
        in_prompt_BT = torch.where(behind_BT <= num_prompt, behind_BT + num_fed - 1, again_BT)
        return source_BT.gather(1, torch.where(behind_BT <= 0, at_T, in_prompt_BT))

    def _aimed(self, feed: Feed, ids_BT: Tensor, kv: SlotKV) -> Feed:
        """The feed of the longer run, for which the cache is aimed."""
        aim, width = kv.aim, ids_BT.shape[1]
        slot_B, start_B = aim.slot_B1[:, 0], aim.start_B1[:, 0]
        starts = start_B.tolist()
        same = starts[0] if min(starts) == max(starts) else None
        span = max(starts) + width
        kv.begin(tuple(slot_B.tolist()), slot_B, start_B, width, span, same)
        position_BT = feed.position_BT[:, :1] + torch.arange(width, device=ids_BT.device)
        position_BT = position_BT.clamp(max=self.lm.spec.max_positions - 1)
        masks = self.lm.chain_masks(start_B, width, span)
        return replace(feed, ids_BT=ids_BT, position_BT=position_BT, masks=masks)
