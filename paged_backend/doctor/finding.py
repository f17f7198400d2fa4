"""Finding: one thing that was found out, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# ok: as it should be. note: worth knowing, and nothing is wrong. problem: something to mend, which the words say how.
State = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it stands, and what there is to say of it."""

    name: str
    state: State
    words: str
