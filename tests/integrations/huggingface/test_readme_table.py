"""The table of what ``generate`` serves names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
SECTION = (FOLDER.parents[2] / "integrations/README.md").read_text().split("## generate\n")[1].split("\n## ")[0]
NAMED = sorted(set(re.findall(r"`(test_\w+)`", SECTION)))


@pytest.mark.parametrize("name", NAMED)
def test_a_test_that_the_table_names_exists(name):
    assert any(f"def {name}(" in path.read_text() for path in FOLDER.glob("test_*.py"))


def test_every_row_of_the_table_names_one():
    rows = [line for line in SECTION.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 20
    assert all(re.search(r"`test_\w+` \|$", row) for row in rows)
