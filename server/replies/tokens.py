"""Single tokens in answers: their text, their bytes, their log-probabilities."""

from __future__ import annotations

from typing import Any

from specctl.runtime.cross_vocab.token_bytes import TokenBytes
from specctl.runtime.engine.request import TokenLogprob
from specctl.runtime.target.target import Target

LEAST = -9999.0  # stands for the log-probability of what cannot come: JSON has no infinity


class TokenTexts:
    """How single tokens are written: as text, or by their bytes where those are no whole text."""

    def __init__(self, target: Target) -> None:
        self._lexicon = TokenBytes.of(target.tokenizer, target.spec.vocab_size, None)

    def bytes_of(self, token: int) -> bytes:
        if token in self._lexicon.marker_of:
            return self._lexicon.marker_of[token].encode()
        return self._lexicon.text_of.get(token, b"")

    def text_of(self, token: int) -> str:
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        """A token as /v1/chat/completions lists it."""
        raw = self.bytes_of(token)
        text = self.text_of(token)
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(raw)}

    def drawn(self, one: TokenLogprob) -> dict[str, Any]:
        """The drawn token with the best ones beside it."""
        top = [self.entry(token, logprob) for token, logprob in one.top]
        return {**self.entry(one.token, one.logprob), "top_logprobs": top}

    def best(self, one: TokenLogprob) -> dict[str, float]:
        """The best ones as /v1/completions lists them."""
        return {self.text_of(token): max(logprob, LEAST) for token, logprob in one.top}
