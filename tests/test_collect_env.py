"""The report on a machine: what helps, and nothing secret."""

import re
from pathlib import Path

import jax

from pagedjax.cli import main
from pagedjax.collect_env import environment_lines

ROOT = Path(__file__).parent.parent


def test_the_report_names_versions_and_devices():
    lines = list(environment_lines({}))
    assert f"jax=={jax.__version__}" in lines
    assert any(line.startswith("device 0: cpu") for line in lines)


def test_the_report_shows_what_steers_jax_and_no_secret():
    environ = {"JAX_PLATFORMS": "cpu", "VLLM_API_KEY": "hidden", "HF_TOKEN": "hidden", "JAX_SECRET_KEY": "hidden"}
    text = "\n".join(environment_lines(environ))
    assert "JAX_PLATFORMS=cpu" in text
    assert "hidden" not in text


def test_the_command_prints_it(capsys):
    assert main(["collect-env"]) == 0
    assert "pagedjax" in capsys.readouterr().out


def test_the_container_copies_what_exists_and_runs_what_is_installed():
    text = (ROOT / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert {"pagedjax", "servers", "pallas_kernels"} <= set(copied)
    assert not [name for name in copied if not (ROOT / name).exists()]
    assert 'pagedjax = "pagedjax.cli:main"' in (ROOT / "pyproject.toml").read_text()
