"""What shares memory is known, and what writes to it: views, writes in place, new memory."""

import pytest

torch = pytest.importorskip("torch")
aliasing = pytest.importorskip("penstock.backends.torch_aliasing")
tracing = pytest.importorskip("penstock.backends.torch_tracing")
nn = torch.nn


class Writes(nn.Module):
    def forward(self, x):
        held = torch.relu(x)
        view = held.view(-1)
        other = torch.add(x, 1)
        view.add_(1)
        other.mul_(2)
        return held.neg() + other.neg()


@pytest.fixture(scope="module")
def graph():
    traced = tracing.trace(Writes())
    return aliasing.GraphMemory(traced), {node.name: node for node in traced.graph.nodes}


def test_a_write_through_a_view_is_one_to_what_it_views(graph):
    memory, nodes = graph
    assert memory.is_written(nodes["relu"], nodes["relu"], [nodes["neg"]])
    assert memory.is_written(nodes["view"], nodes["view"], [nodes["neg"]])
    # Before it is written to.
    assert not memory.is_written(nodes["relu"], nodes["relu"], [nodes["add"]])
    # By the chain itself.
    chain = [nodes["view"], nodes["add_"], nodes["neg"]]
    assert not memory.is_written(nodes["relu"], nodes["relu"], chain)


def test_new_memory_is_nobody_elses(graph):
    memory, nodes = graph
    assert memory.is_fresh(nodes["relu"]) and memory.is_fresh(nodes["add"])
    assert not memory.is_fresh(nodes["view"]) and not memory.is_fresh(nodes["add_"])
    assert not memory.is_written(nodes["x"], nodes["x"], [nodes["neg_1"]])


def test_modules_and_their_hooks():
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    traced = tracing.trace(module)
    first, second = (node for node in traced.graph.nodes if node.op == "call_module")
    assert aliasing.called_module(traced, first) is traced.get_submodule("0")
    assert aliasing.has_no_hooks(aliasing.called_module(traced, second))
    traced.get_submodule("1").register_forward_hook(lambda *given: None)
    assert not aliasing.has_no_hooks(aliasing.called_module(traced, second))
    output = next(node for node in traced.graph.nodes if node.op == "output")
    assert aliasing.called_module(traced, output) is aliasing.NO_MODULE
