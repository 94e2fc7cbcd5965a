"""docs/checks: a page for each check, whose sections are there and whose names exist."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import pytest

from smoke.config import RunConfig
from smoke.config_file import SECTIONS
from smoke.explain import text
from smoke.faults import FAULTS
from smoke.record import Record
from smoke.requirements import CHECKS

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "checks"
HEADINGS = [
    "What it proves",
    "How it measures",
    "Limits and where they come from",
    "Faults that turn it red",
    "When it is red",
]


def page(check: str) -> str:
    return (PAGES / f"{check}.md").read_text(encoding="utf-8")


def sections(check: str) -> dict[str, str]:
    """Text under each heading of the second level."""
    parts = re.split(r"^## (.+)\n", page(check), flags=re.M)
    return dict(zip(parts[1::2], map(str.strip, parts[2::2]), strict=True))


def faults_on(check: str) -> list[str]:
    return re.findall(r"^- `([\w-]+)`", sections(check)["Faults that turn it red"], flags=re.M)


def test_there_is_a_page_for_each_check_and_no_other():
    assert {file.stem for file in PAGES.glob("*.md")} == {*CHECKS, "README"}


@pytest.mark.parametrize("check", CHECKS)
def test_a_page_has_its_sections(check):
    assert page(check).startswith(f"# {check}\n")
    found = sections(check)
    assert list(found) == HEADINGS
    assert all(len(body) > 40 for body in found.values())
    assert f"docs/checks/{check}.md" in text(check)


@pytest.mark.parametrize("check", CHECKS)
def test_the_faults_named_exist_and_turn_the_check_red(check):
    red = {fault.name for fault in FAULTS if check in fault.red}
    assert faults_on(check)
    assert set(faults_on(check)) <= red


@pytest.mark.parametrize("check", CHECKS)
def test_what_a_page_names_exists(check):
    """Files, fields of the record and options."""
    body = page(check)
    assert [name for name in re.findall(r"`(smoke/[\w/.]+)`", body) if not (ROOT / name).exists()] == []
    fields = {field.name for field in dataclasses.fields(Record)}
    assert set(re.findall(r"`Record\.(\w+)`", body)) <= fields
    assert [name for name in re.findall(r"`--([a-z0-9_.]+)", body) if not _is_option(name)] == []


def _is_option(path: str) -> bool:
    group, _, leaf = path.rpartition(".")
    owner = SECTIONS.get(group, RunConfig)
    return leaf in {field.name for field in dataclasses.fields(owner)}


def test_the_index_lists_the_pages_in_the_order_of_the_report():
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \[(\w+)\]\(\1\.md\) \| \S", index, flags=re.M) == list(CHECKS)
