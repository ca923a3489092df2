"""Invalid uses of an embedding or a row store are refused in one line."""

import gc

import numpy as np
import pytest
import torch

from tests.support.embeddings import DIM, ROWS, embedding, everywhere, row_store
from w2v.api.embedding import Embedding, RowStore
from w2v.model.table import normal

BAD_IDS = [
    ([0, ROWS], f"id {ROWS} is not a row; rows are 0 to {ROWS - 1}"),
    ([-1, 2], "id -1 is not a row"),
    (torch.tensor([1.0]), "ids are torch.float32 on cpu; give int32 or int64"),
    (np.array([1], np.uint8), "ids are torch.uint8"),
    (torch.tensor([True]), "ids are torch.bool"),
    (torch.empty(2, dtype=torch.int64, device="meta"), "ids are torch.int64 on meta"),
]


@everywhere
@pytest.mark.parametrize("ids, words", BAD_IDS, ids=str)
def test_bad_ids_are_refused(tmp_path, storage, device, ids, words):
    table = embedding(tmp_path, storage, device)
    before = table.table.records_VR.clone()
    for use in (table.get, table.page, lambda ids: table.put(ids, torch.ones(len(ids), DIM))):
        with pytest.raises(ValueError, match=words):
            use(ids)
    table.step(table.page([0, ROWS - 1]))  # no row is still taken
    table.flush()
    assert torch.equal(table.table.records_VR, before)


BAD_VALUES = [
    (torch.ones(2, DIM + 1), rf"shape \[2, {DIM + 1}\], but these ids take \[2, {DIM}\]"),
    (torch.ones(DIM), rf"values have shape \[{DIM}\]"),
    (torch.ones(2, DIM, dtype=torch.int64), "values are torch.int64 on cpu; give floating-point"),
    (torch.ones(2, DIM, device="meta"), "values are torch.float32 on meta"),
]


@pytest.mark.parametrize("values, words", BAD_VALUES)
def test_bad_values_are_refused(tmp_path, values, words):
    store = row_store(tmp_path)
    with pytest.raises(ValueError, match=words):
        store.put([1, 2], values)
    assert not store.table.records_VR.any()


@everywhere
def test_a_spent_page_cannot_be_used(tmp_path, storage, device):
    table = embedding(tmp_path, storage, device)
    stepped, released = table.page([1]), table.page([2])
    released.release()
    stepped.vectors.sum().backward()
    table.step(stepped)
    for page in (stepped, released):
        for name in ("weight", "vectors", "slots", "rows"):
            with pytest.raises(ValueError, match="this page is spent"):
                getattr(page, name)
        with pytest.raises(ValueError, match="this page is spent"):
            table.step(page)


def test_a_page_of_another_embedding_is_refused(tmp_path):
    table, other = embedding(tmp_path), embedding(tmp_path)
    page = other.page([1])
    with pytest.raises(ValueError, match=r"not one of Embedding\(9, 6, storage='cpu', .*; step it"):
        table.step(page)
    other.step(page)


@everywhere
def test_a_row_is_in_one_page_at_a_time(tmp_path, storage, device):
    table = embedding(tmp_path, storage, device)
    first, second = table.page([1, 2, 5]), table.page([3, 4])
    for use in (table.page, lambda ids: table.put(ids, torch.ones(len(ids), DIM))):
        with pytest.raises(ValueError, match="row 4 is in another page.* release that page"):
            use([0, 8, 4, 5])
    with pytest.raises(ValueError, match=r"2 page\(s\) are in flight; step or release .* x.npy"):
        table.load("x.npy")
    assert table.get([4]).shape == (1, DIM)  # reading is allowed
    table.step(second)
    first.release()
    third = table.page([0, 8, 4, 5])
    del third  # a page that is dropped is released
    gc.collect()
    table.page([4])


@pytest.mark.parametrize("lr", [-0.1, float("nan"), float("inf")])
def test_bad_learning_rates_are_refused_and_the_page_stays(tmp_path, lr):
    table = embedding(tmp_path)
    page = table.page([1])
    with pytest.raises(ValueError, match=f"lr={lr} is no learning rate"):
        table.step(page, lr)
    table.step(page)


BAD_SETTINGS = [
    ({"optimizer": "adamax"}, "optimizer.name=adamax .*did you mean Adamax"),
    ({"optimizer": "Muon"}, "optimizer.name=Muon mixes rows"),
    ({"lr": -1.0}, "optimizer.lr=-1.0"),
    ({"step": "rows"}, "step='rows' is unknown; choose 'table' or 'row'"),
    ({"device": "gpu"}, "device='gpu' cannot be used; choose from cpu"),
    ({"device": "meta"}, "device='meta' cannot be used"),
    ({"rows": 0}, "at least 1 row"),
    ({"optimizer": "Adam", "step": "row", "dtype": torch.bfloat16}, "'step'; use float32"),
    ({"init": normal(DIM + 1, 1.0, 1)}, rf"init gives \[9, {DIM + 1}\] for 9 rows"),
]


@pytest.mark.parametrize("settings, words", BAD_SETTINGS)
def test_bad_settings_are_refused(tmp_path, settings, words):
    with pytest.raises(ValueError, match=words) as error:
        embedding(tmp_path, **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("settings", [{"init": normal(DIM + 1, 1.0, 1)}, {"device": "gpu"}])
def test_a_table_that_fails_leaves_no_file(tmp_path, settings):
    with pytest.raises(ValueError):
        embedding(tmp_path, "mmap", **settings)
    gc.collect()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("settings", [{"storage": "cuda"}, {"storage": "pinned"}], ids=str)
def test_gpu_storage_without_a_gpu_is_refused(tmp_path, settings):
    with pytest.raises(ValueError, match=r"=.(cuda|pinned).* needs .*GPU.*; use storage='cpu'"):
        embedding(tmp_path, device=None, **settings)


def save_other(path, kind):
    """Save text, or rows of another number, dtype or layout."""
    if kind == "text":
        path.write_text("no numbers")
    elif path.suffix == ".npy":
        shapes = {"rows": (ROWS - 1, DIM), "dtype": (ROWS, DIM), "layout": (3,)}
        np.save(path, np.ones(shapes[kind], np.int32 if kind == "dtype" else np.float32))
    else:
        rows = ROWS - 1 if kind == "rows" else ROWS
        optimizer = "SGD" if kind == "layout" else "Adamax"
        dtype = torch.float16 if kind == "dtype" else torch.float32
        Embedding(rows, DIM, optimizer=optimizer, lr=1.0, dtype=dtype).save(path)


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
@pytest.mark.parametrize("kind", ["rows", "dtype", "layout", "text"])
def test_files_of_another_table_are_refused(tmp_path, suffix, kind):
    table, path = embedding(tmp_path), tmp_path / f"x{suffix}"
    before = table.table.records_VR.clone()
    save_other(path, kind)
    with pytest.raises(ValueError, match=f"x{suffix} (holds|cannot be read|is not)") as error:
        table.load(path)
    assert "\n" not in str(error.value)
    assert torch.equal(table.table.records_VR, before)
    if suffix == ".npy" and kind != "rows":
        with pytest.raises(ValueError, match=r"x.npy (holds .*astype|cannot be read)"):
            RowStore.open(path)


def test_a_file_with_another_ending_is_refused(tmp_path):
    with pytest.raises(ValueError, match="ending '.bin'; use .npy .* or .safetensors"):
        embedding(tmp_path).save(tmp_path / "x.bin")
