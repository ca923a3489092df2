"""Documents: commands run, links and keys exist, tables agree with files."""

import gzip
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import evaluate
from tests.bench import tables
from w2v.config import config_keys, config_reference, load_config

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = [README, ROOT / "data" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
each_doc = pytest.mark.parametrize("doc", DOCS, ids=lambda path: path.relative_to(ROOT).as_posix())


def lines_of(*programs):
    """Return the indented command lines of all documents for the programs."""
    text = "\n".join(doc.read_text(encoding="utf-8") for doc in DOCS)
    return list(dict.fromkeys(re.findall(rf"^ {{4}}((?:{'|'.join(programs)}) .*)", text, re.M)))


def anchors(doc):
    """Return the anchors that GitHub makes from the headings of a document."""
    headings = re.findall(r"^#+ (.*)", doc.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_doc
def test_links_lead_somewhere(doc):
    for target in re.findall(r"\]\(([^)]+)\)", doc.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            name, _, anchor = target.partition("#")
            linked = doc.parent / name if name else doc
            assert linked.exists() and (not anchor or anchor in anchors(linked)), target


@each_doc
def test_keys_targets_modules_and_arguments_exist(doc, monkeypatch):
    if doc.name in ("CHANGELOG.md", "log.md"):
        pytest.skip("documents of the past may name what is gone")
    monkeypatch.chdir(ROOT)
    # Generated tables quote the commands of other commits.
    text = tables.MARKED.sub("", doc.read_text(encoding="utf-8"))
    keys = set(config_keys())
    sections = "|".join({key.split(".")[0] for key in keys})
    for key in re.findall(rf"`((?:{sections})\.[a-z_]+)[=`]", text):
        assert key in keys or key.endswith((".py", ".tsv", ".md", ".yaml", ".log")), key
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^ {4}|`)make ([a-z-]+)", text, re.M):
        assert re.search(rf"^{target}: .*##", makefile, re.M), target
    for module in re.findall(r"(?:^ {4}|`)python -m (w2v\.[a-z0-9_.]+)", text, re.M):
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), module
    for program, rest in re.findall(r"(?:^ {4}|`)python (\w+)\.py ([^`\n]*)", text, re.M):
        words = shlex.split(rest, comments=True)
        if program == "evaluate":
            evaluate.arguments(words)
        elif program == "train" and "..." not in words:
            settings = [word for word in words if "=" in word and word != "section.key=value"]
            load_config([word for word in words if word.startswith("configs/")], settings)


def test_generated_tables_agree_with_their_files():
    assert (ROOT / "docs" / "configuration.md").read_text() == config_reference(), "run make docs"
    for doc in tables.DOCUMENTS:
        text = doc.read_text(encoding="utf-8")
        assert tables.MARKED.search(text) and text == tables.render(text), f"{doc}: run make docs"


def test_a_table_shows_the_cases_that_match(tmp_path, monkeypatch):
    folder = tmp_path / "tests" / "bench" / "results"
    folder.mkdir(parents=True)
    header = '"gpu": "", "cpu": "2 cores", "date": "today", "commit": "abc", "command": "run"'
    figures = '{"a 1": {"x [s]": 2000, "x stdev [s]": 10}, "a 2": {"y": 1}, "b": {"x [s]": 9}}'
    (folder / "file.json").write_text(f'{{{header}, "figures": {figures}}}')
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    columns = [tables.Column("time", "x [s]", ".2f s", 1e-3)]
    made = tables.markdown(tables.Table(["file"], {r"a (\d)": r"case \1"}, columns))
    assert made.startswith("|  | commit | time |\n| --- | --- | --- |\n| case 1 |")
    assert "| case 1 | abc | 2.00 ± 0.01 s |\n| case 2 | abc |  |\n\n- 2 cores, today" in made


def test_the_example_of_word2vec_runs(tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if "Word2Vec(" in block]
    monkeypatch.chdir(tmp_path)
    exec(block + 'assert Word2Vec.load("model.w2v").wv.most_similar("mat")', {})


@pytest.mark.parametrize(
    "arguments", ["train.py --help-config", "train.py a.b=3", "evaluate.py -h"]
)
def test_help_and_errors_import_nothing_heavy(arguments):
    command = [sys.executable, "-X", "importtime", *arguments.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    imported = set(re.findall(r"^import time:.*\| +(\w+)$", done.stderr, re.M))
    assert "argparse" in imported
    assert not imported & {"torch", "gensim", "numpy", "cupy", "matplotlib"}


def write_texts(folder, lines):
    """Write small texts under the names that the documents use."""
    words = "paris london king man queen woman world the of and".split()
    words += [f"word{number}" for number in range(40)]
    rng = random.Random(1)
    text = "\n".join(" ".join(rng.choices(words, k=12)) for _ in range(lines))
    for file in ("my/text.txt", "data/text8", "wiki100.txt"):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text)
    (folder / "my" / "text.txt.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "my.yaml").write_text("corpus: {path: my/text.txt}\ntrain: {epochs: 1}\n")


def test_documented_commands_run(programs):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tensorboard")
    folder = programs.output.parent
    (folder / "configs").symlink_to(ROOT / "configs")
    write_texts(folder, 100)
    asked = set()
    for line in lines_of(r"python train\.py", r"python evaluate\.py"):
        _, script, *words = shlex.split(line, comments=True)
        if {"a.yaml", "transfer.engine=mapped"} & set(words):
            continue  # a placeholder, or needs a GPU
        arguments = []
        for word in words:
            if word.startswith("runs/2") and not (folder / word).exists():
                max(folder.glob("runs/*/")).rename(folder / word)
            matches = sorted(folder.glob(word)) if "*" in word else []
            arguments += [str(path) for path in matches] or [word]
        status, said = programs.run(*arguments, program=Path(script).stem)
        assert status == 0, f"{line}: {said}"
        asked.add(words[0])
    assert asked >= set("score nn analogies compare plot map export card".split())
    exported = {path.suffix for path in (folder / "exported").iterdir()}
    assert exported == {".txt", ".safetensors", ".tsv", ".pbtxt"}


@pytest.mark.skipif("W2V_README" not in os.environ, reason="minutes; make test-readme runs it")
def test_make_commands_run_line_by_line(tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(
        ROOT, folder, ignore=shutil.ignore_patterns(".*", "runs", "data", "__pycache__")
    )
    write_texts(folder, 17_000)  # enough to hold words out
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PY": sys.executable}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    for line in lines_of("make (?:train|compare|sweep|bench-cpu)"):
        subprocess.run(line, shell=True, cwd=folder, env=environment, check=True)
    assert list(folder.glob("runs/compare-*/table.md")) and list(folder.glob("runs/*/vectors.kv"))
