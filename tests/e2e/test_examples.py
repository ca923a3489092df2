"""The programs of docs/examples/ and the blocks of docs/library.md run."""

import contextlib
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.rank_processes import Pool

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS / "examples"
# Program, arguments, and a score between that of first weights and what it reaches.
RUNS = [
    ("ncf", "--users 200 --items 100 --batch 512 --steps 120", 0.85),  # 0.5 to 0.94
    ("clicks", "--tables 4 --dim 4 --batch 1024 --skew 0.5 --steps 60", 0.8),  # 0.72 to 0.86
    ("graph", "--nodes 200 --dim 16 --batch 10 --epochs 4", 0.75),  # 0.5 to 0.85
    ("graph", "--nodes 200 --dim 16 --epochs 4 --with word2vec", 0.75),  # 0.5 to 0.86
]


def test_every_example_is_run():
    assert {name for name, *_ in RUNS} == {path.stem for path in EXAMPLES.glob("*.py")}


@pytest.mark.parametrize("name, arguments, score", RUNS)
def test_example_learns(name, arguments, score, one_thread):
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    assert main(arguments.split()) > score


def run_on_ranks(ranks, arguments):
    """Run the click model in a process of a group that has been made."""
    torch.distributed.init_process_group = torch.distributed.destroy_process_group = lambda: None
    return runpy.run_path(str(EXAMPLES / "clicks.py"))["main"](arguments.split())


def test_example_learns_on_two_ranks():
    with contextlib.closing(Pool(2)) as pool:
        scores = pool.run(run_on_ranks, RUNS[1][1])
    assert min(scores) > RUNS[1][2] and scores[0] != scores[1]


def test_blocks_of_the_guide_run(tmp_path, monkeypatch, capsys):
    guide = (DOCS / "library.md").read_text(encoding="utf-8")
    model, paged, rows = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(model, "library.md", "exec"), names)
    first, last = re.search(r"loss ([\d.]+) -> ([\d.]+)", capsys.readouterr().out).groups()
    assert float(last) < 0.3 < 0.6 < float(first)
    assert np.load("users.npy").shape == (10_000, 16)
    saved = torch.load("checkpoint.pt")
    names["model"].load_state_dict(saved["model"])
    names["optimizer"].load_state_dict(saved["optimizer"])
    for block in (paged, rows):
        exec(compile(block, "library.md", "exec"), {})


def test_the_script_from_speedtorch_runs():
    page = (DOCS / "moving.md").read_text(encoding="utf-8")
    _, section = page.split("## From SpeedTorch")
    (script,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names = {}
    exec(compile(script, "moving.md", "exec"), names)
    assert names["losses"][-1] < 0.7 * names["losses"][0]
