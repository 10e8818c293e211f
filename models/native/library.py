"""The compiled step: built once for this processor, kept in the user's cache.

In $XDG_CACHE_HOME/specctl/native (kept_step.py), under a key over the source, the compiler and the
processor. SPECCTL_NATIVE=0 leaves it out, SPECCTL_INT8=0 drafters in 8 bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.core.storage.cache_folder import cache_folder
from specctl.models.native.kept_step import GivenUpError, KeptStep

if TYPE_CHECKING:
    from specctl.core.language_model import Truncation

SOURCE = Path(__file__).with_name("step.cpp")
SOURCES = (
    SOURCE,
    SOURCE.with_name("lanes.h"),
    SOURCE.with_name("rows.h"),
    SOURCE.with_name("tiles.h"),
    SOURCE.with_name("bits.h"),
    SOURCE.with_name("many.h"),
    SOURCE.with_name("packed.h"),
    SOURCE.with_name("blocks.h"),
    SOURCE.with_name("attention.h"),
    SOURCE.with_name("draw.h"),
    SOURCE.with_name("cut.h"),
    SOURCE.with_name("kl.h"),
)
BUILDING = "compiling the decoding step for this processor, once: 10 to 60 seconds"
SWITCH = "SPECCTL_NATIVE"
INT8_SWITCH = "SPECCTL_INT8"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared")
KINDS = (
    *(dtype + bits for dtype in ("float32", "bfloat16") for bits in ("", "_int8", "_int4")),
    "float32_packed",
)
SECONDS = 120  # a compiler that takes longer is given up


class LayerAddresses(ctypes.Structure):
    """Addresses of one layer's weights; those of what it does not have are null."""

    NAMES = (
        "attention_norm", "query", "key", "value", "query_bias", "key_bias", "value_bias",
        "query_norm", "key_norm", "output", "output_bias", "mlp_norm", "gate", "up", "down",
    )  # fmt: skip
    _fields_ = [(name, ctypes.c_void_p) for name in NAMES]


class ModelAddresses(ctypes.Structure):
    """Sizes and weights of a model."""

    SIZES = ("D", "H", "J", "E", "I", "V", "num_layers", "num_embeddings", "window")
    _fields_ = [
        *((name, ctypes.c_int32) for name in SIZES),
        *((name, ctypes.c_float) for name in ("eps", "qk_eps")),
        *((name, ctypes.c_void_p) for name in ("embedding", "norm", "head")),
        ("layers", ctypes.POINTER(LayerAddresses)),
        ("entry_norm", ctypes.c_void_p),
        ("is_residual_normed", ctypes.c_int32),
    ]


class StepCall(ctypes.Structure):
    """One forward: what is fed, where keys and values are, where results go."""

    SIZES = (
        "B", "T", "max_len", "span", "num_taps", "num_logit_rows", "threads", "num_slots",
        "num_positions", "num_true",
    )  # fmt: skip
    ADDRESSES = (
        "ids", "position", "slot", "start", "true_ones", "residual", "mask", "rotary", "keys",
        "values", "attention", "mlp", "taps", "tapped", "logit_rows", "logits", "last", "space",
    )  # fmt: skip
    _fields_ = [
        *((name, ctypes.c_int32) for name in SIZES),
        *((name, ctypes.c_void_p) for name in ADDRESSES),
    ]


class ChainCall(ctypes.Structure):
    """Tokens that are drafted behind a forward, greedily or drawn."""

    SIZES = ("length", "num_choices", "last_id", "last_position")
    ADDRESSES = (
        "ids", "tokens", "best", "fed", "temperature", "cut", "seed", "round", "code", "kept",
        "score", "aside",
    )  # fmt: skip
    _fields_ = [
        *((name, ctypes.c_int32) for name in SIZES),
        *((name, ctypes.c_void_p) for name in ADDRESSES),
    ]


class DrawCall(ctypes.Structure):
    """Tokens to be drawn, and what their random numbers are made from."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("B", "M", "V", "stream", "is_chain")),
        *((name, ctypes.c_int64) for name in ("first", "inner")),
        *((name, ctypes.POINTER(ctypes.c_int64)) for name in ("seeds", "counters")),
        *((name, ctypes.c_void_p) for name in ("depth", "code", "score", "token")),
    ]


class RowCut(ctypes.Structure):
    """The truncation of a row."""

    _fields_ = [
        ("top_k", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("top_p", "min_p")),
    ]


class CutCall(ctypes.Structure):
    """Rows of scores that are cut in place."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in "BXV"),
        ("of", ctypes.POINTER(RowCut)),
        *((name, ctypes.c_void_p) for name in ("score", "aside")),
    ]


class ScoreRows(ctypes.Structure):
    """Rows of a target's scores of which the log-normaliser and the best id are wanted."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("Q", "V", "threads")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("score", "row", "log_z", "best")),
    ]


class Compared(ctypes.Structure):
    """A draft's logits beside a target's: what a loss is taken of, and where it goes."""

    ADDRESSES = (
        "draft", "score", "row", "ids", "log_z", "best", "draft_row", "gradient", "aside",
        "figures",
    )  # fmt: skip
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("Q", "K", "V", "threads")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ADDRESSES),
    ]


# In the order of structure_bytes in step.cpp.
STRUCTURES: tuple[type[ctypes.Structure], ...] = (
    LayerAddresses, ModelAddresses, StepCall, ChainCall, DrawCall, RowCut, CutCall, ScoreRows,
    Compared,
)  # fmt: skip


def cuts_of(rows: Sequence[Truncation]) -> ctypes.Array[RowCut]:
    return (RowCut * len(rows))(*(RowCut(*row) for row in rows))


@dataclass(frozen=True, slots=True)
class Library:
    """The functions of the compiled step, or why there are none and what makes that otherwise."""

    functions: ctypes.CDLL | None
    missing: str = ""
    do: str = ""


@lru_cache
def library() -> Library:
    """Loaded, and built where it is not yet: a few seconds, once."""
    if os.environ.get(SWITCH, "1") == "0":
        return Library(None, f"{SWITCH}=0", f"unset {SWITCH}")
    compiler = _compiler()
    if compiler is None:
        do = "install a C++ compiler (Debian: apt install g++)"
        return Library(None, "no C++ compiler (" + ", ".join(COMPILERS) + ")", do)
    try:
        return Library(_ready(compiler))
    except PermissionError as error:
        do = "set XDG_CACHE_HOME to a folder that only you may write to, or take the rights away"
        return Library(None, _short(error), do)
    except OSError as error:
        do = "" if isinstance(error, GivenUpError) else f"see why {compiler} fails, or take another"
        return Library(None, f"{compiler}: {_short(error)}", do)


def no_int8() -> str | None:
    """Why matrices of 8 or 4 bits are not faster here (benchmarks/native_step.py --int8); None
    where they are."""
    found = library()
    if found.functions is None:
        return f"no compiled step: {found.missing}"
    return None if found.functions.has_int8() else "a CPU without AVX2"


def has_bfloat16_tiles() -> bool:
    """Whether a round of several rows in bfloat16 takes about as long as one of one: with AMX."""
    found = library()
    return found.functions is not None and bool(found.functions.has_bfloat16_tiles())


def is_to_be_built() -> bool:
    """Whether the first forward on a CPU will compile: worth a word to who waits."""
    kept = _kept()
    return kept is not None and kept.find() is None and kept.given_up() is None


def is_given_up() -> bool:
    """Whether the build did not end, or could not be loaded, and is not tried again today."""
    kept = _kept()
    return kept is not None and kept.given_up() is not None


def _kept() -> KeptStep | None:
    """Where the step is kept; None where it is switched off or cannot be built or kept."""
    compiler = _compiler()
    if os.environ.get(SWITCH, "1") == "0" or compiler is None:
        return None
    try:
        kept = KeptStep(folder(), _key(compiler))
        kept.find()
    except OSError:
        return None
    return kept


def folder() -> Path:
    """Where compiled steps are kept; PermissionError where there is no place for them."""
    return cache_folder("native")


def _compiler() -> str | None:
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def _ready(compiler: str) -> ctypes.CDLL:
    """The functions of the file that is kept, else of one that is built."""
    kept = KeptStep(folder(), _key(compiler))
    path = kept.find()
    if path is not None:
        try:
            return _loaded(path)
        except OSError:  # built on a machine with other libraries, or where nothing may be run
            if kept.given_up() is None:
                kept.drop(path)
    path = kept.build(_commands(compiler), SECONDS)
    try:
        return _loaded(path)
    except OSError as error:
        raise kept.give_up(f"what it built cannot be loaded: {_short(error)}") from None


def _commands(compiler: str) -> list[tuple[str, ...]]:
    """Ways to compile, the best first; Apple's compiler comes without OpenMP."""
    words = (compiler, *FLAGS, *_tuned())
    return [(*words, *parallel, str(SOURCE), "-o") for parallel in (("-fopenmp",), ())]


def _short(error: OSError) -> str:
    """What an error says: enough for a path, and what to do with it."""
    return str(error)[:400]


def _tuned() -> tuple[str, ...]:
    """For this very processor."""
    return ("-mcpu=native",) if platform.machine() in ("arm64", "aarch64") else ("-march=native",)


def _key(compiler: str) -> str:
    """The compiler is known by its file: its version would take a process, which may hang."""
    program = Path(compiler).resolve()
    about = program.stat()
    parts = [source.read_text(encoding="utf-8") for source in SOURCES]
    parts += [f"{program} {about.st_size} {about.st_mtime_ns}", *FLAGS, _processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _processor() -> str:
    """What tells processors apart: a cache may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    about = {line.partition(":")[0].strip(): line for line in reversed(lines)}
    return "\n".join(about.get(name, "") for name in ("model name", "flags", "Features"))


def _loaded(path: Path) -> ctypes.CDLL:
    """The functions with the types of their arguments. OSError where a structure of step.cpp is
    longer or shorter than ours: it would read another field, or memory behind the last."""
    found = ctypes.CDLL(str(path))
    bytes_of = found.structure_bytes
    bytes_of.argtypes, bytes_of.restype = (ctypes.c_int32,), ctypes.c_int64
    for at, structure in enumerate(STRUCTURES):
        own, theirs = ctypes.sizeof(structure), bytes_of(at)
        if own != theirs:
            raise OSError(f"{structure.__name__} has {own} bytes here and {theirs} in step.cpp")
    found.space_needed.argtypes = (ctypes.POINTER(ModelAddresses), *(ctypes.c_int32,) * 3)
    found.space_needed.restype = ctypes.c_int64
    found.pack.argtypes = (
        ctypes.c_int32, ctypes.c_void_p, *(ctypes.c_int32,) * 2, ctypes.c_void_p, ctypes.c_int32,
    )  # fmt: skip
    found.pack.restype = None
    found.draw.argtypes = (ctypes.POINTER(DrawCall),)
    found.cut.argtypes, found.cut.restype = (ctypes.POINTER(CutCall),), None
    found.read_scores.argtypes, found.read_scores.restype = (ctypes.POINTER(ScoreRows),), None
    found.compare.argtypes, found.compare.restype = (ctypes.POINTER(Compared),), None
    step = (ctypes.POINTER(ModelAddresses), ctypes.POINTER(StepCall))
    for kind in KINDS:
        for name, given in (("step", step), ("chain", (*step, ctypes.POINTER(ChainCall)))):
            function = getattr(found, f"{name}_{kind}")
            function.argtypes, function.restype = given, ctypes.c_int
    return found
