"""Vectors are found; files that are no vectors are refused."""

import os
import pickle

import numpy as np
import pytest
from gensim.models import Word2Vec
from gensim.utils import SaveLoad

from tests.support.each_case import each_case
from tests.support.planted import kv_of
from w2v.vectors import export, load
from w2v.vectors.load import VectorsError
from w2v.vectors.runs import RunError


def test_find_takes_a_folder_a_file_or_latest(tmp_path, monkeypatch):
    folder = tmp_path / "runs" / "one"
    export.save(kv_of(["the", "paris"], np.eye(2)), folder, ["kv", "bin"])
    monkeypatch.chdir(tmp_path)
    assert load.find(folder) == load.find("latest").resolve() == folder / "vectors.kv"
    assert load.find(folder / "vectors.bin") == folder / "vectors.bin"
    with pytest.raises(RunError, match="runs is a folder of runs; .* such as .*one"):
        load.find(tmp_path / "runs")
    with pytest.raises(RunError, match="onee does not exist; did you mean .*one"):
        load.find(tmp_path / "runs" / "onee")
    (folder / "notes.md").write_text("x")
    with pytest.raises(VectorsError, match="notes.md is not a vectors file; .* .kv .bin .txt .vec"):
        load.find(folder / "notes.md")


@pytest.mark.parametrize("suffix", [".kv", ".bin", ".txt", ".vec"])
@each_case(
    "content",
    [
        b"",
        b"not vectors\nat all\n",
        b"5 3\nthe 1 2 3\n",
        b"2 0\na\nb\n",
        b"\x80\x04garbage",
        pickle.dumps({"a": 1}),
    ],
)
def test_other_content_is_refused_in_one_line(tmp_path, suffix, content):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(content)
    with pytest.raises(VectorsError) as caught:
        load.load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_whole_model_is_not_keyed_vectors(tmp_path):
    model = Word2Vec([["a", "b"]] * 5, vector_size=4, min_count=1, epochs=1)
    SaveLoad.save(model, str(tmp_path / "model.kv"))
    with pytest.raises(VectorsError, match="it names .*Word2Vec.* save the .wv of a gensim model"):
        load.load(tmp_path / "model.kv")


@each_case(
    "damage",
    [
        lambda kv: kv.index_to_key.pop(),
        lambda kv: kv.key_to_index.update(the=1),
        lambda kv: kv.expandos.update(count=np.ones(1)),
        lambda kv: setattr(kv, "vectors", np.ones((2, 3), np.float32)),
        lambda kv: setattr(kv, "vectors", np.ones((2, 2), int)),
        lambda kv: setattr(kv, "vector_size", 3),
        lambda kv: setattr(kv, "index_to_key", ["the", "the"]),
        lambda kv: (
            setattr(kv, "index_to_key", ["the", "\ud800"]),
            setattr(kv, "key_to_index", {"the": 0, "\ud800": 1}),
        ),
    ],
)
def test_vectors_whose_parts_do_not_match_are_refused(tmp_path, damage):
    kv = kv_of(["the", "paris"], np.eye(2))
    damage(kv)
    kv.save(str(tmp_path / "x.kv"))
    with pytest.raises(VectorsError, match="or is damaged"):
        load.load(tmp_path / "x.kv")


@pytest.mark.parametrize("suffix", ["bin", "txt"])
def test_the_first_vector_of_a_repeated_word_is_kept(tmp_path, caplog, suffix):
    kv_of(["the", "of", "paris"], np.eye(3)).save_word2vec_format(
        path := tmp_path / f"x.{suffix}", binary=suffix == "bin"
    )
    path.write_bytes(path.read_bytes().replace(b"of ", b"the "))
    kv = load.load(path)
    assert kv.index_to_key == ["the", "paris"] and len(kv.expandos["count"]) == 2
    assert np.array_equal(kv.vectors, np.eye(3)[[0, 2]])
    assert f"repeated words in {path}: 1; the first" in caplog.text
    export.save(kv, tmp_path / "again", ["kv"])
    assert load.load_words(tmp_path / "again").index_to_key == kv.index_to_key


def test_vectors_without_a_header_are_named(tmp_path):
    (tmp_path / "glove.txt").write_text("the 0.1 0.2\nof 0.3 0.4\n")
    with pytest.raises(VectorsError, match="first line is not two numbers; .* GloVe"):
        load.load(tmp_path / "glove.txt")


@pytest.mark.parametrize("sep_limit", [5, 10**9])
def test_words_for_queries_are_those_of_keyed_vectors(tmp_path, sep_limit):
    kv = kv_of(["the", "paris", "london"], np.eye(3))
    kv.save(str(tmp_path / "x.kv"), sep_limit=sep_limit)
    assert (tmp_path / "x.kv.vectors.npy").exists() == (sep_limit == 5)
    words = load.load_words(tmp_path / "x.kv")
    assert words.index_to_key == kv.index_to_key and np.array_equal(words.vectors, np.eye(3))
    assert words.vectors.flags.writeable  # or torch would warn
    loaded = load.load(tmp_path / "x.kv")
    loaded.vectors[:] = 2
    assert type(loaded.vectors) is np.ndarray and loaded.get_vecattr("paris", "count") == 2
    assert np.array_equal(load.load(tmp_path / "x.kv").vectors, np.eye(3))
    (tmp_path / "x.kv").write_bytes(b"damaged")
    with pytest.raises(VectorsError, match="or is damaged"):
        load.load_words(tmp_path / "x.kv")


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("apart", [[], ["vectors"]])
def test_all_that_gensim_saves_is_loaded(tmp_path, protocol, apart):
    model = Word2Vec([["a", "b", "Zürich"]] * 9, vector_size=4, min_count=1, epochs=1, hs=1)
    model.wv.fill_norms()
    path = tmp_path / "x.kv"
    model.wv.save(str(path), pickle_protocol=protocol, separately=apart)
    found = load.load(path)
    assert found.index_to_key == model.wv.index_to_key and found.next_index == 3
    assert found.key_to_index == model.wv.key_to_index
    assert np.array_equal(found.vectors, model.wv.vectors) and found.vectors.flags.writeable
    assert found.most_similar("a") == model.wv.most_similar("a")
    assert found.expandos.keys() == {"count", "sample_int", "code", "point"}
    for name, column in model.wv.expandos.items():  # codes of the tree are arrays of objects
        assert all(map(np.array_equal, found.expandos[name], column))
    if protocol == 3:  # as with NumPy 1
        path.write_bytes(path.read_bytes().replace(b"numpy._core.", b"numpy.core."))
        assert np.array_equal(load.load(path).vectors, model.wv.vectors)


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", ">f4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_floats_of_any_size_and_order_are_loaded(tmp_path, dtype, order):
    kv = kv_of(["the", "paris", "of"], np.eye(3))
    expected = np.arange(6).reshape(3, 2)
    kv.vector_size = 2
    kv.vectors = np.array(expected, dtype, order=order)
    kv.save(str(tmp_path / "x.kv"))
    found = load.load_words(tmp_path / "x.kv").vectors
    assert found.dtype == np.dtype(dtype).newbyteorder("=") and np.array_equal(found, expected)


@pytest.mark.parametrize("name", ["vectors.kv", "vectors.kv.vectors.npy"])
def test_a_file_that_would_block_is_refused(tmp_path, name):
    export.save(kv_of(["the", "paris"], np.eye(2)), tmp_path, ["kv"])
    (tmp_path / "vectors.kv.vectors.npy").unlink()
    os.mkfifo(tmp_path / "vectors.kv.vectors.npy")
    (tmp_path / "vectors.sha256").write_text(f"{'0' * 64}  {name}\n")
    with pytest.raises(VectorsError, match=f"{name} (is damaged|cannot be read)"):
        load.load(tmp_path)
    (tmp_path / "vectors.sha256").unlink()
    with pytest.raises(VectorsError, match="no file vectors.kv.vectors.npy"):
        load.load(tmp_path)


@pytest.mark.parametrize("line", ["x", "# step x", f"{'0' * 64}  vectors.kv./../../fifo"])
def test_checksums_that_name_no_files_are_refused(tmp_path, line):
    export.save(kv_of(["the", "paris"], np.eye(2)), tmp_path, ["kv"])
    (tmp_path / "vectors.sha256").write_text(f"{line}\n")
    with pytest.raises(VectorsError, match="vectors.sha256 cannot be read .*remove the checksums"):
        load.load(tmp_path)
