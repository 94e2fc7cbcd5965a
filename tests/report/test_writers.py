"""JUnit, Markdown and HTML: what they say, and that no name breaks out of them."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import plotly.graph_objects
import pytest
from junitparser import Error, Failure, JUnitXml, Skipped

from smoke.checks import ERROR, FAIL, PASS, SKIP, Finding
from smoke.config import DataConfig, RunConfig
from smoke.plan import Choice, Refusal
from smoke.record import LossCurves, Record
from smoke.report import STEPS, StepWriter, build, refused, write_all
from smoke.report.html import html_text
from smoke.report.junit import junit_text
from smoke.report.markdown import escape, markdown_text
from smoke.report.plots import figures, gradient_map, loss_gaps, split_name

HOSTILE = "</script><script>alert(1)</script>|`*_[x](y)<b>&\x1b[31m\x00\udcff\n]]>\"'"


@pytest.fixture
def report(record, make_plan, findings, environment):
    """``report(**statuses)`` of a run."""

    def make(**statuses: str):
        plan = make_plan()
        return build(record, plan, findings(plan, **statuses), environment=environment, command=["python", "train.py"])

    return make


@pytest.fixture
def hostile(report):
    """A report whose every free text is hostile."""
    sound = report()
    return dataclasses.replace(
        sound,
        command=HOSTILE,
        config=sound.config | {"data": sound.config["data"] | {"source": HOSTILE}},
        plan=(Choice("device", HOSTILE, HOSTILE),),
        checks=(Finding(name="coverage", status=FAIL, measured=HOSTILE, limit=HOSTILE, where=HOSTILE, detail=HOSTILE),),
        message=HOSTILE,
    )


@pytest.fixture
def hostile_record(record):
    record.gradients = [dataclasses.replace(row, parameter=HOSTILE, slice=HOSTILE) for row in record.gradients]
    record.coverage = [dataclasses.replace(row, module=HOSTILE, reason=HOSTILE) for row in record.coverage]
    return record


def cases(report) -> dict[str, list]:
    suite = next(iter(JUnitXml.fromstring(junit_text(report).encode())))
    return {case.name: case.result for case in suite}


def test_junit_has_a_case_for_each_check_with_its_kind(report):
    found = cases(report(coverage=FAIL, determinism=ERROR, finite=SKIP))
    assert len(found) == len(report().checks)
    assert [type(r) for r in found["coverage"]] == [Failure]
    assert [type(r) for r in found["determinism"]] == [Error]
    assert [type(r) for r in found["finite"]] == [Skipped]
    assert found["preflight"] == []
    assert "limit: <= 0.09, slice <= 0.15" in found["coverage"][0].text
    assert "where: layers.1.self_attention.linear_q_up_proj.weight, head 3, step 0" in found["coverage"][0].text


@pytest.mark.parametrize(("code", "kind"), [(2, Error), (4, Skipped), (5, Skipped)])
def test_junit_of_a_refused_request_is_no_empty_suite(environment, code, kind):
    found = cases(refused(Refusal(code, "no device"), RunConfig(), environment, ["smoke", "run"]))
    assert list(found) == ["run"]
    assert isinstance(found["run"][0], kind)
    assert found["run"][0].message == "no device"


def test_junit_escapes_everything(hostile):
    root = ElementTree.fromstring(junit_text(hostile))
    failure = root.find(".//failure")
    assert failure is not None
    assert failure.text is not None
    assert "measured: </script><script>alert(1)" in failure.text
    assert "\\x1b[31m\\x00" in failure.text


def test_markdown_tables_keep_their_columns(report, hostile):
    for made in (report(coverage=FAIL), hostile):
        for line in markdown_text(made).splitlines():
            if line.startswith("|"):
                assert len(re.findall(r"(?<!\\)\|", line)) in (3, 4, 7), line
    text = markdown_text(report(coverage=FAIL))
    assert "**FAIL (emulated): mxfp8 with recompute mla_up_proj: coverage failed;" in text
    assert "step time (emulation)" in text


def test_markdown_shows_names_as_they_are():
    assert escape("layers.0.linear_q_up_proj") == "layers.0.linear_q_up_proj"
    assert escape("__init__ a|b `x` <b> *y* [z](u)") == "\\_\\_init\\_\\_ a\\|b \\`x\\` &lt;b&gt; \\*y\\* \\[z\\](u)"


class Page(HTMLParser):
    """Elements, scripts and text of a page as a browser's parser sees them."""

    def __init__(self, text: str):
        super().__init__()
        self.scripts: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self._script = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._script = tag == "script"
        if self._script:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._script = False

    def handle_data(self, data):
        if self._script:
            self.scripts[-1] += data
        else:
            self.text += data


def test_no_name_breaks_out_of_the_page(hostile, hostile_record):
    page = Page(html_text(hostile, hostile_record))
    assert len(page.scripts) == 3
    assert not any("alert(1)" in script for script in (page.scripts[0], page.scripts[2]))
    json.loads(page.scripts[1])
    assert {tag for tag, _ in page.tags} <= {
        "html", "head", "meta", "link", "title", "style", "body", "h1", "h2", "p", "div", "table", "thead", "tbody",
        "tr", "th", "td", "details", "summary", "pre", "noscript", "script", "wbr",
    }  # fmt: skip
    assert page.text.count("<script>alert(1)</script>") >= 8
    assert "\x1b" not in page.text


def test_figures_escape_names_for_plotly(hostile_record):
    heatmap = gradient_map(hostile_record.gradients)["data"][0]
    labels = [*heatmap["x"], *heatmap["y"], *(text.replace("<br>", "") for line in heatmap["text"] for text in line)]
    assert not [label for label in labels if "<" in label]


def test_page_needs_no_network_and_fits_a_phone(report, record):
    text = html_text(report(), record)
    page = Page(text)
    links = [attrs for _, attrs in page.tags if attrs.get("src") or attrs.get("href", "data:,") != "data:,"]
    assert links == []
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags
    wrapped = [attrs.get("class") for tag, attrs in page.tags if tag == "div"]
    assert wrapped.count("scroll") == 3 + sum(tag == "table" for tag, _ in page.tags)
    assert list(json.loads(page.scripts[1])) == ["loss", "gap", "gradients"]
    assert 3e6 < len(text) < 7e6


def test_page_without_figures_is_small(environment):
    text = html_text(refused(Refusal(4, "no device"), RunConfig(), environment, ["smoke"]), Record())
    assert len(text) < 20_000
    assert "no device" in text


def test_page_is_made_quickly(report, record):
    html_text(report(), record)
    start = time.perf_counter()
    html_text(report(), record)
    assert time.perf_counter() - start < 1.5


def test_plotly_accepts_every_figure(record):
    for name, figure in figures(record).items():
        made = plotly.graph_objects.Figure(figure).to_plotly_json()
        assert made["data"], name


def test_loss_figure_has_run_twin_floor_and_other_seed(record):
    lines = {line["name"]: line["y"] for line in figures(record)["loss"]["data"]}
    assert lines["run"] == list(record.curves.run)
    assert lines["BF16 twin"] == list(record.curves.twin)
    assert [name for name in lines if "perturbed" in name] == ["BF16 twin, perturbed (1)", "BF16 twin, perturbed (2)"]
    assert lines["another seed"] == list(record.curves.other_seed)


def test_an_interrupted_run_shows_the_losses_it_has(record):
    record.curves = LossCurves()
    assert set(figures(record)) == {"loss", "gradients"}
    assert figures(record)["loss"]["data"][0]["y"] == [row.loss for row in record.steps]


def test_gradient_map_takes_the_worst_of_steps_slices_and_experts(record):
    name = "layers.1.mlp.experts.linear_fc1.weight0"
    row = next(r for r in record.gradients if r.parameter == name)
    worse = dataclasses.replace(row, step=10, slice="head 1", relative_error=0.5)
    record.gradients += [worse, dataclasses.replace(row, routing="free", relative_error=0.9)]
    heatmap = gradient_map(record.gradients)["data"][0]
    assert heatmap["x"] == ["layers 0", "layers 1", "mtp", "no layer"]
    place = heatmap["y"].index("mlp.experts.linear_fc1.weight*"), heatmap["x"].index("layers 1")
    assert heatmap["z"][place[0]][place[1]] == pytest.approx(math.log10(0.5))
    assert "weight0, head 1<br>relative error 0.5" in heatmap["text"][place[0]][place[1]]
    assert heatmap["z"][place[0]][0] is None


@pytest.mark.parametrize("error", [math.nan, math.inf, 0.0])
def test_errors_without_a_logarithm_keep_the_figures_valid(record, error):
    record.gradients = [dataclasses.replace(row, relative_error=error) for row in record.gradients]
    record.curves = dataclasses.replace(record.curves, run=(*record.curves.run[:-1], math.nan))
    json.dumps(figures(record), allow_nan=False)
    z = {value for line in gradient_map(record.gradients)["data"][0]["z"] for value in line if value is not None}
    assert z == ({-9.0} if error == 0 else {1.0})
    assert loss_gaps(record)["data"][-1]["y"][0] is None


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.12.mlp.linear_fc1.weight", ("layers 12", "mlp.linear_fc1.weight")),
        ("layers.1.mlp.experts.linear_fc2.weight13", ("layers 1", "mlp.experts.linear_fc2.weight*")),
        ("transformer.h.3.attn.weight", ("h 3", "attn.weight")),
        ("mtp.mtp_model_layer.self_attention.linear_proj.weight", ("mtp", "self_attention.linear_proj.weight")),
        ("output_layer.weight", ("no layer", "output_layer.weight")),
    ],
)
def test_names_are_split_into_layer_and_parameter(name, place):
    assert split_name(name) == place


ARTIFACTS = ("report.json", "config.yaml", "report.html", "report.md", "report.xml", STEPS)


def test_write_all_names_what_it_wrote(tmp_path, report, record):
    config = RunConfig(data=DataConfig(source=HOSTILE))
    written = write_all(tmp_path, report(), record, config)
    assert sorted(written.artifacts) == sorted(ARTIFACTS)
    assert {path.name for path in tmp_path.iterdir()} == set(ARTIFACTS)
    assert json.loads((tmp_path / "report.json").read_text())["artifacts"] == list(written.artifacts)
    assert len((tmp_path / STEPS).read_text().splitlines()) == len(record.steps)


def test_write_all_leaves_the_steps_of_the_training(tmp_path, report, record):
    with StepWriter(tmp_path / STEPS) as sink:
        sink(record.steps[0])
    before = (tmp_path / STEPS).read_bytes()
    write_all(tmp_path, report(), record, RunConfig())
    assert (tmp_path / STEPS).read_bytes() == before


def test_report_json_is_the_last_file(tmp_path, report, record):
    (tmp_path / "report.html").mkdir()
    (tmp_path / "report.html" / "in the way").write_text("")
    with pytest.raises(OSError, match=r"report\.html"):
        write_all(tmp_path, report(), record, RunConfig())
    assert not (tmp_path / "report.json").exists()
    assert not list(tmp_path.glob(".*"))


def test_statuses_have_their_colours(report):
    text = html_text(report(coverage=FAIL), Record())
    for status in (PASS, FAIL, SKIP):
        assert f'class="name {status}"' in text
