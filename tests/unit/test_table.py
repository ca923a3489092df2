"""Tables: record layout, initial values, 16-bit rounding, pinned memory."""

import pytest
import torch

from tests.support.each_case import each_case
from w2v.rows.table import (
    ALIGNMENT,
    INIT_CHUNK,
    RowState,
    SplitTable,
    Table,
    normal,
    record_columns,
    record_width,
    uniform,
)

STATES = {"exp_avg": RowState(100, 0.0), "exp_inf": RowState(100, 0.25)}
STATES["step"] = RowState(1, 3.0, counts=True)


def small_table(rows=5, dim=100, states=STATES, scalars=None, storage="cpu", **settings):
    return Table("input", rows, dim, states, scalars or {}, storage, **settings)


def test_record_holds_weight_then_states_in_whole_cache_lines():
    assert record_columns(100, STATES) == {
        "weight": slice(0, 100),
        "exp_avg": slice(100, 200),
        "exp_inf": slice(200, 300),
        "step": slice(300, 301),
    }
    assert record_width(100, STATES) == 320
    assert [record_width(dim, {}) for dim in (1, 32, 33)] == [32, 32, 64]
    assert record_width(100, STATES, alignment=4) == 301


def test_each_table_has_its_own_initial_values():
    scalars = {"step": torch.tensor(0.0)}
    table, other = small_table(scalars=scalars), small_table(scalars=scalars)
    table.scalars["step"] += 1
    table["weight"].fill_(7)
    assert other.scalars["step"] == 0
    assert not other["weight"].any()
    assert (table["exp_inf"] == 0.25).all()
    assert (table["step"] == 3).all()
    assert table["step"].shape == (5, 1)
    assert table.bytes == 5 * 320 * 4


def test_split_table_reads_fields_of_both_its_tables():
    scalars = {"mu": torch.tensor(1.0)}
    table = SplitTable("input", 5, 100, STATES, scalars, "cpu", torch.float32, "cpu")
    table.initialise(uniform(100, 0.5, seed=1))
    assert torch.equal(table["weight"], uniform(100, 0.5, seed=1)(torch.arange(5)))
    assert [float(table[name][0, 0]) for name in STATES] == [0, 0.25, 3]
    assert table.bytes == 5 * (128 + 224) * 4  # without room for weights beside the states
    joined_VR = torch.cat([table.records_VR, table.states.records_VR], dim=1)
    for name, column in table.columns.items():
        assert torch.equal(joined_VR[:, column], table[name])
    table.states.scalars["mu"] += 1
    assert table.scalars["mu"] == 2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_threads_draw_initial_weights_on_the_current_gpu():
    devices = set()

    def values(rows_n):
        devices.add(rows_n.device)
        return torch.zeros(len(rows_n), 512, device=rows_n.device)

    table = small_table(3 * INIT_CHUNK["cuda"] // 512, 512, {}, storage="pinned")
    with torch.cuda.device(1):
        table.initialise(values, torch.device("cuda"), threads=2)
    assert devices == {torch.device("cuda", 1)}


@pytest.mark.parametrize("initialiser", [uniform, normal])
def test_initial_weights_depend_on_seed_row_and_column_alone(initialiser):
    rows = torch.arange(9 * INIT_CHUNK["cpu"] // 2)
    whole = initialiser(8, 0.5, seed=1)(rows)
    table = small_table(len(rows), 8, {})
    table.initialise(initialiser(8, 0.5, seed=1), threads=3)  # in several chunks
    assert torch.equal(table["weight"], whole)
    assert torch.equal(initialiser(8, 0.5, seed=1)(rows[[70_000, 3]]), whole[[70_000, 3]])
    assert not torch.equal(initialiser(8, 0.5, seed=2)(rows), whole)


def chi_square(counts):
    """Chi-square statistic against equal counts."""
    return ((counts - counts.mean()) ** 2 / counts.mean()).sum()


def test_uniform_is_uniform_and_uncorrelated():
    values = uniform(64, 0.5, seed=3)(torch.arange(20_000))
    assert -0.5 <= values.min() < -0.4999
    assert 0.4999 < values.max() < 0.5
    counts = torch.histc(values, bins=100, min=-0.5, max=0.5)
    assert chi_square(counts) < 160  # 99 degrees of freedom, p = 1e-4
    assert torch.corrcoef(values.T).fill_diagonal_(0).abs().max() < 0.035
    assert torch.corrcoef(values[:200]).fill_diagonal_(0).abs().max() < 0.7


def test_normal_is_normal_and_uncorrelated():
    values = normal(64, 0.5, seed=3)(torch.arange(20_000))
    edges = torch.special.ndtri(torch.arange(1, 100, dtype=torch.float64) / 100).float() * 0.5
    counts = torch.bincount(torch.bucketize(values.flatten(), edges), minlength=100).float()
    assert chi_square(counts) < 160  # 99 degrees of freedom, p = 1e-4
    # The extremes of 1.28 million draws lie near 5 standard deviations.
    assert 2.4 < values.abs().max() < 3.3
    assert torch.corrcoef(values.T).fill_diagonal_(0).abs().max() < 0.035


def test_initialiser_of_the_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"init gives \[5, 3\] for 5 rows; expected \[5, 4\]"):
        small_table(dim=4, states={}).initialise(uniform(3, 1.0, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_elements_halve_the_records(dtype):
    table = small_table(states={"exp_avg": RowState(100, 0.25)}, dtype=dtype)
    assert (table.width, table.bytes) == (256, 5 * 512)
    assert (table["exp_avg"] == 0.25).all()
    records = table.decode(table.records_VR)
    assert records.dtype == torch.float32
    records.fill_(1.5)  # which both dtypes hold exactly
    encoded = table.encode(torch.arange(5), records)
    assert encoded.dtype == dtype
    assert (encoded == 1.5).all()


def test_rounding_to_bfloat16_keeps_the_mean_and_is_repeatable():
    value = 1 + 0.3 / 128  # three tenths of the way from 1 to the next bfloat16
    table, again = (small_table(1000, 64, {}, dtype=torch.bfloat16) for _ in range(2))
    rows, records = torch.arange(1000), torch.full((1000, 64), value)
    first, second = table.encode(rows, records), table.encode(rows, records)
    assert set(first.unique().tolist()) == {1.0, 1 + 1 / 128}
    assert abs((first > 1).float().mean() - 0.3) < 0.009  # 5 standard deviations
    assert abs((first > 1).float().mean(0) - 0.3).max() < 0.075  # in each column
    # Two writes round independently, and a row regardless of the other rows of the write.
    assert abs(((first > 1) & (second > 1)).float().mean() - 0.09) < 0.006
    assert torch.equal(again.encode(rows[500:], records[500:]), first[500:])
    assert torch.equal(table.encode(rows, -records).abs().unique(), first.unique())


def test_rounding_to_bfloat16_keeps_special_values():
    table = small_table(1, 64, {}, dtype=torch.bfloat16)
    special = torch.zeros(1, 64)
    special[0, :6] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -2.5, 2**-133.0])
    special[0, 6:7].view(torch.int32)[0] = 0x7FFFFFFF  # the NaN that a GPU makes
    rounded = table.encode(torch.zeros(1, dtype=torch.int64), special)
    assert torch.equal(rounded.nan_to_num(7.0), special.bfloat16().nan_to_num(7.0))


def test_small_updates_are_not_lost_in_bfloat16():
    """Add 0.001 to weights of 1 a thousand times.

    With rounding to nearest they would never change.
    """
    table, rows = small_table(4, 64, {}, dtype=torch.bfloat16), torch.arange(4)
    table["weight"].fill_(1.0)
    for _ in range(1000):
        table.records_VR.copy_(table.encode(rows, table.decode(table.records_VR) + 0.001))
    assert abs(table["weight"].float().mean() - 2) < 0.05


@each_case(
    "settings, words",
    [
        ({"rows": 0}, "at least 1 row"),
        ({"storage": "disk"}, "storage='disk' is unknown; choose from cpu cuda pinned mmap"),
        ({"dtype": torch.int32}, "dtype=torch.int32 cannot be stored; choose from .*float32"),
        ({"dtype": torch.bfloat16}, "cannot hold each row's own 'step'; use float32"),
        ({"storage": "mmap"}, "storage='mmap' with path=None"),
        ({"path": "x"}, "storage='cpu' with path=x"),
        ({"storage": "mmap", "path": "x.npy"}, "path=x.npy: .*rename"),
        (
            {"storage": "mmap", "path": "x.npy", "states": {}, "dtype": torch.bfloat16},
            "path=x.npy: .*rename",
        ),
    ],
)
def test_unusable_arguments_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        small_table(**settings)


def test_a_state_of_one_dimension_is_no_count_of_steps():
    table = small_table(4, 1, {"exp_avg": RowState(1, 0.5)}, dtype=torch.bfloat16)
    assert table["exp_avg"].tolist() == 4 * [[0.5]]


@pytest.mark.gpu
def test_initial_weights_are_the_same_on_the_gpu():
    rows = torch.arange(1000)
    assert torch.equal(uniform(96, 0.1, 5)(rows), uniform(96, 0.1, 5)(rows.cuda()).cpu())
    torch.testing.assert_close(
        normal(96, 0.1, 5)(rows), normal(96, 0.1, 5)(rows.cuda()).cpu(), rtol=1e-6, atol=0
    )


@pytest.mark.gpu
def test_rounding_is_the_same_on_the_gpu():
    rows, records = torch.arange(1000), torch.randn(1000, 64)
    on_cpu, on_gpu = (
        small_table(1000, 64, {}, storage=place, dtype=torch.bfloat16) for place in ("cpu", "cuda")
    )
    expected = on_cpu.encode(rows, records)
    assert torch.equal(on_gpu.encode(rows.cuda(), records.cuda()).cpu(), expected)


@pytest.mark.gpu
def test_pinned_memory_is_aligned_pinned_and_released():
    from cupy.cuda.runtime import pointerGetAttributes

    torch.cuda.init()  # before which torch takes no memory for pinned
    table = small_table(1000, storage="pinned")
    pointer = table.records_VR.data_ptr()
    assert pointer % ALIGNMENT == 0
    assert table.records_VR.is_pinned()
    assert (table["exp_inf"] == 0.25).all()
    registered = pointerGetAttributes(pointer).type
    del table
    assert pointerGetAttributes(pointer).type != registered
