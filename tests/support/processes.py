"""Processes that are forked with torch and w2v loaded.

A new one would import them for three seconds.
"""

import os
import subprocess
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.support.loaded"])


def fork(function, *arguments, daemon=True):
    """Start a picklable function in a process; return the process."""
    folder = os.getcwd()
    os.chdir(ROOT)  # else the server, which the first call starts, does not find its modules
    try:
        process = PROCESSES.Process(target=function, args=arguments, daemon=daemon)
        process.start()
    finally:
        os.chdir(folder)
    return process


def run_python(code, *arguments, seconds=120):
    """Run a program in a process that has everything loaded.

    Returns a `CompletedProcess` as `subprocess.run` does.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "stdout"), Path(folder, "stderr")
        process = fork(_execute, code, list(map(str, arguments)), files)
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
        texts = [file.read_text() for file in files]
    return subprocess.CompletedProcess(code, process.exitcode, *texts)


def _execute(code, arguments, files):
    for number, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "program", "exec"), {"__name__": "__main__"})
