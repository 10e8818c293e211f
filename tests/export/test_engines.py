"""What the formats of serving engines share: layer ids, vocabulary tables, commands."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.cli.commands.export import FORMATS
from specctl.core.errors import GateError, IncompatibleError
from specctl.core.vocab import VocabMap
from specctl.export.formats import FOLDER, export, filled, formats
from specctl.export.layouts.engines import (
    ascending,
    check_vocab,
    hidden_state_ids,
    layer_ids,
    sglang_command,
    taps_of_layer_ids,
    vllm_command,
    vocab_tensors,
)
from specctl.export.package.manifest import check_files
from specctl.runtime.target.target import Target

KEPT = VocabMap(torch.tensor([0, 2, 3, 7]), 9)


def test_the_command_line_knows_every_format_without_importing_torch() -> None:
    assert set(FORMATS) == set(formats())
    assert list(FORMATS) == sorted(FORMATS)


def test_engines_count_hidden_states_or_layers() -> None:
    taps = (2, 16, 29)
    assert hidden_state_ids(taps, 32) == [2, 16, 29]
    assert layer_ids(taps, 32) == [1, 15, 28]
    assert taps_of_layer_ids(layer_ids(taps, 32)) == [2, 16, 29]


@pytest.mark.parametrize(
    ("ids", "taps", "expected"),
    [
        (hidden_state_ids, (1, 2, 4), "from 0 to 3"),
        (hidden_state_ids, (1, 1, 2), "distinct"),
        (layer_ids, (0, 1, 2), "from 1 to 3"),
        (layer_ids, (1, 2, 4), "from 1 to 3"),
    ],
)
def test_states_that_an_engine_does_not_hand_out_are_refused(
    ids: Any, taps: tuple[int, ...], expected: str
) -> None:
    assert hidden_state_ids((0, 3), 4) == [0, 3]
    with pytest.raises(IncompatibleError, match=expected):
        ids(taps, 4)


def test_features_come_in_the_order_of_the_layers() -> None:
    assert ascending((5, 2, 4)) == [1, 2, 0]


def test_vocabulary_tables_give_the_target_id_of_every_row() -> None:
    tensors = vocab_tensors(KEPT)
    assert tensors["d2t"].tolist() == [0, 1, 1, 4]
    assert check_vocab(tensors, 4, 9).tolist() == [0, 2, 3, 7]
    assert vocab_tensors(None) == {}
    assert check_vocab({}, 9, 9).tolist() == list(range(9))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"d2t": KEPT.ids_K}, "no table of offsets"),
        ({"d2t": KEPT.d2t().int()}, "torch.int32"),
        ({"d2t": KEPT.d2t()[:3]}, r"d2t \(3,\)"),
        ({"t2d": ~KEPT.t2d()}, "other ids"),
        ({"t2d": KEPT.t2d().int()}, "t2d torch.int32"),
        ({"t2d": None}, "t2d missing"),
    ],
)
def test_wrong_vocabulary_tables_are_found(change: dict[str, Any], found: str) -> None:
    tensors = {n: t for n, t in (vocab_tensors(KEPT) | change).items() if t is not None}
    with pytest.raises(GateError, match=found):
        check_vocab(tensors, 4, 9)


def test_a_trimmed_head_without_tables_is_found() -> None:
    with pytest.raises(GateError, match="4 head rows"):
        check_vocab({}, 4, 9)


def test_commands_take_paths_with_blanks() -> None:
    line = filled(vllm_command("eagle3", 3, FOLDER), "my drafts/d", "/models/big one")
    words = shlex.split(line)
    assert words[:4] == ["vllm", "serve", "/models/big one", "--speculative-config"]
    how = json.loads(words[4])
    assert how == {"method": "eagle3", "model": "my drafts/d", "num_speculative_tokens": 3}
    words = shlex.split(filled(sglang_command("EAGLE3", 3), "d", None))
    assert words[words.index("--speculative-num-draft-tokens") + 1] == "4"
    assert words[words.index("--model-path") + 1] == "TARGET_FOLDER"


def test_the_card_of_an_export_says_how_it_is_served(
    package: Path, plain_target: Target, tmp_path: Path
) -> None:
    manifest = export(package, "specctl", tmp_path / "copy", plain_target)
    assert manifest.served_by == ("specctl serve --target some/target --draft THIS_FOLDER",)
    assert check_files(tmp_path / "copy").served_by == manifest.served_by
    assert check_files(package).served_by == ()
