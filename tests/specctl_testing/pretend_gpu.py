"""A pretended GPU, which finds mixed devices where there is none, and what a family does there.

`PretendTensor` wraps a CPU tensor: it says cuda:0 and computes on the CPU. While `pretend_gpu()` is
open, `device="cuda"` makes such tensors, and what a real GPU refuses raises `DevicesMixed`: an
operation over tensors of both devices (a CPU number of no axes may take part), a CPU tensor indexed
by a CUDA one, numpy() of a CUDA tensor, random numbers drawn there by a generator of the CPU.
Numbers are the CPU's own, those drawn at random too, so texts and losses equal those of a plain
run.

To PyTorch the wrappers lie on the device "meta", so real meta tensors cannot be made meanwhile.
Nothing is shown of kernels (a CPU build has no Triton: attention is PyTorch's), of half-precision
autocast, of memory, of order between streams, or of what a CUDA graph may record: a recording is
the call itself. It holds in the thread that opened it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from specctl.core.batch import TrainBatch
from specctl.core.device.cuda_graph import CudaGraph
from specctl.core.drafter import Drafter
from specctl.core.vocab import VocabMap
from specctl.drafters import family
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.features.capture import capture
from specctl_testing.models import build_model

CUDA, CPU, META = torch.device("cuda", 0), torch.device("cpu"), torch.device("meta")
FACTORIES = (
    "arange", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones", "ones_like",
    "rand", "randint", "randn", "randperm", "tril_indices", "triu_indices", "zeros", "zeros_like",
)  # fmt: skip
MOVES = {"copy_", "_to_copy"}
INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
JOINING = {"cat", "stack"}  # where a number of no axes is no exception


class DevicesMixed(RuntimeError):
    """What a real GPU would have refused."""


class PretendTensor(Tensor):
    """`held`, a CPU tensor, said to lie on cuda:0."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> PretendTensor:
        made: PretendTensor = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=META,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _computed(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PretendTensor({self.held})"

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_without_lists(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_without_lists(index), value)

    def tolist(self) -> Any:
        return self.held.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise DevicesMixed("numpy() of a tensor on cuda:0; cpu() comes first")

    __array__ = numpy

    def new_tensor(self, data: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return torch.tensor(data, **{"dtype": self.dtype, "device": CUDA, **kwargs})

    def record_stream(self, stream: Any) -> None:
        """Nothing is freed early here."""


def _without_lists(index: Any) -> Any:
    """Lists in an index as tensors of this device: PyTorch would make real meta tensors of them."""
    if isinstance(index, list):
        return PretendTensor(torch.tensor(index))
    return tuple(map(_without_lists, index)) if isinstance(index, tuple) else index


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation returns, computed by the CPU, after a check of where its tensors lie."""
    leaves = tree_leaves((args, kwargs))
    device = kwargs.get("device")
    if device is None:
        is_there = any(isinstance(x, PretendTensor) for x in leaves)
    else:
        is_there = torch.device(device).type in ("cuda", "meta")
    _refuse_mixed(func, args, leaves)
    if is_there and any(isinstance(x, torch.Generator) for x in leaves):
        raise DevicesMixed(f"{func}: a generator of the CPU draws for cuda:0")
    out = func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
    if (written := _returned_arguments(func)) is not None:
        found = [kwargs[name] if name in kwargs else args[place] for place, name in written]
        if torch.Tag.inplace_view in func.tags:  # squeeze_ and its kind: the wrapper's shape, too
            with no_dispatch():
                func(*args, **kwargs)
        return found[0] if len(found) == 1 else tuple(found)
    return tree_map(_wrapped, out) if is_there else out


def _is_here(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, PretendTensor)


def _refuse_mixed(func: Any, args: tuple[Any, ...], leaves: list[Any]) -> None:
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    here = [x for x in tensors if _is_here(x)]
    name = func.overloadpacket.__name__
    if not here or len(here) == len(tensors) or name in MOVES:
        return
    if name in INDEXING:
        if isinstance(args[0], PretendTensor):  # an index may lie on the CPU
            here = [value for value in args[2:3] if _is_here(value) and value.dim() > 0]
    elif name not in JOINING:
        here = [x for x in here if x.dim() > 0]
    if here:
        told = ", ".join(f"{x.device} {list(x.shape)}" for x in tensors)
        raise DevicesMixed(f"{func}: tensors on both devices ({told})")


@cache
def _returned_arguments(func: Any) -> list[tuple[int, str]] | None:
    """Place and name of the arguments that an in-place operation writes and returns; None: it
    returns something new."""
    schema = func._schema
    if not any(x.alias_info is not None and x.alias_info.is_write for x in schema.returns):
        return None
    given = [(i, x.name, x.alias_info) for i, x in enumerate(schema.arguments)]
    return [(i, name) for i, name, alias in given if alias is not None and alias.is_write]


def _plain(value: Any) -> Any:
    if isinstance(value, PretendTensor):
        return value.held
    return CPU if isinstance(value, torch.device) else value


def _wrapped(value: Any) -> Any:
    return PretendTensor(value) if _is_here(value) else value


class PretendMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """For operations that are given a device and no tensor of it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _computed(func, args, kwargs or {})


class MoveThere(torch.autograd.Function):
    """A copy on the pretended GPU; its gradient goes back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return PretendTensor(value.detach().clone())

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Tensor:
        found: Tensor = grad.held
        return found


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _made_there(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The factory, whose tensors on CUDA `PretendMode` makes."""

    @wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = META
        return factory(*args, **kwargs)

    return make


def _tensor(*args: Any, device: Any = None, _make: Any = torch.tensor, **kwargs: Any) -> Tensor:
    if not _is_cuda(device):
        return _make(*args, device=device, **kwargs)  # type: ignore[no-any-return]
    is_weight = kwargs.pop("requires_grad", False)
    return PretendTensor(_make(*args, device=CPU, **kwargs)).requires_grad_(is_weight)


def _as_tensor(
    data: Any, dtype: Any = None, device: Any = None, _make: Any = torch.as_tensor
) -> Tensor:
    made: Tensor = _make(data, dtype=dtype, device=None if _is_cuda(device) else device)
    return made.to(device) if _is_cuda(device) else made


def _to(self: Tensor, *args: Any, _move: Any = Tensor.to, **kwargs: Any) -> Tensor:
    """Tensor.to, where the device that is named may be the pretended one."""
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    is_copy = kwargs.pop("copy", False)
    named, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    goes_there = _is_cuda(named) and _is_here(self)
    device = None if _is_cuda(named) else named  # where it lies, or to the CPU
    moved: Tensor = _move(
        self, device, dtype or self.dtype, copy=is_copy, memory_format=memory_format
    )
    return MoveThere.apply(moved) if goes_there else moved  # type: ignore


class IdleStream:
    """A stream whose work is done at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, other: IdleStream) -> None: ...


class PassedEvent:
    """An event that is passed as soon as it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: IdleStream | None = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: PassedEvent) -> float:
        """Milliseconds."""
        return 1e3 * (end.at - self.at)


def _enter_no_grad(self: Any) -> None:
    """In place of inference mode, which wrappers do not survive."""
    self.was_enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(not self.mode)


def _leave_no_grad(self: Any, *error: Any) -> None:
    torch._C._set_grad_enabled(self.was_enabled)


def _keep_call(self: CudaGraph[Any], call: Callable[[], Any], *about: Any) -> None:
    self.call = call


def _replacements() -> dict[tuple[Any, str], Any]:
    """Owner and name of everything that is another while the GPU is pretended."""
    return {
        **{(torch, name): _made_there(getattr(torch, name)) for name in FACTORIES},
        (torch, "tensor"): _tensor,
        (torch, "as_tensor"): _as_tensor,
        (Tensor, "to"): _to,
        (torch.inference_mode, "__enter__"): _enter_no_grad,
        (torch.inference_mode, "__exit__"): _leave_no_grad,
        (torch.cuda, "Event"): PassedEvent,
        (torch.cuda, "Stream"): IdleStream,
        (torch.cuda, "current_stream"): IdleStream,
        (torch.cuda, "stream"): nullcontext,
        (torch.cuda, "synchronize"): lambda *args: None,
        # Wherever the class was imported to, a recording is the call itself.
        (CudaGraph, "__init__"): _keep_call,
        (CudaGraph, "__call__"): lambda self: self.call(),
    }


@contextmanager
def pretend_gpu() -> Iterator[torch.device]:
    """Pretend that cuda:0 is there, until it is closed; PyTorch is then what it was."""
    assert not torch.cuda.is_available(), "a real GPU is here: benchmarks/gpu_checks.py uses it"
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*CUDA is not available.*")
        for (owner, name), other in _replacements().items():
            stack.enter_context(mock.patch.object(owner, name, other))
        stack.enter_context(PretendMode())  # type: ignore[no-untyped-call]
        yield CUDA


# -- what a family does there --------------------------------------------------------------------

VOCAB = 24
KEPT = [0, 1, 2, 3, 5, 8, 11, 12, 13, 20, 21]
SMALL: dict[str, dict[str, Any]] = {
    name: {"layers": 2, "taps": (0, 2)}
    for name in ("dflare", "dflash", "dflash2", "dfly", "domino", "dspark", "lilicorr", "xpress")
}
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4], [11, 12, 11, 12, 11], [7])


@dataclass(frozen=True, slots=True)
class FamilySteps:
    """A fresh drafter of a family and a random target on one device: a training step, and texts."""

    target: Target
    drafter: Drafter

    @classmethod
    def of(cls, name: str, device: torch.device, is_trimmed: bool = False) -> FamilySteps:
        """The same weights on every device; `is_trimmed`: over a draft vocabulary."""
        target = Target.from_model(build_model(num_layers=3, vocab=VOCAB).to(device))
        torch.manual_seed(5)
        found = family(name)
        vocab = VocabMap(torch.tensor(KEPT), VOCAB) if is_trimmed else None
        drafter = found.build(found.options(**SMALL.get(name, {})), target.spec, vocab)
        drafter.to(target.device, target.dtype)
        if drafter.needs().borrow:
            drafter.bind(target.borrowed())
        return cls(target, drafter)

    def loss_and_gradient(self) -> tuple[float, Tensor]:
        """Of two documents a row and some padding; what was summed must lie on the device."""
        ids = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
        at = torch.arange(24).expand(2, 24)
        document = torch.where(at < 22, at // 11, -1)
        batch = TrainBatch(ids, (document >= 0) & (at % 11 >= 2), document, at % 11)
        torch.manual_seed(1)
        out = self.drafter.loss(capture(self.target, batch, self.drafter.needs()))
        for name, pair in {"loss": (out.sum, out.count), **out.metrics}.items():
            if any(x.device != self.target.device for x in pair):
                raise DevicesMixed(f"{name} lies on {[str(x.device) for x in pair]}")
        out.sum.backward()  # type: ignore[no-untyped-call]
        weights = self.drafter.trainable().values()
        grads = [weight.grad.flatten() for weight in weights if weight.grad is not None]
        return float(out.sum.detach()), torch.cat(grads).cpu()

    def texts(self, policy: str, temperature: float) -> list[tuple[int, ...]]:
        """What it writes, two rows at once."""
        made = generate(
            self.target,
            PROMPTS,
            drafter=self.drafter,
            sampling=Sampling(
                temperature=temperature, seed=1, max_new_tokens=8, ignore_eos=True
            ),
            policy=make_policy({"policy": policy}),
            batch=2,
        )  # fmt: skip
        return [output.token_ids for output in made.outputs]
