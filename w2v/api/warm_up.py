"""The command warm-up: compile kernels before the first run."""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
from pathlib import Path

from w2v.api.train import train
from w2v.system import console
from w2v.system.files import kernel_folder

OPTIMIZERS = "adam", "sgd"  # on a CPU, SGD has loops of its own
SIZES = 100, 128  # of vectors, by default and in configs/text8.yaml; CUDA kernels are for one size


def run(options: argparse.Namespace) -> None:
    """Train on a few words with usual settings, which compiles kernels."""
    import torch

    runs = [[optimizer, "train.device=cpu"] for optimizer in OPTIMIZERS]
    if torch.cuda.is_available():
        on_gpu = [[f"model.vector_size={size}", "train.device=cuda"] for size in SIZES]
        runs += [[optimizer, *each] for optimizer in OPTIMIZERS for each in on_gpu]
        runs.append(["adam", "transfer.gpu_bytes=50%", *on_gpu[0]])
    with tempfile.TemporaryDirectory(prefix="w2v-warm-up-") as folder:
        text = Path(folder, "text.txt")
        text.write_text("\n".join(" ".join(f"word{n % 97}" for n in range(999)) for _ in "12345"))
        for settings in runs:
            places = f"run.dir={folder}/runs", f"corpus.data_dir={folder}/data"
            with contextlib.redirect_stdout(io.StringIO()):
                train(text, *settings, *places, "run.report=false", quiet=True)
    console.show(f"kernels are in {kernel_folder('NUMBA_CACHE_DIR')}")
