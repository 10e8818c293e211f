"""Where a drafter's first weights come from: nowhere, the target itself, or another drafter.

`drafter.init` of a recipe is None (fresh weights), "target" (layers of the target, see
`specctl.train.prune.cut`; of family mtp the module that it carries) or a folder: our package, a run
folder (its package, or the best checkpoint of a run that has none yet), a Hugging Face folder.
Folders are read by a Loader that the command line hands in, because this room may not import
export.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specctl.core.drafter import Drafter
from specctl.core.errors import FileError, IncompatibleError, RecipeError
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters import family
from specctl.drafters.features.mtp import Mtp
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions, options_of
from specctl.drafters.nets.heads import fitting_rows
from specctl.models.llama.fast_llama import LlamaModel
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import DataPart, DrafterPart, VocabPart
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.target.mtp_checkpoint import first_module
from specctl.runtime.target.target import Target
from specctl.train.assemble import build_drafter, family_options, served_family
from specctl.train.data.images.image_checks import shows_images
from specctl.train.data.prepare import prepare
from specctl.train.data.rows.rows import TokenData
from specctl.train.init.axes import with_axes
from specctl.train.prune.cut import Wanted, check_cut, cut_like, groups_left, prunable
from specctl.train.saving.checkpoint import Checkpoints
from specctl.train.vocab.draft_vocab import draft_vocab

TARGET = "target"
_LIKE_TARGET = {
    "width": "hidden_size",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate": "intermediate_size",
}

# load(name, target): the drafter of a folder; handed in by the command line.
Loader = Callable[[str, Target], Drafter]


@dataclass(frozen=True, slots=True)
class Initial:
    """What a drafter starts from: a whole drafter, and the digest of what was loaded."""

    name: str
    drafter: Drafter
    digest: str


def initial_of(part: DrafterPart, target: Target, load: Loader | None) -> Initial | None:
    """What `drafter.init` names, loaded; None for fresh weights."""
    name = part.init
    _refuse_ignored(part)
    if name is None:
        return None
    if name == TARGET and carries(part):
        family_options(family(part.family), part)  # of the right types
        module = first_module(target, part.options.get("modules"))
        return Initial(name, module, tensors_digest(module.tensors()))
    if name == TARGET:
        _only_small_lm(part)
        whole = SmallLm.from_lm(prunable(target), target.spec)
        return Initial(name, whole, f"target {target.fingerprint}")
    drafter = loaded(name, target, load)
    if drafter.family != part.family or drafter.module is None:
        raise IncompatibleError(
            f"drafter.init holds a drafter of family {drafter.family}",
            found=name,
            expected=f"trained weights of family {part.family}",
            do=f"--set drafter.family={drafter.family}, or give another folder",
            where="drafter.init",
        )
    return Initial(name, drafter, tensors_digest(drafter.tensors()))


def completed(part: DrafterPart, spec: ModelSpec, initial: Initial | None = None) -> DrafterPart:
    """With init "target", the part whose options left out follow the target; else the part itself.
    Without `initial` (in a plan) the switches that a ModelSpec does not know stay open."""
    if part.init != TARGET:
        return part
    if carries(part):
        if initial is None:
            return part
        own = initial.drafter.options
        names = ("layer", "modules", "shared", "before_norm")
        sizes = {name: getattr(own, name) for name in names}
        return part.model_copy(update={"options": part.options | sizes})
    _only_small_lm(part)
    family_options(family(part.family), part)  # of the right types
    sizes = {option: getattr(spec, size) for option, size in _LIKE_TARGET.items()}
    if initial is not None and isinstance(initial.drafter.module, LlamaModel):
        sizes = options_of(initial.drafter.module.shape, spec)
        del sizes["layers"]
    given = part.options
    if given.get("heads") is not None:
        sizes["kv_heads"] = groups_left(int(given["heads"]), spec.num_heads, spec.num_kv_heads)
    complete = part.model_copy(update={"options": sizes | given})
    _check_sizes(complete, spec)
    return complete


def _check_sizes(part: DrafterPart, spec: ModelSpec) -> None:
    """Refuse a drafter that is larger than the target from which it is cut."""
    options = family_options(family(part.family), part)
    if isinstance(options, SmallLmOptions):
        wanted = Wanted(
            layers=options.layers,
            from_layers=options.from_layers,
            channels=options.width,
            neurons=options.intermediate,
            heads=options.heads,
            kv_heads=options.kv_heads,
        )
        check_cut(wanted, spec)


def check_fit(part: DrafterPart, spec: ModelSpec, initial: Initial | None) -> None:
    """Refuse loaded weights of another shape before the target writes answers for them. The head's
    rows are left aside: which of them stay is decided by those answers."""
    if initial is None or initial.name == TARGET:
        return
    source, kind = initial.drafter, family(part.family)
    _check_architecture(part, initial)
    with torch.device("meta"):
        vocab = None if source.vocab is not None and source.vocab.is_prefix else source.vocab
        drafter = kind.build(family_options(kind, part), spec, vocab)
    tensors = fitting_vocab(source, source.tensors(), spec.vocab_size)
    check_shapes(drafter, source, tensors, frozenset({"lm_head.weight"}))


def _check_architecture(part: DrafterPart, initial: Initial) -> None:
    """Refuse loaded weights of an architecture that is no Llama and not the recipe's own."""
    source = initial.drafter
    if not isinstance(source, SmallLm) or isinstance(source.module, LlamaModel):
        return
    theirs = source.options.architecture
    if theirs is None:
        raise IncompatibleError(
            "the initial weights are of an architecture that is not trained here",
            found=f"{type(source.module).__name__}, quantised or with an adapter",
            expected="the plain weights of a causal language model of transformers",
            do=f"draft with it as it is: --draft {initial.name}",
            where="drafter.init",
        )
    if part.options.get("architecture") != theirs:
        raise IncompatibleError(
            "the initial weights are of another architecture than the recipe's draft",
            found=f"a {theirs['model_type']} in {initial.name}",
            expected="drafter.options.architecture as in the config.json of that folder",
            do="leave architecture and all sizes out of drafter.options: the folder says them",
            where="drafter.options.architecture",
        )


def initialise(drafter: Drafter, initial: Initial, data: TokenData) -> None:
    """Put the initial weights into a freshly built drafter. A whole vocabulary is cut to the
    drafter's; `data` says which channels, heads and neurons matter where the target is sliced."""
    if initial.name == TARGET and not isinstance(initial.drafter, Mtp):
        assert isinstance(drafter, SmallLm)
        assert isinstance(initial.drafter, SmallLm)
        drafter.load_tensors(cut_like(drafter, initial.drafter, data))
        return
    source = _same_vocab(initial, drafter.vocab)
    tensors = dict(source.tensors())
    if isinstance(source.module, LlamaModel) and "lm_head.weight" in drafter.tensors():
        tensors.setdefault("lm_head.weight", source.module.head_weight.detach())
    kept = None if drafter.vocab is None else drafter.vocab.size
    tensors = fitting_vocab(source, tensors, drafter.spec.vocab_size, kept)
    check_same_shape(drafter, source, tensors)
    aside = drafter.memories | source.memories
    weights = {name: t for name, t in tensors.items() if name not in aside}
    drafter.load_tensors({name: t.to("cpu", torch.float32) for name, t in weights.items()})


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, types, shapes and bytes."""
    body = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        flat = tensor.detach().to("cpu").contiguous()
        body.update(f"{name}:{flat.dtype}:{tuple(flat.shape)}:".encode())
        body.update(flat.reshape(-1).view(torch.uint8).numpy().tobytes())
    return body.hexdigest()


def _refuse_ignored(part: DrafterPart) -> None:
    if part.init != TARGET and part.options.get("from_layers") is not None:
        raise RecipeError(
            "from_layers is ignored unless the drafter is cut from the target",
            where="drafter.options.from_layers",
            found=f"drafter.init: {part.init}",
            expected="drafter.init: target",
            do="--set drafter.init=target, or leave from_layers out",
        )
    if part.init is None and carries(part) and part.options.get("before_norm"):
        raise RecipeError(
            "a fresh module does not know the weights of the target's last norm",
            where="drafter.options.before_norm",
            found="before_norm: true, and no module to start from",
            expected="a module of a checkpoint",
            do="--set drafter.init=target, or leave before_norm out",
        )


def carries(part: DrafterPart) -> bool:
    """Whether a target may carry a drafter of that family itself."""
    return part.family == Mtp.family


def _only_small_lm(part: DrafterPart) -> None:
    """small-lm, or a family that is one and drafts with it in its own way."""
    if not issubclass(family(part.family).options, SmallLmOptions):
        raise RecipeError(
            f"a drafter of family {part.family} cannot be cut from the target",
            where="drafter.init",
            found=TARGET,
            expected=f"family {SmallLm.family}, or one built on it",
            do=f"--set drafter.family={SmallLm.family}, or leave drafter.init out",
        )


def loaded(name: str, target: Target, load: Loader | None, where: str = "drafter.init") -> Drafter:
    """The drafter in a folder, which the recipe names at `where`."""
    folder = Path(name).expanduser()
    if (folder / "run.yaml").exists() and not (folder / "package").exists():
        return checkpoint_drafter(folder, target)
    if load is None:
        raise RecipeError(
            f"nobody here can read the folder that {where} names",
            where=where,
            found=name,
            expected="a loader: train_draft(..., load=...)",
            do="train with specctl train-draft, or hand in specctl.load_drafter",
        )
    return load(name, target)


def checkpoint_drafter(run: Path, target: Target) -> Drafter:
    """The drafter of a run's best checkpoint; of its newest before tau was ever measured."""
    recipe = load_recipe(run)
    if recipe.train.joint is not None:
        raise IncompatibleError(
            "the run changes its target, which it writes when it ends",
            found=str(run),
            expected="a finished run, with its package and its target",
            do="finish that run, then start from its package",
            where="drafter.init",
        )
    checkpoints = Checkpoints(run / "checkpoints", SilentReporter())
    steps = checkpoints.steps()
    if not steps:
        raise FileError(
            "the run has saved nothing yet",
            found=str(run),
            expected="a package or a checkpoint",
            do="continue that run first",
            where="drafter.init",
        )
    snapshot = checkpoints.load(steps[-1])
    best = snapshot.scalars["progress"]["best_step"]
    if best is not None and best != snapshot.step:
        snapshot = checkpoints.load(best)
    source = None
    if recipe.drafter.init == TARGET and carries(recipe.drafter):
        source = initial_of(recipe.drafter, target, None)
    elif recipe.drafter.init == TARGET:
        source = Initial(TARGET, SmallLm.from_lm(prunable(target), target.spec), "")
    images = shows_images(*(recipe.data, recipe.train, recipe.drafter, recipe.target), target)
    complete = with_axes(completed(recipe.drafter, target.spec, source), target, images)
    served_family(complete, recipe.train.joint, recipe.serve)
    vocab = None
    if recipe.vocab.size is not None:
        rows = prepare(recipe, target, run)
        vocab = _run_vocab(recipe.vocab, recipe.data, target, rows, snapshot)
    drafter = build_drafter(complete, recipe.train, target.spec, vocab)
    drafter.load_tensors(snapshot.tensors["model"])
    return drafter


def _run_vocab(
    how: VocabPart, part: DataPart, target: Target, rows: TokenData, snapshot: Any
) -> VocabMap:
    """The draft vocabulary of a run that has no package yet, counted again from its data."""
    vocab = draft_vocab(how, part, target, rows)
    assert vocab is not None, "a size was given"
    if vocab.digest() != snapshot.fingerprint["vocab"]:
        raise IncompatibleError(
            "the draft vocabulary of the run cannot be made again",
            found=f"digest {vocab.digest()[:12]}",
            expected=f"digest {str(snapshot.fingerprint['vocab'])[:12]}",
            do="finish that run, then start from its package",
            where="drafter.init",
        )
    return vocab


def _same_vocab(initial: Initial, vocab: VocabMap | None) -> Drafter:
    """The initial drafter, speaking the wanted vocabulary."""
    source = initial.drafter
    has = None if source.vocab is None else source.vocab.digest()
    if vocab is None and (source.vocab is None or source.vocab.is_prefix):
        return source
    if vocab is None:
        raise IncompatibleError(
            "the initial drafter has a trimmed vocabulary, the recipe keeps all of it",
            found=f"{initial.name}: {source.vocab.size if source.vocab else 0:,} ids",
            expected="the whole vocabulary",
            do="start from the untrimmed drafter",
            where="drafter.init",
        )
    return source if vocab.digest() == has else source.trimmed(vocab)


def fitting_vocab(
    source: Drafter, tensors: Mapping[str, Tensor], size: int, kept: int | None = None
) -> dict[str, Tensor]:
    """The tensors with as many rows as the target has ids, in heads as many as the drafter keeps
    (`kept`, None for all): models of one family pad one vocabulary to different sizes (Qwen2.5 0.5B
    and 7B). Of an architecture of its own the rows are as many as that says."""
    if isinstance(source, SmallLm) and source.options.architecture is not None:
        return dict(tensors)
    head = size if kept is None else kept
    if not isinstance(source.module, LlamaModel):
        own = None if source.vocab is None or not source.vocab.is_prefix else source.vocab.size
        is_row = {name: own is not None and t.shape[:1] == (own,) for name, t in tensors.items()}
        return {n: fitting_rows(t, head) if is_row[n] else t for n, t in tensors.items()}
    is_whole = source.vocab is None or source.vocab.is_prefix
    rows = {"model.embed_tokens.weight": size} | ({"lm_head.weight": head} if is_whole else {})
    return {n: fitting_rows(t, rows[n]) if n in rows else t for n, t in tensors.items()}


def check_same_shape(drafter: Drafter, source: Drafter, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that do not fit, and constants that differ."""
    check_shapes(drafter, source, tensors)
    if _constants(drafter) != _constants(source):
        name = "window, norm or rotary constants"
        raise _misfit(drafter, source, name, "other constants", "those of the recipe")


def check_shapes(
    drafter: Drafter,
    source: Drafter,
    tensors: Mapping[str, Tensor],
    aside: frozenset[str] = frozenset(),
) -> None:
    """Refuse tensors that do not fit, naming the first one and the options that would fit."""
    wanted = {name: tuple(t.shape) for name, t in drafter.tensors().items()}
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    aside = aside | drafter.memories | source.memories
    names = sorted((wanted.keys() | found.keys()) - aside)
    wrong = next((name for name in names if wanted.get(name) != found.get(name)), None)
    if wrong is not None:
        shapes = (str(each.get(wrong, "no such tensor")) for each in (found, wanted))
        raise _misfit(drafter, source, wrong, *shapes)


def _misfit(
    drafter: Drafter, source: Drafter, name: str, found: str, expected: str
) -> IncompatibleError:
    fitting = _fitting_options(drafter, source)
    return IncompatibleError(
        f"the initial weights do not fit the drafter of this recipe: {name}",
        found=found,
        expected=expected,
        do=" ".join(f"--set drafter.options.{k}={v}" for k, v in fitting.items())
        or "give weights of the same shape",
        where=f"drafter.options.{next(iter(fitting))}" if fitting else "drafter.init",
    )


def _constants(drafter: Drafter) -> tuple[Any, ...]:
    """What a Llama computes with beside its tensors."""
    if not isinstance(drafter.module, LlamaModel):
        return ()
    shape, rotary = drafter.module.shape, drafter.module.rotary
    eps = shape.qk_norm_eps or shape.norm_eps
    return shape.window, shape.norm_eps, eps, rotary.scale, rotary.inv_freq.tolist()


def _fitting_options(drafter: Drafter, source: Drafter) -> dict[str, Any]:
    """Options under which the drafter would have the shape of the source."""
    ours, theirs = drafter.module, source.module
    if isinstance(ours, LlamaModel) and isinstance(theirs, LlamaModel):
        here = options_of(ours.shape, drafter.spec)
        there = options_of(theirs.shape, drafter.spec)
        if not here["tied"]:
            del there["tied"]  # a tied head unties itself
    else:
        here, there = asdict(drafter.options), asdict(source.options)
        there = {k: v for k, v in there.items() if k not in _HOW}
    return {k: v for k, v in there.items() if here.get(k) != v}


_HOW = ("loss", "temperature", "chunk")  # options that say how to train, not what
