"""A model in this process, as `penstock.load` returns it: tensors or texts in, answers out."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np

from penstock.api import predictions
from penstock.config import LLM, ModelConfig
from penstock.errors import InvalidRequest, PenstockError, Unsupported
from penstock.serving import local
from penstock.serving.local import LocalModel
from penstock.types import Array

if TYPE_CHECKING:
    from penstock.api.local_text import LocalTextModel, Prompt
    from penstock.repository.layout import RepositoryScan
    from penstock.serving.drift import InputDrift
    from penstock.serving.registered import RegisteredRows
    from penstock.wire.arrays import Given


class LoadedModel:
    """Safe to use from any thread. Close it, or use it in a `with` block: it owns threads and, for
    language models, processes."""

    def __init__(self, found: RepositoryScan, where: str, version: str = "") -> None:
        self.config: ModelConfig = local.choose(found, where, version)
        self._tensors: LocalModel | None = None
        self._text: LocalTextModel | None = None
        if self.config.backend == LLM:
            from penstock.api.local_text import LocalTextModel

            self._text = LocalTextModel(self.config)
        else:
            self._tensors = LocalModel(self.config)

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LoadedModel {self.config.name}/{self.config.version}>"

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def version(self) -> str:
        return self.config.version

    def infer(self, inputs: Given | RegisteredRows) -> dict[str, Array]:
        """Return outputs by name. A model that needs one input takes a single array, text or list
        of texts; if the model has a batch dimension, so must the arrays."""
        return self._takes_tensors().infer(inputs)

    async def infer_async(self, inputs: Given | RegisteredRows) -> dict[str, Array]:
        """Like `infer`, for callers with an event loop. Cancelling it cancels the request."""
        return await asyncio.wrap_future(self.submit(inputs))

    def submit(
        self, inputs: Given | RegisteredRows, *, copy: bool = False
    ) -> Future[dict[str, Array]]:
        """Like `infer`, without waiting: concurrent requests are batched. Arrays of 16 kB or more
        are not copied, so they must not change before the answer; with `copy` they may."""
        return self._takes_tensors().submit(inputs, copy=copy)

    def register(self, arrays: Array | Mapping[str, Array]) -> RegisteredRows:
        """Return rows that `infer` and `submit` take without copying them: `rows[i]`, `rows[i:j]`.

        The first dimension of the arrays is the rows. They must have the datatype of the input and
        be C-contiguous, and may be changed only while no request with the rows is open."""
        return self._takes_tensors().register(arrays)

    def _takes_tensors(self) -> LocalModel:
        if self._tensors is None:
            raise Unsupported(f"'{self.name}' is a language model: use generate, not infer")
        return self._tensors

    # A text is also a sequence of texts: the first form that fits counts.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompt: Prompt, *, progress: bool = True, **parameters: object
    ) -> str: ...
    @overload
    def generate(
        self, prompt: Sequence[Prompt], *, progress: bool = True, **parameters: object
    ) -> list[str]: ...
    def generate(
        self, prompt: Prompt | Sequence[Prompt], *, progress: bool = True, **parameters: object
    ) -> str | list[str]:
        """Return the answer of a language model. A text is continued; a list of messages is a
        chat. `parameters` are fields of OpenAI's requests: max_tokens, temperature, stop, ...

        Several prompts, as many as you like, get a list of answers in their order. `progress` shows
        a bar on stderr if that is a terminal. PromptsFailed has the answers of all others if some
        fail."""
        prompts = _several(prompt)
        if prompts is None:
            return "".join(self.stream(cast("Prompt", prompt), **parameters))
        answers = predictions.Answers(len(prompts))
        with predictions.show_bar(len(prompts), progress, "generate") as advance:
            events = self._takes_text(parameters).stream(prompts, parameters)
            with contextlib.closing(events):
                for event in events:
                    advance(answers.take(event))
        return answers.texts()

    @overload
    async def generate_async(  # type: ignore[overload-overlap]
        self, prompt: Prompt, *, progress: bool = True, **parameters: object
    ) -> str: ...
    @overload
    async def generate_async(
        self, prompt: Sequence[Prompt], *, progress: bool = True, **parameters: object
    ) -> list[str]: ...
    async def generate_async(
        self, prompt: Prompt | Sequence[Prompt], *, progress: bool = True, **parameters: object
    ) -> str | list[str]:
        """Like `generate`, for callers with an event loop. Cancelling it cancels the requests."""
        several = _several(prompt)
        prompts = [cast("Prompt", prompt)] if several is None else several
        answers = predictions.Answers(len(prompts))
        is_shown = progress and several is not None
        with predictions.show_bar(len(prompts), is_shown, "generate") as advance:
            events = self._takes_text(parameters).stream_async(prompts, parameters)
            async with contextlib.aclosing(events):
                async for event in events:
                    if several is None and isinstance(event[1], PenstockError):
                        raise event[1]
                    advance(answers.take(event))
        return answers.texts() if several is not None else answers.texts()[0]

    @overload
    def stream(  # type: ignore[overload-overlap]
        self, prompt: Prompt, **parameters: object
    ) -> Iterator[str]: ...
    @overload
    def stream(
        self, prompt: Sequence[Prompt], **parameters: object
    ) -> Iterator[tuple[int, str]]: ...
    def stream(
        self, prompt: Prompt | Sequence[Prompt], **parameters: object
    ) -> Iterator[str] | Iterator[tuple[int, str]]:
        """Like `generate`, piece by piece; of several prompts, each piece comes with the number of
        its prompt. Leaving the loop early cancels the requests."""
        text, prompts = self._takes_text(parameters), _several(prompt)
        if prompts is None:
            events = text.stream([cast("Prompt", prompt)], parameters)
            return (piece for _, piece in predictions.pieces_of(events, 1))
        return predictions.pieces_of(text.stream(prompts, parameters), len(prompts))

    def _takes_text(self, parameters: Mapping[str, object]) -> LocalTextModel:
        if self._text is None:
            raise Unsupported(f"'{self.name}' is not a language model: use infer, not generate")
        from penstock.api.local_text import check_names

        check_names(parameters)
        return self._text

    def predict(
        self,
        dataset: str | os.PathLike[str] | Given,
        *,
        batch_size: int = 0,
        progress: bool = True,
        **parameters: object,
    ) -> dict[str, Array]:
        """Run the model over a whole data set and return the outputs of all rows, in order.

        `dataset` is a file or folder as for `bench --data`, or arrays with a first dimension of
        rows. Language models take prompts, or a file of them, and return {"text": ...}.
        `batch_size` 0 uses the model's largest batch. `progress` shows a bar on stderr."""
        if self._text is not None:
            prompts = predictions.read_prompts(dataset)
            texts = self.generate(prompts, progress=progress, **parameters)
            return {"text": np.array(texts, dtype=np.object_)}
        assert self._tensors is not None
        columns = predictions.read_rows(dataset, self.config)
        with predictions.show_bar(columns.num_examples, progress) as advance:
            return predictions.run(self._tensors, columns, batch_size, advance)

    def statistics(self) -> Mapping[str, Any]:
        """Return an entry of v2's statistics, as in a server's `/stats`."""
        served = self._tensors or self._text
        assert served is not None
        return served.statistics()

    def drift(self) -> Sequence[InputDrift]:
        """Return how the inputs so far compare with the data that the version was optimised on;
        empty for versions without such evidence, and for language models."""
        return [] if self._tensors is None else self._tensors.drift()

    def close(self) -> None:
        """Answer queued requests with an error and stop. Closing again does nothing."""
        for each in (self._tensors, self._text):
            if each is not None:
                each.close()


def _several(prompt: object) -> list[Prompt] | None:
    """Return the prompts of a list of prompts; None for one."""
    from penstock.api.local_text import is_one

    if is_one(prompt):
        return None
    is_scalar = isinstance(prompt, np.ndarray) and not prompt.ndim
    if isinstance(prompt, Mapping | bytes) or not isinstance(prompt, Iterable) or is_scalar:
        kind = type(prompt).__name__
        raise InvalidRequest(f"a prompt is of type {kind}; expected a text or a list of messages")
    return list(prompt)
