"""`make bench-transfer`: what it computes itself, on the CPU; on a GPU that its small sizes run and every figure is there."""

import csv

import pytest
import torch

from tests.bench import measure, memory, plot, results, transfer


def test_a_table_has_a_line_a_case_and_a_column_a_metric():
    cases = {
        "a": {"to": (0.12345, "ms"), "rate": (55.36, "GB/s")},
        "longer": {"rate": (12345.6, "GB/s"), "times": (7.0, "")},
    }
    assert measure.format_table(cases).splitlines() == [
        "        to [ms]  rate [GB/s]  times",
        "a         0.123         55.4      -",
        "longer        -       12,346      7",
    ]


def test_rates_and_shares():
    assert measure.rate(256_000_000, 5.12) == (pytest.approx(50.0), "GB/s")
    assert measure.share((45.0, "GB/s"), (50.0, "GB/s")) == (pytest.approx(90.0), "%")


@pytest.mark.parametrize(
    "table_rows, count, sets", [(1000, 10, measure.CALLS), (1000, 300, 3), (1000, 1000, 1)]
)
def test_row_sets_are_sorted_and_share_no_row(table_rows, count, sets):
    drawn = measure.row_sets(table_rows, count, device="cpu")
    assert [len(rows) for rows in drawn] == [count] * sets
    assert all((rows.diff() > 0).all() for rows in drawn)
    rows = torch.cat(drawn)
    assert len(rows.unique()) == len(rows) and rows.min() >= 0 and rows.max() < table_rows
    assert any(
        (rows.diff() < 0).any()
        for rows in measure.row_sets(table_rows, count, in_order=False, device="cpu")
    )


def test_memory_is_read_from_what_the_kernel_says():
    status = "Name:\tpython\nVmPeak:\t  900 kB\nVmLck:\t    3 kB\nVmPin:\t    4 kB\nVmRSS:\t  123 kB\nThreads:\t2\n"
    assert memory.process_bytes(status) == {"RSS": 123 * 1024, "locked": 7 * 1024}
    assert memory.process_bytes("Name:\tpython\n") == {"RSS": 0, "locked": 0}
    assert memory.process_bytes()["RSS"] > 0
    maps = "1000-3000 rw-p 00000000 00:00 0 \n3000-9000 rw-s 00000000 00:05 12 /dev/zero (deleted)\na000-b000 r--p 00000000 00:00 0\n"
    assert memory.mapping_bytes(maps, 0x3000, 0x1000) == 0x6000
    assert memory.mapping_bytes(maps, 0x2000, 0x2000) == 0x8000
    assert memory.mapping_bytes(maps, 0x9000, 0x1000) == 0


LINK = {"to GPU": (50.0, "GB/s"), "from GPU": (51.0, "GB/s"), "both": (90.0, "GB/s")}


def test_the_plot_shows_the_last_figures_of_each_case(tmp_path):
    file = tmp_path / "results.csv"
    for gather in (1.0, 49.5):
        results.append("transfer", "contiguous 256 MB", LINK, file)
        figures = {
            "gather": (gather, "GB/s"),
            "gather share": (2 * gather, "%"),
            "scatter": (48.0, "GB/s"),
            "both": (80.0, "GB/s"),
        }
        results.append("transfer", "records 1536 B x 65536 rows of 6 GiB", figures, file)
    results.append("train", "records 1536 B x 1024 rows of 6 GiB", {"gather": (3.0, "GB/s")}, file)
    series, contiguous, _ = plot.read(file)
    assert series == {
        (move, 6.0, 1536): {65536: rate}
        for move, rate in [("gather", 49.5), ("scatter", 48.0), ("both", 80.0)]
    }
    assert contiguous == {"to GPU": 50.0, "from GPU": 51.0, "both": 90.0}


def test_the_plot_is_drawn_whole_or_not_at_all(tmp_path):
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "results.csv", tmp_path / "transfer.png"
    results.append("transfer", "contiguous 256 MB", LINK, file)
    with pytest.raises(ValueError, match="run make bench-transfer first"):
        plot.draw(file, picture)
    results.append(
        "transfer",
        "records 512 B x 1024 rows of 6 GiB",
        {"gather": (30.0, "GB/s"), "scatter": (30.0, "GB/s")},
        file,
    )
    plot.draw(file, picture)
    assert picture.read_bytes().startswith(b"\x89PNG") and sorted(tmp_path.iterdir()) == [
        file,
        picture,
    ]


def test_without_a_gpu_it_says_so_and_measures_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        SystemExit, match="^bench-transfer needs a CUDA GPU and CuPy, and finds no GPU$"
    ):
        transfer.main(["--results", str(tmp_path / "results.csv")])
    assert not list(tmp_path.iterdir())


def figures(file):
    with file.open(newline="", encoding="utf-8") as handle:
        return {(row["case"], row["metric"]): float(row["value"]) for row in csv.DictReader(handle)}


@pytest.mark.gpu
def test_the_small_sizes_run_and_every_figure_is_there(tmp_path):
    file = tmp_path / "results.csv"
    transfer.main(
        ["--quick", "--parts", "records", "speedtorch", "product", "--results", str(file)]
    )
    found = figures(file)
    assert all(value > 0 for value in found.values())
    cases = {case for case, _ in found}
    assert {
        "set-up 0.125 GiB",
        "set-up 0.25 GiB",
        "records 1536 B x 8192 rows of 0.25 GiB",
    } <= cases
    ways = {
        "ours",
        "ours, rows sorted before",
        "CuPy pinned",
        "torch pinned",
        "torch pinned, staged",
        "torch CUDA",
        "CuPy CUDA",
    }
    assert {f"8192 of 100000 rows, {way}" for way in ways} <= cases
    assert len([case for case in cases if case.startswith("product ")]) == 4
    shares = [value for (_, metric), value in found.items() if metric.endswith("share")]
    assert shares and max(shares) < 120  # nothing moves faster than the link


@pytest.mark.gpu
def test_thread_blocks_are_swept_and_put_back(tmp_path):
    before, file = transfer.cuda.MOVING_BLOCKS, tmp_path / "results.csv"
    transfer.main(["--quick", "--blocks", "16", "64", "--results", str(file)])
    assert before == transfer.cuda.MOVING_BLOCKS
    assert {case for case, metric in figures(file) if metric == "both share"} == {
        "blocks 16",
        "blocks 64",
    }


@pytest.mark.gpu
def test_ours_locks_no_more_than_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "WAYS", {"ours pinned": memory.ours})
    memory.tables(2_000_000, tmp_path / "results.csv")
    assert (
        1
        <= figures(tmp_path / "results.csv")[
            "memory of 2000000 rows, ours pinned", "over the table"
        ]
        <= 1.02
    )
