"""Response senders, before responders that note what they are sent."""

import threading

import numpy as np
import pytest

from penstock.backends import triton_python_backend_utils as pb_utils
from penstock.backends.triton_responses import OneResponse, fail_open
from penstock.errors import BackendFailed

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class Noting:
    is_cancelled = False

    def __init__(self) -> None:
        self.sent: list[tuple[object, bool, object]] = []

    def send(self, answer, *, is_final, parameters=None):
        if self.sent and self.sent[-1][1]:
            raise BackendFailed("it was final")
        self.sent.append((answer, is_final, parameters))


def response(value: int, **fields: object) -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([value]))], **fields)


def request(responder: object) -> pb_utils.InferenceRequest:
    made = pb_utils.InferenceRequest()
    made.answer_by(responder)
    return made


def test_a_sender_passes_on_responses_and_the_end():
    responder = Noting()
    made = request(responder)
    sender = made.get_response_sender()
    assert made.get_response_sender() is sender
    sender.send(response(1, parameters={"n": 1}))
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("why")), flags=0)
    sender.send(flags=FINAL)
    (first, error, end) = responder.sent
    assert (first[0]["y"].tolist(), first[1:]) == ([1], (False, {"n": 1}))
    assert isinstance(error[0], BackendFailed) and str(error[0]) == "why" and not error[1]
    assert end == (None, True, None)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "expected a response, or the flag"),
        ({"response": response(1), "flags": 2}, "flags are 2; expected 0 or"),
    ],
)
def test_a_wrong_send_is_refused(arguments, text):
    responder = Noting()
    with pytest.raises(pb_utils.TritonModelException, match=text):
        request(responder).get_response_sender().send(**arguments)
    assert not responder.sent


def test_a_sender_is_closed_after_the_final_response():
    sender = request(Noting()).get_response_sender()
    sender.send(response(1), FINAL)
    with pytest.raises(pb_utils.TritonModelException, match="closed; the last was final"):
        sender.send(response(2))


def test_what_a_responder_refuses_is_told_to_the_model():
    responder = Noting()
    responder.sent.append((None, True, None))
    with pytest.raises(pb_utils.TritonModelException, match="it was final"):
        request(responder).get_response_sender().send(response(1))


def test_a_cancelled_request_says_so_by_itself_and_by_its_sender():
    responder = Noting()
    made = request(responder)
    assert not made.is_cancelled() and not made.get_response_sender().is_cancelled()
    responder.is_cancelled = True
    assert made.is_cancelled() and made.get_response_sender().is_cancelled()
    assert not pb_utils.InferenceRequest().is_cancelled()


def test_a_request_that_a_model_makes_has_no_sender():
    with pytest.raises(pb_utils.TritonModelException, match="made this request itself"):
        pb_utils.InferenceRequest().get_response_sender()


def test_one_response_is_waited_for():
    one = OneResponse()
    given = {"is_final": True, "parameters": {"n": 1}}
    thread = threading.Thread(target=one.send, args=({"y": np.array([1])},), kwargs=given)
    thread.start()
    answer, parameters = one.wait()
    thread.join()
    assert answer["y"].tolist() == [1] and parameters == {"n": 1}


@pytest.mark.parametrize(
    ("number", "text"), [(0, "no response to a request"), (2, "several responses to a request")]
)
def test_another_number_of_responses_than_one_is_an_error(number, text):
    one = OneResponse()
    for value in range(number):
        one.send({"y": np.array([value])}, is_final=False, parameters={"n": value})
    one.send(None, is_final=True)
    answer, parameters = one.wait()
    assert parameters == {}
    assert isinstance(answer, BackendFailed) and text in str(answer)


def test_only_open_requests_are_failed():
    ended, still_open = Noting(), Noting()
    ended.sent.append((None, True, None))
    fail_open([ended, still_open], BackendFailed("why"))
    assert len(ended.sent) == 1
    assert [each[1] for each in still_open.sent] == [True]
