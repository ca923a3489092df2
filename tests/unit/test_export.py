"""Saved vectors are gensim's; readers never see a half-written file."""

import contextlib
import os
import pickle
import subprocess

import numpy as np
import pytest
import torch
from gensim.models import KeyedVectors

import evaluate
from tests.support.each_case import each_case
from tests.support.planted import kv_of
from tests.support.rank_threads import checked, together
from w2v.rows.table import Table
from w2v.system.files import synced_file
from w2v.text.vocab import Vocab
from w2v.vectors import export
from w2v.vectors.load import ARRAY, VOCAB, load, load_words
from w2v.vectors.manifest import SUMS, VectorsError

WORDS = ["the", "Zürich", "paris", "東京", "don't", "0"]
FORMATS = ["kv", "bin", "txt"]
ROWS = [f"ö{row}" for row in range(23)]


@pytest.fixture
def kv():
    vectors = np.random.default_rng(3).standard_normal((6, 5)).astype(np.float32)
    return kv_of(WORDS, vectors, [90, 40, 40, 7, 6, 5])


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def test_gensim_loads_all_formats(kv, tmp_path):
    paths = export.save(kv, tmp_path, ("kv", "bin", "txt"))
    assert [path.name for path in paths] == ["vectors.kv", "vectors.bin", "vectors.txt"]
    assert names_in(tmp_path) == ["vectors.bin", "vectors.kv", ARRAY, "vectors.txt"]
    loaded = [
        KeyedVectors.load(str(paths[0])),
        KeyedVectors.load_word2vec_format(str(paths[1]), binary=True),
        KeyedVectors.load_word2vec_format(str(paths[2])),
    ]
    for other in [*loaded, *map(load, paths)]:
        assert other.index_to_key == WORDS
        np.testing.assert_allclose(other.vectors, kv.vectors, rtol=1e-6)
    assert np.array_equal(loaded[0].vectors, kv.vectors)
    assert np.array_equal(loaded[1].vectors, kv.vectors)
    assert loaded[0].get_vecattr("paris", "count") == 40


def test_vectors_are_in_a_file_of_their_own(kv, tmp_path):
    (tmp_path / "vectors.kv.norms.npy").write_bytes(b"old")
    for _ in range(2):
        kv.vectors = kv.vectors + 1
        export.save(kv, tmp_path, ["kv"])
        assert names_in(tmp_path) == ["vectors.kv", ARRAY]
        assert np.array_equal(load(tmp_path).vectors, kv.vectors)
    (tmp_path / ARRAY).unlink()
    with pytest.raises(VectorsError, match=ARRAY):
        load(tmp_path)


@pytest.mark.parametrize("name", FORMATS)
def test_a_failed_save_leaves_the_old_file(kv, tmp_path, monkeypatch, name):
    (path,) = export.save(kv, tmp_path, [name])
    before = path.read_bytes()

    def fail(self, path, *args, **kwargs):
        for written in (path, f"{path}.vectors.npy"):
            with open(written, "wb") as file:
                file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(KeyedVectors, "save", fail)
    monkeypatch.setattr(KeyedVectors, "save_word2vec_format", fail)
    with pytest.raises(OSError, match="disk full"):
        export.save(kv, tmp_path, [name])
    assert path.read_bytes() == before
    assert name != "kv" or names_in(tmp_path) == ["vectors.kv", ARRAY]


@pytest.mark.parametrize("name", FORMATS)
def test_a_reader_during_a_save_reads_the_old_file(kv, tmp_path, name):
    (path,) = export.save(kv, tmp_path, [name])
    path = {"kv": tmp_path / ARRAY}.get(name, path)
    before = path.read_bytes()
    with open(path, "rb") as reader:
        kv.vectors = kv.vectors + 1
        export.save(kv, tmp_path, [name])
        assert reader.read() == before != path.read_bytes()


def test_old_vectors_are_never_beside_a_new_array_file(kv, tmp_path, monkeypatch):
    export.save(kv, tmp_path, ["kv"])
    seen, replace = [], os.replace

    def observe(source, target):
        seen.append((tmp_path / "vectors.kv").exists())
        replace(source, target)

    monkeypatch.setattr(os, "replace", observe)
    export.save(kv, tmp_path, ["kv"])
    assert len(seen) >= 2 and not any(seen)


@each_case("word", ["new york", "line\nbreak", "tab\tbed", "", " "])
def test_words_with_white_space_are_for_kv_only(tmp_path, word):
    kv = kv_of(["the", word], np.eye(2))
    for formats in (("kv", "bin"), ("txt",)):
        with pytest.raises(VectorsError, match="white space.*use kv") as caught:
            export.save(kv, tmp_path, formats)
        assert repr(word) in str(caught.value)
    assert names_in(tmp_path) == []
    export.save(kv, tmp_path, ["kv"])
    assert load(tmp_path).index_to_key == ["the", word]


def test_evaluate_exports_the_chosen_formats(kv, tmp_path, capsys):
    export.save(kv, tmp_path / "run", ["kv"])
    out = tmp_path / "out"
    assert (
        evaluate.main(["export", str(tmp_path / "run"), "--text", "--bin", "--to", str(out)]) == 0
    )
    printed = capsys.readouterr().out.split()
    assert printed == [str(out / "vectors.txt"), str(out / "vectors.bin")]
    # Without --to, the folder of the file that is read.
    assert evaluate.main(["export", str(out / "vectors.txt"), "--kv"]) == 0
    assert load(out).index_to_key == WORDS


def sharded(size, body, words=23, dim=5, dtype=torch.float32):
    """Call `body(ranks, table)` in `size` ranks; return results and rows."""
    rows_VD = torch.randn(words, dim, generator=torch.Generator().manual_seed(1)).to(dtype)

    def run(ranks):
        table = Table("input", ranks.shard_rows(words), dim, {}, {}, "cpu", dtype)
        table["weight"].copy_(rows_VD[ranks.rank :: ranks.size])
        return body(ranks, table)

    return checked(together(size, run)), rows_VD.float().numpy()


def saved_by(size, folder, dtype=torch.float32, formats=("kv", "bin"), step=7):
    """Save the rows of `size` ranks, and return them."""
    vocab = Vocab(ROWS, np.arange(23, 0, -1), 300, 23)

    def body(ranks, table):
        blocks = export.in_order(table["weight"], ranks, 23)
        if ranks.rank:
            return list(blocks)
        return export.save_run(vocab, 5, blocks, folder, formats, step)

    (_, *others), rows_VD = sharded(size, body, dtype=dtype)
    assert others == [[]] * (size - 1)
    return rows_VD


@each_case("size", [1, 2, 3, 4])
def test_rows_of_ranks_are_saved_as_gensim_saves_them(tmp_path, monkeypatch, size):
    monkeypatch.setattr(export, "BLOCK_BYTES", 120)
    folder = tmp_path / "run"
    folder.mkdir()
    rows_VD = saved_by(size, folder, torch.bfloat16)
    plain = kv_of(ROWS, rows_VD)
    expected = tmp_path / "gensim"
    export.save(plain, expected, ["bin", "kv"])
    assert set(names_in(folder)) == {*names_in(expected), SUMS, VOCAB}
    for name in ("vectors.bin", ARRAY):
        assert (folder / name).read_bytes() == (expected / name).read_bytes()
    done = subprocess.run(["sha256sum", "-c", SUMS], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr and done.stdout.count(": OK") == 4
    # The pickle may differ in its bytes, but not in what it holds.
    theirs = KeyedVectors.load(str(expected / "vectors.kv"))
    by_gensim = KeyedVectors.load(str(folder / "vectors.kv"))
    assert vars(by_gensim).keys() == vars(theirs).keys()
    # A word takes memory once.
    words = zip(by_gensim.index_to_key, by_gensim.key_to_index, strict=True)
    assert all(word is key for word, key in words)
    for ours in (load(folder), by_gensim, pickle.loads(pickle.dumps(by_gensim))):
        assert ours.most_similar("ö1") == theirs.most_similar("ö1")
        assert np.array_equal(ours.vectors, rows_VD)
        assert ours.index_to_key == theirs.index_to_key
        assert ours.key_to_index == theirs.key_to_index
        assert np.array_equal(ours.expandos["count"], theirs.expandos["count"])
    mapped = KeyedVectors.load(str(folder / "vectors.kv"), mmap="r")
    assert isinstance(mapped.vectors, np.memmap)


def test_a_run_is_read_without_its_pickle(tmp_path):
    rows_VD = saved_by(1, tmp_path)
    path = tmp_path / "vectors.kv"
    path.write_bytes(b"no pickle")
    sums = (tmp_path / SUMS).read_text()
    (tmp_path / SUMS).write_text(
        "".join(line for line in sums.splitlines(True) if not line.endswith(" vectors.kv\n"))
    )
    words = load_words(path)
    assert words.index_to_key == ROWS and np.array_equal(words.vectors, rows_VD)
    assert words.expandos["count"].tolist() == list(range(23, 0, -1))
    (tmp_path / VOCAB).write_text("# other words\n")
    with pytest.raises(VectorsError, match="vocab.tsv is damaged"):
        load_words(path)


def test_vectors_of_others_in_a_run_folder_have_their_own_words(tmp_path, kv):
    saved_by(1, tmp_path)
    export.save(kv, tmp_path, ["kv"])
    assert load(tmp_path).index_to_key == WORDS


def test_vectors_are_saved_for_gensim_alone(tmp_path):
    saved_by(1, tmp_path)
    saved_by(1, tmp_path, formats=["kv"])
    assert names_in(tmp_path) == ["vectors.kv", ARRAY, SUMS, VOCAB] and len(load(tmp_path)) == 23


def test_files_of_an_earlier_step_are_refused_and_then_removed(tmp_path):
    """A run is exported, drawn, trained on and exported again."""
    saved_by(1, tmp_path, step=7)
    export.save(load(tmp_path), tmp_path, ["txt"])
    assert load_words(tmp_path / "vectors.txt").index_to_key == ROWS
    for name in ("map.svg", "report.html", "report.js", "scores.json", "train.log"):
        (tmp_path / name).write_text("x")
    (tmp_path / "checkpoints" / "step-00000007").mkdir(parents=True)
    load(tmp_path)
    (tmp_path / "checkpoints" / "step-00000012").mkdir()
    for name in ("", "vectors.txt", "vectors.bin"):
        with pytest.raises(VectorsError, match="of step 7, but the run is at 12; .*--resume"):
            load(tmp_path / name)
    saved_by(1, tmp_path, step=12, formats=["kv"])
    assert names_in(tmp_path) == ["train.log", "vectors.kv", ARRAY, SUMS, VOCAB]
    load(tmp_path)


@pytest.mark.parametrize("size", [1, 2, 4])
@each_case("first, end", [(0, 1), (0, 6), (0, 22), (0, 23), (1, 23), (7, 22), (8, 9)])
def test_only_some_rows_are_gathered(monkeypatch, size, first, end):
    monkeypatch.setattr(export, "BLOCK_BYTES", 120)
    (blocks, *_), rows_VD = sharded(
        size, lambda ranks, table: list(export.in_order(table["weight"], ranks, end, first))
    )
    assert np.array_equal(np.concatenate(blocks), rows_VD[first:end])
    assert max(block.nbytes for block in blocks) <= 120


def test_an_export_keeps_the_checksums_of_other_files(tmp_path):
    saved_by(1, tmp_path)
    damaged = bytearray((tmp_path / "vectors.bin").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "vectors.bin").write_bytes(damaged)
    export.save(load(tmp_path), tmp_path, ["kv", "txt"])
    first, *lines = (tmp_path / SUMS).read_text().splitlines()
    assert first == "# step 7"
    names = ["vectors.bin", "vectors.kv", ARRAY, "vectors.txt"]
    assert [line.split()[1] for line in lines] == names
    assert len(load(tmp_path)) == len(load(tmp_path / "vectors.txt")) == 23
    with pytest.raises(VectorsError, match="vectors.bin is damaged"):
        load(tmp_path / "vectors.bin")


def test_a_full_disk_is_raised_after_all_ranks_have_sent(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "BLOCK_BYTES", 120)
    full = lambda path, mode: open("/dev/full", mode, 0)  # noqa: E731, SIM115
    monkeypatch.setattr(export, "open", full, raising=False)
    with pytest.raises(OSError, match="No space left"):
        saved_by(3, tmp_path)
    assert names_in(tmp_path) == []


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux")
@pytest.mark.parametrize("failing", [ARRAY, "vectors.bin"])
def test_a_failed_export_leaves_no_file_open(tmp_path, monkeypatch, failing):
    @contextlib.contextmanager
    def filled(path):
        def fail(part):
            raise OSError("No space left on device")

        with synced_file(path) as write:
            writers = iter([write] * 2)
            yield write if path.name != failing else lambda part: next(writers, fail)(part)

    monkeypatch.setattr(export, "synced_file", filled)
    vocab = Vocab(WORDS, np.array([90, 40, 40, 7, 6, 5]), 188, 6)
    blocks = iter([np.zeros((3, 5), np.float32)] * 2)
    with pytest.raises(OSError, match="No space left") as caught:
        export.save_run(vocab, 5, blocks, tmp_path, ["kv", "bin"])
    assert caught.tb  # which keeps all that was at work
    opened = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    assert not [path for path in opened if path.startswith(str(tmp_path))]
    assert not names_in(tmp_path) and not [*blocks]
