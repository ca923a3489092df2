"""The current stream, and how long it waits."""

import contextlib

import pytest
import torch

from w2v.rows.link import current_stream, on_stream
from w2v.word2vec import step
from w2v.word2vec.step import Waits


class Event:
    """Fake CUDA event: the first `passed` are done, 1 ms from one to the next."""

    made, passed = 0, 0

    def record(self, stream):
        Event.made += 1
        self.at = Event.made

    def query(self):
        return self.at <= Event.passed

    def elapsed_time(self, after):
        assert after.query()
        return after.at - self.at


def test_waits_are_counted_once_they_are_over_without_waiting_for_them(monkeypatch):
    monkeypatch.setattr(Event, "made", 0)
    monkeypatch.setattr(step, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event())
    waits = Waits()
    for passed, seconds in ((0, 0), (0, 0), (5, 0.002), (8, 0.004), (8, 0.004), (12, 0.006)):
        monkeypatch.setattr(Event, "passed", passed)
        with waits.counted(torch.device("cuda")):
            pass
        assert waits.seconds == pytest.approx(seconds)


def test_without_a_gpu_there_is_no_stream():
    assert isinstance(on_stream(None), contextlib.nullcontext)


@pytest.mark.gpu
def test_current_stream_is_the_one_that_work_goes_to():
    own = [torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
    for stream in (torch.cuda.default_stream(), *own, own[0]):
        with on_stream(stream):
            assert current_stream() == torch.cuda.current_stream() == stream
            assert current_stream().cuda_stream == stream.cuda_stream
