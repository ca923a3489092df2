"""The house stays in order: a room (a module of w2v, or a folder of it) imports only from lower layers, never sideways; GPU calls stay
in the few rooms that may make them; files stay short."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = [
    {
        "config", "batch", "bits", "rowfile", "kvfile", "durable", "signals", "torchrun", "questions", "pace", "environment", "host",
        "console",
    },
    {"settings", "ranks", "loggers", "sources", "vocab", "kernels", "table", "nearest", "vectorfile"},
    {"corpus", "lexicon", "shards", "optim", "skipgram", "sampler", "transfer", "budget", "traffic"},
    {"ingest", "machine", "pipeline", "tablefile"},
    {"backends", "opening", "checkpoint", "cpu", "sharded", "metrics", "evaluation", "export", "heldout", "comparison", "pictures", "card"},
    {"plan", "trainer", "trial", "runfolder", "embedding", "baseline", "asking", "ahead"},
    {"experiments", "commands"},
    {"sweep", "word2vec"},
    {"__init__", "train", "evaluate"},
]  # fmt: skip
LAYER = {room: layer for layer, rooms in enumerate(LAYERS) for room in rooms}
GPU_CALLERS = {f"w2v/{room}.py" for room in ("kernels/cuda", "table", "pipeline", "sharded", "machine", "plan")}  # and w2v/transfer/
MODULES = sorted((ROOT / "w2v").rglob("*.py"))
PROGRAMS = [path for path in (ROOT / "train.py", ROOT / "evaluate.py") if path.exists()]
each_file = pytest.mark.parametrize("path", MODULES + PROGRAMS, ids=lambda path: path.relative_to(ROOT).as_posix())


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[path.is_relative_to(ROOT / "w2v")]


def running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """`ast.walk` without what stands under `if TYPE_CHECKING:`, which only names types and never runs."""
    yield node
    only_types = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    for child in node.orelse if only_types else ast.iter_child_nodes(node):
        yield from running_nodes(child)


def imported_modules(source: str, package: str = "w2v") -> set[str]:
    """Dotted names of all that `source` imports when it runs, in functions too; `package` is where its relative imports start."""
    found = set()
    for node in running_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def imported_rooms(source: str, package: str = "w2v") -> set[str]:
    names = [name.split(".") for name in imported_modules(source, package)]
    inside = {parts[1] for parts in names if parts[0] == "w2v" and len(parts) > 1 and not parts[1].startswith("__")}
    return inside | {parts[0] for parts in names if parts[0] in ("train", "evaluate")}


def misplaced(room: str, source: str, package: str = "w2v") -> set[str]:
    """The rooms that `source`, which stands in `room`, imports although they are not in a lower layer."""
    return {other for other in imported_rooms(source, package) - {room} if LAYER.get(other, len(LAYERS)) >= LAYER[room]}


def gpu_calls(source: str) -> list[str]:
    """Where `source` names cupy or torch.cuda."""
    imports = [name for name in imported_modules(source) if f"{name}.".startswith(("cupy.", "cupyx.", "torch.cuda."))]
    reads = [f"line {node.lineno}" for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute) and node.attr == "cuda"
             and isinstance(node.value, ast.Name) and node.value.id == "torch"]  # fmt: skip
    return imports + reads


@each_file
def test_each_room_is_in_the_table_and_imports_only_from_lower_layers(path: Path) -> None:
    room = room_of(path)
    assert room in LAYER, f"{path.name} is no room of the design; give it a layer in LAYERS or move it"
    package = ".".join(path.relative_to(ROOT).parent.parts)
    assert not misplaced(room, path.read_text(encoding="utf-8"), package)


def test_the_page_on_architecture_has_the_same_lines() -> None:
    section = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Rooms")[2].partition("\n## ")[0]
    lines = [set(re.findall("`(\\w+)/?`", line.split("|")[1])) for line in section.splitlines() if line.startswith("| `")]
    assert lines == LAYERS[:-1]
    said = re.search(r"GPU calls .*? alone", section, re.DOTALL)[0]
    assert {f"w2v/{file}" for file in re.findall(r"`([\w/]+\.py)`", said)} == GPU_CALLERS


@each_file
def test_gpu_calls_stay_in_their_rooms(path: Path) -> None:
    if path.relative_to(ROOT).as_posix() not in GPU_CALLERS and room_of(path) != "transfer":
        assert not gpu_calls(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", MODULES + sorted((ROOT / "w2v").rglob("*.cu")), ids=lambda path: path.name)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, f"{path.name} wants to be two files"


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_programs_hold_arguments_only(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 80


@pytest.mark.parametrize(
    ("room", "package", "source", "wrong"),
    [
        ("trainer", "w2v", "import w2v.pipeline\nfrom w2v import optim, __version__\nfrom w2v.batch import Page", set()),
        ("sampler", "w2v", "def f():\n    from w2v.optim import schedule", {"optim"}),
        ("vocab", "w2v", "from w2v import sources", {"sources"}),
        ("kernels", "w2v.kernels", "from . import reference\nfrom .cuda import gather\nfrom ..table import Table", {"table"}),
        ("config", "w2v", "import torch, w2v.batch", {"batch"}),
        ("config", "w2v", "from .gadget import x", {"gadget"}),
        ("plan", "w2v", "import train", {"train"}),
        ("batch", "w2v", "if TYPE_CHECKING:\n    from w2v.table import Table\nelse:\n    import w2v.vocab", {"vocab"}),
        ("train", "", "from w2v.plan import Plan\nimport numpy", set()),
    ],
)
def test_the_check_sees_what_it_should(room: str, package: str, source: str, wrong: set[str]) -> None:
    assert misplaced(room, source, package) == wrong


@pytest.mark.parametrize("source", ["import cupy", "from cupy.cuda import Stream", "from torch import cuda", "torch.cuda.synchronize()"])
def test_gpu_calls_are_seen(source: str) -> None:
    assert gpu_calls(source)
    assert not gpu_calls("import torch\nx = torch.ones(2).to('cuda')\nx.cuda\nimport cupyish")
