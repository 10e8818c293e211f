"""From the words of a command line to a target, and how results name it; torch comes late."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Self

from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import given_flags
from specctl.cli.app.settings import Setting
from specctl.cli.options.flags import Offline, target_option
from specctl.cli.options.names import complete_target, one_of
from specctl.core.errors import SpecctlError
from specctl.core.storage.hub_access import go_offline
from specctl.recipes.drafter_names import drafter_names

if TYPE_CHECKING:
    from specctl.core.forward.attention_only import AttentionOnly
    from specctl.recipes.schema import TargetPart
    from specctl.runtime.target.target import Target
    from specctl.runtime.target.variants.rounding import Rounding

OWN = "the package's own, or tiny"  # stands for a name that nobody gave


@dataclass(frozen=True, slots=True)
class TargetChoice:
    """What the target flags say."""

    name: Annotated[
        str,
        target_option(
            "--target",
            "-t",
            help="Alias (tiny, qwen3-8b), hub id, folder or GGUF file.",
            autocompletion=complete_target,
        ),
    ] = "tiny"
    revision: Annotated[
        str | None,
        Setting("target.revision", "Commit of the hub repository.", was="--revision"),
    ] = None
    dtype: Annotated[
        str, target_option("--dtype", help="auto, float32, bfloat16, float16, int8, int4 or gguf.")
    ] = "auto"
    device: Annotated[str, target_option("--device", help="auto, cpu, cuda, cuda:1.")] = "auto"
    inflate: Annotated[
        str | None,
        target_option(
            "--inflate",
            help="Grow the target to this cost (100m, 300m, 1b, 8b) with the same answers.",
        ),
    ] = None
    offline: Offline = False
    adapter: Annotated[
        list[str] | None,
        target_option(
            "--adapter",
            metavar="FOLDER[@WEIGHT]",
            help="LoRA adapter of peft, added to the target (repeatable, in order).",
        ),
    ] = None
    device_map: Annotated[
        str | None,
        Setting(
            "target.device_map",
            "Spread layers over GPUs, host memory and disk: auto, balanced (GPUs alone), "
            "cpu-offload, or a map of modules to places.",
            was="--device-map",
            metavar="MODE|JSON|FILE",
            complete=one_of("auto", "balanced", "cpu-offload"),
        ),
    ] = None
    tensor_parallel: Annotated[
        bool,
        Setting(
            "target.tensor_parallel",
            "Tensor parallel over the processes of torchrun.",
            was="--tp",
            only=("generate",),
        ),
    ] = False

    def or_own(self, *drafts: str) -> Self:
        """This choice; where none was named, the target that the first package was made for, else
        tiny."""
        from specctl.api.arguments.families import check_stored

        check_stored(self.dtype, (part for draft in drafts for part in drafter_names(draft)))
        if self.name != OWN:
            return self
        if self.offline:
            go_offline()
        from specctl.api.arguments.targets import own_target

        record = own_target(*drafts)
        if record is None:
            return replace(self, name="tiny")
        inflate = self.inflate or record.inflated
        adapter = self.adapter or record.adapter_words()
        return replace(
            self, name=record.name, revision=record.revision, inflate=inflate, adapter=adapter
        )

    def words(self, like: TargetChoice | None = None, but: Collection[str] = ()) -> list[str]:
        """The flags that name this target to the next command; none for what nobody named. What is
        as in `like` (else the defaults) is left out, and so are the fields `but`."""
        name = [] if self.name == OWN else ["--target", self.name]
        return [*name, *given_flags(self, like or type(self)(), ("name", *but))]

    def measured_words(self) -> list[str]:
        """The same for a command that runs in one process: what was spread over several is spread
        over the devices of one."""
        if not self.tensor_parallel:
            return self.words()
        return replace(self, tensor_parallel=False, device_map="auto").words()

    def training_words(self) -> list[str]:
        """The flags that name it to a command that trains."""
        own = ("revision", "dtype", "inflate", "device_map", "tensor_parallel", "mix")
        words = self.words(but=own)
        if self.device_map is not None:
            words += ["--device-map", self.device_map]
        for field in ("revision", "dtype", "inflate"):
            value = getattr(self, field)
            if value not in (None, "auto"):
                words += ["--set", f"target.{field}={value}"]
        return words

    @classmethod
    def of_recipe(cls, part: TargetPart) -> TargetChoice:
        """The target that a recipe names."""
        return cls(
            part.name,
            part.revision,
            part.dtype,
            inflate=part.inflate,
            adapter=list(part.adapters),
            device_map=part.device_map,
        )

    def load(
        self,
        console: Console,
        compiled: bool | None = False,
        is_read_only: bool = False,
        is_in_step: bool = False,
        wanted: Sequence[AttentionOnly] = (),
        images: bool = False,
    ) -> Target:
        """The target, announced with what an alias stands for and any inflation. `is_read_only`:
        also one that cannot be run here. `is_in_step`: several processes that run the command do
        the same at every step, as tensor parallelism requires. `wanted`: what will be done with it
        that needs attention alone. `images`: with its vision."""
        from specctl.recipes.targets import resolve

        if self.tensor_parallel and not is_in_step:
            raise not_in_step("target.tensor_parallel")
        resolved = resolve(self.name)  # an unknown name fails before torch is imported
        if self.offline:
            go_offline()
        from specctl.runtime.target.variants.mixed import load_mixed

        if self.inflate is not None:
            from specctl.runtime.target.variants.inflate import size_named

            size_named(self.inflate)  # before the target is read
        console.detail(f"target {self.name} = {resolved.place}")
        for word in self.adapter or ():
            console.detail(f"with adapter {word}")
        if self.revision is not None and resolved.repo is None:
            console.warn(f"target.revision is ignored: target {self.name} is on this machine")
        from specctl.models.native.library import BUILDING, is_given_up, is_to_be_built, library

        is_new = is_to_be_built()
        if is_new:
            console.say(BUILDING)
        target = load_mixed(
            self._mix(),
            self.name,
            revision=self.revision,
            dtype=self.dtype,
            device=self.device,
            inflate=self.inflate,
            offline=self.offline,
            compile=compiled,
            adapters=self.adapter or (),
            is_read_only=is_read_only,
            device_map=self.device_map,
            tensor_parallel=self.tensor_parallel,
            wanted=wanted,
            images=images,
        )
        is_needed = target.device.type == "cpu" and (is_new or is_given_up())
        if is_needed and (missing := library().missing):
            console.warn(f"it was not compiled, decoding is slower without it: {missing}")
        for note in target.notes:
            console.say(f"note: {note}")
        if target.rounding is not None:
            _tell_rounding(console, target.rounding, target.dtype_name)
        if target.spread is not None:
            console.say(f"target {self.name}: {target.spread}; its forward is transformers'")
        if target.mixture is not None:
            console.warn(target.mixture.warning(self.name))
        if target.inflated:
            from specctl.api.arguments.targets import inflated_note

            console.warn(inflated_note(target))
        return target

    def _mix(self) -> str | None:
        """The mixture that answers in the target's place, where the command can name one."""
        return None


@dataclass(frozen=True, slots=True)
class AnsweringChoice(TargetChoice):
    """The target flags of commands that answer with it."""

    mix: Annotated[
        str | None,
        target_option(
            "--mix",
            metavar="METHOD=MODEL",
            help="Answer with two models instead of the target alone: mixed, by "
            "contrast:0.5:0.1=MODEL, average, product or switch; in turns, by entropy, reward or "
            "reward-budget; on a part of the prompt, by specpc or speckv (docs/verification.md).",
        ),
    ] = None

    def _mix(self) -> str | None:
        from specctl.runtime.target.variants.mixture import alone, parse

        if self.mix is not None and (mixture := parse(self.mix)).is_approximate:
            raise alone(mixture)
        return self.mix


@dataclass(frozen=True, slots=True)
class WritingChoice(AnsweringChoice):
    """The same of commands where models may write in turns, and prompts be kept in part."""

    def _mix(self) -> str | None:
        return self.mix


def _tell_rounding(console: Console, rounding: Rounding, dtype: str) -> None:
    if rounding.is_doubtful:
        console.warn(rounding.warning(dtype))
    else:
        console.say(rounding.text(dtype))


OWN_TARGET = TargetChoice(name=OWN)
OWN_ANSWERING = AnsweringChoice(name=OWN)
OWN_WRITING = WritingChoice(name=OWN)


def loading(target: TargetChoice) -> str:
    """What is said by commands that take long, before the target is read."""
    size = "" if target.inflate is None else f", and growing it to {target.inflate}"
    return f"loading target {target.name}{size}"


def not_in_step(where: str) -> SpecctlError:
    """The error of a command whose processes would not all do the same."""
    return SpecctlError(
        "this command does not keep several processes in step",
        where=where,
        found="tensor parallelism",
        expected="specctl generate, or training, with --set target.tensor_parallel=true",
        do="--set target.device_map=auto, or let vLLM or SGLang serve the target",
    )
