"""Streams of the GPU at hand, without the look-ups of torch's usual ways to them, each of which takes as long as launching a kernel."""

from __future__ import annotations

import contextlib

import torch


def current() -> torch.cuda.Stream:
    """Where the work of this thread goes."""
    return torch.cuda.current_stream(torch.cuda.current_device())


def on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager:
    """Sends the work of a block to a stream; without a GPU there is none."""
    return stream or contextlib.nullcontext()
