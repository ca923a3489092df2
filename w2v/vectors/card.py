"""Write the model card of a finished run from the files in its folder."""

from __future__ import annotations

from pathlib import Path

from w2v.system.files import atomic_write, printable, refused
from w2v.text.vocab import HEADER
from w2v.vectors.datasets import ASKED, title
from w2v.vectors.runs import Run, RunError, read

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
    settings, scores = run.settings, run.scores
    with (run.folder / "vocab.tsv").open(encoding="utf-8", newline="\n") as file:
        header = HEADER.fullmatch(file.readline().rstrip("\n"))
        words, raw_words, raw_types = map(int, header.groups())
        example = file.readline().rpartition("\t")[0]
    environment = dict.fromkeys(("machine", "w2v", "commit", "python", "torch"), "unknown")
    if (run.folder / "env.txt").exists():
        lines = (run.folder / "env.txt").read_text(encoding="utf-8").splitlines()
        environment |= dict(line.split(" ", 1) for line in lines if " " in line)

    # The parts of sentences that are not always there.
    held_out = scores.get("held_out_loss")
    unseen = "" if held_out is None else f", {held_out:.4f} on held-out text"
    seconds = scores["seconds"]
    rate = f"{scores['words'] / seconds / 1e6:.3g} M words/s" if seconds else "no time"
    loss = "-" if scores["loss"] is None else f"{scores['loss']:.4f}"
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
| training | {settings["train.epochs"]} epochs, \
{scores["words"]:,} words in {seconds:.1f} s, {rate} |
| loss | {loss} a positive pair{unseen} |
| hardware | {environment["machine"].replace(" |", ",")} |
| software | w2v {environment["w2v"]}, commit {environment["commit"]}, \
Python {environment["python"]}, torch {environment["torch"]} |
| memory | {scores["bytes_host"] / 2**20:,.0f} MiB of tables in CPU memory, \
{scores["bytes_gpu"] / 2**20:,.0f} MiB of the GPU |

## Scores

{_describe_scores(scores)}

## Settings

`w2v train config.yaml` trains it again.

```yaml
{(run.folder / "config.yaml").read_text(encoding="utf-8").rstrip()}
```
"""


def _describe_scores(scores: dict) -> str:
    """Return a table of what was counted: in baskets, say, no word is known."""
    rows = []
    for part in ("total", "semantic", "syntactic"):
        if (score := scores["analogies"][part])["counted"]:
            shown = f"{score['accuracy']:.1%} | {score['counted']:,} | {score['skipped']:,}"
            rows.append(f"| analogies, {part} | {shown} |")
    for name, score in scores["similarity"].items():
        if score["pairs"]:
            rho = "-" if score["spearman"] is None else f"{score['spearman']:.3f}"
            rows.append(f"| {title(name)} | {rho} | {score['pairs']:,} | {score['oov']:.1%} |")
    if not rows:
        return "No question of the analogies and no judged pair of words is in the vocabulary."
    table = "\n".join(["| | score | counted | not in the vocabulary |", "|---|---|---|---|", *rows])
    return f"""{table}

Analogies are Google's, answered among the {ASKED:,} most frequent words, by gensim's protocol; \
those of words outside the vocabulary are
not counted. Similarity is Spearman's correlation with human judgement."""
