"""Invalid uses of an embedding or a row store are refused in one line."""

import gc
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nested import nested_tensor
from torch.utils.data import DataLoader, Dataset

from tests.support.each_case import each_case
from tests.support.embeddings import (
    DIM,
    ROWS,
    batches,
    embedding,
    optimizer_state,
    row_store,
    somewhere,
    train_step,
    trainable,
    weights,
)
from tests.support.processes import run_python
from tests.support.torch_kernels import use_torch_kernels
from w2v import PagedEmbedding, PagedEmbeddingBag, PagedOptimizer, RowStore
from w2v.rows.checkpoint import Checkpoints
from w2v.rows.embedding import announced
from w2v.rows.lookup import Readback
from w2v.rows.moves import TorchPlanner
from w2v.rows.table import normal

BAD_IDS = [
    ([0, ROWS], IndexError, f"id {ROWS} is not a row; rows are 0 to {ROWS - 1}"),
    ([-1, 2], IndexError, "id -1 is not a row"),
    (torch.tensor([1.0]), ValueError, "ids are torch.float32 on cpu; give int32 or int64"),
    (np.array([1], np.uint8), ValueError, "ids are torch.uint8"),
    (torch.tensor([True]), ValueError, "ids are torch.bool"),
    (torch.empty(2, dtype=torch.int64, device="meta"), ValueError, "ids are torch.int64 on meta"),
    (torch.eye(2).long().to_sparse(), ValueError, "nested or sparse; give a dense tensor, such"),
    (nested_tensor([torch.tensor([1])], layout=torch.jagged), ValueError, "nested or sparse; give"),
]


@somewhere
@each_case("ids, error, words", BAD_IDS)
def test_bad_ids_are_refused(tmp_path, storage, device, ids, error, words):
    table, optimizer = trainable(tmp_path, storage, device, max_norm=0.1)
    before = table.store.table.records_VR.clone()
    get, put = table.store.get, table.store.put
    for use in (table, get, lambda ids: put(ids, torch.ones(len(ids), DIM))):
        with pytest.raises(error, match=words):
            use(ids)
    optimizer.step()
    table.store.flush()
    assert torch.equal(table.store.table.records_VR, before)


BAD_VALUES = [
    (torch.ones(2, DIM + 1), rf"shape \[2, {DIM + 1}\], but these ids take \[2, {DIM}\]"),
    (torch.ones(DIM), rf"values have shape \[{DIM}\]"),
    (torch.ones(2, DIM, dtype=torch.int64), "values are torch.int64 on cpu; give floating-point"),
    (torch.ones(2, DIM, device="meta"), "values are torch.float32 on meta"),
]


@each_case("values, words", BAD_VALUES)
def test_bad_values_are_refused(tmp_path, values, words):
    store = row_store(tmp_path)
    with pytest.raises(ValueError, match=words):
        store.put([1, 2], values)
    assert not store.table.records_VR.any()


class Breaks(Dataset):
    """Ids of all rows; the third batch cannot be read."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            raise OSError("disk error")
        return list(batches())[index]


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:.*fork")
def test_training_goes_on_after_a_loader_that_breaks_off(tmp_path, workers, ahead, monkeypatch):
    # For so long torch waits for a worker that has failed, once the loader's memory is freed.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    runs = [trainable(tmp_path, optimizer="Adam") for _ in range(2)]
    loader = DataLoader(Breaks(), batch_size=None, num_workers=workers)
    with pytest.raises(OSError, match="disk error"):
        for ids, target in runs[0][1].pages(loader, 0, ahead) if ahead else loader:
            train_step(*runs[0], ids, target)
    train_step(*runs[0], *list(batches())[2])
    for ids, target in batches(3):
        train_step(*runs[1], ids, target)
    assert torch.equal(weights(runs[0][0]), weights(runs[1][0]))
    gc.collect()


devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def cached_pair(rows=60, optimizer="Adam", device="cpu"):
    """Return twins with an optimizer each; the second one has a cache."""
    storage = "pinned" if device == "cuda" else "cpu"
    sizes = ({"storage": storage, "gpu_bytes": size} for size in (0, "25%"))
    twins = [PagedEmbedding(rows, DIM, seed=1, **size) for size in sizes]
    return [(table, PagedOptimizer(table, optimizer, lr=0.1)) for table in twins]


def ids_of(*batches):
    return [{"ids": torch.tensor(ids)} for ids in batches]


def train_on(pair, batches):
    table, optimizer = pair
    for batch in batches:
        optimizer.zero_grad()
        table(batch["ids"]).square().sum().backward()
        optimizer.step()


FAILURES = [
    (ids_of([3, 60]), IndexError, "id 60 is not a row; rows are 0 to 59"),
    (ids_of([-1, 60]), IndexError, "id -1 is not a row"),
    ([{"other": 1}], KeyError, "ids"),
    ([{"ids": torch.ones(2)}], ValueError, "ids are torch.float32"),
]


@devices
@pytest.mark.parametrize("ahead", [1, 2, 9])
@each_case("bad, error, words", FAILURES)
def test_errors_of_pages_come_when_they_are_due(ahead, bad, error, words, device):
    plain, cached = cached_pair(device=device)
    good = ids_of([1, 2, 2], [3, 4], [2, 5, 1])
    for _ in range(2):  # training goes on after the error
        with pytest.raises(error, match=words):
            train_on(cached, cached[1].pages([*good, *bad, *good], "ids", ahead))
        train_on(plain, good)
    train_on(cached, good)
    train_on(plain, good)
    assert torch.equal(weights(cached[0]), weights(plain[0]))


class EndsEarly:
    """Says that it has ten batches, and breaks off or ends after three."""

    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 10

    def __iter__(self):
        yield from ids_of([1, 2], [2, 3], [50, 1])
        if self.error:
            raise self.error


@devices
@pytest.mark.parametrize("error", [None, OSError("disk error")])
def test_pages_of_a_loader_that_ends_early(error, device):
    plain, cached = cached_pair(device=device)
    for pair, loader in (
        (plain, EndsEarly(error)),
        (cached, cached[1].pages(EndsEarly(error), "ids")),
    ):
        if error:
            with pytest.raises(OSError, match="disk error"):
                train_on(pair, loader)
        else:
            train_on(pair, loader)
    assert torch.equal(weights(cached[0]), weights(plain[0]))
    assert not list(cached[1].pages([], "ids"))


@devices
@each_case("leave", ["break", "raise", "skip"])
def test_a_page_that_is_left_before_its_step(leave, device):
    plain, (table, optimizer) = cached_pair(device=device)
    batches = ids_of(*([row, row + 9, 3] for row in range(12)))
    pages = optimizer.pages(batches, "ids", ahead=3)
    for turn, batch in enumerate(pages):
        optimizer.zero_grad()
        loss = table(batch["ids"]).square().sum()
        if turn == 5:
            if leave == "skip":
                continue
            break
        loss.backward()
        optimizer.step()
    if leave == "raise":
        with pytest.raises(RuntimeError, match="stopped"):
            pages.throw(RuntimeError("stopped"))
    done = batches[:5] + (batches[6:] if leave == "skip" else [])
    if leave != "skip":
        train_on((table, optimizer), optimizer.pages(batches[6:], "ids"))
        done += batches[6:]
    train_on(plain, done)
    assert torch.equal(weights(table), weights(plain[0]))


@devices
def test_pages_that_were_prefetched_and_never_used(device):
    """They may take the slots of rows whose gradients wait for the step."""
    pairs = cached_pair(device=device)
    for table, _ in pairs:
        table(torch.arange(14)).square().sum().backward()  # of 15 that have room
    table, optimizer = pairs[1]
    for first in (20, 40):
        with pytest.raises(IndexError, match="id 60"):
            next(optimizer.pages(ids_of([60], [*range(first, first + 14)]), "ids"))
    for _, optimizer in pairs:
        optimizer.step()
    assert torch.equal(weights(table), weights(pairs[0][0]))


def test_an_error_while_a_page_is_prefetched(tmp_path, monkeypatch):
    """What was interrupted half-way is refused from then on."""
    _, cached = cached_pair()
    train_on(cached, ids_of([1, 2], [3, 4]))
    cached[1].save(tmp_path, 1)
    saved = weights(cached[0])
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(TorchPlanner, "move", mock.Mock(side_effect=MemoryError))
        train_on(cached, ids_of([7, 8]))
    for use in (lambda: cached[0].weight.data, lambda: cached[0]([7, 8]), lambda: cached[0]([1])):
        with pytest.raises(RuntimeError, match="inconsistent .*; make the tables anew and load"):
            use()
    table, optimizer = cached_pair()[1]
    assert optimizer.load(tmp_path) == 1 and torch.equal(weights(table), saved)


def test_a_forked_process_does_not_write_cached_rows_to_a_file(tmp_path):
    code = f"""
import os
from w2v import PagedEmbedding, PagedOptimizer
table = PagedEmbedding(9, 4, storage="mmap", path="{tmp_path}/rows", gpu_bytes="50%")
optimizer = PagedOptimizer(table, "SGD", lr=1.0)
def train():
    table([1]).sum().backward()
    optimizer.step()
train()
if not (child := os.fork()):
    raise SystemExit
os.waitpid(child, 0)
before = table.store.table["weight"][1, 0].item()
train()
table.store.flush()
print(before - table.store.table["weight"][1, 0].item())
"""
    done = run_python(code)
    assert float(done.stdout) == pytest.approx(2)  # the child has written neither step


@devices
def test_pages_with_the_same_rows_and_two_pages_a_step(device):
    plain, cached = cached_pair(optimizer="Adamax", device=device)
    batches = ids_of([1, 2, 3], [1, 2, 3], [3, 1], [40, 3], [40, 1], [1, 2, 3])
    for table, optimizer, pages in ((*plain, batches), (*cached, cached[1].pages(batches, "ids"))):
        for turn, batch in enumerate(pages):
            table(batch["ids"]).square().sum().backward()
            if turn % 2:
                optimizer.step()
    assert torch.equal(weights(cached[0]), weights(plain[0]))


@each_case("kind", [torch.tensor, np.array, list])
def test_ids_that_change_after_they_were_read_ahead_are_looked_up_anew(kind):
    plain, cached = cached_pair()
    for pair in (plain, cached):
        batches = [{"ids": kind([1, 2])}, {"ids": kind([3, 4])}]
        for batch in cached[1].pages(batches, "ids") if pair is cached else batches:
            batch["ids"][0] += 7
            train_on(pair, [batch])
    assert torch.equal(weights(cached[0]), weights(plain[0]))


@each_case("key", ["ids", lambda batch: batch["ids"], lambda batch: [batch["ids"]]])
def test_the_ids_of_one_table_need_no_list(key):
    _, (table, optimizer) = cached_pair()
    for batch in optimizer.pages(ids_of([1, 2, 3], [4, 5, 6]), key):
        assert announced(table._table, batch["ids"]) is not None


def test_bad_arguments_of_pages_are_refused():
    _, (_, optimizer) = cached_pair()
    with pytest.raises(ValueError, match="ahead=0 is too small; it must be 1 or more"):
        next(optimizer.pages(ids_of([1]), "ids", ahead=0))
    with pytest.raises(ValueError, match="key gives ids for 2 tables of 1; give one for each"):
        next(optimizer.pages(ids_of([1]), ["ids", "ids"]))
    with pytest.raises(ValueError, match="gpu_bytes=lots is out of range.*such as 20GiB"):
        PagedEmbedding(3, 3, gpu_bytes="lots")


def test_a_batch_larger_than_the_cache_is_paged_and_said_once():
    plain, cached = cached_pair()
    batches = ids_of([1, 2], list(range(40)), [3, 1], list(range(50)))
    train_on(plain, batches)
    with pytest.warns(UserWarning, match="room for 15 rows, but a batch has 40; raise") as found:
        train_on(cached, cached[1].pages(batches, "ids"))
    assert len(found) == 1
    assert torch.equal(weights(cached[0]), weights(plain[0]))


def test_an_exception_between_forward_pass_and_step_loses_nothing(tmp_path):
    table, optimizer = trainable(tmp_path, optimizer="Adam")
    other, other_optimizer = trainable(tmp_path, optimizer="Adam")
    (ids, target), last = batches(2)

    def fail(_):
        raise RuntimeError("stopped")

    vectors = table(ids)
    vectors.register_hook(fail)  # in the backward pass
    with pytest.raises(RuntimeError, match="stopped"):
        vectors.sum().backward()
    (table(ids).sum(-1) * target).sum().backward()
    with pytest.raises(RuntimeError, match="stopped"):
        optimizer.step(lambda: fail(0))
    optimizer.step()  # the gradients still wait
    train_step(other, other_optimizer, ids, target)
    for each, steps in ((table, optimizer), (other, other_optimizer)):
        train_step(each, steps, *last)
    assert torch.equal(weights(table), weights(other))


@each_case("written, fused", [(0, False), (1, False), (0, True)])  # parts before the error
def test_a_step_that_fails_can_be_repeated(tmp_path, monkeypatch, written, fused):
    with monkeypatch.context() as patched:
        patched.setattr("w2v.rows.paged_table.STEP_ROWS", 2)
        if fused:
            use_torch_kernels(patched)
        tables = [embedding(tmp_path) for _ in range(2)]
        optimizers = [PagedOptimizer(table, "NAdam", lr=1.0, fused=fused) for table in tables]
        for table, optimizer in zip(tables, optimizers, strict=True):
            for _ in range(2):  # bias correction tells how often a step was counted
                table([1, 2, 3, 5, 8]).square().sum().backward()
                if table is tables[0]:
                    group, effects = table.store.group, [mock.DEFAULT] * written
                    write = mock.Mock(wraps=group.write, side_effect=[*effects, ZeroDivisionError])
                    stopped = mock.patch.multiple(group, write=write, step=lambda *_: 1 / 0)
                    with pytest.raises(ZeroDivisionError), stopped:
                        optimizer.step()
                optimizer.step()
    expected, found = optimizer_state(tables[1]), optimizer_state(tables[0])
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert torch.equal(weights(tables[0]), weights(tables[1]))


BAD_STEPS = [
    ({"lr": -0.1}, "lr=-0.1 is not a learning rate"),
    ({"lr": float("nan")}, "lr=nan is not a learning rate"),
    ({"lr": float("inf")}, "lr=inf is not a learning rate"),
    ({"lr": torch.ones(2)}, r"lr=tensor\(\[1., 1.\]\) is not a learning rate"),
]


@each_case("change, words", BAD_STEPS)
def test_bad_steps_are_refused_and_the_gradients_stay(tmp_path, change, words):
    tables = [embedding(tmp_path) for _ in range(2)]
    optimizer = PagedOptimizer([{"params": table} for table in tables], "SGD", lr=1.0)
    before = weights(tables[0])
    sum(table([1]) for table in tables).sum().backward()
    good = dict(optimizer.param_groups[1])
    optimizer.param_groups[1].update(change)
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    assert all(torch.equal(weights(table), before) for table in tables)
    optimizer.param_groups[1].update(good)
    optimizer.step()
    assert all(torch.equal(weights(table)[1], before[1] - 1) for table in tables)


def test_several_processes_are_refused(tmp_path, monkeypatch):
    table, _ = trainable(tmp_path)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="cannot train in 2 processes: .* with process_group="):
        table([1])
    with torch.no_grad():
        assert table([1]).shape == (1, DIM)


def test_what_the_table_cannot_become_is_refused(tmp_path):
    table, optimizer = trainable(tmp_path)
    model = nn.Sequential(table)
    in_file = embedding(tmp_path, "mmap")
    with pytest.raises(ValueError, match="a file keeps its torch.float32; use torch.autocast"):
        in_file.half()
    table([1]).sum().backward()
    with pytest.raises(ValueError, match=r"rows wait for a step; call step\(\) or zero_grad\(\)"):
        model.to("meta")
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="device='meta' cannot be used"):
        model.to("meta")
    with pytest.raises(ValueError, match="cannot share a table by share_memory.*use process_group"):
        model.share_memory()
    with pytest.raises(ValueError, match="num_embeddings=10 cannot be set; make another, or"):
        table.num_embeddings = ROWS + 1
    own = type("Own", (PagedEmbedding,), {"reset_parameters": lambda its: None})
    with pytest.raises(ValueError, match=r"not open for reset_parameters\(\); give init"):
        own(ROWS, DIM, storage="mmap", path=tmp_path / "own.npy")
    with pytest.raises(ValueError, match="8 rows are fewer than the present 9"):
        table.grow(ROWS - 1)
    with pytest.raises(ValueError, match="a file cannot grow; load its rows into another"):
        in_file.weight.data = torch.ones(ROWS + 1, DIM)
    with pytest.raises(ValueError, match="init gives .* for 2 rows"):
        table.grow(ROWS + 2, normal(DIM + 1, 1.0, 1))
    with pytest.raises(IndexError, match=f"id {ROWS} is not a row"):
        table([ROWS])
    by_row, _ = trainable(tmp_path, optimizer="Adam", step="row")
    with pytest.raises(ValueError, match="cannot hold each row's own 'step'"):
        by_row.half()
    assert by_row.dtype == by_row.weight.dtype == by_row([1]).dtype == torch.float32


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph")
def test_gradients_of_gradients_are_refused(tmp_path):
    table, optimizer = trainable(tmp_path, optimizer="SGD", lr=1.0)
    before = weights(table)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        table([1]).square().sum().backward(create_graph=True)
    optimizer.step()
    assert torch.equal(weights(table), before)
    vectors = table([1])  # that of the vectors is not the table's
    (slope,) = torch.autograd.grad(vectors.pow(3).sum(), vectors, create_graph=True)
    slope.sum().backward()
    optimizer.step()
    torch.testing.assert_close(weights(table)[1], before[1] - 6 * before[1])


def test_weights_that_are_replaced_are_refused(tmp_path):
    table, _ = trainable(tmp_path)
    with pytest.raises(ValueError, match="weight cannot be replaced; .*to tie, assign"):
        table.weight = nn.Parameter(torch.ones(ROWS, DIM))
    before = weights(table)
    for shape in (ROWS - 1, DIM), (ROWS, DIM + 1), (DIM,):
        with pytest.raises(ValueError, match=r"weight.data has shape .* but the table is \[9, 6\]"):
            table.weight.data = torch.ones(shape)
    with pytest.raises(ValueError, match=r"weight.grad has shape \[6\]; give one of \[9, 6\]"):
        table.weight.grad = torch.ones(DIM)
    with pytest.raises(TypeError, match="weight.grad is a int; give a tensor or None"):
        table.weight.grad = 3
    assert torch.equal(weights(table), before)
    with pytest.raises(TypeError, match="weight was replaced by a Tensor; w2v.unpage gives"):
        torch.func.functional_call(table, {"weight": before}, torch.tensor([1]))


def test_bad_offsets_are_refused(tmp_path):
    bags = embedding(tmp_path, kind=PagedEmbeddingBag)
    factors = torch.rand(3)  # in place of offsets
    for offsets, kind in ((factors, "torch.float32"), ([0, 2], "list"), (np.zeros(1), "ndarray")):
        with pytest.raises(ValueError, match=f"offsets are {kind}; give a tensor of int32"):
            bags(torch.tensor([1, 2, 2]), offsets)


def test_checkpoints_of_other_tables_are_refused(tmp_path):
    table, optimizer = trainable(tmp_path, optimizer="Adam")
    before, state = weights(table), optimizer_state(table)
    for found, words in [
        ({"weight": torch.ones(ROWS + 1, DIM)}, r"size mismatch for weight: \(10, 6\)"),
        ({}, "Missing key.* weight"),
        ({"weight": np.ones((ROWS, DIM))}, "weight is a ndarray; give a tensor"),
        ({"weight": torch.ones(ROWS, DIM, device="meta")}, "weight is a Tensor; give"),
        ({"weight": torch.ones(ROWS, DIM), "bias": torch.ones(1)}, "Unexpected key.* bias"),
    ]:
        with pytest.raises(RuntimeError, match=words.replace(" ", r"(?s:.)*")):
            table.load_state_dict(found)
        table.load_state_dict({"weight": before})
    for other in (
        trainable(tmp_path, optimizer="Adamax")[1],
        trainable(tmp_path, optimizer="Adam", step="row")[1],
        trainable(tmp_path, optimizer="Adam", rows=ROWS + 1)[1],
    ):
        with pytest.raises(ValueError, match="state of table 0 is of another optimizer or shape"):
            optimizer.load_state_dict(other.state_dict())
    for found in (table.state_dict(), {"param_groups": []}):
        words = rf"begins with \['{next(iter(found))}'\] and has no .*; give an optimizer's"
        with pytest.raises(ValueError, match=words):
            optimizer.load_state_dict(found)
    two = PagedOptimizer([embedding(tmp_path), embedding(tmp_path)], "Adam", lr=1.0)
    with pytest.raises(ValueError, match="size of optimizer's group"):
        optimizer.load_state_dict(two.state_dict())
    assert torch.equal(weights(table), before)
    assert optimizer.param_groups[0]["lr"] == 0.1
    for name, value in optimizer_state(table).items():
        assert torch.equal(value, state[name])


def test_checkpoints_of_other_groups_are_refused(tmp_path, monkeypatch):
    table, optimizer = trainable(tmp_path)
    optimizer.save(tmp_path / "saved", step=1)
    groups = [{"params": embedding(tmp_path)} for _ in range(2)]
    two = PagedOptimizer(groups, "Adamax", lr=0.5)
    with pytest.raises(ValueError, match="saved has 1 groups of tables, and the optimizer 2; make"):
        two.load(tmp_path / "saved")
    for step in (-1, 1.5, "2"):
        with pytest.raises(ValueError, match=f"step={step!r} is no step; give a whole number"):
            optimizer.save(tmp_path / "saved", step=step)
    save = Checkpoints.save
    monkeypatch.setattr(  # as an earlier version
        Checkpoints, "save", lambda its, _, **how: save(its, {"step": 2, "lr": [0.1]}, **how)
    )
    optimizer.save(tmp_path / "saved", step=2)
    other, optimizer = trainable(tmp_path, lr=0.5, seed=2)
    assert optimizer.load(tmp_path / "saved") == 2
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(weights(other), weights(table))


BAD_SETTINGS = [
    ({"optimizer": "adamax"}, "optimizer.name=adamax .*did you mean Adamax"),
    ({"optimizer": "Muon"}, "optimizer.name=Muon mixes rows"),
    ({"optimizer": "SparseAdam"}, "name=SparseAdam is Adam here, which steps the same rows"),
    ({"gpu_bytes": "1e9"}, "^gpu_bytes=1e9 is out of range; it must be auto, 0, a size such as"),
    ({"lr": -1.0}, "lr=-1.0 is not a learning rate"),
    ({"lr": "0.1"}, "lr='0.1' is not a learning rate"),
    ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "optimizer is a SGD and no class; give a"),
    ({"rows": 1e6}, "1000000.0 rows and 6 dimensions are not whole numbers"),
    ({"step": "rows"}, "step='rows' is unknown; choose 'table' or 'row'"),
    ({"device": "gpu"}, "device='gpu' cannot be used; choose from cpu"),
    ({"device": "meta"}, "device='meta' cannot be used"),
    ({"rows": 0}, "at least 1 row"),
    ({"optimizer": "Adam", "step": "row", "dtype": torch.bfloat16}, "'step'; use float32"),
    ({"init": normal(DIM + 1, 1.0, 1)}, rf"init gives \[9, {DIM + 1}\] for 9 rows"),
    ({"init": torch.ones(ROWS, 1)}, r"init has shape \[9, 1\], but the table is \[9, 6\]"),
    ({"kind": PagedEmbeddingBag, "mode": "median"}, "mode='median' is unknown; choose 'sum'"),
]


@each_case("settings, words", BAD_SETTINGS)
def test_bad_settings_are_refused(tmp_path, settings, words):
    with pytest.raises(ValueError, match=words) as error:
        trainable(tmp_path, **settings)
    assert "\n" not in str(error.value)


def test_weights_that_are_no_matrix_are_refused():
    with pytest.raises(ValueError, match=r"embeddings have shape \[6\]; give weights \[V, D\]"):
        PagedEmbedding.from_pretrained(torch.ones(DIM))
    with pytest.raises(ValueError, match=r"init is a Tensor; give a function of row ids, or put"):
        RowStore(ROWS, DIM, init=torch.ones(ROWS, DIM))
    with pytest.raises(ValueError, match="init is a Tensor; give a function of row ids, or write"):
        PagedEmbedding(ROWS, DIM).grow(ROWS + 1, init=torch.ones(1, DIM))


def test_an_optimizer_that_is_refused_leaves_the_table_as_it_was(tmp_path):
    table, optimizer = trainable(tmp_path, optimizer="Adam")
    (ids, target), *_ = batches(1)
    train_step(table, optimizer, ids, target)
    before = optimizer_state(table)
    with pytest.raises(ValueError, match="fused=True cannot step"):
        PagedOptimizer(table, "Adam", lr=0.1, fused=True)
    after = optimizer_state(table)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    train_step(table, optimizer, ids, target)
    both = [embedding(tmp_path), embedding(tmp_path, state_storage="cpu")]
    with pytest.raises(ValueError, match="this optimizer keeps no state; leave state_storage out"):
        PagedOptimizer(both, "SGD", lr=0.1)
    for each in both:
        with pytest.warns(UserWarning, match="no PagedOptimizer steps this"):
            each([1]).sum().backward()
        assert each.weight.grad[1].eq(1).all()


def test_a_padding_row_outside_the_table_is_refused():
    with pytest.raises(IndexError, match="padding_idx=9 is not a row; give one of -9 to 8"):
        PagedEmbedding(ROWS, DIM, ROWS)
    table = PagedEmbedding(ROWS, DIM)
    with pytest.raises(IndexError, match="padding_idx=9 is not a row; give one of -9 to 8"):
        table.padding_idx = ROWS
    with pytest.raises(IndexError, match="padding_idx=1.5 is not a row"):
        table.padding_idx = 1.5
    table.padding_idx = -1
    assert table.padding_idx == ROWS - 1


def test_gradients_that_nothing_uses_are_named(tmp_path):
    table = embedding(tmp_path)
    with pytest.warns(UserWarning, match="no PagedOptimizer steps this .* w2v.optimizer is faster"):
        table([1]).sum().backward()
    PagedOptimizer(table, "SGD", lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table([1]).sum().backward()


def test_what_is_no_table_is_refused(tmp_path):
    table = embedding(tmp_path)
    with pytest.raises(ValueError, match="these modules have no PagedEmbedding"):
        PagedOptimizer(nn.Linear(1, 1), "SGD", lr=0.1)
    with pytest.raises(TypeError, match="Parameter is not a module"):
        PagedOptimizer(nn.Linear(1, 1).parameters(), "SGD", lr=0.1)
    with pytest.raises(ValueError, match="there are no modules or weights to step; give the model"):
        PagedOptimizer([], "SGD", lr=0.1)
    with pytest.raises(ValueError, match="a PagedEmbedding is in two groups"):
        PagedOptimizer([{"params": table}, {"params": nn.Sequential(table)}], "SGD", lr=0.1)


@each_case(
    "name, words", [("Adam", "device='cpu' .*; leave it out"), ("NAdam", "no kernel for this")]
)
def test_fused_steps_that_do_not_exist_are_refused(tmp_path, name, words):
    with pytest.raises(ValueError, match=f"fused=True .*{words}"):
        PagedOptimizer(embedding(tmp_path), name, lr=0.1, fused=True)


def test_a_look_up_without_memory_raises_one_error(monkeypatch):
    others = []
    monkeypatch.setattr("sys.unraisablehook", others.append)
    monkeypatch.setattr(torch, "empty", mock.Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError) as found:
        Readback(ROWS)
    del found
    gc.collect()
    assert not others


@pytest.mark.parametrize("settings", [{"init": normal(DIM + 1, 1.0, 1)}, {"device": "gpu"}])
def test_a_table_that_fails_leaves_no_file(tmp_path, settings):
    with pytest.raises(ValueError):
        trainable(tmp_path, "mmap", **{"device": "cpu"} | settings)
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_file_that_was_used_before_its_optimizer_was_made_is_refused(tmp_path):
    table = embedding(tmp_path, "mmap")
    table([1])
    with pytest.raises(ValueError, match="the file is open without this state; make its Paged"):
        PagedOptimizer(table, "Adam", lr=0.1)
    PagedOptimizer(table, "SGD", lr=0.1)  # keeps no state


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
        trainable(path.parent, rows=rows, optimizer=optimizer, dtype=dtype)[0].store.save(path)


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
@each_case("kind", ["rows", "dtype", "layout", "text"])
def test_files_of_another_table_are_refused(tmp_path, suffix, kind):
    path = tmp_path / f"x{suffix}"
    store = trainable(tmp_path)[0].store
    before = store.table.records_VR.clone()
    save_other(path, kind)
    with pytest.raises(ValueError, match=f"x{suffix} (holds|cannot be read|is not)") as error:
        store.load(path)
    assert "\n" not in str(error.value)
    assert torch.equal(store.table.records_VR, before)
    if suffix == ".npy" and kind != "rows":
        with pytest.raises(ValueError, match=r"x.npy (holds .*astype|cannot be read)"):
            RowStore.open(path)


def test_a_file_with_another_ending_is_refused(tmp_path):
    with pytest.raises(ValueError, match="ending '.bin'; use .npy .* or .safetensors"):
        row_store(tmp_path).save(tmp_path / "x.bin")
