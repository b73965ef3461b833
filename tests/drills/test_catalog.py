"""The lists hold what they promise, and every drill is described."""

from collections import Counter
from pathlib import Path

import pytest
from drills import catalog
from drills.run import options_of

pytestmark = pytest.mark.unit

DOCS = Path(__file__).resolve().parents[2] / "docs" / "drills.md"


def test_the_short_list_is_six_kills_a_stop_a_router_and_a_drain() -> None:
    counts = Counter(catalog.SHORT)
    assert counts["kill_rank"] + counts["kill_engine"] == 6
    assert [counts[name] for name in ("stop_rank", "kill_router", "drain_and_resume")] == [1, 1, 1]
    assert sum(counts.values()) == 9


def test_the_long_list_has_every_drill_and_fifty_kills() -> None:
    counts = Counter(catalog.LONG)
    assert set(counts) == set(catalog.BY_NAME)
    assert counts["kill_rank"] >= 25
    assert counts["kill_engine"] >= 25


def test_every_drill_says_what_it_does_and_stands_in_the_docs() -> None:
    text = DOCS.read_text()
    for drill in catalog.DRILLS:
        assert (drill.act.__doc__ or "").strip(), drill.name
        assert drill.name in text, drill.name


def test_only_and_repeat_choose() -> None:
    chosen = options_of(["--only", "kill_rank,cut_line", "--repeat", "2"]).drills
    assert [drill.name for drill in chosen] == ["kill_rank", "cut_line"] * 2
    with pytest.raises(SystemExit):
        options_of(["--only", "kill_rank,no_such_drill"])
    with pytest.raises(SystemExit):
        options_of(["--repeat", "0"])
