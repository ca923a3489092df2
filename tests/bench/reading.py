"""Text to vocabulary and ids, on some numbers of cores.

    python tests/bench/reading.py --corpus wiki100.txt --copies 10 --cores 1 4 16 --gensim

Each case opens a text that is not cached: hashing, counting, ids on disk with checksums, and the
vocabulary. With --rename the words of each copy, without the most frequent ones, are others. With
--phrases N frequent pairs of words are joined, in N passes.
"""

from __future__ import annotations

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

import numba
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench import results
from tests.bench.results import Figures, memory
from w2v.api.train import SWITCH_SECONDS
from w2v.config import load_config
from w2v.system.process import cores
from w2v.text import open_corpus, tokenize

KEPT_WORDS = 20_000  # the most frequent ones, which are the same in all copies


def write_copies(corpus: Path, count: int, rename: bool, to: Path) -> None:
    """Write copies of a text, with words renamed in all but the first."""
    text = corpus.read_bytes()
    table = tokenize.WordTable()
    spaced = text.replace(b"\n", b" \1 ")  # a line end becomes a word
    numbers = np.empty(len(spaced), np.int32)
    padded = tokenize.padded(spaced)
    numbers = tokenize.number_words(padded, len(spaced), 0, table, numbers)[0]
    words = table.words(np.arange(table.size))
    ranked = np.argsort(-table.counts[: table.size], kind="stable").tolist()
    rare = [number for number in ranked[KEPT_WORDS:] if words[number] != "\1"]

    def copy(place: int) -> memoryview:
        spelled = ["\n" if word == "\1" else f"{word} " for word in words]
        for number in rare if rename and place else ():
            spelled[number] = f"{words[number]}x{place} "
        parts = [word.encode() for word in spelled]
        sizes = np.array(list(map(len, parts)))
        letters = np.frombuffer(b"".join(parts), np.uint8)
        new = np.empty(int(sizes[numbers].sum()), np.uint8)
        spell(numbers, np.cumsum(sizes) - sizes, sizes, letters, new)
        return new.data

    with to.open("wb") as file, ThreadPoolExecutor(cores()) as pool:
        for first in range(0, count, cores()):
            file.writelines(pool.map(copy, range(first, min(count, first + cores()))))


@numba.njit(nogil=True)
def spell(
    numbers: np.ndarray, starts: np.ndarray, sizes: np.ndarray, letters: np.ndarray, new: np.ndarray
) -> None:
    """Write the words of these numbers behind each other."""
    end = 0
    for number in numbers:
        for letter in range(sizes[number]):
            new[end + letter] = letters[starts[number] + letter]
        end += sizes[number]


def ours(text: Path, folder: Path, phrases: int) -> Figures:
    """Open a text that is not cached."""
    start = perf_counter()
    cpu = process_time()
    settings = [f"corpus.path={text}", f"corpus.data_dir={folder}", f"corpus.phrases={phrases}"]
    config = load_config([], settings)
    vocab, corpus = open_corpus(config)
    seconds = perf_counter() - start
    shutil.rmtree(folder / "cache")
    return {
        "MB/s": text.stat().st_size / seconds / 1e6,
        "words/s": corpus.raw_words / seconds,
        "CPU [s]": process_time() - cpu,
        "distinct words": vocab.raw_types,
        "memory [MiB]": memory(),
    }


def gensim(text: Path, phrases: int) -> Figures:
    """Count words with gensim; join pairs before."""
    from gensim.models import Phrases, Word2Vec
    from gensim.models.word2vec import LineSentence

    start = perf_counter()
    model = Word2Vec(min_count=5)
    if phrases:
        sentences = LineSentence(text)
        for _ in range(phrases):
            sentences = Phrases(sentences)[sentences]
        model.build_vocab(sentences)
    else:
        model.build_vocab(corpus_file=str(text))
    seconds = perf_counter() - start
    return {
        "MB/s": text.stat().st_size / seconds / 1e6,
        "words/s": model.corpus_total_words / seconds,
    }


def main() -> None:
    """Measure as the command line says."""
    parser = results.parser(__doc__ or "")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--rename", action="store_true")
    parser.add_argument("--cores", type=int, nargs="+", default=[cores()])
    parser.add_argument("--phrases", type=int, default=0)
    parser.add_argument("--gensim", action="store_true")
    parser.add_argument("--folder", type=Path, help="where the text is written")
    args = parser.parse_args()
    found = results.Results("reading", args.results)
    sys.setswitchinterval(SWITCH_SECONDS)  # as the command does
    available = sorted(os.sched_getaffinity(0))
    with TemporaryDirectory(dir=args.folder) as folder:
        text = Path(folder, "text.txt")
        write_copies(args.corpus, args.copies, args.rename, text)
        ours(args.corpus, Path(folder), args.phrases)  # loads what is compiled
        for count in args.cores:
            os.sched_setaffinity(0, available[:count])  # threads to come inherit it
            name = f"{text.stat().st_size / 1e9:.1f} GB, {count} cores"
            found.add(name, ours(text, Path(folder), args.phrases))
            if args.gensim:
                found.add(f"{name}, gensim", gensim(text, args.phrases))
            os.sched_setaffinity(0, available)


if __name__ == "__main__":
    main()
