"""Config files, section.key=value, and errors with a remedy."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.each_case import each_case
from w2v.config import (
    AUTO,
    FOREIGN_NAMES,
    TYPES,
    Config,
    ConfigError,
    TransferConfig,
    config_changes,
    describe_config,
    flat_config,
    load_config,
    save_config,
)

CLI = "(from the command line)"


def config_error(*assignments, files=()):
    with pytest.raises(ConfigError) as caught:
        load_config(files, assignments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a YAML file."""

    def write_file(text, name="a.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def test_default_config():
    assert load_config() == Config()


def test_later_value_wins_and_other_keys_stay(write):
    first = write("model: {window: 3, negative: 7}\n")
    second = write("model:\n  window: 4\nmodel.sample: 0\n", "b.yaml")
    expected = dataclasses.replace(Config().model, window=4, negative=7, sample=0.0)
    assert load_config([first, second]).model == expected
    assert load_config([second, first]).model.window == 3
    assert load_config([first], ["model.window=8", "model.window=9"]).model.window == 9


@each_case(
    ("assignment", "args"),
    [
        ("optimizer.args.eps=1e-8", {"betas": [0.5, 0.99], "eps": 1e-8}),
        ("optimizer.args={momentum: 0.9}", {"momentum": 0.9}),
        ("optimizer.args={}", {}),
    ],
)
def test_optimizer_args_are_set_one_by_one_or_replaced(write, assignment, args):
    path = write("optimizer: {name: Adam, args: {betas: [0.5, 0.99]}}\n")
    assert load_config([path], [assignment]).optimizer.args == args


@each_case("value", ["010", "1:30", "nan", "maybe", "[0.9, 010]", "!!int 010"])
def test_optimizers_of_torch_take_no_text(write, value):
    path = write(f"optimizer: {{name: Adam, args: {{eps: {value}}}}}\n")
    assert "torch takes no text" in config_error(files=[path])
    assert "torch takes no text" in config_error(f"optimizer.args.eps={value}")
    own = ["optimizer.name=my.Own", "optimizer.lr=1", "optimizer.args.mode=maybe"]
    assert load_config([], own).optimizer.args == {"mode": "maybe"}


@each_case("text", ["1e-4", "1E-4", "1.e-4", "0.0001"])
def test_float_in_any_spelling(write, text):
    from_file = load_config([write(f"optimizer:\n  lr: {text}\n")])
    from_argument = load_config([], [f"optimizer.lr={text}"])
    assert repr(from_file.optimizer.lr) == repr(from_argument.optimizer.lr) == "0.0001"


@each_case(
    "text", ["007", "2026-11-20", "on", "null", "", "a: b #c", "[x].txt", "x=y", "1e3", "@x"]
)
def test_text_on_the_command_line_is_not_parsed(text):
    assert load_config([], [f"run.name={text}"]).run.name == text


@pytest.mark.parametrize("key", ["run.dir", "transfer.table_dir"])
def test_home_is_expanded_in_folders(key, monkeypatch, write):
    monkeypatch.setenv("HOME", "/home/one")
    assert flat_config(load_config([], [f"{key}=~/x"]))[key] == "/home/one/x"
    assert flat_config(load_config([], [f"{key}=x~"]))[key] == "x~"
    assert "is not text" in config_error(files=[write(f"{key}: null\n")])  # no folder "None"


def test_values_are_converted_to_the_type_of_the_key():
    config = load_config(
        [],
        ["vocab.max_final_vocab=null", "train.deterministic=yes", "optimizer.lr=1", "run.name='a'"],
    )
    assert config.vocab.max_final_vocab is None
    assert config.train.deterministic is True
    assert type(config.optimizer.lr) is float
    assert config.run.name == "a"


def test_section_without_keys_changes_nothing(write):
    assert load_config([write("model:\n  # window: 3\ntrain:\n")]) == Config()


@each_case(
    ("assignment", "expected"),
    [
        ("optimizer.lr=abc", "a number or auto"),
        ("optimizer.lr=inf", "a number or auto"),
        ("model.ns_exponent=nan", "a number"),
        ("model.window=few", "a whole number"),
        ("model.window=null", "a whole number"),
        ("model.window=true", "a whole number"),
        ("train.epochs=???", "a whole number"),
        ("run.name=\udcff", "text"),
        ("train.epochs=1:30", "a whole number"),
        ("vocab.min_count=010", "a whole number; write 10"),
        ("train.epochs=1e1", "a whole number; write 10"),
        ("optimizer.lr=010", "a number or auto; write 10"),
        ("optimizer.lr=1:30", "a number or auto"),
        ("train.batch_size=0x10", "a whole number or auto"),
        ("vocab.max_final_vocab=many", "a whole number or null"),
        ("train.deterministic=maybe", "true or false"),
        ("train.deterministic=2", "true or false"),
        ("train.device=null", "one of auto, cpu, cuda"),
        ("transfer.engine=map", "one of auto, resident, mapped, staged; did you mean mapped?"),
        ("optimizer.args=3", "a mapping such as {betas: [0.5, 0.99]}"),
    ],
)
def test_wrong_type_is_named_with_what_is_expected(assignment, expected):
    assert config_error(assignment) == f"{assignment} {CLI} is not {expected}"


@each_case(
    ("assignment", "start"),
    [
        ("optimizer.lr=1" + "0" * 400, "optimizer.lr=inf is out of range"),
        ("optimizer.args={1: 2}", "optimizer.args={'1': 2} is out of range; it must be names"),
        ("optimizer.args.eps=!!binary aGk=", f"optimizer.args.eps=b'hi' {CLI} is not a plain YAML"),
        ("model.window={a: 1}", f"model.window={{'a': '1'}} {CLI} is not a whole number"),
        ("model.window=[", f"model.window=[ {CLI} cannot be read as YAML: "),
        (
            "model.window=${model.negative}",
            f"model.window=${{model.negative}} {CLI} is not a whole",
        ),
        ("model=3", f"model=3 {CLI}: 'model' is a section; write model.<key>"),
        ("train=x", f"train=x {CLI}: 'train' is a section; write train.<key>"),
        ("foo", "'foo' is not section.key=value, without spaces"),
        ("=3", "'=3' is not section.key=value, without spaces"),
    ],
)
def test_unusable_assignment_is_named(assignment, start):
    assert config_error(assignment).startswith(start)


@each_case(
    ("assignments", "must_be"),
    [
        ("model.negative_pool=0 model.negative_pool_steps=8", "1 without a pool to share"),
        ("optimizer.lr=0.4 optimizer.min_lr=0.5", "from 0 to optimizer.lr=0.4"),
    ],
)
def test_value_that_does_not_suit_another_is_refused(assignments, must_be):
    *_, last = assignments.split()
    message = f"{last} is out of range; it must be {must_be}"
    assert config_error(*assignments.split()).startswith(message)


@each_case("key", list(AUTO))
def test_auto_is_kept_and_written_as_such(key, tmp_path):
    config = load_config([], [f"{key}=auto"])
    assert flat_config(config)[key] == "auto"
    save_config(config, tmp_path / "c.yaml")
    assert (
        "auto" in (tmp_path / "c.yaml").read_text() and load_config([tmp_path / "c.yaml"]) == config
    )
    value = 0.5 if key == "model.sample" else 3
    chosen = load_config([tmp_path / "c.yaml"], [f"{key}={value}"])
    assert flat_config(chosen)[key] == value


@each_case(
    ("assignment", "must_be"),
    [
        ("model.window=0", "at least 1"),
        ("model.vector_size=0", "at least 1"),
        ("model.negative_pool=-1", "at least 0 or auto"),
        ("model.negative_pool_steps=0", "at least 1"),
        ("model.negative=0", "at least 1"),
        ("model.sample=1.0", "at least 0 and below 1"),
        ("optimizer.lr=0.0", "above 0"),
        ("optimizer.warmup=1.0", "at least 0 and below 1"),
        ("train.epochs=0", "at least 1"),
        ("train.batch_size=0", "at least 1"),
        ("train.seed=-1", f"at least 0 and below {2**63}"),
        ("run.log_seconds=0.0", "above 0"),
        ("run.name='a/b'", "without slashes, as the folder is created in run.dir"),
        ("vocab.min_count=0", "at least 1"),
        ("vocab.max_final_vocab=1", "at least 2"),
        ("corpus.max_sentence_length=1", "at least 2"),
        ("transfer.gpu_bytes=2 XB", "auto, 0, a size such as 20GiB, or a share of the tables"),
    ],
)
def test_value_out_of_range_is_named_with_the_range(assignment, must_be):
    message = f"{assignment} is out of range; it must be {must_be}"
    assert config_error(assignment).startswith(message)


@each_case(
    ("text", "nbytes"),
    [("auto", None), ("0", 0), ("20", 20), ("20MB", 20_000_000), ("1.5 KiB", 1536), ("50%", 512)],
)
def test_gpu_bytes_of_a_table_of_1024_bytes(text, nbytes):
    assert TransferConfig(gpu_bytes=text).gpu_bytes_of(1024) == nbytes


@each_case(
    ("unknown", "suggested"),
    [
        ("modle.window", "'model.window'"),
        ("model.windw", "'model.window'"),
        ("window", "'model.window'"),
        ("Window", "'model.window'"),
        ("optimzer.lr", "'optimizer.lr'"),
        ("optimizer.lrr", "'optimizer.lr'"),
        ("model.epochs", "'train.epochs'"),
        ("optimizer.epochs", "'train.epochs'"),
        ("runs.name", "'run.name'"),
        ("optimiser.name", "'optimizer.name'"),
        ("--model.window", "'model.window'"),
        ("epoch", "'train.epochs'"),
        ("min-count", "'vocab.min_count'"),
        ("minCount", "'vocab.min_count'"),
        ("modle", "the section 'model'"),
        ("optimizer.foreach", "'optimizer.args.foreach'"),
        ("model.size", "'model.vector_size'"),
    ],
)
def test_unknown_key_comes_with_the_nearest(unknown, suggested):
    assert (
        config_error(f"{unknown}=3") == f"unknown key {unknown!r} {CLI}; did you mean {suggested}?"
    )


@each_case("unknown", ["model.softplus", "optimizer.args.a.b", "a b"])
def test_unknown_key_like_no_other_points_to_the_list(unknown):
    assert config_error(f"{unknown}=0.1") == f"unknown key {unknown!r} {CLI}; see --help-config"


def test_integers_beyond_the_kernels_are_refused():
    refused = set()
    for name, value in flat_config(load_config([], [])).items():
        if type(value) is int or name in ("vocab.max_final_vocab", "train.batch_size"):
            with pytest.raises(ConfigError, match=f"{name}={2**70} is out of range.* below"):
                load_config([], [f"{name}={2**70}"])
            refused.add(name)
    assert refused >= {"model.window", "model.vector_size", "train.epochs", "vocab.min_count"}


def test_foreign_names_lead_to_keys():
    for key, foreign_names in FOREIGN_NAMES.items():
        assert key in TYPES or key.startswith("optimizer.args.")
        for name in foreign_names:
            assert f"did you mean '{key}'?" in config_error(f"{name}=3")


@each_case(
    ("text", "start"),
    [
        ("model:\n  windw: 3\n", "unknown key 'model.windw' (from {path}); did you mean"),
        ("modle: {window: 3}\n", "unknown key 'modle.window' (from {path}); did you mean"),
        ("modle:\n", "unknown key 'modle' (from {path}); did you mean the section 'model'?"),
        ("window: 3\n", "unknown key 'window' (from {path}); did you mean 'model.window'?"),
        ('"a\\nb": 3\n', "unknown key 'a b' (from {path}); see --help-config"),
        ("model: 3\n", "model=3 (from {path}): 'model' is a section; write model.<key>"),
        ("optimizer:\n  lr: |\n    a\n    b\n", "optimizer.lr=a b (from {path}) is not a number"),
        ("train:\n  seed: ???\n", "train.seed=??? (from {path}) is not a whole number"),
        ("train: {epochs: 010}", "train.epochs=010 (from {path}) is not a whole number; write 10"),
        ("train: {epochs: !!int 010}", "train.epochs=010 (from {path}) is not a whole number"),
        ("vocab.min_count: 1:30", "vocab.min_count=1:30 (from {path}) is not a whole number"),
        ("3", "config file {path} holds no keys; write sections such as 'model:'"),
        ("- 1\n", "config file {path} holds no keys; write sections such as 'model:'"),
        ("", "config file {path} holds no keys; write sections such as 'model:'"),
    ],
)
def test_error_in_a_file_names_the_file(write, text, start):
    path = write(text)
    assert config_error(files=[path]).startswith(start.format(path=path))


@each_case(
    "content",
    [
        b"model: {window: 3",
        b"\xff\xfe\xfa",
        b"run: {name: a}\nrun: {name: b}\n",
        b"a: !!binary x",
        b"train: !!python/name:os.system",
        b"optimizer: {args: &a {x: [*a]}}",
    ],
)
def test_file_that_is_not_yaml_is_refused(tmp_path, content):
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    assert config_error(files=[path]).startswith(f"config file {path} cannot be read as YAML (")


def test_missing_file_comes_with_the_nearest(write, tmp_path):
    near = write("", "default.yaml")
    missing = tmp_path / "defualt.yaml"
    message = f"config file {missing} does not exist; did you mean {near}?"
    assert config_error(files=[missing]) == message
    (tmp_path / "empty").mkdir()
    assert "name a .yaml file" in config_error(files=[tmp_path / "empty" / "nowhere.yaml"])


def test_saved_config_loads_back(tmp_path):
    config = load_config(
        [], ["optimizer.args.betas=[0.5, 0.99]", "optimizer.lr=1e-7", "run.name=é: 'x' #1"]
    )
    save_config(config, tmp_path / "config.yaml")
    assert load_config([tmp_path / "config.yaml"]) == config


def test_described_defaults_load_back_and_every_key_has_a_sentence(write):
    text = describe_config()
    assert load_config([write(text)]) == Config()
    described = re.findall(r"^  # .+\.\n  (\w+): .+$", text, flags=re.MULTILINE)
    assert described == [name.split(".")[1] for name in TYPES]
    assert "One of: auto, resident, mapped, staged." in text


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config([], ["model.window=3"]).model.window = 4


def test_config_imports_no_heavy_module():
    heavy = {"torch", "numpy", "gensim", "cupy"}
    code = f"import sys, w2v.config as c; c.load_config(); print({heavy} & {{*sys.modules}})"
    command = [sys.executable, "-c", code]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout == "set()\n"


ANY_TEXT = (
    st.text(max_size=12)
    | st.text("${}[].:-,?!&*#'\"e0123 \n", max_size=8)
    | st.integers().map(str)
    | st.floats().map(str)
)
ANY_KEY = st.sampled_from([*TYPES, "optimizer.args.x", "model", ""]) | ANY_TEXT


@given(st.lists(st.tuples(ANY_KEY, ANY_TEXT), max_size=3))
@example([("model.window", "!!timestamp 2026-99-99")])
@example([("model.window", "9" * 5000)])
@example([("optimizer.args.x", "!!set {1}")])
@example([("optimizer.args.x", "!!binary aGk=")])
@example([("optimizer.args.x", "&a [*a]")])
@example([("model.window", "&a [*a]")])
@example([("optimizer.args", "${optimizer}")])
def test_any_assignment_loads_or_is_refused_in_one_line(pairs):
    try:
        config = load_config([], [f"{name}={value}" for name, value in pairs])
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert isinstance(config, Config)


def test_config_changes_take_a_missing_key_for_its_default():
    new = flat_config(load_config([], ["model.negative_pool=64"]))
    old = {name: value for name, value in new.items() if name != "model.negative_pool_steps"}
    assert config_changes(old, new) == {}
    new["model.negative_pool_steps"] = 8
    message = "model.negative_pool_steps=8 instead of 1"
    assert config_changes(old, new) == {"model.negative_pool_steps": message}


@each_case("name", ["adam", "optimizers/adam.yaml", "configs/optimizers/adam.yaml"])
def test_shipped_configs_are_found_by_name_from_anywhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config([name]).optimizer.name == "Adam"


def test_optimizer_name_takes_its_shipped_settings_and_not_the_last_ones(write):
    adamw, sgd = load_config(["adamw"]), load_config(["sgd"])
    assert load_config(["text8"], ["optimizer.name=SGD"]).optimizer == sgd.optimizer
    changed = load_config(["sgd"], ["optimizer.lr=0.5", "optimizer.name=AdamW"])
    assert changed.optimizer == dataclasses.replace(adamw.optimizer, lr=0.5)
    own = write("optimizer: {name: AdamW, lr: 0.5, args: {}}\n")
    assert load_config([own], ["optimizer.name=AdamW"]).optimizer.args == {}


@each_case("setting", "lr=0.2 args.eps=0.5 args={} step=table warmup=0.1".split())
def test_a_setting_without_a_name_is_beside_those_of_the_default_optimizer(write, setting):
    alone = load_config([], [f"optimizer.{setting}"])
    named = load_config([], ["optimizer.name=Adam", f"optimizer.{setting}"])
    assert alone == named != load_config(["adam"])
    file = write("optimizer: {lr: 0.5, args: {eps: 0.5}}\n")
    assert load_config([file, "adam"]).optimizer.lr == 0.5
    rmsprop = load_config(["rmsprop"])
    assert load_config([file, "rmsprop"]) == rmsprop  # the rate was of another optimizer


def test_a_name_of_code_in_a_file_must_be_repeated_on_the_command_line(write):
    theirs = write("optimizer: {name: mine.Opt, lr: 0.1}\n")
    message = config_error("optimizer.lr=0.2", files=["adam", theirs])
    assert f"optimizer.name=mine.Opt (from {theirs})" in message
    assert "add optimizer.name=mine.Opt to the command line" in message
    repeated = load_config([theirs], ["optimizer.name=mine.Opt"]).optimizer
    assert (repeated.name, repeated.lr) == ("mine.Opt", 0.1)
    assert load_config([theirs, "adam"]).optimizer.name == "Adam"
    assert load_config([theirs], trains=False).optimizer.name == "mine.Opt"


def test_numbers_in_optimizer_args_are_decimal():
    text = "{a: 010, b: 1:30, c: 1e-8, d: yes, e: null, f: [1, .5, x]}"
    args = load_config([], ["optimizer.name=mine.X", "optimizer.lr=1", f"optimizer.args={text}"])
    expected = {"a": "010", "b": "1:30", "c": 1e-8, "d": True, "e": None, "f": [1, 0.5, "x"]}
    assert args.optimizer.args == expected


def test_a_class_of_ones_own_needs_a_rate():
    assert "set optimizer.lr too" in config_error("optimizer.name=mine.Adam")
    config = load_config(["adamw"], ["optimizer.name=mine.Adam", "optimizer.lr=0.1"])
    assert (config.optimizer.name, config.optimizer.args) == ("mine.Adam", {})
