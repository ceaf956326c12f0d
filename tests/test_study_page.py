"""The study's page says what the committed tables say."""

import re
import sys
from pathlib import Path

import pytest

ANALYSIS = Path(__file__).parent.parent / "analysis"
README = ANALYSIS.parent / "README.md"


@pytest.fixture(scope="module")
def page():
    sys.path.insert(0, str(ANALYSIS))
    import study_page

    return study_page


def test_its_tables_are_made_from_the_committed_results(page):
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.written(text) == text


def test_every_number_of_the_finding_stands_in_a_table(page):
    """Decimals of the answer (all before the protocol) and of README's lines on the study."""
    text = page.PAGE.read_text(encoding="utf-8")
    answer, _, rest = text.partition("## Why")
    finding = re.search(r"<!-- finding -->(.*?)<!-- end -->", README.read_text(encoding="utf-8"), flags=re.S)[1]
    tables = {*re.findall(r"\.\d+", "\n".join(line for line in rest.splitlines() if line.startswith("|")))}
    for words in (answer, finding):
        assert {*re.findall(r"(?<![\d/])0?(\.\d+)", words)} <= tables
