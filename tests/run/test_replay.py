"""Red checks are located and leave a bundle; the bundle reproduces them alone; a bad bundle is one line and exit 2."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_runs import ROOT, finding, red, small_config

from smoke import cli, faults
from smoke.checks.finding import failed
from smoke.config import CheckConfig, DataConfig, PolicyConfig, RunConfig
from smoke.environment import detect
from smoke.plan import resolve
from smoke.requirements import CHECKS
from smoke.run.bundle import bundle_config
from smoke.run.locate import LOCATORS

BITWISE = CheckConfig(skip=tuple(name for name in CHECKS if name != "recompute_parity"))
GRADIENTS = CheckConfig(gradient_parity_every=1, skip=tuple(name for name in CHECKS if name != "gradient_parity"))
Q_UP = "mtp.mtp_model_layer.self_attention.linear_q_up_proj"
"""The first region that a backward replays is the last one of the forward."""


def _execute(config: RunConfig, fault: str = "") -> dict[str, Any]:
    """Run in this process and return report.json."""
    from smoke.run import execute

    environment = detect()
    if fault:
        with faults.injected(faults.by_name(fault)):
            execute(resolve(config, environment), environment, ["smoke", "run"])
    else:
        execute(resolve(config, environment), environment, ["smoke", "run"])
    return json.loads((pathlib.Path(config.out or "") / "report.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def faulty(tmp_path_factory) -> pathlib.Path:
    """The run folder of a replay that runs outside the quantization context."""
    folder = tmp_path_factory.mktemp("faulty") / "run"
    report = _execute(small_config(check=BITWISE, steps=1, out=str(folder)), "replay-in-bf16")
    assert red(report) == {"recompute_parity"}
    assert report["artifacts"][-1] == "bundle"
    return folder


@pytest.fixture(scope="module")
def misconfigured(tmp_path_factory) -> pathlib.Path:
    """A run without a fault whose margin pushes every value under E4M3's smallest: BF16's gradients are far away."""
    folder = tmp_path_factory.mktemp("misconfigured") / "run"
    policy = PolicyConfig(margin=24)
    options: dict[str, Any] = {"precision": "fp8-delayed", "policy": policy, "steps": 6, "recompute": ()}
    assert red(_execute(small_config(**options, check=GRADIENTS, out=str(folder)))) == {"gradient_parity"}
    return folder


@pytest.fixture(scope="module")
def alone(faulty, misconfigured) -> list[str]:
    """What ``smoke replay`` says of both runs, in one new process, elsewhere; its last line holds the exit codes."""
    script = "import sys; from smoke import cli; print([cli.main(['replay', one]) for one in sys.argv[1:]])"
    done = subprocess.run(
        [sys.executable, "-c", script, str(faulty), str(misconfigured / "bundle")],
        cwd=faulty.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def bundle(faulty, tmp_path) -> pathlib.Path:
    """A copy of its bundle, to spoil."""
    return pathlib.Path(shutil.copytree(faulty / "bundle", tmp_path / "bundle"))


def _facts(folder: pathlib.Path) -> dict[str, Any]:
    return json.loads((folder / "bundle.json").read_text(encoding="utf-8"))


def _rewrite(folder: pathlib.Path, **changes: Any) -> None:
    """Change facts; digests are those of the files as they are now, as in a bundle that was made on purpose."""
    files = [folder / name for name in ("config.yaml", "tensors.pt")]
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    (folder / "bundle.json").write_text(json.dumps({**_facts(folder), "sha256": digests, **changes}), encoding="utf-8")


def test_both_failures_reproduce_alone_in_a_fresh_process(alone):
    assert alone[-1] == "[1, 1]"
    for check in ("recompute_parity", "gradient_parity"):
        line = next(line for line in alone if line.startswith(f"{check}: "))
        assert line.startswith(f"{check}: reproduced: FAIL")
        assert line.endswith("(the same place)")
    assert sum(line == "reproduced: 1 of 1; exit code 1" for line in alone) == 2
    assert any(Q_UP in line for line in alone)  # located again


def test_a_bitwise_failure_is_located_in_the_replay(faulty):
    report = json.loads((faulty / "report.json").read_text(encoding="utf-8"))
    detail = finding(report, "recompute_parity")["detail"]
    assert f"first output in a replay of {Q_UP}[head 0]" in detail
    assert "first gradient of the output of mtp.mtp_model_layer.self_attention.k_up_absorbed" in detail
    facts = _facts(faulty / "bundle")
    assert (facts["fault"], facts["seed"], facts["source"]) == ("replay-in-bf16", 1234, "generated")
    assert facts["command"] == f"smoke replay {faulty / 'bundle'}"
    assert [(one["check"], one["step"]) for one in facts["failures"]] == [("recompute_parity", 0)]
    assert [one["passed"] for one in facts["failures"][0]["departures"]] == ["replay", "gradient", "parameter"]


def test_a_failure_without_a_fault_is_located_at_the_first_quantized_module(misconfigured):
    found = finding(json.loads((misconfigured / "report.json").read_text(encoding="utf-8")), "gradient_parity")
    assert "first forward output of layers.0.self_attention.linear_q_down_proj" in found["detail"]
    assert "its inputs agree" in found["detail"]
    assert _facts(misconfigured / "bundle")["fault"] == ""


def test_a_difference_in_the_quantizers_state_names_the_leaf(tmp_path):
    """The replay of the first layer's query up-projection recorded its amax a second time."""
    check = CheckConfig(skip=BITWISE.skip, bundle=False)
    config = small_config(precision="fp8-delayed", check=check, steps=1, out=str(tmp_path / "run"))
    found = finding(_execute(config, "amax-counted-twice"), "recompute_parity")
    assert "amax_history[x of layers.0.self_attention.linear_q_up_proj]" in found["where"]


def test_the_tensors_that_depart_are_kept_on_both_sides(faulty):
    observed = torch.load(faulty / "bundle" / "tensors.pt", weights_only=True)["observed"]
    left, right = (observed[f"recompute_parity.replay.{side}"] for side in ("left", "right"))
    assert left.shape == right.shape
    assert not torch.equal(left, right)


def test_on_a_mended_tree_it_does_not_reproduce(bundle, capsys):
    """The batches are in the bundle: the file that they came from is not needed again."""
    source = "text:/not/here.txt"
    config = small_config(data=DataConfig(source=source), resume="runs/gone", out="a")
    kept = bundle_config(config, device="cpu", impl="reference")
    assert (kept.data.source, kept.resume, kept.out, kept.device) == ("generated", None, None, "cpu")
    _rewrite(bundle, fault="", source=source)
    assert cli.main(["replay", str(bundle)]) == 0
    printed = capsys.readouterr().out
    assert "recompute_parity: did not reproduce: PASS" in printed
    assert printed.splitlines()[-1] == "did not reproduce: 1 of 1 pass here; exit code 0"


@pytest.mark.parametrize(
    ("fault", "layout", "check", "told"),
    [
        ("shared-key-rows-wrong", "sbhd", "gradient_parity", "linear_kv_down_proj.weight[rope]"),
        ("weights-in-another-order", "sbhd", "absorbed_parity", "output of layers.0.self_attention.linear_proj"),
        ("positions-restart-late", "thd", "packed_parity", "output of layers.0.self_attention.v_up_absorbed"),
        ("attention-crosses-edges", "thd", "packed_parity", "output of layers.0.self_attention.v_up_absorbed"),
    ],
)
def test_other_parity_checks_name_the_first_module_too(tmp_path, fault, layout, check, told):
    skip = CheckConfig(skip=tuple(name for name in CHECKS if name != check), bundle=False)
    config = small_config(
        precision="mxfp8", recompute=(), layout=layout, check=skip, steps=1, out=str(tmp_path / "run")
    )
    found = finding(_execute(config, fault), check)
    assert found["status"] == "FAIL"
    assert told in found["detail"].partition("first ")[2]
    assert not (tmp_path / "run" / "bundle").exists()  # --check.bundle false


class Attack:
    """Its pickle calls a function when it is loaded."""

    def __init__(self, file: pathlib.Path):
        self.file = file

    def __reduce__(self):
        return pathlib.Path.touch, (self.file,)


def _spoil_tensors(change: Callable[[dict[str, Any]], Any]) -> Callable[[pathlib.Path], None]:
    def spoil(folder: pathlib.Path) -> None:
        values = torch.load(folder / "tensors.pt", weights_only=True)
        changed = change(values)
        torch.save(values if changed is None else changed, folder / "tensors.pt")
        _rewrite(folder)

    return spoil


def _put_fact(**facts: Any) -> Callable[[pathlib.Path], None]:
    return lambda folder: _rewrite(folder, **facts)


def _put_file(name: str, content: bytes, *, trusted: bool = True) -> Callable[[pathlib.Path], None]:
    def spoil(folder: pathlib.Path) -> None:
        (folder / name).write_bytes(content)
        if trusted:
            _rewrite(folder)

    return spoil


def _with_token(values: dict[str, Any]) -> None:
    values["batches"][0]["tokens"][0, 0] = 10**6


def _without_labels(values: dict[str, Any]) -> None:
    del values["batches"][0]["labels"]


def _with_state(values: dict[str, Any]) -> None:
    name = next(iter(values["state"]))
    values["state"][name] = torch.zeros(1).expand(2**40)  # a stride of zero: four bytes in the file


def _cut_short(folder: pathlib.Path) -> None:
    file = folder / "tensors.pt"
    file.write_bytes(file.read_bytes()[:5000])
    _rewrite(folder)


def _archive_of_nothing(folder: pathlib.Path) -> None:
    with zipfile.ZipFile(folder / "tensors.pt", "w") as archive:
        archive.writestr("a", "b")
    _rewrite(folder)


def _pipe(name: str) -> Callable[[pathlib.Path], None]:
    def spoil(folder: pathlib.Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return spoil


def _endless(folder: pathlib.Path) -> None:
    (folder / "tensors.pt").unlink()
    (folder / "tensors.pt").symlink_to("/dev/zero")


BAD: dict[str, tuple[Callable[[pathlib.Path], None], str]] = {
    "facts from a pipe": (_pipe("bundle.json"), "is no regular file"),
    "options from a pipe": (_pipe("config.yaml"), "is no regular file"),
    "tensors from a device": (_endless, "is no regular file"),
    "no bundle": (lambda folder: shutil.rmtree(folder), "No such file"),
    "no facts": (lambda folder: (folder / "bundle.json").unlink(), "bundle.json: No such file"),
    "no tensors": (lambda folder: (folder / "tensors.pt").unlink(), "tensors.pt: No such file"),
    "no options": (lambda folder: (folder / "config.yaml").unlink(), "config.yaml: No such file"),
    "not JSON": (lambda folder: _write(folder, b"{"), "is not JSON"),
    "not UTF-8": (lambda folder: _write(folder, b"\xff"), "bundle.json"),
    "nested": (lambda folder: _write(folder, b"[" * 100_000), "is not JSON"),
    "large": (lambda folder: _write(folder, b" " * (1 << 21)), "is larger than"),
    "other JSON": (lambda folder: _write(folder, b"[]"), "is not a bundle"),
    "another format": (_put_fact(format=2), "has format 2"),
    "a missing fact": (lambda folder: _write(folder, b'{"format": 1, "failures": [{}]}'), "must have the fields"),
    "a fact of another type": (_put_fact(seed="1234"), "seed is not of the type int"),
    "no failure": (_put_fact(failures=[]), "names no failure"),
    "an unknown fault": (_put_fact(fault="replay-in-bf8"), "the nearest is replay-in-bf16"),
    "changed options": (_put_file("config.yaml", b"steps: 1\n", trusted=False), "SHA-256 differs"),
    "unknown options": (_put_file("config.yaml", b"stepz: 1\n"), "the nearest is steps"),
    "options with code": (_put_file("config.yaml", b"out: !!python/object/apply:os.getcwd []\n"), "is not YAML"),
    "cut short": (_cut_short, "holds no plain tensors"),
    "changed tensors": (_put_file("tensors.pt", b"", trusted=False), "SHA-256 differs"),
    "empty tensors": (_put_file("tensors.pt", b""), "holds no plain tensors"),
    "noise": (_put_file("tensors.pt", bytes(range(256)) * 40), "holds no plain tensors"),
    "an archive": (_archive_of_nothing, "holds no plain tensors"),
    "other tensors": (_spoil_tensors(lambda values: [torch.zeros(3)]), "does not hold the state"),
    "a number as state": (_spoil_tensors(lambda values: values["state"].update(a=1)), "something else than named"),
    "a foreign state": (_spoil_tensors(lambda values: values["state"].clear()), "does not fit the model"),
    "an absurd state": (_spoil_tensors(_with_state), "does not fit the model"),
    "too few batches": (_spoil_tensors(lambda values: values["batches"].clear()), "does not hold the 1 batches"),
    "a token beyond the vocabulary": (_spoil_tensors(_with_token), "tokens must lie from 0 to 287"),
    "a batch without labels": (_spoil_tensors(_without_labels), "must hold"),
}


def _write(folder: pathlib.Path, content: bytes) -> None:
    (folder / "bundle.json").write_bytes(content)


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_bundle_is_one_line_and_exit_2(bundle, capsys, kind):
    spoil, named = BAD[kind]
    spoil(bundle)
    assert cli.main(["replay", str(bundle)]) == 2
    printed = capsys.readouterr()
    assert named in printed.err
    assert printed.err.count("\n") == 1


def test_no_code_of_a_bundle_runs(bundle, tmp_path, capsys):
    _spoil_tensors(lambda values: {**values, "observed": Attack(tmp_path / "ran")})(bundle)
    assert cli.main(["replay", str(bundle)]) == 2
    assert "holds no plain tensors" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    torch.load(bundle / "tensors.pt", weights_only=False)
    assert (tmp_path / "ran").exists()  # it would have run


def _keep(folder: pathlib.Path, name: str) -> Any:
    from smoke.run import Outcome
    from smoke.run.failures import keep_failures

    environment = detect()
    outcome = Outcome([failed(name, "1 of 2", "0", "step 0 weight model.embedding.weight", "one bit")])
    keep_failures(folder, resolve(small_config(), environment), environment, outcome)
    return outcome


def test_a_bundle_that_cannot_be_written_is_one_line_and_costs_nothing(tmp_path, capsys):
    (tmp_path / "bundle").write_text("in the way")
    outcome = _keep(tmp_path, "quantizer")
    assert [one.detail for one in outcome.findings] == ["one bit"]
    assert outcome.interrupted_signal is None
    assert capsys.readouterr().err == f"smoke: {tmp_path / 'bundle'}: cannot be written: File exists\n"


def test_a_crash_while_locating_costs_no_finding(tmp_path, capsys, monkeypatch):
    def crash(*_: Any) -> Any:
        raise RuntimeError("boom")

    monkeypatch.setitem(LOCATORS, "recompute_parity", crash)
    outcome = _keep(tmp_path, "recompute_parity")
    assert [(one.name, one.detail) for one in outcome.findings] == [("recompute_parity", "one bit")]
    errors = capsys.readouterr().err
    assert "RuntimeError: boom" in errors
    assert "could not be located" in errors


def test_a_difference_that_does_not_come_again_leaves_the_finding_as_it_is(tmp_path):
    outcome = _keep(tmp_path, "recompute_parity")
    assert outcome.findings[0].detail == "one bit"
    assert _facts(tmp_path / "bundle")["failures"][0]["departures"] == []


@pytest.mark.parametrize("args", [[], ["a", "b"]])
def test_one_bundle_is_named(args, capsys):
    assert cli.main(["replay", *args]) == 2
    assert "name one bundle" in capsys.readouterr().err


def test_help(capsys):
    assert cli.main(["replay", "--help"]) == 0
    assert "1 reproduced, 0 did not reproduce" in capsys.readouterr().out
