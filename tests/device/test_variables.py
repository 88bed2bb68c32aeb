from __future__ import annotations

import pytest

from isotrain.device.detect import DEVICES
from isotrain.device.vendors import child_environment


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "SWANLAB_API_KEY",
        "OPENAI_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "GITHUB_TOKEN",
        "SSH_AUTH_SOCK",
        "RAY_AUTH_TOKEN",
        # Of families that are passed on.
        "HF_TOKEN",
        "HF_TOKEN_PATH",
        "VLLM_API_KEY",
        "hf_token",
    ],
)
def test_keys_stay_out_unless_they_are_named(name: str) -> None:
    assert child_environment({name: "value", "PATH": "/bin"}) == {"PATH": "/bin"}
    assert child_environment({name: "value"}, [name]) == {name: "value"}


@pytest.mark.parametrize(
    "name",
    ["HF_HOME", "LC_ALL", "TOKENIZERS_PARALLELISM", "PYTHONPATH", "http_proxy", "VLLM_MAX_TOKENS_PADDED"],
)
def test_settings_are_passed(name: str) -> None:
    assert child_environment({name: "value"}) == {name: "value"}


def test_a_proxy_with_a_password_stays_out() -> None:
    proxies = {"https_proxy": "http://me:secret@proxy:3128", "HTTP_PROXY": "http://proxy:3128"}
    assert child_environment(proxies) == {"HTTP_PROXY": "http://proxy:3128"}


@pytest.mark.parametrize("name", DEVICES)
def test_all_that_a_device_reads_is_passed(name: str) -> None:
    """A child computes as its parent, on the parent's devices."""
    device = DEVICES[name]
    own = [*device.numerics_variables, device.visible_devices_variable, device.interface_variable]
    wanted = {
        name: "1" for name in [*own, *device.deterministic_variables({}), *device.port_variables({})] if name
    }
    assert child_environment(wanted) == wanted
