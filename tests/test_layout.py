"""The house stands: rooms are linked, imports point down, help is light, files stay readable."""

from __future__ import annotations

import ast
import math
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = (
    "cli", "api", "server", "train", "export", "diffusion", "images", "runtime", "recipes",
    "drafters", "models", "core", "published",
)  # fmt: skip
# What each room may import of the others (the top-level package is free for all).
BELOW = {
    "cli": {
        "api",
        "server",
        "train",
        "export",
        "diffusion",
        "images",
        "runtime",
        "drafters",
        "recipes",
        "models",
        "core",
    },
    "api": {
        "train",
        "export",
        "diffusion",
        "images",
        "runtime",
        "drafters",
        "recipes",
        "models",
        "core",
    },
    "server": {"runtime", "core"},
    "train": {"diffusion", "images", "runtime", "drafters", "recipes", "models", "core"},
    "export": {"runtime", "drafters", "recipes", "models", "core"},
    "diffusion": {"runtime", "recipes", "models", "core"},
    "images": {"runtime", "models", "core"},
    "runtime": {"drafters", "recipes", "models", "core"},
    "drafters": {"models", "core"},
    "recipes": {"core"},
    "models": {"core"},
    "core": set(),
    "published": set(),
}
COMMANDS = (
    "quickstart", "doctor", "plan", "recipes", "train-draft", "distill", "vocab-trim", "pretrain",
    "generate", "bench", "verify", "show", "export", "import", "runs",
)  # fmt: skip
HEAVY = {"torch", "transformers", "accelerate", "datasets", "numpy"}
LONGEST_FILE = 500
# Parameters that are a whole recipe, and classes that hold one: only ever fewer.
WHOLE = ("Recipe", "Recipe | None", "'Recipe'", "Optional[Recipe]")
MOST_TAKING, MOST_HOLDING = 30, 11
# Rooms whose own rooms import each other one way.
ONE_WAY = ("api", "core", "drafters", "train/data")
# Where module docstrings name their shape letters in the words of docs/glossary.md.
LETTERED = (
    "core", "models", "drafters", "runtime/policies", "runtime/verify", "runtime/sampling",
    "runtime/cross_vocab", "runtime/proof", "runtime/engine", "runtime/stops", "runtime/measure",
    "export", "train/saving", "diffusion", "images",
)  # fmt: skip
OTHER_LETTERS = {"count_OT"}  # stored under this name: orders by slots of a table


def sources(*rooms: str) -> list[Path]:
    return [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]


@cache
def imports(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """The import statements of a file, those inside functions included; each file is read once."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return tuple(n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom)))


def imported_rooms(path: Path) -> set[str]:
    """Rooms that a file imports, the lines under `if TYPE_CHECKING` included."""
    names: set[str] = set()
    for node in imports(path):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            module = node.module or ""
            names |= {f"{module}.{a.name}" if module == "specctl" else module for a in node.names}
        else:
            names |= {alias.name for alias in node.names}
    parts = [name.split(".") for name in names]
    return {p[1] for p in parts if len(p) > 1 and p[0] == "specctl" and p[1] in ROOMS}


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_down(room: str) -> None:
    for path in sources(room):
        wrong = imported_rooms(path) - BELOW[room] - {room}
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_a_wrong_arrow_would_be_seen(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        "def f():\n    from specctl.train.loop import train\n    import specctl.cli.main\n"
    )
    assert imported_rooms(path) == {"train", "cli"}


def modules(folder: str) -> dict[str, Path]:
    """Name -> file of the modules below a folder."""
    names = {p: p.relative_to(ROOT).with_suffix("").as_posix() for p in sources(folder)}
    return {"specctl." + n.removesuffix("/__init__").replace("/", "."): p for p, n in names.items()}


def imported_modules(path: Path, known: dict[str, Path]) -> set[str]:
    """Those of the known modules that a file imports, lazily or for types, too."""
    found: set[str] = set()
    for node in imports(path):
        if isinstance(node, ast.ImportFrom):
            deeper = {f"{node.module}.{alias.name}" for alias in node.names} & set(known)
            found |= deeper or {node.module or ""} & set(known)
        else:
            found |= {alias.name for alias in node.names} & set(known)
    return found


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; empty if there is none."""
    left = dict(edges)
    while free := [name for name, below in left.items() if not below & set(left) - {name}]:
        for name in free:
            del left[name]
    return sorted(left)


@pytest.mark.parametrize("room", ROOMS)
def test_modules_of_a_room_do_not_import_in_circles(room: str) -> None:
    known = modules(room)
    found = circle({name: imported_modules(path, known) for name, path in known.items()})
    assert not found, f"these lie on a circle of imports or above one: {found}"


@pytest.mark.parametrize("room", ONE_WAY)
def test_rooms_of_a_room_import_one_way(room: str) -> None:
    """Its rooms, and the modules beside them, each taken as one."""
    known = modules(room)
    prefix = f"specctl.{room.replace('/', '.')}."
    edges: dict[str, set[str]] = {}
    for name, path in known.items():
        part = name.removeprefix(prefix).partition(".")[0]
        below = {n.removeprefix(prefix).partition(".")[0] for n in imported_modules(path, known)}
        edges[part] = edges.get(part, set()) | below
    assert len(edges) > 2
    found = circle(edges)
    assert not found, f"these lie on a circle of imports or above one: {found}"


def test_a_circle_would_be_seen() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circle({"a": {"b"}, "b": {"a"}, "c": set()}) == ["a", "b"]


def class_names(text: str) -> list[str]:
    """Public classes of a module, nested ones included."""
    found = (node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))
    return [name for name in found if not name.startswith("_")]


def test_no_class_name_stands_twice() -> None:
    places: dict[str, list[str]] = {}
    for path in sources(*ROOMS):
        for name in class_names(path.read_text(encoding="utf-8")):
            places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}


def test_a_class_inside_a_function_is_seen() -> None:
    assert class_names("def f():\n    class Round: ...\nclass _Own: ...\n") == ["Round"]


def axes() -> dict[str, str]:
    """Letter of a shape suffix -> its one meaning, from the glossary."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| ([A-Z]) \| ([^|]+?) \|", text, re.M))


def used_letters(tree: ast.Module) -> set[str]:
    """Letters in the shape suffixes of a module's names."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    suffixes = [re.fullmatch(r"_*[a-z]\w*_([A-Z0-9]{1,6})", name) for name in names - OTHER_LETTERS]
    return {letter for found in suffixes if found for letter in found[1] if letter.isalpha()}


@pytest.mark.parametrize("folder", LETTERED)
def test_shape_letters_mean_what_the_glossary_says(folder: str) -> None:
    known = axes()
    for path in sources(folder):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstring = " ".join((ast.get_docstring(tree) or "").split())
        line = re.search(r"Letters: (.*)\.$", re.sub(r"\([^)]*\)", "", docstring))
        entries = [entry.split(maxsplit=1) for entry in line[1].split(", ")] if line else []
        named = {letter: meaning.strip() for letter, meaning in entries}
        name = path.relative_to(ROOT)
        wrong = {letter: text for letter, text in named.items() if known.get(letter) != text}
        assert not wrong, f"{name}: docs/glossary.md says otherwise than {wrong}"
        assert not used_letters(tree) - set(named), f"{name} names letters it does not explain"


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_is_linked_into_the_package(room: str) -> None:
    link = ROOT / "src" / "specctl" / room
    assert link.is_symlink(), f"{link} is missing: git config core.symlinks true, then clone again"
    assert os.readlink(link) == f"../../{room}"
    assert (link / "__init__.py").is_file()


def test_nothing_but_the_rooms_lies_in_the_package() -> None:
    found = {p.name for p in (ROOT / "src" / "specctl").iterdir()} - {"__pycache__"}
    assert found == {*ROOMS, "__init__.py", "__main__.py", "py.typed"}


def test_files_stay_readable() -> None:
    for path in sources(*ROOMS):
        count = len(path.read_text(encoding="utf-8").splitlines())
        assert count <= LONGEST_FILE, f"{path.relative_to(ROOT)} has {count} lines"


def takes_recipe(tree: ast.Module) -> list[str]:
    """The functions of a module, a name for each parameter that is a whole recipe."""
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if each.annotation is not None and ast.unparse(each.annotation) in WHOLE
    ]


def holds_recipe(tree: ast.Module) -> list[str]:
    """The classes of a module with a field that is a whole recipe."""
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for each in node.body
        if isinstance(each, ast.AnnAssign) and ast.unparse(each.annotation) in WHOLE
    ]


def test_few_functions_take_a_whole_recipe() -> None:
    """The others get the sections, or the values, that they use. Nor is a recipe handed on inside
    ever more objects."""
    taking, holding = list[str](), list[str]()
    for path in sources(*ROOMS):
        text = path.read_text(encoding="utf-8")
        if not re.search(r"\bRecipe\b", text):  # to write every annotation out takes seconds
            continue
        tree, name = ast.parse(text), path.relative_to(ROOT)
        taking += [f"{name}: {each}" for each in takes_recipe(tree)]
        holding += [f"{name}: {each}" for each in holds_recipe(tree)]
    assert len(taking) <= MOST_TAKING, "give them sections: " + "; ".join(taking)
    assert len(holding) <= MOST_HOLDING, "give them sections: " + "; ".join(holding)


def test_a_whole_recipe_would_be_seen() -> None:
    text = (
        "class Run:\n    recipe: Recipe\n    train: TrainPart\n"
        "    def plan(self, recipe: Recipe | None, *, part: TrainPart) -> Recipe:\n"
        "        def inner(recipe: 'Recipe') -> None: ...\n"
        "async def f(a: int, /, *, recipe: Recipe) -> None: ...\n"
    )
    tree = ast.parse(text)
    assert sorted(takes_recipe(tree)) == ["f", "inner", "plan"]
    assert holds_recipe(tree) == ["Run"]


def test_sources_are_ascii() -> None:
    for path in [*sources(*ROOMS), *sorted((ROOT / "recipes").glob("*.yaml"))]:
        assert path.read_bytes().isascii(), f"{path.relative_to(ROOT)} is not ASCII"


def test_the_embedded_target_is_small_enough_to_ship() -> None:
    weights = (ROOT / "recipes" / "tiny" / "model.safetensors").stat().st_size
    assert weights <= 16 * 2**20


def unreached(scripts: dict[str, str], readers: str) -> set[str]:
    """Scripts (name -> source) that the readers do not name, nor any script that they lead to."""
    left, texts = dict(scripts), [readers]
    while texts:
        text = texts.pop()
        named = set(re.findall(r"(\w+)\.py\b|^(?:import|from) (\w+)", text, re.M))
        texts += [left.pop(name) for name in {n for pair in named for n in pair} & set(left)]
    return set(left)


def test_every_benchmark_is_named_by_a_page_a_make_target_or_a_test() -> None:
    scripts = {p.stem: p.read_text(encoding="utf-8") for p in (ROOT / "benchmarks").rglob("*.py")}
    pages = [ROOT / "README.md", ROOT / "Makefile", *(ROOT / "docs").rglob("*.md")]
    readers = [*pages, *sources("tests")]
    found = unreached(scripts, "\n".join(p.read_text(encoding="utf-8") for p in readers))
    assert not found, f"nothing names these; remove them, the history keeps them: {sorted(found)}"


def test_a_benchmark_that_nothing_names_would_be_seen() -> None:
    scripts = {"a": "from b import x", "b": "runs c.py", "c": "", "d": "import a", "e": "e.py"}
    assert unreached(scripts, "make: python benchmarks/a.py") == {"d", "e"}


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=True
    )


LOADED_AFTER = """
import sys{also}
from specctl.cli.main import main
for words in {calls!r}:
    assert main(words) == 0, words
    print("LOADED", words, sorted(m for m in sys.modules if "." not in m))
"""


def loaded_after(*calls: list[str], also: str = "") -> dict[str, set[str]]:
    """Top-level modules that are loaded after each of these calls, made in one process."""
    script = LOADED_AFTER.format(calls=list(calls), also=also)
    lines = python("-c", script).stdout.splitlines()
    found = [line.removeprefix("LOADED ") for line in lines if line.startswith("LOADED ")]
    assert len(found) == len(calls)
    parts = [line.partition("] ") for line in found]
    return {words + "]": set(ast.literal_eval(modules)) for words, _, modules in parts}


def test_help_imports_nothing_heavy() -> None:
    for words, modules in loaded_after(["--help"], *([c, "--help"] for c in COMMANDS)).items():
        assert not modules & HEAVY, f"{words} loads {modules & HEAVY}"


def test_looking_commands_import_no_torch() -> None:
    calls = (
        ["recipes", "ls"],
        ["recipes", "show", "eagle3"],
        ["recipes", "validate", "eagle3"],
        ["doctor", "--quick"],
        ["show", str(ROOT / "recipes" / "tiny")],
    )
    for words, modules in loaded_after(*calls).items():
        assert "torch" not in modules, f"{words} loads torch"


def test_a_heavy_import_would_be_seen() -> None:
    found = loaded_after(["recipes", "show", "eagle3"], also=", numpy").values()
    assert [modules & HEAVY for modules in found] == [{"numpy"}]


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, specctl; dir(specctl); print(bool({'torch', 'yaml'} & set(sys.modules)))"
    assert python("-c", code).stdout.strip() == "False"


def test_help_takes_half_a_second_of_processor_time_at_most() -> None:
    """Once in a few times, that is: beside other work the processor itself is slower."""
    spent = [math.inf]
    while min(spent) > 0.5 and len(spent) < 8:
        before = os.times()
        python("-m", "specctl", "--help")
        after = os.times()
        spent.append(
            after.children_user + after.children_system
            - before.children_user - before.children_system
        )  # fmt: skip
    assert min(spent) <= 0.5, spent
