"""Operators with times made up by tests."""

from penstock.profiling.work import OperatorTime, Shaped


def product(name: str, seconds: float, rows: int = 512, width: int = 1024) -> OperatorTime:
    """A square of weights; enough rows make it compute."""
    inputs = (Shaped("fp32", (rows, width)), Shaped("fp32", (width, width)))
    outputs = (Shaped("fp32", (rows, width)),)
    return OperatorTime(name, "MatMul", seconds, inputs, outputs, inputs[1].num_bytes)


def sum_of_two(name: str, seconds: float, num_elements: int = 1_000_000) -> OperatorTime:
    tensor = Shaped("fp32", (num_elements,))
    return OperatorTime(name, "Add", seconds, (tensor, tensor), (tensor,))
