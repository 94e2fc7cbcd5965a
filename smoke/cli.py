"""The command line of ``smoke``, commands as in ``DESCRIPTION`` below: arguments in, exit code out.

Everything heavy is imported inside the command that needs it, so that ``--help`` and a mistyped option answer at once.
A request that cannot run ends in one line on standard error and the exit code of its reason; a crash shows its
traceback and ends in 3, never in the 1 that means "a required check failed".
"""

from __future__ import annotations

import dataclasses
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from smoke import __version__
from smoke.output import lasting, printable
from smoke.process import own

if TYPE_CHECKING:
    from smoke.environment import Environment

DESCRIPTION = """\
usage: smoke COMMAND [options]

Trains a small DeepSeek-V3-shaped model for a few steps and says, with evidence, whether a combination of
low-precision recipe, activation recompute and kernels can be trusted.

commands:
  run            train, check, print a verdict (python train.py does the same)
  matrix         every precision with every recompute set, one table
  preflight      every rule of a request (the options of run), kept or broken, and known public defects; no training
  selftest       inject every known fault into a small run: the right checks must turn red, the others stay green
  replay BUNDLE  reproduce the failures of a red run alone, from the bundle in its folder
  baseline       update, show or diff: exact losses and costs of reviewed runs, for --baseline FILE
  env            versions, devices, and what each precision would run on here, and why
  explain CHECK  what a check proves, how it measures, where its limit comes from, what to do when it is red

smoke COMMAND --help lists the options of a command; smoke --version prints the version.

exit codes: 0 passed, 1 a required check failed, 2 wrong usage, 3 crash or a check that could not judge,
4 this machine lacks something or a required check was skipped, 5 blocked by an installed package,
6 no baseline of this toolchain under --require-baseline, 130 and 143 interrupted.
"""
RED, USAGE, CRASH, INTERRUPTED = 1, 2, 3, 130


def main(args: Sequence[str] | None = None, *, prog: str = "smoke") -> int:
    """Run one command and return the exit code. ``args`` default to the command line's.

    A run whose output nobody takes goes on to its report; a command that only prints has then failed, unless its
    reader left (``smoke env | head -1``).
    """
    args = list(sys.argv[1:] if args is None else args)
    with lasting() as output:
        code = _command(args, prog)
        output.flush()
    lost = output.error is not None and not isinstance(output.error, BrokenPipeError)
    return CRASH if lost and code == 0 and args[:1] not in (["run"], ["matrix"], ["selftest"]) else code


def entry() -> NoReturn:
    """The console command ``smoke``: a process of its own."""
    own(main)


def _command(args: list[str], prog: str) -> int:
    command, rest = (args[0], args[1:]) if args else ("", [])
    if command in ("--help", "-h"):
        print(DESCRIPTION, end="")
        return 0
    if command == "--version":
        print(f"smoke {__version__}")
        return 0
    if command not in COMMANDS:
        return _fail(prog, _unknown("command", command, list(COMMANDS)))
    try:
        return COMMANDS[command](rest, prog if prog != "smoke" else f"smoke {command}")
    except SystemExit as stop:  # --help and --print_config of the option parser
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        return _fail(prog, "interrupted", INTERRUPTED)
    except Exception:
        traceback.print_exc()
        return _fail(prog, "crashed; the traceback is above", CRASH)


def run(args: Sequence[str], prog: str) -> int:
    """``smoke run``."""
    from smoke.options import UsageError, parse_run

    try:
        config = parse_run(args, prog)
    except UsageError as error:
        return _fail(prog, str(error))
    from smoke.plan import Refusal, resolve

    environment = facts()
    try:
        plan = resolve(config, environment)
    except Refusal as refusal:
        from smoke.run import refuse

        refuse(refusal, config, environment, _command_line(prog, args))
        return _fail(prog, refusal.message, refusal.exit_code)
    from smoke.run import execute

    return execute(plan, environment, _command_line(prog, args))


def matrix(args: Sequence[str], prog: str) -> int:
    """``smoke matrix``: all rows are planned before the first one runs."""
    from smoke.options import UsageError, parse_matrix

    try:
        configs = parse_matrix(args, prog)
    except UsageError as error:
        return _fail(prog, str(error))
    from smoke.plan import Refusal, resolve

    environment, plans = facts(), []
    for config in configs:
        try:
            plans.append(resolve(config, environment))
        except Refusal as refusal:
            row = f"{config.precision} with recompute {'+'.join(config.recompute) or 'none'}"
            return _fail(prog, f"{row}: {refusal.message}", refusal.exit_code)
    from smoke.run import execute_matrix

    return execute_matrix(plans, environment, _command_line(prog, args))


def preflight(args: Sequence[str], prog: str) -> int:
    """``smoke preflight``: the options of ``run``, judged on paper."""
    from smoke.options import UsageError, parse_run

    try:
        config = parse_run(args, prog)
    except UsageError as error:
        return _fail(prog, str(error))
    from smoke.preflight import examine, print_preflight

    found = examine(config, facts())
    print_preflight(found)
    return found.exit_code


def selftest(args: Sequence[str], prog: str) -> int:
    """``smoke selftest``."""
    from smoke.faults import FAULTS, by_name
    from smoke.options import UsageError, parse_selftest

    try:
        options = parse_selftest(args, prog)
        faults = [by_name(name) for name in options.only] or list(FAULTS)
    except UsageError as error:
        return _fail(prog, str(error))
    except LookupError as error:
        return _fail(prog, f"--only: {error}")
    from smoke.plan import Refusal
    from smoke.run.selftest import run_selftest

    try:
        return run_selftest(faults, facts(), _command_line(prog, args), out=options.out, device=options.device)
    except Refusal as refusal:
        return _fail(prog, refusal.message, refusal.exit_code)


def replay(args: Sequence[str], prog: str) -> int:
    """``smoke replay BUNDLE``."""
    if args and args[0] in ("--help", "-h"):
        print(REPLAY.format(prog=prog), end="")
        return 0
    if len(args) != 1:
        return _fail(prog, "name one bundle: the folder bundle of a red run, or the run's folder")
    from smoke.options import UsageError, parse_run
    from smoke.plan import Refusal
    from smoke.run import bundle

    try:
        folder, found = bundle.read(args[0])
        bundle.verify(folder, found)
        config = parse_run([f"--config={folder / bundle.OPTIONS}"], prog)
        from smoke.run.replay import replay as reproduce

        return reproduce(folder, found, config, facts())
    except (bundle.BundleError, UsageError) as error:
        return _fail(prog, str(error))
    except Refusal as refusal:
        return _fail(prog, refusal.message, refusal.exit_code)


REPLAY = """\
usage: {prog} BUNDLE

Reproduces the failures of a red run alone. BUNDLE is the folder bundle that the run left in its folder, or that folder.
Options, weights and batches are those of the bundle, and so is the injected fault, if there was one.

exit codes: 1 reproduced, 0 did not reproduce, 2 no bundle that this version can replay, 3 crash or could not judge,
4 the bundle's device or operations are not here
"""


def baseline(args: Sequence[str], prog: str) -> int:
    """``smoke baseline update|show|diff``."""
    from smoke.options import BASELINE_ACTIONS, UsageError, parse_baseline

    action, rest = (args[0], args[1:]) if args else ("", [])
    if action in ("--help", "-h"):
        actions = "\n".join(f"  {name:6} {text}" for name, text in BASELINE_ACTIONS.items())
        print(f"usage: {prog} ACTION [options]\n\n{actions}\n\n{prog} ACTION --help lists the options of an action.")
        return 0
    if action not in BASELINE_ACTIONS:
        return _fail(prog, _unknown("action", action, list(BASELINE_ACTIONS)))
    from smoke.baseline.commands import NotGreen, diff, show, update
    from smoke.baseline.file import BaselineError

    try:
        options = parse_baseline(action, rest, f"{prog} {action}")
        if action == "update":
            return update(options.folders, options.baseline, options.reason)
        return diff(options.folders[0], options.baseline) if action == "diff" else show(options.baseline)
    except (UsageError, BaselineError) as error:
        return _fail(prog, str(error))
    except NotGreen as error:
        return _fail(prog, str(error), RED)
    except OSError as error:
        return _fail(prog, f"--baseline {options.baseline}: cannot be written: {error.strerror}")


def env(args: Sequence[str], prog: str) -> int:
    """``smoke env``."""
    if args:
        if args[0] in ("--help", "-h"):
            print(f"usage: {prog}\n\nPrints versions, devices, and what each precision would run on here, and why.")
            return 0
        return _fail(prog, f"takes no options, got {args[0]}")
    from smoke.inventory import print_environment

    print_environment(facts())
    return 0


def explain(args: Sequence[str], prog: str) -> int:
    """``smoke explain CHECK``."""
    from smoke.explain import CHECKS, text

    if len(args) == 1 and args[0] in CHECKS:
        print(text(args[0]), end="")
        return 0
    if args and args[0] in ("--help", "-h"):
        print(f"usage: {prog} CHECK\n\nCHECK is one of {', '.join(CHECKS)}.")
        return 0
    return _fail(prog, _unknown("check", " ".join(args), list(CHECKS)))


COMMANDS: dict[str, Callable[[Sequence[str], str], int]] = {
    "run": run,
    "matrix": matrix,
    "selftest": selftest,
    "preflight": preflight,
    "replay": replay,
    "baseline": baseline,
    "env": env,
    "explain": explain,
}


def facts() -> Environment:
    """This machine, with Transformer Engine's own answers where it is installed and has a device to run on."""
    from smoke.environment import detect

    environment = detect()
    if environment.missing("transformer-engine") or not environment.cuda_available:
        return environment
    from smoke.precision.te import blockers

    return dataclasses.replace(environment, transformer_engine=blockers())


def _command_line(prog: str, args: Sequence[str]) -> list[str]:
    start = ["python", prog] if prog.endswith(".py") else prog.split()
    return [*start, *args]


def _unknown(kind: str, word: str, words: list[str]) -> str:
    from smoke.config import nearest

    if not word:
        return f"name a {kind}: {', '.join(words)}"
    return f"no {kind} {word!r}; the nearest is {nearest(word, words)}, known are {', '.join(words)}"


def _fail(prog: str, message: str, code: int = USAGE) -> int:
    print(f"{prog}: error: {printable(message)}", file=sys.stderr)
    return code
