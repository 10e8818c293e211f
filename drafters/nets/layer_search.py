"""What a set of sub-layers is worth as a draft, and a search for the best one (Draft & Verify).

A set is scored on texts that the target has read: at every position the sub-layers say the next
token from the target's own context, which is what they do at the first token of a draft; `match` is
the share where they say what the target says. With it and the share c of the model that runs, a
draft of k tokens is worth (1 - m^(k+1)) / ((1 - m) (1 + k c)) forwards of the target, at its best
k. (The paper times generation instead, arXiv 2309.08168 section 3.3: what is timed on one machine
holds there only, and one trial costs a generation.)
Letters: B rows, S sequence, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specctl.core.errors import SpecctlError
from specctl.core.installed import pip_install
from specctl.core.language_model import LanguageModel
from specctl.core.sub_layers import SubLayers
from specctl.drafters.states.borrowed_state import shadow_logits

LONGEST = 12  # tokens of a draft


def worth(match: float, share: float, most: int = LONGEST) -> float:
    """Tokens per forward of the target at the best draft length (0: plain decoding, 1.0)."""
    best, tokens, reached = 1.0, 1.0, 1.0
    for length in range(1, most + 1):
        reached *= match
        tokens += reached
        best = max(best, tokens / (1.0 + length * share))
    return best


class ReadTexts:
    """Texts of one length with the target's own keys of all its layers, and what it says next."""

    @torch.no_grad()
    def __init__(self, lm: LanguageModel, ids_BS: Tensor) -> None:
        B, S = ids_BS.shape
        self.lm, self.ids_BS, self.slots = lm, ids_BS, tuple(range(B))
        self.kv = lm.new_kv(B, 2 * S)
        start_B = torch.zeros(B, dtype=torch.long, device=ids_BS.device)
        self.kv.begin(self.slots, start_B + torch.arange(B, device=ids_BS.device), start_B, S, S, 0)
        position_BS = torch.arange(S, device=ids_BS.device).expand(B, S)
        out = lm.forward(ids_BS, position_BS, lm.chain_masks(start_B, S, S), self.kv)
        assert out.logits_BTV is not None
        self.said_BS = out.logits_BTV.argmax(-1)

    def match(self, parts: SubLayers) -> float:
        """Share of positions at which the sub-layers say what the target says."""
        length = self.ids_BS.shape[1]
        logits_BSV = shadow_logits(self.lm, self.kv, self.slots, self.ids_BS, 0, length, parts)
        return float((logits_BSV.argmax(-1) == self.said_BS).float().mean())


@dataclass(frozen=True, slots=True)
class FoundParts:
    """The best set, its match, and what it is worth."""

    parts: SubLayers
    match: float
    worth: float


def bayesian(
    score: Callable[[SubLayers], float],
    num_layers: int,
    trials: int,
    first: Sequence[SubLayers] = (),
    seed: int = 0,
) -> SubLayers:
    """The set with the highest score that a Bayesian search (optuna's tree-structured Parzen
    estimator) found; `first` are tried before it is asked. The first layer always runs."""
    try:
        import optuna
    except ImportError as error:
        raise SpecctlError(
            "searching for layers to skip needs optuna",
            found="no module optuna",
            expected="optuna",
            do=f"{pip_install('tune')}, or write drafter.options.skip_attention and skip_mlp",
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    upper = range(1, num_layers)
    names = {f"{kind} {layer}": (kind, layer) for kind in ("attention", "mlp") for layer in upper}

    def of(skips: Mapping[str, bool]) -> SubLayers:
        out = [names[name] for name, is_out in skips.items() if is_out]
        attention = [layer for kind, layer in out if kind == "attention"]
        return SubLayers.without(num_layers, attention, [x for kind, x in out if kind == "mlp"])

    def objective(trial: Any) -> float:
        return score(of({name: trial.suggest_categorical(name, [False, True]) for name in names}))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for parts in first:
        runs = {"attention": parts.attention, "mlp": parts.mlp}
        skips = {name: layer not in runs[kind] for name, (kind, layer) in names.items()}
        study.enqueue_trial(skips)
    study.optimize(objective, n_trials=max(trials, len(first)))
    return of(study.best_params)


def search(lm: LanguageModel, ids_BS: Tensor, trials: int, seed: int = 0) -> FoundParts:
    """The set of sub-layers that is worth most on these texts."""
    read, count = ReadTexts(lm, ids_BS), lm.spec.num_layers

    def score(parts: SubLayers) -> float:
        return worth(read.match(parts), parts.share(count))

    first = [SubLayers.evenly(count, kept) for kept in sorted({count, 3 * count // 4, count // 2})]
    best = bayesian(score, count, trials, first, seed)
    match = read.match(best)
    return FoundParts(best, match, worth(match, best.share(count)))
