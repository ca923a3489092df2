"""Settings: what files and arguments give, and the words of every refusal."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from w2v.config import (
    FOREIGN_NAMES,
    Config,
    ConfigError,
    config_changes,
    config_keys,
    describe_config,
    flat_config,
    load_config,
    save_config,
)

CLI = "(from the command line)"


def refusal(*assignments: str, files: tuple[Path, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(files, assignments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def yaml_file(folder: Path, text: str, name: str = "a.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_nothing_told_gives_the_defaults() -> None:
    assert load_config() == Config()


def test_later_wins_and_other_keys_stay(tmp_path: Path) -> None:
    first = yaml_file(tmp_path, "model: {window: 3, negative: 7}\n")
    second = yaml_file(tmp_path, "model:\n  window: 4\nmodel.sample: 0\n", "b.yaml")
    assert load_config([first, second]).model == dataclasses.replace(
        Config().model, window=4, negative=7, sample=0.0
    )
    assert load_config([second, first]).model.window == 3
    assert load_config([first], ["model.window=8", "model.window=9"]).model.window == 9


def test_optimizer_args_are_free_and_replaced_whole(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "optimizer: {name: Adam, args: {betas: [0.5, 0.99]}}\n")
    assert load_config([path], ["optimizer.args.eps=1e-8"]).optimizer.args == {
        "betas": [0.5, 0.99],
        "eps": 1e-8,
    }
    assert load_config([path], ["optimizer.args={momentum: 0.9}"]).optimizer.args == {
        "momentum": 0.9
    }
    assert load_config([path], ["optimizer.args={}"]).optimizer.args == {}


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.e-4", "0.0001"])
def test_a_learning_rate_is_a_float_in_any_spelling(tmp_path: Path, text: str) -> None:
    path = yaml_file(tmp_path, f"optimizer:\n  lr: {text}\n")
    for lr in (
        load_config([path]).optimizer.lr,
        load_config([], [f"optimizer.lr={text}"]).optimizer.lr,
    ):
        assert type(lr) is float
        assert lr == 1e-4


@pytest.mark.parametrize(
    "text", ["007", "2026-11-20", "on", "null", "", "a: b #c", "[x].txt", "x=y", "1e3", "@x"]
)
def test_text_is_taken_from_the_command_line_as_it_stands(text: str) -> None:
    assert load_config([], [f"run.name={text}"]).run.name == text


def test_values_are_converted_to_the_type_of_the_key(tmp_path: Path) -> None:
    told = [
        "vocab.max_final_vocab=null",
        "train.deterministic=yes",
        "optimizer.lr=1",
        "run.name='a'",
        "model.window=${model.negative}",
    ]
    config = load_config([], told)
    assert config.vocab.max_final_vocab is None
    assert config.train.deterministic is True
    assert type(config.optimizer.lr) is float
    assert config.run.name == "a"
    assert config.model.window == 5
    assert (
        load_config([yaml_file(tmp_path, "model:\n  # window: 3\ntrain:\n")]) == Config()
    )  # a section whose keys are commented out


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("optimizer.lr=abc", f"optimizer.lr=abc {CLI} is not a number"),
        ("optimizer.lr=1" + "0" * 400, f"optimizer.lr=1{'0' * 76}... {CLI} is not a number"),
        ("model.window=few", f"model.window=few {CLI} is not a whole number"),
        ("model.window=null", f"model.window=null {CLI} is not a whole number"),
        ("model.window=true", f"model.window=true {CLI} is not a whole number"),
        ("model.window={a: 1}", f"model.window={{'a': 1}} {CLI} is not a whole number"),
        ("train.epochs=1e1", f"train.epochs=10.0 {CLI} is not a whole number; write 10"),
        ("train.epochs=???", f"train.epochs=??? {CLI} is not a whole number"),
        ("run.name=???", f"run.name=??? {CLI} is not text"),
        ("run.name=\udcff", f"run.name=\udcff {CLI} is not text"),
        (
            "vocab.max_final_vocab=many",
            f"vocab.max_final_vocab=many {CLI} is not a whole number or null",
        ),
        ("train.deterministic=maybe", f"train.deterministic=maybe {CLI} is not true or false"),
        ("train.deterministic=7", f"train.deterministic=7 {CLI} is not true or false"),
        (
            "transfer.engine=map",
            f"transfer.engine=map {CLI} is not one of auto, resident, mapped, staged; did you mean mapped?",
        ),
        ("train.device=null", f"train.device=null {CLI} is not one of auto, cpu, cuda"),
        (
            "optimizer.args=3",
            f"optimizer.args=3 {CLI} is not a mapping such as {{betas: [0.5, 0.99]}}",
        ),
        (
            "optimizer.args={1: 2}",
            f"optimizer.args={{1: 2}} {CLI} is not a mapping such as {{betas: [0.5, 0.99]}}",
        ),
        ("optimizer.args.eps=???", f"optimizer.args.eps=??? {CLI} is not a plain YAML value"),
        (
            "corpus.path=${",
            f"corpus.path=${{ {CLI} is not a valid ${{...}}: no viable alternative at input '${{'",
        ),
        ("model=3", f"model=3 {CLI}: 'model' is a section; write model.<key>, see --help-config"),
        (
            "train=x.txt",
            f"train=x.txt {CLI}: 'train' is a section; write train.<key> or corpus.path, see --help-config",
        ),
        ("foo", "'foo' is neither an existing .yaml file nor section.key=value; see --help-config"),
        ("=3", "'=3' is neither an existing .yaml file nor section.key=value; see --help-config"),
    ],
)
def test_wrong_values_are_named_with_what_is_expected(assignment: str, words: str) -> None:
    assert refusal(assignment) == words


@pytest.mark.parametrize(
    ("assignment", "start"),
    [
        ("model.window=[", f"model.window=[ {CLI} cannot be read as YAML: "),
        ("model.window=${nope}", "model.window: Interpolation key 'nope' not found; "),
        ("model.window=${model.window}", "model.window: Recursive interpolation detected; "),
        (
            "optimizer.lr=${run.name}",
            "optimizer.lr: While dereferencing interpolation '${run.name}': ",
        ),
        ("optimizer.args.eps=${nope}", "optimizer.args.eps: Interpolation key 'nope' not found; "),
    ],
)
def test_yaml_and_interpolation_errors_name_the_key(assignment: str, start: str) -> None:
    assert refusal(assignment).startswith(start)


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("model.window=0", "at least 1"),
        ("model.vector_size=0", "at least 1"),
        ("model.negative_pool=-1", "0 or more"),
        ("model.negative_pool_steps=0", "at least 1"),
        ("model.negative_pool_steps=8", "1, or a pool to share: model.negative_pool=65536"),
        ("model.negative=0", "at least 1 (skip-gram here learns from negatives only)"),
        ("model.sample=1.0", "from 0 to below 1"),
        ("model.ns_exponent=nan", "a finite number"),
        ("optimizer.lr=inf", "a number above 0"),
        ("optimizer.lr=0.0", "a number above 0"),
        ("optimizer.warmup=1.0", "from 0 to below 1"),
        ("train.epochs=0", "at least 1"),
        ("optimizer.min_lr=0.5", "from 0 to optimizer.lr=0.4"),
        ("train.batch_size=0", "at least 1"),
        ("train.seed=-1", "from 0 to 2**63 - 1"),
        ("run.log_seconds=0.0", "above 0"),
        ("vocab.min_count=0", "at least 1"),
        ("vocab.max_final_vocab=1", "null or at least 2"),
        ("corpus.max_sentence_length=1", "at least 2"),
    ],
)
def test_impossible_values_are_named_with_the_range(assignment: str, words: str) -> None:
    assert refusal(assignment) == f"{assignment} is out of range; it must be {words}"


@pytest.mark.parametrize(
    ("unknown", "suggested"),
    [
        ("modle.window", "'model.window'"),
        ("model.windw", "'model.window'"),
        ("window", "'model.window'"),
        ("Window", "'model.window'"),
        ("optimzer.lr", "'optimizer.lr'"),
        ("optimizer.lrr", "'optimizer.lr'"),
        ("model.epochs", "'train.epochs'"),
        ("runs.name", "'run.name'"),
        ("optimiser.name", "'optimizer.name'"),
        ("--model.window", "'model.window'"),
        ("min-count", "'vocab.min_count'"),
        ("modle", "the section 'model'"),
        ("optimizer.foreach", "'optimizer.args.foreach'"),
        ("model.size", "'model.vector_size'"),
        *((name, f"'{key}'") for name, key in FOREIGN_NAMES.items() if name != "train"),
    ],
)
def test_unknown_keys_come_with_the_nearest(unknown: str, suggested: str) -> None:
    assert refusal(f"{unknown}=3") == f"unknown key {unknown!r} {CLI}; did you mean {suggested}?"


@pytest.mark.parametrize("unknown", ["model.dropout", "optimizer.args.a.b", "a b"])
def test_a_key_like_no_other_points_to_the_list(unknown: str) -> None:
    assert refusal(f"{unknown}=0.1") == f"unknown key {unknown!r} {CLI}; see --help-config"


def test_every_suggestion_for_a_foreign_name_is_a_key() -> None:
    assert {key for key in FOREIGN_NAMES.values() if not key.startswith("optimizer.args.")} <= set(
        config_keys()
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "model:\n  windw: 3\n",
            "unknown key 'model.windw' (from {path}); did you mean 'model.window'?",
        ),
        (
            "modle: {window: 3}\n",
            "unknown key 'modle.window' (from {path}); did you mean 'model.window'?",
        ),
        ("modle:\n", "unknown key 'modle' (from {path}); did you mean the section 'model'?"),
        ("window: 3\n", "unknown key 'window' (from {path}); did you mean 'model.window'?"),
        ('"a\\nb": 3\n', "unknown key 'a\\nb' (from {path}); see --help-config"),
        (
            "model: 3\n",
            "model=3 (from {path}): 'model' is a section; write model.<key>, see --help-config",
        ),
        ("optimizer:\n  lr: |\n    a\n    b\n", "optimizer.lr=a b (from {path}) is not a number"),
        ("train:\n  seed: ???\n", "train.seed=??? (from {path}) is not a whole number"),
        (
            "- 1\n",
            "config file {path} must hold sections such as 'model:' with keys below them; see --help-config",
        ),
    ],
)
def test_errors_in_a_file_name_the_file(tmp_path: Path, text: str, words: str) -> None:
    path = yaml_file(tmp_path, text)
    assert refusal(files=(path,)) == words.format(path=path)


@pytest.mark.parametrize(
    "content",
    [
        b"model: {window: 3",
        b"\xff\xfe\xfa",
        b"3",
        b"run: {name: a}\nrun: {name: b}\n",
        b"a: !!timestamp 2026-99-99",
        b"a: ${\n",
    ],
)
def test_files_that_are_not_yaml_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    assert refusal(files=(path,)).startswith(f"config file {path} cannot be read as YAML: ")


def test_a_missing_file_comes_with_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = yaml_file(tmp_path, "", "default.yaml")
    missing = tmp_path / "defualt.yaml"
    assert (
        refusal(files=(missing,)) == f"config file {missing} does not exist; did you mean {near}?"
    )
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    remedy = "name a .yaml file, or set a key with section.key=value"
    assert (
        refusal(files=(Path("nowhere.yaml"),))
        == f"config file nowhere.yaml does not exist; {remedy}"
    )


def test_saved_settings_load_back(tmp_path: Path) -> None:
    config = load_config(
        [],
        [
            "optimizer.args.betas=[0.5, 0.99]",
            "optimizer.lr=1e-7",
            "run.name=é: 'x' #1",
            "model.window=${model.negative}",
        ],
    )
    save_config(config, tmp_path / "config.yaml")
    assert load_config([tmp_path / "config.yaml"]) == config
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert "${" not in (tmp_path / "config.yaml").read_text(encoding="utf-8")


def test_the_described_defaults_load_back_and_every_key_has_a_sentence(tmp_path: Path) -> None:
    text = describe_config()
    assert load_config([yaml_file(tmp_path, text)]) == Config()
    assert re.findall(r"^  # .+\.\n  (\w+): .+$", text, flags=re.MULTILINE) == [
        name.partition(".")[2] for name in config_keys()
    ]
    assert "One of: auto, resident, mapped, staged." in text


def test_settings_are_frozen() -> None:
    config = load_config([], ["model.window=3"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.window = 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model = Config().model


def test_importing_needs_no_heavy_module() -> None:
    code = "import sys, w2v.config; w2v.config.load_config(); print(*sorted({'torch', 'numpy', 'gensim', 'cupy'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == "\n"


any_text = (
    st.text(max_size=12)
    | st.text("${}[].:-,?!&*#'\"e0123 \n", max_size=8)
    | st.integers().map(str)
    | st.floats().map(str)
)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*config_keys(), "optimizer.args.x", "model", ""]) | any_text, any_text
        ),
        max_size=3,
    )
)
@example([("model.window", "!!timestamp 2026-99-99")])
@example([("model.window", "9" * 5000)])
@example([("optimizer.args.x", "!!set {1}")])
@example([("optimizer.args.x", "!!binary aGk=")])
@example([("optimizer.args.x", "&a [*a]")])
@example([("model.window", "&a [*a]")])
@example([("optimizer.args", "${optimizer}")])
def test_any_assignment_is_taken_or_refused_in_one_line(pairs: list[tuple[str, str]]) -> None:
    try:
        config = load_config([], [f"{name}={value}" for name, value in pairs])
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert isinstance(config, Config)


def test_a_key_that_an_older_program_did_not_know_had_its_default() -> None:
    old, new = (flat_config(load_config([], ["model.negative_pool=64"])) for _ in range(2))
    del old["model.negative_pool_steps"]
    assert config_changes(old, new) == {}
    new["model.negative_pool_steps"] = 8
    assert config_changes(old, new) == {
        "model.negative_pool_steps": "model.negative_pool_steps=8 instead of 1"
    }
