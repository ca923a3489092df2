"""Programs take random settings, files and run folders, or say why not.

It does so in one line: no traceback, no hang, only the exit statuses that `--help` names. Each
case is a whole program in a process of its own. `make test-faults` tries 400 of each. Runs that are
stopped at a random step go on to the same bits, whatever their settings: a tenth as many.
"""

import json
import os
import shutil
import signal
from dataclasses import fields
from typing import get_args, get_type_hints

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as tried
from hypothesis import strategies as st

import train
from tests.support.tiny import TEXT, tiny_arguments, tiny_paths, tiny_settings
from w2v.config import OPTIMIZERS as SUPPORTED
from w2v.config import Config
from w2v.word2vec.step import TrainingStep

CASES = int(os.environ.get("W2V_CASES", "6"))  # of each property
OPTIMIZERS = "Adam Adamax RMSprop SGD Adagrad NAdam Rprop SparseAdam LBFGS Optimizer".split()
SIZES = {  # kept small: a number modulo three, times this
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
UNKNOWN = ["model.windoww", "x", "optimizer.args.betas", "optimizer.args.x", "model", "=", ""]
keys = st.sampled_from([*TYPES] * 4 + UNKNOWN)


@st.composite
def assignment(draw):
    """Draw a key and a value, which is of the key's type more often than not."""
    key = draw(keys)
    choices = [choice for choice in get_args(TYPES.get(key)) if isinstance(choice, str)]
    if key == "optimizer.name":
        choices = OPTIMIZERS
    fitting = st.sampled_from(choices) if choices else OF_TYPE.get(TYPES.get(key), anything)
    value = draw(st.one_of(fitting, fitting, fitting, anything))
    if key in SIZES and isinstance(value, int):
        value = value % 3 * SIZES[key]
    return key, value


assignments = st.lists(assignment(), max_size=4)


@pytest.fixture
def program(programs, tmp_path):
    """Run a program; check its end, and that no temporary file is left."""

    def run(*arguments, name="train"):
        status, output = programs.run(*arguments, program=name)
        errors = [line.startswith("error: ") for line in output.split("\n")[:-1]]
        assert status in (0, 2, 3) and "Traceback" not in output, output
        assert errors.count(True) == (status != 0) and (status == 0 or errors[-1]), output
        assert not [path for path in tmp_path.rglob(".*") if path.name != ".lock"]
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        return status

    return run


@few_examples
@given(assignments)
def test_any_settings(program, tmp_path, assigned):
    changes = [f"{key}={value}" for key, value in assigned]
    program(*tiny_settings(), *changes, *tiny_paths(tmp_path), "run.wandb=")


def nested(assigned):
    """Return the assignments as a config file has them."""
    sections = {}
    for name, value in assigned:
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    return sections


yaml_like = st.recursive(
    anything,
    lambda inner: st.dictionaries(st.text(max_size=8) | keys, inner, max_size=3),
    max_leaves=8,
)
config_files = st.one_of(yaml_like, assignments.map(nested)).map(json.dumps).map(str.encode)


@few_examples
@given(st.binary(max_size=200) | config_files)
def test_any_config_file(program, tmp_path, content):
    (tmp_path / "any.yaml").write_bytes(content)
    program(tmp_path / "any.yaml", *tiny_arguments(tmp_path))


ENDINGS = ["txt", "xml", "json", "jsonl", "csv", "tsv"]
FIRST_BYTES = [
    b"",
    TEXT.encode(),
    b"\x1f\x8b\x08",
    b"\xfd7zXZ\0",
    b"BZh91AY&SY",
    b"\x28\xb5\x2f\xfd",
]
FIRST_BYTES += [
    b"\xff\xfe",
    b"PAR1",
    b"ARROW1\0\0",
    b"\xff\xff\xff\xff\1\0\0\0",
    b"id,text\n1,",
    b"<p>",
]
FIRST_BYTES += [
    b'{"text": "',
    b'[{"text": "',
    b'["',
    b'{"text": ["a", ',
    b"text\tid\n",
    b"<mediawiki",
]


@few_examples
@given(st.sampled_from(FIRST_BYTES), st.binary(max_size=300), st.sampled_from(ENDINGS))
def test_any_corpus(program, tmp_path, first, content, ending):
    arguments = tiny_arguments(tmp_path)
    corpus = tmp_path / f"corpus.{ending}"
    corpus.write_bytes(first + content)
    program(*arguments, f"corpus.path={corpus}")


COMMANDS = [
    ["score"],
    ["nn", "a"],
    ["analogies", "a", "-", "b", "+", "c"],
    ["export", "--bin", "--safetensors", "--to", "out"],
]


@few_examples
@given(
    st.binary(max_size=300) | st.integers(0, 10_000),
    st.sampled_from(["kv", "bin", "txt", "vec"]),
    st.sampled_from(COMMANDS),
)
def test_any_vectors(program, tiny_run, tmp_path, content, ending, command):
    """Try random bytes, and vectors of a run with one bit flipped."""
    file = tmp_path / f"any.{ending}"
    if isinstance(content, int):
        own = bytearray((tiny_run / f"vectors.{'kv' if ending == 'kv' else 'bin'}").read_bytes())
        own[content % len(own)] ^= 1 << content % 8
        content = bytes(own)
    file.write_bytes(content)
    name, *rest = command
    program(name, file, *rest, name="evaluate")


@few_examples
@given(st.binary(max_size=200), st.integers(0, 10_000), st.integers(0, 10_000), st.booleans())
def test_any_run_folder(program, tiny_run, tmp_path, content, number, at, replaced):
    """Resume a run with random bytes in one of its files, or in place of it."""
    run = tmp_path / "runs" / "any"
    shutil.copytree(tiny_run, run)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    file = files[number % len(files)]
    whole = file.read_bytes()
    at %= len(whole) + 1
    file.write_bytes(content if replaced else whole[:at] + content + whole[at + len(content) :])
    damaged = file.read_bytes() != whole and file.parent.parent.name == "checkpoints"
    status = program("--resume", run, "train.epochs=2")
    assert status == 2 or not damaged


TRAINED = {  # most of their combinations can train
    "optimizer.name": SUPPORTED,
    "optimizer.step": ["table", "table", "auto"],
    "optimizer.occurrence_cap": [0, 2, "auto"],
    "optimizer.schedule": ["constant", "linear", "cosine"],
    "optimizer.warmup": [0, 0.3],
    "model.shrink_windows": ["true", "true", "false"],
    "model.window": [1, 5],
    "model.negative": [1, 5],
    "model.negative_pool": ["auto", 0, 8],
    "model.sample": [0, 0.1],
    "train.batch_size": [7, 16, 50, "auto"],
    "train.block_words": ["auto", 0, 1, 7, 1000],
    "train.epochs": [1, 2],
    "train.held_out_words": [0, 50],
    "train.precision": ["float32", "float32", "amp", "bf16"],
}
MODELS = ["model.shrink_by=weigh", "model.shrink_by=draw", "model.architecture=cbow"]
MODELS += ["model.hs=true", "train.kernels=reference model.shrink_by=weigh"]


class Steps:
    """Counts the steps of runs, and stops a run in one of them by SIGTERM."""

    def __init__(self, monkeypatch):
        self.number = self.stop = 0
        step = TrainingStep.__call__

        def counted(*arguments):
            self.number += 1
            if self.number == self.stop:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(*arguments)

        monkeypatch.setattr(TrainingStep, "__call__", counted)

    def train(self, *arguments, stop=0):
        """Return exit status and number of steps of a run."""
        self.number, self.stop = 0, stop
        try:
            return train.main(list(map(str, arguments))), self.number
        except SystemExit as ended:
            return ended.code, self.number


@tried(few_examples, max_examples=max(2, CASES // 10))
@given(
    st.fixed_dictionaries({key: st.sampled_from(values) for key, values in TRAINED.items()}),
    st.sampled_from(MODELS),
    st.randoms(use_true_random=False),
)
def test_any_run_goes_on_to_the_same_bits(tmp_path, monkeypatch, one_thread, drawn, model, rng):
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)  # of the example before
    with monkeypatch.context() as patched:
        steps = Steps(patched)
        lines = (" ".join(rng.choices("abcdefghijkl", k=rng.choice((1, 3, 30)))) for _ in range(40))
        arguments = [*tiny_paths(tmp_path, "\n".join(lines)), *tiny_settings(), *model.split()]
        arguments += [f"{key}={value}" for key, value in drawn.items()]
        status, number = steps.train(*arguments, "run.name=whole")
        assume(status == 0 and number)
        stops = sorted(rng.choices(range(1, number + 1), k=2))
        assert steps.train(*arguments, "run.name=part", stop=stops[0])[0] == 143
        [whole], [part] = ((tmp_path / "runs").glob(f"*-{name}") for name in ("whole", "part"))
        if stops[1] > stops[0]:
            assert steps.train("--resume", part, stop=stops[1] - stops[0])[0] == 143
        assert steps.train("--resume", part)[0] == 0
        assert (part / "vectors.bin").read_bytes() == (whole / "vectors.bin").read_bytes()
