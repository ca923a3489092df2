"""A model card: what a finished run is, in the words of the files in its folder."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from w2v.system.files import atomic_write
from w2v.text.vocab import HEADER
from w2v.vectors.datasets import ASKED, PAIR_SETS


class CardError(ValueError):
    """A folder of which nothing can be said; the message is one line that names it and the remedy."""


def write(folder: Path) -> Path:
    """Write README.md of a finished run: corpus, vocabulary, scores, hardware, settings, and how to load it."""
    try:
        text = describe(folder)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CardError(
            f"{folder} is not the whole folder of a finished run ({reason}); name another, or train it again"
        ) from None
    atomic_write(folder / "README.md", text)
    return folder / "README.md"


def describe(folder: Path) -> str:
    """The card as Markdown."""
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    scores = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    with (folder / "vocab.tsv").open(encoding="utf-8") as file:
        words, raw_words, raw_types = map(
            int, HEADER.fullmatch(file.readline().rstrip("\n")).groups()
        )
    environment = (
        (folder / "env.txt").read_text(encoding="utf-8") if (folder / "env.txt").exists() else ""
    )
    said = dict(line.split(" ", 1) for line in environment.splitlines() if " " in line)
    corpus, vocab, model, optimizer, train = (
        config[section] for section in ("corpus", "vocab", "model", "optimizer", "train")
    )
    analogies, held_out = scores["analogies"], scores.get("held_out_loss")
    rows = [
        f"| analogies, {part} | {_percent(analogies[part])} | {analogies[part]['counted']:,} | {analogies[part]['skipped']:,} |"
        for part in ("total", "semantic", "syntactic")
    ]
    for name, score in scores["similarity"].items():
        rho = "-" if score["spearman"] is None else f"{score['spearman']:.3f}"
        rows.append(f"| {PAIR_SETS[name][0]} | {rho} | {score['pairs']:,} | {score['oov']:.1%} |")
    return f"""# Word vectors of {corpus["path"]}

{words:,} words of {model["vector_size"]} dimensions, trained by skip-gram with negative sampling and {optimizer["name"]}.

```python
from gensim.models import KeyedVectors

vectors = KeyedVectors.load("vectors.kv")  # or KeyedVectors.load_word2vec_format("vectors.bin", binary=True)
vectors.most_similar({_first_word(folder)!r})
```

| | |
|---|---|
| text | {corpus["path"]}{", lower-cased" if corpus["lowercase"] else ""}: {raw_words:,} words, {raw_types:,} distinct |
| vocabulary | {words:,} words that occur at least {_times(vocab["min_count"])}{_at_most(vocab["max_final_vocab"])} |
| training | {train["epochs"]} epochs, {scores["words"]:,} words in {scores["seconds"]:.1f} s, {_rate(scores)} |
| loss | {scores["loss"]:.4f} a positive pair{"" if held_out is None else f", {held_out:.4f} on held-out text"} |
| hardware | {said.get("machine", "unknown").replace(" |", ",")} |
| software | commit {said.get("commit", "unknown")}, Python {said.get("python", "unknown")}, torch {said.get("torch", "unknown")} |
| memory | {scores["bytes_host"] / 2**20:,.0f} MiB of tables in CPU memory, {scores["bytes_gpu"] / 2**20:,.0f} MiB of the GPU |

## Scores

| | score | counted | not in the vocabulary |
|---|---|---|---|
{chr(10).join(rows)}

Analogies are Google's, answered among the {ASKED:,} most frequent words, by gensim's protocol; those of words outside the vocabulary are
not counted. Similarity is Spearman's correlation with human judgement.

## Settings

`python train.py config.yaml` trains it again.

```yaml
{yaml.safe_dump(config, sort_keys=False).rstrip()}
```
"""


def _first_word(folder: Path) -> str:
    with (folder / "vocab.tsv").open(encoding="utf-8", newline="\n") as file:
        return (file.readline() and file.readline()).rpartition("\t")[0]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _at_most(words: int | None) -> str:
    return f", at most {words:,}" if words else ""


def _percent(section: dict) -> str:
    return f"{section['accuracy']:.1%}" if section["counted"] else "-"


def _rate(scores: dict) -> str:
    return (
        f"{scores['words'] / scores['seconds'] / 1e6:.3g} M words/s"
        if scores["seconds"]
        else "no time"
    )
