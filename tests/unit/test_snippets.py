"""Public uses of gensim's Word2Vec with another import line.

Each test uses the class as the named page or repository does: its arguments, attributes and calls.
The texts are small ones of this file.
"""

import copy
import logging
import multiprocessing
import pickle
import random

import numpy as np
import pytest
import torch
from gensim.models import KeyedVectors
from gensim.models.callbacks import CallbackAny2Vec
from gensim.models.phrases import Phrases
from gensim.models.word2vec import LineSentence, PathLineSentences
from gensim.test.utils import common_texts, datapath
from gensim.utils import RULE_DEFAULT, RULE_KEEP, simple_preprocess

from w2v import Word2Vec

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # gensim's about itself
    pytest.mark.usefixtures("one_thread"),
]
ANIMALS = "ape cat dog fox gnu hen".split()
COLORS = "red green blue pink grey white".split()


@pytest.fixture
def sentences():
    """Sentences of 8 words, each of animals or of colors."""
    rng = random.Random(0)
    return [rng.choices(rng.choice([ANIMALS, COLORS]), k=8) for _ in range(400)]


@pytest.fixture
def walks():
    """Random walks over two cliques of six nodes that are joined by an edge."""
    neighbors = {n: [m for m in range(12) if m != n and m // 6 == n // 6] for n in range(12)}
    neighbors[0].append(6)
    neighbors[6].append(0)
    rng = random.Random(0)
    found = []
    for start in [*neighbors] * 12:
        walk = [start]
        while len(walk) < 20:
            walk.append(rng.choice(neighbors[walk[-1]]))
        found.append([str(node) for node in walk])
    return found


def knows_topics(wv, word="red", topic=COLORS):
    """Return whether the words nearest to a word are of its topic."""
    nearest = [found for found, _ in wv.most_similar(word, topn=len(topic) - 1)]
    return len(set(nearest) & set(topic)) >= len(topic) - 2


def knows_cliques(wv):
    return knows_topics(wv, "3", list("012345")) and knows_topics(wv, "9", "6 7 8 9 10 11".split())


# Tutorials of gensim itself.


def test_usage_of_the_class(tmp_path):
    # https://radimrehurek.com/gensim/models/word2vec.html, "Usage examples"
    model = Word2Vec(sentences=common_texts, vector_size=100, window=5, min_count=1, workers=4)
    model.save(str(tmp_path / "word2vec.model"))
    model = Word2Vec.load(str(tmp_path / "word2vec.model"))
    assert model.train([["hello", "world"]], total_examples=1, epochs=1) == (0, 2)
    assert model.wv["computer"].shape == (100,)
    assert len(model.wv.most_similar("computer", topn=10)) == 10


def test_vectors_that_are_mapped_from_a_file(tmp_path):
    # https://radimrehurek.com/gensim/models/word2vec.html, "Usage examples"
    model = Word2Vec(common_texts, min_count=1)
    path = str(tmp_path / "word2vec.wordvectors")
    word_vectors = model.wv
    word_vectors.save(path)
    wv = KeyedVectors.load(path, mmap="r")
    assert np.array_equal(wv["computer"], model.wv["computer"])
    del model
    assert not wv.vectors.flags.writeable or len(wv) == 12


def test_phrases_as_sentences():
    # https://radimrehurek.com/gensim/models/word2vec.html, "Embeddings with multiword ngrams"
    bigram_transformer = Phrases(common_texts, min_count=1, threshold=1)
    model = Word2Vec(bigram_transformer[common_texts], min_count=1)
    assert any("_" in word for word in model.wv.index_to_key)


def test_tutorial_with_a_corpus_class(tmp_path):
    # https://radimrehurek.com/gensim/auto_examples/tutorials/run_word2vec.html
    class MyCorpus:
        def __iter__(self):
            with open(datapath("lee_background.cor")) as file:
                for line, _ in zip(file, range(60), strict=False):
                    yield simple_preprocess(line)

    model = Word2Vec(sentences=MyCorpus())
    for index, word in enumerate(model.wv.index_to_key[:10]):
        assert model.wv.get_index(word) == index
    assert "cameroon" not in model.wv
    with pytest.raises(KeyError):
        model.wv["cameroon"]
    model.save(str(tmp_path / "model"))
    new_model = Word2Vec.load(str(tmp_path / "model"))
    more = [["Advanced", "users", "can", "load", "a", "model"]]
    new_model.build_vocab(more, update=True)
    new_model.train(more, total_examples=new_model.corpus_count, epochs=new_model.epochs)
    assert new_model.wv.doesnt_match(["the", "of", "and", "to"])


def test_tutorial_of_the_loss():
    # https://radimrehurek.com/gensim/auto_examples/tutorials/run_word2vec.html, "Training Loss"
    model_with_loss = Word2Vec(common_texts, min_count=1, compute_loss=True, hs=0, sg=1, seed=42)
    assert model_with_loss.get_latest_training_loss() > 0


def test_tutorial_of_times_with_both_models_and_softmaxes():
    # https://radimrehurek.com/gensim/auto_examples/tutorials/run_word2vec.html, "Benchmarks"
    for sg, hs in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        model = Word2Vec(common_texts, compute_loss=True, sg=sg, hs=hs, min_count=1)
        assert model.get_latest_training_loss() > 0


def test_tutorial_of_accuracy(sentences):
    # https://radimrehurek.com/gensim/auto_examples/tutorials/run_word2vec.html, "Evaluating"
    model = Word2Vec(sentences, min_count=1, vector_size=16)
    words = [*ANIMALS, *COLORS]
    score, sections = model.wv.evaluate_word_analogies(datapath("questions-words.txt"))
    assert 0 <= score <= 1 and sections
    assert model.wv.n_similarity(words[:2], words[2:4]) > model.wv.n_similarity(words[:2], COLORS)


class EpochSaver(CallbackAny2Vec):
    def __init__(self, path_prefix):
        self.path_prefix = path_prefix
        self.epoch = 0

    def on_epoch_end(self, model):
        model.save(f"{self.path_prefix}_epoch{self.epoch}.model")
        self.epoch += 1


def test_callback_that_saves_epochs(tmp_path):
    # https://radimrehurek.com/gensim/models/callbacks.html, "EpochSaver"
    saver = EpochSaver(str(tmp_path / "w2v"))
    model = Word2Vec(
        common_texts, epochs=3, vector_size=10, min_count=0, seed=42, callbacks=[saver]
    )
    epochs = [Word2Vec.load(str(tmp_path / f"w2v_epoch{epoch}.model")) for epoch in range(3)]
    assert np.array_equal(epochs[2].wv.vectors, model.wv.vectors)
    assert not np.array_equal(epochs[0].wv.vectors, epochs[1].wv.vectors)


def test_callback_that_logs_epochs(caplog):
    # https://radimrehurek.com/gensim/models/callbacks.html, "EpochLogger"
    class EpochLogger(CallbackAny2Vec):
        def __init__(self):
            self.epoch = 0

        def on_epoch_begin(self, model):
            logging.warning(f"Epoch #{self.epoch} start")

        def on_epoch_end(self, model):
            logging.warning(f"Epoch #{self.epoch} end")
            self.epoch += 1

    epoch_logger = EpochLogger()
    Word2Vec(common_texts, epochs=5, vector_size=10, min_count=0, callbacks=[epoch_logger])
    assert epoch_logger.epoch == 5 and "Epoch #4 end" in caplog.text


def test_inverse_regression_by_scores():
    # https://github.com/piskvorky/gensim/blob/develop/docs/notebooks/deepir.ipynb
    base = Word2Vec(workers=multiprocessing.cpu_count(), epochs=3, hs=1, negative=0, min_count=1)
    base.build_vocab(common_texts)
    starmodels = [copy.deepcopy(base) for _ in range(2)]
    for model in starmodels:
        model.train(common_texts, total_examples=len(common_texts), epochs=base.epochs)
    scores = np.asarray([model.score(common_texts, len(common_texts)) for model in starmodels])
    lengths = np.array([len(text) for text in common_texts])
    assert scores.shape == (2, len(common_texts)) and (scores[:, lengths > 1] < 0).all()


def test_online_vocabulary(sentences):
    # https://github.com/piskvorky/gensim/blob/develop/docs/notebooks/online_w2v_tutorial.ipynb
    model = Word2Vec(sg=1, vector_size=16, min_count=1)
    model.build_vocab(line for line in sentences if "cat" not in line)
    model.train(sentences, total_examples=model.corpus_count, epochs=model.epochs)
    assert "cat" not in model.wv
    newer = [line for line in sentences if "cat" in line]
    model.build_vocab(newer, update=True)
    model.train(newer, total_examples=model.corpus_count, epochs=10)
    assert model.wv.most_similar("cat", topn=1)[0][0] in ANIMALS


# Loss, learning rates and callbacks, as issues and answers have them.


def test_loss_of_an_epoch_by_difference(sentences):
    # https://github.com/piskvorky/gensim/issues/2709
    class Callback(CallbackAny2Vec):
        def __init__(self):
            self.epoch = 0
            self.losses = []

        def on_epoch_end(self, model):
            loss = model.get_latest_training_loss()
            self.losses.append(loss if self.epoch == 0 else loss - self.loss_previous_step)
            self.epoch += 1
            self.loss_previous_step = loss

    callback = Callback()
    Word2Vec(sentences, vector_size=16, sample=0, compute_loss=True, callbacks=[callback])
    assert callback.losses[0] > callback.losses[-1] > 0


def test_loss_that_a_callback_resets(sentences):
    # https://github.com/piskvorky/gensim/issues/2735
    class Callback(CallbackAny2Vec):
        def __init__(self):
            self.losses = []

        def on_epoch_end(self, model):
            self.losses.append(model.get_latest_training_loss())
            model.running_training_loss = 0.0

    callback = Callback()
    Word2Vec(sentences, vector_size=16, sample=0, compute_loss=True, callbacks=[callback])
    assert callback.losses[0] > callback.losses[-1] > 0


def test_loss_with_a_corpus_file():
    # https://github.com/piskvorky/gensim/issues/3229
    class Callback(CallbackAny2Vec):
        def on_epoch_end(self, model):
            self.loss = model.get_latest_training_loss()

    callback = Callback()
    corpus_file = datapath("testcorpus.txt")
    model = Word2Vec(vector_size=100, min_count=1)
    model.build_vocab(corpus_file=corpus_file)
    model.train(
        corpus_file=corpus_file,
        epochs=model.epochs,
        total_examples=model.corpus_count,
        total_words=model.corpus_total_words,
        callbacks=[callback],
        compute_loss=True,
    )
    assert callback.loss == model.get_latest_training_loss() > 0


def test_loop_over_epochs_that_saves(sentences, tmp_path):
    # https://github.com/piskvorky/gensim/issues/1997
    model = Word2Vec(vector_size=16, min_count=1)
    model.build_vocab(sentences)
    for epoch in range(3):
        model.train(sentences, total_examples=model.corpus_count, epochs=1)
        model.save(str(tmp_path / f"my_model_ep{epoch}.model"))
    assert Word2Vec.load(str(tmp_path / "my_model_ep2.model")).train_count == 3


def test_loop_that_lowers_alpha(sentences):
    # https://rare-technologies.com/doc2vec-tutorial/
    model = Word2Vec(vector_size=16, alpha=0.025, min_alpha=0.025, min_count=1)
    model.build_vocab(sentences)
    for _ in range(5):
        random.shuffle(sentences)
        model.train(sentences, total_examples=model.corpus_count, epochs=1)
        model.alpha -= 0.002
        model.min_alpha = model.alpha
    assert model.alpha == pytest.approx(0.015) and knows_topics(model.wv)


# Graphs: random walks as sentences.


def test_node2vec(walks, tmp_path):
    # https://github.com/aditya-grover/node2vec, src/main.py
    walks = [[*map(str, walk)] for walk in walks]
    model = Word2Vec(walks, vector_size=128, window=10, min_count=0, sg=1, workers=8, epochs=1)
    model.wv.save_word2vec_format(str(tmp_path / "karate.emb"))
    loaded = KeyedVectors.load_word2vec_format(str(tmp_path / "karate.emb"))
    assert knows_cliques(loaded)


def test_node2vec_with_small_batches(walks):
    # https://github.com/eliorc/node2vec, README
    skip_gram_params = {"window": 10, "min_count": 1, "batch_words": 4}
    skip_gram_params |= {"workers": 1, "vector_size": 64, "sg": 1}
    model = Word2Vec(walks, **skip_gram_params)
    assert knows_cliques(model.wv)


def test_node2vec_as_a_subclass(walks):
    # https://github.com/louisabraham/fastnode2vec, fastnode2vec/node2vec.py
    class Node2Vec(Word2Vec):
        def __init__(self, walks, dim, window, batch_walks, seed=None):
            batch_words = min(20 * batch_walks, 10000)
            self.walks = walks
            super().__init__(
                sg=1,
                vector_size=dim,
                window=window,
                min_count=1,
                workers=1,
                batch_words=batch_words,
                seed=seed,
            )
            self.build_vocab([node] for node in map(str, range(12)))

        def train(self, epochs):
            super().train(self.walks, total_examples=len(self.walks), epochs=epochs)

    n2v = Node2Vec(walks, dim=16, window=5, batch_walks=100, seed=1)
    n2v.train(epochs=10)
    assert knows_cliques(n2v.wv)


def test_deepwalk(walks):
    # https://github.com/phanein/deepwalk, deepwalk/__main__.py
    model = Word2Vec(walks, vector_size=64, window=5, min_count=0, sg=1, hs=1, workers=1)
    assert knows_cliques(model.wv)


def test_deepwalk_with_keywords(walks):
    # https://github.com/shenweichen/GraphEmbedding, ge/models/deepwalk.py
    kwargs = {"sentences": walks, "min_count": 0, "vector_size": 128, "sg": 1, "hs": 1}
    kwargs |= {"workers": 3, "window": 5, "epochs": 5}
    model = Word2Vec(**kwargs)
    embeddings = {word: model.wv[word] for word in map(str, range(12))}
    assert len(embeddings) == 12 and knows_cliques(model.wv)


def test_deepwalk_of_karateclub(walks):
    # https://github.com/benedekrozemberczki/karateclub, karateclub/node_embedding/.../deepwalk.py
    model = Word2Vec(
        walks,
        hs=1,
        alpha=0.05,
        epochs=1,
        vector_size=128,
        window=5,
        min_count=1,
        workers=4,
        seed=42,
    )
    embedding = np.array([model.wv[str(node)] for node in range(12)])
    assert embedding.shape == (12, 128)


def test_deepwalk_with_cbow_and_hierarchical_softmax(walks):
    # https://github.com/thunlp/OpenNE style of node2vec(dw=True), as several forks set it
    w2vparams = {"window": 10, "workers": 4, "epochs": 5, "min_count": 0}
    w2vparams["sg"] = 0
    w2vparams["hs"] = 1
    model = Word2Vec(walks, vector_size=32, **w2vparams)
    assert knows_cliques(model.wv)


def test_deepwalk_of_numbered_nodes(walks):
    # https://github.com/gyorilab/genewalk, genewalk/deepwalk.py trains nodes that are objects
    numbered = [[*map(int, walk)] for walk in walks]
    word2vec = Word2Vec(vector_size=16, window=5, min_count=1, sg=1, workers=4, epochs=1)
    for epoch in range(2):
        word2vec.build_vocab(numbered, update=epoch > 0)
        word2vec.train(numbered, total_examples=len(numbered), epochs=5)
    nearest = [node for node, _ in word2vec.wv.most_similar(3, topn=5)]
    assert set(nearest) <= {*range(6)}


# Items, products and sessions.


def test_recommendation_of_products(sentences):
    # https://www.analyticsvidhya.com/blog/2019/07/
    # how-to-build-recommendation-system-word2vec-python/
    model = Word2Vec(window=10, sg=1, hs=0, negative=10, alpha=0.03, min_alpha=0.0007, seed=14)
    model.build_vocab(sentences, progress_per=200)
    model.train(sentences, total_examples=model.corpus_count, epochs=10, report_delay=1)
    model.init_sims(replace=True)
    products = np.mean([model.wv[product] for product in ["red", "blue"]], axis=0)
    similar = model.wv.similar_by_vector(products, topn=3)
    assert {word for word, _ in similar} <= {*COLORS}


def test_substitutes_of_products(sentences):
    # https://stackoverflow.com/q/70844785
    model = Word2Vec(window=5, sg=0, alpha=0.03, min_alpha=0.0007, seed=14)
    model.build_vocab(sentences, progress_per=200)
    model.train(sentences, total_examples=model.corpus_count, epochs=10, report_delay=1)
    words = list(model.wv.index_to_key)
    vectors = np.array([model.wv.get_vector(word) for word in words])
    assert vectors.shape == (12, 100) and np.isfinite(vectors).all()
    assert knows_topics(model.wv)


def test_next_click_of_a_session(sentences):
    # https://towardsdatascience.com/session-based-recommender-systems-with-word2vec-666afb775509
    model = Word2Vec(sentences, vector_size=16, window=3, sg=0, min_count=1, epochs=20)
    predicted = model.predict_output_word(["red", "blue"], topn=3)
    assert {word for word, _ in predicted} <= {*COLORS}


def test_items_with_a_window_as_wide_as_the_basket(sentences):
    # https://github.com/AlexandraVoda/Movies2Vec, item2vec by Barkan and Koenigstein 2016
    longest = max(map(len, sentences))
    model = Word2Vec(
        sentences=sentences,
        epochs=5,
        min_count=1,
        vector_size=32,
        workers=4,
        sg=1,
        hs=0,
        negative=5,
        window=longest * 100,
        shrink_windows=False,
        sample=0,
    )
    assert knows_topics(model.wv)


def test_negative_exponent_for_recommendation(sentences):
    # Caselles-Dupre et al. 2018, arXiv 1804.04212, as in gensim's help of ns_exponent
    model = Word2Vec(sentences, vector_size=16, ns_exponent=-0.5, sample=1e-4, epochs=10)
    assert np.isfinite(model.wv.vectors).all()


# Molecules, spectra and genes.


def test_mol2vec(sentences, tmp_path):
    # https://github.com/samoturk/mol2vec, mol2vec/features.py
    (tmp_path / "corpus").write_text("\n".join(map(" ".join, sentences)))
    corpus = LineSentence(str(tmp_path / "corpus"))
    sg = {"skip-gram": 1, "cbow": 0}["skip-gram"]
    model = Word2Vec(corpus, vector_size=100, window=10, min_count=3, workers=4, sg=sg)
    model.save(str(tmp_path / "model.pkl"))
    assert knows_topics(Word2Vec.load(str(tmp_path / "model.pkl")).wv)


def test_mol2vec_with_cbow(sentences, tmp_path):
    # https://github.com/samoturk/mol2vec, mol2vec/features.py
    (tmp_path / "corpus").write_text("\n".join(map(" ".join, sentences)))
    corpus = LineSentence(str(tmp_path / "corpus"))
    model = Word2Vec(corpus, vector_size=100, window=10, min_count=3, workers=4, sg=0)
    assert np.isfinite(model.wv.vectors).all()


def test_spec2vec(sentences):
    # https://github.com/iomega/spec2vec, spec2vec/model_building.py
    class TrainingProgressLogger(CallbackAny2Vec):
        def __init__(self):
            self.epoch = 0

        def on_epoch_end(self, model):
            self.loss = model.get_latest_training_loss()
            self.epoch += 1

    settings = {"sg": 0, "negative": 5, "vector_size": 300, "window": 500, "min_count": 1}
    settings |= {"workers": 4, "epochs": 3, "alpha": 0.025, "min_alpha": 0.02425}
    progress = TrainingProgressLogger()
    model = Word2Vec(sentences, callbacks=[progress], compute_loss=True, **settings)
    assert progress.epoch == 3 and progress.loss > 0 and len(model.wv) == 12


def test_kmers_of_a_sequence():
    # https://github.com/pnpnpn/dna2vec, scripts/train_dna2vec.py
    class Learner:
        def __init__(self, vec_dim, context_halfsize):
            self.model = None
            self.vec_dim = vec_dim
            self.context_halfsize = context_halfsize

        def train(self, kmer_seq_generator):
            self.model = Word2Vec(
                sentences=kmer_seq_generator,
                vector_size=self.vec_dim,
                window=self.context_halfsize,
                min_count=5,
                workers=4,
                sg=1,
            )

    rng = random.Random(1)
    sequences = ["".join(rng.choices("ACGT", k=200)) for _ in range(10)]
    learner = Learner(12, 4)
    learner.train([[s[i : i + 3] for i in range(len(s) - 2)] for s in sequences])
    assert len(learner.model.wv) == 64 and learner.model.wv["ACG"].shape == (12,)


# Notebooks.


def test_kaggle_tutorial_of_the_simpsons(sentences):
    # https://www.kaggle.com/code/pierremegret/gensim-word2vec-tutorial
    cores = multiprocessing.cpu_count()
    w2v_model = Word2Vec(
        min_count=20,
        window=2,
        vector_size=300,
        sample=6e-5,
        alpha=0.03,
        min_alpha=0.0007,
        negative=10,
        workers=max(1, cores - 1),
    )
    w2v_model.build_vocab(sentences, progress_per=10000)
    w2v_model.train(sentences, total_examples=w2v_model.corpus_count, epochs=30, report_delay=1)
    assert -1 <= w2v_model.wv.similarity("red", "cat") <= 1
    assert w2v_model.wv.doesnt_match(["red", "blue", "cat"]) in ("red", "blue", "cat")
    assert w2v_model.wv.most_similar(positive=["cat", "red"], negative=["dog"], topn=3)


def test_notebook_of_reviews(sentences):
    # https://github.com/kavgan/nlp-in-practice, word2vec/Word2Vec.ipynb
    documents = list(sentences)
    model = Word2Vec(documents, vector_size=150, window=10, min_count=2, workers=10)
    model.train(documents, total_examples=len(documents), epochs=10)
    assert model.wv.most_similar(positive="red")[0][0] in COLORS
    assert model.wv.most_similar(positive=["cat", "dog"], negative=["red"], topn=1)


def test_embedding_matrix_for_keras(tmp_path):
    # https://ben.bolte.cc/gensim
    for number, text in enumerate(common_texts):
        (tmp_path / f"{number}.txt").write_text(" ".join(text))

    class SentenceGenerator:
        def __iter__(self):
            for path in tmp_path.iterdir():
                yield from map(simple_preprocess, path.read_text().splitlines())

    model = Word2Vec(SentenceGenerator(), vector_size=10, min_count=1)
    weights = model.wv.vectors
    vocab = dict(model.wv.key_to_index)
    matrix = np.zeros((len(vocab) + 1, 10))
    for word, i in vocab.items():
        matrix[i + 1] = model.wv[word]
    assert np.array_equal(matrix[1:], weights)


def test_embedding_layer_of_torch(sentences):
    # https://stackoverflow.com/q/49710537
    model = Word2Vec(sentences, vector_size=16, min_count=1)
    embedding = torch.nn.Embedding.from_pretrained(torch.FloatTensor(model.wv.vectors))
    row = torch.LongTensor([model.wv.key_to_index["red"]])
    assert np.array_equal(embedding(row)[0].numpy(), model.wv["red"])


def test_mean_vectors_of_documents(sentences):
    # https://nadbordrozd.github.io/blog/2016/05/20/text-classification-with-word2vec/
    model = Word2Vec(sentences, vector_size=16, window=5, min_count=5, workers=2)
    w2v = dict(zip(model.wv.index_to_key, model.wv.vectors, strict=True))
    documents = np.array(
        [np.mean([w2v[w] for w in words if w in w2v], axis=0) for words in sentences]
    )
    is_color = np.array([words[0] in COLORS for words in sentences])
    centers = documents[is_color].mean(0), documents[~is_color].mean(0)
    assert (((documents @ (centers[0] - centers[1])) > 0) == is_color).mean() > 0.9


def test_pretrained_vectors_that_stay(sentences, tmp_path):
    # https://github.com/piskvorky/gensim/issues/3094
    path = str(tmp_path / "pretrained.txt")
    pretrained = KeyedVectors(16)
    pretrained.add_vectors(["red", "blue"], np.full((2, 16), 0.5, np.float32))
    pretrained.save_word2vec_format(path, binary=False)
    model = Word2Vec(vector_size=16, min_count=1)
    model.build_vocab(sentences)
    model.wv.vectors_lockf = np.ones(len(model.wv), dtype=np.float32)
    model.wv.intersect_word2vec_format(path, binary=False, lockf=0.0)
    model.train(sentences, total_examples=model.corpus_count, epochs=5)
    assert (model.wv["red"] == 0.5).all() and not (model.wv["green"] == 0.5).all()


def test_fine_tuning_beside_pretrained_vectors(tmp_path):
    # https://github.com/Embedding/Chinese-Word-Vectors/issues/170
    pretrained = KeyedVectors(16)
    pretrained.add_vectors(["moon", "computer"], np.ones((2, 16), np.float32))
    model = Word2Vec(vector_size=pretrained.vector_size, min_count=1)
    model.build_vocab(common_texts, update=False)
    model.wv.add_vectors(pretrained.index_to_key, pretrained.vectors)
    model.train(common_texts, epochs=model.epochs, total_examples=model.corpus_count)
    model.wv.save(str(tmp_path / "test.model"))  # gensim cannot load such a whole model
    assert (KeyedVectors.load(str(tmp_path / "test.model"))["moon"] == 1).all()


def test_model_that_is_pickled(sentences):
    # https://github.com/piskvorky/gensim/issues/2182 saves whole models by pickle
    model = Word2Vec(sentences, vector_size=16, min_count=1)
    again = pickle.loads(pickle.dumps(model))
    again.train(sentences, total_examples=again.corpus_count, epochs=1)
    assert type(again) is Word2Vec and not np.array_equal(again.wv.vectors, model.wv.vectors)


def test_rule_that_keeps_words(sentences):
    # https://radimrehurek.com/gensim/models/word2vec.html, trim_rule
    def trim_rule(word, count, min_count):
        return RULE_KEEP if word == "rare" else RULE_DEFAULT

    model = Word2Vec([*sentences, ["rare", "red"]], min_count=5, trim_rule=trim_rule)
    assert "rare" in model.wv


def test_folder_of_files(tmp_path):
    # https://radimrehurek.com/gensim/models/word2vec.html, PathLineSentences
    model = Word2Vec(PathLineSentences(datapath("PathLineSentences")), min_count=1, vector_size=8)
    assert len(model.wv) > 10


def test_only_the_normed_vectors_are_kept(sentences):
    # https://github.com/piskvorky/gensim/wiki/Migrating-from-Gensim-3.x-to-4
    model = Word2Vec(sentences, vector_size=16, min_count=1)
    normed = model.wv.get_normed_vectors()
    np.testing.assert_allclose(np.linalg.norm(normed, axis=1), 1, rtol=1e-5)
    model.wv.fill_norms(force=True)
    assert model.wv.get_vecattr("red", "count") == sum(line.count("red") for line in sentences)


def test_same_vectors_in_each_run(sentences):
    # https://stackoverflow.com/q/34831551, with a hash of its own
    def hash(astring):
        return ord(astring[0])

    given = {"min_count": 1, "vector_size": 16, "workers": 1, "seed": 1, "hashfxn": hash}
    first, second = Word2Vec(sentences, **given), Word2Vec(sentences, **given)
    assert np.array_equal(first.wv.vectors, second.wv.vectors)
