"""The package: what a wheel holds, and that it trains elsewhere."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import w2v
from tests.support.tiny import TEXT, tiny_settings
from w2v.config import load_config
from w2v.text import open_corpus

ROOT = Path(__file__).parents[2]
SOURCES = "w2v configs pyproject.toml README.md LICENSE".split()


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Install a wheel, built from an sdist of a copy, in a folder."""
    copy, target = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("installed")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    build = "from setuptools.build_meta import build_sdist; build_sdist('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=copy, check=True, capture_output=True)
    (sdist,) = (copy / "dist").glob("w2v-*.tar.gz")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "--target", target, sdist], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def files(folder):
    """Return what of the package and its configs a user needs."""
    found = (path for path in folder.rglob("*") if path.is_file())
    suffixes = (".py", ".cu", ".cuh", ".html", ".yaml")
    return {path.relative_to(folder).as_posix() for path in found if path.suffix in suffixes}


def test_a_wheel_holds_all_modules_kernels_and_configs(installed):
    configs = {f"configs/{name}" for name in files(ROOT / "configs")}
    assert files(installed / "w2v") == files(ROOT / "w2v") | configs
    assert f"version: {w2v.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_an_installed_package_trains_elsewhere(installed, tmp_path):
    (tmp_path / "my.txt").write_text(TEXT)
    settings = tiny_settings(train__kernels="reference")
    # With the ids on disk nothing is compiled, which takes seconds in another folder.
    paths = [f"corpus.path={tmp_path}/my.txt", f"corpus.data_dir={tmp_path}/data"]
    open_corpus(load_config([], [*paths, *settings]))
    environment = os.environ | {"PYTHONPATH": str(installed), "CUDA_VISIBLE_DEVICES": ""}
    command = [installed / "bin" / "w2v", "train", "my.txt", "adam", *settings]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Adam" in done.stdout
    assert list(tmp_path.glob("runs/*-my-adam/vectors.kv"))
