"""The target without some of its layers drafts for the whole (Draft & Verify, arXiv 2309.08168).

Attentions and MLPs are left out one by one. Which ones are worth leaving out is found once for a
target, by Bayesian search over texts (`specctl datastore`), and kept in the package; by default
half of the layers are left out, evenly spread with the first and the last kept (unified layer
skipping, arXiv 2404.06954). A draft starts from the target's own keys and values of the known text.
The paper's self-tuned threshold is stop rule draft-verify.

A set is scored on texts that the target has read: at every position the sub-layers say the next
token from the target's own context, which is what they do at the first token of a draft; `match` is
the share where they say what the target says. With it and the share c of the model that runs, a
draft of k tokens is worth (1 - m^(k+1)) / ((1 - m) (1 + k c)) forwards of the target, at its best
k. (The paper times generation instead, section 3.3: what is timed on one machine holds there only,
and one trial costs a generation.)
Letters: B rows, S sequence, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from specctl.core.drafter import Family, Space
from specctl.core.errors import RecipeError
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.language_model import LanguageModel
from specctl.core.messages.installed import library
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.frames.self_drafter import SelfDrafter, UnverifiedOptions, check_layers
from specctl.drafters.option_checks import Options, Within, check_options
from specctl.drafters.states.borrowed_state import FixedState, shadow_logits

TEXT, MOST_TEXTS = 128, 16  # tokens of a text that is searched on, and how many


@dataclass(frozen=True, slots=True)
class SkipLayersOptions(UnverifiedOptions):
    """`skip_attention` and `skip_mlp`: layers whose attention or MLP is left out; None for both
    keeps the share `keep` of whole layers, evenly spread. `trials` sets are looked at where texts
    are searched on."""

    skip_attention: tuple[int, ...] | None = None
    skip_mlp: tuple[int, ...] | None = None
    keep: float = 0.5
    trials: Annotated[int, Within(most=1_000_000)] = 200

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        check_options(self, 0.0 < self.keep <= 1.0, ("keep",), "a share above 0, up to 1")


class SkipLayers(SelfDrafter):
    """A set that was searched for becomes part of the options, and so of the package."""

    family = "skip-layers"
    shares_kv = True
    learns_states = False
    options: SkipLayersOptions

    def __init__(
        self, options: SkipLayersOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        super().__init__(options, spec, vocab)
        self.lossless, count = options.unverified is None, spec.num_layers
        if options.skip_attention is None and options.skip_mlp is None:
            self.parts = SubLayers.evenly(count, max(1, round(options.keep * count)))
        else:
            attention = check_layers("skip_attention", options.skip_attention or (), count)
            mlp = check_layers("skip_mlp", options.skip_mlp or (), count)
            self.parts = SubLayers.without(count, attention, mlp)

    @property
    def attention(self) -> tuple[int, ...]:
        return self.parts.attention

    def open(self, space: Space) -> FixedState:
        return FixedState(self.lm, self.parts, space, self.options.unverified)

    def learn(
        self, texts: Iterable[Sequence[int]], taps: Iterable[Mapping[int, Tensor]] = ()
    ) -> None:
        """Search for the set that is worth most on these texts."""
        whole = [list(text[:TEXT]) for text in texts if len(text) >= TEXT][:MOST_TEXTS]
        if not whole:
            raise RecipeError(
                "no text is long enough to search for layers to skip",
                where="data.new_tokens",
                expected=f"texts of {TEXT} tokens",
                do=f"--set data.new_tokens={TEXT}",
            )
        ids_BS = torch.tensor(whole, device=self.lm.device)
        found = search(self.lm, ids_BS, self.options.trials)
        attention, mlp = found.parts.skipped(self.spec.num_layers)
        self.options = replace(self.options, skip_attention=attention, skip_mlp=mlp)
        self.parts = found.parts


FAMILY = Family(
    name="skip-layers",
    summary=(
        "No second model and no training: the target without some of its attentions and MLPs "
        "drafts for the whole of it. Which ones to leave out is searched for once, on texts of "
        "yours. Pays where a target has layers to spare, as large ones have."
    ),
    paper="https://arxiv.org/abs/2309.08168",
    options=SkipLayersOptions,
    build=SkipLayers,
    trainable=False,
    policies=("chain",),
    borrows_layers=True,
)


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
    otherwise = "write drafter.options.skip_attention and skip_mlp"
    optuna = library("optuna", "a search for layers to skip", "tune", instead=otherwise)
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
