"""Write the model card of a finished run from the files in its folder."""

from __future__ import annotations

from pathlib import Path

from w2v.system.files import atomic_write, printable, refused
from w2v.text.vocab import HEADER
from w2v.vectors.datasets import ASKED
from w2v.vectors.runs import Run, RunError, read, rows, table

# Characters that Markdown, its tables and HTML would read as marks.
MARKUP = {ord(mark): f"&#{ord(mark)};" for mark in "\n&<>|`*[]\\"}


def write(folder: Path) -> Path:
    """Write README.md, the model card, into the folder of a finished run."""
    run = read(folder)
    with refused(RunError, f"{folder} is not the folder of a finished run", "train it to the end"):
        text = describe(run)
    atomic_write(folder / "README.md", text)
    return folder / "README.md"


def describe(run: Run) -> str:
    """Return the model card as Markdown."""
    settings = run.settings
    with (run.folder / "vocab.tsv").open(encoding="utf-8", newline="\n") as file:
        header = HEADER.fullmatch(file.readline().rstrip("\n"))
        words, raw_words, raw_types = map(int, header.groups())
        example = file.readline().rpartition("\t")[0]
    environment = dict.fromkeys(("machine", "w2v", "commit", "python", "torch"), "unknown")
    if (run.folder / "env.txt").exists():
        lines = (run.folder / "env.txt").read_text(encoding="utf-8").splitlines()
        environment |= dict(line.split(" ", 1) for line in lines if " " in line)

    # Settings, scores and costs, as `w2v compare` has them, a row for each.
    figures = "\n".join(f"| {name} | {cell} |" for name, [cell] in table(rows([run])).items())
    path = printable(settings["corpus.path"]).translate(MARKUP)
    # A run of an older version has no architecture.
    model = "CBOW" if settings.get("model.architecture") == "cbow" else "skip-gram"
    by = ["negative sampling"] if settings["model.negative"] else []
    by += ["hierarchical softmax"] if settings.get("model.hs") else []
    return f"""# Word vectors of {path}

{words:,} words of {settings["model.vector_size"]} dimensions, trained by {model} with \
{", ".join(by)} and {settings["optimizer.name"]}.

```python
from gensim.models import KeyedVectors

vectors = KeyedVectors.load("vectors.kv")
vectors.most_similar({example!r})
```

| | |
|---|---|
| text | {path}: {raw_words:,} words, {raw_types:,} distinct |
| vocabulary | {words:,} words; min_count {settings["vocab.min_count"]} |
| training | {run.scores["words"]:,} words in {run.scores["seconds"]:.1f} s |
| hardware | {environment["machine"].replace(" |", ",")} |
| software | w2v {environment["w2v"]}, commit {environment["commit"]}, \
Python {environment["python"]}, torch {environment["torch"]} |
{figures}

Analogies are Google's, answered among the {ASKED:,} most frequent words, by gensim's protocol;
those of unknown words are not counted. Word pairs have Spearman's correlation with human
judgement. The loss is that of a positive pair.

## Settings

`w2v train config.yaml` trains it again.

```yaml
{(run.folder / "config.yaml").read_text(encoding="utf-8").rstrip()}
```
"""
