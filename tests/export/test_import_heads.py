"""EAGLE-3 folders that leave out what the target has, or what config.json repeats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.drafters.nets.heads import head_rows
from specctl.export.package.folder import load_drafter
from specctl.runtime.target.target import Target
from specctl_testing.export.engine_cases import KEPT
from specctl_testing.export.import_cases import Config, Tensors, same_tensors, taken

HEAD, ROWS, TIED = "lm_head.weight", "draft_vocab_size", "tie_word_embeddings"


def headless(config: Config, tensors: Tensors) -> None:
    del tensors[HEAD]


def sizeless(config: Config, tensors: Tensors) -> None:
    del tensors[HEAD], config[ROWS]


def tied(config: Config, tensors: Tensors) -> None:
    del tensors[HEAD]
    config[TIED] = True


@pytest.mark.parametrize("kept", [None, KEPT], ids=["whole", "trimmed"])
@pytest.mark.parametrize(
    ("to", "change"),
    [("sglang", headless), ("sglang", sizeless), ("sglang", tied), ("speculators", headless)],
    ids=["no head", "no size", "tied", "speculators"],
)
def test_a_folder_without_an_lm_head_drafts_with_the_target_s_rows(
    to: str, change: Any, kept: Any, target: Target, publish: Any, tmp_path: Path
) -> None:
    _, folder = publish(to, change, kept=kept)
    report = taken(folder, target, tmp_path / "package")
    assert any("no LM head" in note for note in report.notes)
    drafter = load_drafter(tmp_path / "package", target, allow=["eos"])
    borrowed = target.borrowed()
    rows_VD = borrowed.embedding_VD if change is tied else borrowed.head_VD
    rows_KD = head_rows(borrowed, drafter.vocab)
    if change is tied:
        rows_KD = rows_VD if drafter.vocab is None else rows_VD[drafter.vocab.ids_K]
    assert torch.equal(drafter.tensors()[HEAD], rows_KD)


def test_a_head_beside_tied_embeddings_is_read_as_it_was_trained(
    target: Target, publish: Any, tmp_path: Path
) -> None:
    drafter, folder = publish("sglang", lambda config, _: config.update({TIED: True}))
    report = taken(folder, target, tmp_path / "package")
    assert any("tie_word_embeddings" in note for note in report.notes)
    assert same_tensors(load_drafter(tmp_path / "package", target), drafter)


def test_a_plain_llama_s_name_without_a_size_is_told_by_its_norm(
    target: Target, publish: Any, tmp_path: Path
) -> None:
    def change(config: Config, tensors: Tensors) -> None:
        config["architectures"] = ["LlamaForCausalLM"]
        del config[ROWS]

    drafter, folder = publish("sglang", change)
    assert taken(folder, target, tmp_path / "package").format == "flat-eagle3"
    assert same_tensors(load_drafter(tmp_path / "package", target), drafter)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "model."])
def test_what_a_wrapper_puts_before_names_is_left_out(
    prefix: str, target: Target, publish: Any, tmp_path: Path
) -> None:
    def change(config: Config, tensors: Tensors) -> None:
        named = {prefix + name: tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(named)

    drafter, folder = publish("sglang", change)
    report = taken(folder, target, tmp_path / "package")
    assert any("of a wrapper" in note for note in report.notes) == (prefix != "model.")
    assert same_tensors(load_drafter(tmp_path / "package", target), drafter)


def test_folders_and_other_files_beside_a_head_are_left_alone(
    target: Target, publish: Any, tmp_path: Path
) -> None:
    drafter, folder = publish("sglang")
    for name in ("original/params.json", "runs/1/events", ".git/config", ".cache/x"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("{}")
    for name in ("pytorch_model.bin", "training_args.bin", "LICENSE", ".gitattributes"):
        (folder / name).write_bytes(b"not read")
    taken(folder, target, tmp_path / "package")
    assert same_tensors(load_drafter(tmp_path / "package", target), drafter)
