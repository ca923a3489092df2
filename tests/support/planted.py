"""Word vectors with known answers to analogy questions."""

import numpy as np
from gensim.models import KeyedVectors


def kv_of(words, vectors, counts=None):
    """Return KeyedVectors of words, by default by falling count."""
    kv = KeyedVectors(np.shape(vectors)[1])
    kv.add_vectors(list(words), np.asarray(vectors, dtype=np.float32))
    counts = np.arange(len(words), 0, -1) if counts is None else counts
    kv.expandos["count"] = np.array(counts, np.int64)
    return kv


def write_questions(path, sections):
    with path.open("w", encoding="utf-8") as file:
        for name, questions in sections.items():
            file.write(f": {name}\n")
            file.writelines(f"{' '.join(question)}\n" for question in questions)
    return path


def planted(n_pairs=60, n_relations=4, dim=24, noise=1.0, seed=0):
    """Return mixed-case words, their vectors, and questions by section.

    In each relation, b - a is nearly the same for all of its pairs (a, b).
    """
    rng = np.random.default_rng(seed)
    words, vectors, sections = [], [], {}
    for r in range(n_relations):
        offset = rng.standard_normal(dim)
        pairs = []
        for p in range(n_pairs):
            a, b = f"{'aA'[p % 2]}{r}x{p}", f"b{r}x{p}"
            base = rng.standard_normal(dim)
            words += [a, b]
            vectors += [base, base + offset + noise * rng.standard_normal(dim)]
            pairs.append((a, b))
        chosen = rng.integers(0, n_pairs, size=(80, 2))
        questions = [(*pairs[i], *pairs[j]) for i, j in chosen if i != j]
        name = f"gram{r}" if r % 2 else f"relation{r}"
        sections[name] = [*questions, ("a0x1", "unseen", "b0x2", "a0x3")]
    for word in words[::7]:  # case variants, some of them nearer than the answer
        words.append(word.upper() if word.upper() != word else word.lower())
        vectors.append(vectors[words.index(word)] + 0.1 * rng.standard_normal(dim))
    order = rng.permutation(len(words))
    return [words[i] for i in order], np.array(vectors, dtype=np.float32)[order], sections
