"""For every test: one thread for each worker, and torch left as it was found."""

from __future__ import annotations

import os
import sys

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is imported: two workers with two threads each would fight for two cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def torch_state() -> dict[str, object]:
    """Global flags and random state of torch that a test, and the package, must leave as found."""
    import torch

    state: dict[str, object] = {
        "grad enabled": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill uninitialized memory": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "threads": torch.get_num_threads(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "cudnn deterministic": torch.backends.cudnn.deterministic,
        "cudnn benchmark": torch.backends.cudnn.benchmark,
        "random state": torch.get_rng_state().numpy().tobytes(),
    }
    if torch.cuda.is_initialized():
        state["cuda random state"] = [s.numpy().tobytes() for s in torch.cuda.get_rng_state_all()]
    return state


@pytest.fixture(autouse=True)
def torch_left_as_found():
    """Fail a test that changes torch's global flags or random state. Tests that never import torch pay nothing."""
    if "torch" not in sys.modules:
        yield
        return
    before = torch_state()
    yield
    after = torch_state()
    changed = [name for name in before if before[name] != after[name]]
    assert not changed, f"the test changed torch's global {', '.join(changed)}"
