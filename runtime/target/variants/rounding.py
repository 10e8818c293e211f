"""What weights in few bits make of a target: KL from the model as it is stored, and how often both
find the same token most probable, on 256 tokens of text. Measured once and kept in the cache.
Letters: V target vocabulary, T tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from specctl.core.language_model import LanguageModel
from specctl.core.spec import ModelSpec

TOKENS = 256
DOUBTFUL = 0.05  # nats a token from which the answers are visibly another model's
METHOD = 1  # of measuring: raised where a kept figure would mean something else
_TEXTS = "tiny/prompts.jsonl"
PROSE = (
    "The history of the city begins with a small harbour on the northern shore of the river. "
    "Merchants who came from the south brought cloth, wine and tools, and took home grain and "
    "timber. Question: why did the harbour grow so quickly? Answer: because the two roads that "
    "cross the country meet there, and because the water never freezes in winter. "
)


@dataclass(frozen=True, slots=True)
class Rounding:
    """KL(as stored || in few bits) in nats a token, the share of places where both find the same
    token most probable, and over how many tokens."""

    kl: float
    agreement: float
    tokens: int

    @property
    def is_doubtful(self) -> bool:
        return self.kl > DOUBTFUL

    def text(self, dtype: str) -> str:
        """In a sentence, for a target read in that dtype."""
        return (
            f"in {dtype} the target is KL {self.kl:.4f} nats a token from the model as stored, "
            f"with the same most probable token in {self.agreement:.0%} of {self.tokens:,} places"
        )

    def warning(self, dtype: str) -> str:
        return (
            f"{self.text(dtype)}: its answers are those of a visibly worse model; --dtype "
            + ("int8 or --dtype auto" if dtype == "int4" else "auto")
            + " stays nearer"
        )


class MeasuredTarget(Protocol):
    """What is looked at of a target."""

    @property
    def lm(self) -> LanguageModel: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def spec(self) -> ModelSpec: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def inflated(self) -> str | None: ...
    @property
    def tokenizer_fingerprint(self) -> str | None: ...
    @property
    def dtype_name(self) -> str: ...
    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Unrounded:
    """What the model as stored says of the text, before its weights are released; `known` is the
    figure where it was measured before."""

    about: dict[str, Any]
    ids: tuple[int, ...] = ()
    logits_TV: Tensor | None = None
    known: Rounding | None = None

    @classmethod
    def of(cls, target: MeasuredTarget, bits: int) -> Unrounded:
        about = {
            "method": METHOD,
            "bits": bits,
            "target": target.fingerprint,
            "inflated": target.inflated,
            "tokenizer": target.tokenizer_fingerprint,
            "dtype": target.dtype_name,
        }
        known = _kept(about)
        ids = () if known is not None else _ids(target)
        return cls(about, ids, _logits(target, ids) if ids else None, known)

    def beside(self, rounded: MeasuredTarget) -> Rounding | None:
        """The figure for the same model in few bits; None where there is no text to measure on."""
        if self.known is not None or self.logits_TV is None:
            return self.known
        before, after = self.logits_TV, _logits(rounded, self.ids)
        p, q = before.log_softmax(-1), after.log_softmax(-1)
        kl = float((p.exp() * (p - q)).sum(-1).clamp_min(0).mean())
        same = float((before.argmax(-1) == after.argmax(-1)).float().mean())
        found = Rounding(round(kl, 6), round(same, 4), len(self.ids))
        _keep(self.about, found)
        return found


def _ids(target: MeasuredTarget) -> tuple[int, ...]:
    """Code and prose in turn; none without a tokenizer."""
    if target.tokenizer is None:
        return ()
    lines = (resources.files("specctl.recipes") / _TEXTS).read_text(encoding="utf-8").splitlines()
    code = "\n\n".join(str(json.loads(line).get("text", "")) for line in lines[:8])
    most = min(TOKENS, target.spec.max_positions)
    prose = target.encode(PROSE)[: most // 2]
    return tuple(prose + target.encode(code)[: most - len(prose)])


@torch.no_grad()
def _logits(target: MeasuredTarget, ids: tuple[int, ...]) -> Tensor:
    """float32 [T, V]."""
    lm, count = target.lm, len(ids)
    ids_1T = torch.tensor([ids], device=lm.device)
    position_1T = torch.arange(count, device=lm.device)[None]
    masks = lm.chain_masks(torch.zeros(1, dtype=torch.long, device=lm.device), count, count)
    logits_BTV = lm.dense(ids_1T, position_1T, masks).logits_BTV
    assert logits_BTV is not None, "the call returns logits"
    return logits_BTV[0].float()


def _place(about: dict[str, Any]) -> Path | None:
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # nobody has a home here
        return None
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return base / "specctl" / "rounding" / f"{key[:32]}.json"


def _kept(about: dict[str, Any]) -> Rounding | None:
    place = _place(about)
    try:
        if place is None or not place.is_file() or place.stat().st_size > 1 << 16:
            return None
        found = json.loads(place.read_text(encoding="utf-8"))
        known = Rounding(**found["found"])
        is_whole = found["about"] == about and 0 <= known.kl < 1e3 and 0 <= known.agreement <= 1
        return known if is_whole else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _keep(about: dict[str, Any], found: Rounding) -> None:
    """A cache that cannot be written costs the next command a second."""
    place = _place(about)
    if place is None:
        return
    partial = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"about": about, "found": asdict(found)}), encoding="utf-8")
        partial.replace(place)
    except OSError:
        return
