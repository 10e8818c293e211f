"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): modules of the checkpoint's
own that each predict one token further, the last one used again on its own output.

h'_i = layer(fc(cat(norm(embedding of token i + 1), norm(h_i)))), eq. 21 and 22; the target's own
LM head reads norm(h'_i) and predicts token i + 2, eq. 23. h is the target's state after its final
norm; drafting goes on with norm(h') in its place (`norm_output`: transformers and SGLang do; vLLM
feeds h' back in the layout of DeepSeek-V3). The layer is the target's own kind (latent attention,
experts, gates), built by transformers from `layer`, or a Llama layer where that is None.

Of several modules, module k reads h of module k - 1 at i and token i + 1 + k, and predicts token
i + 2 + k; gradients go through the whole chain, and every depth weighs the same (eq. 24 and 25:
`decay` 1). Checkpoints have one `fc` and norms for each module, or one for all (`shared`:
Qwen3.5).

DeepSeek trains each module one step deep. One module that is used k times draws on what it has
never seen, so training unrolls it (`ttt_steps`), step j with the weight `decay`^j (FastMTP, arXiv
2509.18362: 3 steps, 0.6); the rows of later steps attend as a chain does when it is drafted.
Letters: B rows, D hidden width, E head width, O output width, S sequence, X any axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Annotated, cast

import torch
from torch import Tensor, nn

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Family, Space
from specctl.core.errors import RecipeError
from specctl.core.kv_cache import KVShape
from specctl.drafters.attention.recompute import is_large, run
from specctl.drafters.attention.seen import AttentionWindow, seen_ahead
from specctl.drafters.features.mtp_state import ModulesState, MtpState
from specctl.drafters.frames.feature_drafter import FeatureDrafter, FeatureOptions, Unrolled
from specctl.drafters.losses.align import shifted
from specctl.drafters.nets.blocks import DecoderLayer, LayerShape, RmsNorm
from specctl.drafters.nets.options import ADDED
from specctl.drafters.nets.trunk import Chains, TrunkNet
from specctl.drafters.option_checks import Count, Within
from specctl.models.hf.foreign_layer import ForeignLayer, read_config
from specctl.models.weights.mtp_layout import KINDS, MOST_MODULES

LAST_NORM = "last_norm"  # what keeps the weights of the target's last norm


@dataclass(frozen=True, slots=True)
class MtpOptions(FeatureOptions):
    """`layer`: the configuration of the target's layer, which import and drafter.init: target write
    (None: a Llama layer). `norm_output`: what is fed back is normed. `read_states` False hides the
    target's states (an ablation). `modules`: how many there are; `shared`: with one `fc` and norms
    for all. `before_norm`: what is read of the target is its state in front of the last norm
    (MiMo-7B), which import and drafter.init: target write."""

    ttt_steps: Count = 3
    decay: float = 0.6
    feature_weight: float = 0.0
    layer: str | None = None
    norm_output: bool = True
    read_states: bool = True
    modules: Annotated[int, Within(1, MOST_MODULES)] = field(default=1, metadata=ADDED)
    shared: bool = field(default=False, metadata=ADDED)
    before_norm: bool = field(default=False, metadata=ADDED)

    def __post_init__(self) -> None:
        FeatureOptions.__post_init__(self)
        if self.modules > self.ttt_steps:
            raise RecipeError(
                "fewer steps are unrolled than there are modules, of which the last ones would "
                "learn nothing",
                where="drafter.options.ttt_steps",
                found=f"ttt_steps: {self.ttt_steps}, modules: {self.modules}",
                expected="at least one step a module",
                do=f"--set drafter.options.ttt_steps={self.modules}",
            )


@dataclass(frozen=True, slots=True)
class ForeignShape(LayerShape):
    """The shape of a layer that transformers makes: how it rotates, what its cache keeps."""

    rotations: Callable[[Tensor], Tensor] = field(kw_only=True)
    kept: KVShape = field(kw_only=True)

    @property
    def kv(self) -> KVShape:
        return self.kept

    def rope(self, position: Tensor) -> Tensor:
        return self.rotations(position)


class MtpEntry(nn.Module):
    """What a module has beside its layer, of those behind the first. Fresh, it passes a state
    through, normed."""

    def __init__(self, norms: list[nn.Module], width: int) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.norm = norms
        self.fc = _fresh_fc(width)


def _fresh_fc(width: int) -> nn.Linear:
    fc = nn.Linear(2 * width, width, bias=False)
    with torch.no_grad():
        fc.weight.normal_(std=0.1 * fc.in_features**-0.5)
        fc.weight[:, width:] += torch.eye(width)
    return fc


class MtpNet(TrunkNet):
    """The modules: `layers[k]` is that of module k; `enorm`, `hnorm`, `fc` and `norm` are of module
    0, or of all, and `beside[k - 1]` holds those of module k."""

    def __init__(self, shape: LayerShape, options: MtpOptions) -> None:
        self.options = options
        nn.Module.__init__(self)  # the layers follow from `layer`, and say what norm there is
        width = shape.hidden_size
        self.layers = nn.ModuleList()
        for _ in range(options.modules):
            if options.layer is None:
                self.layers.append(DecoderLayer(shape))
            else:
                self.layers.append(ForeignLayer(read_config(options.layer, KINDS)))
        self.shape = shape
        if options.layer is not None:
            foreign = cast(ForeignLayer, self.layers[0])
            sizes = {each.name: getattr(shape, each.name) for each in fields(LayerShape)}
            kept = foreign.kept(width)
            self.shape = ForeignShape(**sizes, rotations=foreign.rope, kept=kept)
        self.enorm, self.hnorm, self.norm = self._norms()
        self.fc = _fresh_fc(width)
        if options.modules > 1 and not options.shared:
            further = range(options.modules - 1)
            self.beside = nn.ModuleList(MtpEntry(self._norms(), width) for _ in further)
        if options.before_norm:
            self.register_buffer(LAST_NORM, torch.ones(width))

    def _norms(self) -> list[nn.Module]:
        """Three fresh ones."""
        first = self.layers[0]
        if isinstance(first, ForeignLayer):
            return [first.new_norm() for _ in range(3)]
        return [RmsNorm(self.shape.hidden_size, self.shape.norm_eps) for _ in range(3)]

    @property
    def window(self) -> int | None:
        """How many tokens a layer sees, the newest counted; None: all."""
        first = self.layers[0]
        return first.window if isinstance(first, ForeignLayer) else None

    @property
    def is_foreign(self) -> bool:
        """Whether the layers are of transformers."""
        return self.options.layer is not None

    def entry(self, module: int) -> MtpNet | MtpEntry:
        """What holds `enorm`, `hnorm`, `fc` and `norm` of that module."""
        if module == 0 or self.options.shared:
            return self
        return cast(MtpEntry, self.beside[module - 1])

    def of_target(self, state_XD: Tensor) -> Tensor:
        """[X, D]: what is read of the target's states. One in front of the last norm is the normed
        one over that norm's weights, but for its size, which `hnorm` takes away."""
        if not self.options.before_norm:
            return state_XD
        return state_XD / self.get_buffer(LAST_NORM).to(state_XD)

    def mix(self, embedding_XD: Tensor, state_XD: Tensor, module: int = 0) -> Tensor:
        entry = self.entry(module)
        if not self.options.read_states:
            state_XD = torch.zeros_like(state_XD)
        both = torch.cat([entry.enorm(embedding_XD), entry.hnorm(state_XD)], dim=-1)
        out_XD: Tensor = entry.fc(both)
        return out_XD

    def fed_back(self, out_XO: Tensor, module: int = 0) -> Tensor:
        return self.entry(module).norm(out_XO) if self.options.norm_output else out_XO

    def ready(self, out_XO: Tensor, module: int = 0) -> Tensor:
        out_XD: Tensor = self.entry(module).norm(out_XO)
        return out_XD

    def rope(self, position: Tensor) -> Tensor:
        return self.shape.rope(position)


class Mtp(FeatureDrafter):
    """One module, used as often as there are tokens to draft; or several, of which the last one
    drafts all tokens that are left."""

    family = "mtp"
    splits_rows = True
    module: MtpNet
    options: MtpOptions

    def make_net(self, shape: LayerShape) -> TrunkNet:
        return MtpNet(shape, self.options)

    def open(self, space: Space) -> MtpState:
        return MtpState(self, space) if self._is_plain else ModulesState(self, space)

    def noisy(self, batch: TrainBatch) -> Tensor:
        return self.module.of_target(super().noisy(batch))

    @property
    def _is_plain(self) -> bool:
        return self.options.modules == 1 and self.module.window is None

    def unroll(self, batch: TrainBatch) -> list[Unrolled]:
        """Step j is module j, which learns what module j - 1 is to hand on; the last module's
        further steps learn from what they are fed, as those of a single one do."""
        if self._is_plain:
            return super().unroll(batch)
        net, state_BSD, own = self.module, self.noisy(batch), batch.own
        last, pairs = self.options.modules - 1, list[Tensor]()
        window = None if net.window is None else AttentionWindow(net.window)
        seen = seen_ahead(batch, window, self.options.ttt_steps)
        width, inner = net.shape.hidden_size, net.shape.intermediate_size
        again = is_large(own(batch.ids_BS).numel(), self.options.ttt_steps, width, inner)

        def one(ahead: int, x_BSD: Tensor, *before: Tensor) -> tuple[Tensor, ...]:
            """The layer's output, its keys and its values; `before`: those of the steps before."""
            chains = Chains(seen[max(0, ahead - last)], [*before[::2]], [*before[1::2]])
            rope = net.rope(own(batch.position_BS) + ahead)
            out_BSO = net.layers[min(ahead, last)](x_BSD, rope, chains.attending)
            return out_BSO, chains.keys[-1], chains.values[-1]

        steps = list[Unrolled]()
        for ahead in range(self.options.ttt_steps):
            module = min(ahead, last)
            token_BSD = self.embed(own(shifted(batch.ids_BS, 1 + ahead)))
            out_BSO, *pair = run(again, one, ahead, net.mix(token_BSD, state_BSD, module), *pairs)
            pairs += pair if module == last else []
            steps.append(Unrolled(net.ready(out_BSO, module), net.fed_back(out_BSO, module)))
            state_BSD = steps[-1].state_BSD
            if ahead >= last and self.detach:
                state_BSD = state_BSD.detach()
        return steps


FAMILY = Family(
    name="mtp",
    summary=(
        "The multi-token-prediction modules that DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5, "
        "MiMo-7B and MiMo-V2 carry in their checkpoints, one or several, the last one used again "
        "on its own output: taken from there, tuned, and written back. Take them where the target "
        "has some; for another target it is EAGLE with norms, and EAGLE-3 reads more."
    ),
    paper="https://arxiv.org/abs/2412.19437",
    options=MtpOptions,
    build=Mtp,
    trainable=True,
    policies=("chain", "dynamic-tree", "static-tree"),
)
