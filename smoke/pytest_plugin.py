"""Pytest plug-in: a smoke run as a fixture, and one test for each of its checks.

With the package installed, this file of tests is all that is needed::

    def test_check(smoke_finding):
        assert smoke_finding.status == "PASS", str(smoke_finding)

    pytest --smoke-precision mxfp8,nvfp4 --smoke-config small.yaml

It becomes one test for each check and precision; a check that does not apply is skipped with its reason. All of them
read one run for each precision (under pytest-xdist use ``--dist loadfile``, or each worker makes its own):

    smoke_precision   one of the words of --smoke-precision (session, parametrized)
    smoke_run         the Verdict of one run: ``smoke_run["finite"]``, ``smoke_run.require()``, ``smoke_run.record``
    smoke_check       the name of one check (parametrized over all; parametrize it yourself to name those you need)
    smoke_finding     what smoke_run says of smoke_check

By default ``smoke_run`` trains smoke's own model, as ``smoke run`` does. To judge your own, override it in a
conftest.py::

    @pytest.fixture(scope="session")
    def smoke_run(smoke_precision):
        ...  # train
        return judge(trainer.callbacks, precision=smoke_precision)

Checks that you did not name and that your run did not judge are skipped; one that you named is an error then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from smoke.checks import Finding
    from smoke.verdict import Verdict

EVERY_CHECK = pytest.StashKey[bool]()
"""Set on a test whose check this plug-in chose."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("smoke", "low-precision training checks")
    group.addoption("--smoke-precision", default="mxfp8", metavar="WORDS",
                    help="Precisions of smoke_run, separated by commas (default: mxfp8).")  # fmt: skip
    group.addoption("--smoke-config", default=None, metavar="FILE",
                    help="YAML of what smoke_run trains, as for `smoke run --config`.")  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    _precisions(config)


def _precisions(config: pytest.Config) -> list[str]:
    """Canonical names of the precisions asked for. Raises UsageError."""
    from smoke.precision.recipe import canonical

    words = [word.strip() for word in config.getoption("--smoke-precision").split(",")]
    try:
        return list(dict.fromkeys(canonical(word).name for word in words))
    except ValueError as error:
        raise pytest.UsageError(f"--smoke-precision: {error}") from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = {name for mark in metafunc.definition.iter_markers("parametrize") for name in _names(mark)}
    if "smoke_precision" in metafunc.fixturenames and "smoke_precision" not in chosen:
        metafunc.parametrize("smoke_precision", _precisions(metafunc.config), indirect=True, scope="session")
    if "smoke_check" in metafunc.fixturenames and "smoke_check" not in chosen:
        from smoke.checks import CHECKS

        metafunc.parametrize("smoke_check", list(CHECKS), indirect=True)


def _names(mark: pytest.Mark) -> list[str]:
    names = mark.args[0] if mark.args else mark.kwargs.get("argnames", "")
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


@pytest.fixture(scope="session")
def smoke_precision(request: pytest.FixtureRequest) -> str:
    """Canonical name of a precision."""
    return request.param


@pytest.fixture
def smoke_check(request: pytest.FixtureRequest) -> str:
    """Name of a check, one after the other."""
    request.node.stash[EVERY_CHECK] = True
    return request.param


@pytest.fixture(scope="session")
def smoke_run(smoke_precision: str, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Verdict:
    """Train smoke's own model in this precision. Skips where this machine lacks what the run needs."""
    from smoke.options import UsageError, parse_run
    from smoke.plan import MISSING, Refusal

    file, folder = pytestconfig.getoption("--smoke-config"), tmp_path_factory.mktemp("smoke")
    args = [*(["--config", file] if file else []), "--precision", smoke_precision, "--out", str(folder)]
    try:
        return _train(parse_run(args, "smoke run"), ["smoke", "run", *args])
    except UsageError as error:
        pytest.fail(f"smoke run: {error}", pytrace=False)
    except Refusal as refusal:
        end = pytest.skip if refusal.exit_code == MISSING else pytest.fail
        end(f"smoke run: {refusal.message}")


def _train(config: Any, command: list[str]) -> Verdict:
    """Run in this process. Raises Refusal; KeyboardInterrupt where a signal ended it."""
    import pathlib

    from smoke.cli import facts
    from smoke.plan import resolve
    from smoke.run import Shared, run_into
    from smoke.verdict import Verdict

    environment = facts()
    plan = resolve(config, environment)
    report, record = run_into(pathlib.Path(config.out), plan, environment, command, Shared(), quiet=True)
    if report.verdict == "interrupted":
        raise KeyboardInterrupt(report.message)
    if report.message is not None:
        pytest.fail(f"smoke run: {report.message}", pytrace=False)
    return Verdict(report.checks, record)


@pytest.fixture
def smoke_finding(request: pytest.FixtureRequest, smoke_run: Verdict, smoke_check: str) -> Finding:
    """What the run says of the check; skips where the check does not apply."""
    judged = {finding.name for finding in smoke_run.findings}
    if smoke_check not in judged and EVERY_CHECK in request.node.stash:
        pytest.skip(f"{smoke_check} was not judged in this run")
    finding = smoke_run[smoke_check]
    if finding.status == "SKIP":
        pytest.skip(finding.detail)
    return finding
