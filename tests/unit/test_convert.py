"""Exported files are read back by the programs that they are for."""

import csv
import json

import numpy as np
import pytest

import w2v
from tests.support.each_case import each_case
from tests.support.planted import kv_of
from w2v.api import cli
from w2v.vectors import export
from w2v.vectors.manifest import FILES, STATIC, VectorsError

WORDS = ["the", "zürich", "paris", "東京", "don't", "0"]


@pytest.fixture
def run(tmp_path):
    """Vectors in a folder."""
    vectors = np.random.default_rng(3).standard_normal((6, 5)).astype(np.float32)
    export.save(kv_of(WORDS, vectors), tmp_path, ["kv"])
    return w2v.load(tmp_path / "vectors.kv")


def words_in(folder):
    return (folder / "vectors.words.txt").read_text(encoding="utf-8").splitlines()


def test_safetensors_and_numpy_read_arrays(run, tmp_path):
    from safetensors.numpy import load_file

    run.export("safetensors", "npy")
    assert words_in(tmp_path) == WORDS
    assert np.array_equal(load_file(tmp_path / "vectors.safetensors")["vectors"], run.vectors)
    assert np.array_equal(np.load(tmp_path / "vectors.npy"), run.vectors)
    modes = {(tmp_path / f"vectors.{kind}").stat().st_mode for kind in ("npy", "safetensors")}
    assert len(modes) == 1  # others may read both, or neither


def test_pyarrow_reads_a_table(run):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    (file,) = run.export("parquet")
    table = parquet.read_table(file)
    assert table["word"].to_pylist() == WORDS
    assert table.schema.field("vector").type.list_size == 5
    assert np.array_equal(np.array(table["vector"].to_pylist(), np.float32), run.vectors)


def test_the_projector_reads_two_tables(run, tmp_path):
    (file,) = run.export("projector")
    with open(file, encoding="utf-8") as lines:
        rows = [[*map(float, row)] for row in csv.reader(lines, delimiter="\t")]
    np.testing.assert_allclose(rows, run.vectors, rtol=1e-5)
    assert (tmp_path / "vectors.metadata.tsv").read_text(encoding="utf-8").splitlines() == WORDS


def test_sentence_transformers_encodes_texts(run):
    library = pytest.importorskip(
        "sentence_transformers", reason="sentence-transformers is not installed"
    )
    for _ in range(2):  # the second replaces the first
        (folder,) = run.export("sentence-transformers")
    model = library.SentenceTransformer(str(folder), device="cpu")
    found = model.encode(["zürich", "The PARIS  0", "nowhere"])
    words = run.vectors[[0, 2, 5]]
    np.testing.assert_allclose(found[0], run["zürich"], rtol=1e-6)
    np.testing.assert_allclose(found[1], words.mean(0), rtol=1e-5)
    assert not found[2].any()


def test_the_static_folder_has_a_row_for_each_token(run):
    from safetensors.numpy import load_file

    (folder,) = run.export("sentence-transformers")
    (module,) = json.loads((folder / "modules.json").read_text())
    part = folder / module["path"]
    tokenizer = json.loads((part / "tokenizer.json").read_text(encoding="utf-8"))
    weights = load_file(part / "model.safetensors")["embedding.weight"]
    for word, row in tokenizer["model"]["vocab"].items():
        expected = run[word] if word in run else np.zeros(5)
        assert np.array_equal(weights[row], expected)
    assert len(weights) == len(tokenizer["model"]["vocab"]) == 7


@pytest.fixture
def index_module():
    return pytest.importorskip("usearch.index", reason="usearch is not installed")


def test_usearch_finds_each_vector(run, index_module):
    (file,) = run.export("index")
    index = index_module.Index.restore(str(file))
    assert [int(index.search(vector, 1).keys[0]) for vector in run.vectors] == [*range(6)]


@pytest.mark.parametrize("form", ["parquet", "index"])
def test_a_missing_package_is_named(run, monkeypatch, form):
    for name in ("pyarrow", "usearch", "usearch.index"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(VectorsError, match="is not installed: pip install"):
        run.export(form)


def test_the_command_writes_all_formats(run, tmp_path, capsys):
    forms = [form for form in FILES if form not in ("parquet", "index")]
    to = tmp_path / "exported"
    options = [f"--{form}" for form in ("text", *forms)]
    assert cli.main(["export", str(run.path), *options, "--to", str(to)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [str(to / name) for name in ("vectors.txt", *map(FILES.get, forms))]
    assert (to / STATIC / "modules.json").exists()


@each_case("forms", [["csv"], ["kv", "word2vec"]])
def test_unknown_formats_are_refused(run, forms):
    with pytest.raises(VectorsError, match=f"{forms[-1]} is no format; take kv, bin"):
        run.export(*forms)
