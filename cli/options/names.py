"""The names that a command line may give: checked before anything heavy loads, and completed by the
shell. All of them are read from sources and YAML; neither torch nor transformers is imported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from specctl.core.errors import FileError, did_you_mean, unknown
from specctl.core.plugins import declared
from specctl.recipes.drafter_names import drafter_names, folder_named

AUTO, NONE = "auto", "none"
ENGINES = ("vllm", "sglang", "llama.cpp", "trtllm", "openvino", "mlx", "onnxruntime")


def check_drafting(
    policy: str | None, rule: str | None, controller: str | None, stop_rule: str | None
) -> None:
    """Refuse a word that no policy, rule, controller or stop rule has as its name, and a relaxed
    rule with other numbers than it has (which takes torch)."""
    _check(
        "tree policy", policy, declared("specctl.runtime.policies", "POLICY"), "--set serve.policy"
    )
    relaxed = declared("specctl.runtime.verify.relaxed", "RELAXED")
    rules = [AUTO, *declared("specctl.runtime.verify", "RULE"), *relaxed]
    name = rule if rule is None else rule.partition(":")[0]
    _check("verification rule", name if name in relaxed else rule, rules, "--rule")
    if rule is not None and rule != name:
        from specctl.runtime.verify.relaxed import relaxation

        relaxation(rule)
    controllers = declared("specctl.runtime.controllers", "CONTROLLER")
    _check("controller", controller, controllers, "--set serve.controller")
    if stop_rule is not None and not re.search(r"[/\\.]", stop_rule):  # else a file
        rules_of_stopping = [NONE, *declared("specctl.runtime.stops", "STOP")]
        if not Path(stop_rule).exists():
            _check("stop rule", stop_rule, rules_of_stopping, "--set serve.stop")


def check_drafter(name: str) -> None:
    """Refuse a plain word that is no drafter's name, alias or folder; of several joined by `+`,
    each."""
    if len(parts := drafter_names(name)) > 1:
        for part in parts:
            check_drafter(part)
        return
    from specctl.api.arguments.families import family_infos
    from specctl.export.package.files import open_folder
    from specctl.recipes.files import recipe_names
    from specctl.recipes.published import published_names
    from specctl.recipes.targets import aliases, is_hub_id

    if not name or Path(name).expanduser().exists():
        return
    if re.search(r"[/\\]", name):
        if not is_hub_id(name.partition("@")[0]):
            open_folder(Path(name).expanduser())
        return
    published = published_names()
    known = {NONE, *family_infos(), *recipe_names(), *aliases(), *published}
    if name not in known:
        raise FileError(
            f"unknown drafter {ascii(name)[:80]}",
            where="the command line",
            found=ascii(name)[:80],
            expected="a package or run folder, a hub id owner/name, a drafter without training, or "
            f"a published one ({', '.join(published) or 'there is none yet'})",
            do=did_you_mean(
                name,
                [*published, *free_drafters(), *aliases()],
                "`specctl recipes ls --all` shows them",
            )
            + " (a folder is written ./NAME)",
        )


def check_package(name: str) -> None:
    """Refuse the name of a recipe, or of a drafter without training, where a package is needed."""
    from specctl.recipes.files import recipe_names

    if folder_named(name).exists() or name not in recipe_names():
        return
    untrained = name in free_drafters()
    raise FileError(
        f"{name} drafts without training: it has no package"
        if untrained
        else f"{name} is a recipe, not a package",
        where="the command line",
        found=name,
        expected="the folder of a package, or of its run",
        do=f"specctl recipes show {name}"
        if untrained
        else f"specctl train-draft --recipe {name} --out runs/{name}, then the same command with "
        f"runs/{name}",
    )


def _check(kind: str, name: str | None, known: Iterable[str], flag: str) -> None:
    if name is not None and name not in (listed := list(known)):
        raise unknown(kind, name, listed, flag)


def free_drafters() -> list[str]:
    """The families that draft without training."""
    from specctl.api.arguments.families import family_infos

    return [name for name, info in family_infos().items() if not info.trainable]


# -- what the shell completes ----------------------------------------------------------------------


def complete_recipe(incomplete: str) -> list[str]:
    from specctl.recipes.files import recipe_names

    return _starting(incomplete, recipe_names())


def complete_any_recipe(incomplete: str) -> list[str]:
    """Those of `specctl pretrain` as well."""
    return [*complete_recipe(incomplete), *complete_pretraining(incomplete)]


def complete_pretraining(incomplete: str) -> list[str]:
    from specctl.recipes.files import PRETRAINED

    return _starting(incomplete, PRETRAINED)


def complete_target(incomplete: str) -> list[str]:
    from specctl.recipes.targets import aliases

    return _starting(incomplete, aliases())


def complete_format(incomplete: str) -> list[str]:
    return _starting(incomplete, [*ENGINES, *declared("specctl.export.formats", "FORMAT")])


def complete_draft(incomplete: str) -> list[str]:
    """Names of drafters without training, published drafters, and the packages below runs/."""
    from specctl.recipes.published import published_names

    packages = [str(file.parent) for file in Path("runs").glob("*/package/manifest.json")]
    return _starting(incomplete, [NONE, *free_drafters(), *published_names(), *sorted(packages)])


def complete_family(incomplete: str) -> list[str]:
    from specctl.api.arguments.families import family_infos

    return _starting(incomplete, family_infos())


def complete_stop(incomplete: str) -> list[str]:
    return _starting(incomplete, [NONE, *declared("specctl.runtime.stops", "STOP")])


def complete_selector(incomplete: str) -> list[str]:
    return _starting(incomplete, declared("specctl.train.vocab.selectors", "SELECTOR"))


def complete_controller(incomplete: str) -> list[str]:
    return _starting(incomplete, declared("specctl.runtime.controllers", "CONTROLLER"))


def one_of(*names: str) -> Callable[[str], list[str]]:
    """Completes to one of these names."""
    return lambda incomplete: _starting(incomplete, names)


def complete_policy(incomplete: str) -> list[str]:
    return _starting(incomplete, declared("specctl.runtime.policies", "POLICY"))


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
