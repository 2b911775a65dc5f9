"""The tables of the documents are what the results say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "scripts" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_documents_say_what_the_results_say(tables):
    for name in tables.DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert tables.MARKER.search(text), name
        assert tables.renewed(text) == text, f"{name}: run scripts/tables.py"


def test_a_stale_table_is_replaced_and_nothing_else(tables, monkeypatch):
    monkeypatch.setitem(tables.TABLES, "made-up", lambda: tables.table(["a", "b"], [["1", "2"]]))
    before = "# Title\n\n<!-- made-up -->\n| old |\n| --- |\n| 9 |\n\n| another | table |\n| --- | --- |\n"
    after = "# Title\n\n<!-- made-up -->\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\n| another | table |\n| --- | --- |\n"
    assert tables.renewed(before) == after
    assert tables.renewed(after) == after
    with pytest.raises(KeyError):
        tables.renewed("<!-- nothing-of-that-name -->")
