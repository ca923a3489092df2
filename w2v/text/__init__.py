"""From text files to a vocabulary and word ids on disk."""

from w2v.text.corpus import Corpus, open_corpus
from w2v.text.formats import CorpusError
from w2v.text.vocab import Vocab, VocabError

__all__ = ["Corpus", "CorpusError", "Vocab", "VocabError", "open_corpus"]
