"""Row stores return what was put, in memory and in files."""

import copy
import pickle
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from tests.support.each_case import each_case
from tests.support.embeddings import DIM, ROWS, row_store, stored
from w2v import RowStore


@stored
@each_case("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_come_back_as_they_were_put(tmp_path, storage, device, dtype):
    with torch.inference_mode():
        store = row_store(tmp_path, storage, device, dtype=dtype)
    assert (store.bytes, len(store)) == (ROWS * 128, ROWS)
    values = torch.randn(2, 2, DIM, dtype=torch.float64, requires_grad=True)
    store.put(np.array([[3, 0], [8, 3]], np.int32), values)
    found = store.get(torch.tensor([8, 5, 3, 0]))
    assert (found.dtype, found.device.type) == (dtype, device)
    # Row 5 was never put, and of the two values for row 3 the last one counts.
    expected = torch.stack([values[1, 0], torch.zeros(DIM), values[1, 1], values[0, 1]])
    assert torch.equal(found.cpu(), expected.to(dtype))
    store.put(torch.tensor(2), torch.ones(DIM))
    assert store.get(torch.tensor(2)).tolist() == [1] * DIM


@stored
def test_ids_may_be_empty(tmp_path, storage, device):
    store = row_store(tmp_path, storage, device)
    for ids in (torch.empty(0, dtype=torch.int64), []):
        store.put(ids, torch.empty(0, DIM))
        assert store.get(ids).shape == (0, DIM)
    assert store.get(torch.empty(0, 2, dtype=torch.int64)).shape == (0, 2, DIM)


@stored
def test_the_last_of_many_equal_ids_wins(storage, device, tmp_path):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(ROWS, (5000,), generator=generator)
    values = torch.randn(len(ids), DIM, generator=generator)
    store = row_store(tmp_path, storage, device)
    store.put(ids, values)
    expected = torch.stack([values[ids == row][-1] for row in range(ROWS)])
    assert torch.equal(store.get(range(ROWS)).cpu(), expected)
    assert torch.equal(store.get(ids).cpu(), expected[ids])


@stored
def test_errors_of_calls_that_do_not_block_come_later(storage, device, tmp_path):
    store = row_store(tmp_path, storage, device)
    good = torch.ones(2, DIM)
    store.put([1, 2], good, non_blocking=True)
    rows = store.get([1, 2], non_blocking=True)
    store.flush()
    assert torch.equal(rows.cpu(), good)
    with pytest.raises(IndexError, match=f"id {ROWS} is not a row"):
        store.put([3, ROWS], good, non_blocking=True)
        store.flush()
    assert not store.get([3]).any()
    with pytest.raises(IndexError, match="id -1 is not a row"):
        store.get([-1], non_blocking=True)
        store.flush()
    store.flush()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_has_rows_of_its_own(tmp_path, duplicate):
    store = row_store(tmp_path, dtype=torch.bfloat16)
    store.put([3], torch.ones(1, DIM))
    other = duplicate(store)
    assert torch.equal(other.table.records_VR, store.table.records_VR)
    assert other.table.scalars == store.table.scalars
    other.put([3], torch.zeros(1, DIM))
    assert store.get([3]).eq(1).all()
    in_file = row_store(tmp_path, "mmap")
    with pytest.raises(ValueError, match="rows in a file are not copied or pickled; copy the file"):
        duplicate(in_file)


@stored
@each_case("dtype", [np.float32, np.float16])
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
    store.save(tmp_path / "made/copy.npy")
    copy = np.load(tmp_path / "made/copy.npy")
    turned = tmp_path / "turned.npy"
    np.save(turned, np.asfortranarray(rows))
    refused = pytest.raises(ValueError, match="in Fortran order")
    with refused if storage == "mmap" else nullcontext():
        opened = RowStore.open(turned, storage=storage, device=device)
        assert np.array_equal(opened.get(range(ROWS)).cpu().numpy(), rows)
    assert copy.dtype == dtype
    assert np.array_equal(copy, changed)
    store.save(path)  # with "mmap" the file that the rows are in
    store.put([5], rows[5:6])
    store.flush()
    assert np.array_equal(np.load(path), rows if storage == "mmap" else changed)
