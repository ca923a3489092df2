"""Fixtures of the tests that train with several configs."""

import pytest

from tests.support.small_text import record_calls, settings_of_small_text
from w2v.api import compare
from w2v.vectors import report


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    """Settings for a small text."""
    return settings_of_small_text(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def undrawn(monkeypatch):
    """Write no pages, which would take half of the time."""
    monkeypatch.setattr(report, "write_page", lambda found, file: file)


@pytest.fixture
def trained(undrawn, monkeypatch):
    """The configs that are trained, in order."""
    return record_calls(monkeypatch, compare, "train_and_score")
