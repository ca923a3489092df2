"""What the documents say is so: tables are current, commands and keys exist, links lead somewhere, Python examples run."""

import glob
import gzip
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import evaluate
from w2v.config import config_keys, config_reference, load_config

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", ROOT / "data" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
each_doc = pytest.mark.parametrize("doc", DOCS, ids=lambda path: path.relative_to(ROOT).as_posix())


def commands(doc, program):
    """The arguments of each command line of that program in a document, comments and output redirection left out."""
    text = doc.read_text(encoding="utf-8")
    found = re.findall(rf"(?:^ {{4}}|`)python {re.escape(program)} ([^`\n]*)", text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in found if "..." not in line]


def test_commands_are_found_in_the_readme():
    assert ["analogies", "latest", "king", "-", "man", "+", "woman"] in commands(
        DOCS[0], "evaluate.py"
    )
    assert ["my.yaml", "--dry-run"] in commands(DOCS[0], "train.py")


def test_the_table_of_settings_is_current():
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == config_reference(), (
        "run make docs"
    )


@each_doc
def test_links_lead_somewhere(doc):
    for target in re.findall(r"\]\(([^)#]+)\)", doc.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (doc.parent / target).exists(), target


@each_doc
def test_commands_of_evaluate_are_understood(doc):
    for line in commands(doc, "evaluate.py"):
        evaluate.arguments(line)


@each_doc
def test_commands_of_train_name_files_and_keys_that_exist(doc, monkeypatch):
    monkeypatch.chdir(ROOT)
    for line in commands(doc, "train.py"):
        named = [
            word
            for word in line
            if not word.startswith(("-", "runs/"))
            and word not in ("latest", "RUN", "section.key=value")
        ]
        files = [
            word
            for word in named
            if "=" not in word and word not in ("a.yaml", "b.yaml", "my.yaml", "config.yaml")
        ]
        load_config(files, [word for word in named if "=" in word])


@each_doc
def test_keys_and_make_targets_exist(doc):
    text = doc.read_text(encoding="utf-8")
    sections = "|".join({name.split(".")[0] for name in config_keys()})
    for key in re.findall(rf"`((?:{sections})\.[a-z_]+)[=`]", text):
        assert key in set(config_keys()) or key.endswith((".py", ".tsv", ".md", ".yaml", ".log")), (
            key
        )
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^ {4}|`)make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}: .*##", makefile, re.MULTILINE), target


def test_the_readmes_example_of_the_class_runs(tmp_path):
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    (block,) = [block for block in blocks if "Word2Vec(" in block]
    again = 'assert Word2Vec.load("model.w2v").wv.most_similar("bird")'
    environment = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", block + again], cwd=tmp_path, check=True, env=environment)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.py", "--help"],
        ["train.py", "--help-config"],
        ["train.py", "model.windo=3"],
        ["evaluate.py", "--help"],
        ["evaluate.py", "map", "--help"],
    ],
    ids=" ".join,
)
def test_help_and_errors_answer_at_once(arguments):
    """Nothing heavy is imported, which alone takes seconds."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    imported = {
        line.rpartition("|")[2].strip()
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert (
        "argparse" in imported and not {"torch", "gensim", "numpy", "cupy", "matplotlib"} & imported
    )


def lines_to_run(*programs):
    """The command lines of these programs in all documents, in order, that need neither a GPU nor another machine."""
    text = "\n".join(doc.read_text(encoding="utf-8") for doc in DOCS)
    return re.findall(rf"^ {{4}}((?:{'|'.join(programs)}) .*)", text, re.MULTILINE)


def test_commands_to_run_are_found():
    """In README and docs/failure.md."""
    assert lines_to_run("make")[0].startswith("make train     # installs into .venv")
    assert "python train.py --resume runs/2026-11-21-my-run train.epochs=10" in lines_to_run(
        "make", "python"
    )


def write_texts(folder, lines):
    """Small texts of 12 words a line under the names that README gives them."""
    rng = random.Random(1)
    words = "paris london king man queen woman world the of and".split() + [
        f"word{number}" for number in range(40)
    ]
    text = "\n".join(" ".join(rng.choices(words, k=12)) for _ in range(lines))
    (folder / "my").mkdir()
    (folder / "data").mkdir(exist_ok=True)
    for file in ("my/text.txt", "data/text8"):
        (folder / file).write_text(text)
    (folder / "my" / "text.txt.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "my.yaml").write_text("corpus: {path: my/text.txt}\ntrain: {epochs: 1}\n")


def test_the_printed_commands_do_what_they_say(programs):
    """All but those that take minutes, in a folder with configs and texts."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("tensorboard")
    folder = programs.output.parent
    (folder / "configs").symlink_to(ROOT / "configs")
    write_texts(folder, 300)
    ran, plain = [], {"PATH": os.environ["PATH"]}
    for printed in lines_to_run("python", "make"):
        line = shlex.split(printed, comments=True)
        if line[0] == "make":
            if line[1] != "train" or not line[2:] or "GPUS=4" in line:
                continue
            would = subprocess.run(
                [*line, "-n", "PY=python"],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                env=plain,
            ).stdout
            line = shlex.split(would.replace("\\\n", ""))
        script, *arguments = line[1:]
        for word in arguments:
            if word.startswith("runs/2") and not (folder / word).exists():
                max(folder.glob("runs/*/")).rename(folder / word)
        arguments = [
            found
            for word in arguments
            for found in sorted(glob.glob(word, root_dir=folder)) or [word]
        ]
        status, said = programs.run(*arguments, program=Path(script).stem)
        ran.append((script, arguments[0]))
        assert status == 0, f"{line}: {said}"
    assert len(ran) > 18 and {first for script, first in ran if script == "evaluate.py"} >= {
        "score",
        "nn",
        "plot",
        "map",
        "export",
        "card",
    }
    (exported,) = [path for path in folder.iterdir() if path.name == "exported"]
    assert {path.suffix for path in exported.iterdir()} == {
        ".txt",
        ".safetensors",
        ".tsv",
        ".pbtxt",
    }
    assert (
        (folder / "runs").is_dir()
        and list(folder.glob("runs/*/map.png"))
        and list(folder.glob("runs/*/curves.png"))
    )


@pytest.mark.skipif(
    "W2V_README" not in os.environ, reason="takes minutes; make test-readme runs it"
)
def test_make_does_what_the_readme_says_line_by_line(tmp_path):
    """In a copy of the repository, with small texts; each line as it is printed."""
    folder = tmp_path / "copy"
    left_out = ".*", "runs", "data", "__pycache__"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*left_out))
    write_texts(folder, 17_000)  # enough to hold words out
    plain = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PY": sys.executable,
        "CUDA_VISIBLE_DEVICES": "",
    }

    def run(line):
        before = set(folder.glob("runs/*"))
        env = plain if "bench" in line else plain | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            line,
            shell=True,
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        print(f"{time.monotonic():.0f} s $ {line}\n{done.stdout}", flush=True)
        assert done.returncode == 0, f"{line}: {done.stdout}"
        return done.stdout, sorted(set(folder.glob("runs/*")) - before)

    readme = DOCS[0].read_text(encoding="utf-8")
    lines = [
        line for line in lines_to_run("make") if line.split()[1] in ("train", "compare", "sweep")
    ]
    assert len(lines) > 6 and any("GPUS=4" in line for line in lines)
    for line in [*lines, *re.findall(r"`(make bench-cpu CORPUS=wiki100.txt)`", readme)]:
        (folder / "wiki100.txt").write_text((folder / "data" / "text8").read_text())
        target, swept = (
            line.split()[1],
            (folder / "configs/optimizers/adamax.sweep.csv").read_text(),
        )
        said, left = run(line)
        if target == "train":
            promised = "README.md vectors.kv vectors.bin scores.json metrics.jsonl checkpoints vocab.tsv config.yaml env.txt train.log"
            assert set(promised.split()) <= {path.name for path in left[0].iterdir()} and (
                "ranks     4," in said
            ) == ("GPUS=4" in line)
        if "CORPUS" not in line:
            assert shapes(
                readme.split("## What a first run prints")[1].split("\n\nIn a terminal")[0]
            ) <= shapes(said)
        if target == "compare":
            (compared,) = folder.glob("runs/compare-*")
            tables = {"table.txt", "table.md", "table.csv", "curves.png"}
            assert (
                tables <= {path.name for path in compared.iterdir()}
                and (compared / "table.txt").read_text() in said
            )
            assert (
                len(list(compared.glob("*/scores.json")))
                == len(list((ROOT / "configs/optimizers").glob("*.yaml"))) * 3
                or left == []
            )
        if target == "sweep":
            assert (
                "best by the sum of its scores" in said
                and (folder / "configs/optimizers/adamax.sweep.csv").read_text() != swept
            )
        if target == "bench-cpu":
            assert (
                "gensim" in said
                and (folder / "tests/bench/results.csv").read_text()
                != (ROOT / "tests/bench/results.csv").read_text()
            )


def shapes(text):
    """The lines of an output without their numbers, but for those that come in fast runs alone or in slow ones."""
    lines = (re.sub(r"[\d.,]+", "#", " ".join(line.split())) for line in text.splitlines())
    return {
        line
        for line in lines
        if line and line != "#" and not line.startswith(("time", "#% of the words"))
    }
