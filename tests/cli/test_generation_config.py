"""sample.generation_config: what a target's own file says is reported once, or followed."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specctl.cli.app.console import Console
from specctl.cli.commands.bench import _samplings
from specctl.cli.commands.serve import _defaults
from specctl.cli.options.sampling import SamplingFlags
from specctl.core.errors import Exit, IntegrityError
from specctl.runtime.sampling.generation_config import FILE, Suggested
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

ASKED = Suggested(True, 0.6, 20, 0.9)
NOTICE = (
    "generation_config.json of tiny asks for temperature 0.6, top_k 20, top_p 0.9; used: greedy "
    "(--set sample.generation_config=model follows it, none is silent)\n"
)


@pytest.fixture
def asking(tiny_target: Target) -> Target:
    return replace(tiny_target, suggested=ASKED)


def settled(target: Target, **flags: Any) -> tuple[Sampling, str, list[str]]:
    """The sampling that flags stand for, what was said, and the warnings."""
    console = Console(io.StringIO(), io.StringIO())
    used = SamplingFlags(**flags).settle(console, target)
    assert isinstance(console.stderr, io.StringIO)
    return used, console.stderr.getvalue(), console.warnings


def test_what_is_ignored_is_said_with_what_is_used(asking: Target) -> None:
    used, said, warnings = settled(asking)
    assert (used, said, warnings) == (Sampling(), NOTICE, [])
    _, said, _ = settled(asking, temperature=0.6, top_p=0.9)
    assert "asks for top_k 20; used: temperature 0.6, top_p 0.9 (" in said


def test_nothing_is_said_where_nothing_is_ignored(asking: Target, tiny_target: Target) -> None:
    assert settled(asking, temperature=0.6, top_p=0.9, top_k=20)[1] == ""
    assert settled(asking, generation_config="none")[:2] == (Sampling(), "")
    assert settled(replace(asking, suggested=Suggested(False, 0.7)))[1] == ""
    assert settled(tiny_target)[1] == ""
    assert settled(replace(asking, suggested=None))[1] == ""


def test_the_file_is_followed_where_no_flag_says_otherwise(asking: Target) -> None:
    used, said, _ = settled(asking, generation_config="model")
    assert used == Sampling(temperature=0.6, top_k=20, top_p=0.9)
    assert "temperature 0.6, top_k 20, top_p 0.9" in said
    used, _, _ = settled(asking, generation_config="model", temperature=0.0, top_p=1.0, seed=3)
    assert used == Sampling(temperature=0.0, top_k=20, top_p=1.0, seed=3)


def test_what_cannot_be_followed_is_told_or_refused(asking: Target) -> None:
    beams = replace(asking, suggested=replace(ASKED, others=("num_beams 4",)))
    assert "num_beams 4" in settled(beams)[1]
    _, _, warnings = settled(beams, generation_config="model")
    assert "num_beams 4" in warnings[0]
    assert "not followed" in warnings[0]
    wrong = replace(asking, suggested=Suggested(True, 1.0, wrong=('top_p "x"',)))
    assert 'top_p "x"' in settled(wrong)[2][0]
    with pytest.raises(IntegrityError, match='found: top_p "x"'):
        settled(wrong, generation_config="model")
    _, _, warnings = settled(replace(asking, suggested=None), generation_config="model")
    assert "nothing to follow" in warnings[0]


def test_the_server_takes_it_as_the_defaults_of_requests(asking: Target) -> None:
    console = Console(io.StringIO(), io.StringIO())
    assert _defaults(console, asking, None) == Sampling(temperature=1.0)
    assert _defaults(console, asking, "model") == Sampling(temperature=0.6, top_k=20, top_p=0.9)
    silent = replace(asking, suggested=Suggested(top_p=0.5))
    assert _defaults(console, silent, "model") == Sampling(temperature=1.0, top_p=0.5)
    assert isinstance(console.stderr, io.StringIO)
    said = console.stderr.getvalue()
    assert "used: temperature 1, where a request does not say it (" in said


def test_bench_measures_it(asking: Target) -> None:
    console = Console(io.StringIO(), io.StringIO())
    assert _samplings(console, asking, None, None) == [Sampling(), Sampling(temperature=0.8)]
    followed = Sampling(temperature=0.6, top_k=20, top_p=0.9)
    assert _samplings(console, asking, "model", None) == [followed]
    heats = _samplings(console, asking, "model", [0.0, 0.3])
    assert heats == [replace(followed, temperature=heat) for heat in (0.0, 0.3)]
    assert _samplings(console, asking, None, None, (0.0, 1.0))[1].temperature == 1.0


@pytest.mark.parametrize("command", ["generate x", "chat", "serve", "bench"])
def test_another_word_is_refused_before_anything_loads(run: Any, command: str) -> None:
    ran = run(
        *command.split(), "--target", "no-such-target", "--set", "sample.generation_config=modle"
    )
    assert ran.code == Exit.RECIPE
    assert "--set sample.generation_config=model" in ran.err


def test_a_folder_with_the_file_from_end_to_end(run: Any, tmp_path: Path) -> None:
    tiny = Path(__file__).parents[2] / "recipes" / "tiny"
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)  # a link out of the folder is refused
    (tmp_path / FILE).write_text('{"do_sample": true, "temperature": 1.3, "top_k": 50}')
    words = ("generate", "-t", tmp_path, "--max-new-tokens", "8", "import os")
    plain = run(*words)
    assert plain.err.count("asks for temperature 1.3, top_k 50; used: greedy") == 1
    asked = run(*words, "--set", "sample.generation_config=model")
    assert asked.out == run(*words, "--temperature", "1.3", "--set", "sample.top_k=50").out
    assert asked.out != plain.out
    (tmp_path / FILE).write_text("{nonsense")
    broken = run(*words)
    assert broken.code == Exit.INTEGRITY
    assert "generation_config.json cannot be read" in broken.err
