"""Whole commands, from Enter to vectors: the wall time and its phases.

    python tests/bench/run.py --corpus wiki100.txt --large 40

The text is trained by the first command of an installation, without compiled kernels, as a new text
and with its ids cached. With --large so is a text several times over with other rare words in each
copy: as a new text it is paged with GPU memory for 10 % of the tables, with cached ids it is not.
Python's bytecode is compiled before: without it, importing torch takes 4.4 s instead of 1.5.

"exit" is the time between the last line and the end of the process. "copying" is what it takes to
copy and sync the files of the run folder, beside which "after training" stands: saving, exporting
and scoring. "steady" is the rate of a second run of the small text in one process, without
checkpoints.
"""

from __future__ import annotations

import gc
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench import reading, results
from tests.bench.results import Figures
from w2v.system.files import sync
from w2v.vectors import runs

ROOT = Path(__file__).parents[2]
IMPORTS = "import numba, scipy, train; from w2v.training import plan, trainer; import cupy"
SETTINGS = ["configs/text8.yaml"]
LARGE = ["configs/optimizers/adam.yaml", "train.epochs=1"]
PAGED = ["transfer.engine=mapped", "transfer.gpu_bytes=10%"]
AFTER = ("saving", "exporting", "scoring")


def timed(command: list[str], environment: dict[str, str]) -> float:
    """Return the seconds that a command takes, from outside."""
    began = perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    seconds = perf_counter() - began
    if done.returncode:
        sys.exit(f"{shlex.join(command)}:\n{done.stdout}{done.stderr}")
    return seconds


def measure(settings: list[str], work: Path) -> Figures:
    """Run train.py once and return its phases; `work` holds its caches."""
    output = work / "runs"
    places = [f"corpus.data_dir={work / 'data'}", f"run.dir={output}", "run.report=false"]
    caches = {"CUPY_CACHE_DIR": str(work / "cupy"), "NUMBA_CACHE_DIR": str(work / "numba")}
    seconds = timed([sys.executable, "train.py", *settings, *places], caches)
    folder = runs.find("latest", "scores.json", output)
    run = runs.read(folder)
    phases = {line["phase"]: line["seconds"] for line in run.metrics if "phase" in line}
    figures = {"whole command [s]": seconds} | {f"{name} [s]": s for name, s in phases.items()}
    figures["exit [s]"] = seconds - sum(phases.values())
    figures["words/s"] = run.scores["words"] / run.scores["seconds"]
    figures["analogies [%]"] = 100 * run.scores["analogies"]["total"]["accuracy"]

    # What the disk takes for the same files.
    found = (file for file in folder.rglob("*") if file.is_file())
    files = {file.stat().st_ino: file for file in found}.values()  # one of each pair of links
    (work / "copies").mkdir()
    began = perf_counter()
    for number, file in enumerate(files):
        shutil.copyfile(file, work / "copies" / str(number))
        sync(work / "copies" / str(number))
    copying = perf_counter() - began
    figures["copying [s]"] = copying
    figures["files [GB]"] = sum(file.stat().st_size for file in files) / 1e9
    after = sum(phases.get(name, 0) for name in AFTER)
    figures["after training [s]"] = after
    figures["after training over copying [times]"] = after / copying
    for used in (work / "copies", output):
        shutil.rmtree(used)
    return figures


def steady_rate(settings: list[str], work: Path) -> float:
    """Return the words/s of a second run in this process, without checkpoints."""
    from tests.bench import steps
    from w2v.config import load_config
    from w2v.text import open_corpus

    files = [setting for setting in settings if setting.endswith(".yaml")]
    given = [setting for setting in settings if setting not in files]
    given += [f"corpus.data_dir={work / 'data'}", "run.checkpoint_minutes=0"]
    config = load_config([str(ROOT / file) for file in files], given)
    text = open_corpus(config)
    for _ in range(2):
        gc.collect()  # memory of the run before
        with TemporaryDirectory() as folder:
            metrics = steps.train(steps.make_plan(config, text), Path(folder)).metrics
    return metrics.curve.words / metrics.curve.seconds


def main(arguments: list[str] | None = None) -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="a text file, not compressed")
    parser.add_argument("--large", type=int, default=10, help="copies of it (0: no large text)")
    parser.add_argument("--gpus", type=int, default=1, help="also with so many, beside one")
    parser.add_argument("--cases", default="", metavar="PART", help="only those with this in name")
    parser.add_argument("--folder", type=Path, help="where texts and runs are written")
    parser.add_argument(
        "--others", nargs="*", default=[], metavar="NAME=COMMAND", help="with {corpus} and {folder}"
    )
    args = parser.parse_args(arguments)
    found = results.Results("run", args.results)
    with TemporaryDirectory(dir=args.folder) as temporary:
        work = Path(temporary)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(work / "bytecode")
        compiling = subprocess.Popen(
            [sys.executable, "-c", IMPORTS], cwd=ROOT, stderr=subprocess.DEVNULL
        )
        name, settings = args.corpus.stem, [*SETTINGS, f"corpus.path={args.corpus.resolve()}"]
        cases = [
            (f"{name}, first command", settings, True),
            (f"{name}, new text", settings, True),
            (f"{name}, ids cached", settings, False),
        ]
        if args.gpus > 1:
            on_all = [*settings, "--gpus", str(args.gpus)]
            cases.append((f"{name}, ids cached, {args.gpus} GPUs", on_all, False))
        if args.large:
            large, name = work / "large.txt", f"{name} x {args.large}"
            reading.write_copies(args.corpus, args.large, True, large)
            settings = [*SETTINGS, *LARGE, f"corpus.path={large}"]
            cases += [
                (f"{name}, paged, new text", [*settings, *PAGED], True),
                (f"{name}, ids cached", settings, False),
            ]
        cases = [case for case in cases if args.cases in case[0]]
        compiling.wait()
        for case, settings, is_new in cases:
            if is_new:
                shutil.rmtree(work / "data", ignore_errors=True)
            found.add(case, measure([*settings, *args.set], work))
        for case, settings, _ in cases:
            if case.endswith(("new text", "ids cached")) and " x " not in case:
                rate = steady_rate([*settings, *args.set], work)
                share = found.figures(case)["words/s"] / rate
                found.add(case, {"steady words/s": rate, "over steady [times]": share})
        for name, command in (other.split("=", 1) for other in args.others):
            words = [word.format(corpus=args.corpus, folder=work) for word in command.split()]
            found.add(name, {"whole command [s]": timed(words, {})})


if __name__ == "__main__":
    main()
