"""docs/contributing.md: what it shows is built from that page, beside the product, and keeps the
contract; one module more is enough for every kind of method."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
SHOWN = {
    match[1]: match[2]
    for match in re.finditer(r"^```\w+\n# (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
}
# The least that each of the other kinds can be.
OTHERS = {
    "runtime/policies/twin.py": """
from dataclasses import dataclass
from specctl.runtime.policies.base import PolicyEntry
from specctl.runtime.policies.merged_beams import MergedBeams

@dataclass(frozen=True, slots=True)
class Twin(MergedBeams):
    mood: float = 0.5
    names: tuple[str, ...] = ()

POLICY = PolicyEntry("twin", "two of them", "", Twin)
""",
    "runtime/stops/at_once.py": """
from dataclasses import dataclass
import torch
from specctl.core.plugins import Plugin
from specctl.runtime.stops.base import StopRule

@dataclass(slots=True)
class AtOnce(StopRule):
    def stops(self, step):
        return torch.ones_like(step.row_B, dtype=torch.bool)

STOP = Plugin("at-once", "after one token", "", AtOnce)
""",
    "runtime/controllers/never.py": """
from specctl.core.plugins import Plugin
from specctl.runtime.controllers.base import Controller

class Never(Controller):
    def order(self, contexts):
        return (self.off,)

CONTROLLER = Plugin("never", "plain decoding", "", Never)
""",
    "runtime/verify/echo.py": """
from specctl.runtime.verify import scalar
from specctl.runtime.verify.chain import chain
from specctl.runtime.verify.walk import SAMPLED, Rule

PAPER = "https://arxiv.org/abs/2211.17192"
RULE = Rule("echo", "chain again", PAPER, chain, scalar.chain, SAMPLED, True)
""",
    "runtime/batching/halves.py": """
from specctl.runtime.batching.base import BatchingEntry
from specctl.runtime.batching.fixed import Fixed

BATCHING = BatchingEntry("halves", "half the depth", "", lambda depth, costs: Fixed(depth // 2))
""",
    "drafters/losses/squared.py": """
from specctl.drafters.losses.divergences import Loss

def squared(of):
    return (of.log_r_NK.exp() - of.log_q_NK.exp()).square().sum(-1)

LOSS = Loss("squared", "sum of squares", "", squared)
""",
    "train/vocab/selectors/none.py": """
from specctl.train.vocab.selectors.base import Selector

SELECTOR = Selector(name="none", summary="nothing", paper="", count=lambda evidence: iter(()))
""",
    "export/formats/nothing.py": """
from specctl.export.formats import Format

FORMAT = Format(name="nothing", summary="none", families=(), write=print, check=print, serve=print)
""",
    "export/imports/nothing.py": """
from specctl.export.imports import Importer

IMPORTER = Importer("nothing", "", lambda config: False, print)
""",
}
# One module of each kind that does not import; with them all else works, and they are named.
BROKEN = {
    "drafters/broken.py": 'FAMILY = Family(name="broken", options=None, trainable=False)',
    "runtime/policies/broken.py": 'POLICY = PolicyEntry("broken", "", "", Broken)',
    "runtime/stops/broken.py": 'STOP = Plugin("broken", "", "", Broken)',
    "runtime/controllers/broken.py": 'CONTROLLER = Plugin("broken", "", "", Broken)',
    "runtime/verify/broken.py": 'RULE = Rule("broken", "", "", broken)',
    "runtime/batching/broken.py": 'BATCHING = BatchingEntry("broken", "", "", Broken)',
    "drafters/losses/broken.py": 'LOSS = Loss("broken", "", "", broken)',
    "train/vocab/selectors/broken.py": 'SELECTOR = Selector(name="broken")',
    "export/formats/broken.py": 'FORMAT = Format(name="broken")',
    "export/imports/broken.py": 'IMPORTER = Importer("broken", "", broken)',
    "export/engines/broken.py": 'ENGINE = ServingEngine(name="broken")',
    "server/tools/broken.py": 'TOOL_FORMAT = ToolFormat(name="broken")',
}
WITHOUT_THEM = """
from specctl.cli.commands.doctor import _methods
from specctl.cli.main import main

few = " --max-new-tokens 4 x"
for words in ("generate --draft prompt-lookup" + few, "recipes rules", "recipes ls --all"):
    assert main(words.split()) == 0, words
for words in ("broken", "prompt-lookup --rule broken", "auto --set serve.controller=broken"):
    assert main(f"generate --draft {words}{few}".split()) == 4, words
named = [found for found in _methods() if found.state == "note"]
print(len(named))
"""
KNOWN = """
from specctl.core.errors import RecipeError
from specctl.drafters.losses.head_losses import LossOptions
from specctl.export.formats import find_format
from specctl.export.imports import importers
from specctl.recipes.load import load_recipe
from specctl.runtime.batching import make_batching
from specctl.runtime.policies import TREES, make_policy
from specctl.runtime.policies.chain import Chain
from specctl.runtime.policies.switch import Switch
from specctl.runtime.proof.cases import proof_cases
from specctl.runtime.proof.enumerate import enumerate_case
from specctl.train.vocab.selectors import selector

assert find_format("specctl", "medusa").name == "specctl" and "nothing" in importers()
assert make_batching("halves", 6).to_json() == {"batching": "fixed", "length": 3}
assert selector("none").name == "none" and LossOptions("squared") and "twin" in TREES
assert Chain(stop="at-once").stopper and Switch(controller="never").length
assert enumerate_case(next(c for c in proof_cases("quick") if c.rule == "echo")).error < 1e-12
plain = load_recipe("eagle3", ["serve.policy=twin"])
assert not {"mood", "names"} & set(plain.to_json()["serve"]), "digests stay"
sets = ["serve.policy=twin", "serve.mood=0.25", "serve.names=[a]", "serve.rule=echo"]
named = load_recipe("eagle3", sets)
assert named.to_json()["serve"]["names"] == ["a"] and named.digest != plain.digest
policy = make_policy(named.serve.model_dump())
assert (policy.mood, policy.names, policy.beam) == (0.25, ("a",), 5)
for wrong in ("mood=true", "mood=much", "names=3", "moot=1"):
    try:
        load_recipe("eagle3", ["serve.policy=twin", f"serve.{wrong}"])
    except RecipeError as error:
        assert "twin" not in error.what, error
    else:
        raise AssertionError(wrong)
"""
RUN = """
from specctl.cli.main import main

for words in {}:
    assert main(words.split()) == 0, words
    print("\\nEND", flush=True)
"""
FREE = "generate --draft auto --set serve.controller=never --max-new-tokens 8 x"
COMMANDS = RUN.format(["recipes schema", "recipes rules", "serve --help", FREE])
WITH_IT = "generate --draft successor --max-new-tokens 8 x --json"
RECIPES = RUN.format(["recipes ls --all", "recipes validate eagle-tv", WITH_IT])


def beside(folder: Path, files: Mapping[str, str]) -> Path:
    """The product in another folder, as links, and these files beside what they stand with."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    for name in ("src/specctl/x", *files):
        for parent in reversed(Path(name).parents[:-1]):
            unlink_into(folder / parent, folder)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def unlink_into(own: Path, folder: Path) -> None:
    """A folder that was a link becomes one of its own that holds links; rooms lead back here."""
    if not own.is_symlink():
        return
    there = own.resolve()
    own.unlink()
    own.mkdir()
    for entry in there.iterdir():
        if (
            entry.name == "__pycache__"
        ):  # what is compiled is not compiled again; new files stay here
            (own / entry.name).mkdir()
            for file in entry.iterdir():
                (own / entry.name / file.name).symlink_to(file)
        else:
            (own / entry.name).symlink_to(folder / entry.name if entry.is_symlink() else entry)


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder / "src"),
        "HF_HUB_OFFLINE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # seconds, and none is needed
    }
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the families of the page."""
    return beside(tmp_path_factory.mktemp("product"), SHOWN)


def test_a_method_is_three_files_and_none_is_edited() -> None:
    assert len(SHOWN) == 6
    assert not [name for name in [*SHOWN, *OTHERS] if (ROOT / name).exists()]


def test_the_families_of_the_page_keep_the_contract(product: Path) -> None:
    own = [name for name in SHOWN if name.startswith("tests/")]
    words = ("-q", "-p", "no:cacheprovider", "-k", "successor or eagle-tv or newest or term_is")
    done = run(product, "-m", "pytest", *words, "tests/drafters/test_contract.py", *own)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout[-500:]
    assert int(passed[1]) >= 32


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """What commands do and say with the families of the page, one module of each other kind and
    one broken module of each, in one process: to start it takes longer than they do."""
    fault = "raise RuntimeError('made to fail')\n"
    broken = {name: fault + entry + "\n" for name, entry in BROKEN.items()}
    everything = beside(tmp_path_factory.mktemp("everything"), {**SHOWN, **OTHERS, **broken})
    return run(everything, "-c", KNOWN + COMMANDS + RECIPES + WITHOUT_THEM)


@pytest.fixture(scope="module")
def shown(done: subprocess.CompletedProcess[str]) -> list[str]:
    return done.stdout.split("\nEND\n")


def test_their_recipes_are_listed_checked_and_used(shown: list[str]) -> None:
    listed, validated, used, _ = shown[-4:]
    assert "successor" in listed
    assert "valid (eagle-tv for tiny)" in validated
    assert '"successor"' in used


def test_code_of_the_page_is_as_tidy_as_the_product(product: Path) -> None:
    pytest.importorskip("ruff")
    names = [name for name in SHOWN if name.endswith(".py")]
    run(product, "-m", "ruff", "check", "--no-cache", "--config", "pyproject.toml", *names)
    run(product, "-m", "ruff", "format", "--no-cache", "--check", *names)


def test_one_module_is_enough_for_every_other_kind(shown: list[str]) -> None:
    schema, rules, serve, _ = shown[:4]
    for name in ("twin", "mood", "at-once", "never", "echo", "nothing"):
        assert f'"{name}"' in schema, name
    assert "echo" in rules
    assert "halves" in serve


def test_a_broken_module_stops_only_those_who_use_it(
    done: subprocess.CompletedProcess[str],
) -> None:
    said = done.stderr
    assert done.stdout.splitlines()[-1] == str(len(BROKEN))
    assert "this is a bug" not in said
    assert "left out: rule broken cannot be loaded" in said
    for kind, module in (("family", "drafters"), ("rule", "runtime.verify")):
        wanted = f"{kind} broken cannot be loaded: module specctl.{module}.broken is broken"
        assert wanted in " ".join(said.split())
    assert "RuntimeError: made to fail" in said
    assert "broken.py:1" in said
