"""The HTML report in a real browser: nothing complains, the verdict is read, a point of the curve answers the mouse.

Skipped where no Chromium is on PATH. One browser serves all tests; each opens its own file.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator

import pytest
from browser import Browser, executable

from smoke.checks import FAIL
from smoke.plan import Refusal
from smoke.record import Record
from smoke.report import build, refused
from smoke.report.contract import verdict_line
from smoke.report.html import html_text

pytestmark = pytest.mark.skipif(executable() is None, reason="no Chromium on PATH")
DESK, PHONE = (1280, 900), (390, 844)
"""CSS pixels of a window and of a common phone."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    program = executable()
    assert program is not None
    with Browser(program, tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture
def report(record, make_plan, findings, environment):
    plan = make_plan()
    found = findings(plan, gradient_parity=FAIL)
    return build(record, plan, found, environment=environment, command=["python", "train.py"])


@pytest.fixture
def page(tmp_path, report, record) -> Callable[..., pathlib.Path]:
    """``page(report, record)`` as a file; both default to those of a run with one red check."""

    def write(shown=report, rows=record) -> pathlib.Path:
        file = tmp_path / "report.html"
        file.write_text(html_text(shown, rows), encoding="utf-8")
        return file

    return write


def drawn(browser: Browser) -> list[str]:
    """Ids of the figures that have been drawn."""
    return browser.run("[...document.querySelectorAll('.plot')].filter(p => p.querySelector('svg')).map(p => p.id)")


def open_page(browser: Browser, file: pathlib.Path, size: tuple[int, int]) -> None:
    browser.open(file, *size)
    assert browser.until(lambda: drawn(browser)) == ["loss", "gap", "gradients"]


def place_of(browser: Browser, figure: str, x: str, y: str) -> tuple[float, float]:
    """Window coordinates of a point of a figure. ``x`` and ``y`` are expressions in the names below."""
    return tuple(
        browser.run(
            f"""(() => {{
                const plot = document.getElementById('{figure}');
                plot.scrollIntoView({{block: 'center'}});
                const box = plot.getBoundingClientRect(), {{xaxis, yaxis}} = plot._fullLayout, lines = plot.data;
                const run = lines.find(line => line.name === 'run'), map = lines[0];
                return [box.left + xaxis._offset + {x}, box.top + yaxis._offset + {y}];
            }})()"""
        )
    )


def label_at(browser: Browser, figure: str, place: tuple[float, float]) -> str:
    """Text that a figure shows when the mouse comes to a place."""
    browser.hover(place[0] - 9, place[1])
    browser.hover(*place)
    return browser.until(lambda: browser.run(f"document.querySelector('#{figure} .hoverlayer').textContent"))


def test_a_page_on_a_desk(browser, page, report, record):
    """Everything is drawn and read; a point of the loss curve and a cell of the map answer the mouse."""
    open_page(browser, page(), DESK)
    assert browser.run("document.querySelector('.verdict').textContent") == verdict_line(report)
    assert browser.run("document.title").startswith("fail: mxfp8")
    statuses = browser.run("[...document.querySelectorAll('td[data-title=status]')].map(e => e.textContent)")
    assert statuses == [check.status for check in report.checks]
    label = label_at(browser, "loss", place_of(browser, "loss", "xaxis.l2p(run.x[3])", "yaxis.l2p(run.y[3])"))
    assert label.startswith("3")
    assert f"run : {record.steps[3].loss:g}" in label
    assert "BF16 twin : " in label
    row, column = "map.y.indexOf('mlp.linear_fc1.weight')", "map.x.indexOf('layers 0')"
    cell = place_of(browser, "gradients", f"xaxis.c2p({column})", f"yaxis.c2p({row})")
    label = label_at(browser, "gradients", cell)
    assert "layers.0.mlp.linear_fc1.weight" in label
    assert "relative error 0.03" in label
    assert browser.complaints() == []


def test_a_page_on_a_phone_is_readable_and_does_not_scroll_sideways(browser, page, report):
    open_page(browser, page(), PHONE)
    assert browser.run("document.querySelector('.verdict').textContent") == verdict_line(report)
    assert browser.run("document.documentElement.scrollWidth") <= PHONE[0]
    outside = browser.run(
        """[...document.querySelectorAll('h1, h2, p, pre, td, th, summary, .verdict')]
            .filter(e => e.getClientRects().length && e.getBoundingClientRect().right > innerWidth + 0.5)
            .map(e => e.tagName + ' ' + e.textContent.slice(0, 60))"""
    )
    assert outside == []
    sizes = browser.run(
        "[...document.querySelectorAll('p, td, h2')].map(e => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 12
    assert browser.run("getComputedStyle(document.querySelector('td[data-title=limit]'), '::before').content") != "none"
    assert browser.run("document.querySelector('#loss .main-svg').getBoundingClientRect().right") <= PHONE[0]
    assert browser.complaints() == []


HOSTILE = "</script><script>window.bitten=1</script><img src=x onerror=window.bitten=1>" + "W" * 300


def test_hostile_names_run_no_script_and_load_nothing(browser, page, report, record):
    record.gradients = [dataclasses.replace(row, parameter=HOSTILE, slice=HOSTILE) for row in record.gradients]
    record.coverage = [dataclasses.replace(row, module=HOSTILE, reason=HOSTILE) for row in record.coverage]
    checks = tuple(dataclasses.replace(check, where=HOSTILE, detail=HOSTILE) for check in report.checks)
    shown = dataclasses.replace(report, checks=checks, message=HOSTILE, command=HOSTILE)
    open_page(browser, page(shown, record), PHONE)
    browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.run("window.bitten") is None
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert HOSTILE in browser.run("document.querySelector('.verdict').textContent")
    assert browser.run("document.documentElement.scrollWidth") <= PHONE[0]
    assert browser.complaints() == []


def test_a_script_that_escaping_missed_does_not_run(browser, page):
    """The page's own policy stops it: in the markup, in an attribute, and from elsewhere."""
    file = page()
    text = file.read_text(encoding="utf-8")
    attack = "<script>window.bitten=1</script><p onclick='window.bitten=2' id=bait>x</p><img src=//example.com/x>"
    file.write_text(text.replace("</h1>", f"</h1>{attack}", 1), encoding="utf-8")
    open_page(browser, file, DESK)
    browser.run("document.getElementById('bait').click()")
    assert browser.run("window.bitten") is None
    blocked = [complaint for complaint in browser.complaints() if "Content Security Policy" in complaint]
    assert len(blocked) == 3
    assert not [complaint for complaint in browser.complaints() if complaint.startswith("request")]


def test_a_refused_request_needs_no_script(browser, page, make_plan, environment):
    shown = refused(Refusal(4, "no device"), make_plan().config, environment, ["smoke", "run"])
    browser.open(page(shown, Record()), *PHONE)
    assert browser.run("document.scripts.length") == 0
    assert "no device" in browser.run("document.querySelector('.verdict').textContent")
    assert browser.complaints() == []


def test_what_a_bad_page_does_is_noticed(browser, tmp_path):
    """The tests above would see it."""
    file = tmp_path / "bad.html"
    file.write_text('<script>console.error("boom"); fetch("https://example.com/x"); missing()</script>', "utf-8")
    browser.open(file, *PHONE)
    expected = {"console", "exception", "request"}
    assert browser.until(lambda: {complaint.partition(":")[0] for complaint in browser.complaints()} >= expected)
