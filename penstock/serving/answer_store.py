"""Answers by the digest of their request, within a number of bytes: the last used stay. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.types import Parameter, Response, Tensor

# What Python needs for one answer and for one of its tensors, beside the bytes of the tensor
# (measured: 440 and 330, rounded up).
ANSWER_BYTES, TENSOR_BYTES = 512, 384


@dataclass(frozen=True, slots=True)
class StoredTensor:
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """A copy of an answer. `has_form`: all answers to requests of the same form have its shapes."""

    tensors: tuple[StoredTensor, ...]
    parameters: Mapping[str, Parameter] | None = None
    has_form: bool = False

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""
        parameters = sum(len(str(item)) for item in (self.parameters or {}).items())
        tensors = sum(len(each.data) + len(each.name) + TENSOR_BYTES for each in self.tensors)
        return ANSWER_BYTES + parameters + tensors

    def tensors_copied(self) -> list[Tensor]:
        """Return tensors for a response; their bytes are shared."""
        return [Tensor(each.name, each.datatype, each.shape, each.data) for each in self.tensors]


def needed_bytes(outputs: Sequence[Tensor]) -> int:
    """Return what an answer with these outputs takes at least, before they are copied."""
    return ANSWER_BYTES + sum(each.nbytes + TENSOR_BYTES for each in outputs)


def copy_answer(response: Response) -> StoredAnswer:
    tensors = [
        StoredTensor(each.name, each.datatype, tuple(each.shape), bytes(each.data))
        for each in response.outputs
    ]
    parameters = dict(response.parameters) if response.parameters else None
    return StoredAnswer(tuple(tensors), parameters, has_form=response.form is not None)


class AnswerStore:
    """Invariant: `num_bytes` is the sum of what the answers take, and never above `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        # Last used at the end.
        self._answers: OrderedDict[bytes, StoredAnswer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, digest: bytes) -> StoredAnswer | None:
        answer = self._answers.get(digest)
        if answer is not None:
            self._answers.move_to_end(digest)
        return answer

    def put(self, digest: bytes, answer: StoredAnswer) -> bool:
        """Keep an answer in place of those that were not used for the longest time. False if it
        would not fit an empty store."""
        needed = answer.num_bytes
        if needed > self.max_bytes:
            return False
        known = self._answers.pop(digest, None)
        if known is not None:
            self.num_bytes -= known.num_bytes
        while self.num_bytes + needed > self.max_bytes:
            _, oldest = self._answers.popitem(last=False)
            self.num_bytes -= oldest.num_bytes
        self._answers[digest] = answer
        self.num_bytes += needed
        return True
