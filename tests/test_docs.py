"""What the documents say is so: tables are current, commands and keys exist, links lead somewhere, Python examples run."""

import glob
import gzip
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import evaluate
from w2v import settings

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", ROOT / "data" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
each_doc = pytest.mark.parametrize("doc", DOCS, ids=lambda path: path.relative_to(ROOT).as_posix())


def commands(doc, program):
    """The arguments of each command line of that program in a document, comments and output redirection left out."""
    text = doc.read_text(encoding="utf-8")
    found = re.findall(rf"(?:^ {{4}}|`)python {re.escape(program)} ([^`\n]*)", text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in found if "..." not in line]


def test_commands_are_found_in_the_readme():
    assert ["analogies", "latest", "king", "-", "man", "+", "woman"] in commands(DOCS[0], "evaluate.py")
    assert ["my.yaml", "--dry-run"] in commands(DOCS[0], "train.py")


def test_the_table_of_settings_is_current():
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == settings.reference(), "run make docs"


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
        named = [word for word in line if not word.startswith(("-", "runs/")) and word not in ("latest", "RUN", "section.key=value")]
        files = [word for word in named if "=" not in word and word not in ("a.yaml", "b.yaml", "my.yaml", "config.yaml")]
        settings.load(files, [word for word in named if "=" in word])


@each_doc
def test_keys_and_make_targets_exist(doc):
    text = doc.read_text(encoding="utf-8")
    sections = "|".join({name.split(".")[0] for name in settings.names()})
    for key in re.findall(rf"`((?:{sections})\.[a-z_]+)[=`]", text):
        assert key in set(settings.names()) or key.endswith((".py", ".tsv", ".md", ".yaml", ".log")), key
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^ {4}|`)make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}: .*##", makefile, re.MULTILINE), target


def test_the_readmes_example_of_the_class_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if "Word2Vec(" in block]
    again = 'assert Word2Vec.load("model.w2v").wv.most_similar("bird")'
    environment = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", block + again], cwd=tmp_path, check=True, env=environment)


@pytest.mark.parametrize("arguments", [["train.py", "--help"], ["train.py", "--help-config"], ["train.py", "model.windo=3"],
                                       ["evaluate.py", "--help"], ["evaluate.py", "map", "--help"]], ids=" ".join)  # fmt: skip
def test_help_and_errors_answer_at_once(arguments):
    """Nothing heavy is imported, which alone takes seconds."""
    done = subprocess.run([sys.executable, "-X", "importtime", *arguments], cwd=ROOT, capture_output=True, text=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "argparse" in imported and not {"torch", "gensim", "numpy", "cupy", "matplotlib"} & imported


def lines_to_run():
    """README's command lines, in order, that one can run without a GPU or another machine, and that do not take minutes."""
    block = re.findall(r"^ {4}((?:python|make) .*)", DOCS[0].read_text(encoding="utf-8"), re.MULTILINE)
    lines = [shlex.split(line, comments=True) for line in block]
    return [line for line in lines if (line[:2] == ["make", "train"] and line[2:] and "GPUS=4" not in line) or line[0] == "python"]


def test_the_readmes_commands_do_what_they_say(programs):
    """In a folder with configs and small texts under the names that README gives them."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("tensorboard")
    folder, rng = programs.output.parent, random.Random(1)
    words = "paris london king man queen woman world the of and".split() + [f"word{number}" for number in range(40)]
    text = "\n".join(" ".join(rng.choices(words, k=12)) for _ in range(300))
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "my").mkdir()
    (folder / "data").mkdir()
    for file in ("my/text.txt", "data/text8"):
        (folder / file).write_text(text)
    (folder / "my" / "text.txt.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "my.yaml").write_text("corpus: {path: my/text.txt}\ntrain: {epochs: 1}\n")
    ran, plain = [], {"PATH": os.environ["PATH"]}
    for line in lines_to_run():
        if line[0] == "make":
            would = subprocess.run([*line, "-n", "PY=python"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, env=plain).stdout
            line = shlex.split(would.replace("\\\n", ""))
        script, *arguments = line[1:]
        arguments = [found for word in arguments for found in sorted(glob.glob(word, root_dir=folder)) or [word]]
        status, said = programs.run(*arguments, program=Path(script).stem)
        ran.append((script, arguments[0]))
        assert status == 0, f"{line}: {said}"
    assert len(ran) > 14 and {first for script, first in ran if script == "evaluate.py"} >= {"score", "nn", "plot", "map", "export", "card"}
    (exported,) = [path for path in folder.iterdir() if path.name == "exported"]
    assert {path.suffix for path in exported.iterdir()} == {".txt", ".safetensors", ".tsv", ".pbtxt"}
    assert (folder / "runs").is_dir() and list(folder.glob("runs/*/map.png")) and list(folder.glob("runs/*/curves.png"))
