"""The command line: what is parsed, what is refused, and with which line and exit code."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest
import yaml

from smoke import __version__, cli, options
from smoke.config import PRECISIONS, RunConfig
from smoke.explain import CHECKS as EXPLAINED
from smoke.explain import text
from smoke.options import UsageError, parse_matrix, parse_run
from smoke.requirements import CHECKS

ROOT = pathlib.Path(__file__).resolve().parents[1]


def run(*args: str) -> RunConfig:
    return parse_run(args, "train.py")


def wrong(*args: str) -> str:
    with pytest.raises(UsageError) as caught:
        run(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_no_arguments_are_the_defaults():
    assert run() == RunConfig()


def test_debug_yaml_spells_the_defaults():
    tree = yaml.safe_load((ROOT / "configs/debug.yaml").read_text(encoding="utf-8"))
    assert tree == _tree(RunConfig())
    assert run("--config", str(ROOT / "configs/debug.yaml")) == RunConfig()


def _tree(value):
    if dataclasses.is_dataclass(value):
        return {f.name: _tree(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda file: file.name)
def test_every_yaml_file_parses(file):
    assert isinstance(run("--config", str(file)), RunConfig)


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda file: file.name)
def test_the_other_yaml_files_hold_only_what_differs(file):
    def same(deltas, defaults):
        return [k for k, v in deltas.items() if (same(v, defaults[k]) if isinstance(v, dict) else v == defaults[k])]

    assert file.name == "debug.yaml" or not same(yaml.safe_load(file.read_text("utf-8")), _tree(RunConfig()))


def test_flat_and_dotted_options():
    config = run("--precision", "mxfp8", "--steps", "3", "--model.hidden_size", "512", "--data.source", "text:a b.txt")
    assert (config.precision, config.steps) == ("mxfp8", 3)
    assert (config.model.hidden_size, config.model.kv_lora_rank) == (512, 64)
    assert config.data.source == "text:a b.txt"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("none", ()),
        ("[]", ()),
        ("mlp", ("mlp",)),
        ("mla_up_proj,moe_act", ("mla_up_proj", "moe_act")),
        ("[mla_up_proj, moe_act]", ("mla_up_proj", "moe_act")),
        ("mlp,mlp", ("mlp", "mlp")),
        ("none,mlp", ("none", "mlp")),
    ],
)
def test_recompute_is_one_type_on_the_command_line_and_in_yaml(word, expected, tmp_path):
    assert run("--recompute", word).recompute == expected
    file = tmp_path / "a.yaml"
    file.write_text(f"recompute: {word}\n", encoding="utf-8")
    assert run("--config", str(file)).recompute == expected


def test_lists_of_words():
    config = run("--check.skip", "memory,finite", "--policy.keep_bf16=layers.0.*")
    assert config.check.skip == ("memory", "finite")
    assert config.policy.keep_bf16 == ("layers.0.*",)


def test_brackets_make_a_list_only_in_pairs():
    assert run("--policy.keep_bf16", "[lm]*").policy.keep_bf16 == ("[lm]*",)
    assert run("--policy.keep_bf16", "[a, b]").policy.keep_bf16 == ("a", "b")
    assert run("--policy.keep_bf16", "[").policy.keep_bf16 == ("[",)


def test_null_in_yaml_where_it_is_legal(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("out: null\nmodel: {q_lora_rank: null, rope_scaling: null}\npolicy: {last_layers_bf16: ~}\n")
    config = run("--config", str(file))
    assert (config.out, config.model.q_lora_rank, config.model.rope_scaling) == (None, None, None)


def test_rope_scaling_can_be_null_or_changed_in_part():
    assert run("--model.rope_scaling", "null").model.rope_scaling is None
    scaling = run("--model.rope_scaling.factor", "8").model.rope_scaling
    assert scaling is not None
    assert (scaling.factor, scaling.beta_fast) == (8.0, 32.0)


@pytest.mark.parametrize("word", ["fp8-tensorwise", "fp8-current"])
def test_precision_is_canonical(word):
    assert run("--precision", word).precision == "fp8-tensorwise"


def test_the_command_line_overrides_the_file(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("steps: 7\nmodel:\n  hidden_size: 512\n  rope_scaling: {factor: 7}\n", encoding="utf-8")
    config = run("--config", str(file), "--steps", "9")
    assert (config.steps, config.model.hidden_size, config.model.vocab_size) == (9, 512, 288)
    assert config.model.rope_scaling is not None
    assert (config.model.rope_scaling.factor, config.model.rope_scaling.mscale) == (7.0, 1.0)


def test_a_config_file_is_found_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "a.yaml").write_text("steps: 7\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert run("--config=a.yaml").steps == 7


def test_print_config_gives_a_file_that_reads_back(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        run("--recompute", "mlp,moe_act", "--precision", "fp8-current", "--steps", "4", "--print_config")
    assert stop.value.code in (0, None)
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    config = run("--config", str(file))
    assert (config.precision, config.recompute, config.steps) == ("fp8-tensorwise", ("mlp", "moe_act"), 4)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--precision", "fp9"], "--precision"),
        (["--foo", "3"], "--foo: no such option"),
        (["--step", "3"], "the nearest is --steps"),
        (["--model.hiden_size", "3"], "the nearest is --model.hidden_size"),
        (["--model.rope_scaling.fctor", "3"], "--model.rope_scaling.factor"),
        (["--model.rope_scaling.factor", "abc"], "--model.rope_scaling.factor: must be a number, got abc"),
        (["--model.hidden_size", "abc"], "--model.hidden_size: must be a whole number, got abc"),
        (["--steps", "1.5"], "--steps"),
        (["--steps"], "--steps"),
        (["--model.norm_topk_prob", "3"], "must be true or false"),
        (["--train.learning_rate", "nan"], "--train.learning_rate"),
        (["--train.learning_rate", "1" * 400], "too many digits"),
        (["--model", "a.yaml"], "--model"),
        (["--model.hidden_size", ""], "must be a whole number, got nothing"),
        (["--model.q_lora_rank", "none"], "--model.q_lora_rank: must be a whole number or null, got none"),
        (["--model.rope_scaling", "yarn"], "--model.rope_scaling: must be a mapping of its options or null, got yarn"),
        (["--PRECISION", "mxfp8"], "the nearest is --precision"),
        (["--config="], "--config: name a file"),
        (["hello"], "hello"),
        (["--config", "/missing.yaml"], "/missing.yaml: No such file"),
        (["--config"], "--config"),
    ],
)
def test_a_wrong_command_line_is_one_line_that_names_it(args, named):
    assert named in wrong(*args)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("foo: 3", "no option foo"),
        ("foo: {}", "no option foo"),
        ("model: {foo: {}}", "no option model.foo"),
        ("model: {rope_scaling: {foo: {}}}", "no option model.rope_scaling.foo"),
        ("model: {hiden_size: 3}", "the nearest is model.hidden_size"),
        ("model: 3", "model must be a mapping"),
        ("model: null", "model must be a mapping"),
        ("- a", "must be a mapping"),
        ("", "holds no options"),
        ("a: [", "is not YAML"),
        ("steps: abc", "--steps: must be a whole number"),
        ("steps: 2\nsteps: 3", "steps stands twice"),
        ("model: {hidden_size: 64, hidden_size: 128}", "hidden_size stands twice"),
        ("steps:", "steps is null"),
        ("precision: null", "precision is null"),
        ("recompute: null", "recompute is null"),
        ("data: {source: null}", "data.source is null"),
        ("policy: {keep_bf16: null}", "policy.keep_bf16 is null"),
        ("trainer: {progress_bar: null}", "trainer.progress_bar is null"),
        ("recompute: {mlp: 1}", "must be a list of words"),
        ("recompute: 3", "must be a list of words"),
        ("precision: [mxfp8]", "must be one word"),
        ("out: 3", "--out: must be text or null, got 3"),
        ("[" * 2000, "nested too deeply"),
        ("precision: fp9", "--precision"),
        ("out: !!python/object/apply:os.getcwd []", "is not YAML"),
        ("model: {rope_scaling: {class_path: os.path}}", "no option model.rope_scaling.class_path"),
        ("\xff", "a.yaml"),
    ],
)
def test_a_wrong_yaml_file_is_one_line_that_names_it(text, named, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_bytes(text.encode("latin-1"))
    assert named in wrong("--config", str(file))


def test_the_matrix_crosses_precisions_and_recompute_sets(tmp_path):
    args = ["--precision", "bf16,fp8-current", "--recompute", "none,mla_up_proj+moe_act", "--steps", "2"]
    rows = [(c.precision, c.recompute, c.steps) for c in parse_matrix(args, "smoke matrix")]
    both = ("mla_up_proj", "moe_act")
    assert rows == [("bf16", (), 2), ("bf16", both, 2), ("fp8-tensorwise", (), 2), ("fp8-tensorwise", both, 2)]
    assert len(parse_matrix([], "smoke matrix")) == 2 * len(PRECISIONS)
    debug = parse_matrix(["--config", str(ROOT / "configs/debug.yaml")], "smoke matrix")
    assert debug == [RunConfig()]
    with pytest.raises(UsageError, match="nearest"):
        parse_matrix(["--precision", "mxfp8,nope"], "smoke matrix")
    with pytest.raises(UsageError, match="--precision bf16,bf16: name each one once"):
        parse_matrix(["--precision", "bf16,bfloat16"], "smoke matrix")
    with pytest.raises(UsageError, match="mlp.moe_act,moe_act.mlp: name each set once"):
        parse_matrix(["--recompute", "mlp+moe_act,moe_act+mlp"], "smoke matrix")
    with pytest.raises(UsageError, match="name a precision"):
        parse_matrix(["--precision", "[]"], "smoke matrix")


def test_a_working_directory_that_is_gone_is_one_line(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert "working directory does not exist" in wrong()


def test_every_option_has_help(capsys):
    with pytest.raises(SystemExit):
        run("--help")
    shown = capsys.readouterr().out
    for path in _paths(RunConfig()):
        assert f"--{path}" in shown
    assert "function" not in shown


def _paths(value, prefix=""):
    for f in dataclasses.fields(value):
        inner = getattr(value, f.name)
        if dataclasses.is_dataclass(inner) and f.name != "rope_scaling":
            yield from _paths(inner, f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}"


def test_explain_covers_every_check(capsys):
    assert sorted(EXPLAINED) == sorted(CHECKS)
    for check in CHECKS:
        assert cli.main(["explain", check]) == 0
        assert capsys.readouterr().out == text(check)
        assert all(title in text(check) for title in ("What it proves", "How it measures", "Limit", "When it is red"))


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], "name a command"),
        (["rum"], "nearest is run"),
        (["explain", "quantiser"], "nearest is quantizer"),
        (["explain"], "name a check"),
        (["env", "--all"], "--all"),
        (["run", "--precision", "fp9"], "--precision"),
        (["matrix", "--precision", "fp9"], "--precision"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(args, named, capsys):
    assert cli.main(args) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert named in printed.err


def test_version_and_help(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"smoke {__version__}\n"
    assert cli.main(["--help"]) == 0
    assert all(command in capsys.readouterr().out for command in ["matrix"])


def test_a_crash_is_exit_3_with_its_traceback_and_ctrl_c_130(monkeypatch, capsys):
    def crash(*_):
        raise RuntimeError("boom")

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "env", crash)
    assert cli.main(["env"]) == 3
    assert "RuntimeError: boom" in capsys.readouterr().err
    monkeypatch.setitem(cli.COMMANDS, "env", stop)
    assert cli.main(["env"]) == 130


def test_the_option_tree_and_the_sections_agree():
    groups = {f.name for f in dataclasses.fields(RunConfig) if dataclasses.is_dataclass(getattr(RunConfig(), f.name))}
    assert groups == set(options.GROUPS)


@pytest.mark.parametrize(
    ("args", "code", "named"),
    [
        (["--backend", "te"], 4, "transformer-engine is not installed"),
        (["--model.qk_rope_head_dim", "7"], 2, "--model.qk_rope_head_dim 7"),
        (["--data.source", "text:/missing"], 2, "/missing"),
    ],
)
def test_train_py_refuses_in_one_line(args, code, named, tmp_path):
    command = [sys.executable, str(ROOT / "train.py"), *args, "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert (report["exit_code"], report["verdict"]) == (code, "error" if code == 2 else "unsupported")
    assert named in report["message"]
