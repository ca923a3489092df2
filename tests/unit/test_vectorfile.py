"""Vectors are found by what a user names; what is no file of vectors gets one line."""

import os
import pickle

import numpy as np
import pytest
from gensim.models import Word2Vec
from gensim.utils import SaveLoad

from w2v.vectors import export
from w2v.vectors import load as vectorfile


@pytest.fixture
def kv():
    return export.keyed_vectors(["the", "paris"], np.array([90, 40]), np.eye(2))


def test_find_takes_a_folder_a_file_or_latest(kv, tmp_path):
    runs = tmp_path / "runs"
    with pytest.raises(vectorfile.VectorsError, match="no folder in .*runs holds vectors.kv"):
        vectorfile.find("latest", runs)
    for age, name in [(100, "b-old"), (50, "a-new")]:
        export.save(kv, runs / name)
        stamp = 1_700_000_000 - age
        os.utime(runs / name / "vectors.kv", (stamp, stamp))
    (runs / "z-unfinished").mkdir()
    assert vectorfile.find("latest", runs) == runs / "a-new" / "vectors.kv"
    assert vectorfile.find(runs / "b-old") == runs / "b-old" / "vectors.kv"
    assert vectorfile.find(runs / "b-old" / "vectors.bin").suffix == ".bin"
    with pytest.raises(vectorfile.VectorsError, match="z-unfinished holds no vectors.kv"):
        vectorfile.find(runs / "z-unfinished")
    with pytest.raises(
        vectorfile.VectorsError, match="b-oldd does not exist; did you mean .*b-old"
    ):
        vectorfile.find(runs / "b-oldd")
    (runs / "notes.md").write_text("x")
    unreadable = (
        "notes.md is not a vectors file that can be read; the endings are .kv .bin .txt .vec"
    )
    with pytest.raises(vectorfile.VectorsError, match=unreadable):
        vectorfile.find(runs / "notes.md")


@pytest.mark.parametrize("ending", [".kv", ".bin", ".txt", ".vec"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not vectors\nat all\n",
        b"5 3\nthe 1 2 3\n",
        b"\x80\x04garbage",
        pickle.dumps({"a": 1}),
    ],
)
def test_other_content_gets_one_line(tmp_path, ending, content):
    path = tmp_path / f"x{ending}"
    path.write_bytes(content)
    with pytest.raises(vectorfile.VectorsError) as caught:
        vectorfile.load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_whole_model_is_not_keyed_vectors(tmp_path):
    model = Word2Vec([["a", "b"]] * 5, vector_size=4, min_count=1, epochs=1)
    SaveLoad.save(model, str(tmp_path / "model.kv"))
    with pytest.raises(
        vectorfile.VectorsError, match="holds a gensim Word2Vec, not KeyedVectors; save its .wv"
    ):
        vectorfile.load(tmp_path / "model.kv")
