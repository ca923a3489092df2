"""What is foretold of machines that are not at hand agrees with what was measured, adds up, and is said in words."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import train
from tests.bench import zipf
from w2v import settings
from w2v.budget import GPU_RESERVE, DoesNotFit
from w2v.config import ConfigError
from w2v.forecast import SLOT_BYTES, Forecast, _described
from w2v.hardware import Hardware
from w2v.optim import RowOptimizer
from w2v.traffic import Spectrum

ROOT = Path(__file__).parent.parent
COMMIT, AHEAD_COMMIT = "cfb9706", "873f751"  # of most runs, and of those that look ahead
GIB = 1 << 30
ZIPF = "10000000 words of a text of 199747053, exponent 1, Adam float32 mapped:10% negative_pool="
TEXT8 = ROOT / "configs" / "text8.yaml"


def forecast(*assignments, configs=zipf.CONFIGS, ranks=1, rows=100_000_000, machine="", spectrum=None, raw_words=0):
    config, spectrum = settings.load(configs, assignments), spectrum or Spectrum.zipf(rows, 20 * rows)
    optimizer = RowOptimizer(config.optimizer, fused=True)
    return Forecast(config, Hardware.parse(machine), ranks, spectrum, raw_words or spectrum.words, "--rows", optimizer)


@pytest.fixture(scope="module")
def measured():
    """Figures of results.csv by benchmark and case."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    with (ROOT / "tests" / "bench" / "results.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["commit"] in (COMMIT, AHEAD_COMMIT):
                ahead = "ahead " if row["commit"] == AHEAD_COMMIT else ""
                found.setdefault((ahead + row["benchmark"], row["case"]), {})[row["metric"]] = float(row["value"])
    return found


def wiki100(*assignments, optimizer):
    """Its words by how often they occur, near counts together."""
    counts_G, words_G = np.loadtxt(ROOT / "tests" / "bench" / "wiki100.spectrum.csv", delimiter=",", skiprows=1, unpack=True)
    configs = [TEXT8, ROOT / "configs" / "optimizers" / f"{optimizer}.yaml"]
    return forecast(*assignments, configs=configs, spectrum=Spectrum(counts_G, words_G, 1.65), raw_words=16_944_103)


def compare(foretold, figures):
    """Rows within 3 %, words/s within 8 %, which is what docs/planning.md says."""
    seconds, _ = foretold.slowest
    assert foretold.words / seconds == pytest.approx(figures["words/s"], rel=0.08)
    if "read" in figures:
        assert foretold.rows.read / foretold.words == pytest.approx(figures["read"], rel=0.03)
        assert foretold.rows.stepped / foretold.words == pytest.approx(figures["stepped"], rel=0.02)


@pytest.mark.parametrize(
    "case, more",
    [
        ("65536 for 8 steps", []),
        ("65536 for 8 steps transfer.steps_per_page=1", ["transfer.steps_per_page=1"]),
        ("65536 for 1 steps model.negative_pool_steps=1", ["model.negative_pool_steps=1"]),
        (
            "131072 for 8 steps train.batch_size=131072 model.negative_pool=131072",
            ["train.batch_size=131072", "model.negative_pool=131072"],
        ),
    ],
)
def test_measured_runs_on_zipfs_words(measured, case, more):
    foretold = forecast(*zipf.SETTINGS, "transfer.lookahead=false", *more, rows=10_000_000)
    figures = measured["zipf", ZIPF + case]
    compare(foretold, figures)
    assert foretold.slowest[1] == "link"
    gpu, host = foretold.budget.job.needs()["gpu"], foretold.budget.job.needs()["host"]
    counted = gpu["text, vocabulary"] - foretold.share.text_bytes + gpu["places"] + SLOT_BYTES * foretold.slots
    assert counted < figures["gpu memory besides rows and ids"] * GIB < counted + GPU_RESERVE
    assert figures["host memory"] * GIB == pytest.approx(host["program"] + host["tables"], rel=0.05)  # the bench has no list of words


@pytest.mark.parametrize(
    "case, more",
    [
        ("65536 for 8 steps", []),
        ("65536 for 8 steps transfer.gpu_bytes=20%", ["transfer.gpu_bytes=20%"]),
        ("65536 for 1 steps model.negative_pool_steps=1", ["model.negative_pool_steps=1"]),
    ],
)
def test_measured_runs_that_look_ahead(measured, case, more):
    foretold = forecast(*zipf.SETTINGS, *more, rows=10_000_000)
    figures = measured["ahead zipf", (ZIPF.replace("10%", "20%") if "20%" in case else ZIPF) + case]
    assert foretold.words / foretold.slowest[0] == pytest.approx(figures["words/s"], rel=0.24)
    assert foretold.rows.read / foretold.words == pytest.approx(figures["read"], rel=0.1)
    without = forecast(*zipf.SETTINGS, *more, "transfer.lookahead=false", rows=10_000_000)
    assert figures["read"] < without.rows.read / without.words


@pytest.mark.parametrize("engine", ["resident", "mapped:50%"])
@pytest.mark.parametrize("optimizer, precision", [("adam", "float32"), ("adamw", "float32"), ("adamax", "float32"),
                                                  ("rmsprop", "float32"), ("sgd", "float32"), ("adam", "bf16")])  # fmt: skip
def test_measured_runs_on_wikipedia(measured, optimizer, precision, engine):
    name, _, share = engine.partition(":")
    more = [f"train.precision={precision}", f"transfer.engine={name}", f"transfer.gpu_bytes={share or 'auto'}"]
    compare(wiki100(*more, optimizer=optimizer), measured["train", f"wiki100 {optimizer} {engine} {precision} seeds=3"])


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_measured_runs_with_shared_noise(measured, optimizer):
    pool = ["model.negative_pool=65536", "model.negative_pool_steps=8"]
    foretold = wiki100("transfer.engine=mapped", "transfer.gpu_bytes=50%", *pool, optimizer=optimizer)
    compare(foretold, measured["train", f"wiki100 {optimizer} mapped:50% float32 {' '.join(pool)} seeds=3"])


def test_shares_add_up():
    for ranks in (1, 2, 3, 8):
        foretold = forecast(ranks=ranks, rows=1_000_003, machine="gpus=2")
        job = foretold.share
        assert 0 <= ranks * job.shard_bytes - job.table_bytes < ranks * 2 * foretold.record_bytes
        checkpoints = job.needs()["disk"]["checkpoints"]
        assert checkpoints == 3 * min(ranks, 2) * job.shard_bytes
    one = forecast(rows=1_000_003).budget.job
    assert one.shard_bytes == one.table_bytes and one.needs()["disk"]["vectors"] == 1_000_003 * (2 * 4 * 128 + 32)


def test_memory_that_a_rank_has_left_is_for_copies_of_its_shard():
    roomy, tight = (forecast(rows=1_000_003, ranks=2, machine=f"gpus=2,host={host}GiB") for host in (100, 8))
    assert roomy.budget.copies == roomy.share.shard_bytes and "while training goes on, from a copy" in str(roomy)
    assert tight.budget.copies == 1 << 30
    assert "+ copies 1.0 GiB =" in str(tight) and "while training waits, except for up to 1.0 GiB of 1.4 GiB" in str(tight)


def test_traffic_between_ranks():
    alone, two, hosts = (forecast(ranks=ranks, machine="gpus=2,peers=100,network=10") for ranks in (1, 2, 4))
    assert sum(alone.sent.values()) == 0 == alone.limits["network"]
    assert two.sent["weights"] == two.sent["gradients"] == 128 * two.sent["ids"] == 4 * 128 * (two.rows.touched / 2 + 1)
    exchange = sum(two.sent.values())
    assert two.limits["network"] == pytest.approx(exchange / 100e9 + 60e-6)
    near = sum(hosts.sent.values()) / 3  # of three ranks, one is on the same host
    assert hosts.limits["network"] == pytest.approx(near / 100e9 + 2 * near / 10e9 + 60e-6)
    assert forecast("train.precision=bf16", ranks=2).sent["weights"] == two.sent["weights"] / 2
    assert forecast("optimizer.occurrence_cap=9", ranks=2).sent["pairs"] == two.sent["ids"]


def test_limits_follow_the_machine():
    paged = ["transfer.engine=mapped", "transfer.gpu_bytes=10%"]
    slow, fast, faster = (forecast(*paged, ranks=2, machine=f"link={link}") for link in (10, 20, 40))
    to_fast, to_faster = slow.limits["link"] - fast.limits["link"], fast.limits["link"] - faster.limits["link"]
    assert slow.slowest[1] == "link" and to_fast == pytest.approx(2 * to_faster), "all but the addresses that are looked up"
    few, many = (forecast(*paged, ranks=2, machine=f"memory={memory}").limits["link"] for memory in (20, 100))
    assert few == slow.limits["link"] and many == forecast(*paged, ranks=2).limits["link"], "links of a host share its memory"
    assert forecast(ranks=8, machine="gpus=1,network=1").slowest[1] == "network"
    assert forecast("train.batch_size=1000", *paged, rows=1_000_000).slowest[1] == "launching"
    fast, slow = (wiki100("transfer.engine=resident", f"model.vector_size={size}", optimizer="adam") for size in (128, 1280))
    assert slow.slowest[1] == "computing" and slow.slowest[0] == pytest.approx(10 * fast.slowest[0], rel=0.01)
    before = wiki100("transfer.engine=mapped", "transfer.gpu_bytes=50%", optimizer="adam")
    after = replace(before, hardware=Hardware.parse("words=190"))
    assert after.limits["computing"] == pytest.approx(2 * before.limits["computing"]) and after.limits["link"] == before.limits["link"]
    assert not before.rows.together, "two pages have no room, so rows move between the steps"
    assert before.slowest[0] == sum(seconds for what, seconds in before.limits.items() if what != "launching")


def test_what_has_no_room_is_said_with_the_number_of_ranks_that_have():
    lacking = forecast("transfer.engine=mapped", ranks=2, machine="gpus=2,host=100GiB").budget
    with pytest.raises(DoesNotFit, match="^CPU memory would run out: .*it would fit with --world-size=10 or --rows=.* or ") as stop:
        lacking.check()
    assert "\n" not in str(stop.value)
    assert not lacking.enough(9) and lacking.enough(10) and lacking.enough(11)
    whole = forecast(ranks=2, rows=10**9, machine="host=100GiB").budget
    assert whole.changes()[0].startswith("--rows="), "each rank has the whole vocabulary, so that no number of them is enough"
    disk = forecast(machine="disk=400GiB").budget
    with pytest.raises(DoesNotFit, match="disk would run out"):
        disk.check()


def test_rows_of_a_page_need_room():
    with pytest.raises(ConfigError, match="transfer.gpu_bytes has room for 2,000 rows on the GPU, but .* are needed at once; raise it"):
        print(forecast("transfer.engine=mapped", "transfer.gpu_bytes=0.001%"))
    small = forecast("transfer.engine=mapped", rows=1_000_000, machine="gpu=2200MiB")
    assert small.budget.lacking(small.budget.job) == ["gpu"] and small.slots == math.ceil(small.rows.stepped)
    longer = forecast("transfer.engine=mapped", "transfer.steps_per_page=9", rows=1_000_000, machine="gpu=2200MiB")
    assert longer.slots > 3 * small.slots and "limited by" in str(longer)


def run(capsys, *arguments):
    status = train.main([str(TEXT8), *arguments])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_the_program_says_all_of_it(capsys):
    status, out, err = run(capsys, "--dry-run", "--world-size=8", "--rows=1e8:3e9", "--machine=link=50,gpus=8,host=2TiB")
    assert status == 0 and not err
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert list(lines) == "machines assumed corpus tables engine host gpu disk saving step link network limits speed".split()
    assert lines["machines"] == "ranks=8 on hosts=1, gpus=8 a host, host=2048.0 GiB, link=50 GB/s each way"
    assert "peers=280 GB/s, network=25 GB/s" in lines["assumed"] and "link" not in lines["assumed"]
    assert "3,000,000,000 words, 100,000,000 different" in lines["corpus"] and "M words/s, limited by " in lines["speed"]


def test_ten_billion_rows(capsys):
    arguments = "--dry-run --world-size=512 --rows=1e10:1e12 --machine=gpus=8,host=4TiB,gpu=400GiB".split()
    status, out, err = run(capsys, *arguments)
    assert status == 3 and "10,000,000,000 different" in out and "it takes at most 2,147,483,647" in out
    assert "M words/s, limited by" in out and err.startswith("error: CPU memory would run out") and err.count("\n") == 1
    assert "vocabulary 1676.4 GiB" in err and "--rows=" in err


def test_a_text_at_hand(capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one two three four one two one\n" * 500)
    given = f"corpus.path={text}", f"corpus.data_dir={tmp_path}", f"run.dir={tmp_path / 'runs'}"
    status, out, _ = run(capsys, "--dry-run", "--world-size=2", *given)
    assert status == 0 and "3,500 words, 4 different ones" in out and not (tmp_path / "runs").exists()
    status, out, _ = run(capsys, "--dry-run", "--world-size=2", "optimizer.name=NAdam", *given)
    assert status == 0 and "fused kernels, which these settings do not use" in out
    _, out, _ = run(capsys, "--dry-run", "--world-size=2", "transfer.table_dir=tables", *given)
    assert "staged moves rows at half of it" in out


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--world-size=0"], "--world-size=0 is out of range; it must be a whole number from 1 up"),
        (["--world-size=-2"], "--world-size=-2 is out of range"),
        (["--world-size=1.5"], "--world-size=1.5 is out of range"),
        (["--world-size=four"], "--world-size=four is out of range"),
        (["--world-size="], "--world-size= is out of range"),
        (["--rows=1"], "--rows=1 is out of range; it must be a whole number from 2 up"),
        (["--rows=1e6:1e5"], "the words of --rows=1e5 is out of range; it must be a whole number from 1,000,000 up"),
        (["--machine=links=5"], "--machine: 'links' is unknown; choose from gpus gpu host disk link"),
        (["--machine=link=fast"], "--machine: link=fast is out of range; it must be a number above 0"),
        (["--machine=link=inf"], "--machine: link=inf is out of range"),
        (["--machine=gpus=1.5"], "--machine: gpus=1.5 is out of range; it must be a whole number above 0"),
        (["--machine=host=512"], "--machine: host=512 is out of range; it must be a size such as 80GiB or 2TiB above 0"),
        (["--resume=latest", "--rows=1e6"], "--resume latest goes on with a run here"),
        (["train.device=cpu", "--rows=1e6"], "train.device=cpu, but --world-size, --rows and --machine are about GPUs"),
    ],
)
def test_bad_arguments_are_one_line(capsys, arguments, said):
    status, out, err = run(capsys, "--dry-run", *arguments)
    assert status == 2 and not out and err.startswith(f"error: {said}") and err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--world-size=2", "--world-size=0", "--rows=1e6", "--machine=link=5", "--machine="])
def test_without_a_dry_run_nothing_starts(capsys, flag):
    status, out, err = run(capsys, flag, "corpus.path=no/such/file")
    assert status == 2 and not out and "add --dry-run" in err and err.count("\n") == 1


def test_defaults_of_the_machine():
    assert Hardware.parse("") == Hardware() and math.isinf(Hardware().disk)
    parsed = Hardware.parse("gpus=8,gpu=80GiB,host=2TB,disk=1TiB,link=64,memory=300,peers=450,network=50,words=700")
    assert (parsed.gpus, parsed.gpu, parsed.host, parsed.disk) == (8, 80 << 30, 2 * 10**12, 1 << 40)
    assert (parsed.link, parsed.memory, parsed.peers, parsed.network, parsed.words) == (64, 300, 450, 50, 700)
    assert _described(Hardware(), assumed=False) == "" == _described(parsed, assumed=True)
