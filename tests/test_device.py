"""Checks on the device: a GPU that would be ignored is an error, unless the CPU was asked for."""

import jax
import pytest

from pagedjax import device
from pagedjax.errors import ConfigError


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Let the check see a root directory of our own, with or without a GPU, and CPU as what JAX came up with."""
    seen = device.has_visible_gpu
    monkeypatch.setattr(device, "has_visible_gpu", lambda: seen(tmp_path, {}))
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    (tmp_path / "dev").mkdir()
    return tmp_path


def ask_for(monkeypatch, platforms):
    monkeypatch.setattr(device.jax, "config", type("Config", (), {"jax_platforms": platforms}))


def test_a_gpu_that_jax_does_not_use_is_an_error(machine, monkeypatch):
    ask_for(monkeypatch, None)
    (machine / "dev/nvidia0").touch()
    with pytest.raises(ConfigError, match=r"GPU is visible.*pagedjax\[cuda13\].*JAX_PLATFORMS=cpu"):
        device.check_devices()


def test_asking_for_the_cpu_leaves_a_gpu_alone(machine, monkeypatch):
    ask_for(monkeypatch, "cpu")
    (machine / "dev/nvidia0").touch()
    assert device.check_devices() == "cpu"


def test_a_machine_without_gpu_runs_on_the_cpu(machine, monkeypatch):
    ask_for(monkeypatch, None)
    (machine / "dev/nvidiactl").touch()
    assert device.check_devices() == "cpu"


def test_a_platform_that_does_not_start_is_an_error(monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "default_backend", fail)
    with pytest.raises(ConfigError, match=r"cannot start.*Unable to initialize.*JAX_PLATFORMS=cpu"):
        device.check_devices()


def test_an_unsupported_platform_is_an_error(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(ConfigError, match="JAX runs on 'tpu'"):
        device.check_devices()


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_cuda_visible_devices_can_hide_the_gpu(tmp_path, hidden):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert device.has_visible_gpu(tmp_path, {"CUDA_VISIBLE_DEVICES": "0"})
    assert not device.has_visible_gpu(tmp_path, {"CUDA_VISIBLE_DEVICES": hidden})


def test_the_memory_share_is_set_unless_the_environment_has_one():
    environ = {}
    device.reserve_device_memory(0.7, environ)
    device.reserve_device_memory(0.5, environ)
    assert environ == {"XLA_CLIENT_MEM_FRACTION": "0.7"}


def test_a_memory_share_under_the_older_name_stays_alone():
    environ = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"}
    device.reserve_device_memory(0.7, environ)
    assert environ == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"}


def test_pinned_memory_is_allowed_where_the_default_may_be_too_little_unless_the_environment_says_how_much():
    small, large, set_already = {}, {}, {device.HOST_LIMIT_VARIABLE: "7"}
    device.allow_pinned_memory(4.0, small)
    device.allow_pinned_memory(99.5, large)
    device.allow_pinned_memory(99.5, set_already)
    assert (small, large) == ({}, {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "102"})
    assert set_already == {device.HOST_LIMIT_VARIABLE: "7"}


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_a_container_has_no_more_host_memory_than_its_limit(tmp_path, name):
    """The limit of older kernels, the second, was overlooked."""
    total = device.host_memory_bytes(tmp_path)
    assert total > 1 << 28
    (tmp_path / "sys/fs/cgroup/memory").mkdir(parents=True)
    for text, expected in (("max\n", total), (f"{1 << 27}\n", 1 << 27), (f"{1 << 62}\n", total)):
        (tmp_path / "sys/fs/cgroup" / name).write_text(text)
        assert device.host_memory_bytes(tmp_path) == expected
