"""Copies of weights are made once, anew when a weight has changed, and hold no weight alive."""

import gc
import weakref

import torch

from specctl.models.native.bits import packed
from specctl.models.weights.copies import Copies, num_writes


def test_a_copy_is_made_once_and_anew_after_a_change():
    made = []

    def make(weight):
        made.append(weight.sum().item())
        return weight.detach() + 1

    copies, weight = Copies(make), torch.nn.Parameter(torch.zeros(3))
    assert copies.of(weight) is copies.of(weight)
    with torch.no_grad():
        weight.add_(1.0)
    assert copies.of(weight).tolist() == [2.0, 2.0, 2.0]
    weight.data = torch.full((3,), 5.0)
    assert copies.of(weight).tolist() == [6.0, 6.0, 6.0]
    assert made == [0.0, 3.0, 15.0]


def test_writing_that_is_not_counted_is_not_missed():
    copies = Copies(torch.Tensor.clone)
    with torch.inference_mode():
        weight = torch.zeros(2)
        assert copies.of(weight).tolist() == [0.0, 0.0]
        weight.add_(1.0)
        assert copies.of(weight).tolist() == [1.0, 1.0]


def test_a_module_has_one_copy_of_all_its_parameters_and_buffers():
    copies, module = Copies(lambda norm: norm.running_mean + norm.weight), torch.nn.BatchNorm1d(2)
    first = copies.of(module)
    assert copies.of(module) is first
    module.running_mean.add_(1.0)
    assert copies.of(module).tolist() == [2.0, 2.0]


def test_every_writing_below_a_module_is_counted():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.PReLU()))
    module.register_parameter("none", None)
    seen = {num_writes(module)}
    for parameter in module.parameters():
        with torch.no_grad():
            parameter.add_(1.0)
        seen.add(num_writes(module))
    assert len(seen) == 4


def test_a_weight_with_copies_can_be_freed():
    weight = torch.nn.Parameter(torch.randn(16, 64))
    assert packed(weight, 4) is packed(weight, 4) is not packed(weight, 8)
    seen = weakref.ref(weight)
    del weight
    gc.collect()
    assert seen() is None
