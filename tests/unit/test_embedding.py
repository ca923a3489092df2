"""Paged embeddings in models of one's own: they train as nn.Embedding does, and give back what was put."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from w2v.api.embedding import Embedding, RowStore
from w2v.model.optim import rowwise_optimizers

ROWS, DIM = 9, 6
GPU = pytest.mark.gpu
PLACES = [  # storage, device
    ("cpu", "cpu"),
    ("mmap", "cpu"),
    *(pytest.param(storage, "cuda", marks=GPU) for storage in ("cpu", "mmap", "pinned", "cuda")),
]
everywhere = pytest.mark.parametrize("storage, device", PLACES)


def embedding(tmp_path, storage="cpu", device="cpu", rows=ROWS, **settings):
    settings = {"optimizer": "Adamax", "lr": 0.1} | settings
    path = tmp_path / "embedding" if storage == "mmap" else None
    return Embedding(rows, DIM, storage=storage, device=device, path=path, **settings)


def row_store(tmp_path, storage="cpu", device="cpu", **settings):
    return RowStore(
        ROWS,
        DIM,
        storage=storage,
        device=device,
        path=tmp_path / "rows" if storage == "mmap" else None,
        **settings,
    )


def batches(steps=5, count=40):
    """Ids with duplicates that have every row, in two dimensions, and what to predict from them."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        ids = torch.cat(
            [
                torch.randperm(ROWS, generator=generator),
                torch.randint(ROWS, (count - ROWS,), generator=generator),
            ]
        )
        yield ids.view(2, -1), torch.randn(2, count // 2, generator=generator)


def loss_of(head, vectors, target):
    return ((head(vectors.tanh()).squeeze(-1) - target) ** 2).mean()


@everywhere
@pytest.mark.parametrize("step", ["table", "row"])
@pytest.mark.parametrize("name", rowwise_optimizers())
def test_a_model_trains_as_with_nn_embedding(tmp_path, storage, device, name, step):
    torch.manual_seed(0)
    paged, dense = (
        embedding(tmp_path, storage, device, optimizer=name, step=step),
        nn.Embedding(ROWS, DIM, device=device),
    )
    dense.weight.data.copy_(paged.get(range(ROWS)))
    heads = [nn.Linear(DIM, 1).to(device) for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    sgd = [torch.optim.SGD(head.parameters(), lr=0.1) for head in heads]
    dense_optimizer = getattr(torch.optim, name)(dense.parameters(), lr=0.1, foreach=False)

    for turn, (ids, target) in enumerate(batches()):
        ids, target, lr = ids.to(device), target.to(device), 0.1 / (1 + turn)
        page = paged.page(ids)
        assert page.vectors.shape == (*ids.shape, DIM) and torch.equal(
            page.vectors, page.weight[page.slots]
        )
        loss = loss_of(heads[0], page.vectors, target)
        dense_optimizer.zero_grad()
        dense_loss = loss_of(heads[1], dense(ids), target)
        torch.testing.assert_close(loss, dense_loss, rtol=0, atol=0)
        for own_loss, optimizer in zip((loss, dense_loss), sgd, strict=True):
            optimizer.zero_grad()
            own_loss.backward()
            optimizer.step()
        paged.step(page, lr)
        dense_optimizer.param_groups[0]["lr"] = lr
        dense_optimizer.step()
    assert torch.equal(paged.get(range(ROWS)), dense.weight)


@everywhere
def test_only_rows_of_the_page_are_stepped_and_equal_ids_count_together(tmp_path, storage, device):
    table = embedding(tmp_path, storage, device, optimizer="SGD")
    before = table.get(range(ROWS))
    page = table.page([[4, 1, 4], [4, 7, 4]])
    assert page.rows.tolist() == [1, 4, 7] and page.slots.tolist() == [[1, 0, 1], [1, 2, 1]]
    page.vectors.sum().backward()
    table.step(page, lr=0.5)
    expected = before - 0.5 * torch.tensor([0, 1, 0, 0, 4, 0, 0, 1, 0], device=device)[:, None]
    torch.testing.assert_close(table.get(range(ROWS)), expected, rtol=0, atol=0)


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_come_back_as_they_were_put(tmp_path, storage, device, dtype):
    store = row_store(tmp_path, storage, device, dtype=dtype)
    assert store.bytes == ROWS * 128 and len(store) == ROWS and not store.get(range(ROWS)).any()
    values = torch.randn(2, 2, DIM, dtype=torch.float64)
    store.put(np.array([[3, 0], [8, 3]], np.int32), values)
    found = store.get(torch.tensor([[8, 5], [3, 0]]))
    assert found.dtype == dtype and found.device.type == device
    expected = torch.stack([values[1, 0], torch.zeros(DIM), values[1, 1], values[0, 1]]).view(
        2, 2, DIM
    )  # of equal ids the last
    assert torch.equal(found.cpu(), expected.to(dtype))
    assert store.get(torch.empty(0, 2, dtype=torch.int64)).shape == (0, 2, DIM)
    store.put(torch.empty(0, dtype=torch.int64), torch.empty(0, DIM))
    store.put(torch.tensor(2), torch.ones(DIM))
    assert store.get(torch.tensor(2)).tolist() == [1] * DIM


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@everywhere
def test_tables_of_16_bits_learn(tmp_path, storage, device, dtype):
    table = embedding(tmp_path, storage, device, dtype=dtype)
    target = torch.randn(ROWS, DIM).to(device)
    for _ in range(200):
        page = table.page(range(ROWS))
        assert page.weight.dtype == torch.float32
        ((page.vectors - target) ** 2).sum().backward()
        table.step(page)
    assert (table.get(range(ROWS)).float() - target).abs().max() < 0.1


@everywhere
@pytest.mark.parametrize("step", ["table", "row"])
def test_a_page_outside_the_loss_changes_nothing(tmp_path, storage, device, step):
    table = embedding(tmp_path, storage, device, optimizer="NAdam", step=step)
    before, scalars = (
        table.table.records_VR.clone(),
        {key: value.clone() for key, value in table.table.scalars.items()},
    )
    table.step(table.page([0, 3]))
    empty = table.page(torch.empty(0, dtype=torch.int64))
    assert empty.vectors.shape == (0, DIM)
    table.flush()
    assert torch.equal(table.table.records_VR, before) and table.table.scalars == scalars
    empty.vectors.sum().backward()
    table.step(empty)


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


def test_weights_and_state_in_a_file_go_on_in_the_next_run(tmp_path):
    """Two runs over one file train as one run in memory."""
    one = embedding(tmp_path, optimizer="NAdam", dtype=torch.bfloat16, seed=3)
    for turn, (ids, target) in enumerate(batches(4)):
        if turn in (0, 2):
            other = embedding(tmp_path, "mmap", optimizer="NAdam", dtype=torch.bfloat16, seed=3)
        for table in (one, other):
            page = table.page(ids)
            (page.vectors.sum(-1) * target).sum().backward()
            table.step(page)
        if turn == 1:
            other.flush()
    assert (
        torch.equal(one.table.records_VR, other.table.records_VR)
        and one.table.scalars == other.table.scalars
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@everywhere
def test_save_and_load(tmp_path, storage, device, dtype):
    table = embedding(tmp_path, storage, device, optimizer="Adam", dtype=dtype)
    for ids, target in batches(2):
        page = table.page(ids)
        (page.vectors.sum(-1) * target.to(device)).sum().backward()
        table.step(page)
    table.save(tmp_path / "x.npy")
    table.save(tmp_path / "x.safetensors")
    assert (tmp_path / "x.safetensors").stat().st_mode == (tmp_path / "x.npy").stat().st_mode
    assert np.array_equal(np.load(tmp_path / "x.npy"), table.get(range(ROWS)).float().cpu().numpy())
    other = embedding(tmp_path, "cpu", device, optimizer="Adam", dtype=dtype, seed=2)
    other.load(tmp_path / "x.npy")
    assert (
        torch.equal(other.get(range(ROWS)), table.get(range(ROWS)))
        and not other.table["exp_avg"].any()
    )
    other.load(tmp_path / "x.safetensors")
    assert (
        torch.equal(other.table.records_VR.cpu(), table.table.records_VR.cpu())
        and other.table.scalars == table.table.scalars
    )
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@everywhere
def test_an_npy_file_is_a_row_store(tmp_path, storage, device, dtype):
    path, rows = tmp_path / "x.npy", np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(dtype)
    np.save(path, rows)
    store = RowStore.open(path, storage=storage, device=device)
    assert np.array_equal(store.get(range(ROWS)).cpu().numpy(), rows)
    store.put([5], np.ones((1, DIM)))
    store.flush()
    changed = np.concatenate([rows[:5], np.ones((1, DIM), dtype), rows[6:]])
    assert np.array_equal(np.load(path), changed if storage == "mmap" else rows)
    store.save(tmp_path / "copy.npy")
    copy = np.load(tmp_path / "copy.npy")
    assert copy.dtype == dtype and np.array_equal(copy, changed)
    store.save(path)  # over the file that it may lie in itself
    store.put([5], rows[5:6])
    store.flush()
    assert np.array_equal(np.load(path), rows if storage == "mmap" else changed)


def test_the_examples_of_the_guide_run(tmp_path, monkeypatch, capsys):
    guide = (Path(__file__).parents[2] / "docs" / "library.md").read_text(encoding="utf-8")
    example, rows = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(example, "library.md", "exec"), names)
    first, last = (
        float(number)
        for number in re.search(r"loss ([\d.]+) -> ([\d.]+)", capsys.readouterr().out).groups()
    )
    assert 0.6 < first < 0.8 and last < 0.25
    assert np.load("items.npy").shape == (names["ITEMS"], names["DIM"])
    names["users"].load("users.safetensors")
    exec(compile(rows, "library.md", "exec"), {})
