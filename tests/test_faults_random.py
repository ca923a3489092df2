"""Whatever bytes or values come as config, corpus, vectors or checkpoint: they are taken, or refused in one line. No traceback, no hang.

`make test-faults` tries 400 of each.
"""

import json
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as tried
from hypothesis import strategies as st

import train
from tests.test_faults import SMALL, arguments_for, changed
from w2v import export, plan, settings
from w2v.checkpoint import CheckpointError, latest
from w2v.config import ConfigError
from w2v.optim import RowOptimizer
from w2v.table import Table
from w2v.vocab import Vocab

CASES = int(os.environ.get("W2V_CASES", "40"))  # of each property
TRAINING = [name for name in settings.names() if not name.startswith(("corpus", "run"))]
pytestmark = pytest.mark.usefixtures("one_thread")
few_examples = tried(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run that is done."""
    folder = tmp_path_factory.mktemp("done")
    assert train.main(arguments_for(folder)) == 0
    (done,) = (folder / "runs").iterdir()
    return done


def keys():
    return st.sampled_from([*settings.names(), "model.windoww", "x", "optimizer.args.betas", "optimizer.args.x", "model", "=", ""])


values = st.one_of(st.integers(), st.floats(), st.text(max_size=20), st.booleans(), st.none(), st.lists(st.integers(), max_size=3))


@few_examples
@given(st.lists(st.tuples(keys(), values), max_size=4))
def test_any_assignments_are_a_config_or_one_line(assigned):
    try:
        config = settings.load([], [f"{key}={value}" for key, value in assigned])
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert not settings.changes(settings.as_dict(config), settings.as_dict(config)) or any(value != value for _, value in assigned)


yaml_like = st.recursive(values, lambda inner: st.dictionaries(st.text(max_size=8) | keys(), inner, max_size=3), max_leaves=8)


@few_examples
@given(st.one_of(st.binary(max_size=200), yaml_like.map(lambda value: json.dumps(value).encode()), st.text(max_size=100).map(str.encode)))
def test_any_bytes_are_a_config_file_or_one_line(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(content)
    try:
        settings.load([file])
    except ConfigError as error:
        assert "\n" not in str(error)


@few_examples
@given(st.binary(max_size=300), st.sampled_from(["txt", "gz", "xz", "bz2", "zst", "xml"]))
def test_any_bytes_are_a_corpus_or_one_line(tmp_path_factory, content, ending):
    folder = tmp_path_factory.getbasetemp() / "any corpus"
    folder.mkdir(exist_ok=True)
    file = folder / f"text.{ending}"
    file.write_bytes(content)
    config = settings.load([], [f"corpus.path={file}", f"corpus.data_dir={folder / 'data'}", *SMALL])
    try:
        vocab, corpus = plan.open_corpus(config)
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        assert len(corpus.ids) and corpus.ids.max() < len(vocab.words)
    assert not [path for path in folder.rglob(".*")]


@few_examples
@given(st.binary(max_size=300) | st.integers(0, 10_000), st.sampled_from(["kv", "bin", "txt", "vec"]))
def test_any_bytes_are_vectors_or_one_line(run, content, ending):
    """Random bytes, or a run's own with one of them another."""
    folder = run.parent / "any vectors"
    folder.mkdir(exist_ok=True)
    file = folder / f"any.{ending}"
    if isinstance(content, int):
        own = bytearray((run / f"vectors.{'kv' if ending == 'kv' else 'bin'}").read_bytes())
        own[content % len(own)] ^= 1 << content % 8
        content = bytes(own)
    file.write_bytes(content)
    try:
        assert isinstance(export.load(file).vectors, np.ndarray)
    except export.VectorsError as error:
        assert "\n" not in str(error)


def tables_of(run):
    config = settings.load([run / "config.yaml"])
    optimizer, size = RowOptimizer(config.optimizer), config.model.vector_size
    words = len(Vocab.load(run / "vocab.tsv").words)
    return [Table(name, words, size, optimizer.states(size), optimizer.scalars, "cpu") for name in ("input", "output")]


@few_examples
@given(st.binary(max_size=200), st.integers(0, 10_000), st.booleans())
def test_any_bytes_in_a_checkpoint_are_refused_in_one_line(run, content, at, replaced):
    saved = latest(run / "checkpoints").path
    files = sorted(saved.iterdir())
    file, tables = files[at % len(files)], tables_of(run)
    whole = file.read_bytes()
    at %= len(whole)
    with changed(file, lambda data: content if replaced else data[:at] + content + data[at + len(content) :]):
        if file.read_bytes() != whole:
            with pytest.raises(CheckpointError, match=r"\A.*\Z"):
                latest(run / "checkpoints").load(tables)


@tried(max_examples=max(5, CASES // 10), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(TRAINING), values), max_size=3))
def test_any_settings_train_or_say_one_line(tmp_path_factory, assigned):
    """From the outside, with sizes kept small."""
    folder = tmp_path_factory.getbasetemp() / "any run"
    folder.mkdir(exist_ok=True)
    sizes = ("model.vector_size", "train.epochs", "model.window", "model.negative", "model.negative_pool", "train.batch_size")
    some = [f"{key}={value % 7 if key in sizes and isinstance(value, int) else value}" for key, value in assigned]
    assert train.main([*arguments_for(folder), "run.checkpoint_minutes=0", *some]) in (0, 2, 3)
