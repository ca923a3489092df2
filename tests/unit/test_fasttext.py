"""Subwords in files: runs, gensim's vectors and fastText's .bin."""

import io
import struct

import numpy as np
import pytest
from gensim.models import FastText, KeyedVectors
from gensim.models.fasttext import (
    FastTextKeyedVectors,
    load_facebook_model,
    load_facebook_vectors,
    save_facebook_model,
)
from gensim.test.utils import datapath

import train
import w2v
from tests.support.tiny import tiny_arguments
from w2v.api.cli import main
from w2v.vectors import export, fasttext, load
from w2v.vectors.load import NGRAMS, OWN
from w2v.vectors.manifest import VectorsError

LINES = "žluť žluťák červeň červený modř modrý modrá </s>\n" * 30
UNSEEN = "žlutý"
FORMATS = "kv,bin,fasttext"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Folder of a finished run with subwords."""
    folder = tmp_path_factory.mktemp("subwords")
    changes = {"model__subwords": "true", "model__min_n": 2, "run__formats": FORMATS}
    changes["model__buckets"] = 10_000  # in most is no n-gram
    assert train.main(tiny_arguments(folder, LINES, **changes)) == 0
    (found,) = (folder / "runs").iterdir()
    return found


def similar(vectors, expected):
    np.testing.assert_allclose(vectors, expected, rtol=1e-5, atol=1e-7)


def test_gensim_loads_a_run_and_composes_unseen_words(run):
    words = load.load_words(run)
    kv = KeyedVectors.load(str(run / "vectors.kv"))
    assert type(kv) is FastTextKeyedVectors
    assert kv.index_to_key == words.index_to_key
    assert np.array_equal(kv.vectors, words.vectors)
    kv.adjust_vectors()  # composes them again
    similar(kv.vectors, words.vectors)
    similar(kv[UNSEEN], words.ngrams.compose(UNSEEN))
    assert np.abs(kv.vectors_vocab).max() > 0
    assert load.load_words(run / "vectors.bin").ngrams is None


def test_gensim_loads_the_fasttext_file_of_a_run_and_trains_on(run):
    path = run / export.FASTTEXT
    words, again = load.load_words(run), load.load_words(path)
    assert again.index_to_key == words.index_to_key
    similar(again.vectors, words.vectors)
    similar(again.ngrams.compose(UNSEEN), words.ngrams.compose(UNSEEN))
    kv = load_facebook_vectors(str(path))
    is_word = np.array(words.index_to_key) != fasttext.END  # for which gensim has n-grams
    similar(kv.vectors[is_word], words.vectors[is_word])
    similar(kv.vectors_vocab[~is_word], words.vectors[~is_word])  # as fastText has none
    similar(kv[UNSEEN], words.ngrams.compose(UNSEEN))
    model = load_facebook_model(str(path))
    assert (model.sg, model.window, model.wv.min_n, model.wv.max_n) == (1, 5, 2, 5)
    assert model.wv.get_vecattr("modrý", "count") == 30
    assert np.abs(model.syn1neg).max() > 0
    model.train([LINES.split()], total_examples=1, epochs=1)
    assert not np.array_equal(model.wv.vectors, words.vectors)


@pytest.mark.parametrize("name", ["kv", "bin", "txt"])
def test_exported_vectors_are_those_of_the_run(run, tmp_path, name):
    option = {"kv": "--kv", "bin": "--bin", "txt": "--text"}[name]
    assert main(["export", str(run), "--to", str(tmp_path), option]) in (0, None)
    words, exported = load.load_words(run), load.load_words(tmp_path / f"vectors.{name}")
    similar(exported.vectors, words.vectors)
    if name == "kv":
        assert all((tmp_path / array).exists() for array in (OWN, NGRAMS))
        similar(exported.ngrams.compose(UNSEEN), words.ngrams.compose(UNSEEN))
    else:
        assert exported.ngrams is None


def test_neighbors_of_an_unseen_word_are_those_of_gensim(run, capsys, monkeypatch):
    assert not main(["nn", str(run), UNSEEN, "--topn", "3"])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{UNSEEN}  (composed of n-grams: {UNSEEN})"
    kv = KeyedVectors.load(str(run / "vectors.kv"))
    for line, (word, cosine) in zip(said[1:], kv.most_similar(UNSEEN, topn=3), strict=True):
        assert line.split()[1] == word
        assert float(line.split()[0]) == pytest.approx(cosine, abs=1e-4)
    assert not main(["nn", str(run), "modrý"])
    assert "composed" not in capsys.readouterr().out
    assert not main(["nn", str(run), "Modrý"])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "Modrý  (composed of n-grams: Modrý)  (in the vocabulary: modrý)"
    assert not main(["analogies", str(run), f"{UNSEEN} - modrý + modrá"])
    assert "composed of n-grams: žlutý" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("modrý  modrá\n\n"))  # one word with a space
    assert not main(["nn", str(run)])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "modrý modrá  (composed of n-grams: modrý modrá)"
    assert main(["nn", str(run), "字"]) == 2  # no word has its n-grams, whose vectors are zero
    assert "'字' is not in the vocabulary" in capsys.readouterr().err
    with pytest.raises(KeyError, match="字"):
        w2v.load(run)["字"]


def test_other_commands_take_a_run_with_subwords(run, tmp_path, capsys):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("modrý\tmodrá\t9\nžluť\tmodř\t5\nžluť\tžluťák\t7\n")
    assert not main(["score", str(run), "--pairs", str(pairs)])
    assert "pairs" in capsys.readouterr().out
    assert not main(["report", str(run), "--to", str(tmp_path / "report.html")])


def test_files_of_fasttext_itself_are_read():
    words = load.load_words(datapath("crime-and-punishment.bin"))
    expected = load.load_words(datapath("crime-and-punishment.vec"))
    assert words.index_to_key == expected.index_to_key
    np.testing.assert_allclose(words.vectors, expected.vectors, rtol=1e-3, atol=1e-4)
    name = datapath("lee_fasttext_new.bin")  # of version 11
    words, kv = load.load_words(name), load_facebook_vectors(name)
    assert words.index_to_key == kv.index_to_key
    is_word = np.array(words.index_to_key) != fasttext.END  # for which gensim has n-grams
    similar(words.vectors[is_word], kv.vectors[is_word])
    similar(words.ngrams.compose("rejection"), kv.get_vector("rejection"))
    with pytest.raises(VectorsError, match="fastText since 0.1"):  # of the first versions
        load.load_words(datapath("lee_fasttext.bin"))


@pytest.mark.parametrize("max_n", [4, 1])
def test_models_of_gensim_are_read(tmp_path, max_n):
    text = [LINES.replace(fasttext.END, "").split()] * 5
    model = FastText(text, vector_size=6, min_count=1, min_n=2, max_n=max_n, bucket=50)
    save_facebook_model(model, str(tmp_path / "model.bin"))
    model.wv.save(str(tmp_path / "vectors.kv"))
    for name in ("model.bin", "vectors.kv"):
        words = load.load_words(tmp_path / name)
        assert words.index_to_key == model.wv.index_to_key
        similar(words.vectors, model.wv.vectors)
        if max_n > 1:
            similar(words.ngrams.compose(UNSEEN), model.wv[UNSEEN])
        else:
            assert words.ngrams.compose(UNSEEN) is None
        kv = load.load(tmp_path / name)
        similar(kv.vectors, model.wv.vectors)


def damaged(content):
    """Yield damaged copies of a file of fastText, and what is said of them."""
    sizes = 8 + fasttext.SETTINGS.size
    for end in (5, 30, sizes + 3, sizes + fasttext.SIZES.size + 4, len(content) // 2):
        yield content[:end], "more bytes should follow"

    def changed(place, form, *values):
        found = bytearray(content)
        struct.pack_into(form, found, place, *values)
        return bytes(found)

    yield changed(4, "<i", 10), "not of version 12"
    yield changed(8, "<i", 2**30), "1,073,741,824 dimensions"
    yield changed(8, "<i", 0), "0 dimensions"
    yield changed(8 + 7 * 4, "<i", 3), "classifier"
    yield changed(sizes + 8, "<i", 2), "classifier"
    yield changed(sizes, "<2i", 2**31 - 1, 2**31 - 1), "label|bytes should follow|count"
    yield changed(8 + 8 * 4, "<i", 2**31 - 1), "numbers for"
    yield changed(8 + 9 * 4, "<i", -5), "buckets"


def test_damaged_files_are_refused(run, tmp_path):
    content = (run / export.FASTTEXT).read_bytes()
    for number, (bad, message) in enumerate(damaged(content)):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(bad)
        with pytest.raises(VectorsError, match=message):
            load.load_words(path)


def test_a_quantized_file_is_refused_and_labels_are_no_words(run, tmp_path):
    content = (run / export.FASTTEXT).read_bytes()
    words = load.load_words(run)
    size, ngrams = len(words.index_to_key), words.ngrams
    shape = fasttext.SHAPE.pack(False, len(ngrams.own_VD) + len(ngrams.buckets_BD), 4)
    label = b"__label__a\0" + fasttext.COUNT.pack(3, 1)
    labeled = bytearray(content.replace(shape, label + shape, 1))
    struct.pack_into("<3i", labeled, 8 + fasttext.SETTINGS.size, size + 1, size, 1)
    (tmp_path / "labeled.bin").write_bytes(labeled)
    found = load.load_words(tmp_path / "labeled.bin")
    assert found.index_to_key == words.index_to_key
    similar(found.vectors, words.vectors)
    (tmp_path / "q.bin").write_bytes(content.replace(shape, b"\1" + shape[1:], 1))
    with pytest.raises(VectorsError, match="quantized"):
        load.load_words(tmp_path / "q.bin")


def test_arrays_of_subwords_are_checked(run, tmp_path):
    for name in ("vectors.kv", "vectors.kv.vectors.npy", OWN, NGRAMS):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    assert load.load_words(tmp_path / "vectors.kv").ngrams is not None
    np.save(tmp_path / NGRAMS, np.zeros((5, 3), np.float32))
    with pytest.raises(VectorsError, match="do not match"):
        load.load_words(tmp_path / "vectors.kv")
    (tmp_path / NGRAMS).unlink()
    with pytest.raises(VectorsError, match=NGRAMS):
        load.load_words(tmp_path / "vectors.kv")
