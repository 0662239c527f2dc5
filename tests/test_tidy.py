"""The house's rules that a machine can check. Every guard is itself shown to bite: it names a planted offence."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("cluster", "workers", "kernels", "router", "kvstore", "ops")
FILE_LINES_MAX, FUNCTION_LINES_MAX = 450, 80
MACHINE_PATH = re.compile(r"(?<![\w.~*])/(?:work|root|home)/")
UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX)\b")
VAGUE_NAME = re.compile(r"(?:Manager|Base|Utils?|Helpers?|Impl)$")
VAGUE_FILES = frozenset(("utils", "util", "common", "types", "core", "helpers", "misc"))

Guard = Callable[[Path], list[str]]


def python_files(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """Every module of every room, by its path from the root."""
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            yield path.relative_to(root).as_posix(), ast.parse(path.read_text())


def rooms_are_flat(root: Path) -> list[str]:
    """A folder of data may lie in a room; one with code may not."""
    folders = (path for room in ROOMS for path in (root / room).rglob("*") if path.is_dir())
    inner = (path for path in folders if path.name != "__pycache__" and any(path.rglob("*.py")))
    return [path.relative_to(root).as_posix() for path in inner]


def rooms_say_what_they_own(root: Path) -> list[str]:
    pages = (root / room / "__init__.py" for room in ROOMS)
    return [
        page.parent.name for page in pages if not page.exists() or not ast.get_docstring(ast.parse(page.read_text()))
    ]


def rooms_are_mapped(root: Path) -> list[str]:
    setuptools = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    mapped = {name: folder for name, folder in setuptools["package-dir"].items() if name in setuptools["packages"]}
    return sorted(map(str, set(mapped.items()) ^ {(f"forebay.{room}", room) for room in ROOMS}))


def rooms_are_linked(root: Path) -> list[str]:
    folder = root / ".types" / "forebay"
    links = [folder / room for room in ROOMS]
    wrong = [link.name for link in links if not link.is_symlink() or link.resolve() != root.resolve() / link.name]
    return wrong + sorted(path.name for path in folder.iterdir() if path.name not in ROOMS)


def rooms_are_on_the_map(root: Path) -> list[str]:
    readme = (root / "README.md").read_text()
    return [room for room in ROOMS if f"`{room}/`" not in readme]


def no_room_is_forgotten(root: Path) -> list[str]:
    return sorted(page.parent.name for page in root.glob("*/__init__.py") if page.parent.name not in ROOMS)


def _lines_with(root: Path, pattern: re.Pattern[str]) -> list[str]:
    folders = [root / name for name in (*ROOMS, "tests", ".ci", ".") if (root / name).exists()]
    files = [path for folder in folders for path in sorted(folder.iterdir()) if path.is_file()]
    return [
        f"{path.relative_to(root).as_posix()}:{number}"
        for path in files
        if path.name != Path(__file__).name  # it has to write down what it forbids
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]


def no_paths_of_a_machine(root: Path) -> list[str]:
    return _lines_with(root, MACHINE_PATH)


def nothing_unfinished(root: Path) -> list[str]:
    return _lines_with(root, UNFINISHED)


def imports_name_the_house(root: Path) -> list[str]:
    """Neither `import router` nor `from . import x`: both name a module in a second way."""
    return [f"{name}:{node.lineno}" for name, tree in python_files(root) for node in ast.walk(tree) if _is_bare(node)]


def _is_bare(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] in ROOMS for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (node.level > 0 or (node.module or "").split(".")[0] in ROOMS)


def nothing_is_swallowed_but_at_the_edge(root: Path) -> list[str]:
    """Outside cluster a broad except may only translate: its last word is a raise."""
    return [
        f"{name}:{node.lineno}"
        for name, tree in python_files(root)
        if not name.startswith("cluster/")
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and not isinstance(node.body[-1], ast.Raise)
    ]


def _is_broad(caught: ast.expr | None) -> bool:
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)


def files_are_short(root: Path) -> list[str]:
    lengths = ((name, len((root / name).read_text().splitlines())) for name, _ in python_files(root))
    return [f"{name} has {lines} lines" for name, lines in lengths if lines > FILE_LINES_MAX]


def functions_are_short(root: Path) -> list[str]:
    return [
        f"{name}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for name, tree in python_files(root)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.end_lineno is not None and node.end_lineno - node.lineno + 1 > FUNCTION_LINES_MAX
    ]


def names_say_something(root: Path) -> list[str]:
    files = [name for name, _ in python_files(root) if Path(name).stem in VAGUE_FILES]
    classes = [
        f"{name}:{node.lineno} {node.name}"
        for name, tree in python_files(root)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and VAGUE_NAME.search(node.name)
    ]
    return files + classes


LONG_FUNCTION = "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX

# guard -> (file to write, its content, the offender that the guard then names)
PLANTED: dict[Guard, list[tuple[str, str, str]]] = {
    rooms_are_flat: [("router/deep/x.py", "", "router/deep")],
    rooms_say_what_they_own: [("ops/__init__.py", "x = 1\n", "ops")],
    rooms_are_mapped: [("pyproject.toml", "", "forebay.ops")],
    rooms_are_linked: [(".types/forebay/extra", "", "extra")],
    rooms_are_on_the_map: [("README.md", "`router/`", "kvstore")],
    no_room_is_forgotten: [("attic/__init__.py", "", "attic")],
    no_paths_of_a_machine: [
        ("ops/x.py", "P = '/home/me/x'\n", "ops/x.py:1"),
        ("README.md", "\n/root/x", "README.md:2"),
    ],
    nothing_unfinished: [("kernels/x.py", "\n# TODO: later\n", "kernels/x.py:2")],
    imports_name_the_house: [
        ("cluster/x.py", "import router.wire\n", "cluster/x.py:1"),
        ("cluster/x.py", "from kvstore import chain\n", "cluster/x.py:1"),
        ("cluster/x.py", "def f():\n    from . import y\n", "cluster/x.py:2"),
    ],
    nothing_is_swallowed_but_at_the_edge: [
        ("router/x.py", "try:\n    x = 1\nexcept Exception:\n    pass\n", "router/x.py:3"),
        ("router/x.py", "try:\n    x = 1\nexcept (ValueError, BaseException):\n    pass\n", "router/x.py:3"),
        ("router/x.py", "try:\n    x = 1\nexcept:\n    pass\n", "router/x.py:3"),
    ],
    files_are_short: [("workers/x.py", "x = 1\n" * (FILE_LINES_MAX + 1), "workers/x.py has 451 lines")],
    functions_are_short: [("workers/x.py", LONG_FUNCTION, "workers/x.py:1 f has 81 lines")],
    names_say_something: [
        ("kvstore/utils.py", "", "kvstore/utils.py"),
        ("kvstore/x.py", "class PageManager: ...\n", "kvstore/x.py:1 PageManager"),
    ],
}


@pytest.mark.parametrize("guard", PLANTED, ids=lambda guard: guard.__name__)
def test_the_house_is_tidy(guard: Guard) -> None:
    assert guard(ROOT) == []


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A small house in which every guard is content."""
    (tmp_path / ".types" / "forebay").mkdir(parents=True)
    for room in ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text(f'"""{room}: what it owns."""\n')
        (tmp_path / ".types" / "forebay" / room).symlink_to(Path("../..") / room)
    (tmp_path / "README.md").write_text(" ".join(f"`{room}/`" for room in ROOMS))
    (tmp_path / "pyproject.toml").write_text(_mapping(ROOMS))
    return tmp_path


def _mapping(rooms: tuple[str, ...]) -> str:
    names = ", ".join(f'"forebay.{room}"' for room in rooms)
    folders = "\n".join(f'"forebay.{room}" = "{room}"' for room in rooms)
    return f"[tool.setuptools]\npackages = [{names}]\n[tool.setuptools.package-dir]\n{folders}\n"


@pytest.mark.parametrize(
    ("guard", "file", "content", "offender"),
    [(guard, *offence) for guard, offences in PLANTED.items() for offence in offences],
)
def test_a_guard_bites(house: Path, guard: Guard, file: str, content: str, offender: str) -> None:
    assert guard(house) == []
    (house / file).parent.mkdir(exist_ok=True)
    (house / file).write_text(content if file != "pyproject.toml" else _mapping(ROOMS[:-1]))
    assert offender in str(guard(house))


def test_links_are_checked_one_by_one(house: Path) -> None:
    link = house / ".types" / "forebay" / "ops"
    link.unlink()
    assert rooms_are_linked(house) == ["ops"]
    link.symlink_to("../../router")
    assert rooms_are_linked(house) == ["ops"]


def test_cluster_may_catch_everything_and_others_may_translate(house: Path) -> None:
    (house / "cluster" / "x.py").write_text("try:\n    x = 1\nexcept Exception:\n    pass\n")
    (house / "router" / "x.py").write_text("try:\n    x = 1\nexcept Exception as e:\n    raise KeyError from e\n")
    assert nothing_is_swallowed_but_at_the_edge(house) == []


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the git checkout")
def test_links_are_tracked_as_links() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--stage", ".types"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert sorted(line.split("/")[-1] for line in listed) == sorted(ROOMS)
    assert all(line.startswith("120000 ") for line in listed)


# contract -> imports of which each breaks it
FORBIDDEN = {
    "a room imports only rooms below it": [
        ("ops/offender.py", "import forebay.kvstore"),
        ("kvstore/offender.py", "import forebay.kernels"),
        ("kernels/offender.py", "import forebay.kvstore"),
        ("workers/offender.py", "from forebay.router import wire"),
        ("router/offender.py", "import forebay.cluster"),
    ],
    "router imports only ops": [
        ("router/offender.py", "import forebay.kvstore"),
        ("router/offender.py", "import torch"),
        ("router/offender.py", "import ray"),
    ],
    "only cluster imports ray": [("workers/offender.py", "from ray import serve")],
    "ops and the pure parts of kvstore import neither torch nor triton": [
        ("kvstore/chain.py", "import torch"),
        ("ops/offender.py", "import triton"),
    ],
}
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")


def _contracts() -> list[dict[str, Any]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return list(settings["contracts"])


@pytest.fixture
def skeleton(tmp_path: Path) -> Path:
    """Every module of the house, empty, under the house's own contracts."""
    (tmp_path / "forebay").mkdir()
    named = {module for contract in _contracts() for module in contract.get("source_modules", [])}
    real = {f"forebay.{name.removesuffix('.py').replace('/', '.')}" for name, _ in python_files(ROOT)}
    for room in ROOMS:
        (tmp_path / "forebay" / room).mkdir()
        (tmp_path / "forebay" / room / "__init__.py").touch()
    for module in real | {module for module in named if module.count(".") == 2}:
        (tmp_path / f"{module.replace('.', '/')}.py").touch()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def _lint(folder: Path) -> dict[str, str]:
    """Verdict by contract, of the linter itself."""
    command = [str(LINT_IMPORTS), "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    verdicts = dict(re.findall(r"^(.+?) (KEPT|BROKEN)(?: .*)?$", done.stdout, re.MULTILINE))
    assert verdicts, done.stdout + done.stderr
    return verdicts


def test_every_contract_has_a_planted_offence() -> None:
    assert [contract["name"] for contract in _contracts()] == list(FORBIDDEN)


def test_an_empty_house_keeps_every_contract(skeleton: Path) -> None:
    assert _lint(skeleton) == dict.fromkeys(FORBIDDEN, "KEPT")


@pytest.mark.parametrize(
    ("contract", "file", "statement"),
    [(contract, *offence) for contract, offences in FORBIDDEN.items() for offence in offences],
)
def test_a_contract_bites(skeleton: Path, contract: str, file: str, statement: str) -> None:
    (skeleton / "forebay" / file).write_text(f"{statement}\n")
    assert _lint(skeleton)[contract] == "BROKEN"
