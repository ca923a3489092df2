"""What the documents say is so: tables are current, commands and keys exist, links lead somewhere, Python examples run."""

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
