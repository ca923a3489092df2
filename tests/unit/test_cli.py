"""The command line: mistakes and their remedies, help, names, completion."""

import errno
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import w2v
from tests.support.each_case import each_case
from w2v.api import cli, compare, train
from w2v.config import ConfigError, load_config
from w2v.text.sources import require_source

ROOT = Path(__file__).parents[2]

# What one types, and key words of the answer.
MISTAKES = [
    # The command.
    ("trian my.txt", "'trian' is not a command .* did you mean w2v train"),
    ("my.txt", "did you mean w2v train my.txt"),
    ("my.yaml", "did you mean w2v train my.yaml"),
    ("train.epochs=3", "did you mean w2v train train.epochs=3"),
    ("skipgram -input my.txt", "did you mean w2v train FILE model.architecture=skipgram"),
    ("evaluate latest", "is not a command of w2v; did you mean w2v score"),
    ("frobnicate latest", "is not a command of w2v; one of train, score"),
    ("neighbours latest", "did you mean w2v nn"),
    ("print-word-vectors latest", "did you mean w2v export"),
    ("--verison", "did you mean w2v --version"),
    ("-v", "did you mean w2v --version"),
    ("help neighbours", "did you mean w2v nn"),
    ("analogy latest", "did you mean w2v analogies"),
    # Options of other programs.
    ("train my.txt --epochs 3", "--epochs is not an option .* write train.epochs=3"),
    ("train my.txt --epochs=3", "write train.epochs=3"),
    ("train my.txt --dim 100", "write model.vector_size=100"),
    ("train my.txt -size 100", "write model.vector_size=100"),
    ("train my.txt --vector-size 100", "write model.vector_size=100"),
    ("train my.txt -ws 5", "write model.window=5"),
    ("train my.txt -minCount 2", "write vocab.min_count=2"),
    ("train my.txt -neg 5", "write model.negative=5"),
    ("train my.txt -negative 5", "write model.negative=5"),
    ("train my.txt --lr 0.1", "write optimizer.lr=0.1"),
    ("train my.txt --alpha 0.1", "write optimizer.lr=0.1"),
    ("train my.txt -iter 5", "write train.epochs=5"),
    (
        "train -input my.txt -output o -dim 50 -thread 2 -epoch 3",
        "-epoch are not options .* write corpus.path=my.txt run.dir=o model.vector_size=50 "
        "train.epochs=3; did you mean --threads",
    ),
    ("train my.txt --seed 7", "write train.seed=7"),
    ("train my.txt --device cpu", "write train.device=cpu"),
    ("train my.txt --batch-size 512", "write train.batch_size=512"),
    ("train my.txt --output vectors", "write run.dir=vectors"),
    ("train my.txt --optimizer Adam", "write optimizer.name=Adam"),
    ("train --corpus my.txt", "write corpus.path=my.txt"),
    ("train my.txt -minn 3", "write model.min_n=3"),
    ("train my.txt -loss hs", "or model.hs=true"),
    ("train my.txt -hs 1", "write model.hs=1"),
    ("train my.txt -loss softmax", "only word vectors are trained"),
    ("nn latest -k 5 king", "did you mean --topn"),
    ("train -input my.txt", "write corpus.path=my.txt"),
    ("train my.txt -thread 4", "did you mean --threads"),
    ("train my.txt --workers 4", "did you mean --threads"),
    ("train my.txt --dryrun", "did you mean --dry-run"),
    ("train my.txt --foo", "--foo is not an option .* see w2v train --help"),
    ("train my.txt --threads 0", "'0' is not a whole number of 1 or more"),
    ("train my.txt --threads 4000", "more than the .* cores"),
    ("nn my.txt --top_n 3 king", "did you mean --topn"),
    ("export latest --binary", "did you mean --bin"),
    # Texts and configs.
    ("train nope.txt", "corpus.path='nope.txt' is no file"),
    ("train runs/*.csv", "is no file, .*; did you mean the folder runs"),
    ("train ~nobody-here/my.txt", "corpus.path='~nobody-here/my.txt' is no file"),
    ("train ~nobody-here/my.yaml", "config file ~nobody-here/my.yaml does not exist"),
    ("train my.tx", "did you mean my.txt"),
    ("train my.txt nope.txt", "'nope.txt' is no file"),
    ("train text9", "did you mean text8"),
    ("train adem", "did you mean adam"),
    ("compare my.txt", "name configs, such as adam adamw"),
    ("sweep my.txt optimizer.lr=.1,.2", "name configs, such as adam"),
    ("compare adam --seeds 1,2", "--seeds: invalid int value: '1,2'; .* --seeds 1 2 3"),
    ("compare adam --seeds 1 2 my.txt", "'my.txt'; write texts and settings first"),
    ("compare adam sample", "sample trains on enwiki-sample.* write --base sample"),
    ("compare adam my.txt train.seed=5", "write --seeds 5, as last option"),
    ("sweep adam my.txt train.seed=1,2", "write --seeds 1 2, as last option"),
    ("sweep adam my.txt run.name=x", "run.name=x would be replaced"),
    ("compare adam my.txt --corpora empty.txt", "path=my.txt .* give all texts to --corpora"),
    ("compare runs/one --seeds 2 --pairs p.tsv", "--seeds --pairs has no effect on runs"),
    ("score latest --pairs a/p.tsv b/p.tsv", "a/p.tsv and b/p.tsv have the same name"),
    ("score latest --pairs wordsim353.tsv", "wordsim353 and wordsim353.tsv have the same name"),
    ("train empty.txt", "is empty or not text"),
    ("train nope.yaml", "config file nope.yaml does not exist"),
    ("train my.txt configs/Adam.yaml", "did you mean configs/optimizers/adam.yaml"),
    ("train my.txt configs/adamm.yaml", "did you mean configs/optimizers/adam.yaml"),
    ("train my.txt epochs 3", "'epochs' .* write train.epochs=VALUE"),
    (f"train {'the-cat-sat-' * 30}", "'the-cat-.{49}...' is not a file; name one"),
    ("train words.yaml", "config file words.yaml holds no keys"),
    ("train runs/one", "is a run folder; continue it with --resume runs/one"),
    ("train --resume runs", "name one run's folder, such as runs/one"),
    ("train --resume runs/two", "did you mean runs/one|does not exist"),
    # Settings.
    ("train my.txt epochs=3", "did you mean 'train.epochs'"),
    ("train my.txt train.epoch=3", "did you mean 'train.epochs'"),
    ("train my.txt train.epochs = 3", "write train.epochs=VALUE, without spaces"),
    ("train my.txt train.epochs=3.5", "is not a whole number"),
    ("train my.txt train.epochs=many", "is not a whole number"),
    ("train my.txt train.epochs=0", "must be at least 1"),
    ("train my.txt model=100", "'model' is a section; write model.<key>"),
    ("train my.txt train.device=gpu", "did you mean cuda"),
    ("train my.txt train.precision=bfloat16", "did you mean bf16"),
    ("train my.txt transfer.gpu_bytes=20GBs", "a size such as 20GiB"),
    ("train my.txt run.name=a/b", "without slashes"),
    (f"train my.txt model.window={'9' * 40}{'x' * 99}", "9{40}x{17}... .* is not a whole"),
    # Optimizers.
    ("train my.txt optimizer.name=adam", "did you mean Adam"),
    ("train my.txt optimizer.name=Adamx", "did you mean Adam"),
    ("train my.txt optimizer.name=LBFGS", "mixes rows, so it cannot be paged; .* SGD"),
    ("train my.txt optimizer.name=mine.Adam", "set optimizer.lr too"),
    ("train my.txt adam sgd", "adam and sgd are several optimizers; .* compare adam sgd TEXT"),
    ("train my.txt optimizer.lr=-1", "must be above 0"),
    ("train my.txt optimizer.lr=0,1", "is not a number"),
    ("train my.txt optimizer.args={momentum:0.9}", "with a space after each colon"),
    ("train my.txt optimizer.args={betas: [0.5, 0.99]}", "quote what has spaces"),
    ("train my.txt optimizer.momentum=0.9", "did you mean 'optimizer.args.momentum'"),
    ("sweep adam my.txt optimizer.lr", "write optimizer.lr=VALUE, without spaces"),
    # Vectors.
    ("nn my.txt king", "my.txt is text, not vectors"),
    ("nn fasttext.bin king", "fasttext.bin cannot be read as vectors .ValueError: it ends"),
    ("train my.txt --gpus 100000", "--gpus 100000 is more than one machine has"),
    ("train my.txt run.dir=", "run.dir= is out of range; it must be a folder"),
    ("map latest --to=", "w2v map has an empty argument '--to='"),
    ("nn nope king", "nope does not exist; name a run, such as latest"),
    ("nn latest -n 3 king", "did you mean --topn"),
    ("map latest --output map.png", "did you mean --to"),
    ("score my.pdf", "my.pdf is text, not vectors"),
    ("nn", "required: RUN;"),
    ("report my.txt", "my.txt is text, not vectors"),
    ("nn latest", "no folder in runs holds vectors.kv"),
    ("nn runs/one king", "runs/one holds no vectors.kv"),
    ("export latest", "nothing to write; add --kv"),
    ("map latest --words few", "'few' is not a whole number"),
    ("compare nope.yaml", "config file nope.yaml does not exist"),
    ("sweep Adamx", "'Adamx' is neither a text nor a config; did you mean adam"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a text, a config, and a run that has only begun."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "my.txt").write_text("the cat sat on the mat\n")
    (folder / "my.pdf").write_text("%PDF\n")
    (folder / "fasttext.bin").write_bytes(b"\xba\x16\x4f\x2f\x0c\0\0\0")
    (folder / "my.yaml").write_text("train: {epochs: 2}\n")
    (folder / "words.yaml").write_text("the cat sat on the mat\n")
    (folder / "empty.txt").touch()
    (folder / "runs" / "one").mkdir(parents=True)
    (folder / "runs" / "one" / "config.yaml").write_text("train: {epochs: 2}\n")
    return folder


@each_case(("line", "answer"), MISTAKES)
def test_a_mistake_is_answered_in_one_line(line, answer, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert cli.main(line.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert len(error) < 320
    assert re.search(answer, error), error


def test_missing_tensorboard_is_named(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert cli.main(["train", "my.txt", "run.tensorboard=true"]) == 2
    assert "pip install tensorboard" in capsys.readouterr().err


def test_options_may_come_between_words():
    options = cli.parse("nn", shlex.split("latest --topn 3 king queen"))
    assert (options.topn, options.words) == (3, ["king", "queen"])


def test_arguments_are_texts_configs_or_settings(folder, monkeypatch):
    monkeypatch.chdir(folder)
    files, assignments = train.sort_settings(
        ["my.txt", "my.yaml", "adam", "train.epochs=3", "empty.txt"]
    )
    assert files == ["my.yaml", "adam"]
    assert assignments == ['corpus.path=["my.txt", "empty.txt"]', "train.epochs=3"]
    assert train.sort_settings(["enwiki-sample"]) == ([], ["corpus.path=enwiki-sample"])
    assert train.sort_settings(["-"]) == ([], ["corpus.path=-"])
    many = f"corpus.path=[{', '.join(['my.txt'] * 2000)}]"  # longer than a path may be
    assert not compare.names_runs(many) and train.sort_settings([many]) == ([], [many])
    monkeypatch.setenv("HOME", str(folder))
    config = load_config([], train.sort_settings(["~/my.txt"])[1])
    require_source(*config.corpus.path, config.corpus.data_dir)


def test_standard_input_is_kept_by_its_content(tmp_path, monkeypatch):
    inodes = set()
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the cat\n")))
        path = train.spool(str(tmp_path / "data"))
        inodes.add(path.stat().st_ino)  # by which its ids are found again
    assert path.read_text() == "the cat\n" and len(inodes) == 1
    assert list(path.parent.iterdir()) == [path]


def test_empty_standard_input_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(ConfigError, match="standard input is empty; send a text"):
        train.spool(str(tmp_path))
    assert not any(tmp_path.iterdir())


def test_full_disk_is_named_for_standard_input(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdin", mock.Mock(isatty=bool, buffer=mock.Mock(read=full)))
    with pytest.raises(OSError, match="No space left") as caught:
        train.spool(str(tmp_path))
    assert caught.value.filename == str(tmp_path) and not any(tmp_path.iterdir())


def test_a_kill_while_standard_input_is_read_leaves_nothing(tmp_path):
    command = [sys.executable, "train.py", "-", f"corpus.data_dir={tmp_path}"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as process:
        process.stdin.write(b"some words " * 1_000_000)  # more than a pipe holds: it is reading
        process.kill()
    assert process.returncode == -signal.SIGKILL and not os.listdir(tmp_path)


def test_help_names_all_commands_in_80_columns_and_the_version_is_the_packages(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["--help"]) == cli.main([]) == cli.main(["--version"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {name} " in printed for name in cli.COMMANDS)
    assert printed.endswith(f"w2v {w2v.__version__}\n")
    for name in cli.COMMANDS:
        shown = cli.make_parser(name).format_help()
        assert f"usage: w2v {name}" in shown
        printed += shown
    assert max(map(len, printed.splitlines())) <= 80


@each_case(
    ("typed", "expected"),
    [
        ("w2v swe", {"sweep"}),
        ("w2v train --dr", {"--dry-run"}),
        ("w2v train optimizer.l", {"optimizer.lr="}),
        ("w2v export latest --te", {"--text"}),
        ("w2v train my.txt train.device = c", {"cpu", "cuda"}),
        ("w2v completion f", {"fish"}),
    ],
)
def test_bash_completes(typed, expected, capsys):
    pytest.importorskip("shtab")
    cli.main(["completion", "bash"])
    words = typed.split()
    script = f"{capsys.readouterr().out}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}"
    script += f"; COMP_LINE='{typed.replace(' = ', '=')}'; cd /"
    script += '; _w2v w2v "${COMP_WORDS[-1]}"; printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert set(done.stdout.split()) == expected, done.stderr


LOADED = {  # prints what completes an unfinished command
    "zsh": "autoload -Uz compinit; compinit -D; source script; print $_comps[w2v]",
    "fish": "source script; complete -C 'w2v swe'",
}


@pytest.mark.parametrize(("shell", "shown"), [("zsh", "_shtab_w2v"), ("fish", "sweep")])
def test_other_shells_have_a_script_too(shell, shown, tmp_path, capsys):
    pytest.importorskip("shtab")
    cli.main(["completion", shell])
    script = capsys.readouterr().out
    assert all(word in script for word in ("sweep", "optimizer.lr=", "train.device=cuda", "adamw"))
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        command = [shell, "-c", LOADED[shell]]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert shown in done.stdout and not done.stderr


@each_case("line", ["--help", "train --help", "compare --help", "sweep --help"])
def test_help_imports_nothing_heavy(line):
    code = f"import sys, json\nfrom w2v.api import cli\ntry: cli.main({line.split()})\n"
    code += "except SystemExit: pass\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert not loaded & {"torch", "gensim", "numpy", "numba", "yaml"}


def test_a_deleted_working_directory_is_named(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert cli.main(["nn", "latest", "paris"]) == 2
    assert "the working directory: No such file" in capsys.readouterr().err
