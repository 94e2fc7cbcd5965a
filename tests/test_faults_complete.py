"""The list of faults: every check has one, names are unique, and what a fault says can be looked up."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import smoke
from smoke.environment import detect
from smoke.faults import FAULTS, active, by_name, injected, replaced, small_config
from smoke.plan import resolve
from smoke.requirements import CHECKS


def test_every_check_has_a_fault_that_turns_it_red():
    shown = {check for fault in FAULTS for check in fault.red}
    assert set(CHECKS) - shown == set()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_well_formed(fault):
    assert {*fault.red, *fault.may_follow} <= set(CHECKS)
    assert fault.red
    assert fault.where
    assert not set(fault.red) & set(fault.may_follow)
    plan = resolve(small_config(**{"device": "cpu", **fault.changes}), detect())
    missing = set(fault.red) - set(plan.required)
    assert not missing, f"the run does not require {missing}"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_leaves_the_program_as_it_was(fault):
    before = _program()
    with injected(fault):
        assert active() == fault.name
    assert active() == ""
    after = _program()
    assert {name for name, value in before.items() if after.get(name) is not value} == set()


OPTIONAL = {"triton", "te", "megatron", "bench", "pytest_plugin", "__main__"}


@pytest.fixture(scope="module", autouse=True)
def _everything_imported():
    """What a fault replaces must be there before it is injected, or nobody could see that it stays."""
    for module in pkgutil.walk_packages(smoke.__path__, "smoke."):
        if not OPTIONAL & set(module.name.split(".")):
            importlib.import_module(module.name)


def _program() -> dict[str, object]:
    """Every attribute of every module of the package, and of every class in them."""
    found: dict[str, object] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "smoke":
            for key, value in list(vars(module).items()):
                found[f"{name}.{key}"] = value
                if isinstance(value, type) and value.__module__ == name:
                    found |= {f"{name}.{key}.{attribute}": inner for attribute, inner in vars(value).items()}
    return {name: value for name, value in found.items() if not name.endswith(("__dict__", "__weakref__"))}


def test_names_are_unique_and_an_unknown_one_names_the_nearest():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert by_name(FAULTS[0].name) is FAULTS[0]
    with pytest.raises(LookupError, match="the nearest is stale-scale"):
        by_name("stale-scal")


def test_a_replaced_attribute_is_put_back_or_inherited_again():
    class Base:
        value = 1

    class Child(Base):
        own = staticmethod(len)

    kept = vars(Child)["own"]
    with replaced(Child, "value", 2), replaced(Child, "own", 3):
        assert (Child.value, Child.own) == (2, 3)
    assert Child.value == 1
    assert "value" not in vars(Child)
    assert vars(Child)["own"] is kept


def test_the_list_of_faults_loads_neither_torch_nor_lightning():
    code = "import sys, smoke.faults; print(sorted({'torch', 'lightning'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
