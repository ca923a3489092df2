"""Whole commands, from Enter to vectors: the wall time and its phases.

    python tests/bench/run.py --corpus wiki100.txt --large 10 --programs main=../main here=.

Each case runs twice: cold, with a new text and no compiled kernels, and warm. "large" is the text
several times over with its rare words renamed in each copy, and GPU memory for 10 % of the tables;
with fewer than ten copies of 100 MB that is too little for a batch. Python's bytecode is compiled
before: without it, importing torch takes 4.4 s instead of 1.5.
"exit" is the time between the last line and the end of the process. "copying" is what it takes to
copy and sync the files of the run folder, for scale.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench import results
from tests.bench.results import Figures
from w2v.system.files import sync
from w2v.vectors import runs

ROOT = Path(__file__).parents[2]
IMPORTS = "import numba, scipy, train; from w2v.training import plan, trainer; import cupy"
COMMON = 20_000  # words of the text that all copies share
SETTINGS = ["configs/text8.yaml"]
LARGE = ["configs/optimizers/adam.yaml", "train.epochs=1"]
LARGE += ["transfer.engine=mapped", "transfer.gpu_bytes=10%"]


def enlarge(corpus: Path, copies: int, path: Path) -> None:
    """Write the text several times over, with other rare words in each copy."""
    with ProcessPoolExecutor() as pool, open(path, "wb") as file:
        for copy in pool.map(partial(renamed, corpus), range(copies)):
            file.write(copy)


def renamed(corpus: Path, copy: int) -> bytes:
    """Return the text with the number of the copy after each rare word."""
    text = corpus.read_bytes()
    counts = Counter(text.split())
    ranked = [word for word, _ in counts.most_common()]
    new = {word: word for word in ranked[:COMMON]}
    new |= {word: b"%s_%d" % (word, copy) for word in ranked[COMMON:]}
    lines = (b" ".join([new[word] for word in line.split()]) for line in text.split(b"\n"))
    return b"\n".join(lines) + b"\n"


def timed(command: list[str], folder: Path, environment: dict[str, str]) -> float:
    """Return the seconds that a command takes, from outside."""
    began = perf_counter()
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True
    )
    seconds = perf_counter() - began
    if done.returncode:
        sys.exit(f"{shlex.join(command)}:\n{done.stdout}{done.stderr}")
    return seconds


def measure(program: Path, settings: list[str], work: Path) -> Figures:
    """Run train.py once and return its phases; `work` holds its caches."""
    output = work / "runs"
    places = [f"corpus.data_dir={work / 'data'}", f"run.dir={output}"]
    caches = {"CUPY_CACHE_DIR": str(work / "cupy"), "NUMBA_CACHE_DIR": str(work / "numba")}
    seconds = timed([sys.executable, "train.py", *settings, *places], program, caches)
    folder = runs.find("latest", "scores.json", output)
    run = runs.read(folder)
    phases = {line["phase"]: line["seconds"] for line in run.metrics if "phase" in line}
    figures = {"whole command [s]": seconds} | {f"{name} [s]": s for name, s in phases.items()}
    if phases:  # other versions of the program tell of none
        figures["exit [s]"] = seconds - sum(phases.values())
    figures["training alone [s]"] = run.scores["seconds"]
    figures["words/s"] = run.scores["words"] / run.scores["seconds"]
    figures["analogies [%]"] = 100 * run.scores["analogies"]["total"]["accuracy"]

    # What the disk takes for the same files.
    files = [file for file in folder.rglob("*") if file.is_file()]
    (work / "copies").mkdir()
    began = perf_counter()
    for number, file in enumerate(files):
        shutil.copyfile(file, work / "copies" / str(number))
        sync(work / "copies" / str(number))
    figures["copying [s]"] = perf_counter() - began
    figures["files [GB]"] = sum(file.stat().st_size for file in files) / 1e9
    for used in (work / "copies", output):
        shutil.rmtree(used)
    return figures


def main(arguments: list[str] | None = None) -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="a text file, not compressed")
    parser.add_argument("--large", type=int, default=10, help="copies of it (0: no large text)")
    parser.add_argument("--programs", nargs="+", default=["w2v=."], metavar="NAME=CHECKOUT")
    parser.add_argument(
        "--others", nargs="*", default=[], metavar="NAME=COMMAND", help="with {corpus} and {folder}"
    )
    args = parser.parse_args(arguments)
    found = results.Results("run", args.results)
    with TemporaryDirectory() as temporary:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(Path(temporary, "bytecode"))
        programs = [program.split("=", 1) for program in args.programs]
        for _, checkout in programs:
            compiled = [sys.executable, "-c", IMPORTS]
            subprocess.run(compiled, cwd=checkout, stderr=subprocess.DEVNULL)
        cases = [(args.corpus.stem, args.corpus.resolve(), [])]
        if args.large:
            large = Path(temporary, "large.txt")
            enlarge(args.corpus, args.large, large)
            cases.append((f"{args.corpus.stem} x {args.large}", large, LARGE))
        for case, corpus, settings in cases:
            settings = [*SETTINGS, *settings, f"corpus.path={corpus}", *args.set]
            for cache in ("cold", "warm"):
                for name, checkout in programs:
                    work = Path(temporary, f"{case}-{name}".replace(" ", ""))
                    work.mkdir(exist_ok=True)
                    found.add(f"{case}, {name}, {cache}", measure(Path(checkout), settings, work))
            for name, command in (other.split("=", 1) for other in args.others):
                words = [word.format(corpus=corpus, folder=temporary) for word in command.split()]
                found.add(f"{case}, {name}", {"whole command [s]": timed(words, ROOT, {})})


if __name__ == "__main__":
    main()
