"""Score ordinary settings beside nothing set, and fit automatic rates.

    python tests/bench/settings.py cases wiki:1 books:1 > cases.jsonl
    python tests/bench/tuning.py cases.jsonl --texts wiki=wiki100.txt books=books45.txt --to FILE
    python tests/bench/settings.py table FILE [FILE ...]
    python tests/bench/settings.py fit

`cases` writes a line for each of SETTINGS and text, for tuning.py: with factors of the automatic
rate by --rates, for several --seeds, and for gensim with --gensim. `table` prints mean scores of
each setting, for each file and for gensim's better alpha. `collect` writes runs to a
file of results/, from which `fit` prints the rates with the best scores beside those of auto.py.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import json
import math
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
import numpy as np

from w2v.word2vec import auto

RESULTS = Path(__file__).parent / "results"
TREE = {"hs": 1, "negative": 0}
# What a user sets, as gensim's arguments.
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    **{f"min_count {count}": {"min_count": count} for count in (1, 20, 50, 100)},
    **{f"window {words}": {"window": words} for words in (2, 10)},
    **{f"{size} dimensions": {"vector_size": size} for size in (50, 300)},
    "1 epoch": {"epochs": 1},
    "20 epochs": {"epochs": 20},
    "CBOW": {"sg": 0},
    "tree": TREE,
    "CBOW, tree": {"sg": 0, **TREE},
    "5000 words": {"max_final_vocab": 5000},
    "subwords": {"subwords": "true"},  # of this program alone
    "SGD": {},
}
# Of settings; all others are the model's.
SECTIONS = {"min_count": "vocab", "max_final_vocab": "vocab", "epochs": "train"}
SETS = ("google", "msr-analogies", "wordsim353", "simlex999", "mturk287")
COLUMNS = ("google", "msr", "wordsim353", "simlex999", "mturk287")  # in files of results/
OTHERS = ("czech-analogies", "near", "purity")  # of Czech, baskets, logs and graphs
SHOWN = ("mean", "simlex999")  # in `table`; the mean is of SETS
# What the fit compares: settings, and pairs of a center and dimensions, times those of "nothing".
RATIOS = {
    "1 epoch": (0.2, 1),
    "20 epochs": (4, 1),
    "window 2": (0.5, 1),
    "window 10": (11 / 6, 1),
    "50 dimensions": (1, 50 / 128),
    "300 dimensions": (1, 300 / 128),
    "CBOW": (2 / 6, 1),
    "tree": (10.5 / 6, 1),  # bits of a word's code in the texts of the fit
    "CBOW, tree": (2 * 10.5 / 36, 1),
}


def ours(name: str) -> list[str]:
    """Return one of SETTINGS as settings of this program."""
    if name == "SGD":
        return ["optimizer.name=SGD"]
    found = []
    for key, value in SETTINGS[name].items():
        if key == "sg":
            key, value = "architecture", "cbow"
        value = "true" if key == "hs" else value
        found.append(f"{SECTIONS.get(key, 'model')}.{key}={value}")
    return found


def cases(args: argparse.Namespace) -> None:
    """Print cases for tuning.py."""
    for name in args.only or SETTINGS:
        for text in args.texts:
            for seed in args.seeds:
                case = {"text": text, "name": name}
                if args.gensim and name != "subwords":
                    for alpha in (0.025, 0.05):
                        given = SETTINGS[name] | {"alpha": alpha, "seed": seed}
                        print(json.dumps(case | {"gensim": given}))
                for rate in [] if args.gensim else args.rates:
                    seeded = [f"train.seed={seed}", "model.sample=auto"]
                    given = [*seeded, *ours(name), *args.set]
                    print(json.dumps(case | {"set": given, "lr": rate}))


def read(files: list[Path]) -> list[list[dict[str, Any]]]:
    """Return the runs of each file that have ended well."""
    lines = [file.read_text().splitlines() for file in files]
    runs = [[json.loads(line) for line in each] for each in lines]
    return [[run for run in each if "scores" in run] for each in runs]


def table(args: argparse.Namespace) -> None:
    """Print scores by setting, of each file and of gensim's better alpha.

    They are means over the texts, and over seeds.
    """
    columns: list[dict[Any, list[dict[str, float]]]] = [defaultdict(list) for _ in args.files]
    gensims: dict[Any, list[dict[str, float]]] = defaultdict(list)
    for column, runs in zip(columns, read(args.files), strict=True):
        for run in runs:
            scores = run["scores"] | {"mean": np.mean([run["scores"].get(key, 0) for key in SETS])}
            if "gensim" in run:
                gensims[run["name"], run["gensim"]["alpha"]].append(scores)
            elif run.get("lr", 1) == 1:
                column[run["name"]].append(scores)
    columns = [column for column in columns if column]
    for name in SETTINGS:
        shown = []
        for key in SHOWN:
            found = [[scores[key] for scores in column[name]] for column in columns]
            means = [float(np.mean(each)) if each else math.nan for each in found]
            better = [gensims.get((name, alpha), []) for alpha in (0.025, 0.05)]
            alphas = [np.mean([scores[key] for scores in each]) for each in better if each]
            means.append(float(max(alphas, default=math.nan)))
            shown.append(" / ".join("-" if mean != mean else f"{100 * mean:.1f}" for mean in means))
        print("| " + " | ".join([name, *shown]) + " |")


def collect(args: argparse.Namespace) -> None:
    """Write runs of tuning.py to a file of results/."""
    with gzip.open(args.to, "wt", newline="") as file:
        out = csv.writer(file)
        out.writerow(["text", "settings", "lr", "steps", "seconds", *COLUMNS, *OTHERS])
        runs = itertools.chain.from_iterable(read(args.files))
        for run in sorted(runs, key=lambda run: (run["name"], run["text"])):
            name, rate = run["name"], run.get("lr used", "")
            if "gensim" in run:
                name, rate = f"{name}, gensim", run["gensim"]["alpha"]
            scores = [run["scores"].get(key, "") for key in (*SETS, *OTHERS)]
            steps = run.get("steps", "")
            out.writerow([run["text"], name, rate, steps, run["seconds"], *scores])


def best_rate(scores: dict[float, list[float]]) -> float:
    """Return the best rate, by a parabola through three mean scores.

    It is between these three, so at most the highest rate that was tried.
    """
    rates = sorted(scores)
    means = [np.mean(scores[rate]) for rate in rates]
    first = min(max(int(np.argmax(means)) - 1, 0), len(rates) - 3)
    near = slice(first, first + 3)
    square, slope, _ = np.polyfit(np.log(rates[near]), means[near], 2)
    if square >= 0:
        return rates[int(np.argmax(means))]
    return float(np.clip(np.exp(-slope / 2 / square), rates[near][0], rates[near][-1]))


def named(row: dict[str, str]) -> tuple[str, str, float] | None:
    """Return optimizer, setting and rate of a run in results/, or None."""
    settings = row["settings"]
    if row.get("lr") and settings in RATIOS | {"nothing": 1}:
        return "Adam", settings, float(row["lr"])
    if found := re.fullmatch(
        r"(CBOW hs|skip-gram hs|CBOW) Adam rate x ([\d.]+) seed=\d+", settings
    ):
        name = {"CBOW hs": "CBOW, tree", "skip-gram hs": "tree", "CBOW": "CBOW"}[found[1]]
        return "Adam of then", name, float(found[2])
    adamw = r"name=AdamW lr=([\d.]+) args=\{betas:\[0.0,0.99\],eps:0.3,weight_decay:0.1\} "
    adamw += r"batch_size=\d+ step=row ?(?:(epochs|window|vector_size)=(\d+)|seed=\d+)?"
    if (found := re.fullmatch(adamw, settings)) and int(row["steps"]) < 4_000:
        words = {"epochs": "{} epochs", "window": "window {}", "vector_size": "{} dimensions"}
        name = words.get(found[2], "nothing").format(found[3]).replace("1 epochs", "1 epoch")
        return "AdamW", name, float(found[1])
    return None


def fit(args: argparse.Namespace) -> None:
    """Print best rates of settings beside the rule of auto.py."""
    runs: dict[Any, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for file in sorted(RESULTS.glob("*.csv.gz")):
        with gzip.open(file, "rt") as lines:
            for row in csv.DictReader(lines):
                # Places inside of texts are kept for the check.
                if (key := named(row)) and "@" not in row["text"]:
                    scores = [float(row[name]) for name in COLUMNS if row.get(name)]
                    if scores:  # of a text, not a graph
                        runs[key[0], key[1], row["text"]][key[2]].append(float(np.mean(scores)))
    best = {key: best_rate(rates) for key, rates in runs.items() if len(rates) > 2}
    print("setting         by the rule  best rates, times those with nothing set")
    for name, (pairs, size) in RATIOS.items():
        found = []
        for (optimizer, setting, text), rate in sorted(best.items()):
            # With factors of a rate that skip-gram had then, its own factor is 1.
            nothing = best.get((optimizer, "nothing", text), 1.0 if "then" in optimizer else None)
            if setting == name and nothing:
                found.append(f"{rate / nothing:.2f} ({text})")
        rule = min((pairs * size**0.5) ** -auto.FALL, auto.HIGHEST)
        print(f"{name:15} {rule:11.2f}  {', '.join(found)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("cases", help="print cases for tuning.py")
    command.add_argument("texts", nargs="+", help="such as wiki:1, its first million words")
    command.add_argument("--only", nargs="+", choices=SETTINGS, default=[])
    command.add_argument("--rates", nargs="+", type=float, default=[1.0])
    command.add_argument("--seeds", nargs="+", type=int, default=[1])
    command.add_argument("--set", nargs="+", default=[], help="further settings, section.key=value")
    command.add_argument("--gensim", action="store_true", help="cases for gensim, at two alphas")
    command.set_defaults(run=cases)
    command = commands.add_parser("table", help="print mean scores")
    command.add_argument("files", nargs="+", type=Path)
    command.set_defaults(run=table)
    command = commands.add_parser("collect", help="write a file of results/")
    command.add_argument("files", nargs="+", type=Path)
    command.add_argument("--to", type=Path, required=True)
    command.set_defaults(run=collect)
    command = commands.add_parser("fit", help="print the rates with the best scores")
    command.set_defaults(run=fit)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
