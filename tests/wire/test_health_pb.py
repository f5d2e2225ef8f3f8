"""Our messages of grpc.health.v1 are those of grpcio-health-checking."""

import pytest
from grpc_health.v1 import health_pb2

from penstock.wire import health_pb

STATUSES = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")


@pytest.mark.parametrize("name", STATUSES)
def test_answers(name: str):
    status = getattr(health_pb, name)
    assert status == getattr(health_pb2.HealthCheckResponse, name)
    ours = health_pb.HealthCheckResponse(status=status).SerializeToString()
    assert ours == health_pb2.HealthCheckResponse(status=status).SerializeToString()


@pytest.mark.parametrize("service", ["", "m", "é"])
def test_requests(service: str):
    theirs = health_pb2.HealthCheckRequest(service=service).SerializeToString()
    assert health_pb.HealthCheckRequest.FromString(theirs).service == service
    assert health_pb.HealthCheckRequest.DESCRIPTOR.full_name == "grpc.health.v1.HealthCheckRequest"
