"""Held-out sentences: their choice, their loss, and no training on them."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.each_case import each_case
from tests.support.steps import expand_words
from w2v.config import ConfigError, ModelConfig
from w2v.word2vec import heldout
from w2v.word2vec.heldout import HeldOut
from w2v.word2vec.huffman import make_tree
from w2v.word2vec.sampler import Sampler, TrainingText

CPU = torch.device("cpu")


def make_text(lengths, held_out_words, keep=1.0):
    """Return sentences of these lengths, in which every word occurs once."""
    offsets = np.cumsum([0, *lengths])
    words = offsets[-1]
    chosen = heldout.choose(offsets, held_out_words)
    ids = np.arange(words, dtype=np.int32)
    return TrainingText(ids, offsets, np.full(words, keep), np.full(words, 1 / words), chosen)


@given(st.lists(st.integers(2, 50), min_size=1, max_size=300), st.integers(0, 2000))
def test_chosen_sentences_are_evenly_spread_and_of_about_the_right_size(lengths, words):
    offsets = np.cumsum([0, *lengths])
    try:
        chosen = heldout.choose(offsets, words)
    except ConfigError as error:
        assert 2 * words > offsets[-1] * (1 - 2 / len(lengths))
        assert f"train.held_out_words={words}" in str(error)
        return
    assert len(chosen) == math.ceil(words * len(lengths) / offsets[-1]) <= len(lengths) / 2
    assert all(0 <= number < len(lengths) for number in chosen)
    gaps = np.diff(chosen)
    assert len(gaps) == 0 or 0 < gaps.max() <= gaps.min() + 1


@each_case("batch_size", [1, 7, 1000])
def test_all_but_the_held_out_sentences_is_trained_on(batch_size):
    text = make_text(np.random.default_rng(0).integers(2, 30, 90), 200)
    sampler = Sampler(text, ModelConfig(window=3), batch_size, 1, CPU)
    pairs = [expand_words(batch) for batch in sampler.epoch()]
    trained = set(torch.cat([p.targets_BT[:, 0] for p in pairs]).tolist())
    contexts = set(torch.cat([p.contexts_BC[p.context_mask_BC] for p in pairs]).tolist())
    spans = [text.offsets_S[number : number + 2] for number in text.held_out]
    held_out = {word for begin, end in spans for word in range(begin, end)}
    assert held_out
    assert trained == set(text.ids_N.tolist()) - held_out
    assert not contexts & held_out


def test_the_loss_is_the_mean_over_pairs_and_repeatable():
    text = make_text([40] * 60, 100)
    model = ModelConfig(vector_size=8, window=2, negative=3, negative_pool=5, negative_pool_steps=2)
    generator = torch.Generator().manual_seed(0)
    input_VD, output_VD = torch.randn(2, len(text.ids_N), 8, generator=generator)
    held = HeldOut(text, model, CPU)
    logsigmoid = torch.nn.functional.logsigmoid
    total, pairs = 0.0, 0
    for written in map(expand_words, held._batches):
        for contexts, mask, targets, counts, labels in zip(*written, strict=True):
            signs = torch.where(labels, 1, -1)[counts]
            for context in contexts[mask]:
                total -= logsigmoid(signs * (output_VD[targets[counts]] @ input_VD[context])).sum()
                pairs += 1
    loss = held.loss(input_VD, output_VD)
    assert pairs > 100
    assert loss == pytest.approx(float(total) / pairs, rel=1e-5)
    assert HeldOut(text, model, CPU).loss(input_VD, output_VD) == loss
    # Outputs of zero give log 2 for each of 1 + 3 targets, less negatives that are the center.
    assert 3.9 * math.log(2) < held.loss(input_VD, 0 * output_VD) <= 4 * math.log(2) * (1 + 1e-6)


def test_the_loss_of_hierarchical_softmax_is_that_of_the_paths():
    text = make_text([40] * 60, 100)
    words, losses = len(text.ids_N), {}
    zeros_VD = torch.zeros(2 * words - 1, 8)
    for negative in (0, 3):
        model = ModelConfig(hs=True, negative=negative)
        tree = make_tree(np.arange(1, words + 1), first_node=words if negative else 0)
        held = HeldOut(replace(text, tree=tree), model, CPU)
        losses[negative] = held.loss(zeros_VD, zeros_VD) / math.log(2)
    assert losses[0] == pytest.approx(tree.begin_V.diff().double().mean().item(), rel=0.05)
    assert losses[3] - losses[0] == pytest.approx(4, rel=0.05)


def test_the_loss_of_16_bit_vectors_is_computed_in_float32():
    held = HeldOut(make_text([40] * 60, 100), ModelConfig(vector_size=4), CPU)
    vectors = torch.randn(2, 2400, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert held.loss(*vectors) == held.loss(*vectors.float())


def test_a_sample_without_a_pair_has_no_loss():
    held = HeldOut(make_text([2] * 20, 4, keep=0.0), ModelConfig(), CPU)
    assert math.isnan(held.loss(torch.ones(40, 4), torch.ones(40, 4)))


def test_a_run_reports_the_loss_after_every_epoch_and_at_the_end(tmp_path):
    from train import main

    rng = np.random.default_rng(0)
    topics = [[f"w{topic}{i}" for i in range(6)] for topic in range(5)]
    lines = [" ".join(rng.choice(topics[line % 5], 12)) for line in range(300)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    settings = f"""
        corpus.path={tmp_path}/text.txt corpus.data_dir={tmp_path}/data run.dir={tmp_path}/runs
        model.vector_size=8 model.sample=0 optimizer.lr=0.05
        train.batch_size=64 train.device=cpu train.epochs=3 train.held_out_words=200
        run.report=false
    """
    assert main(settings.split()) == 0
    (run,) = (tmp_path / "runs").iterdir()
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["held_out_loss"] for line in metrics if "held_out_loss" in line]
    scores = json.loads((run / "scores.json").read_text())
    assert len(losses) == 2
    assert losses[0] > losses[1] > scores["held_out_loss"] > 0
    assert scores["words"] == 3 * 3600
