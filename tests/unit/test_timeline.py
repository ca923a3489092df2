"""Phases of a run and the wall time of a process."""

import subprocess
import sys
import time

import pytest

from w2v.system.timeline import Timeline, process_start


def test_phases_sum_to_the_wall_time_and_inner_ones_count_once():
    timeline = Timeline()
    timeline.begin("training")
    with timeline.phase("saving"):
        time.sleep(0.05)
    with pytest.raises(KeyError), timeline.phase("saving"):
        raise KeyError
    time.sleep(0.02)
    seconds = timeline.seconds()
    wall = time.monotonic() - process_start()
    assert list(seconds) == ["starting", "training", "saving"]
    assert seconds["saving"] >= 0.05 and 0.02 <= seconds["training"] < 0.05
    assert sum(seconds.values()) == pytest.approx(wall, abs=0.02)


def test_a_process_starts_before_its_first_import():
    code = "import time; time.sleep(.3); from w2v.system.timeline import process_start as start"
    code += "; print(time.monotonic() - start())"
    began = time.monotonic()
    age = float(subprocess.run([sys.executable, "-c", code], capture_output=True).stdout)
    assert 0.3 <= age <= time.monotonic() - began + 0.02  # seconds; the start is known to 10 ms
