"""Weights and state in two kinds of storage train as they do in one."""

import pytest
import torch

from tests.support.each_case import each_case
from w2v import PagedEmbedding, PagedOptimizer
from w2v.config import OPTIMIZERS

ROWS, DIM = 9, 6
PLACES = [  # of the weights, of the state, and the device
    ("cpu", "cpu", "cpu"),
    pytest.param("cuda", "pinned", "cuda", marks=pytest.mark.gpu),
    pytest.param("cuda", "cpu", "cuda", marks=pytest.mark.gpu),
    pytest.param("pinned", "cuda", "cuda", marks=pytest.mark.gpu),
]
everywhere = pytest.mark.parametrize("storage, state_storage, device", PLACES)


def trained(steps=6, optimizer="Adam", step="table", **settings):
    module = PagedEmbedding(ROWS, DIM, **{"seed": 2} | settings)
    paged = PagedOptimizer(module, optimizer, lr=0.1, step=step)
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        vectors = module(torch.randint(ROWS, (7,), generator=generator))
        target = torch.randn(7, DIM, generator=generator).to(module.device)
        (vectors.tanh() - target).square().sum().backward()
        paged.step()
    return module.store


@everywhere
@pytest.mark.parametrize("step", ["table", "row"])
@each_case("name", [name for name in OPTIMIZERS if name != "SGD"])
def test_split_table_trains_like_a_joint_one(storage, state_storage, device, name, step):
    settings = {"optimizer": name, "step": step, "device": device}
    split = trained(storage=storage, state_storage=state_storage, **settings).table
    joint = trained(storage=device, **settings).table
    assert split.columns.keys() == joint.columns.keys()
    for field in joint.columns:
        assert torch.equal(split[field].cpu(), joint[field].cpu())
    assert split.scalars == joint.scalars


@everywhere
@each_case("dtype", [torch.float32, torch.bfloat16])
def test_split_table_is_written_saved_and_loaded(tmp_path, storage, state_storage, device, dtype):
    settings = {"optimizer": "Adam", "device": device, "dtype": dtype}
    settings |= {"storage": storage, "state_storage": state_storage}
    table = trained(**settings)
    table.put([4, 1], torch.ones(2, DIM))
    assert table.get([1, 4]).eq(1).all()
    assert table.get([0]).ne(1).any()
    table.save(tmp_path / "x.safetensors")
    other = trained(steps=0, **settings | {"seed": 5})
    other.load(tmp_path / "x.safetensors")
    for field in ("weight", "exp_avg", "exp_avg_sq"):
        assert torch.equal(other.table[field], table.table[field])
    assert other.table.scalars == table.table.scalars


@each_case(
    "settings, words",
    [
        ({"optimizer": "SGD", "state_storage": "cpu"}, "state_storage='cpu': .*leave"),
        ({"storage": "mmap", "state_storage": "cpu"}, "storage='mmap': a file holds both"),
        ({"state_storage": "mmap"}, "state_storage='mmap' with .* a file holds both"),
        ({"state_storage": "tape"}, "storage='tape' is unknown"),
    ],
)
def test_unusable_storage_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        trained(**settings)
