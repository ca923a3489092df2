"""What an embedding or a row store cannot do is refused in one line that names the value, and nothing is changed."""

import gc

import numpy as np
import pytest
import torch

from tests.unit.test_embedding import DIM, ROWS, embedding, everywhere, row_store
from w2v.api.embedding import Embedding, RowStore
from w2v.model.table import normal

BAD_IDS = [
    ([0, ROWS], f"id {ROWS} is not a row; the table's {ROWS} rows are 0 to {ROWS - 1}"),
    ([-1, 2], "id -1 is not a row"),
    (torch.tensor([1.0]), "ids are torch.float32 on cpu; give int32 or int64"),
    (np.array([1], np.uint8), "ids are torch.uint8"),
    (torch.tensor([True]), "ids are torch.bool"),
    (
        torch.empty(2, dtype=torch.int64, device="meta"),
        "ids are torch.int64 on meta; give int32 or int64 on the CPU or a GPU",
    ),
]


@everywhere
@pytest.mark.parametrize("ids, words", BAD_IDS, ids=str)
def test_bad_ids_are_refused(tmp_path, storage, device, ids, words):
    table = embedding(tmp_path, storage, device)
    before = table.table.records_VR.clone()
    for use in (table.get, table.page, lambda ids: table.put(ids, torch.ones(len(ids), DIM))):
        with pytest.raises(ValueError, match=words):
            use(ids)
    table.step(table.page([0, ROWS - 1]))  # nothing is left in flight, and no error behind
    table.flush()
    assert torch.equal(table.table.records_VR, before)


@pytest.mark.parametrize(
    "values, words",
    [
        (
            torch.ones(2, DIM + 1),
            rf"values have shape \[2, {DIM + 1}\], but these ids take \[2, {DIM}\]",
        ),
        (torch.ones(DIM), rf"values have shape \[{DIM}\]"),
        (
            torch.ones(2, DIM, dtype=torch.int64),
            "values are torch.int64 on cpu; give numbers in floating point",
        ),
        (torch.ones(2, DIM, device="meta"), "values are torch.float32 on meta"),
    ],
)
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
        for use in (
            lambda p: p.weight,
            lambda p: p.vectors,
            lambda p: p.slots,
            lambda p: p.rows,
            table.step,
        ):
            with pytest.raises(
                ValueError,
                match="this page is spent: it was written back or released; ask for a new one",
            ):
                use(page)


def test_a_page_of_another_embedding_is_refused(tmp_path):
    table, other = embedding(tmp_path), embedding(tmp_path)
    page = other.page([1])
    with pytest.raises(
        ValueError,
        match=r"not one of Embedding\(9, 6, storage='cpu', device='cpu'\); step it with the embedding that",
    ):
        table.step(page)
    other.step(page)


@everywhere
def test_a_row_is_in_one_page_at_a_time(tmp_path, storage, device):
    table = embedding(tmp_path, storage, device)
    first, second = table.page([1, 2, 5]), table.page([3, 4])
    for use in (table.page, lambda ids: table.put(ids, torch.ones(len(ids), DIM))):
        with pytest.raises(
            ValueError,
            match="row 4 is also in another page in flight; step or release that page first",
        ):
            use([0, 8, 4, 5])
    with pytest.raises(
        ValueError, match=r"2 page\(s\) are in flight, which would overwrite rows of x.npy"
    ):
        table.load("x.npy")
    assert table.get([4]).shape == (1, DIM)  # reading is no harm
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


@pytest.mark.parametrize(
    "settings, words",
    [
        (
            {"optimizer": "adamax"},
            "optimizer.name=adamax is not a torch.optim class; did you mean Adamax",
        ),
        ({"optimizer": "Muon"}, "optimizer.name=Muon .*cannot be paged"),
        ({"lr": -1.0}, "optimizer.lr=-1.0"),
        ({"step": "rows"}, "step='rows' is unknown; choose 'table' or 'row'"),
        ({"device": "gpu"}, "device='gpu' cannot be used"),
        ({"device": "meta"}, "device='meta' is not the CPU or the current GPU"),
        ({"rows": 0}, "a table of 0 rows"),
        (
            {"optimizer": "Adam", "step": "row", "dtype": torch.bfloat16},
            "cannot hold the state 'step' that counts for each row",
        ),
        ({"init": normal(DIM + 1, 1.0, 1)}, rf"init gives \[9, {DIM + 1}\] for 9 rows"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, settings, words):
    with pytest.raises(ValueError, match=words) as error:
        embedding(tmp_path, **settings)
    assert "\n" not in str(error.value)


def test_a_table_that_fails_leaves_no_file(tmp_path):
    for settings in ({"init": normal(DIM + 1, 1.0, 1)}, {"device": "gpu"}):
        with pytest.raises(ValueError):
            embedding(tmp_path, "mmap", **{"device": "cpu"} | settings)
    gc.collect()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "settings", [{"storage": "cuda"}, {"storage": "pinned"}, {"device": "cuda"}], ids=str
)
def test_without_a_gpu_its_use_is_refused(tmp_path, settings):
    with pytest.raises(ValueError, match=r"=.(cuda|pinned).*; use (storage|device)='cpu'"):
        embedding(tmp_path, **{"device": None} | settings)


def save_other(path, kind):
    if kind == "text":
        path.write_text("no numbers")
    elif path.suffix == ".npy":
        shape, dtype = {
            "rows": ((ROWS - 1, DIM), np.float32),
            "dtype": ((ROWS, DIM), np.int32),
            "dim": ((3,), np.float32),
        }[kind]
        np.save(path, np.ones(shape, dtype))
    else:
        folder = path.parent / kind
        rows, dtype = ROWS - (kind == "rows"), torch.float16 if kind == "dtype" else torch.float32
        optimizer = "SGD" if kind == "dim" else "Adamax"
        folder.mkdir()
        Embedding(rows, DIM, optimizer=optimizer, lr=1.0, dtype=dtype).save(path)


@pytest.mark.parametrize("ending", [".npy", ".safetensors"])
@pytest.mark.parametrize("kind", ["rows", "dtype", "dim", "text"])
def test_files_of_another_table_are_refused(tmp_path, ending, kind):
    table, path = embedding(tmp_path), tmp_path / f"x{ending}"
    before = table.table.records_VR.clone()
    save_other(path, kind)
    with pytest.raises(ValueError, match=f"x{ending} (holds|cannot be read|is not)") as error:
        table.load(path)
    assert "\n" not in str(error.value) and torch.equal(table.table.records_VR, before)
    if ending == ".npy" and kind in ("dtype", "dim", "text"):
        with pytest.raises(ValueError, match=r"x.npy (holds .*astype|cannot be read)"):
            RowStore.open(path)
    with pytest.raises(
        ValueError,
        match=r"x.bin has the ending '.bin'; choose .npy for the weights, or .safetensors",
    ):
        table.save(tmp_path / "x.bin")
