"""What was claimed stands beside what a bench came to."""

from __future__ import annotations

from paged_backend.lab import claims
from paged_backend.lab.bench import Setting
from paged_backend.lab.roofline import Roofline
from paged_backend.lab.simulation import simulate
from paged_backend.lab.traffic import Traffic


def test_claims_stand_beside_what_came_out(simulated):
    assert claims.can_compare(simulated)
    shown = claims.table(simulated)
    assert [column.header for column in shown.columns][1] == "claimed"
    assert shown.row_count == 5
    without = simulate(Roofline.of_name("h100:llama-7b"), Traffic(4), Setting(("continuous",)))
    assert not claims.can_compare(without)


def test_verdicts_compare_ratios():
    assert claims.verdict([3.4, 2.2], [3.4, 2.0]) == "agrees, agrees"
    assert claims.verdict([3.4, 2.2], [3.0, 1.2]) == "agrees, less"
    assert claims.verdict([3.4, 2.2], [3.3, 3.3]) == "agrees, more"
