"""Documents: commands and blocks run, links lead somewhere."""

import gzip
import importlib.util
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import w2v
from tests.bench import plot, tables
from tests.support.each_case import each_case
from w2v.api import cli
from w2v.config import TYPES, load_config, shipped_config

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = [README, ROOT / "data" / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
each_doc = each_case("doc", DOCS)
slow = pytest.mark.skipif("W2V_README" not in os.environ, reason="make test-readme runs it")


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
    text = doc.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text) + re.findall(r' src(?:set)?="(.+?)"', text):
        if not target.startswith("https://"):
            name, _, anchor = target.partition("#")
            linked = doc.parent / name if name else doc
            assert linked.exists() and (not anchor or anchor in anchors(linked)), target


@each_doc
def test_keys_targets_modules_and_arguments_exist(doc, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = doc.read_text(encoding="utf-8")
    keys = set(TYPES)
    sections = "|".join({key.split(".")[0] for key in keys})
    for key in re.findall(rf"`((?:{sections})\.[a-z_]+)[=`]", text):
        assert key in keys or key.endswith((".py", ".tsv", ".md", ".yaml", ".log")), key
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^ {4}|`)make ([a-z-]+)", text, re.M):
        assert re.search(rf"^{target}: .*##", makefile, re.M), target
    for module in re.findall(r" -m (w2v[a-z0-9_.]*)", text):
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), module
    for command in re.findall(r"(?:^ {4}|`|--no-python )w2v ([a-z]+ .*?)(?:`|$)", text, re.M):
        name, *words = shlex.split(command, comments=True)
        options = cli.parse(name, words)
        if name == "train":
            settings = [word for word in options.settings if "=" in word]
            load_config(filter(shipped_config, options.settings), settings)


def test_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site; return its folder."""
    for name in ("material", "mkdocstrings", "mkdocs_jupyter", "htmlproofer"):
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", folder]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


@slow
def test_site_builds_without_warnings(site):
    assert all((site / page).exists() for page in ("tour.html", "examples/clicks.html"))
    documented = (site / "api.html").read_text(encoding="utf-8")
    names = set(w2v.__all__) - {"__version__", "load"}  # which is Vectors
    assert all(f'id="w2v.{name}"' in documented for name in names)
    for page in site.rglob("*.html"):
        loaded = re.findall('<(?:script|img)[^>]* src="(http[^"]*)', page.read_text("utf-8"))
        assert not loaded, page


@slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_search_of_the_site_works_from_files(site, tmp_path):
    command = ["chromium", "--headless=new", "--no-sandbox", "--dump-dom"]
    command += ["--virtual-time-budget=5000", f"--user-data-dir={tmp_path}"]
    command += [(site / "dev" / "log.html").as_uri() + "?q=optimizer"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert re.search(r"\d+ matching documents", done.stdout)


@slow
def test_dead_links_of_the_site_are_found(tmp_path):
    pytest.importorskip("htmlproofer")
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    checker = re.search("- htmlproofer: .*", site)[0]
    (tmp_path / "mkdocs.yml").write_text(f"site_name: x\nstrict: true\nplugins:\n  {checker}\n")
    (tmp_path / "docs").mkdir()
    links = "<p id=up><a href='https://x.y/z'>1</a><a href='#up'>2</a>"
    command = [sys.executable, "-m", "mkdocs", "build"]
    for dead, status in (("", 0), ("<a href='#down'>3</a>", 1), ("<a href='a.html'>3</a>", 1)):
        (tmp_path / "docs" / "index.md").write_text(links + dead)
        assert subprocess.run(command, cwd=tmp_path).returncode == status


def test_generated_tables_agree_with_their_files():
    for doc in tables.DOCUMENTS:
        text = doc.read_text(encoding="utf-8")
        assert tables.MARKED.search(text) and text == tables.render(text), f"{doc}: run make docs"


@each_case("theme", ["light", "dark"])
def test_picture_of_readme_has_the_figures_of_the_tables(theme):
    picture = (ROOT / "docs" / f"summary-{theme}.svg").read_text(encoding="utf-8")
    shown = re.findall(r"<text[^>]*>([^<]+)</text>", picture)
    for name in ("summary", "cpu"):
        bars = plot.summary_bars(tables.TABLES[name])
        assert bars
        for label, words_per_s, analogies in bars:
            assert {label, f"{words_per_s:.3g}", f"{analogies:.1f} %"} <= set(map(str.strip, shown))


def test_a_table_shows_the_cases_that_match(tmp_path, monkeypatch):
    figures = {"a 1": {"x [s]": 2000, "x stdev [s]": 10}, "a 2": {"y": 1}, "b": {"x [s]": 9}}
    (tmp_path / "file.json").write_text(json.dumps({"figures": figures}))
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    columns = [tables.Column("time", "x [s]", ".2f s", 1e-3)]
    made = tables.markdown(tables.Table(["file"], {r"a (\d)": r"case \1"}, columns))
    assert made == "|  | time |\n| --- | --- |\n| case 1 | 2.00 ± 0.01 s |\n| case 2 |  |\n"


@each_case("arguments", ["train.py --help-config", "train.py a.b=3", "evaluate.py -h"])
def test_help_and_errors_import_nothing_heavy(arguments):
    command = [sys.executable, "-X", "importtime", *arguments.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    imported = set(re.findall(r"^import time:.*\| +(\w+)$", done.stderr, re.M))
    assert "argparse" in imported
    assert ("vector_size: 100" in done.stdout) == ("--help-config" in arguments)
    assert not imported & {"torch", "gensim", "numpy", "cupy", "sklearn"}


def write_texts(folder, lines):
    """Write small texts under the names that the documents use."""
    words = "paris london king man queen woman world the of and old new hard difficult".split()
    words += [f"word{number}" for number in range(40)]
    rng = random.Random(1)
    text = "\n".join(" ".join(rng.choices(words, k=12)) for _ in range(lines))
    for file in ("my/text.txt", "data/text8", "wiki100.txt"):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text)
    (folder / "my" / "text.txt.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "msr.txt").write_text("king man queen woman\n")
    (folder / "mturk287.txt").write_text("king\tqueen\t9\nking\tparis\t1\n")
    (folder / "men.csv.gz").write_bytes(gzip.compress(b"man,woman,50\nman,world,1\n"))
    rows = "".join(f"{word} {n} 0.5 {n * n}\n" for n, word in enumerate(words))
    (folder / "glove.840B.300d.txt").write_text(rows)
    packed = gzip.compress(f"{len(words)} 3\n{rows}".encode())
    for file in ("cc.de.300.vec.gz", "GoogleNews-vectors-negative300.bin.gz"):
        (folder / file).write_bytes(packed)
    (folder / "split.py").write_text("def words(line): return line.split()\n")
    (folder / "my.yaml").write_text("corpus: {path: my/text.txt}\ntrain: {epochs: 1}\n")


def test_documented_commands_run(programs, monkeypatch):
    pytest.importorskip("tensorboard")
    pytest.importorskip("plotly")
    folder = programs.output.parent
    (folder / "configs").symlink_to(ROOT / "configs")
    write_texts(folder, 50)
    asked = set()
    commands = dict.fromkeys(
        tuple(shlex.split(line, comments=True)[1:]) for line in lines_of("w2v")
    )
    for name, *words in commands:
        if {"transfer.engine=mapped", "sample", "--seeds", "train.held_out_words=20000"} & set(
            words
        ):
            continue  # needs a GPU, half a minute or a longer text
        arguments = []
        for word in words:
            if word.startswith("runs/2") and not (folder / word).exists():
                max(folder.glob("runs/*/")).rename(folder / word)
            matches = sorted(folder.glob(word)) if "*" in word else []
            word = "2" if word == "4" else word  # ranks
            arguments += [str(path) for path in matches[:3]] or [word]
        if {"--gpus", "train.precision=bf16"} & set(words):
            arguments.append("train.batch_size=256")  # steps by plain torch take long
        status, said = programs.run(name, *arguments, program="evaluate")
        assert status == 0, f"w2v {name} {words}: {said}"
        asked.add(name)
    assert asked >= set("train score nn analogies compare map report export runs clean".split())
    exported = {path.suffix for path in (folder / "exported").iterdir()}
    assert exported == {".txt", ".bin"}
    # Several runs may begin in one second, which names them.
    configs = sorted(folder.glob("runs/2*/config.yaml"), key=lambda path: path.stat().st_mtime_ns)
    run_blocks(folder, configs[-1].parent, monkeypatch)


def run_blocks(folder, run, monkeypatch):
    """Execute the Python blocks of the documents, beside a run."""
    sketches = {"architecture.md", "api.md", "library.md"}  # library.md has tests of its own
    for doc in sorted(DOCS, key=lambda doc: doc.name == "items.md"):  # whose run has no words
        blocks = re.findall(r"```python\n(.*?)```", doc.read_text(encoding="utf-8"), re.DOTALL)
        names = {"sentences": [["the", "world", "sat"]] * 200}  # blocks follow each other
        for block in [] if doc.name in sketches else blocks:
            if any(
                f" {name}" in block and not importlib.util.find_spec(name)
                for name in ("jieba", "fugashi")
            ):
                continue
            place = max(run.glob("checkpoints/step-*")) if "manifest" in block else folder
            block = block.replace("<run>", run.name).replace("12_000, 60, 33", "2_000, 60, 33")
            monkeypatch.chdir(place)
            exec(compile(block, doc.name, "exec"), names)
    assert (folder / "model.w2v").exists() and list(folder.glob("runs/*/report.html"))


@slow
def test_tour_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    names = {}
    for cell in cells:
        assert not cell.get("outputs")
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            assert not re.search(r"(from|import) w2v\.", source), "not the public interface"
            exec(compile(source, "tour.ipynb", "exec"), names)
    assert len(names["run"]) > 5_000 and names["scores"].analogies.total.accuracy > 0.005
    assert len(names["compared"].rows) == 2
    written = {path.name for path in tmp_path.iterdir()}
    assert written >= {"map.svg", "exported", "compared", "runs"}


@slow
def test_long_commands_run_line_by_line(tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(
        ROOT, folder, ignore=shutil.ignore_patterns(".*", "runs", "data", "__pycache__")
    )
    write_texts(folder, 17_000)  # enough to hold words out
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PY": sys.executable}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    long = ("w2v compare .*txt --seeds", "w2v train text8(?= train.held_out)")
    for line in lines_of("make (?:train|compare|sweep|bench-cpu)", *long):
        line = line.replace("w2v", f"{sys.executable} evaluate.py")
        subprocess.run(line, shell=True, cwd=folder, env=environment, check=True)
    assert list(folder.glob("runs/compare-*/table.md")) and list(folder.glob("runs/*/vectors.kv"))
