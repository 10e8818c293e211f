"""Reference reader of a GGUF tokenizer: text to ids by llama.cpp's rules (src/llama-vocab.cpp).

`gpt2`: split by the regular expressions that `tokenizer.ggml.pre` names, bytes as visible
characters, merges by rank. `llama`: blanks as U+2581, then of all neighbours whose joint text is a
token the pair of highest score, the leftmost first; what is no token becomes bytes. Only plain text
is read; control tokens are not looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from specctl.runtime.target.gguf.pretokenizers import KNOWN

_SPACE = "\u2581"

PROBES = (
    "def area(radius):\n    return 3.14159 * radius ** 2\n",
    "I'LL say it's theirs: 'tell them they're late'; he'd'VE gone where?",
    "  two blanks,\ttabs\t\tand\r\n\r\nempty lines  \n   ",
    "7 42 365 2026 1234567 3.14 1,000,000",
    "na\u00efve caf\u00e9 \u2014 \u00fcber stra\u00dfe \u4f60\u597d\U0001f680!?",
    "x",
    # every class of byte: ASCII, controls, the first and last characters of two, three, four bytes
    "".join(map(chr, range(32, 127))),
    "\x01\x07\x1b\x7f \x80\u07ff\u0800\uffef\U00010000\U0010fffd",
)


@dataclass(frozen=True, slots=True)
class GgufTokens:
    """The tokenizer fields of a file."""

    kind: str
    pre: str
    tokens: Sequence[str]
    merges: Sequence[str]
    scores: Sequence[float]
    space_prefix: bool

    def encode(self, text: str) -> list[int]:
        return self._merged(text) if self.kind == "gpt2" else self._scored(text)

    def _merged(self, text: str) -> list[int]:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        known = KNOWN[self.pre]
        merges = [(left, right) for left, right in (merge.split(" ") for merge in self.merges)]
        model = models.BPE(
            {token: number for number, token in enumerate(self.tokens)},
            merges,
            ignore_merges=known.ignore_merges,
        )
        encoder = Tokenizer(model)
        splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in known.splits]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        encoder.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
        return list(encoder.encode(text, add_special_tokens=False).ids)

    def _scored(self, text: str) -> list[int]:
        number = {token: i for i, token in enumerate(self.tokens)}
        parts = list((" " + text if self.space_prefix else text).replace(" ", _SPACE))
        while True:
            joints = [
                (self.scores[number[left + right]], -at)
                for at, (left, right) in enumerate(pairwise(parts))
                if left + right in number
            ]
            if not joints:
                break
            at = -max(joints)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids: list[int] = []
        for part in parts:
            if part in number:
                ids.append(number[part])
            else:
                ids += [number[f"<0x{byte:02X}>"] for byte in part.encode()]
        return ids
