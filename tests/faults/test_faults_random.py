"""Whatever comes as settings, config file, corpus, vectors or run folder, a program takes it or says in one line why not: no traceback, no
hang, only the statuses that `--help` names. Each case is a whole program in a process of its own.

`make test-faults` tries 400 of each.
"""

import json
import os
import shutil
from dataclasses import fields
from typing import get_args, get_type_hints

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as tried
from hypothesis import strategies as st

from tests.faults.test_faults import TEXT, arguments_for
from w2v.config import Config

CASES = int(os.environ.get("W2V_CASES", "15"))  # of each property
OPTIMIZERS = "Adam Adamax RMSprop SGD Adagrad NAdam Rprop SparseAdam LBFGS Optimizer".split()
SIZES = {  # kept small: the remainder of a number by three, times this
    "model.vector_size": 1,
    "model.window": 1,
    "model.negative": 1,
    "model.negative_pool": 8,
    "train.epochs": 1,
    "train.batch_size": 16,
}
TYPES = {
    f"{section.name}.{key}": hint
    for section in fields(Config)
    for key, hint in get_type_hints(section.default_factory).items()
}
few_examples = tried(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck))

anything = st.one_of(
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.booleans(),
    st.none(),
    st.lists(st.integers(), max_size=3),
)
OF_TYPE = {bool: st.booleans(), int: st.integers(0, 6), float: st.floats(0, 1)}
keys = st.sampled_from(
    [*TYPES] * 4
    + ["model.windoww", "x", "optimizer.args.betas", "optimizer.args.x", "model", "=", ""]
)


@st.composite
def assignment(draw):
    """A key and a value, which may suit it."""
    key = draw(keys)
    choices = (
        OPTIMIZERS
        if key == "optimizer.name"
        else [choice for choice in get_args(TYPES.get(key)) if isinstance(choice, str)]
    )
    suiting = st.sampled_from(choices) if choices else OF_TYPE.get(TYPES.get(key), anything)
    value = draw(st.one_of(suiting, suiting, suiting, anything))
    return key, value % 3 * SIZES[key] if key in SIZES and isinstance(value, int) else value


assignments = st.lists(assignment(), max_size=4)


@pytest.fixture
def program(programs, tmp_path):
    """Runs a program that works in `tmp_path`; checks how it ends, and that nothing half-written is left."""

    def run(*arguments, name="train"):
        status, said = programs.run(*arguments, program=name)
        errors = [line.startswith("error: ") for line in said.split("\n")[:-1]]
        assert status in (0, 2, 3) and "Traceback" not in said, said
        assert errors.count(True) == (status != 0) and (status == 0 or errors[-1]), said
        assert not [path for path in tmp_path.rglob(".*") if path.name != ".lock"]
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        return status

    return run


@pytest.fixture(scope="module")
def finished(programs, tmp_path_factory):
    """The folder of a run that is done."""
    folder = tmp_path_factory.mktemp("done")
    assert programs.run(*arguments_for(folder))[0] == 0
    (run,) = (folder / "runs").iterdir()
    return run


@few_examples
@given(assignments)
def test_any_settings(program, tmp_path, assigned):
    paths, small = (arguments_for(tmp_path)[part] for part in (slice(3), slice(3, None)))
    program(*small, *(f"{key}={value}" for key, value in assigned), *paths, "run.wandb=")


def nested(assigned):
    """As in a YAML file, which may be JSON."""
    sections = {key.partition(".")[0]: {} for key, _ in assigned}
    for key, value in assigned:
        sections[key.partition(".")[0]][key.partition(".")[2]] = value
    return sections


yaml_like = st.recursive(
    anything,
    lambda inner: st.dictionaries(st.text(max_size=8) | keys, inner, max_size=3),
    max_leaves=8,
)


@few_examples
@given(
    st.one_of(
        st.binary(max_size=200),
        *(
            values.map(json.dumps).map(str.encode)
            for values in (yaml_like, assignments.map(nested))
        ),
    )
)
def test_any_config_file(program, tmp_path, content):
    (tmp_path / "any.yaml").write_bytes(content)
    program(tmp_path / "any.yaml", *arguments_for(tmp_path))


@few_examples
@given(
    st.binary(max_size=300),
    st.sampled_from(["txt", "gz", "xz", "bz2", "zst", "xml"]),
    st.booleans(),
)
def test_any_corpus(program, tmp_path, content, ending, text_first):
    paths = arguments_for(tmp_path)[1:]
    corpus = tmp_path / f"corpus.{ending}"
    corpus.write_bytes(TEXT.encode() * text_first + content)
    program(f"corpus.path={corpus}", *paths)


@few_examples
@given(
    st.binary(max_size=300) | st.integers(0, 10_000),
    st.sampled_from(["kv", "bin", "txt", "vec"]),
    st.sampled_from(
        [
            ["score"],
            ["nn", "a"],
            ["analogies", "a", "-", "b", "+", "c"],
            ["export", "--bin", "--safetensors", "--to", "out"],
        ]
    ),
)
def test_any_vectors(program, finished, tmp_path, content, ending, command):
    """Random bytes, or a run's own with one of them another."""
    file = tmp_path / f"any.{ending}"
    if isinstance(content, int):
        own = bytearray((finished / f"vectors.{'kv' if ending == 'kv' else 'bin'}").read_bytes())
        own[content % len(own)] ^= 1 << content % 8
        content = bytes(own)
    file.write_bytes(content)
    name, *rest = command
    program(name, file, *rest, name="evaluate")


@few_examples
@given(st.binary(max_size=200), st.integers(0, 10_000), st.integers(0, 10_000), st.booleans())
def test_any_run_folder(program, finished, tmp_path, content, number, at, replaced):
    """One that goes on with a file of its own that has other bytes, or one of whose checkpoint's files does."""
    run = tmp_path / "runs" / "any"
    shutil.copytree(finished, run)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    file = files[number % len(files)]
    whole = file.read_bytes()
    at %= len(whole) + 1
    file.write_bytes(content if replaced else whole[:at] + content + whole[at + len(content) :])
    damaged = file.read_bytes() != whole and file.parent.parent.name == "checkpoints"
    status = program("--resume", run, "train.epochs=2")
    assert status == 2 or not damaged
