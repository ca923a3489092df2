"""Training steps without a GPU by number of cores, and what bounds them.

    python tests/bench/cores.py --corpus wiki100.txt --cores 2 4 8 16

For each number of cores it measures one run on all of them, set-up excluded, and so many runs at
the same time, each on one core: these share the machine, but no rows. Two loops that change random
rows run in the same way: rows of a few KB, in the core's own cache, which show its clock, and of
256 MB, in memory. All are compared with one core alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench import results
from tests.bench.cpu import PROGRAMS, ROOT
from tests.bench.results import Figures
from w2v.system.jit import compiled

DIM = 112  # of the rows of the loops, 7 cache lines
LOOPS = {"rows in cache": 16, "rows in memory": 1 << 19}


@compiled
def change_rows(rows_VD, number, state):
    """Change `number` random rows; return the state of the random numbers."""
    for _ in range(number):
        state = state * 6364136223846793005 + 1442695040888963407
        row = (state >> 33) & (len(rows_VD) - 1)
        for d in range(rows_VD.shape[1]):
            rows_VD[row, d] = rows_VD[row, d] * np.float32(0.5) + np.float32(0.5)
    return state


def training(case: str, corpus: Path, folder: Path, size: int) -> Callable[[], tuple[float, float]]:
    """Return a function that runs some steps, for their words and seconds."""
    from tests.bench import steps
    from w2v.config import load_config

    settings = [f"corpus.path={corpus}", f"corpus.data_dir={folder}", "train.device=cpu"]
    settings += [f"model.vector_size={size}", "train.epochs=5"]
    files = [str(ROOT / file) for file in PROGRAMS[case]]
    run = steps.Steps(steps.make_plan(load_config(files, settings)))
    run(3)
    return lambda: run(4)[:2]


def loop(rows: int) -> Callable[[], tuple[float, float]]:
    """Return a function that changes rows, for their number and seconds."""
    rows_VD, state, number = np.zeros((rows, DIM), np.float32), 1, 20_000

    def some() -> tuple[float, float]:
        nonlocal state
        began = perf_counter()
        state = change_rows(rows_VD, number, state)
        return number, perf_counter() - began

    some()
    return some


def work(args: results.argparse.Namespace) -> None:
    """Measure all cases; before each, wait for a line of input."""
    for case in args.cases:
        of_loop = case in LOOPS
        some = loop(LOOPS[case]) if of_loop else training(case, args.corpus, args.data, args.size)
        print("ready", flush=True)
        sys.stdin.readline()
        done = seconds = 0.0
        computed = process_time()
        while seconds < args.seconds:
            number, took = some()
            done += number
            seconds += took
        print(done / seconds, (process_time() - computed) / seconds, flush=True)


def measure(places: list[list[int]], command: list[str], cases: list[str]) -> Figures:
    """Return the rates of processes added, and how many cores they keep busy."""
    found: Figures = {}
    with ExitStack() as stack:
        processes = []
        for cpus in places:
            given = [*command, "--cases", *cases, "--cpus", *map(str, cpus)]
            process = subprocess.Popen(
                given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            processes.append(stack.enter_context(process))
        for case in cases:
            if any(process.stdout.readline() != "ready\n" for process in processes):
                sys.exit(f"{case}: a process has failed")
            for process in processes:
                print(file=process.stdin, flush=True)
            lines = [map(float, process.stdout.readline().split()) for process in processes]
            found[f"{case} [/s]"], found[f"{case} busy"] = map(sum, zip(*lines, strict=True))
    return found


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="a text file, not compressed")
    parser.add_argument("--cases", nargs="+", default=[*PROGRAMS, *LOOPS])
    parser.add_argument("--cores", type=int, nargs="*", default=[], help="beside one")
    parser.add_argument("--size", type=int, default=100, help="of vectors")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--cpus", type=int, nargs="+", help="print the rates of one process")
    parser.add_argument("--data", type=Path, help="where that process finds the ids")
    args = parser.parse_args()
    if args.cpus:
        os.sched_setaffinity(0, args.cpus)  # before torch is imported
        work(args)
        return
    found = results.Results("cores", args.results)
    cpus = sorted(os.sched_getaffinity(0))
    programs = [case for case in args.cases if case in PROGRAMS]
    with TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--corpus", str(args.corpus.resolve())]
        command += ["--size", str(args.size), "--data", folder, "--seconds", str(args.seconds)]
        # Encode the text and compile the kernels.
        measure([cpus[:1]], [*command, "--seconds", ".01"], args.cases)
        one = measure([cpus[:1]], command, args.cases)
        found.add("1 cores", one)
        for number in args.cores:
            figures = measure([cpus[:number]], command, programs)
            apart = measure([[cpu] for cpu in cpus[:number]], command, args.cases)
            for case in args.cases:
                alone = one[f"{case} [/s]"]
                if case in programs:
                    figures[f"{case} over one"] = figures[f"{case} [/s]"] / alone
                figures[f"{case} apart over one"] = apart[f"{case} [/s]"] / alone
            found.add(f"{number} cores", figures)


if __name__ == "__main__":
    main()
