"""A transformers causal-LM folder as an independent drafter.

The folder is inspected by our own rules before transformers sees it: no pickles, no code, no name
that leaves the folder, headers that fit their files, a configuration that fits the headers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.core.drafter import Drafter
from specctl.core.errors import IncompatibleError, IntegrityError, SpecctlError, is_out_of_memory
from specctl.core.language_model import LanguageModel
from specctl.core.messages.foreign_calls import is_panic
from specctl.core.storage.model_folder import is_adapter_alone, refuse_stand_ins
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions, options_of
from specctl.export.package.compat import Mismatch, check_allow, check_compatible, raise_first
from specctl.export.package.files import (
    TensorEntry,
    check_name,
    model_files,
    open_folder,
    read_header,
    read_json,
)
from specctl.export.package.manifest import MANIFEST, check_files
from specctl.export.package.tensors import refuse_not_finite
from specctl.models.hf.from_config import architecture_of
from specctl.models.hf.quiet import quietly
from specctl.models.llama.fast_llama import LlamaModel, fast_llama_from_hf
from specctl.recipes.targets import ResolvedTarget
from specctl.runtime.target.folders import hub
from specctl.runtime.target.folders.checkpoint_folder import (
    check_size,
    from_folder,
    misfit,
    read_settings,
    refuse_named_code,
    weight_files,
)
from specctl.runtime.target.folders.stored_names import wrapper_note
from specctl.runtime.target.target import Target, any_lm, tokenizer_fingerprint
from specctl.runtime.target.variants.adapter import read_adapters, with_adapters
from specctl.runtime.target.variants.lora_folder import base_of

CONFIG = "config.json"
COMMON = 0.9  # of a vocabulary: so many ids at least are those of the other
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_pretrained(path: Path, target: Target, allow: Sequence[str] = ()) -> Drafter:
    """The model of a transformers folder as a small-lm drafter for `target`."""
    folder = open_folder(path)
    if (folder / MANIFEST).exists():
        check_compatible(check_files(folder), target, allow)
    base = whole_model(folder)
    config, shapes = inspect_folder(base.folder)
    check_vocab(config, shapes, target, allow)
    check_tokenizer(base.tokenizer(), folder, target, allow)
    drafter = described(SmallLm.from_lm(load_lm(base, shapes, target), target.spec))
    drafter.note = base.note(shapes)
    return drafter


def described(drafter: SmallLm) -> SmallLm:
    """The drafter with options that say its shape, so that it can be packaged and trained on."""
    if isinstance(drafter.module, LlamaModel):
        drafter.options = SmallLmOptions(**options_of(drafter.module.shape, drafter.spec))
    else:
        drafter.options = SmallLmOptions(architecture=architecture_of(drafter.module))
    return drafter


@dataclass(frozen=True, slots=True)
class DraftFolders:
    """Where a draft's model lies, and the adapters that are added to it; `given` is what was named:
    the model's folder, or that of the adapter."""

    given: Path
    folder: Path
    adapters: tuple[str, ...] = ()

    def tokenizer(self) -> Any:
        """The tokenizer that the draft reads with, None if it has none."""
        own = load_tokenizer(self.given)
        return load_tokenizer(self.folder) if own is None else own

    def note(self, names: Iterable[str]) -> str:
        """What is to be said of how it was read."""
        said = [wrapper_note(names)]
        if self.adapters:
            said.append(f"a LoRA adapter, loaded with its base, {self.folder}")
        return "; ".join(f"draft {self.given.name}: {text}" for text in said if text)


def whole_model(folder: Path) -> DraftFolders:
    """The folder, or the base of the adapter that lies there."""
    if not is_adapter_alone(folder):
        return DraftFolders(folder, folder)
    found = base_of(ResolvedTarget(str(folder), None, None, folder), folder)
    return DraftFolders(folder, hub.folder_of(found.resolved), found.adapters)


def inspect_folder(folder: Path) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    """The configuration and the tensors of a folder, or a typed refusal."""
    files = model_files(folder)
    config = read_json(files[CONFIG]) if CONFIG in files else None
    settings = read_settings(folder)  # names what lies there instead of a model
    return settings if config is None else config, _tensors(folder)


def _tensors(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor that transformers would load."""
    found: dict[str, TensorEntry] = {}
    for path in weight_files(folder):
        check_name(path.name)
        found |= read_header(path)
    return found


def check_vocab(
    config: Mapping[str, Any],
    shapes: Mapping[str, TensorEntry],
    target: Target,
    allow: Sequence[str] = (),
) -> None:
    """The draft's token ids are the target's, row for row, as claimed and as stored; with padding
    in `allow` the number of rows may differ (the tokenizers are compared on their own)."""
    text = config.get("text_config")
    size = (text if isinstance(text, dict) else config).get("vocab_size")
    expected = target.spec.vocab_size
    if isinstance(size, int) and "padding" in check_allow(allow):
        expected = size
    if size != expected:
        raise IncompatibleError(
            "vocab_size of target and drafter differ",
            found=f"the draft has {size:,} ids" if isinstance(size, int) else "no vocab_size",
            expected=f"{expected:,} ids, as in {target.name}",
            do="with the same tokenizer --allow padding, or save it after "
            f"model.resize_token_embeddings({expected}); else choose another draft",
            where=f"{CONFIG}:vocab_size",
        )
    rows = {e.shape[0] for name, e in shapes.items() if name.endswith("embed_tokens.weight")}
    if rows - {expected}:
        raise IntegrityError(
            "config.json and weights contradict each other",
            found=f"an embedding of {max(rows):,} rows",
            expected=f"{expected:,} rows, as vocab_size says",
            do="download the model again",
            where=f"{CONFIG}:vocab_size",
        )


def load_tokenizer(folder: Path) -> Any:
    """The folder's own tokenizer, None if it has none."""
    from transformers import AutoTokenizer

    if not any((folder / name).exists() for name in _TOKENIZERS):
        return None
    refuse_stand_ins(folder)
    refuse_named_code(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except BaseException as error:  # a foreign file through a foreign parser: any type may come
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise IntegrityError(
            "the draft's tokenizer cannot be read",
            found=f"{type(error).__name__}: {str(error)[:150]}",
            expected="tokenizer files that transformers can read",
            do="copy the target's tokenizer files into the folder if the draft uses its ids",
            where="tokenizer.json",
        ) from error


def check_tokenizer(tokenizer: Any, folder: Path, target: Target, allow: Sequence[str]) -> None:
    """A draft's tokenizer is the target's, unless the caller vouches for it (`allow`)."""
    if has_ids_of(tokenizer, target):
        return
    found = None if tokenizer is None else tokenizer_fingerprint(tokenizer)
    shown = "the draft folder has no tokenizer"
    if tokenizer is not None:
        shown = f"fingerprint {str(found)[:12]}" + _difference(tokenizer, target.tokenizer)
    miss = Mismatch(
        "tokenizer",
        shown,
        f"fingerprint {str(target.tokenizer_fingerprint)[:12]}",
        "choose a draft of the target's own model family",
        "tokenizer",
    )
    raise_first([miss], allow, f"{target.name} (draft {folder.name})")


def has_ids_of(tokenizer: Any, target: Target) -> bool:
    """Whether a draft's ids stand for the target's texts. A draft reads ids that the target's
    tokenizer has made, so that its own merges and normalisation decide nothing; ids that one of
    the two does not have are padding."""
    if tokenizer is None or target.tokenizer is None:
        return tokenizer is None and target.tokenizer_fingerprint is None
    if tokenizer_fingerprint(tokenizer) == target.tokenizer_fingerprint:
        return True
    ours = {i: text for text, i in target.tokenizer.get_vocab().items()}
    theirs = {i: text for text, i in tokenizer.get_vocab().items()}
    common = ours.keys() & theirs.keys()
    is_most = len(common) >= COMMON * max(len(ours), len(theirs))
    return is_most and all(ours[i] == theirs[i] for i in common)


def _difference(draft: Any, target: Any) -> str:
    """How many ids mean other text, and the first of them."""
    if target is None:
        return ""
    ours = {i: text for text, i in target.get_vocab().items()}
    theirs = {i: text for text, i in draft.get_vocab().items()}
    other = sorted(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    if not other:
        return ", same ids but other merges or normalisation"
    i = other[0]
    return (
        f"; {len(other):,} of {len(ours):,} ids map to other text "
        f"(first: {i:,} {theirs.get(i)!a} vs {ours.get(i)!a})"
    )


def load_lm(base: DraftFolders, shapes: Mapping[str, TensorEntry], target: Target) -> LanguageModel:
    """The draft's model on the target's device and dtype, frozen; no weight may be made up."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, added = base.folder, read_adapters(base.adapters)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        check_size(config, [entry.shape for entry in shapes.values()], CONFIG)
        with quietly():
            model, report = from_folder(
                AutoModelForCausalLM,
                folder,
                config=config,
                dtype=target.dtype,
                ignore_mismatched_sizes=True,  # reported below, by name
                output_loading_info=True,
            )
    except SpecctlError:
        raise
    except Exception as error:  # a foreign file through a foreign parser: any type may come
        if is_out_of_memory(error):
            raise
        raise IncompatibleError(
            "transformers cannot load the draft as a causal LM",
            found=f"{type(error).__name__}: {str(error)[:200]}",
            expected="a decoder-only language model",
            do="load it once with AutoModelForCausalLM to see what is missing",
            where=CONFIG,
        ) from error
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(map(str, report.get(problem) or ()))
        if names:
            raise misfit(
                f"{problem.replace('_', ' ')}: {names[0]}"
                + (f" and {len(names) - 1} more" if len(names) > 1 else ""),
                "every weight of the architecture, and no other",
                CONFIG,
            )
    weights = dict(model.named_parameters())
    refuse_not_finite(weights, "get the folder again, or save the model anew: it is damaged")
    model.to(target.device).eval().requires_grad_(False)
    if added:
        model = with_adapters(model, added, is_merged=fast_llama_from_hf(model) is not None)
    return fast_llama_from_hf(model) or any_lm(model)
