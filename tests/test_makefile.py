"""What `make` does on machines of every kind, played with stand-ins for python, uv and nvidia-smi on an own PATH.

The stand-ins write down how they were called; nothing is downloaded and no environment is made.
"""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COPIED = ("Makefile", ".ci/install", "pyproject.toml", *(path.name for path in ROOT.glob("requirements*.txt")))

# Answers version checks as its $VERSION says; `-m venv` makes .venv/bin/python of itself; everything is noted.
PYTHON = """#!/bin/sh
VERSION={version}
case "$1" in
  --version) echo "Python $VERSION" ;;
  -c) [ "${{VERSION#3.}}" -ge 12 ] ;;
  -m) echo "{name} $*" >> "$NOTES"
      if [ "$2" = venv ]; then mkdir -p .venv/bin && cp "$0" .venv/bin/python; fi ;;
esac
"""
DOES_NOT_RUN = "#!/bin/sh\necho 'pyenv: command not found' >&2\nexit 127\n"
UV = '#!/bin/sh\necho "uv $*" >> "$NOTES"\nif [ "$1" = venv ]; then mkdir -p .venv/bin && touch .venv/bin/python; fi\n'
NVIDIA_SMI = "#!/bin/sh\necho {driver}\n"


class Machine:
    """A checkout in an empty folder and a PATH that holds basic tools and the stand-ins given."""

    def __init__(self, folder: Path):
        self.checkout, self.bin, self.notes = folder / "checkout", folder / "bin", folder / "notes"
        self.bin.mkdir()
        (self.checkout / ".ci").mkdir(parents=True)
        for name in COPIED:
            shutil.copy(ROOT / name, self.checkout / name)
        for tool in ("sh", "cat", "cmp", "mv", "cp", "mkdir", "touch", "sed", "dirname", "make"):
            (self.bin / tool).symlink_to(shutil.which(tool))

    def add(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def add_python(self, name: str, version: str) -> None:
        self.add(name, PYTHON.format(name=name, version=version))

    def make(self, *arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [self.bin / "make", *arguments],
            cwd=self.checkout,
            env={"PATH": str(self.bin), "NOTES": str(self.notes)},
            capture_output=True,
            text=True,
            check=False,
        )

    def calls(self) -> list[str]:
        """Return the calls noted since the last look."""
        found = self.notes.read_text().splitlines() if self.notes.exists() else []
        self.notes.write_text("")
        return found


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def requirement_files(calls: list[str]) -> list[str]:
    return [call.split("-r ")[1].split()[0] for call in calls if "-r " in call]


def test_with_a_python_alone_venv_and_pip_install_the_pins(machine):
    machine.add_python("python3", "3.13")
    made = machine.make("install")
    calls = machine.calls()
    assert made.returncode == 0, made.stderr
    assert calls[0] == "python3 -m venv --clear .venv"
    assert requirement_files(calls) == ["requirements.txt", "requirements-dev.txt", "requirements-model.txt"]
    assert all("--require-hashes --no-deps" in call for call in calls if "-r " in call)
    assert calls[-1].endswith("--no-deps --no-build-isolation -e .")


def test_a_shim_that_does_not_run_is_passed_over(machine):
    machine.add("python3.12", DOES_NOT_RUN)
    machine.add_python("python3.13", "3.13")
    machine.add_python("python3", "3.11")
    assert machine.make("install").returncode == 0
    assert machine.calls()[0].startswith("python3.13 -m venv")


def test_with_an_older_python_only_the_message_says_what_to_install(machine):
    machine.add_python("python3", "3.11")
    made = machine.make("install")
    assert made.returncode != 0
    assert "needs Python 3.12 or newer, found Python 3.11" in made.stderr
    assert "apt-get install python3.12" in made.stderr
    assert machine.calls() == []


def test_a_python_may_be_named(machine):
    machine.add_python("python3", "3.12")
    machine.add_python("mine", "3.14")
    machine.add_python("old", "3.10")
    assert machine.make("install", "PYTHON=mine").returncode == 0
    assert machine.calls()[0].startswith("mine -m venv")
    shutil.rmtree(machine.checkout / ".venv")
    made = machine.make("install", "PYTHON=old")
    assert "PYTHON=old is no Python 3.12 or newer that runs" in made.stderr


def test_nothing_is_installed_again_until_the_pins_change(machine):
    machine.add_python("python3", "3.12")
    machine.make("install")
    machine.calls()
    assert machine.make("install").returncode == 0
    assert machine.calls() == []
    with (machine.checkout / "requirements.txt").open("a") as pins:
        pins.write("# changed\n")
    assert machine.make("install").returncode == 0
    assert requirement_files(machine.calls())[0] == "requirements.txt"


def test_a_failed_install_is_tried_again(machine):
    machine.add_python("python3", "3.12")
    machine.make("install")
    pip = machine.checkout / ".venv/bin/python"
    works = pip.read_text()
    (machine.checkout / ".venv/pins.installed").unlink()
    pip.write_text(works.replace("-m) echo", "-m) exit 1; echo"))
    assert machine.make("install").returncode != 0
    pip.write_text(works)
    machine.calls()
    assert machine.make("install").returncode == 0
    assert "requirements.txt" in requirement_files(machine.calls())


def test_uv_is_used_when_it_is_there(machine):
    machine.add_python("python3", "3.12")
    machine.add("uv", UV)
    made = machine.make("install")
    calls = [call for call in machine.calls() if call != "uv --version"]
    assert made.returncode == 0, made.stderr
    assert calls[0].startswith("uv venv")
    assert all(call.startswith("uv ") for call in calls)


def test_uv_brings_a_python_where_none_is_new_enough(machine):
    machine.add("uv", UV)
    machine.make("install")
    assert "uv venv --quiet --clear --python 3.12 .venv" in machine.calls()


@pytest.mark.parametrize(("driver", "device"), [("580.65.06", "cuda13"), ("610.1", "cuda13"), ("535.104", "cuda12")])
def test_a_visible_gpu_brings_the_cuda_packages_that_its_driver_runs(machine, driver, device):
    machine.add_python("python3", "3.12")
    machine.add("nvidia-smi", NVIDIA_SMI.format(driver=driver))
    assert machine.make("install").returncode == 0
    assert f"requirements-{device}.txt" in requirement_files(machine.calls())


def test_a_driver_that_is_too_old_is_an_error(machine):
    machine.add_python("python3", "3.12")
    machine.add("nvidia-smi", NVIDIA_SMI.format(driver="470.10"))
    made = machine.make("install")
    assert made.returncode != 0
    assert (
        "the NVIDIA driver is 470.10, CUDA 12 needs 525 or newer; update it or run make with DEVICE=cpu" in made.stderr
    )


def test_asking_for_the_cpu_leaves_the_gpu_alone_and_tells_jax(machine):
    machine.add_python("python3", "3.12")
    machine.add("nvidia-smi", NVIDIA_SMI.format(driver="580.1"))
    assert machine.make("install", "DEVICE=cpu").returncode == 0
    assert requirement_files(machine.calls()) == ["requirements.txt", "requirements-dev.txt", "requirements-model.txt"]
    jax_sees = (machine.checkout / "sees.mk").name
    (machine.checkout / jax_sees).write_text("include Makefile\nsees:\n\t@echo $$JAX_PLATFORMS\n")
    assert machine.make("-f", jax_sees, "sees", "DEVICE=cpu").stdout.strip() == "cpu"
    assert machine.make("-f", jax_sees, "sees").stdout.strip() == ""


def test_an_unknown_device_is_an_error(machine):
    machine.add_python("python3", "3.12")
    assert "DEVICE is 'tpu'; choose auto, cpu, cuda12 or cuda13" in machine.make("install", "DEVICE=tpu").stderr


def test_serving_and_testing_run_in_the_environment(machine):
    machine.add_python("python3", "3.12")
    assert machine.make("serve", "MODEL=m", "ARGS=--port 1").returncode == 0
    assert machine.calls()[-1] == "python3 -m pagedjax serve m --port 1"
    assert machine.make("test").returncode == 0
    assert machine.calls()[-1] == "python3 -m pytest -n auto --dist loadfile --no-loadscope-reorder"


def test_the_pins_have_hashes_and_no_addresses():
    for path in ROOT.glob("requirements*.txt"):
        text = path.read_text()
        assert text.count("==") >= 1
        assert not [word for word in ("://", "--find-links", "index-url") if word in text]
        blocks = text.replace("\\\n", "").splitlines()
        assert all("--hash=sha256:" in block for block in blocks if "==" in block), path


def test_the_pins_hold_every_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    pinned: dict[str, str] = {}
    for name in ("requirements.txt", "requirements-dev.txt"):
        for package, version in re.findall(r"^([\w-]+)==(\S+)", (ROOT / name).read_text(), re.MULTILINE):
            assert pinned.setdefault(package, version) == version
    missing = {re.split(r"[^\w-]", requirement)[0] for requirement in wanted} - set(pinned)
    assert not missing, "run make pins"
    assert pinned["jax"] == "0.11.2"


def test_what_serves_is_not_pinned_to_what_tests():
    """Images for production came with pytest, pyright and Jupyter."""
    text = (ROOT / "requirements.txt").read_text()
    assert not [name for name in ("pytest", "pyright", "ruff", "hypothesis", "ipykernel") if f"\n{name}==" in text]
    assert "\nsetuptools==" in text  # builds the package there, without isolation
