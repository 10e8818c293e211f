"""The sizes of a model that writes pictures in an order of its own. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from specctl.core.errors import IncompatibleError
from specctl.core.storage.grid_kinds import ANY_ORDER, GRID_KINDS, grid_kind

COUNTS = (
    "grid", "codes", "first_code", "vocab_size", "hidden_size", "num_hidden_layers",
    "num_attention_heads", "intermediate_size",
)  # fmt: skip
NUMBERS = ("rms_norm_eps", "rope_theta")
MOST = 2**20  # of any size


@dataclass(frozen=True, slots=True)
class GridShape:
    """Sizes of a model of `grid` x `grid` patches out of `codes`; code k is token `first_code` + k
    of `vocab_size`. The keys are those of config.json."""

    model_type: str
    grid: int
    codes: int
    first_code: int
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float

    @property
    def places(self) -> int:
        """Patches of a picture."""
        return self.grid**2

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def config(self) -> dict[str, Any]:
        """The config.json that `shape_from` reads."""
        return asdict(self)


def shape_from(config: Mapping[str, Any], where: str) -> GridShape:
    """The sizes in a config.json. Raises IncompatibleError for one that is missing or cannot be."""
    kind = grid_kind(config)
    if kind is None:
        raise _wrong("model_type", config.get("model_type"), " or ".join(GRID_KINDS), where)
    for name in COUNTS:
        value = config.get(name)
        if type(value) is not int or not 1 <= value <= MOST:
            raise _wrong(name, value, f"a number from 1 to {MOST:,}", where)
    for name in NUMBERS:
        value = config.get(name)
        if not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise _wrong(name, value, "a number above 0", where)
    made = GridShape(kind, *(config[name] for name in (*COUNTS, *NUMBERS)))
    if made.hidden_size % (4 * made.num_attention_heads):
        expected = "4 times num_attention_heads, or a multiple: a head turns by row and by column"
        raise _wrong("hidden_size", made.hidden_size, expected, where)
    if kind == ANY_ORDER and made.num_hidden_layers < 2:  # no query would read what is known
        expected = "2 or more: half read what is known, half are guided by it"
        raise _wrong("num_hidden_layers", made.num_hidden_layers, expected, where)
    if made.first_code + made.codes > made.vocab_size:
        expected = f"{made.first_code + made.codes} or more, for the codes"
        raise _wrong("vocab_size", made.vocab_size, expected, where)
    return made


def _wrong(name: str, found: object, expected: str, where: str) -> IncompatibleError:
    return IncompatibleError(
        "the configuration makes no model of pictures",
        where=f"{where}: {name}",
        found=repr(found)[:60],
        expected=expected,
        do="correct it; recipes/tiny-neighbours.yaml and recipes/tiny-any-order.yaml have all keys",
    )
