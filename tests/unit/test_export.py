"""gensim loads what is saved and answers alike; nothing half-written is seen; bad words, files and names get one line."""

import os
import pickle
import re

import numpy as np
import pytest
import torch
from gensim.models import KeyedVectors

import evaluate
from tests.support.threaded import checked, together
from w2v.model.table import Table
from w2v.vectors import export
from w2v.vectors import load as vectorfile

WORDS = ["the", "Zürich", "paris", "東京", "don't", "0"]


@pytest.fixture
def kv():
    rng = np.random.default_rng(3)
    return export.keyed_vectors(
        WORDS, np.array([90, 40, 40, 7, 6, 5]), rng.standard_normal((6, 5)).astype(np.float32)
    )


def test_keyed_vectors_keep_order_counts_and_memory():
    vectors = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)
    kv = export.keyed_vectors(WORDS, np.array([1, 2, 3, 4, 5, 6], dtype=np.int32), vectors)
    assert kv.index_to_key == WORDS and kv.get_vecattr("東京", "count") == 4
    assert kv.vectors is vectors and np.array_equal(kv["paris"], vectors[2])
    assert (
        export.keyed_vectors(WORDS, np.ones(6), vectors.astype(np.float64)[:, ::2]).vectors.dtype
        == np.float32
    )


def test_keyed_vectors_refuse_what_does_not_match():
    with pytest.raises(vectorfile.VectorsError, match="'a' occurs twice"):
        export.keyed_vectors(["a", "b", "a"], np.ones(3), np.ones((3, 2)))
    with pytest.raises(ValueError, match=r"2 words, 3 counts and vectors of shape \(3, 2\)"):
        export.keyed_vectors(["a", "b"], np.ones(3), np.ones((3, 2)))


def test_gensim_loads_all_three_and_most_similar_agrees(kv, tmp_path):
    paths = export.save(kv, tmp_path, ("kv", "bin", "txt"))
    assert [path.name for path in paths] == ["vectors.kv", "vectors.bin", "vectors.txt"] and all(
        path.is_file() for path in paths
    )
    loaded = [
        KeyedVectors.load(str(paths[0])),
        KeyedVectors.load_word2vec_format(str(paths[1]), binary=True),
        KeyedVectors.load_word2vec_format(str(paths[2])),
    ]
    for other in [*loaded, *(vectorfile.load(path) for path in paths)]:
        assert other.index_to_key == WORDS
        np.testing.assert_allclose(other.vectors, kv.vectors, rtol=1e-6)
        for word in WORDS:
            names, cosines = zip(*other.most_similar(word), strict=True)
            expected = kv.most_similar(word)
            assert list(names) == [name for name, _ in expected]
            np.testing.assert_allclose(cosines, [cosine for _, cosine in expected], atol=1e-6)
    assert np.array_equal(loaded[0].vectors, kv.vectors) and np.array_equal(
        loaded[1].vectors, kv.vectors
    )
    assert loaded[0].get_vecattr("paris", "count") == 40
    assert sorted(os.listdir(tmp_path)) == ["vectors.bin", "vectors.kv", "vectors.txt"]


def test_large_arrays_go_beside_and_stale_ones_go_away(kv, tmp_path, monkeypatch):
    save = KeyedVectors.save
    monkeypatch.setattr(KeyedVectors, "save", lambda self, path: save(self, path, sep_limit=10))
    export.save(kv, tmp_path, ["kv"])
    assert sorted(os.listdir(tmp_path)) == ["vectors.kv", "vectors.kv.vectors.npy"]
    assert np.array_equal(vectorfile.load(tmp_path).vectors, kv.vectors)
    kv.vectors = kv.vectors + 1
    export.save(kv, tmp_path, ["kv"])
    assert np.array_equal(vectorfile.load(tmp_path).vectors, kv.vectors)
    (tmp_path / "vectors.kv.vectors.npy").rename(tmp_path / "gone.npy")
    with pytest.raises(vectorfile.VectorsError, match="vectors.kv.vectors.npy"):
        vectorfile.load(tmp_path)
    (tmp_path / "gone.npy").rename(tmp_path / "vectors.kv.vectors.npy")
    monkeypatch.setattr(KeyedVectors, "save", save)
    export.save(kv, tmp_path, ["kv"])
    assert os.listdir(tmp_path) == ["vectors.kv"] and np.array_equal(
        vectorfile.load(tmp_path).vectors, kv.vectors
    )


@pytest.mark.parametrize("name", export.FORMATS)
def test_a_failed_save_leaves_the_old_file_whole(kv, tmp_path, monkeypatch, name):
    (path,) = export.save(kv, tmp_path, [name])
    before = path.read_bytes()

    def fail(self, path, *args, **kwargs):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(KeyedVectors, "save", fail)
    monkeypatch.setattr(KeyedVectors, "save_word2vec_format", fail)
    with pytest.raises(OSError, match="disk full"):
        export.save(kv, tmp_path, [name])
    assert os.listdir(tmp_path) == [path.name] and path.read_bytes() == before


@pytest.mark.parametrize("name", export.FORMATS)
def test_who_reads_during_a_save_reads_the_old_file(kv, tmp_path, name):
    (path,) = export.save(kv, tmp_path, [name])
    before = path.read_bytes()
    with open(path, "rb") as reader:
        kv.vectors = kv.vectors + 1
        export.save(kv, tmp_path, [name])
        assert reader.read() == before != path.read_bytes()


def test_old_vectors_are_never_paired_with_new_side_files(kv, tmp_path, monkeypatch):
    save, replace = KeyedVectors.save, os.replace
    monkeypatch.setattr(KeyedVectors, "save", lambda self, path: save(self, path, sep_limit=10))
    export.save(kv, tmp_path, ["kv"])
    seen = []
    monkeypatch.setattr(
        export.os,
        "replace",
        lambda a, b: (seen.append((tmp_path / "vectors.kv").exists()), replace(a, b)),
    )
    export.save(kv, tmp_path, ["kv"])
    assert seen == [
        False,
        False,
    ]  # neither while the side file is renamed nor before vectors.kv itself is


@pytest.mark.parametrize("word", ["new york", "line\nbreak", "tab\tbed", "", " "])
def test_words_with_white_space_go_to_kv_only(tmp_path, word):
    kv = export.keyed_vectors(["the", word], np.array([2, 1]), np.eye(2))
    for formats in (("kv", "bin"), ("txt",)):
        with pytest.raises(vectorfile.VectorsError) as caught:
            export.save(kv, tmp_path, formats)
        assert (
            repr(word) in str(caught.value)
            and "use kv" in str(caught.value)
            and "\n" not in str(caught.value)
        )
    assert os.listdir(tmp_path) == []
    export.save(kv, tmp_path, ["kv"])
    assert vectorfile.load(tmp_path).index_to_key == ["the", word]


def test_unknown_format_is_named(kv, tmp_path):
    with pytest.raises(
        vectorfile.VectorsError, match="unknown format 'text'; choose from kv bin txt"
    ):
        export.save(kv, tmp_path, ["text"])


def test_evaluate_exports_the_chosen_formats(kv, tmp_path, capsys):
    export.save(kv, tmp_path / "run", ["kv"])
    assert (
        evaluate.main(
            ["export", str(tmp_path / "run"), "--text", "--bin", "--to", str(tmp_path / "out")]
        )
        == 0
    )
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "out" / name) for name in ("vectors.txt", "vectors.bin")
    ]
    assert (
        evaluate.main(["export", str(tmp_path / "out" / "vectors.txt"), "--kv"]) == 0
    )  # beside what was read
    assert vectorfile.load(tmp_path / "out").index_to_key == WORDS


def test_projector_files_hold_the_most_frequent_words(kv, tmp_path, capsys):
    export.save(kv, tmp_path, ["kv"])
    assert (
        evaluate.main(["export", str(tmp_path), "--projector", "3", "--to", str(tmp_path / "out")])
        == 0
    )
    names = ("tensor.tsv", "metadata.tsv", "projector_config.pbtxt")
    assert capsys.readouterr().out.split() == [str(tmp_path / "out" / name) for name in names]
    assert re.findall('path: "(.*)"', (tmp_path / "out" / names[2]).read_text()) == [*names[:2]]
    assert (
        tmp_path / "out" / "metadata.tsv"
    ).read_text() == "word\tcount\nthe\t90\nZürich\t40\nparis\t40\n"
    np.testing.assert_allclose(
        np.loadtxt(tmp_path / "out" / "tensor.tsv"), kv.vectors[:3], rtol=1e-5
    )


def test_safetensors_hold_the_vectors_and_a_list_the_words(kv, tmp_path):
    from safetensors.numpy import load_file

    assert [path.name for path in export.save_safetensors(kv, tmp_path)] == [
        "vectors.safetensors",
        "vectors.tsv",
    ]
    assert np.array_equal(load_file(tmp_path / "vectors.safetensors")["vectors"], kv.vectors)
    assert (tmp_path / "vectors.safetensors").stat().st_mode == (
        tmp_path / "vectors.tsv"
    ).stat().st_mode
    rows = [line.split("\t") for line in (tmp_path / "vectors.tsv").read_text().splitlines()]
    assert rows == [[word, str(kv.get_vecattr(word, "count"))] for word in WORDS]
    with pytest.raises(vectorfile.VectorsError, match="white space"):
        export.save_safetensors(
            export.keyed_vectors(["a b", "c"], np.ones(2), np.eye(2)), tmp_path / "no"
        )
    assert not (tmp_path / "no").exists()


def rows_of_all(size, folder, words=23, dim=5, last=None, dtype=torch.float32, keep=0):
    """What each of so many ranks gives for a table with these rows, of which the first is to keep some; and the rows."""
    rows_VD = torch.randn(words, dim, generator=torch.Generator().manual_seed(1)).to(dtype)

    def written(ranks):
        table = Table("input", ranks.shard_rows(words), dim, {}, {}, "cpu", dtype)
        table["weight"].copy_(rows_VD[ranks.rank :: ranks.size])
        blocks = export.in_order(table, ranks, last)
        if ranks.rank or last:
            return list(blocks)
        return [
            export.save_rows(
                [f"w{i}" for i in range(words)], np.arange(words, 0, -1), dim, blocks, folder, keep
            )
        ]

    return checked(together(size, written)), rows_VD.float().numpy()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("large", [False, True])
def test_rows_of_several_ranks_are_written_block_by_block_as_gensim_writes_them(
    tmp_path, monkeypatch, size, large
):
    monkeypatch.setattr(export, "BLOCK_BYTES", 120)
    if large:
        monkeypatch.setattr(export, "LARGE", 100)
    (kept, *others), rows_VD = rows_of_all(
        size, tmp_path, dtype=torch.bfloat16, keep=99 if large else 7
    )
    assert np.array_equal(kept[0], rows_VD if large else rows_VD[:7]) and others == [[]] * (
        size - 1
    )
    plain = export.keyed_vectors([f"w{i}" for i in range(23)], np.arange(23, 0, -1), rows_VD)
    (tmp_path / "gensim").mkdir()
    plain.save(str(tmp_path / "gensim" / "vectors.kv"), separately=["vectors"] if large else None)
    export.save(plain, tmp_path / "gensim", ["bin"])
    names = sorted(path.name for path in (tmp_path / "gensim").iterdir())
    assert (
        sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == names
        and len(names) == 2 + large
    )
    for name in set(names) - {"vectors.kv"}:
        assert (tmp_path / name).read_bytes() == (tmp_path / "gensim" / name).read_bytes()
    theirs = KeyedVectors.load(str(tmp_path / "gensim" / "vectors.kv"))
    for loaded in (vectorfile.load(tmp_path), KeyedVectors.load(str(tmp_path / "vectors.kv"))):
        assert vars(loaded).keys() == vars(theirs).keys()
        loaded.most_similar("w2")  # works out the norms
        again = pickle.loads(pickle.dumps(loaded))
        assert np.array_equal(again.vectors, rows_VD) and again.index_to_key == theirs.index_to_key
        assert again.key_to_index == theirs.key_to_index and np.array_equal(
            again.expandos["count"], theirs.expandos["count"]
        )
    assert np.array_equal(loaded.vectors, rows_VD) and loaded.index_to_key == plain.index_to_key
    assert loaded.get_vecattr("w3", "count") == 20 and loaded.most_similar(
        "w1"
    ) == plain.most_similar("w1")
    if large:
        assert isinstance(
            KeyedVectors.load(str(tmp_path / "vectors.kv"), mmap="r").vectors, np.memmap
        )


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("last", [1, 6, 22, 40])
def test_only_so_many_rows_come(tmp_path, monkeypatch, size, last):
    monkeypatch.setattr(export, "BLOCK_BYTES", 120)
    (blocks, *_), rows_VD = rows_of_all(size, tmp_path, last=last)
    assert (
        np.array_equal(np.concatenate(blocks), rows_VD[:last])
        and max(block.nbytes for block in blocks) <= 120
    )


def test_a_full_disk_is_told_once_the_other_ranks_have_sent_all(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "BLOCK_BYTES", 120)
    monkeypatch.setattr(export, "LARGE", 100)
    monkeypatch.setattr(
        export, "open", lambda path, mode: open("/dev/full", mode, 0), raising=False
    )  # noqa: SIM115
    with pytest.raises(OSError, match="No space left"):
        rows_of_all(3, tmp_path)
    assert not list(tmp_path.iterdir())
