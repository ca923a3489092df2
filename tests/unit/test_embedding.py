"""Paged embeddings train as nn.Embedding and return what was put."""

import copy
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.embeddings import DIM, ROWS, embedding, everywhere, row_store
from w2v.api.embedding import RowStore
from w2v.config import OPTIMIZERS


def batches(steps=5, count=40):
    """Yield ids [2, n] with every row, some twice, and targets for them."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        every = torch.randperm(ROWS, generator=generator)
        more = torch.randint(ROWS, (count - ROWS,), generator=generator)
        target = torch.randn(2, count // 2, generator=generator)
        yield torch.cat([every, more]).view(2, -1), target


def train_step(table, ids, target):
    page = table.page(ids)
    (page.vectors.sum(-1) * target.to(table.device)).sum().backward()
    table.step(page)


@everywhere
@pytest.mark.parametrize("step", ["table", "row"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_trains_as_with_nn_embedding(tmp_path, storage, device, name, step):
    torch.manual_seed(0)
    paged = embedding(tmp_path, storage, device, optimizer=name, step=step)
    dense = nn.Embedding(ROWS, DIM, device=device)
    dense.weight.data.copy_(paged.get(range(ROWS)))
    dense_optimizer = getattr(torch.optim, name)(dense.parameters(), lr=0.1, foreach=False)
    heads = [nn.Linear(DIM, 1).to(device) for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    sgd = [torch.optim.SGD(head.parameters(), lr=0.1) for head in heads]

    for turn, (ids, target) in enumerate(batches()):
        lr = 0.1 / (1 + turn)
        page = paged.page(ids.to(device))
        assert page.vectors.shape == (*ids.shape, DIM)
        assert torch.equal(page.vectors, page.weight[page.slots])
        dense_optimizer.zero_grad()
        losses = []
        for head, optimizer, vectors in zip(
            heads, sgd, (page.vectors, dense(ids.to(device))), strict=True
        ):
            output = head(vectors.tanh()).squeeze(-1)
            losses.append(((output - target.to(device)) ** 2).mean())
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        torch.testing.assert_close(*losses, rtol=0, atol=0)
        paged.step(page, lr)
        dense_optimizer.param_groups[0]["lr"] = lr
        dense_optimizer.step()
    assert torch.equal(paged.get(range(ROWS)), dense.weight)


@everywhere
def test_only_rows_of_the_page_are_stepped_and_equal_ids_count_together(tmp_path, storage, device):
    table = embedding(tmp_path, storage, device, optimizer="SGD")
    before = table.get(range(ROWS))
    page = table.page([[4, 1, 4], [4, 7, 4]])
    assert page.rows.tolist() == [1, 4, 7]
    assert page.slots.tolist() == [[1, 0, 1], [1, 2, 1]]
    page.vectors.sum().backward()
    table.step(page, lr=0.5)
    expected = before - 0.5 * torch.tensor([0, 1, 0, 0, 4, 0, 0, 1, 0], device=device)[:, None]
    torch.testing.assert_close(table.get(range(ROWS)), expected, rtol=0, atol=0)


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_come_back_as_they_were_put(tmp_path, storage, device, dtype):
    store = row_store(tmp_path, storage, device, dtype=dtype)
    assert (store.bytes, len(store)) == (ROWS * 128, ROWS)
    values = torch.randn(2, 2, DIM, dtype=torch.float64, requires_grad=True)
    store.put(np.array([[3, 0], [8, 3]], np.int32), values)
    found = store.get(torch.tensor([8, 5, 3, 0]))
    assert (found.dtype, found.device.type) == (dtype, device)
    # Row 5 was never put, and of the two values for row 3 the last one counts.
    expected = torch.stack([values[1, 0], torch.zeros(DIM), values[1, 1], values[0, 1]])
    assert torch.equal(found.cpu(), expected.to(dtype))
    store.put(torch.empty(0, dtype=torch.int64), torch.empty(0, DIM))
    assert store.get(torch.empty(0, 2, dtype=torch.int64)).shape == (0, 2, DIM)
    store.put(torch.tensor(2), torch.ones(DIM))
    assert store.get(torch.tensor(2)).tolist() == [1] * DIM


@everywhere
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_tables_learn(tmp_path, storage, device, dtype):
    table = embedding(tmp_path, storage, device, dtype=dtype)
    target = torch.randn(ROWS, DIM).to(device)
    for _ in range(200):
        page = table.page(range(ROWS))
        assert page.weight.dtype == torch.float32
        ((page.vectors - target) ** 2).sum().backward()
        table.step(page)
    assert (table.get(range(ROWS)).float() - target).abs().max() < 0.1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_16_bit_rows_in_float32(tmp_path, name):
    def trained(dtype):
        table = embedding(tmp_path, optimizer=name, lr=0.05, dtype=dtype)
        table.put(range(ROWS), torch.full((ROWS, DIM), 0.5))
        for step in range(3):
            page = table.page(range(ROWS))
            (page.vectors.sum() * (1.0 + step)).backward()
            table.step(page)
        return table

    wide, narrow = trained(torch.float32), trained(torch.bfloat16)
    torch.testing.assert_close(
        narrow.get(range(ROWS)).float(), wide.get(range(ROWS)), rtol=0.03, atol=0.01
    )
    assert {key: narrow.table.scalars[key] for key in wide.table.scalars} == wide.table.scalars


@everywhere
@pytest.mark.parametrize("step", ["table", "row"])
def test_a_page_outside_the_loss_changes_nothing(tmp_path, storage, device, step):
    table = embedding(tmp_path, storage, device, optimizer="NAdam", step=step)
    before = table.table.records_VR.clone()
    scalars = {key: value.clone() for key, value in table.table.scalars.items()}
    table.step(table.page([0, 3]))
    table.flush()
    assert torch.equal(table.table.records_VR, before)
    assert table.table.scalars == scalars


@everywhere
def test_a_page_without_rows_can_be_stepped(tmp_path, storage, device):
    table = embedding(tmp_path, storage, device)
    for ids in (torch.empty(0, dtype=torch.int64), []):
        assert table.get(ids).shape == (0, DIM)
        table.put(ids, torch.empty(0, DIM))
        empty = table.page(ids)
        assert empty.vectors.shape == (0, DIM)
        empty.vectors.sum().backward()
        table.step(empty)


def test_threads_share_an_embedding_and_its_pages_stay_their_own(tmp_path):
    table = embedding(tmp_path, optimizer="SGD", lr=1.0)
    before = table.get(range(ROWS))

    def train(row):
        for _ in range(30):
            page = table.page([row])
            (page.vectors * (row + 1)).sum().backward()
            table.step(page)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads meet inside a step
    try:
        with ThreadPoolExecutor(ROWS) as pool:
            list(pool.map(train, range(ROWS)))
    finally:
        sys.setswitchinterval(interval)
    expected = before - 30 * torch.arange(1, ROWS + 1)[:, None]
    torch.testing.assert_close(table.get(range(ROWS)), expected)


def test_a_copy_trains_on_and_numpy_integers_are_seeds(tmp_path):
    table = embedding(tmp_path, seed=np.int64(3))
    assert torch.equal(table.get([0]), embedding(tmp_path, seed=3).get([0]))
    other = copy.deepcopy(table)
    for each in (table, other):
        train_step(each, torch.arange(ROWS)[None], torch.ones(1, ROWS))
    assert torch.equal(table.get(range(ROWS)), other.get(range(ROWS)))


def test_gradients_accumulate_and_may_be_changed(tmp_path):
    table = embedding(tmp_path, optimizer="SGD", lr=1.0)
    before = table.get([2])
    page = table.page([2])
    for _ in range(3):
        page.vectors.sum().backward()
    nn.utils.clip_grad_value_([page.weight], 2.5)
    table.lr = 0.5
    table.step(page)
    torch.testing.assert_close(table.get([2]), before - 1.25)


def test_two_runs_on_one_file_train_as_one_run_in_memory(tmp_path):
    settings = {"optimizer": "NAdam", "dtype": torch.bfloat16, "seed": 3}
    in_memory = embedding(tmp_path, **settings)
    for turn, batch in enumerate(batches(4)):
        if turn in (0, 2):
            in_file = embedding(tmp_path, "mmap", **settings)
        train_step(in_memory, *batch)
        train_step(in_file, *batch)
        if turn == 1:
            in_file.flush()
    assert torch.equal(in_memory.table.records_VR, in_file.table.records_VR)
    assert in_memory.table.scalars == in_file.table.scalars


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load(tmp_path, storage, device, dtype):
    table = embedding(tmp_path, storage, device, optimizer="Adam", dtype=dtype)
    for batch in batches(2):
        train_step(table, *batch)
    npy, safetensors = tmp_path / "x.npy", tmp_path / "x.safetensors"
    table.save(npy)
    table.save(safetensors)
    assert safetensors.stat().st_mode == npy.stat().st_mode
    assert not list(tmp_path.glob("*.part"))
    rows = table.get(range(ROWS))
    assert np.array_equal(np.load(npy), rows.float().cpu().numpy())
    other = embedding(tmp_path, "cpu", device, optimizer="Adam", dtype=dtype, seed=2)
    other.load(npy)
    assert torch.equal(other.get(range(ROWS)), rows)
    assert not other.table["exp_avg"].any()
    other.load(safetensors)
    assert torch.equal(other.table.records_VR.cpu(), table.table.records_VR.cpu())
    assert other.table.scalars == table.table.scalars


@everywhere
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_an_npy_file_is_a_row_store(tmp_path, storage, device, dtype):
    path, rows = tmp_path / "x.npy", np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(dtype)
    np.save(path, rows)
    store = RowStore.open(path, storage=storage, device=device)
    assert np.array_equal(store.get(range(ROWS)).cpu().numpy(), rows)
    store.put([5], np.ones((1, DIM)))
    store.flush()
    changed = rows.copy()
    changed[5] = 1
    assert np.array_equal(np.load(path), changed if storage == "mmap" else rows)
    store.save(tmp_path / "copy.npy")
    copy = np.load(tmp_path / "copy.npy")
    assert copy.dtype == dtype
    assert np.array_equal(copy, changed)
    store.save(path)  # with "mmap" the file that the rows are in
    store.put([5], rows[5:6])
    store.flush()
    assert np.array_equal(np.load(path), rows if storage == "mmap" else changed)


def test_the_examples_of_the_guide_run(tmp_path, monkeypatch, capsys):
    guide = (Path(__file__).parents[2] / "docs" / "library.md").read_text(encoding="utf-8")
    example, rows = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(example, "library.md", "exec"), names)
    first, last = re.search(r"loss ([\d.]+) -> ([\d.]+)", capsys.readouterr().out).groups()
    assert 0.6 < float(first) < 0.8
    assert float(last) < 0.25
    assert np.load("items.npy").shape == (names["ITEMS"], names["DIM"])
    names["users"].load("users.safetensors")
    exec(compile(rows, "library.md", "exec"), {})
