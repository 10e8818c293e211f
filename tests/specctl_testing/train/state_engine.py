"""A fake serving engine that hands out hidden states as vLLM's connector does, computed by
transformers' own model: nothing of ours takes part.
Letters: N tokens of a text, K layers, D hidden width.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specctl.runtime.target.served import NORMS
from specctl_testing.train.fake_endpoint import FakeEndpoint


@torch.no_grad()
def before_the_norm(model: Any, ids: Sequence[int], layers: Sequence[int]) -> Tensor:
    """[N, K, D] as vLLM's connector writes them: the last state of the residual stream, which
    `hidden_states` of transformers hold behind the norm, is read in front of it."""
    inner = model.base_model
    norm = next(getattr(inner, name) for name in NORMS if hasattr(inner, name))
    seen: list[Tensor] = []
    hook = norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    try:
        states = model(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
    finally:
        hook.remove()
    last = model.config.get_text_config().num_hidden_layers
    return torch.stack([(seen[0] if k == last else states[k])[0] for k in layers], dim=1)


@contextmanager
def state_engine(
    model: Any,
    tokenizer: Any,
    folder: Path,
    layers: Sequence[int],
    keep: Path | None = None,
    **spoiled: Any,
) -> Iterator[FakeEndpoint]:
    """Serves transformers' `model`: greedy tokens, and the states of `layers` in files of `folder`
    (none without layers). A copy of each stays in `keep`."""

    turn = threading.Lock()  # requests come side by side, and the norm is watched

    def write(ids: list[int]) -> dict[str, Any]:
        if not layers:
            return {}
        name = f"{abs(hash(tuple(ids)))}.safetensors"
        with turn:
            states = before_the_norm(model, ids, layers)
        file = {"hidden_states": states, "token_ids": torch.tensor(ids)}
        for place in (folder, keep):
            if place is not None:
                save_file(file, place / name)
        (folder / f"{name}.lock").touch()
        return {"kv_transfer_params": {"hidden_states_path": str(folder / name)}}

    @torch.no_grad()
    def greedy(ids: list[int], body: dict[str, Any]) -> list[int]:
        del body
        with turn:
            return [int(model(torch.tensor([ids])).logits[0, -1].argmax())]

    for place in (folder, keep):
        if place is not None:
            place.mkdir(parents=True, exist_ok=True)
    served = SimpleNamespace(tokenizer=tokenizer, encode=tokenizer.encode)
    with FakeEndpoint(served, greedy, more=write, **spoiled).serving() as fake:
        yield fake
