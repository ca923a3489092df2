"""Tests that fail until hierarchical softmax is there.

A test that is listed and passes fails, so the list cannot be longer than needed. Its name goes
from here when what it asks for has come; with the last name, this module goes.
"""

# Of gensim's own tests, in tests/unit/test_gensim.py.
GENSIMS = """
    test_build_vocab_from_freq test_cbow_fixedwindowsize test_cbow_hs test_cbow_hs_fromfile
    test_cbow_hs_online test_compute_training_loss test_cosmul test_locking test_online_learning
    test_online_learning_from_file test_predict_output_word test_prune_vocab test_scoring
    test_sg_fixedwindowsize_fromfile test_sg_hs test_sg_hs_fromfile test_sg_hs_online
    test_similar_by test_train_hs_and_neg test_train_with_explicit_param test_training
    test_training_cbow test_training_from_file test_vocab
""".split()
# Of public snippets, in tests/unit/test_snippets.py.
SNIPPETS = """
    test_deepwalk test_deepwalk_of_karateclub test_deepwalk_with_cbow_and_hierarchical_softmax
    test_deepwalk_with_keywords test_inverse_regression_by_scores
    test_tutorial_of_times_with_both_models_and_softmaxes
""".split()
