"""The future of one request in process, which costs little while no thread waits for it. Pure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from penstock.errors import PenstockError, Unsupported
from penstock.types import Array, Request, Response

PENDING, RUNNING, FINISHED = "PENDING", "RUNNING", "FINISHED"
# Guards the making of conditions. Nothing is allocated under it, so no finalizer runs there.
_MAKING = threading.RLock()

Answer = dict[str, Array]


class AnswerFuture(Future[Answer]):
    """A `concurrent.futures.Future` and the sink of its request. Cancelling it cancels the request.

    Its condition is made when a thread first waits, cancels or adds a callback. Invariant: without
    a condition no thread holds it, so `respond` only has to keep others from making one.
    """

    # What `Future.__init__` sets is made together with the condition.
    _state = PENDING
    _result: Answer | None = None
    _exception: BaseException | None = None
    _made: threading.Condition | None = None

    def __init__(self, cancel: Callable[[Request], None], answering_thread: int = 0) -> None:
        """`answering_thread` is the identifier of the thread that calls `respond`; 0: not known."""
        self._cancel = cancel
        self._answering_thread = answering_thread
        # Set by who submits, before anybody else sees the future; dropped with the answer, since
        # the request refers to the future.
        self.request: Request | None = None

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        if self._made is None:
            made, waiters, callbacks = threading.Condition(), [], []  # type: ignore[var-annotated]
            with _MAKING:
                if self._made is None:
                    self._waiters, self._done_callbacks = waiters, callbacks
                    self._made = made
        return self._made

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        """Take the answer, whose arrays become the caller's; called on the model's thread."""
        self.request = None
        if isinstance(answer, PenstockError):
            if self.set_running_or_notify_cancel():
                self.set_exception(answer)
            return
        outputs = answer.arrays
        assert outputs is not None, "the request takes arrays"
        with _MAKING:
            if self._made is None:
                self._result = outputs
                self._state = FINISHED
                return
        if self.set_running_or_notify_cancel():
            self.set_result(outputs)

    def result(self, timeout: float | None = None) -> Answer:
        # An answer is final; only errors and open requests need the condition.
        if self._state == FINISHED and self._result is not None:
            return self._result
        self._check_wait("result()", timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._check_wait("exception()", timeout)
        return super().exception(timeout)

    def done(self) -> bool:
        return self._state not in (PENDING, RUNNING)

    def cancel(self) -> bool:
        request = self.request
        if not super().cancel():
            return False
        # Without one, the answer comes at this moment, and is dropped.
        if request is not None:
            self._cancel(request)
        return True

    def _check_wait(self, call: str, timeout: float | None) -> None:
        """Unsupported if waiting would keep the answer from coming."""
        if timeout != 0 and not self.done():
            check_may_block(call, self._answering_thread)


def check_may_block(call: str, answering_thread: int) -> None:
    """Unsupported on the thread that answers, on which done-callbacks run: it would wait for
    itself."""
    if threading.get_ident() == answering_thread:
        raise Unsupported(
            f"{call} in a callback blocks the thread that answers, for ever; "
            "use submit() and add_done_callback() there, or call it in another thread"
        )
