"""Layers of a convolutional network compute in one layout, without transposes between them."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from modelport.exporters.lowering.interpreter import Interpreter
from modelport.exporters.lowering.program import decompositions
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.runtime.tensorflow_runtime import tf


class GatedBottleneck(nn.Module):
    """An inverted bottleneck with a gate, padding of its own, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.Hardswish())
        self.depthwise = nn.Conv2d(16, 16, 3, groups=16)
        self.gate = nn.Conv2d(16, 16, 1)
        self.project = nn.Conv2d(24, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.depthwise(nn.functional.pad(self.expand(x), (1, 1, 1, 1)))
        y = y * torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True)))
        return x + self.project(torch.cat([y, x], 1))


def test_only_inputs_and_outputs_of_a_convolutional_network_are_transposed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), GatedBottleneck(), nn.MaxPool2d(2), GatedBottleneck()
    ).eval()
    x = torch.randn(2, 3, 12, 10)
    batch = torch.export.Dim("batch", min=1, max=8)
    with quiet(), torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},), strict=False)
        program = program.run_decompositions(decompositions())
    run = Interpreter(program)
    spec = tf.TensorSpec([None, 3, 12, 10], tf.float32)

    (eager,) = run(tf.constant(x.numpy()))
    graph = tf.function(run, input_signature=[spec], autograph=False).get_concrete_function()

    expected = model(x).detach().numpy()
    for found in (eager, graph(tf.constant(x.numpy()))[0]):
        assert np.allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert transposes_behind(graph.graph.outputs[0].op) == 2


def transposes_behind(operation) -> int:  # type: ignore[no-untyped-def]
    """The transposes that the result of ``operation`` needs."""
    seen, open_ = {}, [operation]
    while open_:
        each = open_.pop()
        if each.name not in seen:
            seen[each.name] = each.type
            open_ += [x.op for x in each.inputs]
    return list(seen.values()).count("Transpose")
