"""Multi-token prediction: which labels, which inputs."""

import torch
from torch import nn

from smoke.config import ModelConfig
from smoke.model.attention import Sequences
from smoke.model.mtp import MultiTokenPrediction, next_labels


def packed(*lengths):
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Sequences(lengths, positions)


def loop(labels, lengths):
    """For each token the label of the next token of its own sequence, if both are tokens."""
    out, start = [], 0
    for length in lengths:
        row = labels[start : start + length]
        for i in range(length):
            inside = i + 1 < length and row[i] != -100
            out.append(row[i + 1] if inside else -100)
        start += length
    return out


def test_labels_are_those_after_the_next_and_stay_in_the_sequence():
    labels = [5, 6, 7, -100, -100, 9, -100, 3, 4, -100, -100]
    lengths = (4, 1, 2, 4)
    got = next_labels(torch.tensor(labels), packed(*lengths))
    assert got.tolist() == loop(labels, lengths) == [6, 7, -100, -100, -100, -100, -100, 4, -100, -100, -100]


def test_labels_do_not_cross_rows_whose_last_label_counts():
    labels = torch.tensor([[1, 2, 3], [4, 5, 6]])
    rows = Sequences((3, 3), torch.arange(3).repeat(2))
    assert next_labels(labels.flatten(), rows).tolist() == [2, 3, -100, 5, 6, -100]
    assert labels.tolist() == [[1, 2, 3], [4, 5, 6]], "the labels themselves are untouched"


class Recorder(nn.Module):
    """Stands where the decoder layer is: hands its input back and keeps the rest."""

    def forward(self, hidden_TH, *rest):
        self.seen, self.rest = hidden_TH, rest
        return hidden_TH, torch.tensor(0.5)


def test_module_joins_next_embedding_and_hidden_state():
    config = ModelConfig(hidden_size=6)
    layer = Recorder()
    module = MultiTokenPrediction(config, layer, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.normal_(generator=generator)
    hidden, embedded = torch.randn(2, 5, 6, dtype=torch.float64, generator=generator)

    def norm(x, leaf):
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * leaf.weight

    out, aux_loss = module(hidden, embedded, "sequences")
    pair = torch.cat((norm(embedded, module.enorm), norm(hidden, module.hnorm)), dim=-1)
    torch.testing.assert_close(layer.seen, pair @ module.eh_proj.weight.mT, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out, norm(layer.seen, module.final_layernorm), rtol=1e-12, atol=1e-12)
    assert layer.rest == ("sequences",)
    assert aux_loss == 0.5
