"""A trial: a random text with random states of a target, what our drafter drafts behind it, and
whether an engine's reader says the same. Everything in float64 on the CPU.
Letters: D hidden width, K draft vocabulary, N nodes, S sequence (T - 1: the newest token has none),
T fed tokens, V target vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from specctl.core.drafter import Drafter, RoundView, Space, StepState
from specctl.core.language_model import Borrowed, LanguageModel
from specctl.drafters import families
from specctl.drafters.nets.routed import PREFIX
from specctl.export.formats import ExportSource
from specctl.export.layouts.engines import gate

CPU = torch.device("cpu")
TOLERANCE = 1e-5  # of the largest logit
KNOWN = 12

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # ids, states -> logits, fed back
AnyDrafter = TypeVar("AnyDrafter", bound=Drafter)


@dataclass(frozen=True, slots=True)
class Trial:
    """Known tokens (the last has no states yet), tokens drafted behind them, and what the target
    computed: `states[k]` [S, D] is its hidden state k, of all layers."""

    ids: tuple[int, ...]
    drafted: tuple[int, ...]
    states: Mapping[int, Tensor]

    @classmethod
    def of(cls, source: ExportSource, num_drafted: int, without: int | None = None) -> Trial:
        """The same for every export of one shape; no token twice where there are enough, and none
        `without`, whose embedding stands for something else."""
        spec, random = source.manifest.model_spec, torch.Generator().manual_seed(0)
        known = min(KNOWN, spec.max_positions - num_drafted)
        order = torch.randperm(spec.vocab_size, generator=random)
        order = order[order != (-1 if without is None else without)]
        vocab = source.drafter.vocab
        spoken = order if vocab is None else order[torch.isin(order, vocab.ids_K.cpu())]
        ids = order.repeat(2)[:known]
        shape = (spec.num_layers + 1, known - 1, spec.hidden_size)
        states = torch.randn(shape, generator=random, dtype=torch.float64)
        drafted = spoken.repeat(1 + num_drafted)[-num_drafted:] if num_drafted else spoken[:0]
        return cls(tuple(ids.tolist()), tuple(drafted.tolist()), dict(enumerate(states)))


def embedding_of(source: ExportSource) -> Tensor:
    """[V, D] float64: the target's bare rows, rounded to the dtype of the package, in which a
    drafter reads them."""
    return _rounded(source, source.target.borrowed().embedding_VD).double()


def head_of(source: ExportSource) -> Tensor:
    """[V, D] float64: the target's LM head, rounded likewise."""
    return _rounded(source, source.target.borrowed().head_VD).double()


def _rounded(source: ExportSource, rows_VD: Tensor) -> Tensor:
    return rows_VD.detach().to(CPU, getattr(torch, source.manifest.dtype))


def twin(source: ExportSource, drafter: AnyDrafter, lm: LanguageModel | None = None) -> AnyDrafter:
    """The drafter in float64 on the CPU, bound to the same target, whose rows it widens as it reads
    them (a copy of them all would take gigabytes); the original is untouched. `lm`: what stands for
    the target where the drafter reads its layers."""
    made = copy.copy(drafter)
    made.module = copy.deepcopy(drafter.module)
    made.to(CPU, torch.float64)
    borrowed = source.target.borrowed()
    bias, rows_VD = borrowed.head_bias_V, borrowed.embedding_VD
    if borrowed.embed_scale != 1.0:
        rows_VD = rows_VD * borrowed.embed_scale
    made.bind(
        Borrowed(
            _rounded(source, rows_VD),
            _rounded(source, borrowed.head_VD),
            1.0,
            None if bias is None else bias.cpu(),
            lm,
        )
    )
    return made


def without_router(drafter: Drafter) -> Drafter:
    """The drafter reading its whole LM head, as engines do; itself where it does so already."""
    if getattr(drafter.options, "head_groups", None) is None:
        return drafter
    options = replace(drafter.options, head_groups=None)
    whole = families()[drafter.family].build(options, drafter.spec, drafter.vocab)
    tensors = {n: t for n, t in drafter.tensors().items() if not n.startswith(PREFIX)}
    first = next(iter(tensors.values()))
    whole.to(first.device, first.dtype)
    whole.load_tensors(tensors)
    return whole


def with_whole_head(drafter: Drafter) -> Drafter:
    """The drafter without a shortlist, which no engine has; itself where it has none."""
    if getattr(drafter.options, "head_rank", None) is None:
        return drafter
    whole = copy.copy(drafter)
    none = dict.fromkeys(("head_rank", "head_candidates", "head_smoothing"))
    whole.options = replace(drafter.options, **none)
    return whole


def spoken(drafter: Drafter, trial: Trial) -> Iterator[tuple[StepState, Tensor]]:
    """The drafter as it serves, and its logits [K], after the root and after each drafted token."""
    num_nodes = len(trial.drafted) + 1
    space = Space(1, len(trial.ids) + num_nodes, num_nodes, CPU, torch.float64)
    state = with_whole_head(drafter).open(space)
    assert isinstance(state, StepState), drafter.family
    state.start(0, trial.ids, {tap: trial.states[tap] for tap in drafter.needs().taps})
    at_1 = torch.tensor([len(trial.ids) - 1])
    view = RoundView((0,), torch.tensor([0]), torch.tensor(trial.ids[-1:]), at_1, (trial.ids,))
    yield state, state.root(view)[0]
    for step, token in enumerate(trial.drafted):
        yield state, state.expand(torch.tensor([[token]]), torch.tensor([[step - 1]]))[0, 0]


@torch.no_grad()
def drafted_logits(drafter: Drafter, trial: Trial) -> Tensor:
    """[N + 1, V]: what the drafter says after the root and after each drafted token; -inf for the
    ids that it cannot speak."""
    rows, vocab = [logits_K for _, logits_K in spoken(drafter, trial)], drafter.vocab
    if vocab is None:
        return torch.stack(rows)
    return over_targets(torch.stack(rows), vocab.ids_K, vocab.target_size)


def chained(step: Step, trial: Trial, state_TD: Tensor) -> Tensor:
    """[N + 1, K] by a reader: logits after the newest known token and after each drafted one, every
    state of the drafter's own fed back beside the next token."""
    ids, said = list(trial.ids[1:]), []
    for token in (*trial.drafted, None):
        logits_TK, fed_TD = step(torch.tensor(ids), state_TD)
        said.append(logits_TK[-1])
        if token is not None:
            ids.append(token)
            state_TD = torch.cat([state_TD, fed_TD[-1:]])
    return torch.stack(said)


def over_targets(said_NK: Tensor, ids_K: Tensor | None, size: int) -> Tensor:
    """[N, V]: logits by target id, -inf for those without a row."""
    if ids_K is None:
        return said_NK
    if int(ids_K.min()) < 0 or int(ids_K.max()) >= size:
        raise gate("d2t leads out of the vocabulary", "offsets: target id = row + d2t[row]")
    whole_NV = said_NK.new_full((len(said_NK), size), -torch.inf)
    whole_NV[:, ids_K] = said_NK
    return whole_NV


def compare(engine: str, theirs_NV: Tensor, ours_NV: Tensor, tolerance: float = TOLERANCE) -> float:
    """The largest error as a share of the largest logit; above the tolerance a GateError."""
    spoken = ours_NV > -torch.inf
    if theirs_NV.shape != ours_NV.shape or not torch.equal(theirs_NV > -torch.inf, spoken):
        raise gate(f"{engine} could draft other token ids", "the ids that the drafter can speak")
    scale = max(float(ours_NV[spoken].abs().max()), 1e-30)
    error_N = torch.where(spoken, (theirs_NV - ours_NV).abs(), 0.0).amax(-1) / scale
    if not bool((error_N <= tolerance).all()):
        at = int((~(error_N <= tolerance)).nonzero()[0])
        found = f"drafted token {at + 1}: logits by {engine} differ by {float(error_N[at]):.1e}"
        raise gate(found, f"the drafter's own logits, within {tolerance:g} of their size")
    return float(error_N.max())
