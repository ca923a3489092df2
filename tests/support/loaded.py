"""Modules that forked processes have loaded: see processes.py."""

import contextlib
import faulthandler
import gc
import io
import os
import signal
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import gensim.models
import numpy
import pytest
import safetensors
import scipy.stats
import smart_open
import torch
import torch._dynamo  # torch's optimizers import it, for two seconds
import torch._inductor  # deterministic runs import it
from torch.distributed import run as torchrun

import evaluate
import train
from tests.support.tiny import tiny_arguments
from w2v import PagedEmbedding
from w2v.api import commands
from w2v.distributed import ranks
from w2v.text import encode
from w2v.training import build, metrics, plan, run_folder, trainer
from w2v.vectors import evaluate as scores
from w2v.vectors import export
from w2v.word2vec import step

LOADED = gensim.models, numpy, pytest, safetensors, scipy.stats, smart_open, torchrun, evaluate
LOADED += PagedEmbedding, commands, ranks, encode, build, metrics, plan, run_folder, trainer
LOADED += scores, export, step

faulthandler.register(signal.SIGALRM, chain=True)  # also in forked processes
torch.set_num_threads(1)
if not os.environ.get("CUDA_VISIBLE_DEVICES", "all"):
    # A run loads machine code and numba's types, which took each forked one a third of a second.
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        assert train.main(tiny_arguments(Path(folder))) == 0
gc.collect()
gc.freeze()
