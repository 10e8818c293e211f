"""Folders that name pickles, code, pipes or absurd sizes, as targets and as drafts: nothing of them
is loaded, run or waited for, and each is refused in a moment."""

from __future__ import annotations

import ast
import json
import os
import pickle
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specctl.api.against import assistant_model
from specctl.cli.app.console import Console
from specctl.cli.commands.show import show
from specctl.core.errors import IntegrityError, SpecctlError
from specctl.export.imports.published import read_published
from specctl.export.package.folder import load_drafter
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import TargetPart
from specctl.runtime.target.folders.checkpoint_folder import (
    INDEX,
    WEIGHTS,
    check_size,
    weight_files,
)
from specctl.runtime.target.target import Target, load_target, tokenizer_fingerprint
from specctl.train.planning.target_shape import target_shape
from specctl_testing.export.mutations import is_refused, mutated

ROOT = Path(__file__).parents[2]
Write = Callable[..., None]


class Bomb:
    """A pickle that leaves a mark where it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.fixture
def folder(tmp_path: Path, make_model: Any, word_tokenizer: Any) -> Path:
    """A whole model of two layers with its tokenizer."""
    path = tmp_path / "room" / "model"
    make_model(num_layers=2, hidden=16, vocab=48).save_pretrained(path)
    word_tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def bare(make_target: Any, word_tokenizer: Any) -> Target:
    """A target whose ids and tokenizer are those of the folder."""
    made = make_target(num_layers=2, hidden=16, vocab=48)
    digest = tokenizer_fingerprint(word_tokenizer)
    return replace(made, tokenizer=word_tokenizer, tokenizer_fingerprint=digest)


def as_target(folder: Path, bare: Target) -> object:
    del bare
    return load_target(str(folder), device="cpu")


def as_draft(folder: Path, bare: Target) -> object:
    return load_drafter(folder, bare)


def as_translated_draft(folder: Path, bare: Target) -> object:
    return load_drafter(folder, replace(bare, tokenizer_fingerprint="0" * 64), translate="auto")


def as_assistant(folder: Path, bare: Target) -> object:
    return assistant_model(str(folder), bare, folder.parent / "assistant", 3)


WAYS = [as_target, as_draft, as_translated_draft, as_assistant]


def edit(path: Path, **fields: Any) -> None:
    body = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**body, **fields}))


def named_by_index(folder: Path, name: str, bomb: bytes) -> None:
    """An index that names a pickle, beside safetensors that no index names."""
    tensors = json.loads((folder / WEIGHTS).read_bytes()[8:].split(b"]}}")[0] + b"]}}")
    (folder / WEIGHTS).rename(folder / "decoy.safetensors")
    place = Path(name) if os.path.isabs(name) else folder / name
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(bomb)
    weight_map = {tensor: name for tensor in tensors if tensor != "__metadata__"}
    edit(folder / INDEX, metadata={"total_size": 1}, weight_map=weight_map)


def named_by_config(folder: Path, bomb: bytes, name: str = "adapter_model.bin") -> None:
    (folder / name).write_bytes(bomb)
    edit(folder / "config.json", transformers_weights=name)


def adapter(folder: Path, bomb: bytes) -> None:
    (folder / "adapter_model.bin").write_bytes(bomb)
    edit(folder / "adapter_config.json", peft_type="LORA", base_model_name_or_path=str(folder))


def only_pickles(folder: Path, bomb: bytes) -> None:
    (folder / WEIGHTS).rename(folder / "decoy.safetensors")
    (folder / "pytorch_model.bin").write_bytes(bomb)


def pickled_index(folder: Path, bomb: bytes) -> None:
    only_pickles(folder, bomb)
    edit(folder / "pytorch_model.bin.index.json", metadata={}, weight_map={"a": "x.bin"})
    (folder / "x.bin").write_bytes(bomb)


def hidden_index(folder: Path, bomb: bytes) -> None:
    (folder / ".git").mkdir()
    (folder / ".git" / "weights.bin").write_bytes(bomb)
    edit(folder / ".git" / INDEX, metadata={}, weight_map={"a": ".git/weights.bin"})
    edit(folder / "config.json", transformers_weights=f".git/{INDEX}")


def linked(folder: Path, bomb: bytes) -> None:
    (folder / WEIGHTS).unlink()
    (folder.parent / "out.safetensors").write_bytes(bomb)
    (folder / WEIGHTS).symlink_to("../out.safetensors")


def put(path: Path, body: bytes) -> None:
    path.write_bytes(body)


OTHER_LAYOUT = "shard-00001-model-00001-of-00001.safetensors"
PICKLES: dict[str, Write] = {
    **{
        f"index names {name}": (lambda f, b, name=name: named_by_index(f, name, b))
        for name in (
            "weights.bin",
            "../out.bin",
            "../out.safetensors",
            "a.txt",
            "sub/x.safetensors",
        )
    },
    "index names an absolute path": lambda f, b: named_by_index(f, str(f.parent / "a.bin"), b),
    "config names an adapter": named_by_config,
    "nested config names it": lambda f, b: edit(
        f / "config.json", text_config={"transformers_weights": "adapter_model.bin"}
    ),
    "config names a hidden index": hidden_index,
    "an adapter beside the model": adapter,
    "pytorch_model.bin and a decoy": only_pickles,
    "an index of pickles and a decoy": pickled_index,
    "a pickle called safetensors": lambda f, b: put(f / WEIGHTS, b),
    "a link out of the folder": linked,
    "shards of another layout": lambda f, b: put(f / OTHER_LAYOUT, b),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", PICKLES)
def test_no_way_to_name_a_pickle_loads_it(
    case: str, way: Any, folder: Path, bare: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = folder.parent / "mark"
    bomb = pickle.dumps(Bomb(mark))
    PICKLES[case](folder, bomb)

    def reached(*given: object, **fields: object) -> None:
        pytest.fail("a pickle reached torch.load")

    monkeypatch.setattr(torch, "load", reached)
    with pytest.raises(SpecctlError):
        way(folder, bare)
    assert not mark.exists()


@pytest.mark.parametrize("way", [as_target, as_draft, as_assistant])
def test_a_whole_folder_is_loaded_by_every_way(way: Any, folder: Path, bare: Target) -> None:
    assert way(folder, bare) is not None


def test_the_mark_would_be_seen(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()


def test_transformers_itself_would_load_the_pickle_of_an_index(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is guarded against is there: should it ever vanish, so may the guard."""
    named_by_index(folder, "weights.bin", b"")
    reached: list[str] = []

    def load(path: str, **fields: object) -> None:
        reached.append(Path(path).name)
        raise ValueError("reached")

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(ValueError, match="reached"):
        AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, local_files_only=True)
    assert reached == ["weights.bin"]


def test_a_published_folder_of_pickles_is_not_imported(folder: Path) -> None:
    for case in ("index names weights.bin", "pytorch_model.bin and a decoy"):
        mark = folder.parent / "mark"
        if not (folder / WEIGHTS).exists():
            (folder / "decoy.safetensors").rename(folder / WEIGHTS)
        PICKLES[case](folder, pickle.dumps(Bomb(mark)))
        with pytest.raises(SpecctlError, match="pickle"):
            read_published(folder)
        assert not mark.exists()


def test_shards_of_an_index_and_a_pickle_beside_them_are_no_matter(
    make_model: Any, word_tokenizer: Any, tmp_path: Path
) -> None:
    make_model(num_layers=2, hidden=16, vocab=48).save_pretrained(tmp_path, max_shard_size="9KB")
    word_tokenizer.save_pretrained(tmp_path)
    assert len(weight_files(tmp_path)) > 1
    before = load_target(str(tmp_path), device="cpu").fingerprint
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))
    (tmp_path / "decoy.safetensors").write_bytes(b"no weights")
    assert load_target(str(tmp_path), device="cpu").fingerprint == before


@pytest.mark.parametrize("way", [as_target, as_draft])
def test_the_hub_caches_links_into_its_blobs_are_followed(
    way: Any, folder: Path, bare: Target
) -> None:
    repo = folder.parent / "models--some--model"
    snapshot, blobs = repo / "snapshots" / ("a" * 40), repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / f"{number:064}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:064}")
    assert way(snapshot, bare) is not None


def show_folder(folder: Path, bare: Target) -> object:
    del bare
    with open(os.devnull, "w") as quiet:
        return show(Console(quiet, quiet), str(folder))


READ_BY_NAME = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "tokenizer.model",
    "vocab.txt", "additional_chat_templates/other.jinja", "additional_chat_templates", WEIGHTS,
)  # fmt: skip


def link_out(folder: Path, name: str) -> None:
    """The file, or a text of ours where there is none, as a link out of the folder."""
    path, outside = folder / name, folder.parent / "outside"
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        path.rename(outside)
    elif path.suffix:
        outside.write_text("{}")
    else:
        outside.mkdir()
    path.symlink_to(outside)


@pytest.mark.parametrize(
    ("way", "name"),
    [
        (way, name)
        for way in (as_target, as_draft, as_assistant, show_folder)
        for name in READ_BY_NAME
        if (way, name) != (show_folder, WEIGHTS)  # it counts their bytes, and reads none
    ],
)
def test_no_file_that_is_read_is_a_link_out_of_the_folder(
    way: Any, name: str, folder: Path, bare: Target
) -> None:
    link_out(folder, name)
    with pytest.raises(SpecctlError, match=r"link out of its folder|a symbolic link"):
        way(folder, bare)


def test_links_within_the_folder_and_of_what_nobody_reads_are_let_be(
    folder: Path, bare: Target
) -> None:
    """A volume of Kubernetes links each name to a hidden folder beside it."""
    (folder / "..data").mkdir()
    (folder / "config.json").rename(folder / "..data" / "config.json")
    (folder / "config.json").symlink_to("..data/config.json")
    (folder / "picture.png").symlink_to("/etc/hostname")
    for way in (as_target, as_draft):
        assert way(folder, bare) is not None


@pytest.mark.parametrize("place", ["cache", "blobs", "another"])
def test_only_the_hubs_own_links_lead_out(place: str, folder: Path, bare: Target) -> None:
    """A folder can be called `snapshots` or `blobs` by anybody, and lie in an archive."""
    repo = folder.parent / ("cache" if place == "cache" else "models--some--model")
    snapshot, blobs = repo / "snapshots" / ("a" * 40), repo / "blobs"
    snapshot.mkdir(parents=True)
    if place == "blobs":
        (folder.parent / "elsewhere").mkdir()
        blobs.symlink_to(folder.parent / "elsewhere")
    elif place == "another":
        blobs = folder.parent / "models--another--model" / "blobs"
        blobs.mkdir(parents=True)
    else:
        blobs.mkdir()
    for path in sorted(folder.iterdir()):
        is_config = path.name == "config.json"
        path.rename(kept := (blobs if is_config else snapshot) / path.name)
        if is_config:
            (snapshot / path.name).symlink_to(kept)
    for way in (as_target, as_draft, show_folder):
        with pytest.raises(SpecctlError, match=r"link out of its folder|a symbolic link"):
            way(snapshot, bare)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.json", "vocab.txt"])
@pytest.mark.parametrize("way", [as_target, as_draft, show_folder])
def test_a_sparse_file_of_a_terabyte_is_not_read(
    name: str, way: Any, folder: Path, bare: Target
) -> None:
    with (folder / name).open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(IntegrityError, match="too long"):
        way(folder, bare)


DEEP = '{"a":' * 400 + "1" + "}" * 400
ABYSS = "[" * 100_000 + "]" * 100_000
SETTINGS = ("config.json", "tokenizer_config.json", "generation_config.json")


def write(name: str, text: str) -> Write:
    return lambda folder: put(folder / name, text.encode())


def config(**fields: Any) -> Write:
    return lambda folder: edit(folder / "config.json", **fields)


def pipe(name: str) -> Write:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


CODE = {"AutoModelForCausalLM": "evil.Evil"}
FOLDERS: dict[str, Write] = {
    **{f"{name} is an abyss": write(name, ABYSS) for name in SETTINGS},
    **{f"{name} is deep": write(name, DEEP) for name in SETTINGS},
    **{f"{name} is a pipe": pipe(name) for name in (*SETTINGS, "tokenizer.json", WEIGHTS)},
    "code in the text part": config(text_config={"auto_map": CODE}),
    "code in a list of parts": config(parts=[{"deep": [{"auto_map": CODE}]}]),
    "code of the generation": lambda f: edit(f / "generation_config.json", auto_map=CODE),
    "code of a processor": lambda f: edit(f / "processor_config.json", auto_map=CODE),
    "a kernel of the hub": config(attn_implementation="someone/kernel"),
    "a kernel of the hub for a part": config(_attn_implementation={"": "someone/kernel:run"}),
    **{
        f"{kind}, a billion layers": config(model_type=kind, **{key: 10**9})
        for kind, key in [
            ("llama", "num_hidden_layers"),
            ("qwen2", "num_hidden_layers"),
            ("gpt2", "n_layer"),
            ("xglm", "num_layers"),
            ("opt", "num_hidden_layers"),
        ]
    },
    "two thousand layers": config(num_hidden_layers=2000),
    "nine hundred layers": config(num_hidden_layers=900),
    "minus two layers": config(num_hidden_layers=-2),
    "no layers": config(num_hidden_layers=0),
    "a layer as a word": config(num_hidden_layers="2"),
    "half a layer": config(num_hidden_layers=1.5),
    "a layer that is true": config(num_hidden_layers=True),
    "no heads": config(num_attention_heads=0),
    "no width": config(hidden_size=0),
    "a huge width": config(hidden_size=10**12),
    "a huge vocabulary": config(vocab_size=10**15),
    "a rotation of words": config(rope_parameters={"rope_type": "llama3", "factor": "x"}),
    "an unknown rotation": config(rope_parameters={"rope_type": ["default"]}),
    "an activation that is a list": config(hidden_act=["silu"]),
    "a dtype that is no dtype": config(dtype="nn"),
    "a type that is a list": config(model_type=["llama"]),
    "a number of five thousand digits": write("config.json", '{"vocab_size": ' + "9" * 5000 + "}"),
}  # fmt: skip


@pytest.mark.parametrize("way", [as_target, as_draft])
@pytest.mark.parametrize("case", FOLDERS)
def test_an_absurd_folder_is_refused_in_a_moment(
    case: str, way: Any, folder: Path, bare: Target
) -> None:
    FOLDERS[case](folder)
    before = time.process_time()
    with pytest.raises(SpecctlError) as caught:
        way(folder, bare)
    assert time.process_time() - before < 1.0
    assert caught.value.do


def test_no_configuration_asks_for_memory_beside_its_weights() -> None:
    """Buffers are as large as a number in the configuration says."""
    shape: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 48}
    shape |= {"num_hidden_layers": 2, "intermediate_size": 32}
    weights = [(1 << 20,)] * 8
    check_size(AutoConfig.for_model("phi", **shape), weights, "config.json")
    huge = AutoConfig.for_model("phi", **shape, partial_rotary_factor=1e10)
    with pytest.raises(IntegrityError, match="beside the weights"):
        check_size(huge, weights, "config.json")


@pytest.mark.parametrize("text", [ABYSS, DEEP, "[]", ""], ids=["abyss", "deep", "list", "empty"])
def test_showing_such_a_folder_is_refused(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(SpecctlError):
        show(Console(), str(folder))


@pytest.mark.parametrize(
    "text", ["a: " + ABYSS, "[" * 5000, "a:\n" + "".join(" " * i + "- a:\n" for i in range(2000))]
)
def test_a_recipe_of_an_abyss_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text[:200_000])
    with pytest.raises(SpecctlError):
        load_recipe(str(tmp_path / "recipe.yaml"))


@pytest.mark.parametrize("case", [name for name in FOLDERS if "layers" in name])
def test_a_plan_refuses_it_without_building_it(case: str, folder: Path) -> None:
    if "nine hundred" in case:
        return  # nothing says that the weights are not there
    FOLDERS[case](folder)
    before = time.process_time()
    with pytest.raises(SpecctlError):
        target_shape(TargetPart(name=str(folder)))
    assert time.process_time() - before < 1.0


def test_forty_mutated_folders_load_or_are_refused(folder: Path, bare: Target) -> None:
    """None is a bug, none takes long."""
    whole = {name: (folder / name).read_bytes() for name in SETTINGS}
    draw, before, refused = random.Random(7), time.process_time(), 0
    for number in range(40):
        for name, text in whole.items():
            (folder / name).write_bytes(text)
        name = draw.choice(("config.json", *SETTINGS))
        body = json.loads(whole[name])
        mutated(body, draw)
        (folder / name).write_text(json.dumps(body))
        way = (as_target, as_draft)[number % 2]
        refused += is_refused(lambda way=way: way(folder, bare))
    assert 10 < refused < 40
    assert time.process_time() - before < 30


def test_every_reading_by_transformers_is_local_and_runs_no_code() -> None:
    """And models come through one door only."""
    doors = []
    rooms = [room for room in (ROOT / "src" / "specctl").iterdir() if room.is_dir()]
    for path in sorted(path for room in rooms for path in (ROOT / room.name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr != "from_pretrained":
                continue
            owner = ast.unparse(node.func.value)
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            assert given.get("local_files_only") == "True", where
            if owner == "GenerationConfig":  # plain values, of which no code is ever made
                continue
            assert given.get("trust_remote_code") == "False", where
            if owner not in ("AutoConfig", "processors") and "Tokenizer" not in owner:
                assert given.get("use_safetensors") == "True", where
                doors.append(str(path.relative_to(ROOT)))
    engine = "export/engines/hosts/answer_transformers.py"  # runs in an environment of its own
    layer = "models/hf/foreign_layer.py"  # reads no folder: the tensors are given
    assert doors == [engine, layer, "runtime/target/folders/checkpoint_folder.py"]
