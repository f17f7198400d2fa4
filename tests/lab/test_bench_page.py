"""The page of a bench shows every request, and is one file."""

from __future__ import annotations

from paged_backend.lab.bench_page import page


def test_the_page_has_a_bar_for_each_request_and_needs_nothing_else(simulated):
    text = page(simulated, "A <title>", ["about & all"])
    assert text.count("<rect") == 2 * 48 * len(simulated.measured)
    assert "A &lt;title&gt;" in text
    assert "about &amp; all" in text
    assert "src=" not in text
    assert "href=" not in text
