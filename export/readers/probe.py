"""Random texts and target features that a drafter and a reference reader both draft from.

A text of n tokens has target states at all positions but the newest, the root. Behind it stands a
chain of tokens, fed one by one whatever anybody would draft, so that every draft step is compared.
Letters: n tokens, D width, S steps, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specctl.drafters import families
from specctl.drafters.parts.base import Borrowed, Drafter, RoundView, Space, StepState
from specctl.drafters.parts.routed import PREFIX
from specctl.export.engines import gate
from specctl.export.formats import Source

TOLERANCE = 1e-5  # of the largest logit, in float64 (our rotations are rounded to float32)
LENGTHS = (9, 2, 17)  # tokens of the texts


@dataclass(frozen=True, slots=True)
class Probe:
    """A text, the target's hidden_states 0 .. num_layers before its root [n - 1, D], the chain, and
    what an engine takes of the target: embedding and LM head [V, D]. All float64."""

    tokens: tuple[int, ...]
    states: tuple[Tensor, ...]
    chain: tuple[int, ...]
    embedding_VD: Tensor
    head_VD: Tensor


Reader = Callable[[Probe], Tensor]


def probes(source: Source, steps: int, avoid: int | None = None) -> list[Probe]:
    """Texts without the token `avoid`, with chains of steps - 1 tokens that the drafter can say."""
    spec, vocab = source.manifest.model_spec, source.drafter.vocab
    borrowed = source.target.borrowed()
    generator = torch.Generator().manual_seed(0)
    able = torch.arange(spec.vocab_size) if vocab is None else vocab.ids_K.cpu()
    able, every = able[able != avoid], torch.arange(spec.vocab_size)
    every = every[every != avoid]
    found = []
    for length in LENGTHS:
        tokens = every[torch.randint(len(every), (length,), generator=generator)]
        chain = able[torch.randint(len(able), (steps - 1,), generator=generator)]
        shape = (spec.num_layers + 1, length - 1, spec.hidden_size)
        states = torch.randn(shape, generator=generator, dtype=torch.float64)
        wide = [w.detach().cpu().double() for w in (borrowed.embedding_VD, borrowed.head_VD)]
        found.append(Probe(tuple(tokens.tolist()), tuple(states), tuple(chain.tolist()), *wide))
    return found


def twin(source: Source) -> Drafter:
    """The drafter in float64 on the CPU, beside a target in float64. It reads its whole LM head, as
    engines do, where the drafter reads groups of rows."""
    drafter, borrowed = source.drafter, source.target.borrowed()
    options, tensors = drafter.options, drafter.tensors()
    if getattr(options, "head_groups", None) is not None:
        options = replace(options, head_groups=None)
        tensors = {name: t for name, t in tensors.items() if not name.startswith(PREFIX)}
    double = families()[drafter.family].build(options, drafter.spec, drafter.vocab)
    double.to(torch.device("cpu"), torch.float64)
    double.load_tensors({name: t.detach().cpu() for name, t in tensors.items()})
    if double.module is not None:
        double.module.eval()
    embedding_VD, head_VD = borrowed.embedding_VD, borrowed.head_VD
    bias_V = borrowed.head_bias_V
    double.bind(
        Borrowed(
            embedding_VD.detach().cpu().double(),
            head_VD.detach().cpu().double(),
            borrowed.embed_scale,
            None if bias_V is None else bias_V.detach().cpu().double(),
        )
    )
    return double


@torch.no_grad()
def drafted(drafter: Drafter, probe: Probe) -> Tensor:
    """[S, V]: our drafter's logits after the root and after each token of the chain, -inf for what
    it cannot say."""
    last, size = len(probe.tokens) - 1, probe.head_VD.shape[0]
    room = Space(1, last + 2 + len(probe.chain), len(probe.chain) + 1, torch.device("cpu"),
                 torch.float64)  # fmt: skip
    state = drafter.open(room)
    assert isinstance(state, StepState)
    state.start(0, probe.tokens, {tap: probe.states[tap] for tap in drafter.needs().taps})
    at_1 = torch.tensor([last])
    view = RoundView((0,), at_1 * 0, torch.tensor([probe.tokens[-1]]), at_1, (probe.tokens,))
    rows = [state.root(view)]
    for index, token in enumerate(probe.chain):
        rows.append(state.expand(torch.tensor([[token]]), torch.tensor([[index - 1]]))[:, 0])
    ids_K = torch.arange(size) if drafter.vocab is None else drafter.vocab.ids_K
    return scattered(torch.cat(rows), ids_K, size)


def scattered(logits_SK: Tensor, ids_K: Tensor, size: int) -> Tensor:
    """[S, V]: logits at the target's ids, -inf elsewhere."""
    logits_SV = logits_SK.new_full((len(logits_SK), size), -torch.inf)
    logits_SV[:, ids_K] = logits_SK
    return logits_SV


def compare(source: Source, reader: Reader, steps: int, avoid: int | None = None) -> None:
    """A GateError unless the reader's logits are the drafter's, at every step of every text."""
    ours = twin(source)
    for probe in probes(source, steps, avoid):
        mine_SV, theirs_SV = drafted(ours, probe), reader(probe)
        if theirs_SV.shape != mine_SV.shape:
            raise gate(f"logits {tuple(theirs_SV.shape)}", f"logits {tuple(mine_SV.shape)}")
        said_SV = mine_SV.isfinite()
        if not torch.equal(said_SV, theirs_SV != -torch.inf):
            raise gate("other tokens can be drafted than by the drafter", "the same vocabulary")
        size = max(float(mine_SV[said_SV].abs().max()), 1.0)
        error_S = ((theirs_SV - mine_SV).masked_fill(~said_SV, 0.0) / size).abs().amax(-1)
        wrong = (~(error_S <= TOLERANCE)).nonzero()[:, 0].tolist()
        if wrong:
            step = wrong[0]
            raise gate(
                f"logits of draft step {step} differ by {float(error_S[step]):.1e} of their size "
                f"(text of {len(probe.tokens)} tokens)",
                f"at most {TOLERANCE:g} at every step",
            )
