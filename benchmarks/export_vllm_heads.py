"""Exports of Medusa and of MLP speculators in vLLM's own classes.

The model and configuration files of two unpacked wheels run as they are, 0.32.0 for Medusa and
0.9.2 for MLP speculators (the last that served them); around them stand replacements of vLLM's
layers that keep the originals' demands (an LM head is filled by a tensor of exactly its rows,
logits are cut at the spoken vocabulary). Random drafters of the embedded target are exported, the
wheel's loader reads the folder, and every logit and every drafted token is compared with ours. It
fails (exit 1) when something differs.

    pip download --no-deps vllm==0.32.0 vllm==0.9.2   (one after the other; unzip each)
    python benchmarks/export_vllm_heads.py --medusa VLLM_0.32.0 --mlp VLLM_0.9.2
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from engine_standins import engine
from safetensors.torch import load_file
from torch import Tensor, nn

from specctl import load_target
from specctl.core.drafter import Drafter
from specctl.core.vocab import VocabMap
from specctl.drafters import families
from specctl.export.formats import ExportSource, export
from specctl.export.package.folder import save_package
from specctl.export.package.manifest import read_manifest
from specctl.export.readers.trial import Trial, drafted_logits, twin
from specctl.runtime.target.target import Target

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("medusa", "medusa", {"num_heads": 3, "num_blocks": 2}),
    ("medusa", "medusa", {"num_heads": 3, "head": "shared"}),
    ("vllm-medusa", "medusa", {"num_heads": 3, "num_blocks": 2}),
    ("vllm-medusa", "medusa", {"num_heads": 3, "head": "shared"}),
    ("mlp-speculator", "mlp-speculator", {"num_heads": 3, "inner": 96}),
    ("mlp-speculator", "mlp-speculator", {"num_heads": 3, "tie": True}),
    ("mlp-speculator", "mlp-speculator", {"num_heads": 4, "scale_input": True}),
]
KEPT = 1024
NEAR = 1e-5


class Rows(nn.Module):
    """vLLM's vocabulary layers on one device: an embedding that is also an LM head's weight."""

    def __init__(self, num_embeddings: int, width: int, **how: Any) -> None:
        super().__init__()
        self.rows = how.get("org_num_embeddings") or num_embeddings
        empty = torch.full((num_embeddings, width), torch.nan, dtype=torch.float64)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.weight.weight_loader = self.fill

    def fill(self, param: Tensor, loaded: Tensor) -> None:
        assert loaded.shape[0] == self.rows, (tuple(loaded.shape), self.rows)
        param.data[: self.rows] = loaded.double()

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Logits:
    """vLLM's LogitsProcessor; `seen` keeps what it gave."""

    def __init__(self, size: int, rows: int | None = None, scale: float = 1.0, *_: Any) -> None:
        self.rows, self.scale, self.seen = rows or size, scale, list[Tensor]()

    def __call__(self, head: Rows, states: Tensor, *_: Any) -> Tensor:
        logits = F.linear(states, head.weight)[..., : self.rows] * self.scale
        self.seen.append(logits)
        return logits


def fill(param: Tensor, loaded: Tensor) -> None:
    assert param.shape == loaded.shape, (tuple(param.shape), tuple(loaded.shape))
    param.data = loaded.double() if loaded.is_floating_point() else loaded


def best(logits: Tensor, _: Any) -> Any:
    return SimpleNamespace(sampled_token_ids=logits.argmax(-1, keepdim=True))


PARTS: dict[str, dict[str, Any]] = {
    "vllm.model_executor.layers.logits_processor": {"LogitsProcessor": Logits},
    "vllm.model_executor.layers.sampler": {"get_sampler": lambda: best},
    "vllm.model_executor.layers.vocab_parallel_embedding": {
        "ParallelLMHead": Rows,
        "VocabParallelEmbedding": Rows,
    },
    "vllm.model_executor.model_loader.weight_utils": {"default_weight_loader": fill},
    "vllm.transformers_utils.utils": {"without_trust_remote_code": lambda kwargs: kwargs},
}


def files(root: Path, name: str) -> tuple[ModuleType, ModuleType]:
    """The configuration's and the model's file of a wheel, as they are."""
    config = f"vllm.transformers_utils.configs.{name}"
    model = f"vllm.model_executor.models.{name}"
    with engine(root, {config, model}, PARTS):
        return importlib.import_module(config), importlib.import_module(model)


@dataclass(frozen=True)
class Wheels:
    medusa: Path
    mlp: Path


def medusa(wheels: Wheels, folder: Path, state_D: Tensor, token: int) -> Tensor:
    """[H, V] by vLLM 0.32.0; both orders of drafting are its own argmax."""
    del token
    configs, models = files(wheels.medusa, "medusa")
    config = configs.MedusaConfig.from_pretrained(folder)
    draft = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
    model = models.Medusa(vllm_config=SimpleNamespace(speculative_config=draft)).double()
    loaded = model.load_weights(list(tensors_of(folder).items()))
    left = set(dict(model.named_parameters())) - loaded - {"token_map"}
    assert not left, f"vLLM would refuse the folder: {sorted(left)[0]} gets no tensor"
    return torch.cat(model.compute_logits(model(state_D[None])))


def mlp(wheels: Wheels, folder: Path, state_D: Tensor, token: int) -> Tensor:
    """[H, V] by vLLM 0.9.2, each head after the token that the one before drafted."""
    configs, models = files(wheels.mlp, "mlp_speculator")
    config = configs.MLPSpeculatorConfig.from_pretrained(folder)
    about = SimpleNamespace(model_config=SimpleNamespace(hf_config=config))
    model = models.MLPSpeculator(vllm_config=about).double()
    model.load_weights(list(tensors_of(folder).items()))
    left = [n for n, p in model.named_parameters() if not bool(torch.isfinite(p).all())]
    assert not left, f"{left[0]} gets no tensor"
    model.generate_proposals(torch.tensor([token]), state_D[None], config.n_predict, None)
    return torch.cat(model.logits_processor.seen)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    (path,) = folder.glob("*.safetensors")
    return load_file(path)


def random_drafter(family: str, target: Target, kept: int | None, how: dict[str, Any]) -> Drafter:
    torch.manual_seed(0)
    size = target.spec.vocab_size
    ids_K = torch.arange(0, size, size // kept)[:kept] if kept else None
    if ids_K is not None:
        ids_K = torch.cat([ids_K, torch.tensor(target.eos_ids)]).unique()
    vocab = None if ids_K is None else VocabMap(ids_K, size)
    found = families()[family]
    drafter = found.build(found.options(**how), target.spec, vocab)
    drafter.bind(target.borrowed())
    assert drafter.module is not None
    for name, weight in drafter.module.named_parameters():
        weight.data.normal_(std=0.05)
        if name.endswith("norm.weight"):
            weight.data.add_(1.0)
    return drafter


def compare(drafter: Drafter, target: Target, to: str, wheels: Wheels, room: Path) -> float:
    """The largest error of a logit as a share of the largest logit; tokens must be the same."""
    about: dict[str, Any] = {"serve": {}, "recipe_digest": "", "acceptance": None, "command": []}
    save_package(drafter, target, room / "package", **about)
    export(room / "package", to, room / "out", target)
    source = ExportSource(room / "package", read_manifest(room / "package"), drafter, target)
    count, ours_of = drafter.options.num_heads, twin(source, drafter)
    trial = Trial.of(source, count - 1)
    state_D = trial.states[target.spec.num_layers][-1]
    vllm: Callable[..., Tensor] = mlp if to == "mlp-speculator" else medusa
    with torch.no_grad():
        theirs_HV = vllm(wheels, room / "out", state_D, trial.ids[-1])
    drafted = tuple(theirs_HV.argmax(-1).tolist()[:-1])
    ours_HV = drafted_logits(ours_of, replace(trial, drafted=drafted))
    if not torch.equal(theirs_HV.argmax(-1), ours_HV.argmax(-1)):
        return float("inf")
    spoken = ours_HV > -torch.inf
    error = (theirs_HV - ours_HV)[spoken].abs().max() / ours_HV[spoken].abs().max()
    return float(error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--medusa", type=Path, required=True, help="unpacked wheel of 0.32.0")
    parser.add_argument("--mlp", type=Path, required=True, help="unpacked wheel of 0.9.2")
    args = parser.parse_args()
    target, worst = load_target("tiny", dtype="float32"), 0.0
    for to, family, how in CASES:
        for kept in (None, KEPT):
            drafter = random_drafter(family, target, kept, how)
            with tempfile.TemporaryDirectory() as room:
                wheels = Wheels(args.medusa, args.mlp)
                error = compare(drafter, target, to, wheels, Path(room))
            worst = max(worst, error)
            words = ", ".join(f"{k} {v}" for k, v in how.items())
            print(f"{to:15} {words:30} {'trimmed' if kept else 'whole':8} error {error:.1e}")
    print(f"worst {worst:.1e}, allowed {NEAR:g}")
    return 0 if worst <= NEAR else 1


if __name__ == "__main__":
    sys.exit(main())
