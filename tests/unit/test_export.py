"""Saved vectors are gensim's; readers never see a half-written file."""

import os
import pickle
from hashlib import sha256

import numpy as np
import pytest
import torch
from gensim.models import KeyedVectors

import evaluate
from tests.support.each_case import each_case
from tests.support.planted import kv_of
from tests.support.rank_threads import checked, together
from w2v.model.table import Table
from w2v.vectors import export
from w2v.vectors.load import SUMS, VectorsError, load

WORDS = ["the", "Zürich", "paris", "東京", "don't", "0"]
FORMATS = ["kv", "bin", "txt"]
ROWS = [f"ö{row}" for row in range(23)]


@pytest.fixture
def kv():
    vectors = np.random.default_rng(3).standard_normal((6, 5)).astype(np.float32)
    return kv_of(WORDS, vectors, [90, 40, 40, 7, 6, 5])


@pytest.fixture
def save_apart(monkeypatch):
    """Make gensim write even small vectors to a .npy file of their own."""
    save = KeyedVectors.save
    monkeypatch.setattr(KeyedVectors, "save", lambda self, path: save(self, path, sep_limit=10))


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def test_gensim_loads_all_formats(kv, tmp_path):
    paths = export.save(kv, tmp_path, ("kv", "bin", "txt"))
    assert [path.name for path in paths] == ["vectors.kv", "vectors.bin", "vectors.txt"]
    assert names_in(tmp_path) == ["vectors.bin", "vectors.kv", "vectors.txt"]
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


def test_large_arrays_get_a_file_of_their_own(kv, tmp_path, save_apart):
    for _ in range(2):
        kv.vectors = kv.vectors + 1
        export.save(kv, tmp_path, ["kv"])
        assert names_in(tmp_path) == ["vectors.kv", "vectors.kv.vectors.npy"]
        assert np.array_equal(load(tmp_path).vectors, kv.vectors)
    (tmp_path / "vectors.kv.vectors.npy").unlink()
    with pytest.raises(VectorsError, match="vectors.kv.vectors.npy"):
        load(tmp_path)


def test_a_stale_array_file_is_removed(kv, tmp_path):
    (tmp_path / "vectors.kv.vectors.npy").write_bytes(b"old")
    export.save(kv, tmp_path, ["kv"])
    assert names_in(tmp_path) == ["vectors.kv"]


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
    assert name != "kv" or names_in(tmp_path) == ["vectors.kv"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_reader_during_a_save_reads_the_old_file(kv, tmp_path, name):
    (path,) = export.save(kv, tmp_path, [name])
    before = path.read_bytes()
    with open(path, "rb") as reader:
        kv.vectors = kv.vectors + 1
        export.save(kv, tmp_path, [name])
        assert reader.read() == before != path.read_bytes()


def test_old_vectors_are_never_beside_a_new_array_file(kv, tmp_path, monkeypatch, save_apart):
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


def saved_by(size, folder, dtype=torch.float32, formats=("kv", "bin")):
    """Save the rows of `size` ranks, and return them."""

    def body(ranks, table):
        blocks = export.in_order(table, ranks, 23)
        if ranks.rank:
            return list(blocks)
        return export.save_rows(ROWS, np.arange(23, 0, -1), 5, blocks, folder, formats)

    (_, *others), rows_VD = sharded(size, body, dtype=dtype)
    assert others == [[]] * (size - 1)
    return rows_VD


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("large", [False, True])
def test_rows_of_ranks_are_saved_as_gensim_saves_them(tmp_path, monkeypatch, size, large):
    monkeypatch.setattr(export, "BLOCK_BYTES", 120)
    monkeypatch.setattr(export, "PICKLED_WORDS", 5)
    if large:
        monkeypatch.setattr(export, "LARGE", 100)
    folder = tmp_path / "run"
    folder.mkdir()
    rows_VD = saved_by(size, folder, torch.bfloat16)
    plain = kv_of(ROWS, rows_VD)
    expected = tmp_path / "gensim"
    export.save(plain, expected, ["bin"])
    plain.save(str(expected / "vectors.kv"), separately=["vectors"] if large else None)
    hashes = {name: sha256((expected / name).read_bytes()) for name in names_in(expected)}
    lines = [f"{hashes[name].hexdigest()}  {name}\n" for name in sorted(hashes)]
    (expected / SUMS).write_text("".join(lines))
    assert names_in(folder) == names_in(expected) and len(names_in(expected)) == 3 + large
    sums = [(saved / SUMS).read_text() for saved in (folder, expected)]
    assert [line for line in sums[0].splitlines() if not line.endswith(".kv")] == [
        line for line in sums[1].splitlines() if not line.endswith(".kv")
    ]
    for name in set(names_in(expected)) - {"vectors.kv", SUMS}:
        assert (folder / name).read_bytes() == (expected / name).read_bytes()
    # The pickle may differ in its bytes, but not in what it holds.
    theirs = KeyedVectors.load(str(expected / "vectors.kv"))
    for ours in (load(folder), KeyedVectors.load(str(folder / "vectors.kv"))):
        assert vars(ours).keys() == vars(theirs).keys()
        assert ours.most_similar("ö1") == theirs.most_similar("ö1")
        # A word takes memory once.
        words = zip(ours.index_to_key, ours.key_to_index, strict=True)
        assert all(word is key for word, key in words)
        for again in (ours, pickle.loads(pickle.dumps(ours))):
            assert np.array_equal(again.vectors, rows_VD)
            assert again.index_to_key == theirs.index_to_key
            assert again.key_to_index == theirs.key_to_index
            assert np.array_equal(again.expandos["count"], theirs.expandos["count"])
    if large:
        mapped = KeyedVectors.load(str(folder / "vectors.kv"), mmap="r")
        assert isinstance(mapped.vectors, np.memmap)


def test_vectors_are_saved_for_gensim_alone(tmp_path):
    saved_by(1, tmp_path, formats=["kv"])
    assert names_in(tmp_path) == ["vectors.kv", SUMS] and len(load(tmp_path)) == 23


@pytest.mark.parametrize("size", [1, 2, 4])
@each_case("first", [1, 6, 22, 23])
def test_only_the_first_rows_are_gathered(monkeypatch, size, first):
    monkeypatch.setattr(export, "BLOCK_BYTES", 120)
    (blocks, *_), rows_VD = sharded(size, lambda r, table: list(export.in_order(table, r, first)))
    assert np.array_equal(np.concatenate(blocks), rows_VD[:first])
    assert max(block.nbytes for block in blocks) <= 120


def test_an_export_keeps_the_checksums_of_other_files(tmp_path):
    saved_by(1, tmp_path)
    damaged = bytearray((tmp_path / "vectors.bin").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "vectors.bin").write_bytes(damaged)
    export.save(load(tmp_path), tmp_path, ["kv", "txt"])
    lines = (tmp_path / SUMS).read_text().splitlines()
    assert [line.split()[1] for line in lines] == ["vectors.bin", "vectors.kv", "vectors.txt"]
    assert len(load(tmp_path)) == len(load(tmp_path / "vectors.txt")) == 23
    with pytest.raises(VectorsError, match="vectors.bin is damaged"):
        load(tmp_path / "vectors.bin")


def test_a_full_disk_is_raised_after_all_ranks_have_sent(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "BLOCK_BYTES", 120)
    monkeypatch.setattr(export, "LARGE", 100)
    full = lambda path, mode: open("/dev/full", mode, 0)  # noqa: E731, SIM115
    monkeypatch.setattr(export, "open", full, raising=False)
    with pytest.raises(OSError, match="No space left"):
        saved_by(3, tmp_path)
    assert names_in(tmp_path) == []
