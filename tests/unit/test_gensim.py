"""gensim's own tests, on what is made here: those of its Word2Vec, with this program's class in its place, and those of KeyedVectors, on
vectors that have gone through this program's files. gensim installs them beside itself.

Where a test asks for hierarchical softmax or CBOW, but is about what comes of it, it gets skip-gram with negative sampling. Left out are
those about what this program refuses (these two, score, locked vectors, compute_loss, an alpha that rises between calls), those about
gensim's own old files and warnings, and two that take long.
"""

import sys
import tempfile
import types

import numpy as np
import pytest
from gensim.models import word2vec

from w2v import Word2Vec
from w2v.vectors import export
from w2v.vectors import load as vectorfile

# gensim asks for this package, which it does not install, for tests of its warnings alone, and those are left out.
sys.modules.setdefault("testfixtures", types.SimpleNamespace(log_capture=lambda: lambda test: test))
from gensim.test import test_keyedvectors, test_word2vec  # noqa: E402

REFUSED = """
    test_cbow_fixedwindowsize test_cbow_fixedwindowsize_fromfile test_cbow_hs test_cbow_hs_fromfile test_cbow_hs_online test_cbow_neg
    test_cbow_neg_fromfile test_cbow_neg_online test_sg_hs test_sg_hs_fromfile test_sg_hs_online test_sg_fixedwindowsize_fromfile
    test_training_cbow test_training_cbow_negative test_training test_training_from_file test_predict_output_word test_scoring
    test_locking test_compute_training_loss test_train_hs_and_neg test_train_warning test_vocab
""".split()
GENSIMS = """
    test_persistence_backwards_compatible test_load_pre_keyed_vector_model_c_format test_load_old_model test_load_old_model_separates
    test_load_old_models_1_x test_load_old_models_2_x test_load_old_models_3_x test_build_vocab_warning
""".split()
SLOW = ["test_evaluate_word_pairs_from_file", "test_parallel"]  # the first without a file runs
ABOUT_VECTORS = """
    test_cosmul test_similar_by test_similarities test_prune_vocab test_build_vocab_from_freq test_online_learning
    test_online_learning_from_file test_train_with_explicit_param
""".split()


class SkipGram(Word2Vec):
    """Takes orders for hierarchical softmax and CBOW, and does without."""

    def __init__(self, *args, hs=0, negative=5, sg=1, **more):
        super().__init__(*args, negative=negative or 5, **more)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # gensim's about itself
class TestGensimsWord2Vec(test_word2vec.TestWord2VecModel):
    @pytest.fixture(autouse=True)
    def ours(self, monkeypatch, one_thread):
        module = types.ModuleType("word2vec")
        module.__dict__.update(
            vars(word2vec), Word2Vec=SkipGram if self._testMethodName in ABOUT_VECTORS else Word2Vec
        )
        monkeypatch.setattr(test_word2vec, "word2vec", module)


for name in (*REFUSED, *GENSIMS, *SLOW):
    assert hasattr(TestGensimsWord2Vec, name), name
    setattr(TestGensimsWord2Vec, name, None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestGensimsKeyedVectors(test_keyedvectors.TestKeyedVectors):
    def setUp(self):
        super().setUp()
        counts = [self.vectors.get_vecattr(word, "count") for word in self.vectors.index_to_key]
        self.vectors = export.keyed_vectors(
            self.vectors.index_to_key, np.array(counts), self.vectors.vectors
        )
        with tempfile.TemporaryDirectory() as folder:
            export.save(self.vectors, folder)
            self.vectors = vectorfile.load(folder)
