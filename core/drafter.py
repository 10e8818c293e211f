"""The contract of a drafter: Drafter (weights and loss), DraftState (its memory of live rows).

Weights and per-request memory are separate objects: one Drafter may serve several engines, each
with its own DraftState.

Alignment everywhere: the row of a token at position t is the state *after reading* that token; it
predicts position t + 1. A tap is a transformers hidden_states index (0 = embedding output, k =
output of layer k - 1, num_layers = the state after the final norm, which feeds the LM head).
Letters: B rows, C candidates, D hidden width, K draft vocabulary, M new nodes, P path, T fed tokens
(N + 1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.errors import RecipeError
from specctl.core.forward.exit_states import ExitStates
from specctl.core.forward.prompt_images import PromptImages
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Borrowed, ChainDraws, LanguageModel, WholeChain
from specctl.core.spec import Identity, ModelSpec
from specctl.core.tree import DraftTree
from specctl.core.vocab import VocabMap


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter wants from the target: taps at every fed token, its top-k ids (`topk_logp`:
    their log-probabilities at temperature 1, too), teacher logits while training, and whether it
    borrows the embedding and the LM head. `teacher_rows`: teacher logits are computed row by row,
    so they need not exist all at once. `teacher_log_z`: features on disk hold the log-normaliser
    and the most probable id of these rows, too. `copied`: those taps that serve only to keep a copy
    of what the target caches in these layers; a state that is given the target's cache
    (`Space.target_kv`) does without."""

    taps: tuple[int, ...] = ()
    topk: int = 0
    topk_logp: bool = False
    teacher: bool = False
    borrow: bool = False
    teacher_rows: bool = False
    teacher_log_z: bool = False
    copied: tuple[int, ...] = ()

    def without_copy(self) -> Needs:
        """What a state needs that drafts in the target's own cache."""
        taps = tuple(tap for tap in self.taps if tap not in self.copied)
        return replace(self, taps=taps, copied=())


@dataclass(frozen=True, slots=True)
class Space:
    """What a DraftState must reserve: slots, context length, nodes of the widest tree; and
    which target it drafts for (None: unknown, nothing stored is shared with a known one).
    `target_kv`: the cache of the target, given to those whose `Needs.copied` names layers. What
    they draft they write behind the kept tokens, where the verification writes in any case.
    `records`: on a GPU, what is computed again and again may be recorded. `unsaid`: ids that stand
    for images in a prompt, and for no text."""

    num_slots: int
    max_len: int
    max_nodes: int
    device: torch.device
    dtype: torch.dtype
    identity: Identity | None = None
    target_kv: SlotKV | None = None
    records: bool = True
    unsaid: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Budget:
    """At most so many nodes and this depth (the engine clamps both to what a row may emit)."""

    nodes: int
    depth: int


@dataclass(frozen=True, slots=True)
class SharedNoise:
    """What the verifier of a round will draw with (rule `inverse-cdf`), for drafters that read it.
    `uniform(n)` [B, n] float64: of the first n positions behind the root; `temperature_B` of the
    rows, 0 = greedy; `distribution` turns logits [B, M, K] into what a row would draw from."""

    uniform: Callable[[int], Tensor]
    temperature_B: Tensor
    distribution: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class RoundView:
    """The active rows at the start of a round. `tokens[b]` is prompt + emitted text on the host;
    its last entry equals root_B[b], whose position is kept_len_B[b]. `prompt_lens[b]` is where the
    emitted text begins (empty where nobody asks for it). `watch` is shown a drafter's logits.
    `shared`: what the verifier will draw with, where a rule is exact whatever drafts saw.
    `missed`: positions that the drafter has not read of rows that it may draft for, where a policy
    is asked whether it drafts at all. `chosen`: which member of a team is to draft for each row, by
    name; None: whichever does (empty: of all rows)."""

    slots: tuple[int, ...]
    slot_B: Tensor
    root_B: Tensor
    kept_len_B: Tensor
    tokens: tuple[Sequence[int], ...]
    prompt_lens: tuple[int, ...] = ()
    watch: Callable[[Tensor], None] | None = None
    shared: SharedNoise | None = None
    missed: int = 0
    chosen: tuple[str | None, ...] = ()

    def shown(self, logits: Tensor) -> Tensor:
        """These logits [B, ...]. All that become tokens pass here, on the device, before they do:
        those of stepwise states where a policy asks for them, others where a state chooses."""
        if self.watch is not None:
            self.watch(logits)
        return logits


@dataclass(frozen=True, slots=True)
class RoundSeconds:
    """Of one round; `wake`: what the drafter took to read what it had missed, part of no other.
    `is_free`: the root was read with the prompt, so this is no price of a round."""

    draft: float
    verify: float
    commit: float
    wake: float = 0.0
    is_free: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round did. `path_BP` holds fed indices (0 = root first, then accepted nodes, -1 pad);
    `taps[k]` is [B, P, D] at those fed tokens, `probe_taps[k]` [B, M, D] at the tree's probes;
    `topk_BTC` target ids at every fed token, accepted or not, `topk_logp_BTC` their
    log-probabilities; `emitted[b]` the tokens given to the user, after any cut; `finished[b]` is
    the reason why row b ended, None while it is active."""

    view: RoundView
    tree: DraftTree
    path_BP: Tensor
    num_accepted: tuple[int, ...]
    next_token_B: Tensor
    emitted: tuple[tuple[int, ...], ...]
    finished: tuple[str | None, ...]
    taps: Mapping[int, Tensor] = field(default_factory=dict)
    topk_BTC: Tensor | None = None
    topk_logp_BTC: Tensor | None = None
    probe_taps: Mapping[int, Tensor] = field(default_factory=dict)
    seconds: RoundSeconds = RoundSeconds(0.0, 0.0, 0.0)


class DraftState(ABC):
    """A drafter's memory of the rows of one engine, addressed by slot. One writer: the engine.
    While `is_listening` is False, the engine spares the target's top-k. One that
    `prefills_in_parts` can read a prompt in parts. A row that drafts nothing is not shown to the
    state; before it drafts again, `start` and `observe` tell what was missed: rounds of up to
    `max_nodes` nodes that drafted the text itself, all accepted, without a proposal (and without
    top-k where the state did not listen)."""

    is_listening: bool = True
    prefills_in_parts: ClassVar[bool] = False

    def join(self, slot: int, conversation: str | None) -> None:
        """Called before `start`: the row belongs to that conversation, if it belongs to any."""
        del slot, conversation

    def belong(self, slot: int, tenant: str | None) -> None:
        """Called before `start`: what the row leaves behind may help rows of that tenant alone;
        None: no other row at all."""
        del slot, tenant

    def see(self, slot: int, images: PromptImages | None) -> None:
        """Called before a prompt's first `prefill`, and before `start`: what stands at the
        placeholders among its tokens, and its positions where these have axes; None: text alone."""
        del slot, images

    def choose(self, slot: int, member: str | None) -> None:
        """Called before `join`: of a team that member alone drafts for the row; None: any."""
        del slot, member

    def finish(self, slot: int, answer: Sequence[int]) -> None:
        """Called before `end` of a row that came to its own end (not of a cancelled one), with all
        that it emitted."""
        del slot, answer

    def prefill(
        self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor], first: int, last: int
    ) -> None:
        """Called before `start`, if it `prefills_in_parts`: read positions first .. last - 1 of a
        prompt, whose taps these are; `start` reads what is left. With first = 0 a new text
        begins."""
        raise AssertionError(f"{type(self).__name__} reads prompts whole")

    @abstractmethod
    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        """A row joins: its prompt (length n) and the taps at positions 0 .. n-2, each [n-1, D]."""

    @abstractmethod
    def propose(self, view: RoundView, budget: Budget) -> DraftTree:
        """A POINT tree for every row; an empty tree is always allowed."""

    @property
    def ignores_text(self) -> bool:
        """Whether `observe` does nothing with rounds of which the target told nothing."""
        return type(self).observe is DraftState.observe

    def observe(self, outcome: Outcome) -> None:
        """Learn from the round: roll caches back to the accepted path, take new features. Not for
        states that read all they need of the next view."""
        del outcome

    def end(self, slot: int) -> None:
        """A row left; its slot may be given to another."""
        del slot


class StepState(DraftState):
    """A DraftState that drafts token by token, so that a tree policy or stop rule drives growth.

    Logits are raw and over the draft vocabulary (`Drafter.vocab`; None = the target's). If it
    `may_draft_nothing`, a row that is -inf everywhere drafts nothing: its children are padding.
    Growth of one round: `root` once, then `expand` any number of times; `observe` ends it.
    """

    may_draft_nothing: bool = False

    @abstractmethod
    def root(self, view: RoundView) -> Tensor:
        """[B, K]: logits of the first drafted token, after reading everything up to the root."""

    @abstractmethod
    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        """[B, M, K]: append M nodes (target ids; parent = node index in order of expansion, -1 =
        root) and return the logits after each. Node indices count up across calls."""

    def whole_chain(
        self, view: RoundView, length: int, draws: ChainDraws | None = None
    ) -> WholeChain | None:
        """What `root` and `length - 1` calls of `expand` with the likeliest tokens give, or with
        tokens drawn as `draws` says, in one call in their place; None where there is no such call,
        and nothing has been done."""
        return None

    def marginals(self, view: RoundView, length: int) -> Tensor | None:
        """[B, P, K]: logits of the first P places behind the root, at most `length`, where none
        depends on the tokens drafted before it; in place of `root` and `expand`. None where they
        do, and nothing has been done."""
        return None

    def exit_states(self) -> ExitStates | None:
        """What this round's growth has computed of the target's forward of root and nodes, in the
        target's cache, if it was a chain; None: nothing."""
        return None

    def unverified(self, tree: DraftTree) -> Tensor | None:
        """[B, N]: nodes of this round's tree that are taken whatever the target says (forced; only
        of drafters that are not lossless). None: every node is verified."""
        return None

    def hidden(self) -> Tensor:
        """[B, D]: the states that the newest logits were read from (of the last node expanded);
        what trained stop rules look at."""
        raise RecipeError(
            "this drafter shows no states",
            found=type(self).__name__,
            expected="a drafter with one state in front of its LM head",
            do="choose a stop rule that reads probabilities only, such as disco or svip",
        )

    def known(self, view: RoundView) -> Tensor | None:
        """[B, 2, D]: what is known of each row before the drafter's first pass of a round: the
        root's embedding, and the target's state before it. None: nothing to read without a pass."""
        return None

    def confidence(self) -> Tensor:
        """[B]: how likely the next token is to be accepted, by the drafter's own estimate."""
        raise RecipeError(
            "this drafter does not estimate its own acceptance",
            found=type(self).__name__,
            expected="a drafter with a confidence head, such as dspark",
            do="choose another stop rule, such as svip",
        )

    def propose(self, view: RoundView, budget: Budget) -> DraftTree:
        raise AssertionError("a stepwise drafter is grown by a tree policy, not by propose()")


class Drafter(ABC):
    """Weights of a drafter. `module` is None for training-free families."""

    family: ClassVar[str]
    module: nn.Module | None = None
    vocab: VocabMap | None = None
    lossless: bool = True
    policies: tuple[str, ...] = ()  # that may grow it, where they are not its family's
    note: str = ""  # what is to be said whenever it is used
    serve: Mapping[str, Any] = {}  # how its package or its recipe says it is served
    one_call: bool = False  # one call of its LM heads gives every position of a draft
    holds_data: bool = False  # `tensors` are a memory of any length, which `load_tensors` checks
    runs_target: bool = False  # its loss runs layers of the target
    teaches_target: bool = False  # and gradients go through them, should they learn
    splits_rows: bool = False  # its loss minds `TrainBatch.part`
    memories: frozenset[str] = frozenset()  # those of `tensors` that are no weights
    file: Path | None = None  # a GGUF file that its weights are: packages hold it, not tensors
    learns_states: bool = True  # a store of texts keeps what `needs` asks for of them, too

    def __init__(self, options: Any, spec: ModelSpec, vocab: VocabMap | None = None) -> None:
        self.options, self.spec, self.vocab = options, spec, vocab

    @property
    def positions(self) -> int | None:
        """How many positions it was made for, where that is known and may be fewer than the
        target's: what it drafts behind them is seldom accepted."""
        return None

    def needs(self) -> Needs:
        """Nothing, unless a family says otherwise."""
        return Needs()

    @abstractmethod
    def open(self, space: Space) -> DraftState:
        """A fresh memory for an engine of that size."""

    def slot_bytes(self, space: Space) -> int:
        """Memory of one slot in a state of that size. Unless a family knows better it is measured
        on small states, so the borrowed pieces must be bound."""
        return slot_bytes(self.open, space, self)

    @property
    def shared_bytes(self) -> int:
        """The most that is remembered beside slots, for all rows together."""
        return 0

    def check_served(self) -> None:
        """RecipeError unless its options, of which some may have been set anew, fit the target."""
        return

    def bind(self, borrowed: Borrowed) -> None:
        """Take the frozen pieces named by `needs().borrow`; they are not parameters of `module`."""
        del borrowed

    def loss(self, batch: TrainBatch) -> LossOut:
        raise AssertionError(f"{self.family} has nothing to train")

    def trainable(self) -> dict[str, nn.Parameter]:
        """Exactly the parameters that training may move."""
        if self.module is None:
            return {}
        return {n: p for n, p in self.module.named_parameters() if p.requires_grad}

    def tensors(self) -> dict[str, Tensor]:
        """What a package stores: own weights only, never borrowed ones."""
        return {} if self.module is None else dict(self.module.state_dict())

    def target_rows(self) -> tuple[str, ...]:
        """Names among `tensors` that are the target's own rows: of its LM head, in the order of
        `vocab`, and never trained. A package leaves them out where they are still the same."""
        return ()

    def completed(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A package's tensors, with those that the family did not store in older packages."""
        return tensors

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Strict: a missing or unexpected name is an error."""
        if self.module is not None:
            self.module.load_state_dict(dict(tensors), strict=True)

    @contextmanager
    def whole(self) -> Iterator[Drafter]:
        """This drafter with all its weights on this process. One whose weights are spread over
        processes gathers them on the first (every process must enter), until the block ends."""
        yield self

    def language_model(self) -> LanguageModel | None:
        """The drafter as a model over the target's ids, if it can write text without the target."""
        return None

    def remarks(self, is_packed: bool) -> list[str]:
        """What a plan is to say of drafting with it. `is_packed`: a CPU reads the matrices of the
        target as its file packs them, unless it is given another dtype."""
        del is_packed
        return []

    @property
    def head_width(self) -> int | None:
        """How wide its LM head is, if it can be read in two steps (`nets/shortlist.py`)."""
        return None

    def trimmed(self, vocab: VocabMap) -> Drafter:
        """The same drafter over `vocab` only; families without an LM head raise."""
        raise AssertionError(f"{self.family} has no LM head to trim")

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Drafter:
        if self.module is not None:
            self.module.to(device=device, dtype=dtype)
        if self.vocab is not None:
            self.vocab = self.vocab.to(device)
        return self


@dataclass(frozen=True, slots=True)
class Family:
    """One method file's entry: `FAMILY = Family(...)`. `options` is a frozen dataclass whose
    defaults are the family's; `build(options, spec, vocab)` makes a drafter with fresh weights.
    `policies` are the tree policies that may grow it, the default first. `reads_stored`: it makes
    weights of its own from the target's as they are stored. `borrows_layers`: it runs layers of the
    target apart from a forward, or reads what they cached."""

    name: str
    summary: str
    paper: str
    options: type
    build: Callable[[Any, ModelSpec, VocabMap | None], Drafter]
    trainable: bool
    policies: tuple[str, ...]
    reads_stored: bool = False
    borrows_layers: bool = False


STRIDE = 64  # positions between the small states
PLAIN = (str, bytes, int, float, type(None), torch.device, torch.dtype)


def slot_bytes(opened: Callable[[Space], object], space: Space, drafter: object) -> int:
    """Bytes of tensors that one slot of a state of that space takes, without what the drafter
    itself owns, measured on small states. A state of n slots and L positions holds c(L) + n (a + b
    L) bytes: what all rows share (a head prepared for serving, rotations), what every row has, and
    what every position of it has. Four small states give a and b exactly; c(L) cancels."""

    def measured(num_slots: int, max_len: int) -> int:
        small = replace(space, num_slots=num_slots, max_len=max_len, identity=None)
        return tensor_bytes(opened(small), drafter)

    first = STRIDE + space.max_len % STRIDE
    short, long = (measured(2, at) - measured(1, at) for at in (first, first + STRIDE))
    return max(0, short + (long - short) * (space.max_len - first) // STRIDE)


def tensor_bytes(root: object, without: object = None) -> int:
    """Bytes of all tensors that can be reached from an object, each storage once; modules, and
    whatever is reached through `without` alone, are left out."""
    storages: dict[int, int] = {}
    seen, todo = {id(without)}, [root]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, (*PLAIN, type, nn.Module)):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            if one.layout is torch.strided:
                storage = one.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            continue
        todo.extend(_parts(one))
    return sum(storages.values())


def _parts(one: object) -> Iterator[object]:
    """What an object holds: the entries of a container, the fields of anything else."""
    if isinstance(one, Mapping):
        yield from one.values()
    elif isinstance(one, (list, tuple, Set)):
        if not all(isinstance(first, PLAIN) for first in list(one)[:1]):  # not through whole texts
            yield from one
    else:
        yield from getattr(one, "__dict__", {}).values()
        for kind in type(one).__mro__:
            names = kind.__dict__.get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                if hasattr(one, name):
                    yield getattr(one, name)
