"""Independent small language model, distilled from the target (DistillSpec, arXiv 2310.08461).

An ordinary Llama of few layers over the target's tokenizer; it reads tokens only, never features,
so it works with any target of that tokenizer and as `assistant_model` in transformers. Row t
predicts token t + 1 (A0). Depth costs latency and width hardly does, hence few and wide layers
(arXiv 2402.01528). Any other causal LM of transformers takes the place of the Llama where
`architecture` says so: recurrent and hybrid ones read each document of a packed row by itself.
Letters: B rows, D hidden width, K draft vocabulary, R flat rows, S sequence, T fed tokens, V target
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Self

import torch
from torch import Tensor, nn

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import Drafter, Family, Needs, Space, StepState
from specctl.core.errors import IncompatibleError, RecipeError
from specctl.core.forward.row_part import RowPart
from specctl.core.kv_cache import KVShape, SlotKV
from specctl.core.language_model import Borrowed, Feed, LanguageModel, LmOut, Masks
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.frames.text_alone import text_alone
from specctl.drafters.losses.align import aim
from specctl.drafters.losses.head_losses import LinearHead, head_loss, teacher_logits, with_stretch
from specctl.drafters.nets.heads import cut_rows, fitting_rows, head_rows, kept_rows
from specctl.drafters.nets.options import ADDED, SERVED, CompareOptions
from specctl.drafters.nets.routed import add_router, check_routing, cut_router, with_router
from specctl.drafters.option_checks import Within
from specctl.drafters.states.lm_state import LmState
from specctl.drafters.states.recurrent_lm_state import FILL_CHUNK, RecurrentLmState
from specctl.drafters.states.short_context import LEAST, ShortContextState
from specctl.models.hf.from_config import WHERE, lm_from, move, tied_names
from specctl.models.llama.fast_llama import FastLlama, LlamaModel, LlamaShape
from specctl.models.llama.fewer_rows import with_packed_rows
from specctl.models.rope import rope_of


@dataclass(frozen=True, slots=True)
class SmallLmOptions(CompareOptions):
    """Shape and training of the draft model. None: an eighth of the target's depth, half its width,
    its head width, its feed-forward ratio, its norm and rope constants. `tied` shares embedding and
    LM head (a trimmed head is never tied). With drafter.init = "target" all sizes but the depth
    follow the target, and `from_layers` says which of its layers are kept (None: evenly spaced,
    with the first and the last). `head_groups` splits the LM head's rows, of which the `head_top`
    best groups are read (CORAL). `architecture`: keys of a config.json with their `model_type`, in
    place of all sizes: any causal language model of transformers, recurrent ones as well. Of a
    prompt longer than `context` the draft reads so many tokens, the most useful ones (RAPID)."""

    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate: int | None = None
    tied: bool = True
    qk_norm: bool = False
    from_layers: tuple[int, ...] | None = None
    attention_bias: bool = False
    output_bias: bool = False
    window: int | None = None
    norm_eps: float | None = None
    rope_theta: float | None = None
    head_groups: int | None = None
    head_top: int = 4
    architecture: dict[str, Any] | None = field(default=None, metadata=ADDED)
    context: Annotated[int, Within(LEAST, 1 << 24)] | None = field(default=None, metadata=SERVED)

    def __post_init__(self) -> None:
        CompareOptions.__post_init__(self)
        check_routing(self.head_groups, self.head_top)
        if self.architecture is not None:
            self._check_alone()
        if self.context is not None and type(self) is not SmallLmOptions:
            raise RecipeError(
                "this family reads every prompt whole",
                where="drafter.options.context",
                found=f"context: {self.context}",
                expected=f"no context, or family {SmallLm.family}",
                do="leave context out",
            )
        for name in ("layers", "width", "heads", "kv_heads", "head_dim", "intermediate", "window"):
            size, most = getattr(self, name), 1_000 if name == "layers" else 1_000_000
            if size is not None and not 1 <= size <= most:
                raise RecipeError(
                    f"{name} is no size",
                    where=f"drafter.options.{name}",
                    found=str(size),
                    expected=f"a number from 1 to {most:,}, or leave it out",
                    do=f"leave {name} out to follow the target",
                )
        kept = self.from_layers
        if kept is not None and (
            not kept or list(kept) != sorted({*kept}) or self.layers not in (None, len(kept))
        ):
            raise RecipeError(
                "from_layers does not name the draft's layers",
                where="drafter.options.from_layers",
                found=f"{list(kept)} with layers {self.layers}",
                expected="ascending layer numbers of the target, one per layer of the draft",
                do="leave drafter.options.layers out",
            )

    def _check_alone(self) -> None:
        """Refuse what an `architecture` would leave without effect, or what cannot read it."""
        if type(self) is not SmallLmOptions:
            raise RecipeError(
                "this family drafts with a Llama-shaped model alone",
                where=WHERE,
                found=str((self.architecture or {}).get("model_type"))[:80],
                expected=f"family {SmallLm.family} beside an architecture",
                do=f"--set drafter.family={SmallLm.family}, or leave architecture out",
            )
        usual = SmallLmOptions()
        given = [name for name in LLAMA_ONLY if getattr(self, name) != getattr(usual, name)]
        if given:
            raise RecipeError(
                "the architecture says every size of the draft",
                where=f"drafter.options.{given[0]}",
                found=f"{given[0]} beside architecture",
                expected="one of the two",
                do=f"leave {given[0]} out, or set it in the architecture by its own name",
            )


LLAMA_ONLY = (  # options that an `architecture` takes the place of, or has no part for
    "layers", "width", "heads", "kv_heads", "head_dim", "intermediate", "tied", "qk_norm",
    "from_layers", "attention_bias", "output_bias", "window", "norm_eps", "rope_theta",
    "head_groups", "head_rank",
)  # fmt: skip


def draft_shape(options: SmallLmOptions, spec: ModelSpec, vocab: VocabMap | None) -> LlamaShape:
    """The draft model's shape for this target."""
    head_dim = options.head_dim or min(spec.head_dim, options.width or spec.hidden_size)
    width = options.width or max(head_dim, spec.hidden_size // 2 // head_dim * head_dim)
    heads = options.heads or max(1, width // head_dim)
    kv_heads = options.kv_heads or _divisor(heads, spec.num_kv_heads)
    if heads % kv_heads:
        raise RecipeError(
            "query heads do not divide over the key/value heads",
            where="drafter.options.kv_heads",
            found=f"{heads} heads, {kv_heads} kv_heads",
            expected="heads a multiple of kv_heads",
            do="leave kv_heads out",
        )
    ratio = spec.intermediate_size / spec.hidden_size
    num_layers = options.layers or len(options.from_layers or ())
    return LlamaShape(
        num_layers=num_layers or max(1, spec.num_layers // 8),
        hidden_size=width,
        vocab_size=spec.vocab_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=options.intermediate or max(8, round(width * ratio / 8) * 8),
        norm_eps=options.norm_eps or spec.norm_eps,
        rope_theta=options.rope_theta or spec.rope_theta,
        tied=options.tied and vocab is None,
        qk_norm=options.qk_norm,
        attention_bias=options.attention_bias,
        output_bias=options.output_bias,
        window=options.window,
        out_size=None if vocab is None else vocab.size,
    )


def options_of(shape: LlamaShape, spec: ModelSpec) -> dict[str, Any]:
    """The options that give exactly this shape to a drafter for that target."""
    return {
        "layers": shape.num_layers,
        "width": shape.hidden_size,
        "heads": shape.num_heads,
        "kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate": shape.intermediate_size,
        "tied": shape.tied,
        "qk_norm": shape.qk_norm,
        "attention_bias": shape.attention_bias,
        "output_bias": shape.output_bias,
        "window": shape.window,
        "norm_eps": None if shape.norm_eps == spec.norm_eps else shape.norm_eps,
        "rope_theta": None if shape.rope_theta == spec.rope_theta else shape.rope_theta,
    }


def _divisor(heads: int, at_most: int) -> int:
    return max(n for n in range(1, heads + 1) if heads % n == 0 and n <= max(1, at_most))


def _draft_spec(shape: LlamaShape, target: ModelSpec) -> ModelSpec:
    return replace(
        target,
        model_type="llama",
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        embed_scale=1.0,
    )


def _own_ids(lm: LanguageModel, spec: ModelSpec) -> VocabMap | None:
    """The ids of a model that has fewer than the target, padded otherwise; None: all."""
    size = lm.spec.vocab_size
    if size >= spec.vocab_size:
        return None
    return VocabMap(torch.arange(size, device=lm.device), spec.vocab_size)


def _whole_vocab(lm: LanguageModel, spec: ModelSpec, vocab: VocabMap | None) -> VocabMap | None:
    """The vocabulary of a draft whose LM head has a row for each of its ids."""
    own = _own_ids(lm, spec)
    size = spec.vocab_size if own is None else own.size
    if vocab is not None and vocab.size != size:
        raise RecipeError(
            "only a Llama-shaped draft model has an LM head for part of the vocabulary",
            where="vocab.size",
            found=f"{vocab.size:,} of {spec.vocab_size:,} ids, with {WHERE}",
            expected="the whole vocabulary",
            do="--set vocab.size=null",
        )
    return own


class WholeRows(SlotKV):
    """What the layers of a forward over a stretch of rows attend to: keys and values of whole rows,
    gathered as they come. It keeps nothing."""

    def __init__(self, part: RowPart, length: int) -> None:
        self.part, self.length = part, length

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        del layer
        return self._row(key), self._row(value)

    def _row(self, own: Tensor) -> Tensor:
        return self.part.gathered(own, self.length, dim=2)


class SmallLm(Drafter):
    """An independent draft model around any LanguageModel."""

    family = "small-lm"
    splits_rows = True
    module: nn.Module

    def __init__(
        self,
        options: SmallLmOptions,
        spec: ModelSpec,
        vocab: VocabMap | None = None,
        lm: LanguageModel | None = None,
    ) -> None:
        if lm is None and options.architecture is not None:
            lm = lm_from(options.architecture, spec.vocab_size)
            vocab = _whole_vocab(lm, spec, vocab)
        super().__init__(options, spec, vocab)
        if lm is None:
            shape = draft_shape(options, spec, vocab)
            rope = rope_of(spec, shape.head_dim, shape.rope_theta)
            module = LlamaModel(shape, rope.inv_freq, rope.scale)
            lm = FastLlama(module, _draft_spec(shape, spec))
        self.lm, self.module = lm, lm.module
        self.splits_rows = type(self).splits_rows and isinstance(self.module, LlamaModel)
        rows = spec.vocab_size if vocab is None else vocab.size
        width = lm.spec.hidden_size
        self.router = add_router(self.module, width, rows, options.head_groups, options.head_top)
        self._is_fresh = self.router is not None

    @classmethod
    def from_lm(cls, lm: LanguageModel, spec: ModelSpec) -> SmallLm:
        """A loaded language model as drafter. A vocabulary padded differently from the target's is
        accepted: surplus rows are never drafted, missing ids are treated as cut."""
        return cls(SmallLmOptions(), spec, _own_ids(lm, spec), lm)

    @property
    def head_width(self) -> int | None:
        return self.module.shape.hidden_size if isinstance(self.module, LlamaModel) else None

    @property
    def positions(self) -> int | None:
        return self.lm.spec.max_positions if self.options.context is None else None

    def needs(self) -> Needs:
        routed = self.router is not None  # groups are of the target's LM-head rows
        return Needs(teacher=self.options.loss != "ce", teacher_rows=True, borrow=routed)

    def bind(self, borrowed: Borrowed) -> None:
        if self.router is not None and self._is_fresh:
            self.router.arrange(head_rows(borrowed, self.vocab))
        self._is_fresh = False

    def tensors(self) -> dict[str, Tensor]:
        """Of tied weights the first."""
        found, again = super().tensors(), self._tied()
        return {name: tensor for name, tensor in found.items() if name not in again}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        tied = self._tied().items()
        also = {name: tensors[first] for name, first in tied if first in tensors}
        super().load_tensors({**tensors, **also})
        self._is_fresh = False

    def _tied(self) -> Mapping[str, str]:
        return {} if isinstance(self.module, LlamaModel) else tied_names(self.module)

    @property
    def is_packed(self) -> bool:
        """Whether its matrices are in memory as a GGUF file packs them, and in no other form."""
        return isinstance(self.module, LlamaModel) and self.module.packs.packed is not None

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Drafter:
        if self.is_packed:
            return self
        if not isinstance(self.module, LlamaModel):
            move(self.module, device, dtype)
            dtype = None
        return super().to(device, dtype)

    def open(self, space: Space) -> StepState:
        size, state = self.options.context, self.open_whole(space)
        if size is None and not space.unsaid:
            return state
        return ShortContextState(state, size, space.unsaid)

    def open_whole(self, space: Space) -> LmState:
        """A state that reads prompts as they are given."""
        return RecurrentLmState(self, space) if self.lm.state_bytes else LmState(self, space)

    def slot_bytes(self, space: Space) -> int:
        waiting = max(space.max_nodes + 1, FILL_CHUNK)  # tokens whose inputs no state has yet
        return super().slot_bytes(space) + waiting * self.lm.pending_bytes

    def trimmed(self, vocab: VocabMap) -> Self:
        if not isinstance(self.module, LlamaModel):
            raise IncompatibleError(
                "only a Llama-shaped draft model can be trimmed",
                found=type(self.module).__name__,
                expected="a drafter trained here, or a Llama, Mistral or Qwen folder",
                do="leave its vocabulary whole",
            )
        shape = replace(
            self.module.shape, tied=False, out_size=vocab.size, vocab_size=self.spec.vocab_size
        )
        lm_spec = replace(self.lm.spec, vocab_size=self.spec.vocab_size)
        if self.is_packed:
            embedding_VD = self.module.model.embed_tokens.weight.detach()
            embedding_VD = fitting_rows(embedding_VD, self.spec.vocab_size)
            rows_K = kept_rows(self.vocab, vocab)
            small = with_packed_rows(self.module, shape, embedding_VD, rows_K)
            options, lm = replace(self.options, tied=False), FastLlama(small, lm_spec)
            cut = type(self)(options, self.spec, vocab, lm.in_bits("packed"))
            cut.file = self.file
            return cut
        weights, options = cut_router(self.module, self.options, self.vocab, vocab)
        rotary = self.module.rotary
        small = LlamaModel(shape, rotary.inv_freq, rotary.scale)
        head_KD = self.module.head_weight
        weights["lm_head.weight"] = cut_rows(head_KD.detach(), self.vocab, vocab)
        embedding_VD = weights["model.embed_tokens.weight"]
        weights["model.embed_tokens.weight"] = fitting_rows(embedding_VD, self.spec.vocab_size)
        options = replace(options, tied=False)
        cut = type(self)(options, self.spec, vocab, FastLlama(small, lm_spec))
        small.to(device=head_KD.device, dtype=head_KD.dtype)
        small.load_state_dict(weights)
        cut._is_fresh, cut.file = self._is_fresh, self.file
        if cut.file is not None:  # nobody is to train what the file will not hold
            small.requires_grad_(False)
        return cut

    def loss(self, batch: TrainBatch) -> LossOut:
        """Loss of predicting 1 ahead (A0), summed over rows. Images are left out of what is read,
        as in drafting."""
        batch = text_alone(batch)
        how, own = self.options.compared(), batch.own
        masks = own_masks(self.lm.document_masks(batch.document_BS), batch)
        ids_BS, rows, module = self.readable(own(batch.ids_BS)), aim(batch, 1), self.module
        position_BS = own(batch.position_BS)
        if not isinstance(module, LlamaModel):
            logits_BTV = self.lm.dense(ids_BS, position_BS, masks).logits_BTV
            assert logits_BTV is not None
            state_RK = self.draft_logits(logits_BTV).flatten(0, 1)
            return head_loss(state_RK, nn.Identity(), rows, self.vocab, how)
        last = self.lm.spec.num_layers
        kv = None if batch.part is None else WholeRows(batch.part, batch.ids_BS.shape[1])
        out = self.lm.run(Feed(ids_BS, position_BS, masks, (last,), logits=False), kv)
        head, state_RD = LinearHead(module.head_weight), out.taps[last].flatten(0, 1)
        if self.router is None:
            found = head_loss(state_RD, head, rows, self.vocab, how)
            return with_stretch(found, [state_RD])
        teacher = teacher_logits(batch, how, self.vocab)
        found = head_loss(state_RD, head, rows, self.vocab, how, teacher)
        found = with_router(found, self.router, state_RD, rows, self.vocab, teacher)
        return with_stretch(found, [state_RD])

    def language_model(self) -> LanguageModel:
        size = self.spec.vocab_size
        return VocabRestrictedLM(self.lm, size, self.vocab, self.readable, self.draft_logits)

    def readable(self, ids: Tensor) -> Tensor:
        """Ids inside the draft's embedding; padding ids of a larger target are read as its last."""
        size = self.lm.spec.vocab_size
        return ids if size >= self.spec.vocab_size else ids.clamp(max=size - 1)

    def draft_logits(self, logits: Tensor) -> Tensor:
        """Logits over the draft vocabulary; surplus rows of a padded draft model are dropped."""
        size = self.spec.vocab_size if self.vocab is None else self.vocab.size
        return logits if logits.shape[-1] == size else logits[..., :size]


def own_masks(masks: Masks, batch: TrainBatch) -> Masks:
    """Of masks over whole rows those of the queries that are computed here."""
    if batch.part is None:
        return masks
    start, stop = batch.part.bounds(batch.ids_BS.shape[1])
    windows = {size: mask[:, :, start:stop] for size, mask in masks.windows.items()}
    return Masks(masks.full[:, :, start:stop], windows)


class VocabRestrictedLM(LanguageModel):
    """`readable` takes target ids into the draft's embedding, `draft_logits` cuts its logits to the
    draft vocabulary; both are the drafter's own."""

    def __init__(
        self,
        lm: LanguageModel,
        num_ids: int,
        vocab: VocabMap | None,
        readable: Callable[[Tensor], Tensor],
        draft_logits: Callable[[Tensor], Tensor],
    ) -> None:
        self.lm, self.module, self.windows = lm, lm.module, lm.windows
        self.spec = replace(lm.spec, vocab_size=num_ids)
        self._vocab, self._readable, self._draft_logits = vocab, readable, draft_logits

    def run(self, feed: Feed, kv: SlotKV | None) -> LmOut:
        out = self.lm.run(replace(feed, ids_BT=self._readable(feed.ids_BT)), kv)
        if out.logits_BTV is None:
            return out
        logits_BTK = self._draft_logits(out.logits_BTV)
        if self._vocab is None:
            return LmOut(logits_BTK, out.taps)
        shape = (*logits_BTK.shape[:-1], self.spec.vocab_size)
        logits_BTV = logits_BTK.new_full(shape, -torch.inf)
        logits_BTV[..., self._vocab.ids_K] = logits_BTK
        return LmOut(logits_BTV, out.taps)

    def borrowed(self) -> Borrowed:
        return self.lm.borrowed()

    @property
    def state_bytes(self) -> int:
        return self.lm.state_bytes

    @property
    def pending_bytes(self) -> int:
        return self.lm.pending_bytes

    @property
    def kv_layers(self) -> tuple[KVShape, ...]:
        return self.lm.kv_layers

    @property
    def kv_devices(self) -> tuple[torch.device, ...]:
        return self.lm.kv_devices

    def document_masks(self, document_BS: Tensor) -> Masks:
        return self.lm.document_masks(document_BS)

    def cache_of(self, num_slots: int, max_len: int, dtype: torch.dtype) -> SlotKV:
        return self.lm.cache_of(num_slots, max_len, dtype)


FAMILY = Family(
    name="small-lm",
    summary=(
        "An independent small language model over the target's tokenizer, distilled from the "
        "target's own distribution. It shares nothing with the target, so it is easy to train, to "
        "inspect and to serve anywhere (assistant_model of transformers, draft model of engines). "
        "Its acceptance is bounded by what a small model can know; feature-level drafters reach "
        "more per parameter."
    ),
    paper="https://arxiv.org/abs/2310.08461",
    options=SmallLmOptions,
    build=SmallLm,
    trainable=True,
    policies=("chain", "dynamic-tree", "static-tree"),
)
