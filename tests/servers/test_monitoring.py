"""The dashboard as a document; tests/servers/test_real_engine.py holds its queries against a server."""

from tests.servers.monitoring import SELECTOR, dashboard, missing_series, queries


def test_panels_do_not_overlap_and_have_one_unit_each():
    panels = dashboard()["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in panels)


def test_every_query_selects_series_and_none_is_found_in_nothing():
    selecting = [query for _, query, _ in queries() if SELECTOR.search(query)]
    assert len(selecting) > 40
    assert len({name for query in selecting for name, _ in SELECTOR.findall(query)}) > 25
    assert len({title for title, *_ in missing_series("")}) == len(
        {title for title, q, _ in queries() if q in selecting}
    )
