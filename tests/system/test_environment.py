"""Which variables of the server's environment a model's code can read."""

import pytest

from penstock.system.environment import allowed, asked_for


@pytest.mark.parametrize(
    "name",
    ["PATH", "HOME", "LC_ALL", "PYTHONPATH", "PENSTOCK_LOG", "OMP_NUM_THREADS", "LD_LIBRARY_PATH"]
    + ["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "TRITON_INTERPRET"]
    + ["HF_HOME", "TOKENIZERS_PARALLELISM", "XDG_CACHE_HOME"],
)
def test_what_libraries_are_configured_with_is_passed_on(name: str):
    assert allowed({name: "value"}) == {name: "value"}


@pytest.mark.parametrize(
    "name",
    ["AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "NVIDIA_API_KEY", "DATABASE_URL", "SSH_AUTH_SOCK"]
    + ["GOOGLE_APPLICATION_CREDENTIALS", "PENSTOCK_SECRET", "TORCH_API_KEY", "XDG_SESSION_TOKEN"]
    + ["path", "HTTPS_PROXY", "PATHS", "KUBERNETES_SERVICE_HOST"],
)
def test_secrets_and_all_else_are_not(name: str):
    assert allowed({name: "value"}) == {}


def test_a_model_gets_what_its_configuration_names():
    environment = {"MODEL_TOKEN": "1", "MY_A": "2", "MY_B": "3", "OTHER": "4", "MODEL_TOKEN_2": "5"}
    assert asked_for(environment, ["MODEL_TOKEN", "MY_*"]) == {
        "MODEL_TOKEN": "1",
        "MY_A": "2",
        "MY_B": "3",
    }
    assert asked_for(environment, []) == {}
