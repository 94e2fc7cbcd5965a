"""State of delayed scaling: one amax history and one scale for every quantized tensor slot of the model.

Slots are rows of two stacked buffers, so that one vectorised update serves the whole model. Timing follows Transformer
Engine: activations and weights are updated when the outermost autocast of a forward with gradients closes; output
gradients after backward, which here is when the next such autocast opens (nothing reads their scale in between).
A replay uses the scale that the first pass recorded and leaves the history alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from smoke.kernels.quantize.api import delayed_update


class DelayedState(nn.Module):
    """History ``[slots, length]`` (column 0 is the running amax) and scale ``[slots]``, float32 buffers."""

    amax_history: Tensor
    scale: Tensor

    def __init__(self, format_max: list[float], *, history_length: int, algorithm: str, margin: int, device=None):
        super().__init__()
        self.algorithm, self.margin = algorithm, margin
        slots = len(format_max)
        self.register_buffer("amax_history", torch.zeros(slots, history_length, device=device))
        self.register_buffer("scale", torch.ones(slots, device=device))
        self.format_max = torch.tensor(format_max, dtype=torch.float32, device=device)

    def _apply(self, fn, recurse=True):
        self.format_max = fn(self.format_max)
        return super()._apply(fn, recurse)

    def record(self, slot: int, amax: Tensor) -> None:
        """Fold one tensor's amax (float32 scalar, NaN ignored) into the running amax of its slot."""
        running = self.amax_history[slot, 0]
        torch.maximum(running, amax, out=running)

    def update(self) -> None:
        """Move the running amaxes into the histories and derive the next scales, in place."""
        history, scale = delayed_update(
            self.amax_history, self.scale, self.format_max, algorithm=self.algorithm, margin=self.margin
        )
        self.amax_history.copy_(history)
        self.scale.copy_(scale)
