"""Files of vectors as gensim writes them, but row by row and without gensim, whose import takes 50 MiB."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator, Sequence
from typing import IO, Any

import numpy as np

CLASS = b"gensim.models.keyedvectors\nKeyedVectors\n"  # as a pickle names it


@contextlib.contextmanager
def around_rows(
    file: IO[bytes],
    words: Sequence[str],
    row_of: dict[str, int],
    counts: np.ndarray,
    dim: int,
    apart: bool,
) -> Iterator[None]:
    """Write a pickle of `KeyedVectors` around what is written to the file in the block: the V x D numbers, float32, row after row.

    apart: not into this file but, as .npy, into one of the same name and ".vectors.npy".
    """
    state: dict[str, Any] = {
        "vector_size": dim,
        "index_to_key": list(words),
        "next_index": len(words),
        "key_to_index": row_of,
        "norms": None,
        "expandos": {"count": np.asarray(counts, np.int64)},
        "mapfile_path": None,
        "lifecycle_events": [],
        "__numpys": ["vectors"] if apart else [],
        "__scipys": [],
        "__ignoreds": [],
        "__recursive_saveloads": [],
    }
    file.write(pickle.PROTO + b"\x04" + pickle.GLOBAL + CLASS + pickle.EMPTY_TUPLE + pickle.NEWOBJ)
    _put(file, state)
    if not apart:
        reduced: Any = np.empty(0, "<f4").__reduce__()
        rebuild, of_none, (version, _, dtype, by_columns, _) = reduced
        for value in ("vectors", rebuild, of_none):
            _put(file, value)
        file.write(pickle.REDUCE + pickle.MARK)
        for value in (version, (len(words), dim), dtype, by_columns):
            _put(file, value)
        file.write(pickle.BINBYTES8 + (4 * len(words) * dim).to_bytes(8, "little"))
    yield
    if not apart:
        file.write(pickle.TUPLE + pickle.BUILD + pickle.SETITEM)
    file.write(pickle.BUILD + pickle.STOP)


def _put(file: IO[bytes], value: Any) -> None:
    """Leave a value on the stack of who reads the pickle; protocol 3, as its values may follow others in a file."""
    pickle.dump(value, file, 3)
    file.seek(-len(pickle.STOP), os.SEEK_CUR)
