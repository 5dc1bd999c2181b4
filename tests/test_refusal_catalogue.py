"""Every code that a refusal can carry has an entry in the catalogue and a test that names it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "graphsurgery").rglob("*.py")))
CATALOGUE = (ROOT / "docs" / "refusals.md").read_text(encoding="utf-8")
TESTS = {
    path: path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "tests").rglob("test_*.py"))
    if path != Path(__file__)
}
CODES = sorted({*re.findall(r'Refusal\(\s*"([a-z-]+)"', SOURCES), *re.findall(r'code, mend = "([a-z-]+)"', SOURCES)})


def test_codes_are_found() -> None:
    assert {"axis-not-last", "window", "no-evidence", "fused-contrib", "hidden-rows"} <= set(CODES)


@pytest.mark.parametrize("code", CODES)
def test_code_has_an_entry_and_a_test(code: str) -> None:
    assert f"| `{code}` |" in CATALOGUE
    assert any(f'"{code}"' in text for text in TESTS.values()), f"no test names {code}"


def test_the_catalogue_has_no_other_code() -> None:
    assert sorted(re.findall(r"^\| `([a-z-]+)` \|", CATALOGUE, re.MULTILINE)) == CODES
