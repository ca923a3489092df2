"""Reading text in plain Python: the reference for the compiled reader."""

import re
import unicodedata
from collections import Counter

import numpy as np

from w2v.config import VocabConfig
from w2v.text.encode import encode_sentences
from w2v.text.vocab import Vocab


def read_sentences(files, lowercase=False, tokenize="whitespace", max_sentence_length=10_000):
    """Return the sentences of plain files as gensim's LineSentence does."""
    lowercase = lowercase or tokenize == "words"
    sentences = []
    for path in files:
        text = path.read_bytes().removeprefix(b"\xef\xbb\xbf").decode(errors="surrogateescape")
        text = re.sub("[\udc80-\udcff]", "\ufffd", text).replace("\u200b", " ")
        for line in (text.lower() if lowercase else text).split("\n"):
            if tokenize == "words":
                line = only_words(line)
            words = line.split()
            for start in range(0, len(words), max_sentence_length):
                sentences.append(words[start : start + max_sentence_length])
    return sentences


def only_words(line):
    """Replace by spaces what is no part of a word: marks belong to letters."""
    kept = ""
    for character in line:
        is_mark = unicodedata.category(character).startswith("M") or character in "\u200c\u200d"
        after_letter = kept[-1:] not in ("", " ") and kept[-1] not in "0123456789"
        is_part = after_letter if is_mark else character.isalnum() or character == "_"
        kept += character if is_part else " "
    return kept


def count(sentences, min_count=1, max_final_vocab=None):
    """Return the vocabulary of sentences."""
    counter = Counter(word for sentence in sentences for word in sentence)
    counts = np.array(list(counter.values()), np.int64)
    words = np.array(list(counter), object)
    limits = VocabConfig(min_count, max_final_vocab)
    return Vocab.select(
        lambda numbers: words[numbers].tolist(), counts, np.arange(len(words)), limits
    )[0]


def encode(sentences, vocab):
    """Return the ids of known words in each sentence that has two of them."""
    row = {word: row for row, word in enumerate(vocab.words)}
    known = [[row[word] for word in sentence if word in row] for sentence in sentences]
    return [ids for ids in known if len(ids) > 1]


def blocks(sentences):
    """Return single letters, a to z, as `Corpus.write` takes them."""
    return encode_sentences(sentences, {chr(97 + i): i for i in range(26)})


def joined(blocks):
    """Return the sentences of encoded blocks, and the words read."""
    blocks = list(blocks)
    ids = np.concatenate([block.ids for block in blocks])
    ends = np.cumsum(np.concatenate([block.lengths for block in blocks]))
    sentences = [part.tolist() for part in np.split(ids, ends)]
    assert sentences.pop() == []
    return sentences, sum(block.raw_words for block in blocks)
