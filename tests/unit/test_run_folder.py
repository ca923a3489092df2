"""Run folders: created, found, locked and cleaned up."""

import os
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support.each_case import each_case
from tests.support.rank_threads import checked, raised, together
from tests.support.tables import make_tables
from w2v.config import ConfigError, flat_config, load_config
from w2v.rows.checkpoint import Checkpoints
from w2v.system.files import atomic_path
from w2v.text import CorpusError
from w2v.training import run_folder
from w2v.vectors.runs import RunError


def config_for(folder, *more):
    return load_config([], [f"run.dir={folder}", "corpus.path=some/text8.gz", *more])


def begun(runs, *more):
    """Create a run and write its settings."""
    config = config_for(runs, *more)
    folder = run_folder.create(config)
    run_folder.begin(folder, config, "python 3\n")
    return folder


def test_each_run_gets_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda pattern: "2026-11-22-101500")
    folders = [run_folder.create(config_for(tmp_path / "runs")) for _ in range(3)]
    name = "2026-11-22-101500-text8-adam"
    assert [folder.name for folder in folders] == [name, f"{name}-2", f"{name}-3"]
    assert run_folder.create(config_for(tmp_path, "run.name=mine")).name.endswith("-mine")


@each_case(
    "path, name",
    [
        ("[a/chapter1.txt, a/chapter2.txt]", "chapter1"),
        ("s3://bucket/chapter1.txt", "chapter1"),
        ("\N{SNOWMAN}" * 80 + ".txt", "\N{SNOWMAN}" * 50),
        (".text.gz", "text"),
    ],
)
def test_a_run_is_named_after_its_first_text(path, name, tmp_path):
    folder = run_folder.create(config_for(tmp_path, f"corpus.path={path}"))
    assert folder.name.endswith(f"-{name}-adam")


def test_ranks_get_the_folder_of_the_first(tmp_path):
    folders = checked(together(3, lambda ranks: run_folder.create(config_for(tmp_path), ranks)))
    assert len(set(folders)) == 1 and list(tmp_path.iterdir()) == folders[:1]


def test_latest_is_the_run_created_last(tmp_path):
    first, second = begun(tmp_path, "run.name=a"), begun(tmp_path, "run.name=b")
    os.utime(second / "config.yaml", (1, 1))
    assert run_folder.find_to_resume("latest", str(tmp_path)) == first
    assert run_folder.find_to_resume(str(second), str(tmp_path)) == second
    with pytest.raises(RunError, match="is a folder of runs"):
        run_folder.find_to_resume(str(tmp_path), str(tmp_path))


def test_restarted_job_goes_on_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    folder = begun(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run_folder.find_to_resume(None, str(tmp_path)) == folder
    # Another job of the same name begins a run of its own.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert run_folder.find_to_resume(None, str(tmp_path)) is None
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run_folder.find_to_resume(None, str(tmp_path)) is None


def test_settings_that_must_not_change_are_refused(tmp_path):
    folder = begun(tmp_path)
    free = ["train.epochs=9", "run.log_seconds=3", "optimizer.lr=0.01", "transfer.engine=mapped"]
    free += ["corpus.path=moved/text8.gz"]
    fixed = ["train.seed=2", "model.window=3"]
    run_folder.resume_config(folder, [], free + fixed)  # before the first checkpoint
    config = flat_config(load_config([folder / "config.yaml"]))
    keeper = Checkpoints(folder / "checkpoints", make_tables(), 0)
    keeper.save({"step": 1, "config": config})
    keeper.wait()
    run_folder.resume_config(folder, [], free)
    expected = "step-00000001 .*: model.window=3 instead of 5; train.seed=2 instead of 1; leave"
    with pytest.raises(ConfigError, match=expected):
        run_folder.resume_config(folder, [], free + fixed)


def test_a_rate_that_is_auto_changes_no_arguments_of_a_run(tmp_path):
    for given, refused in (
        (["optimizer.lr=0.1", "optimizer.args={}"], True),
        (["optimizer.name=Adam"], False),
    ):
        folder = begun(tmp_path, *given)
        config = flat_config(load_config([folder / "config.yaml"]))
        keeper = Checkpoints(folder / "checkpoints", make_tables(), 0)
        keeper.save({"step": 1, "config": config})
        keeper.wait()
        error = pytest.raises(ConfigError, match="lr=auto would change optimizer.args")
        with error if refused else nullcontext():
            run_folder.resume_config(folder, [], ["optimizer.lr=auto"])


def test_a_finished_run_without_a_checkpoint_is_not_trained_anew(tmp_path):
    folder = begun(tmp_path)
    run_folder.resume_config(folder, [], [])  # it was stopped early
    (folder / "vectors.kv").touch()
    run_folder.resume_config(folder, [], [])  # it was killed before its scores and its checkpoint
    (folder / "scores.json").touch()
    with pytest.raises(ConfigError, match="is finished and has no checkpoint; begin a new run"):
        run_folder.resume_config(folder, [], [])


def test_a_text_that_is_not_there_on_resuming(tmp_path):
    folder = begun(tmp_path)
    config = run_folder.resume_config(folder, [], [])
    with pytest.raises(CorpusError, match=rf"text8.gz' is no file.* --resume {folder} TEXT"):
        run_folder.require_text(folder, config)
    (tmp_path / "text").touch()
    run_folder.require_text(folder, config_for(tmp_path, f"corpus.path={tmp_path}/text"))


def test_a_run_that_was_moved_is_planned_for_its_new_disk(tmp_path, monkeypatch):
    folder = begun(tmp_path / "old")
    monkeypatch.chdir(folder)
    assert run_folder.resume_config(Path("."), [], []).run.dir == f"{tmp_path}/old"
    (tmp_path / "new").mkdir()
    moved = folder.rename(tmp_path / "new" / folder.name)
    assert run_folder.resume_config(moved, [], []).run.dir == f"{tmp_path}/new"


def test_only_one_process_has_the_lock(tmp_path):
    with run_folder.lock(tmp_path):
        with pytest.raises(RunError, match=f"is in use by process {os.getpid()}; wait for"):
            run_folder.lock(tmp_path)
        (tmp_path / ".lock").write_text("")  # its user has not written its number yet
        with pytest.raises(RunError, match="is in use by process .unknown"):
            run_folder.lock(tmp_path)
    run_folder.lock(tmp_path).close()


def test_lock_removes_what_a_killed_process_left(tmp_path):
    (tmp_path / "checkpoints" / "step-00000002.partial").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000001.old.partial").mkdir()
    with pytest.raises(KeyError), atomic_path(tmp_path / "scores.json") as temporary:
        shutil.copytree(temporary.parent, tmp_path / "copy")
        left = temporary.parent.name
        raise KeyError
    (tmp_path / "copy").rename(tmp_path / left)
    (tmp_path / "vectors.kv").touch()
    run_folder.lock(tmp_path).close()
    assert sorted(os.listdir(tmp_path)) == [".lock", "checkpoints", "vectors.kv"]
    assert not os.listdir(tmp_path / "checkpoints")


def test_lock_leaves_files_and_folders_of_others(tmp_path):
    (tmp_path / "x.partial").touch()
    (tmp_path / "notes.partial").mkdir()
    (tmp_path / ".notes.txt.abcdefgh.partial").touch()
    (tmp_path / ".linked.abcdefgh.partial").symlink_to(tmp_path)
    before = set(tmp_path.iterdir())
    run_folder.lock(tmp_path).close()
    assert set(tmp_path.iterdir()) == before | {tmp_path / ".lock"}


def test_rank_that_does_not_see_the_folder_is_named(tmp_path):
    def lock(ranks):
        folder = tmp_path / str(ranks.rank)
        if ranks.rank == 0:
            folder.mkdir()
        run_folder.lock(folder, ranks)

    for error in raised(together(2, lock)):
        assert f"rank 1 does not see {tmp_path}/1; set run.dir" in str(error)


def test_a_resumed_run_removes_its_scores_and_pictures(tmp_path):
    folder = begun(tmp_path)
    for name in ("vectors.kv", "scores.json", "map.svg", "report.html", "report.js"):
        (folder / name).touch()
    run_folder.begin(folder, config_for(tmp_path), "python 3\n")
    assert sorted(os.listdir(folder)) == ["config.yaml", "env.txt", "vectors.kv"]
