"""The held-out loss: what is held out, that nothing of it is trained on, and that the loss is the objective's."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from w2v.config import ConfigError, ModelConfig
from w2v.model import heldout
from w2v.model.heldout import HeldOut
from w2v.model.sampler import Sampler
from w2v.model.skipgram import expand

CPU = torch.device("cpu")


def corpus(lengths):
    """Sentences of so many words, of which no two share one; the ids, the offsets, and uniform noise."""
    offsets = np.cumsum([0, *lengths])
    return (
        np.arange(offsets[-1], dtype=np.int32),
        offsets,
        np.ones(offsets[-1]),
        np.full(offsets[-1], 1 / offsets[-1]),
    )


@given(st.lists(st.integers(2, 50), min_size=1, max_size=300), st.integers(0, 2000))
def test_sentences_are_spread_and_about_as_many_words_as_asked_for(lengths, words):
    _, offsets, *_ = corpus(lengths)
    try:
        chosen = heldout.choose(offsets, words)
    except ConfigError as error:
        assert 2 * words > offsets[-1] * (
            1 - 2 / len(lengths)
        ) and f"train.held_out_words={words}" in str(error)
        return
    assert len(chosen) == math.ceil(words * len(lengths) / offsets[-1]) <= len(lengths) / 2
    assert len(set(chosen)) == len(chosen) and all(0 <= number < len(lengths) for number in chosen)
    gaps = np.diff(chosen)
    assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_nothing_held_out_is_trained_on_and_all_else_is(batch_size):
    ids, offsets, keep, noise = corpus(np.random.default_rng(0).integers(2, 30, 90))
    chosen = heldout.choose(offsets, 200)
    sampler = Sampler(ids, offsets, keep, noise, ModelConfig(window=3), batch_size, 1, CPU, chosen)
    pairs = [expand(batch) for batch in sampler.epoch()]
    trained = set(torch.cat([p.centers_B for p in pairs]).tolist())
    contexts = set(torch.cat([p.contexts_BC[p.context_mask_BC] for p in pairs]).tolist())
    held = {
        word for number in chosen for word in ids[offsets[number] : offsets[number + 1]].tolist()
    }
    assert held and trained == set(ids.tolist()) - held and not contexts & held


def test_the_loss_is_the_mean_over_pairs_and_the_same_each_time():
    ids, offsets, keep, noise = corpus([40] * 60)
    model = ModelConfig(vector_size=8, window=2, negative=3, negative_pool=5, negative_pool_steps=2)
    generator = torch.Generator().manual_seed(0)
    input_VD, output_VD = torch.randn(2, len(ids), 8, generator=generator)
    held = HeldOut(ids, offsets, heldout.choose(offsets, 100), keep, noise, model, CPU)
    total, pairs = 0.0, 0
    for written in map(expand, held._batches):
        for center, contexts, mask, negatives, counts in zip(*written, strict=True):
            for context in contexts[mask]:
                total -= torch.nn.functional.logsigmoid(input_VD[context] @ output_VD[center])
                total -= torch.nn.functional.logsigmoid(
                    -(output_VD[negatives[counts]] @ input_VD[context])
                ).sum()
                pairs += 1
    assert pairs > 100 and held.loss(input_VD, output_VD) == pytest.approx(
        float(total) / pairs, rel=1e-5
    )
    again = HeldOut(ids, offsets, heldout.choose(offsets, 100), keep, noise, model, CPU)
    assert again.loss(input_VD, output_VD) == held.loss(input_VD, output_VD)
    # Whatever the inputs, outputs of zero say one half to each of the 1 + 3 targets, less the noise words that are the center.
    assert 3.9 * math.log(2) < held.loss(input_VD, 0 * output_VD) <= 4 * math.log(2) * (1 + 1e-6)


def test_half_precision_vectors_are_taken_as_they_are_stored():
    ids, offsets, keep, noise = corpus([40] * 60)
    held = HeldOut(
        ids, offsets, heldout.choose(offsets, 100), keep, noise, ModelConfig(vector_size=4), CPU
    )
    vectors = torch.randn(2, len(ids), 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert held.loss(*vectors) == held.loss(*vectors.float())


def test_a_sample_without_a_pair_is_refused():
    ids, offsets, keep, noise = corpus([2] * 20)
    with pytest.raises(ConfigError, match="held_out_words"):
        HeldOut(ids, offsets, heldout.choose(offsets, 4), 0 * keep, noise, ModelConfig(), CPU)


def test_a_run_reports_it_after_every_epoch_and_at_the_end(tmp_path):
    from train import main

    text = "\n".join(
        " ".join(np.random.default_rng(line).choice([f"w{line % 5}{i}" for i in range(6)], 12))
        for line in range(300)
    )
    (tmp_path / "text.txt").write_text(text)
    more = f"corpus.path={tmp_path}/text.txt corpus.data_dir={tmp_path}/data run.dir={tmp_path}/runs".split()
    model = "model.vector_size=8 model.sample=0 optimizer.lr=0.05 train.batch_size=64 train.device=cpu".split()
    assert main([*more, *model, "train.epochs=3", "train.held_out_words=200"]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
    scores = json.loads((run / "scores.json").read_text())
    assert len(losses) == 2 and losses[0] > losses[1] > scores["held_out_loss"] > 0
    assert scores["words"] == 3 * 3600 and scores["bytes_host"] > 0
