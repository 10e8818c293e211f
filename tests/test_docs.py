"""README and docs: every command is a command, cheap ones run, long ones say where they are run,
every Python example runs, every link leads somewhere."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from specctl.api.verify import check_level
from specctl.recipes.files import recipe_names
from specctl.recipes.load import load_recipe
from specctl_testing.cli import commands

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
LONGEST = 800  # lines of a page that are written by hand: more than that nobody reads

# Shown in documents, too long to run here. Each prefix names what runs it instead.
PROVEN_ELSEWHERE = {
    "make quickstart": "the release checklist, from a fresh clone",
    "make test": "CI (it is this very suite)",
    "make check": "CI",
    "make proof": "benchmarks/, before a release",
    "source .venv/bin/activate": "the shell",
    "accelerate launch": "several machines; its words are taken apart below",
    "torchrun": "several machines; its words are taken apart below",
    "sbatch": "tests/cli/test_slurm.py, on the script that it is given",
    "specctl runs": "tests/cli/test_runs.py, on runs made there",
    "specctl quickstart": "make quickstart",
    "specctl plan --recipe eagle3 --target tiny --rehearse": "tests/cli/test_rehearse.py, small",
    "specctl pretrain": "made recipes/tiny; tests/train/test_pretrain.py runs it small",
    "specctl recipes write": "tests/cli/test_deriving.py, of a known pace",
    "specctl regenerate --target qwen3-8b": "tests/cli/test_regenerate.py, small",
    "specctl train-stop": "tests/train/test_stop_rules.py, small",
    "specctl train-draft": "tests/cli/test_commands.py, small",
    "specctl datastore": "tests/drafters, small; draft-verify by benchmarks/self_speculation.py",
    "specctl distill": "tests/cli/test_commands.py, small",
    "specctl vocab-trim": "tests/cli/test_commands.py, small",
    "specctl prune": "tests/cli/test_prune.py, small",
    "specctl verify": "tests/runtime/proof/test_prove.py, small",
    "specctl bench": "tests/cli/test_commands.py, small",
    "specctl export": "tests/cli/test_commands.py",
    "specctl import": "tests/export/test_import.py, on heads published there",
    "specctl show runs/": "tests/cli/test_commands.py, on a run made there",
    "specctl generate --draft runs/": "tests/cli/test_commands.py",
    "specctl generate --draft SOME/": "tests/drafters/test_short_context.py, small",
    "specctl generate runs/": "tests/cli/test_words.py, and with --draft in test_commands.py",
    "specctl generate --target SmolLM2": "make real (tests/real/test_first_minutes.py)",
    "specctl generate --target HuggingFaceTB/": "the same, from a hub's cache made there",
    "specctl show SmolLM2": "make real (tests/real/test_first_minutes.py)",
    "specctl generate --target target-gguf": "tests/runtime/target/test_gguf_target.py",
    "specctl show target-gguf": "tests/cli/test_show_gguf.py",
    "specctl generate --target runs/": "tests/cli/test_joint.py, on a target changed there",
    "specctl adapt --draft runs/": "tests/cli/test_adapt.py",
    "specctl chat --target tiny --draft auto": "tests/cli/test_chat.py, at a terminal",
    "specctl serve": "tests/cli/test_serve.py, and benchmarks/proof_page.py",
    "curl -s": "tests/cli/test_serve_docs.py, against a server",
    "python3 -c": "any Python; the file of keys that it makes is read by tests/runtime",
    "chmod 600 keys.txt": "the shell",
    "specctl plan --scaling": "tests/cli/test_scaling.py",
    "specctl plan --target llama3-8b": "tests/cli/test_plan_gpus.py",
    "specctl plan --target qwen3-8b": "tests/cli/test_plan_gpus.py, for another target",
    "specctl plan --recipe llama3-8b": "tests/cli/test_plan_gpus.py",
}


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: str
    language: str
    text: str


def _name(page: Path) -> str:
    """As it is called in the messages of tests: pages of several folders may have one name."""
    inside = page.is_relative_to(DOCS)
    return str(page.relative_to(DOCS)) if inside else page.name


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield Block(_name(page), match[1], match[2])


def shown_commands(block: Block) -> Iterator[str]:
    """Commands of a block: in a console, the lines after $; in a shell script, every line."""
    lines = re.sub(r"\\\n\s*", "", block.text).splitlines()
    for line in lines:
        if block.language == "console" and line.startswith("$ "):
            yield line[2:].strip()
        elif block.language == "sh" and line.strip() and not line.startswith("#"):
            yield re.sub(r"\s{2,}#.*", "", line).strip()


ALL = [
    (block.page, command)
    for page in PAGES
    for block in blocks(page)
    if block.language in ("console", "sh")
    for command in shown_commands(block)
]
YAML = {  # files that the documents show, by the name in their first line
    match[1]: block.text
    for page in PAGES
    for block in blocks(page)
    if block.language == "yaml" and (match := re.match(r"# ([\w-]+\.yaml)\n", block.text))
}
PROGRAM = sorted({(page, command) for page, command in ALL if "specctl " in command})


def is_cheap(command: str) -> bool:
    return not any(command.startswith(prefix) for prefix in PROVEN_ELSEWHERE)


@pytest.mark.parametrize(("page", "command"), PROGRAM)
def test_every_command_of_ours_is_understood(page: str, command: str) -> None:
    words = launched(shlex.split(command.rpartition("| ")[2], comments=True))
    assert words[0] == "specctl", f"{page}: {command}"
    context = commands.parsed(words[1:])
    assert not isinstance(context, str), context
    if context is not None:
        check_recipe(context)
    if words[1] == "verify" and "--level" in words:
        check_level(words[words.index("--level") + 1])


SHOWN_ONLY = sorted(
    {  # in blocks that nothing runs (as long ones, or ones of other machines), and in sentences
        (_name(page), " ".join(found.split()))
        for page in PAGES
        for found in [
            *re.findall(
                r"`(specctl [^`]+)`",
                re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S),
            ),
            *(
                re.sub(r"\s{2,}#.*", "", line)
                for block in blocks(page)
                if block.language not in ("console", "sh")
                for line in re.sub(r"\\\n\s*", "", block.text).splitlines()
                if line.startswith("specctl ")
            ),
        ]
    }
)
# A sentence may name a command, or one of its flags, and leave the rest to the reader.
UNFINISHED = ("Missing parameter", "requires an argument", "requires 1 argument")


@pytest.mark.parametrize(("page", "command"), SHOWN_ONLY)
def test_commands_that_nothing_runs_are_understood_as_well(page: str, command: str) -> None:
    """Flags exist, values are of their kind, keys of `--set` are the command's or the recipe's."""
    words = shlex.split(command, comments=True)[1:]
    if {"--install-completion", "--version"} & set(words):
        return  # of the program itself
    found = commands.parsed(words)
    if isinstance(found, str):
        assert any(part in found for part in UNFINISHED), f"{page}: {command}: {found}"
    elif found is not None:
        check_recipe(found)


def check_recipe(context: Any) -> None:
    """A shipped recipe takes the changes that a command line makes to it."""
    given = {p.opts[0]: context.params.get(p.name) for p in context.command.params if p.opts}
    name, changes = given.get("--recipe"), [*(given.get("--set") or ())]
    if select := given.get("--select"):  # a flag that other keys go with
        changes.append(f"train.select={select}")
    if name in recipe_names() and context.info_name != "pretrain":
        load_recipe(str(name), changes)


def launched(words: list[str]) -> list[str]:
    """What a launcher starts, as the launcher's own parser takes it apart; other words as are."""
    if words[:2] == ["accelerate", "launch"]:
        from accelerate.commands.launch import launch_command_parser

        parsed = launch_command_parser().parse_args(words[2:])
        assert (ROOT / parsed.config_file).is_file()
    elif words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        parsed = get_args_parser().parse_args(words[1:])
    else:
        return words
    assert parsed.module, "started with -m"
    return [parsed.training_script, *parsed.training_script_args]


@pytest.mark.parametrize("command", sorted({c for _, c in ALL if is_cheap(c)}))
def test_cheap_commands_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a folder of its own, with the files that the documents speak of."""
    from specctl.cli.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for file in ("prompts.txt", "README.md"):
        (tmp_path / file).write_text("import os\nimport sys\n")
    if "my-eagle3.yaml" in command and " cp " not in command:
        (tmp_path / "my-eagle3.yaml").write_text((ROOT / "recipes" / "eagle3.yaml").read_text())
    for name, text in YAML.items():
        if name in command:
            (tmp_path / name).write_text(text)
    feed, _, shown = command.rpartition("| ")
    words = shlex.split(shown, comments=True)[1:]
    if words[0] == "generate":
        words += ["--max-new-tokens", "8"]
    monkeypatch.setattr(sys, "argv", ["specctl", *words])
    if feed:
        import io

        monkeypatch.setattr(sys, "stdin", io.StringIO(shlex.split(feed)[1] + "\n"))
    fits = [0, 6] if words[0] == "plan" else [0]  # 6: this machine is too small for the target
    code, told = main(words), capfd.readouterr().err
    assert code in fits, told
    assert code == 0 or "does not fit here" in told


def test_most_kinds_of_command_really_run() -> None:
    cheap = {c.rpartition("| ")[2].split()[1] for _, c in ALL if is_cheap(c)}
    assert {"generate", "recipes", "doctor", "plan"} <= cheap


@pytest.mark.parametrize("prefix", list(PROVEN_ELSEWHERE))
def test_nothing_is_excused_that_is_not_shown(prefix: str) -> None:
    recipes = [p.read_text().splitlines()[0][2:] for p in (ROOT / "recipes").glob("*.yaml")]
    texts = [page.read_text() for page in PAGES]
    assert any(prefix in text for text in [*texts, *recipes]), f"{prefix} is shown nowhere"


@pytest.mark.parametrize("page", ["README.md", "docs/python-api.md"])
def test_python_examples_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of their own, with the embedded target where the documents say."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    lines = (json.dumps({"text": f"def area_{n}(width, height):\n" * 4}) for n in range(12))
    (tmp_path / "texts.jsonl").write_text("\n".join(lines) + "\n")
    scope: dict[str, object] = {}
    found = [b for b in blocks(ROOT / page) if b.language == "python"]
    assert found
    for block in found:
        exec(compile(block.text, f"{page} example", "exec"), scope)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    """Files and headings, within the repository; nothing is fetched."""
    text = _without_code(page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(<?([^)>\s]+)>?\)", text):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if DOCS / "reference" in file.parents:
            continue  # made of the code when the site is built
        assert file.exists(), f"{page.name} links to {target}: no such file"
        if anchor:
            assert anchor in _anchors(file), f"{page.name} links to {target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_no_page_is_too_long(page: Path) -> None:
    """What `make docs-tables` writes below its mark is looked up, not read."""
    by_hand = page.read_text(encoding="utf-8").partition("<!-- Below this line everything")[0]
    assert len(by_hand.splitlines()) <= LONGEST, f"{_name(page)}: make pages by subject of it"


def _without_code(text: str) -> str:
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def _anchors(page: Path) -> set[str]:
    """The names that GitHub and the site give to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ +(.+?) *$", text, flags=re.MULTILINE)
    shown = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title)).strip("-") for title in shown}


def test_a_heading_that_is_not_there_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `title`, twice\n```\n# no heading\n```\n[here](#a-title-twice)")
    assert _anchors(page) == {"a-title-twice"}
    test_links_lead_somewhere(page)
    page.write_text("# A title\n[there](page.md#elsewhere)")
    with pytest.raises(AssertionError, match="no such heading"):
        test_links_lead_somewhere(page)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_json_and_yaml_examples_are_well_formed(page: Path) -> None:
    for block in blocks(page):
        if block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            yaml.safe_load(block.text)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_records_shown_are_records_that_training_reads(page: Path) -> None:
    from specctl.train.data.records.records import sample_of

    for block in blocks(page):
        if block.language == "jsonl":
            for line in block.text.splitlines():
                sample = sample_of(json.loads(line), page.name)
                assert sample.messages or sample.text or sample.ids, line


def test_every_recipe_begins_with_a_command_that_is_understood() -> None:
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        if path.name in ("sources.yaml", "targets.yaml"):
            continue
        first = path.read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith("# specctl "), path.name
        words = shlex.split(first.removeprefix("# specctl "))
        assert commands.why_not(words) is None, (path.name, commands.why_not(words))


def test_every_shipped_recipe_is_valid() -> None:
    from specctl.api.arguments.families import check_options

    for name in recipe_names():
        check_options(load_recipe(name), name)


def test_every_command_is_documented() -> None:
    from specctl.cli.main import COMMANDS

    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"| `{name}" in page, f"docs/cli.md lacks {name}"


def test_every_exit_code_is_documented() -> None:
    from specctl.core.errors import Exit

    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for code in Exit:
        assert f"| {int(code)} |" in page, f"docs/cli.md lacks exit code {int(code)}"
