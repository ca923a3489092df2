"""The programs of docs/examples/ and the blocks of docs/library.md run."""

import contextlib
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.rank_processes import Pool
from w2v.rows.group import RowGroup

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS / "examples"
# Program, arguments, and a score between that of first weights and what it reaches.
RUNS = [
    ("ncf", "--users 200 --items 100 --batch 512 --steps 120", 0.85),  # 0.5 to 0.94
    ("clicks", "--tables 4 --dim 4 --batch 1024 --skew 0.5 --steps 60", 0.8),  # 0.72 to 0.86
    ("graph", "--nodes 200 --dim 16 --batch 10 --epochs 4", 0.75),  # 0.5 to 0.85
    ("graph", "--nodes 200 --dim 16 --epochs 4 --with word2vec", 0.75),  # 0.5 to 0.86
]
NGRAM_LM = "--layers 1 --dim 32 --heads 2 --block 32 --rows 20000 --ngram-dim 16 --lr 0.01"


def program(name):
    """Return the names that an example defines."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def test_every_example_is_run():
    examples = {path.stem for path in EXAMPLES.glob("*.py")}
    assert {name for name, *_ in RUNS} | {"ngram_lm"} == examples


@pytest.mark.parametrize("name, arguments, score", RUNS)
def test_example_learns(name, arguments, score, one_thread):
    assert program(name)["main"](arguments.split()) > score


def run_on_ranks(ranks, name, arguments):
    """Run an example in a process of a group that has been made."""
    torch.distributed.init_process_group = torch.distributed.destroy_process_group = lambda: None
    return program(name)["main"](arguments.split())


def test_examples_learn_on_two_ranks(text_of_trigrams):
    ngram_lm = f"{text_of_trigrams} {NGRAM_LM} --steps 40 --table-lr 0.1 --checkpoint"
    with contextlib.closing(Pool(2)) as pool:
        scores = pool.run(run_on_ranks, "clicks", RUNS[1][1])
        found = pool.run(run_on_ranks, "ngram_lm", ngram_lm)
    assert min(scores) > RUNS[1][2] and scores[0] != scores[1]
    (loss, _), (other_loss, _) = (by_table["paged"] for by_table in found)
    assert loss == other_loss < 2  # without the table 2.8


@pytest.fixture(scope="module")
def text_of_trigrams(tmp_path_factory):
    """Return a file whose next byte mostly depends on the last three."""
    random = np.random.default_rng(0)
    following = random.integers(16, size=(16, 16, 16))
    values = [1, 2, 3]
    for is_free in random.random(60_000) < 0.05:
        values.append(random.integers(16) if is_free else following[tuple(values[-3:])])
    file = tmp_path_factory.mktemp("text") / "trigrams"
    file.write_bytes((np.array(values) + ord("a")).astype(np.uint8).tobytes())
    return str(file)


def test_tables_of_ngrams_lower_the_loss(text_of_trigrams, one_thread):
    arguments = f"{text_of_trigrams} {NGRAM_LM} --steps 60 --table-lr 0.1 --compare"
    found = program("ngram_lm")["main"](arguments.split())
    losses = {table: loss for table, (loss, _) in found.items()}
    assert losses["paged"] == losses["device"] < losses["none"] / 2  # 0.8 and 2.8


def test_a_step_reads_its_page_once(text_of_trigrams, one_thread, monkeypatch):
    pages, read = [], RowGroup.read
    monkeypatch.setattr(RowGroup, "read", lambda group, rows: pages.append(1) or read(group, rows))
    names = program("ngram_lm")
    losses = []
    for further in ["", "--checkpoint"]:
        arguments = f"--table device --accumulate 3 --steps 7 {NGRAM_LM} {further}"
        found = names["main"]([text_of_trigrams, *arguments.split()])
        losses.append(found["device"][0])
        assert len(pages) == 7 + names["EVALUATED"]
        pages.clear()
    assert losses[0] == losses[1]


def test_ngrams_do_not_reach_over_the_start_of_a_document():
    options = SimpleNamespace(orders=[2, 3], hashes=2, rows=10_000)
    window = torch.tensor(list(b"..abc\nabc"))  # ids are those of all bytes but the first two
    ids = program("ngram_lm")["ngram_ids"](window, options)
    assert (ids > 0).sum(1).tolist() == [4, 4, 4, 4, 0, 2, 4]
    assert torch.equal(ids[1, :2], ids[5, :2]) and torch.equal(ids[2], ids[6])
    assert len(ids[ids > 0].unique()) == 22 - 6  # those of "ab", "bc" and "abc" are equal


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


@pytest.mark.filterwarnings("error::UserWarning")
def test_the_script_from_speedtorch_runs():
    page = (DOCS / "moving.md").read_text(encoding="utf-8")
    _, section = page.split("## From SpeedTorch")
    (script,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names = {}
    exec(compile(script, "moving.md", "exec"), names)
    assert names["losses"][-1] < 0.7 * names["losses"][0]
