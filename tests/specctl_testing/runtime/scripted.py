"""A target that says what a function of its prompt says, token for token; for one, outlines."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import torch
from tokenizers import decoders
from torch import nn

from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Borrowed, Feed, LanguageModel, LmOut
from specctl.core.spec import ModelSpec
from specctl.runtime.target.target import Target
from specctl_testing.runtime.serving import stub_target

OPENED = "<|assistant|>\n"
LIST = "1. Roots\n2. The trunk\n3. Leaves"
TEXTS = {1: "1. Roots: they drink.", 2: "2. The trunk: it rises.", 3: "3. Leaves: they eat light."}


class ScriptedLM(LanguageModel):
    """Answers a conversation with `say(prompt)`, then ends the turn; what the prompt begins of the
    answer belongs to it. Rows are chains: what a slot has read is kept by position. `widths`: rows
    of every forward that made a token."""

    def __init__(self, target: Target, say: Callable[[str], str]) -> None:
        self.target, self.say, self.widths = target, say, list[int]()
        self.tokenizer = copy.deepcopy(target.tokenizer)  # one thread may use each
        self.module = nn.Module()
        self.module.register_parameter("none", nn.Parameter(torch.zeros(1), requires_grad=False))
        size = target.spec.vocab_size
        self.spec = ModelSpec("scripted", 1, 1, size, 1, 1, 2, 1, 1e-6, 1e4, 4096)
        self._read: dict[int, dict[int, int]] = defaultdict(dict)

    def run(self, feed: Feed, kv: SlotKV | None) -> LmOut:
        assert kv is not None, "it generates"
        num_rows, num_fed = feed.ids_BT.shape
        logits_BTV = torch.zeros(num_rows, num_fed, self.spec.vocab_size)
        for row in range(num_rows):
            read = self._read[int(kv._slot_B1[row])]
            for at in range(num_fed):
                read[int(feed.position_BT[row, at])] = int(feed.ids_BT[row, at])
            wanted = range(num_fed) if feed.only is None else [feed.only[row]]
            for at in wanted if feed.logits else []:
                end = int(feed.position_BT[row, at]) + 1
                token = self._next([read[place] for place in range(end)])
                logits_BTV[row, at, token] = 50
        if feed.logits:
            self.widths.append(num_rows)
        if feed.only is not None:
            logits_BTV = torch.stack([logits_BTV[b, [at]] for b, at in enumerate(feed.only)])
        return LmOut(logits_BTV if feed.logits else None)

    def _next(self, ids: list[int]) -> int:
        text = self.tokenizer.decode(ids)
        prompt, opened, begun = text.rpartition(OPENED)
        if not opened:  # a server warms up
            return 0
        answer = self.say(prompt)
        assert answer.startswith(begun), f"{begun!r} is not how {answer!r} begins"
        rest = self.tokenizer.encode(answer[len(begun) :], add_special_tokens=False)
        return rest[0] if rest else int(self.target.end_of_turn or 0)

    def borrowed(self) -> Borrowed:
        raise AssertionError("a script has no embedding")


def scripted(say: Callable[[str], str]) -> tuple[Target, ScriptedLM]:
    """The target of that script, with the tokens and the template of the embedded one."""
    stub = stub_target()
    lm = ScriptedLM(stub, say)
    return replace(stub, lm=lm, name="scripted"), lm


def with_blanks_stripped(target: Target) -> Target:
    """That target, whose tokenizer leaves out the blank that a text begins with, as SentencePiece
    does."""
    tokenizer = copy.deepcopy(target.tokenizer)
    backend = tokenizer.backend_tokenizer
    backend.decoder = decoders.Sequence([backend.decoder, decoders.Strip(" ", 1, 0)])
    assert tokenizer.decode(tokenizer.encode(" x", add_special_tokens=False)) == "x"
    return replace(target, tokenizer=tokenizer)


class Script:
    """Writes that outline and those texts; keeps the prompts."""

    def __init__(self, outline: str, texts: dict[int, str], plain: str = "They do.") -> None:
        self.outline, self.texts, self.plain = outline, texts, plain
        self.prompts: dict[int, str] = {}

    def __call__(self, prompt: str) -> str:
        request = prompt.rpartition("<|user|>\n")[2]
        if "Do not answer yet." in request:
            return self.outline
        found = re.search(r"Write point (\d+) and nothing else", request)
        if found is None:
            return self.plain
        self.prompts[int(found[1])] = request
        return self.texts[int(found[1])]
