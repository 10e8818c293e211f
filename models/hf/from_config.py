"""A transformers causal LM built from its configuration as plain JSON: in a recipe, in a package.

`architecture` is what config.json holds, without what only its folder needs: `model_type`,
`vocab_size`, and each size that differs from the defaults of that type. It names an architecture
that transformers has built in; no code is loaded and no file is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specctl.core.errors import RecipeError, SpecctlError, is_out_of_memory, nearest
from specctl.core.language_model import LanguageModel
from specctl.models.hf.added_kinds import make_known
from specctl.models.hf.hf_lm import HfLM
from specctl.models.hf.hf_spec import holds_states

WHERE = "drafter.options.architecture"
KINDS = ("lfm2", "qwen3_5_text", "mamba2")  # named where a type is wanted
# Of a folder or of one way to run it, not of the model.
BESIDE = frozenset({
    "architectures", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "use_cache",
    "auto_map", "attn_implementation", "_attn_implementation", "experts_implementation",
    "_experts_implementation", "output_hidden_states", "output_attentions", "return_dict",
})  # fmt: skip


def architecture_of(model: Any) -> dict[str, Any] | None:
    """What builds a module of that shape again; None where JSON of its kind cannot: weights that
    are quantised, or added to by adapters."""
    config = model.config
    is_plain = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    is_plain = is_plain and type(model) is MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not is_plain or getattr(config, "quantization_config", None):
        return None
    fields = json.loads(config.to_json_string(use_diff=True))
    known = _known(type(config))
    found = {key: value for key, value in fields.items() if key in known and key not in BESIDE}
    return {**found, "model_type": config.model_type, "vocab_size": config.vocab_size}


def config_of(architecture: Mapping[str, Any], vocab_size: int) -> Any:
    """transformers' configuration; `vocab_size` where the architecture gives none. Nothing is
    dropped at random in training: distillation has no labels to overfit."""
    kind = architecture.get("model_type")
    make_known(kind)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise RecipeError(
            "the architecture has no model_type that transformers knows",
            where=WHERE,
            found=ascii(kind)[:80],
            expected="a causal language model, such as " + ", ".join(KINDS),
            do="write model_type: " + nearest(str(kind), sorted(CONFIG_MAPPING), 1),
        )
    config_class = CONFIG_MAPPING[kind]
    known = _known(config_class) - BESIDE
    for key in architecture:
        if key not in known:
            raise RecipeError(
                f"an architecture of type {kind} has no {ascii(key)[1:-1][:60]}",
                where=WHERE,
                found=ascii(key)[:80],
                expected="keys of its config.json",
                do=f"write one of: {nearest(key, sorted(known))}",
            )
    with _refusing(kind):
        config = config_class.from_dict(_numbers({"vocab_size": vocab_size, **architecture}))
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise RecipeError(
            f"an architecture of type {kind} is no causal language model",
            where=WHERE,
            found=kind,
            expected="a causal language model, such as " + ", ".join(KINDS),
            do="for a multimodal model, name the type of its text part",
        )
    for name, value in vars(config).items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def lm_from(architecture: Mapping[str, Any], vocab_size: int) -> LanguageModel:
    """A language model with fresh weights in float32, on the device of the surrounding block; tried
    in rounds unless it is a shape without content."""
    config = config_of(architecture, vocab_size)
    with _refusing(config.model_type):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if not holds_states(type(model), model.config):
        return HfLM(model)
    from specctl.models.recurrent.state_lm import StateLM  # reads caches of newer transformers

    return StateLM(model)


def tied_names(module: nn.Module) -> dict[str, str]:
    """Names of parameters that are another parameter, and the name of that one."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        kept = first.setdefault(id(parameter), name)
        if kept != name:
            found[name] = kept
    return found


def move(module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """`module.to`, which would also round what transformers keeps in float32: frequencies of rotary
    positions, which are stored nowhere."""
    kept: list[tuple[nn.Module, str, Tensor]] = [
        (part, name, buffer)
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
        if buffer.is_floating_point()
    ]
    module.to(device=device, dtype=dtype)
    for part, name, buffer in kept:
        setattr(part, name, buffer.to(device))


def _numbers(value: Any) -> Any:
    """A copy in which what JSON has no number for is one: transformers writes infinity, a limit of
    Mamba's steps, as {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        if [*value] == ["__float__"]:
            return float(value["__float__"])
        return {key: _numbers(below) for key, below in value.items()}
    return [_numbers(one) for one in value] if isinstance(value, list) else value


def _known(config_class: Any) -> frozenset[str]:
    """The keys that a configuration of that class has, by all their names."""
    return frozenset({*config_class().to_dict(), *config_class.attribute_map, "model_type"})


@contextmanager
def _refusing(kind: str) -> Iterator[None]:
    """Whatever a configuration makes transformers raise, as a refusal of it."""
    try:
        yield
    except SpecctlError:
        raise
    except Exception as error:  # its checks are foreign code: any type may come
        if is_out_of_memory(error):
            raise
        raise RecipeError(
            f"transformers makes no model of type {kind} of these sizes",
            where=WHERE,
            found=f"{type(error).__name__}: {str(error)[:200]}",
            expected="sizes that fit each other, as in the config.json of such a model",
            do="correct them",
        ) from error
