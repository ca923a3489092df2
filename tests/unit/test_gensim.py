"""gensim's own tests, run on this program's Word2Vec and vectors.

gensim installs its tests beside itself; only the name of the class that they test is replaced.
Those of KeyedVectors run on vectors that were exported and loaded here. Left out are tests that
use nothing of this program, and those of SLOW, which `make test-faults` runs. gensim's tests of
FastText's hashes and files are not run: they test its own functions.
"""

import logging
import os
import sys
import tempfile
import types
from pathlib import Path

import numpy as np
import pytest
from gensim.models import word2vec
from gensim.test.utils import datapath

from tests.support.planted import kv_of
from w2v import FastText, Word2Vec
from w2v.vectors import export, load


class LogLines(logging.Handler):
    """What is logged, as gensim's tests of warnings ask `testfixtures` for it."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __str__(self):
        return "\n".join(self.lines)

    @classmethod
    def capture(cls, test):
        def run(self):
            lines = cls()
            logging.getLogger().addHandler(lines)
            try:
                test(self, lines)
            finally:
                logging.getLogger().removeHandler(lines)

        return run


if not Path(datapath("toy-data.txt")).exists():
    pytest.skip("gensim was installed without its test data", allow_module_level=True)

# gensim does not install this package, which only its tests of warnings use.
sys.modules.setdefault("testfixtures", types.SimpleNamespace(log_capture=lambda: LogLines.capture))
import gensim.test.test_fasttext as test_fasttext  # noqa: E402
from gensim.test import test_keyedvectors, test_similarities, test_word2vec  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # gensim's about itself
    pytest.mark.usefixtures("one_thread"),
]
# Each takes 1 to 40 s of a core. Others train the same model, but for the kind of text or window;
# those of locks and of hierarchical softmax are in test_word2vec.py.
SLOW = """
    test_evaluate_word_pairs test_evaluate_word_pairs_from_file test_parallel test_sg_neg
    test_sg_neg_fromfile test_sg_neg_online test_sg_fixedwindowsize test_load_old_models_2_x
    test_load_old_models_3_x test_cbow_neg_fromfile test_cbow_neg_online
    test_cbow_fixedwindowsize test_cbow_fixedwindowsize_fromfile test_cbow_hs_fromfile
    test_cbow_hs_online test_sg_hs_fromfile test_sg_hs_online test_sg_fixedwindowsize_fromfile
    test_locking test_sg_hs test_cbow_hs
""".split()


@pytest.fixture(autouse=True)
def ours(monkeypatch, tmp_path):
    """Replace the names of classes in gensim's tests.

    Some leave files in the working directory.
    """
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("word2vec")
    module.__dict__.update(vars(word2vec), Word2Vec=Word2Vec)
    monkeypatch.setattr(test_word2vec, "word2vec", module)
    monkeypatch.setattr(test_fasttext, "FT_gensim", FastText)
    monkeypatch.setattr(test_similarities, "word2vec", module)
    monkeypatch.setattr(test_similarities, "Word2Vec", Word2Vec)


class TestGensimsWord2Vec(test_word2vec.TestWord2VecModel):
    test_method_in_bulk = None  # for gensim's developers
    test_build_vocab_warning = None  # texts in place of lists of words, which raise here


def leave_out(tests, names):
    """Remove slow tests of a class, but for `make test-faults`."""
    for name in [] if "W2V_SLOW" in os.environ else names:
        assert hasattr(tests, name), name
        setattr(tests, name, None)


leave_out(TestGensimsWord2Vec, SLOW)


class TestGensimsFastText(test_fasttext.TestFastTextModel):
    test_sg_hs_online = None  # two words are alike after an epoch of few words, as all are there


class TestGensimsContinuedFastText(test_fasttext.NativeTrainingContinuationTest):
    pass


class TestGensimsFastTextWithoutBuckets(test_fasttext.ZeroBucketTest):
    pass


class TestGensimsFastTextFromFile(test_fasttext.TestFromfile):
    pass


class TestGensimsFastTextFiles(test_fasttext.SaveFacebookFormatModelTest):
    pass


class TestGensimsFastTextBytes(test_fasttext.SaveGensimByteIdentityTest):
    pass


SLOW_OF_FASTTEXT = """
    test_training_fromfile test_persistence_fromfile test_cbow_neg_training_fromfile
    test_sg_neg_training_fromfile test_sg_neg_online test_cbow_hs_online test_cbow_neg_online
    test_online_learning_fromfile test_online_learning_after_save_fromfile test_sg_neg_training
    test_cbow_neg_training test_negative_ns_exp
""".split()
leave_out(TestGensimsFastText, SLOW_OF_FASTTEXT)
SLOW_OF_CONTINUED = "test_continuation_gensim test_save_load_gensim test_save_load_native".split()
leave_out(TestGensimsContinuedFastText, SLOW_OF_CONTINUED)
leave_out(TestGensimsFastTextWithoutBuckets, ["test_cbow_neg"])
leave_out(TestGensimsFastTextFiles, ["test_skipgram", "test_cbow"])
leave_out(TestGensimsFastTextBytes, ["test_skipgram", "test_cbow"])


class TestGensimsWmd(test_word2vec.TestWMD):
    pass


@pytest.mark.skipif(not test_similarities.POT_EXT, reason="POT is not installed")
class TestGensimsWmdSimilarity(test_similarities.TestWmdSimilarity):
    pass


class TestGensimsAnnoyIndexer(test_similarities.TestWord2VecAnnoyIndexer):
    test_fast_text = None
    test_annoy_indexing_of_keyed_vectors = None
    test_load_missing_raises_error = None


class Exported:
    """Replaces the vectors of a test by those of an exported file.

    Those that other formats and ways of exporting write are equal; see test_export.py.
    """

    def setUp(self):
        super().setUp()
        words = self.vectors.index_to_key
        counts = np.array([self.vectors.get_vecattr(word, "count") for word in words])
        with tempfile.TemporaryDirectory() as folder:
            export.save(kv_of(words, self.vectors.vectors, counts), folder, ["kv"])
            self.vectors = load.load(Path(folder, "vectors.kv"))


class TestGensimsKeyedVectors(Exported, test_keyedvectors.TestKeyedVectors):
    pass


class TestGensimsSimilarityIndex(Exported, test_similarities.TestWordEmbeddingSimilarityIndex):
    pass
