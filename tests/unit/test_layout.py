"""Imports, effects of asserts and properties, sizes of folders and lines."""

import ast
import functools
import graphlib
from pathlib import Path

from tests.support.each_case import each_case

ROOT = Path(__file__).parents[2]
# Each package may import itself and those before it.
PACKAGES = "system config text distributed rows word2vec vectors training api".split()
PROGRAMS = {"w2v/__init__.py", "train.py", "evaluate.py"}  # may import every package
MAX_ENTRIES = 19
MAX_COLUMNS = 100
MAX_SUMMARY = 72
# Calls in an assert, which `python -O` leaves out.
WITHOUT_EFFECT = {"all", "any", "isinstance", "len", "min", "is_contiguous", "stride"}


def files(folder, *suffixes):
    """Return the files below a folder, relative to the root of the repository."""
    found = (path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


TESTS = files("tests", ".py")
PYTHON = [*files("w2v", ".py"), "train.py", "evaluate.py", *TESTS, *files("docs", ".py")]
MODULES = [name for name in files("w2v", ".py") if name not in PROGRAMS]
SOURCES = [*PYTHON, *files("w2v", ".cu", ".cuh")]
FOLDERS = sorted({str(Path(name).parent) for name in files("w2v", ".py", ".cu")})


@functools.cache
def nodes(source):
    """Return all nodes of the source's syntax tree."""
    return list(ast.walk(ast.parse(source)))


def imported_modules(source, path):
    """Return all imports, in functions and under TYPE_CHECKING too."""
    modules = set()
    for node in nodes(source):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = Path(path).parts[: -node.level] if node.level else ()
            module = ".".join([*package, *filter(None, [node.module])])
            modules |= {f"{module}.{alias.name}" for alias in node.names}
    return modules


def wrong_imports(source, path):
    """Return the imports of packages that come after this one."""
    package = Path(path).with_suffix("").parts[1]
    allowed = [*PACKAGES[: PACKAGES.index(package) + 1], "__version__"]
    names = [module.split(".") for module in imported_modules(source, path)]
    ours = [name for name in names if name[0] == "w2v" and len(name) > 1]
    return sorted(".".join(name) for name in ours if name[1] not in allowed)


def imported_files(source, path, paths):
    """Return the files that a file imports."""
    found = set()
    for module in imported_modules(source, path):
        name = Path(*module.split("."))
        for file in (name, name.parent):  # a module, or a name in one
            files = {f"{file}.py", f"{file}/__init__.py"}.intersection(paths)
            if files:
                found |= files
                break
    return sorted(found - {path})


def effects(source):
    """Return lines of asserts with effects, and of properties that assign."""
    lines = []
    for node in nodes(source):
        if isinstance(node, ast.Assert):
            parts = list(ast.walk(node.test))
            calls = [part.func for part in parts if isinstance(part, ast.Call)]
            called = {getattr(call, "attr", getattr(call, "id", None)) for call in calls}
            is_changed = any(isinstance(part, ast.NamedExpr) for part in parts)
            if is_changed or not called <= WITHOUT_EFFECT:
                lines.append(node.lineno)
        if isinstance(node, ast.FunctionDef):
            kinds = {ast.unparse(kind) for kind in node.decorator_list}
            if kinds & {"property", "functools.cached_property"}:
                stores = [part for part in ast.walk(node) if isinstance(part, ast.Attribute)]
                lines += [part.lineno for part in stores if not isinstance(part.ctx, ast.Load)]
    return lines


def imported_tests(source, path):
    """Return the imports of our test files; those of gensim's tests are fine."""
    modules = imported_modules(source, path)
    ours = [module for module in modules if module.startswith(("tests.", "test_"))]
    return sorted(module for module in ours if ".test_" in f".{module}")


def long_lines(source):
    """Return the numbers of the lines that are too long."""
    lines = enumerate(source.splitlines(), start=1)
    return [number for number, line in lines if len(line) > MAX_COLUMNS]


def long_summaries(source):
    """Return the first lines of docstrings that are too long."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in nodes(source) if isinstance(node, documented)]
    docstrings = filter(None, map(ast.get_docstring, found))
    summaries = [docstring.splitlines()[0] for docstring in docstrings]
    return [summary for summary in summaries if len(summary) > MAX_SUMMARY]


def entries(folder):
    """Return the names in a folder of source code."""
    return sorted({path.name for path in folder.iterdir()} - {"__pycache__"})


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


def offenders(paths, check):
    """Return what the check finds, by file."""
    return {path: found for path in paths if (found := check(path))}


def test_imports_go_one_way():
    assert offenders(MODULES, lambda path: wrong_imports(read(path), path)) == {}


def test_no_files_import_each_other():
    imports = {path: imported_files(read(path), path, MODULES) for path in MODULES}
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError


def test_asserts_and_properties_have_no_effect():
    assert offenders(MODULES, lambda path: effects(read(path))) == {}


def test_folders_have_few_entries():
    crowded = {folder: entries(ROOT / folder) for folder in FOLDERS}
    assert {folder: names for folder, names in crowded.items() if len(names) > MAX_ENTRIES} == {}


def test_docstrings_start_with_a_short_line():
    assert offenders(PYTHON, lambda path: long_summaries(read(path))) == {}


def test_lines_are_short():
    assert offenders(SOURCES, lambda path: long_lines(read(path))) == {}


def test_no_test_imports_another():
    assert offenders(TESTS, lambda path: imported_tests(read(path), path)) == {}


def test_every_package_has_a_place_in_the_order():
    assert {Path(name).with_suffix("").parts[1] for name in MODULES} == set(PACKAGES)


@each_case(
    "source",
    [
        "import w2v.training.plan",
        "from w2v.api import sweep as s",
        "from w2v import training",
        "from ..training import plan",
        "def load():\n    from w2v.training.plan import make_plan",
        "if TYPE_CHECKING:\n    from w2v.training.plan import Plan",
    ],
)
def test_check_finds_imports_of_later_packages(source):
    assert len(wrong_imports(source, "w2v/rows/table.py")) == 1


def test_check_allows_imports_of_the_same_and_earlier_packages():
    source = "import torch, w2v\nfrom w2v import __version__\nfrom w2v.config import Config\n"
    source += "from w2v.rows import optim\nfrom . import link\nfrom ..text import vocab\n"
    assert wrong_imports(source, "w2v/rows/table.py") == []


def test_check_finds_files_that_a_file_imports():
    source = "if TYPE_CHECKING:\n    from w2v.rows.table import Table\nimport torch"
    paths = ["w2v/rows/optim.py", "w2v/rows/table.py"]
    assert imported_files(source, "w2v/rows/optim.py", paths) == ["w2v/rows/table.py"]
    assert imported_files("from . import table", "w2v/rows/table.py", paths) == []
    assert imported_files("from w2v.rows import table", "w2v/rows/optim.py", paths)


@each_case(
    "source",
    [
        "assert wait() is not None",
        "assert (rows := read)",
        "@property\ndef rows(self):\n    self.begins = 1\n    return 2",
        "@functools.cached_property\ndef rows(self):\n    self.count += 1",
    ],
)
def test_check_finds_effects(source):
    assert effects(source)
    assert not effects("assert len(rows) == 2 and all(rows)")


@each_case("module", ["tests.unit.test_plan", "test_plan", ".test_plan"])
def test_check_finds_imports_of_test_files(module):
    assert imported_tests(f"from {module} import run", "tests/unit/test_step.py")
    helpers = "from tests.support import programs\nfrom gensim.test import test_word2vec"
    assert not imported_tests(helpers, "tests/unit/test_step.py")


def test_check_finds_long_lines_docstrings_and_folders(tmp_path):
    assert long_lines("x\n" + 101 * "x" + "\n" + 100 * "x") == [2]
    source = f'"""{72 * "a"}"""\nclass C:\n    def f(self):\n        """{73 * "b"}\n\n        c"""'
    assert long_summaries(source) == [73 * "b"]
    for number in range(3):
        (tmp_path / f"module{number}.py").touch()
    (tmp_path / "__pycache__").mkdir()
    assert len(entries(tmp_path)) == 3
