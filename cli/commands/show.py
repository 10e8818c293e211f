"""`specctl show`: what a package, a run or a model folder contains. No torch."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line, with_text
from specctl.cli.commands.shown_ends import end_rows
from specctl.cli.options.names import complete_target
from specctl.core.errors import FileError, IntegrityError, did_you_mean, no_folder
from specctl.core.storage.diffusion_kinds import is_diffusion_folder
from specctl.core.storage.grid_kinds import is_grid_folder

if TYPE_CHECKING:
    from specctl.export.package.manifest import Manifest
    from specctl.recipes.targets import ResolvedTarget
    from specctl.runtime.target.templates.ends import EndsOfText


def show(
    console: Console,
    word: Annotated[
        str,
        typer.Argument(
            metavar="PATH|TARGET",
            help="A package, a run folder, a model folder, a GGUF file, or a target's name.",
            autocompletion=complete_target,
        ),
    ],
) -> None:
    """Show what a folder or a GGUF file contains: kind, parameters, target, acceptance, how to use
    it. Of a target's name: what it stands for, and its sizes.

    Examples:

      specctl show runs/quickstart/package
      specctl show runs/quickstart --json
      specctl show tiny
    """
    from specctl.core.storage.model_folder import (
        is_adapter_alone,
        is_file_name,
        no_gguf_file,
        something_else,
    )
    from specctl.recipes.published import path_named
    from specctl.recipes.targets import gguf_at

    target, path = _target_named(word), path_named(word)
    if target is not None:
        result, following = _target(console, target)
        console.done(result, next=following)
        return
    file = gguf_at(path)
    if file is not None:
        from specctl.cli.commands.shown_gguf import show_gguf

        result, following = show_gguf(console, file)
        console.done(result, next=following)
        return
    if is_file_name(path) and not path.exists():
        raise no_gguf_file(path)
    if not path.is_dir():
        from specctl.recipes.files import recipe_names
        from specctl.recipes.targets import aliases

        kinds = "a package, a run folder, a model folder or a target's name"
        do = did_you_mean(str(path), aliases(), "specctl show runs/NAME/package")
        if str(path) in recipe_names():
            do = f"specctl recipes show {path}"
        raise no_folder(path, kinds, do)
    from specctl.export.package.manifest import MANIFEST

    if (path / MANIFEST).is_file():
        result, following = _package(console, path)
    elif (path / "run.yaml").is_file():
        result, following = _run(console, path)
    elif (path / "config.json").is_file():
        result, following = _model(console, path)
    elif is_adapter_alone(path):
        result, following = _adapter(console, path)
    else:
        names = sorted(p.name for p in path.iterdir())[:8]
        raise something_else(path) or FileError(
            f"{path} holds nothing that specctl knows",
            where=str(path),
            found=", ".join(names) or "an empty folder",
            expected=f"{MANIFEST} (package), run.yaml (run) or config.json (model)",
            do="give the folder that was printed at the end of training, or one of its parents",
        )
    console.done(result, next=following)


def _target_named(word: str) -> ResolvedTarget | None:
    """The target of that name; None where a folder is meant."""
    from specctl.recipes.drafter_names import folder_named
    from specctl.recipes.targets import aliases, is_on_hub, resolve

    if word in aliases() or (is_on_hub(word) and not folder_named(word).exists()):
        return resolve(word)
    folder_named(word)
    return None


def _target(console: Console, found: ResolvedTarget) -> tuple[dict[str, Any], list[str]]:
    from specctl.recipes.load import list_recipes
    from specctl.runtime.target.folders.hub import cached_folder

    place = str(found.path or found.repo)
    recipes = [info.name for info in list_recipes() if info.target == found.name]
    rows: list[tuple[str, object]] = [("kind", "target"), ("name", found.name)]
    rows.append(("hub id" if found.path is None else "folder", place))
    if found.revision is not None:
        rows.append(("revision", found.revision + ("" if found.is_pinned else " (may move)")))
    if found.note:
        rows.append(("note", found.note))
    sizes: dict[str, Any] = {}
    if found.shape is not None:
        sizes = {**asdict(found.shape), "parameters": found.shape.parameters}
        rows += [
            (name.replace("_", " "), f"{value:,}" if type(value) is int else value)
            for name, value in sizes.items()
        ]
    folder = found.path or cached_folder(found)
    ends = None if folder is None else _ends(folder)
    rows += end_rows(ends)
    rows.append(("recipes", _recipes_text(recipes, found.name)))
    console.table(("field", "value"), rows)
    result = {
        "kind": "target",
        "name": found.name,
        "path": None if found.path is None else place,
        "repo": found.repo,
        "revision": found.revision,
        "shape": sizes or None,
        "ends": None if ends is None else ends.to_json(),
        "recipes": recipes,
    }
    usual = [name for name in recipes if name.endswith("eagle3")]
    recipe = (usual or recipes or ["eagle3"])[0]
    return result, [command_line("plan", "--target", found.name, "--recipe", recipe)]


def _ends(path: Path) -> EndsOfText:
    """Where the texts of a model folder end; config.json is read already where that matters."""
    from specctl.runtime.target.folders.checkpoint_folder import read_object
    from specctl.runtime.target.folders.tokenizer_files import ends_in

    return ends_in(path, read_object(path / "config.json"))


def _recipes_text(names: Sequence[str], target: str) -> str:
    """The recipes for a target, or how many there are and what lists them."""
    if len(names) > 12:
        return f"{len(names)}: specctl recipes ls --target {target} --all"
    return ", ".join(names) or "any, with --target"


def _package(console: Console, path: Path) -> tuple[dict[str, Any], list[str]]:
    from specctl.core.messages.claim import meaning, stamp
    from specctl.export.formats import filled
    from specctl.export.package.manifest import read_manifest
    from specctl.export.package.proof_record import read_record
    from specctl.recipes.published import published_folder

    manifest, record = read_manifest(path), read_record(path)
    vocab, accepted = manifest.vocabulary, manifest.acceptance
    mark, dtype = manifest.verification, manifest.target.dtype
    size = sum(record.bytes for record in manifest.files.values())
    damaged = _warn_of_damage(console, path, manifest)
    numbers = manifest.dtype if manifest.held_file is None else "as a GGUF file packs them"
    rows: list[tuple[str, object]] = [
        ("kind", f"package ({manifest.format}, format {manifest.format_version})"),
        ("family", manifest.family),
        ("parameters", f"{manifest.parameters:,} ({numbers}, {size:,} bytes)"),
        ("target", _target_text(manifest.target)),
        ("vocabulary", f"{vocab.draft_size:,} of {vocab.target_size:,} tokens"),
        ("verification", f"{stamp(mark, dtype)}: {meaning(mark, dtype)}"),
        ("proof", _proof_text(record)),
        ("served as", _pairs(manifest.serve)),
        ("options", _pairs(manifest.options)),
        ("acceptance", _acceptance_text(accepted)),
        ("recipe", manifest.recipe_digest[:16]),
        ("digest", manifest.digest),
        ("made by", shlex.join(manifest.command)),
    ]
    console.table(("field", "value"), rows)
    named = path.name if path == published_folder(path.name) else path
    draft = ("generate", "--draft", named, "--compare")
    following = [command_line("verify", named), with_text(*draft)]
    if not manifest.is_loadable:
        following = [filled(line, path, None) for line in manifest.served_by]
    if damaged:
        following = [f"specctl verify {path} --level files"]
    result = {"kind": "package", "path": str(path), "manifest": manifest.to_json()}
    return {**result, "proof": record}, following


def _warn_of_damage(console: Console, path: Path, manifest: Manifest) -> bool:
    """Whether the folder shows damage at a glance: files that are gone or have another size."""
    damaged = False
    for name, record in manifest.files.items():
        file = path / name
        found = f"{file.stat().st_size:,} bytes" if file.is_file() else "not there"
        if found != f"{record.bytes:,} bytes":
            damaged = True
            console.warn(
                f"{name} is not as it was written ({found}, {record.bytes:,} bytes in the "
                "manifest): it cannot be used; get the package again, or make it again from its run"
            )
    return damaged


def _target_text(target: Any) -> str:
    text = str(target.name)
    if target.revision:
        text += f"@{target.revision[:12]}"
    if target.inflated:
        text += f" inflated to {target.inflated}"
    if target.adapters:
        text += f" with {', '.join(target.adapter_words())}"
    if target.changed is not None:
        text += f", CHANGED from {target.changed.name} (KL {target.changed.kl:.4f} nats a token)"
    return f"{text} (fingerprint {target.fingerprint[:12]})"


def _proof_text(record: dict[str, Any] | None) -> str:
    if record is None:
        return "none kept (specctl verify)"
    proof = record.get("proof", {})
    word = "passed" if proof.get("passed") else "FAILED"
    return f"{word}, level {record.get('level')}, {record.get('created')}"


def _acceptance_text(accepted: Any) -> str:
    if accepted is None:
        return "not measured"
    chances = " ".join(f"{share:.2f}" for share in accepted.alpha)
    setting = "greedy" if accepted.temperature == 0 else f"T={accepted.temperature:g}"
    return f"tau {accepted.tau:.2f} ({setting}, {accepted.data}), per position {chances}"


def _run(console: Console, path: Path) -> tuple[dict[str, Any], list[str]]:
    from specctl.recipes.files import parse_yaml

    file = path / "run.yaml"
    run = parse_yaml(file.read_text(encoding="utf-8"), str(file))
    run = run if isinstance(run, dict) else {}
    recipe = run.get("recipe", run)
    if not isinstance(recipe, dict):
        raise FileError(
            f"{file} is not the record of a run",
            where=f"{file}:recipe",
            found=repr(recipe)[:80],
            expected="the sections of a recipe",
            do="give another run folder; specctl recipes ls shows what can be trained anew",
        )
    last = last_metrics(path / "metrics.jsonl")
    steps = sorted(p.name for p in path.rglob("step*") if p.is_dir())
    package = path / "package"
    rows: list[tuple[str, object]] = [
        ("kind", "run"),
        ("recipe", recipe.get("name")),
        ("target", _nested(recipe, "target", "name")),
        *(("adapter", name) for name in _nested(recipe, "target", "adapters") or ()),
        ("family", _nested(recipe, "drafter", "family")),
        ("steps", f"{last.get('step', 0)} of {_nested(recipe, 'train', 'steps')}"),
        ("last figures", _pairs({k: v for k, v in last.items() if k != "step"})),
        ("checkpoints", ", ".join(steps) or "none"),
        ("package", str(package) if package.is_dir() else "not written yet"),
    ]
    command = run.get("command")
    text = shlex.join(map(str, command)) if isinstance(command, list) else command
    if text:
        rows.append(("command", text))
    console.table(("field", "value"), rows)
    result = {
        "kind": "run",
        "path": str(path),
        "run": run,
        "last": last,
        "checkpoints": steps,
        "package": str(package) if package.is_dir() else None,
    }
    is_there = package.is_dir()
    return result, [
        command_line("show", package) if is_there else command_line("runs", "resume", path)
    ]


def last_metrics(path: Path) -> dict[str, Any]:
    """The newest value of every figure in a metrics.jsonl; empty if there is none."""
    newest: dict[str, Any] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the last line of a run that is being written
        newest |= {k: v for k, v in record.items() if isinstance(v, (int, float))}
    return newest


def _model(console: Console, path: Path) -> tuple[dict[str, Any], list[str]]:
    from specctl.runtime.target.folders.checkpoint_folder import read_object

    try:
        config = read_object(path / "config.json")
    except IntegrityError as error:  # show has only looked: no rule was broken, a file is no good
        raise FileError(
            error.what,
            where=error.where,
            found=error.found,
            expected="the config.json of a transformers model, a JSON object",
            do=error.do or "download the folder again",
        ) from None
    ends = _ends(path)
    weights = sorted(p for p in path.iterdir() if p.suffix == ".safetensors")
    size = sum(p.stat().st_size for p in weights)
    inner = config.get("text_config")
    inner = inner if isinstance(inner, dict) else config
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else ["unknown"]
    wanted = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
    rows: list[tuple[str, object]] = [
        ("kind", "model"),
        ("architecture", ", ".join(map(str, names))),
        ("model type", config.get("model_type")),
        *((name.replace("_", " "), inner.get(name)) for name in wanted),
        ("weights", f"{len(weights)} safetensors files, {size:,} bytes"),
        *end_rows(ends),
    ]
    console.table(("field", "value"), rows)
    result = {"kind": "model", "path": str(path), "config": config, "weight_bytes": size}
    result["ends"] = ends.to_json()
    return result, [] if _warn_of_weights(console, path, weights) else [_trying(path)]


def _warn_of_weights(console: Console, path: Path, weights: Sequence[Path]) -> bool:
    """Whether a model's folder lacks weights, or holds files of them that were cut short."""
    from specctl.export.package.files import read_header

    faults = [] if weights else ["no safetensors weights in it: download the folder again"]
    for file in weights:
        try:
            read_header(file)
        except IntegrityError as error:
            faults.append(f"{file.name}: {error.what} ({error.found}); {error.do}")
    for fault in faults:
        console.warn(f"{path} cannot be loaded: {fault}")
    return bool(faults)


def _adapter(console: Console, path: Path) -> tuple[dict[str, Any], list[str]]:
    """A LoRA adapter of peft, which stands for its base with the adapter added."""
    from specctl.core.storage.model_folder import ADAPTER, ADAPTER_WEIGHTS
    from specctl.runtime.target.folders.checkpoint_folder import read_object

    config, weights = read_object(path / ADAPTER), path / ADAPTER_WEIGHTS
    size = weights.stat().st_size if weights.is_file() else 0
    base = config.get("base_model_name_or_path")
    rows: list[tuple[str, object]] = [
        ("kind", "adapter (LoRA of peft): stands for its base with the adapter added"),
        ("base", base or "not named: give it with --target BASE --adapter FOLDER"),
        ("rank", config.get("r")),
        ("weights", f"{size:,} bytes"),
    ]
    console.table(("field", "value"), rows)
    result = {"kind": "adapter", "path": str(path), "base": base, "weight_bytes": size}
    return result, [_trying(path)]


def _trying(target: Path) -> str:
    if is_diffusion_folder(target):  # nothing drafts for it
        return with_text("generate", "--target", target, "--stats")
    if is_grid_folder(target):
        return command_line("generate", "--target", target, "--set", "picture.out=seven.png", "7")
    return with_text("generate", "--target", target, "--draft", "prompt-lookup", "--compare")


def _nested(tree: dict[str, Any], section: str, key: str) -> Any:
    part = tree.get(section)
    return part.get(key) if isinstance(part, dict) else None


def _pairs(values: dict[str, Any]) -> str:
    shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in values.items()}
    return ", ".join(f"{k} {v}" for k, v in shown.items() if v is not None) or "-"
