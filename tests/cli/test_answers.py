"""Where answers go, when it cannot be written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from paged_backend.cli.answers import Answers
from paged_backend.cli.options import DASH
from paged_backend.errors import ConfigError


@pytest.mark.parametrize(("path", "named"), [(Path("/dev/full"), "the output /dev/full"), (DASH, "standard output")])
def test_a_full_disk_names_what_cannot_be_written(monkeypatch, path, named):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        answers = Answers(path)
        expected = f"^{named} cannot be written: No space left on device$"
        with pytest.raises(ConfigError, match=expected):
            answers.write({"index": 0})
        if answers.is_file:
            # What is left is to be written at the end.
            with pytest.raises(ConfigError, match=expected):
                answers.__exit__()
        monkeypatch.undo()
        # So that closing it has nothing to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_a_reader_that_went_away_is_no_full_disk(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        answers = Answers(DASH)
        with pytest.raises(BrokenPipeError):
            answers.write({"index": 0})
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)
