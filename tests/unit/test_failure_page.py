"""Each promise of docs/failure.md names the tests that hold it."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/failure.md").read_text(encoding="utf-8")
NAME = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


@functools.cache
def functions_of(file):
    """Return the names of the test functions of a file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_named_tests_exist():
    named = NAME.findall(PAGE)
    assert len(named) > 40
    assert [(file, name) for file, name in named if name not in functions_of(file)] == []


def test_every_promise_names_a_test():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "| test |" not in line]
    assert [row for row in rows if not NAME.search(row.split(" | ")[-1])] == []
