"""Weights and optimizer state hosted apart train as they do together."""

import pytest
import torch

from w2v.api.embedding import Embedding
from w2v.model.optim import rowwise_optimizers

ROWS, DIM = 9, 6
GPU = pytest.mark.gpu
PLACES = [  # of weights, of state, and the device
    ("cpu", "cpu", "cpu"),
    *(
        pytest.param(*where, "cuda", marks=GPU)
        for where in [("cuda", "pinned"), ("cuda", "cpu"), ("pinned", "cuda")]
    ),
]
everywhere = pytest.mark.parametrize("storage, state_storage, device", PLACES)


def trained(steps=6, **settings):
    table = Embedding(ROWS, DIM, **{"lr": 0.1, "seed": 2} | settings)
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        page = table.page(torch.randint(ROWS, (7,), generator=generator))
        (
            page.vectors.tanh() - torch.randn(7, DIM, generator=generator).to(table.device)
        ).square().sum().backward()
        table.step(page)
    return table


@everywhere
@pytest.mark.parametrize("step", ["table", "row"])
@pytest.mark.parametrize("name", [name for name in rowwise_optimizers() if name != "SGD"])
def test_equals_hosting_them_together(storage, state_storage, device, name, step):
    apart = trained(
        optimizer=name, step=step, storage=storage, state_storage=state_storage, device=device
    )
    together = trained(
        optimizer=name, step=step, storage="cuda" if device == "cuda" else "cpu", device=device
    )
    assert apart.table.columns.keys() == together.table.columns.keys()
    for field in together.table.columns:
        assert torch.equal(apart.table[field].cpu(), together.table[field].cpu())
    assert {key: float(value) for key, value in apart.table.scalars.items()} == {
        key: float(value) for key, value in together.table.scalars.items()
    }


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_files(tmp_path, storage, state_storage, device, dtype):
    where = {
        "optimizer": "Adam",
        "storage": storage,
        "state_storage": state_storage,
        "device": device,
        "dtype": dtype,
    }
    table = trained(**where)
    table.put([4, 1], torch.ones(2, DIM))
    assert table.get([1, 4]).eq(1).all() and table.get([0]).ne(1).any()
    table.save(tmp_path / "x.safetensors")
    other = trained(steps=0, **where | {"seed": 5})
    other.load(tmp_path / "x.safetensors")
    for field in ("weight", "exp_avg", "exp_avg_sq"):
        assert torch.equal(other.table[field], table.table[field])
    assert other.table.scalars["step"] == table.table.scalars["step"]


def test_bytes_are_those_of_both_without_room_for_what_is_not_there():
    table = Embedding(1000, 64, optimizer="Adam", lr=0.1, state_storage="cpu")
    assert table.bytes == 1000 * 64 * 4 * 3


@pytest.mark.parametrize(
    "settings, said",
    [
        (
            {"optimizer": "SGD", "state_storage": "cpu"},
            "state_storage='cpu': this optimizer keeps no state; leave state_storage out",
        ),
        (
            {"storage": "mmap", "state_storage": "cpu"},
            "state_storage='cpu' with storage='mmap': a file holds both",
        ),
        ({"state_storage": "mmap"}, "state_storage='mmap' with storage='cpu': a file holds both"),
        ({"state_storage": "tape"}, "storage='tape' is unknown"),
    ],
)
def test_what_cannot_be(settings, said):
    with pytest.raises(ValueError, match=said):
        Embedding(ROWS, DIM, **{"optimizer": "Adam", "lr": 0.1} | settings)
