"""What the speculators package itself makes of exported folders; run by export_speculators.py in a
Python that has speculators 0.9, with the target's folder and folders that each hold an export and
`trial.safetensors`.

Every folder is loaded with SpeculatorModel.from_pretrained and run by the model's own forward pass:
EAGLE-3 by training-time test (each step feeds the states back), P-EAGLE by one pass over masked
rows, of which the one behind the newest token is asked for. Written to `logits.safetensors`: logits
over the target's ids after the newest known token and after each drafted one.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import speculators.models.peagle.core as peagle
import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from torch import Tensor

ELSEWHERE = {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"}


class Enough(Exception):
    """Ends a forward pass behind the LM head: a loss is not asked for."""


def load(folder: Path, target: str) -> Any:
    """The model in float64, every parameter of its own from the folder, the rest from the verifier,
    which is the target's folder here and would be a repository on a hub."""
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.speculators_config.verifier.name_or_path = target
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float64).eval()
    written, own = load_file(folder / "model.safetensors"), model.state_dict()
    missing = set(own) - set(written) - ELSEWHERE
    if missing or not set(written) <= set(own):
        sys.exit(f"missing {sorted(missing)}, unknown {sorted(set(written) - set(own))}")
    for name, tensor in written.items():
        assert torch.equal(own[name].double(), tensor.double()), name
    return model


def run(model: Any, trial: dict[str, Tensor]) -> Tensor:
    """[N + 1, K]: the states at the chosen layers beside the tokens that follow them."""
    ids, num_drafted = trial["ids"], len(trial["drafted"])
    features_SI = torch.cat([trial["states"][k] for k in model.target_layer_ids], dim=-1)
    newest = len(features_SI) - 1
    ids_1T = torch.cat([ids[1:], trial["drafted"]])[None]
    fill_NI = torch.zeros(num_drafted, features_SI.shape[1], dtype=features_SI.dtype)
    given = {"input_ids": ids_1T, "document_ids": torch.zeros_like(ids_1T)}
    said: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, out: said.append(out[0]))
    features = torch.cat([features_SI, fill_NI])[None]
    if type(model).__name__ != "PEagleDraftModel":
        model(hidden_states=features, ttt_steps=num_drafted + 1, **given)
        return torch.stack([step_TK[newest] for step_TK in said])
    anchor = torch.cat([torch.arange(ids_1T.shape[1]), torch.full((num_drafted,), newest)])
    depth = torch.cat([torch.zeros_like(ids_1T[0]), torch.arange(num_drafted) + 1])
    peagle.generate_cod_sample_indices = lambda **how: (anchor, depth)  # one draft, no sampling
    model.verifier_norm.register_forward_pre_hook(_stop)
    with suppress(Enough):
        model(hidden_states=features, verifier_last_hidden_states=features, **given)
    return torch.cat([said[0][newest][None], said[0][ids_1T.shape[1] :]])


def _stop(module: Any, args: Any) -> None:
    raise Enough


@torch.no_grad()
def main() -> None:
    for folder in map(Path, sys.argv[2:]):
        trial = load_file(folder / "trial.safetensors")
        model = load(folder, sys.argv[1])
        said_NK = run(model, trial)
        whole_NV = said_NK.new_full((len(said_NK), model.verifier_vocab_size), -torch.inf)
        ids_K = torch.arange(said_NK.shape[1])
        whole_NV[:, ids_K if model.d2t is None else ids_K + model.d2t] = said_NK
        save_file({"logits": whole_NV}, folder / "logits.safetensors")


if __name__ == "__main__":
    main()
