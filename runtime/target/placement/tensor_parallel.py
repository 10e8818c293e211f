"""A target whose matrices are spread over the processes that torchrun started (tensor parallelism
by transformers): each reads its own part of every matrix from the files, and all walk in step, with
the same tokens.
"""

from __future__ import annotations

import os
import re
from inspect import signature
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from specctl.core.errors import IncompatibleError, SpecctlError


def num_processes() -> int:
    """How many processes torchrun started; 1 outside of it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def check_launched() -> int:
    """The number of processes; an error where there is only this one."""
    size = num_processes()
    if size < 2:
        raise SpecctlError(
            "tensor parallelism needs several processes, started by torchrun",
            where="target.tensor_parallel",
            found="one process",
            expected="one process for each GPU",
            do="torchrun --nproc-per-node 2 -m specctl generate --set "
            "target.tensor_parallel=true ...   (or --set target.device_map=auto)",
        )
    return size


def local_device(device: torch.device) -> torch.device:
    """That of this process."""
    if device.type == "cpu":
        return device
    return torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))


def check_plan(config: Any, size: int) -> None:
    """Refuse a configuration that transformers cannot spread over so many processes."""
    text = config.get_text_config()
    kind = type(text).__name__
    if not getattr(text, "base_model_tp_plan", None):
        raise _refused(f"transformers has no plan of it for {kind}", "an architecture with one")
    if getattr(config, "quantization_config", None) is not None:
        raise _refused("quantised weights", "weights of one number each")
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, name, None)
        if heads is not None and heads % size:
            raise _refused(f"{name} {heads}", f"a multiple of the {size} processes")
    if not is_known():
        raise IncompatibleError(
            "this transformers spreads matrices in a way that cannot be put together again",
            where="target.tensor_parallel",
            found=f"transformers {transformers.__version__}",
            expected="one that spreads them as DTensors",
            do="pip install -U transformers, or --set target.device_map=auto",
        )


def _refused(found: str, expected: str) -> IncompatibleError:
    return IncompatibleError(
        "this target cannot be spread by tensor parallelism",
        where="target.tensor_parallel",
        found=found,
        expected=expected,
        do="another number of processes, --set target.device_map=auto, or a server that has it "
        "(--endpoint)",
    )


def bytes_of_process(config: Any, size: int, itemsize: int) -> int:
    """Bytes of weights in each process: a share of what the plan spreads, and all else whole."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    plan = {**(config.get_text_config().base_model_tp_plan or {}), **(model._tp_plan or {})}
    spread = [re.escape(name).replace(r"\*", r"\d+") for name in plan]
    pattern = re.compile(rf"(?:.*\.)?(?:{'|'.join(spread)})(?:\.(?:weight|bias))?")
    total = 0
    for name, parameter in model.named_parameters():
        total += parameter.numel() // (size if pattern.fullmatch(name) else 1)
    return total * itemsize


def parallel_fields(size: int) -> dict[str, Any]:
    """For `from_pretrained`: the architecture's own plan, over all processes."""
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=size, tp_plan="auto")}


def is_known() -> bool:
    """Whether the installed transformers spreads matrices as DTensors, which can be put together
    again. Older ones keep parts of which nothing says what they are part of."""
    try:
        from transformers.distributed import DistributedConfig
    except ImportError:
        return False
    return "tp_plan" in signature(DistributedConfig).parameters
