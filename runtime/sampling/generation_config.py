"""What the generation_config.json of a checkpoint says about sampling.

transformers' `generate` follows that file; here it is followed where a user says so. What the
file does not name stays as it is without it (transformers would also keep only the 50 likeliest).
Its end-of-text ids always count, so a file that cannot be read is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.core.errors import IntegrityError, SpecctlError
from specctl.runtime.sampling.sampling import Sampling

FILE = "generation_config.json"
LARGEST = 1 << 20  # bytes; real ones have a few hundred
SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
# What else changes texts in transformers, by the value that changes nothing.
OTHERS: dict[str, Any] = {
    "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, "penalty_alpha": 0.0,
    "typical_p": 1.0, "top_h": None, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None,
    "encoder_no_repeat_ngram_size": 0, "suppress_tokens": None, "begin_suppress_tokens": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "min_length": 0, "min_new_tokens": 0,
    "exponential_decay_length_penalty": None, "sequence_bias": None, "guidance_scale": 1.0,
    "dola_layers": None, "stop_strings": None, "watermarking_config": None, "constraints": None,
    "force_words_ids": None, "token_healing": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Suggested:
    """Sampling that a checkpoint sets; None where its file is silent or sets nothing.
    `others` change texts as well and have no counterpart here; of `wrong` no value has a meaning.
    """

    does_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    others: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()

    def fill(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that were given, those of the file in place of None."""
        heat = self.temperature if self.does_sample else None if self.does_sample is None else 0.0
        ours = {**{name: getattr(self, name) for name in SETTINGS}, "temperature": heat}
        return {name: ours[name] if given[name] is None else given[name] for name in SETTINGS}

    def unlike(self, used: Sampling) -> tuple[str, ...]:
        """What the file sets and sampling does not do, in words."""
        names = SETTINGS if self.does_sample else ("repetition_penalty",)
        return (
            tuple(
                f"{name} {value:g}"
                for name in names
                if (value := getattr(self, name)) is not None and getattr(used, name) != value
            )
            + self.others
        )


def described(sampling: Sampling) -> str:
    """The settings in which two samplings of one text can differ, in words."""
    heat = "greedy" if sampling.greedy else f"temperature {sampling.temperature:g}"
    names = SETTINGS[-1:] if sampling.greedy else SETTINGS[1:]
    rest = [(name, getattr(sampling, name)) for name in names]
    return ", ".join([heat, *(f"{name} {value:g}" for name, value in rest if value is not None)])


def read_suggested(folder: Path) -> Suggested | None:
    """What the file in that folder says; None without one."""
    path = folder / FILE
    if not path.exists():
        return None
    body = _read(path)
    _check(body, path)
    return suggested_in(body)


def suggested_in(body: Mapping[str, Any]) -> Suggested:
    """The same of the content of such a file."""
    does_sample, wrong = body.get("do_sample"), []
    if not isinstance(does_sample, bool | None):
        wrong.append(f"do_sample {_short(does_sample)}")
        does_sample = None
    found: dict[str, Any] = {}
    for name in SETTINGS:
        value = body.get(name)
        if value is None or (name in OFF and value == OFF[name]):
            continue
        if _is_usable(name, value):
            found[name] = value
        else:
            wrong.append(f"{name} {_short(value)}")
    if does_sample:
        found.setdefault("temperature", 1.0)
    return Suggested(does_sample, **found, others=tuple(_others(body)), wrong=tuple(wrong))


def _is_usable(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
        return False
    try:
        settings: dict[str, Any] = {name: value}
        Sampling(**settings)
    except (SpecctlError, OverflowError):
        return False
    return True


def _others(body: Mapping[str, Any]) -> Iterator[str]:
    for name, nothing in OTHERS.items():
        value = body.get(name)
        if value is not None and value != nothing and value != []:
            yield f"{name} {_short(value)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _read(path: Path) -> dict[str, Any]:
    try:
        size = path.stat().st_size if path.is_file() else None
        if size is None or size > LARGEST:
            found = "no regular file" if size is None else f"{size:,} bytes"
            raise ValueError(found)
        body = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise _broken(path, "lists and objects nested without end") from None
    except (OSError, ValueError) as error:
        raise _broken(path, str(error)) from None
    if not isinstance(body, dict):
        raise _broken(path, type(body).__name__)
    return body


def _check(body: dict[str, Any], path: Path) -> None:
    """Refuse token ids that are none, and what transformers will not read with the weights."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = body.get(name)
        ids = value if isinstance(value, list) and value else [value]
        if value is not None and not all(type(i) is int for i in ids):
            raise _broken(path, f"{name} {_short(value)}")
    from transformers import GenerationConfig

    try:
        GenerationConfig.from_dict(dict(body))
    except Exception as error:  # any kind, for any field of another type than it expects
        raise _broken(path, f"{type(error).__name__}: {error}") from error


def _broken(path: Path, found: str) -> IntegrityError:
    return IntegrityError(
        f"{FILE} cannot be read",
        where=str(path),
        found=(found.splitlines() or [""])[0][:160],
        expected="a JSON object of settings as transformers writes it",
        do="fetch it again, or remove it: then config.json says which tokens end a text",
    )
