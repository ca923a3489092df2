"""Write vectors for other programs.

Row r of an array is that of line r of vectors.words.txt, from 0. Shapes: V words, D dimensions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from w2v.system.files import apply_umask
from w2v.vectors.manifest import FILES, VectorsError

UNKNOWN = "[UNK]"


def write(name: str, words: Sequence[str], vectors_VD: np.ndarray, folder: Path) -> None:
    """Write one of `FILES`; raise `VectorsError` without the package it needs."""
    file = folder / FILES[name]
    vectors_VD = np.ascontiguousarray(vectors_VD, np.float32)
    if name in ("safetensors", "npy"):
        (folder / "vectors.words.txt").write_text("\n".join([*words, ""]), encoding="utf-8")
    if name == "safetensors":
        _save_tensor("vectors", vectors_VD, file)
    elif name == "npy":
        np.save(file, vectors_VD)
    elif name == "parquet":
        pa = _package("pyarrow")
        flat = pa.array(vectors_VD.reshape(-1))
        column = pa.FixedSizeListArray.from_arrays(flat, vectors_VD.shape[1])
        table = pa.table({"word": pa.array(words, pa.string()), "vector": column})
        import_module("pyarrow.parquet").write_table(table, file)
    elif name == "projector":
        np.savetxt(file, vectors_VD, "%.6g", "\t")
        (folder / "vectors.metadata.tsv").write_text("\n".join([*words, ""]), encoding="utf-8")
    elif name == "index":
        index = _package("usearch.index").Index(ndim=vectors_VD.shape[1], metric="cos")
        index.add(np.arange(len(words)), vectors_VD)
        index.save(str(file))
    else:
        _write_static(words, vectors_VD, file)


def _save_tensor(name: str, values_VD: np.ndarray, file: Path) -> None:
    import_module("safetensors.numpy").save_file({name: values_VD}, file)
    apply_umask(file)


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise VectorsError(f"{package} is not installed: pip install {package}") from None


def _write_static(words: Sequence[str], vectors_VD: np.ndarray, folder: Path) -> None:
    """Write a folder of sentence-transformers: texts are means of words.

    Words are separated by white space, and those that are unknown count as zero. Texts are
    converted to lower case if all words are in lower case.
    """
    lower = {"type": "Lowercase"} if all(word == word.lower() for word in words) else None
    vocab = {word: row for row, word in enumerate([*words, UNKNOWN])}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": lower,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": UNKNOWN},
    }
    module = {"idx": 0, "name": "0", "path": "0_StaticEmbedding"}
    module["type"] = "sentence_transformers.models.StaticEmbedding"
    weights_VD = np.vstack([vectors_VD, np.zeros_like(vectors_VD[:1])])
    part = folder / "0_StaticEmbedding"
    part.mkdir(parents=True)
    (folder / "modules.json").write_text(json.dumps([module]))
    (part / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")
    _save_tensor("embedding.weight", weights_VD, part / "model.safetensors")
