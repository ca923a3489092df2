"""Ranks that share a table fail together, and go on together."""

import contextlib
import copy
import os
import pickle
import re
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import group

from tests.support.rank_processes import Pool
from w2v import PagedEmbedding, PagedOptimizer
from w2v.distributed import launcher
from w2v.distributed.ranks import SINGLE

ROWS, DIM = 20, 4
GOOD = {"ids": [1, 2, 2, 7]}


@pytest.fixture(scope="module")
def pool():
    with contextlib.closing(Pool(2)) as processes:
        yield processes


def make(ranks, rows=ROWS, **settings):
    process_group = group.WORLD if ranks.size > 1 else None
    table = PagedEmbedding(rows, DIM, seed=1, process_group=process_group, **settings)
    return table, PagedOptimizer(table, "Adagrad", lr=0.1)


def train(table, paged, batches):
    for batch in batches:
        paged.zero_grad()
        table(batch["ids"]).square().sum().backward()
        paged.step()


def message_of(body, *arguments):
    """Return type and text of what the body raises."""
    try:
        body(*arguments)
    except Exception as error:
        return type(error), str(error)
    return None


def refused_ids(ranks, ids):
    """Give wrong ids to rank 1, after and before a good step."""
    table, paged = make(ranks)
    train(table, paged, [GOOD])
    before = table.weight.clone()
    refused = message_of(train, table, paged, [{"ids": ids if ranks.rank else [3, 4]}])
    paged.step()
    assert torch.equal(table.weight, before)
    train(table, paged, [GOOD])
    assert not torch.equal(table.weight, before)
    return refused


@pytest.mark.parametrize(
    "ids, error, text, copied",
    [
        ([0, ROWS], IndexError, "id 20 is not a row; rows are 0 to 19", IndexError),
        ([-1], IndexError, "id -1 is not a row; rows are 0 to 19", IndexError),
        ([1.5], ValueError, "ids are torch.float32 on cpu; give int32 or int64", RuntimeError),
    ],
)
def test_wrong_ids_of_one_rank_are_refused_by_all(pool, ids, error, text, copied):
    of_other, own = pool.run(refused_ids, ids)
    assert own == (error, text)
    assert of_other == (copied, f"{error.__name__}: {text} (rank 1)")


def stopped_pages(ranks, ends, cached):
    """Read batches of which rank 1 has one that is wrong, or no more."""
    settings = {"gpu_bytes": "95%"} if cached else {}
    (table, paged), used = make(ranks, **settings), []

    def loader():
        for number in range(6):
            if ranks.rank == 1 and number == 3:
                if ends == "ends":
                    return
                if ends == "raises":
                    raise OSError("disk error")
                yield {"ids": [ROWS]}
            yield {"ids": [number, number + 4 * ranks.rank, 11]}

    def use():
        for batch in paged.pages(loader(), "ids"):
            used.append(batch)
            train(table, paged, [batch])

    stopped = message_of(use)
    train(table, paged, paged.pages([GOOD], "ids"))
    return stopped, len(used), table.state_dict()


@pytest.mark.parametrize("cached", [False, True], ids=["plain", "cached"])
@pytest.mark.parametrize("ends", ["ends", "raises", "wrong id"])
def test_pages_end_on_all_ranks_at_the_same_batch(pool, ends, cached):
    (of_other, used, weights), (own, its_used, _) = pool.run(stopped_pages, ends, cached)
    assert used == its_used == 3
    expected = {
        "ends": (None, None),
        "raises": ((OSError, "disk error"), (RuntimeError, "OSError: disk error (rank 1)")),
        "wrong id": (
            (IndexError, "id 20 is not a row; rows are 0 to 19"),
            (IndexError, "IndexError: id 20 is not a row; rows are 0 to 19 (rank 1)"),
        ),
    }
    assert (own, of_other) == expected[ends]
    table, paged = make(SINGLE)
    for number in range(3):  # the mean of two ranks
        train_on_sum(table, paged, [number, number, 11, number, number + 4, 11])
    train_on_sum(table, paged, GOOD["ids"] * 2)
    torch.testing.assert_close(table.state_dict(), weights, rtol=1e-6, atol=1e-7)


def train_on_sum(table, paged, ids):
    paged.zero_grad()
    (table(ids).square().sum() / 2).backward()
    paged.step()


def left_pages(ranks):
    """Leave pages early, and lose a backward pass between page and step."""
    table, paged = make(ranks)
    batches = [{"ids": [number, number + 5 + ranks.rank]} for number in range(9)]
    for batch in paged.pages(batches, "ids"):
        loss = table(batch["ids"]).sum()
        if batch is batches[2]:
            break
        if batch is not batches[1]:
            loss.backward()
            paged.step()
    train(table, paged, paged.pages(batches[4:6], "ids"))
    return table.state_dict()


def test_pages_that_are_left_and_a_step_that_is_left_out(pool):
    found, _ = pool.run(left_pages)
    table, paged = make(SINGLE)
    (table([0, 5]).sum() / 2 + table([0, 6]).sum() / 2).backward()
    paged.step()
    for number in (4, 5):
        train_on_sum(table, paged, [number, number + 5, number, number + 6])
    torch.testing.assert_close(table.state_dict(), found, rtol=1e-6, atol=1e-7)


def changed_ids(ranks):
    table, paged = make(ranks)
    batches = [{"ids": torch.tensor(ids)} for ids in ([1, 2], [3, 4], [1, 5])]
    for batch in paged.pages(batches, "ids"):
        batch["ids"] += 7
        train(table, paged, [batch])
        train(table, paged, [batch])  # the same page again
    return table.state_dict()


def test_ids_that_change_after_they_were_sent_are_sent_anew(pool):
    found, _ = pool.run(changed_ids)
    assert torch.equal(found["weight"], changed_ids(SINGLE)["weight"])


def refusals(ranks, folder):
    """Return what is refused on this rank, by name."""
    table, paged = make(ranks)
    (table([1, 2]).sum()).backward()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    found = {
        "scaler": message_of(scaler.step, paged),
        "copy": message_of(copy.deepcopy, table),
        "pickle": message_of(pickle.dumps, paged),
        "npy": message_of(table.store.save, folder / "x.npy"),
        "path": message_of(lambda: make(ranks, storage="mmap", path=folder / "table")),
        "shape": message_of(lambda: make(ranks, ROWS + ranks.rank)),
        "alone": message_of(PagedEmbedding(3, 3), [1]),
        "group": message_of(
            lambda: PagedEmbedding(3, 3, process_group=dist.new_group([0])) and None
        ),
        "load": message_of(paged.load, folder / "none"),
        "mixed": message_of(lambda: PagedOptimizer([table, PagedEmbedding(3, 3)], "SGD", lr=1.0)),
    }
    before = table.weight.clone()
    make(ranks, ROWS + 1)[1].save(folder / "rows", step=1)
    found["rows"] = message_of(paged.load, folder / "rows")
    assert torch.equal(table.weight, before)
    paged.save(folder / "damaged", step=1)
    found["step"] = message_of(paged.save, folder / "damaged", 1)
    (file,) = (folder / "damaged").glob("*/*rank-1*")
    if ranks.rank == 0:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    found["damaged"] = message_of(paged.load, folder / "damaged")
    return found


def test_what_ranks_cannot_do_is_refused_in_one_line(pool, tmp_path):
    words = {
        "scaler": "would not agree on GradScaler's factor; use torch.autocast with bfloat16",
        "copy": "a table of several ranks is not copied or pickled; use state_dict()",
        "pickle": "a table of several ranks is not copied or pickled; use state_dict()",
        "npy": "x.npy cannot hold rows of several ranks; use PagedOptimizer.save",
        "path": "rows of several ranks are in no file",
        "shape": "num_embeddings is 20 for rank 0, but 21 for rank 1; make the same table on all",
        "alone": "cannot train in 2 processes: .* make it with process_group=",
        "group": "process_group does not have this process; make the table on its ranks",
        "load": "none holds no checkpoint; give a folder of PagedOptimizer.save",
        "mixed": "tables differ in process_group; give all of them the same",
        "rows": "rows/step-00000001 holds the table .*'rows': 21.* this run's is .*'rows': 20",
        "step": "damaged has step 1, and step=1 is not later; give another folder",
        "damaged": "its CRC-32 is",
    }
    first, second = pool.run(refusals, tmp_path)
    assert first.pop("group") is None  # one rank alone is a table of one process
    for name, (_, text) in (first | second).items():
        assert "\n" not in text, name
        assert re.search(words[name], text), text
    assert first.keys() | {"group"} == second.keys() == words.keys()


def lose_a_rank(ranks, ahead):
    """Exit on rank 1 in its third step; return what rank 0 raises, and when."""
    launcher.PAUSE_SECONDS = 0.1
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
    table, paged = make(ranks)
    head = nn.parallel.DistributedDataParallel(nn.Linear(DIM, 1))
    begun = time.monotonic()

    def steps():
        batches = [GOOD] * 9
        for number, batch in enumerate(paged.pages(batches, "ids") if ahead else batches):
            if ranks.rank and number == 2:
                os._exit(9)
            head(table(batch["ids"])).sum().backward()
            paged.step()

    found = message_of(steps)
    return found, time.monotonic() - begun


@pytest.mark.parametrize("ahead", [False, True])
def test_a_killed_rank_ends_the_other_with_one_line(ahead):
    pool = Pool(2)
    for pipe in pool._pipes:
        pipe.send((lose_a_rank, (ahead,)))
    failed, ((error, text), seconds) = pool._pipes[0].recv()
    assert not failed and seconds < 30
    assert error.__name__ == "RankLost" and "another of 2 ranks is lost: " in text
    assert "\n" not in text and pool.close() == [2, 9]
