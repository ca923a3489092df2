"""Vectors in Python: load them, and ask what the commands ask.

Shapes: V words, D dimensions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from w2v.config import require
from w2v.system.files import as_list, naming_file
from w2v.vectors import convert, export, query, report
from w2v.vectors.datasets import RESTRICT_VOCAB, EvaluationError, Further, read_items
from w2v.vectors.load import READABLE, VectorsError, Words, find, load_words
from w2v.vectors.load import load as load_gensims
from w2v.vectors.runs import picture_path

if TYPE_CHECKING:
    from gensim.models import KeyedVectors

    from w2v.vectors.evaluate import Scores

Answers = list[tuple[str, float]]  # words and their cosines, the nearest first


class Vectors(Words):
    """Vectors of a run or a file; `vectors["king"]` is that of a word, [D].

    Functions of w2v that take the path of a run take this too.

    Args:
        run: A run folder, "latest", or a file of vectors of any program (.kv .bin .txt .vec,
            also packed).

    Attributes:
        words: The V words by falling frequency.
        vectors: Their vectors, [V, D].
        path: The file, in `folder`.

    Raises:
        RunError: There is no such run.
        VectorsError: The file is damaged, or holds no vectors.
    """

    def __init__(self, run: str | os.PathLike[str] = "latest"):
        self.path = find(os.fspath(run))
        self.folder = self.path.parent
        vars(self).update(vars(load_words(self.path)))  # without a copy of the words
        self.words = self.index_to_key

    def __len__(self) -> int:
        return len(self.words)

    def __iter__(self) -> Iterator[str]:
        return iter(self.words)

    def __contains__(self, word: str) -> bool:
        return word in self.key_to_index

    def __getitem__(self, word: str) -> np.ndarray:
        if (vector_D := query.vector_of(self, word)) is None:
            raise KeyError(word)
        return vector_D

    def __fspath__(self) -> str:
        """Return the run folder, or the file where it is not that of a run."""
        is_run = self.path.name == "vectors.kv" and (self.folder / "config.yaml").is_file()
        return str(self.folder if is_run else self.path)

    def __repr__(self) -> str:
        return f"w2v.load({os.fspath(self)!r})"

    def gensim(self) -> KeyedVectors:
        """Return the vectors as gensim's KeyedVectors."""
        return load_gensims(self)

    def nn(self, word: str, topn: int = 10) -> Answers:
        """Return the `topn` words nearest to a word, with cosines.

        Raises `EvaluationError`, with the nearest spellings, for an unknown word.
        """
        return query.combination(self, [word], topn)

    def analogies(self, *words: str, topn: int = 10) -> Answers:
        """Return the `topn` words nearest to an analogy, with cosines.

        The words are three, as in ("man", "king", "woman"), or a sum, "king - man + woman". Raises
        `EvaluationError` for others, and for unknown words.
        """
        terms = " ".join(words).split()
        if not query.SIGNS.keys() & set(terms):
            if len(terms) != 3:
                remedy = "nor a sum such as king - man + woman"
                raise EvaluationError(f"{' '.join(terms)!r} is not 3 words, {remedy}")
            a, b, c = terms
            terms = [b, "-", a, "+", c]
        return query.combination(self, terms, topn)

    def score(
        self,
        questions: str | Path | Sequence[str | Path] = (),
        pairs: str | Path | Sequence[str | Path] = (),
        restrict_vocab: int | None = RESTRICT_VOCAB,
    ) -> Scores:
        """Score analogies, word pairs, files of both, and held-out items.

        Printed, the scores are tables. Only the first `restrict_vocab` words are used, as in
        gensim; None for all. Raises `EvaluationError` for files that cannot be read or told apart.
        """
        from w2v.vectors import evaluate  # only now, as it imports torch

        further = Further(as_list(questions), as_list(pairs))
        further.check()
        items = read_items(self.folder)
        return evaluate.scores(self.words, self.vectors, *further, restrict_vocab, items)

    def map(self, to: str | Path | None = None, words: int = 500) -> Path:
        """Draw the most frequent words in two dimensions; return the file.

        That is `to`, or map.svg in the folder `to` or in that of the vectors. Raises `ReportError`
        if there are fewer than four words.
        """
        require(words > 0, "words", words, "at least 1")
        return report.word_map(self, picture_path([self.folder], "map.svg", to), words)

    def report(self, to: str | Path | None = None) -> Path:
        """Write the HTML page of the run or file; return its path.

        Raises `ReportError` without plotly.
        """
        return report.write([os.fspath(self)], to)

    def export(self, *formats: str, to: str | Path | None = None) -> list[Path]:
        """Write the vectors in other formats; return the files.

        Args:
            formats: Of "kv", "bin", "txt", "safetensors", "npy", "parquet", "projector",
                "sentence-transformers" and "index".
            to: A folder; by default that of the vectors.

        Raises `VectorsError` for other formats, words that a format cannot store, and packages that
        are not installed.
        """
        known = "kv", "bin", "txt", *convert.FILES
        if unknown := set(formats) - set(known):
            raise VectorsError(f"{' '.join(unknown)} is no format; take {', '.join(known)}")
        folder = Path(to or self.folder)
        if folder.suffix in (*READABLE, ".safetensors"):
            raise VectorsError(f"--to {folder} names a file; name a folder")
        with naming_file(folder):
            return export.save(self.gensim(), folder, formats)


load = Vectors  # reads as a verb: w2v.load("latest")
