"""gensim's FastText, trained with any row-separable torch optimizer.

model = FastText(sentences, vector_size=100, epochs=5)
model.wv["unseen"]  # gensim's FastTextKeyedVectors
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from gensim.models import fasttext

from w2v.api.word2vec import Part, Word2Vec, _number
from w2v.config import require
from w2v.word2vec.step import TrainingStep


class FastText(Word2Vec, fasttext.FastText):
    """gensim's FastText with any row-separable torch optimizer.

    Arguments mean what they mean in gensim, and further ones what they mean in `w2v.Word2Vec`.
    Buckets that no n-gram of the vocabulary is in are not trained.

    Args:
        min_n: Least number of characters of an n-gram.
        max_n: Most characters of an n-gram; without n-grams if it is less than `min_n`.
        bucket: Number of buckets of n-grams.

    Raises:
        ValueError: If an argument is out of range.
    """

    GENSIMS = fasttext.FastText
    steps_at_centers = False
    LOCKS = ("vectors_vocab_lockf", "vectors_ngrams_lockf")

    def __init__(
        self,
        sentences=None,
        corpus_file=None,
        sg=0,
        hs=0,
        vector_size=100,
        alpha=None,
        window=5,
        min_count=5,
        max_vocab_size=None,
        word_ngrams=1,
        sample=1e-3,
        seed=1,
        workers=None,
        min_alpha=None,
        negative=5,
        ns_exponent=0.75,
        cbow_mean=1,
        hashfxn=hash,
        epochs=5,
        null_word=0,
        min_n=3,
        max_n=6,
        sorted_vocab=1,
        bucket=2_000_000,
        trim_rule=None,
        batch_words=10_000,
        callbacks=(),
        max_final_vocab=None,
        shrink_windows=True,
        *,
        optimizer: str | type[torch.optim.Optimizer] | None = None,
        optimizer_args: dict[str, Any] | None = None,
        batch_size: int | None = None,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        settings: Sequence[str] = (),
    ):
        given = dict(locals())
        for name in ("min_n", "max_n", "bucket"):
            given[name] = _number(int, name, given[name])
            require(given[name] >= 0, name, given[name], "at least 0")
        self._begin(given)

    def reset_from(self, other_model):
        """Share another model's vocabulary, and reset all vectors.

        gensim's own replaces `wv` by one without n-grams.
        """
        for name in ("index_to_key", "key_to_index", "expandos"):
            setattr(self.wv, name, getattr(other_model.wv, name))
        self.cum_table, self.corpus_count = other_model.cum_table, other_model.corpus_count
        self.init_weights()

    def init_weights(self):
        """Reset all vectors as gensim does for a new vocabulary."""
        self.wv.vectors_vocab, self.wv.vectors_ngrams = self.wv.vectors_vocab[:0], None
        super().init_weights()

    def _subword_settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        given = vars(given["wv"]) if "wv" in given else given
        min_n, max_n, buckets = given["min_n"], given["max_n"], given["bucket"]
        if not buckets or max_n < max(1, min_n):
            return {}
        return {"subwords": True, "min_n": max(1, min_n), "max_n": max_n, "buckets": buckets}

    def _parts(self, step: TrainingStep) -> list[Part]:
        inputs, *others = super()._parts(step)
        words, subwords, wv = self._trained_words, step.subwords, self.wv
        if not subwords:  # gensim has them in two arrays, or in one by two names
            return [inputs, inputs._replace(vectors_VD=wv.vectors_vocab[:words]), *others]
        own = slice(subwords.first, subwords.first + words)
        used = slice(own.stop, subwords.first + subwords.rows)
        return [
            inputs,
            Part("own", step.table, own, wv.vectors_vocab[:words]),
            Part("buckets", step.table, used, wv.vectors_ngrams, subwords.used_B),
            *others,
        ]
