"""gensim's own tests of Word2Vec and KeyedVectors, run on this program's.

gensim installs its tests beside itself. Those of KeyedVectors run on vectors that were saved
and loaded here. Tests that ask for hierarchical softmax or CBOW, but are about something
else, get skip-gram with negative sampling. All get five negatives: each number is compiled anew.

Left out are tests of what this program refuses (REFUSED), of gensim's old files and of its
warnings (GENSIMS), and those that take long (SLOW), which `make test-faults` runs.
"""

import os
import sys
import tempfile
import types

import numpy as np
import pytest
from gensim.models import word2vec

from w2v import Word2Vec
from w2v.vectors import export, load

# gensim does not install this package, which only its tests of warnings use.
sys.modules.setdefault("testfixtures", types.SimpleNamespace(log_capture=lambda: lambda test: test))
from gensim.test import test_keyedvectors, test_word2vec  # noqa: E402

REFUSED = """
    test_cbow_fixedwindowsize test_cbow_fixedwindowsize_fromfile test_cbow_hs
    test_cbow_hs_fromfile test_cbow_hs_online test_cbow_neg test_cbow_neg_fromfile
    test_cbow_neg_online test_sg_hs test_sg_hs_fromfile test_sg_hs_online
    test_sg_fixedwindowsize_fromfile test_training_cbow test_training_cbow_negative
    test_training test_training_from_file test_predict_output_word test_scoring test_locking
    test_compute_training_loss test_train_hs_and_neg test_train_warning test_vocab
""".split()
GENSIMS = """
    test_persistence_backwards_compatible test_load_pre_keyed_vector_model_c_format
    test_load_old_model test_load_old_model_separates test_load_old_models_1_x
    test_load_old_models_2_x test_load_old_models_3_x test_build_vocab_warning
""".split()
SLOW = "test_evaluate_word_pairs test_evaluate_word_pairs_from_file test_parallel".split()
# Tests in which gensim's default, CBOW, does not matter.
ABOUT_VECTORS = """
    test_cosmul test_similar_by test_similarities test_prune_vocab test_build_vocab_from_freq
    test_online_learning test_online_learning_from_file test_train_with_explicit_param
""".split()


class FiveNegatives(Word2Vec):
    """Word2Vec that replaces a positive number of negatives by five."""

    def __init__(self, *args, negative=5, **more):
        super().__init__(*args, negative=negative and 5, **more)


class SkipGram(Word2Vec):
    """Word2Vec that accepts hierarchical softmax and CBOW, and ignores them."""

    def __init__(self, *args, hs=0, negative=5, sg=1, **more):
        super().__init__(*args, **more)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # gensim's about itself
class TestGensimsWord2Vec(test_word2vec.TestWord2VecModel):
    @pytest.fixture(autouse=True)
    def ours(self, monkeypatch, one_thread):
        module = types.ModuleType("word2vec")
        kind = SkipGram if self._testMethodName in ABOUT_VECTORS else FiveNegatives
        module.__dict__.update(vars(word2vec), Word2Vec=kind)
        monkeypatch.setattr(test_word2vec, "word2vec", module)


for name in (*REFUSED, *GENSIMS, *([] if "W2V_SLOW" in os.environ else SLOW)):
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
            self.vectors = load.load(folder)
