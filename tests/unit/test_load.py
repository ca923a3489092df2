"""Vectors are found; files that are no vectors are refused."""

import bz2
import gzip
import lzma
import os
import pickle
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from gensim.models import Doc2Vec, FastText, KeyedVectors, Word2Vec, keyedvectors
from gensim.models.doc2vec import TaggedDocument
from gensim.utils import SaveLoad
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.support.each_case import each_case
from tests.support.planted import kv_of
from w2v.system import resources
from w2v.vectors import export, fasttext, load
from w2v.vectors.load import VectorsError
from w2v.vectors.runs import RunError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


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
    with pytest.raises(VectorsError, match="notes.md is text, not vectors: .*; .* w2v train .*.md"):
        load.load(folder / "notes.md")


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
    with pytest.raises(VectorsError, match="x.kv cannot be read as vectors"):
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


TEXT = b"3 2\nthe 0.5 -2\nof 1e-3 4\nnew york 1 2\n"
GLOVE = TEXT.partition(b"\n")[2]
READ = [[0.5, -2], [1e-3, 4], [1, 2]]
PACKERS = [gzip.compress, bz2.compress, lzma.compress, zstd.compress]


@each_case(
    "content",
    [
        TEXT,
        GLOVE,
        b"\xef\xbb\xbf" + TEXT,
        b"\xef\xbb\xbf" + GLOVE,
        TEXT.replace(b"\n", b"\r\n"),
        TEXT.replace(b"\n", b" \n"),  # as word2vec.c and fastText write
        GLOVE[:-1],
        TEXT + b"\n\n",
        b"the\t0.5\t-2\nof\t1e-3 4\nnew york\t1 2\n",
        *(pack(TEXT) for pack in PACKERS),
        *(pack(GLOVE) for pack in PACKERS),
    ],
)
@pytest.mark.parametrize("name", ["x.txt", "x.emb", "x.bin", "x.gz", "vectors"])
def test_text_is_read_whatever_its_name_says(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    words = load.load_words(tmp_path / name)
    assert words.index_to_key == ["the", "of", "new york"]
    assert np.array_equal(words.vectors, np.array(READ, np.float32))


@each_case("pack", [bytes, *PACKERS])
@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("name", ["x.bin", "x.txt", "x.bin.gz"])
def test_binary_is_read_whatever_its_name_says(tmp_path, name, end, pack):
    rows = np.random.default_rng(1).normal(size=(3, 40)).astype("<f4")
    words = ["the", "Zürich", "中"]
    records = [
        word.encode() + b" " + row.tobytes() + end for word, row in zip(words, rows, strict=True)
    ]
    (tmp_path / name).write_bytes(pack(b"3 40\n" + b"".join(records)))
    found = load.load_words(tmp_path / name)
    assert found.index_to_key == words and np.array_equal(found.vectors, rows)


def test_words_may_hold_spaces_and_numbers(tmp_path):
    text = b". . . 1 2\nat name@x.com 3 4\n1 2 5 6\n7 7 8\nnan 9 10\n 11 12\n"
    (tmp_path / "glove.txt").write_bytes(text)
    words = load.load_words(tmp_path / "glove.txt")
    assert words.index_to_key == [". . .", "at name@x.com", "1 2", "7", "nan", ""]
    assert np.array_equal(words.vectors, np.arange(1, 13).reshape(6, 2))


def test_bytes_that_are_not_utf8_are_replaced_and_counted(tmp_path, caplog):
    (tmp_path / "x.txt").write_bytes("2 1\ncafé 1\nok 2\n".encode("latin1"))
    assert load.load_words(tmp_path / "x.txt").index_to_key == ["caf\ufffd", "ok"]
    assert "words that are not UTF-8 in" in caplog.text and ": 1;" in caplog.text


@each_case(
    ("content", "message"),
    [
        (b"10 2\na 1 2\nb 3 4\n", "header says 10 words of 2 dimensions, the file has 2"),
        (b"2 3\na 1 2\nb 3 4\n", "line 2 ends in 2 numbers, but the header says 2 words of 3"),
        (b"2 1\na 1 2\nb 3 4\n", "header says 2 words of 1 dimensions, lines end in 2 numbers"),
        (b"2 2\na 1 2\nb 3 x\n", "line 3 ends in 0 numbers"),
        (b"a 1 2\n\nb 3\nc 1 2\n", "line 3 ends in 1 numbers, but most lines end in 2"),
        (b"a 1 2\nb\nc 1 2\n", "line 2 ends in 0 numbers"),
        (b"", "of no format of gensim, word2vec, GloVe or fastText since"),
        (b"1 2\na 1e39 2\n", "line 2 has a number above"),
        (b"9 4\nthe " + bytes(16), "header says 9 words of 4 dimensions, the file has 1"),
        (b"9000000000000 4\nthe " + bytes(16), "the file has 1"),
        (b"9 9000000000000\nthe " + bytes(16), "header says 9 words of 9,000,000,000,000"),
        (b"the,0.1,0.2\nof,0.3,0.4\n", "is text, not vectors: its lines do not end in numbers"),
        (b"GIF89a\0\0\0\0", "of no format of gensim, word2vec, GloVe or fastText since"),
        ("the 1 2\n".encode("utf-16"), "is UTF-16 text"),
        ("\ufeffthe 1 2\n".encode("utf-16-be"), "is UTF-16 text"),
        (b"2 2\rthe 1 2\rof 3 4\r", "line 1 has a carriage return"),
        (b"3 1\na " + b"\xff" * 8 + b"b " + b"\xff" * 8 + b"c " + bytes(4), "2 of 3 words are not"),
        (b"\xba\x16\x4f\x2f\x0c\0\0\0", "ends where 56 more bytes should follow"),
        (b"PK\3\4", "is a zip archive"),
        (pickle.dumps([{"the": 1}]), "is a pickle of other objects than KeyedVectors"),
        (pickle.dumps(Path("x")), "names pathlib.*, which could run any code"),
        (b"\x80\x04\x8c\x02os\x8c\x04\n" + b"ab\n\x93.", "names os. ab, which could run any code"),
    ],
)
def test_errors_say_what_was_found_and_expected(tmp_path, content, message):
    (tmp_path / "x.vec").write_bytes(content)
    with pytest.raises(VectorsError, match=message) as caught:
        load.load(tmp_path / "x.vec")
    assert "damaged" not in str(caught.value) and "\n" not in str(caught.value)


PIECES = b"a|b |1|-0.5|1e40|nan| |\t|\n|\r|\0|\x0b|\xff|\xc3\xa4|2 1\n|1 2\n".split(b"|")
STARTS = [
    b"",
    b"2 1\n",
    b"1 2\n",
    b"9 9\n",
    b"\xef\xbb\xbf",
    b"\x1f\x8b",
    b"BZh91AY&SY",
    b"\x80\x04",
]


@given(st.sampled_from(STARTS), st.lists(st.sampled_from(PIECES), max_size=20))
def test_any_bytes_are_whole_vectors_or_refused_in_one_line(tmp_path_factory, start, pieces):
    path = tmp_path_factory.mktemp("any") / "x.txt"
    path.write_bytes(start + b"".join(pieces))
    try:
        words = load.load_words(path)
    except VectorsError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:
        assert len(words.vectors) == len(words.index_to_key) == len(words.key_to_index) > 0
        assert words.vectors.dtype == np.float32


def test_more_words_than_the_header_says_and_long_lines_are_left_out(tmp_path, caplog, monkeypatch):
    (tmp_path / "x.txt").write_bytes(b"1 2\na 1 2\nb 3 4\n")
    assert load.load_words(tmp_path / "x.txt").index_to_key == ["a"]
    assert "header says 1 words of 2 dimensions, but there are more" in caplog.text
    monkeypatch.setattr(load, "BLOCK_BYTES", 8)
    monkeypatch.setattr(load, "LONGEST", 16)
    (tmp_path / "x.txt").write_bytes(b"2 2\na 1 2\nb 3" + b" " * 50 + b"4\n")
    with pytest.raises(VectorsError, match="line 3 ends in 1 numbers"):
        load.load_words(tmp_path / "x.txt")


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
SPACES = st.characters(codec="utf-8", exclude_categories=["Zs", "Zl", "Zp", "Cc", "Cs"])


@given(data=st.data(), binary=st.booleans())
def test_files_that_gensim_reads_are_read_alike(tmp_path_factory, data, binary):
    words = data.draw(st.lists(st.text(SPACES, min_size=1), min_size=1, unique=True))
    dim = data.draw(st.integers(1, 5))
    rows = data.draw(arrays(np.float32, (len(words), dim), elements=FLOATS))
    path = tmp_path_factory.mktemp("any") / f"x.{'bin' if binary else 'txt'}"
    kv_of(words, rows).save_word2vec_format(path, binary=binary)
    expected = KeyedVectors.load_word2vec_format(path, binary=binary)
    found = load.load(path)
    assert found.index_to_key == expected.index_to_key == words
    assert found.vectors.tobytes() == expected.vectors.tobytes()
    assert np.array_equal(found.expandos["count"], expected.expandos["count"])
    if not binary:  # GloVe's
        path.write_bytes(path.read_bytes().partition(b"\n")[2])
        expected = KeyedVectors.load_word2vec_format(path, no_header=True)
        assert load.load_words(path).vectors.tobytes() == expected.vectors.tobytes()


@each_case("keys", [[1, 20, 300], [np.int64(1), np.float32(2.5), 3], [np.str_("Zürich"), "b", "c"]])
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_keys_that_are_no_text_become_text(tmp_path, keys, protocol):
    model = Word2Vec([keys] * 9, vector_size=4, min_count=1, epochs=1)
    model.wv.save(str(tmp_path / "x.kv"), pickle_protocol=protocol)
    found = load.load_words(tmp_path / "x.kv")
    assert found.index_to_key == [str(key) for key in model.wv.index_to_key]
    assert np.array_equal(found.vectors, model.wv.vectors)


def test_keys_of_equal_text_are_repeated_words(tmp_path, caplog):
    kv_of([1, "1", 2], np.eye(3)).save(str(tmp_path / "x.kv"))
    words = load.load_words(tmp_path / "x.kv")
    assert words.index_to_key == ["1", "2"] and np.array_equal(words.vectors, np.eye(3)[[0, 2]])
    assert "repeated words" in caplog.text


SENTENCES = [["a", "b", "Zürich"], ["b", "c", "c"]] * 9


def test_other_classes_are_refused_by_name(tmp_path):
    path = str(tmp_path / "x.kv")
    FastText(SENTENCES, vector_size=4, min_count=1, epochs=1, bucket=9).save(path)
    with pytest.raises(VectorsError, match="fasttext.FastText.* .save_word2vec_format"):
        load.load(path)
    Word2Vec([[(1, 2), 3, 4]] * 9, min_count=1, epochs=1).wv.save(path)
    with pytest.raises(VectorsError, match="a word is a tuple, not text"):
        load.load(path)


@each_case("tags", [lambda n: [n], lambda n: [f"d{n}"], lambda n: [n, f"d{n}"]])
def test_documents_of_doc2vec_are_loaded(tmp_path, tags):
    documents = [TaggedDocument(words, tags(n)) for n, words in enumerate(SENTENCES)]
    model = Doc2Vec(documents, vector_size=4, min_count=1, epochs=1)
    model.dv.save(str(tmp_path / "x.kv"))
    found = load.load_words(tmp_path / "x.kv")
    assert found.index_to_key == [str(tag) for tag in model.dv.index_to_key]
    assert np.array_equal(found.vectors, model.dv.vectors)


def test_vectors_of_gensim_3_are_loaded(tmp_path, monkeypatch):
    class Word2VecKeyedVectors:
        pass

    class Vocab:
        count = 3

    for made in (Word2VecKeyedVectors, Vocab):  # by these names in its pickles
        made.__module__, made.__qualname__ = keyedvectors.__name__, made.__name__
        monkeypatch.setattr(keyedvectors, made.__name__, made, raising=False)
    kv = Word2VecKeyedVectors()
    kv.vectors = np.eye(2, dtype=np.float32)
    kv.vector_size = 2
    kv.index2word = ["the", "paris"]
    kv.vocab = {word: Vocab() for word in kv.index2word}
    (tmp_path / "x.kv").write_bytes(pickle.dumps(kv, 2))
    words = load.load_words(tmp_path / "x.kv")
    assert words.index_to_key == ["the", "paris"] and np.array_equal(words.vectors, np.eye(2))


def test_packed_files_are_read_while_memory_is_left(tmp_path, monkeypatch):
    kv = kv_of(["the", "paris"], np.eye(2))
    kv.save(str(tmp_path / "x.kv.gz"))
    assert np.array_equal(load.load_words(tmp_path / "x.kv.gz").vectors, kv.vectors)
    settings = fasttext.SETTINGS.pack(2, *[1] * 6, fasttext.SKIPGRAM, 0, 0, 0, 1, 0.1)
    sizes = fasttext.SIZES.pack(1 << 30, 1 << 30, 0, 1, -1)
    head = fasttext.MAGIC + struct.pack("<i", fasttext.VERSION) + settings + sizes
    bombs = {
        "ft.bin.gz": head + (b"a\0" + fasttext.COUNT.pack(1, 0)) * (1 << 19),
        "bomb.kv.gz": b"\x80\4" + bytes(1 << 23),
        "bomb.vec.gz": b"9999999 2\n" + b"a 0 0\n" * (1 << 19),
        "words.vec.gz": b"9999999 2\n" + b"%s 0 0\n" % bytes(b"a" * (1 << 21)) * 5,
        "bomb.bin.gz": b"9999999 2\n" + b"a 12345678" * (1 << 19),
    }
    for name, content in bombs.items():
        (tmp_path / name).write_bytes(gzip.compress(content, 1))
        left = iter([1 << 30] * 3 + [5 << 20])
        monkeypatch.setattr(resources, "free_host_bytes", lambda left=left: next(left))
        with pytest.raises(VectorsError, match=f"{name} .*does not fit into memory, .* 5 MiB are"):
            load.load_words(tmp_path / name)


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
    with pytest.raises(VectorsError, match="is text, not vectors"):
        load.load_words(tmp_path / "x.kv")


@each_case("protocol", [2, 3, 4])
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


@each_case(
    "dtype, order", [(dtype, order) for dtype in ("<f2", "<f4", "<f8", ">f4") for order in "CF"]
)
def test_floats_of_any_size_and_order_are_loaded(tmp_path, dtype, order):
    kv = kv_of(["the", "paris", "of"], np.eye(3))
    expected = np.arange(6).reshape(3, 2)
    kv.vector_size = 2
    kv.vectors = np.array(expected, dtype, order=order)
    for apart in ([], ["vectors"]):
        kv.save(str(tmp_path / "x.kv"), separately=apart)
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


@each_case("line", ["x", "# step x", f"{'0' * 64}  vectors.kv./../../fifo"])
def test_checksums_that_name_no_files_are_refused(tmp_path, line):
    export.save(kv_of(["the", "paris"], np.eye(2)), tmp_path, ["kv"])
    (tmp_path / "vectors.sha256").write_text(f"{line}\n")
    with pytest.raises(VectorsError, match="vectors.sha256 cannot be read .*remove the checksums"):
        load.load(tmp_path)
