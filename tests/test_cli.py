"""The command line as a person meets it: exit status, one-line errors, what each command does with its flags."""

import subprocess
import sys
import types

import pytest

import pagedjax.device
import servers
from pagedjax import cli
from pagedjax.config import EngineConfig
from pagedjax.errors import CheckpointError, InvalidRequestError
from pagedjax.outputs import CompletionOutput, RequestOutput
from pagedjax.sampling_params import SamplingParams
from servers.config import ServerConfig


@pytest.fixture(autouse=True)
def environ(monkeypatch):
    """What commands settle for the whole process: the memory share, caught here, and log levels, left alone."""
    shares = []
    monkeypatch.setattr(pagedjax.device, "reserve_device_memory", shares.append)
    monkeypatch.setattr(pagedjax.device, "allow_pinned_memory", lambda num_gib: None)
    return shares


class FakeLLM:
    """Answers each prompt with its length. Keeps how it was made and asked in `made`."""

    made: "list[FakeLLM]"

    def __init__(self, **options):
        self.options = options
        self.closed = False
        self.engine = self
        FakeLLM.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.closed = True

    def default_params(self):
        return SamplingParams(temperature=0.6, top_k=50)

    def generate(self, prompts, params, *, use_tqdm):
        self.params = params
        for prompt in prompts:
            completion = CompletionOutput(index=0, text=f"{prompt}: {len(prompt)}", token_ids=[])
            yield RequestOutput(request_id="0", prompt=prompt, prompt_token_ids=[], outputs=[completion], finished=True)


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setitem(sys.modules, "pagedjax.llm", types.SimpleNamespace(LLM=FakeLLM))  # the real one brings JAX
    monkeypatch.setattr(FakeLLM, "made", [], raising=False)
    return FakeLLM.made


def test_without_a_command_the_overview_is_shown(capsys):
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in ("serve", "generate", "chat", "convert", "bench"))


def test_an_unknown_command_is_an_error_with_the_closest(capsys):
    assert cli.main(["sreve"]) == 2
    assert capsys.readouterr().err == "pagedjax: error: unknown command 'sreve'; did you mean serve?\n"


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_a_config_error_is_one_line_and_status_2(command, capsys):
    assert cli.main([command, "--block-size", "12"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        f"pagedjax {command}: error: argument --block-size: invalid choice: 12 (choose from 8, 16, 32, 64, 128)\n"
    )


def test_serve_passes_both_configs_on_and_returns_the_servers_status(monkeypatch, environ):
    seen = []
    monkeypatch.setattr(servers, "run_server", lambda *configs: seen.append(configs) or 1)
    assert cli.main(["serve", "M", "--gpu-memory-utilization", "0.5", "--port", "8001"]) == 1
    assert seen == [(EngineConfig(model="M", gpu_memory_utilization=0.5), ServerConfig(port=8001))]
    assert environ == [0.5]


def test_an_error_while_loading_is_one_line_too(monkeypatch, capsys):
    def fail(*configs):
        raise CheckpointError("model.safetensors ends early")

    monkeypatch.setattr(servers, "run_server", fail)
    assert cli.main(["serve", "M"]) == 2
    assert capsys.readouterr().err == "pagedjax serve: error: model.safetensors ends early\n"


def test_an_unexpected_error_keeps_its_traceback(monkeypatch):
    def fail(*configs):
        raise ZeroDivisionError

    monkeypatch.setattr(servers, "run_server", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["serve", "M"])


def test_generate_completes_each_prompt_and_closes_the_engine(made, capsys):
    assert cli.main(["generate", "M", "--prompt", "ab", "--prompt", "abc", "--seed", "3"]) == 0
    assert capsys.readouterr().out == "ab: 2\nabc: 3\n"
    assert made[0].options["model"] == "M"
    assert made[0].options["seed"] == 3
    assert made[0].closed


def test_generate_reads_standard_input_without_prompts(made, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdin, "read", lambda: "four", raising=False)
    assert cli.main(["generate", "M"]) == 0
    assert capsys.readouterr().out == "four: 4\n"


def test_sampling_flags_change_the_models_defaults(made):
    cli.main(["generate", "M", "--prompt", "a", "--temperature", "0", "--stop", "x", "--max-tokens", "5"])
    assert made[0].params == SamplingParams(temperature=0, top_k=50, stop=("x",), max_tokens=5)


def test_without_sampling_flags_an_answer_may_fill_the_context(made):
    cli.main(["generate", "M", "--prompt", "a"])
    assert made[0].params == SamplingParams(temperature=0.6, top_k=50, max_tokens=None)


def test_a_wrong_sampling_flag_is_one_line(made, capsys):
    assert cli.main(["generate", "M", "--prompt", "a", "--top-p", "2"]) == 2
    assert capsys.readouterr().err.startswith("pagedjax generate: error: top_p is 2.0; it must be ")
    assert made[0].closed


def test_a_refused_prompt_is_one_line(made, monkeypatch, capsys):
    def refuse(self, *arguments, **options):
        raise InvalidRequestError("prompt is empty; give at least one token")

    monkeypatch.setattr(FakeLLM, "generate", refuse)
    assert cli.main(["generate", "M", "--prompt", ""]) == 2
    assert capsys.readouterr().err == "pagedjax generate: error: prompt is empty; give at least one token\n"


def test_an_interrupt_ends_a_command_quietly(made, monkeypatch, capsys):
    def interrupt(self, *arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeLLM, "generate", interrupt)
    assert cli.main(["generate", "M", "--prompt", "a"]) == 130
    assert capsys.readouterr().err == ""


def test_convert_saves_the_model_where_it_is_told(monkeypatch, capsys, tmp_path):
    seen = []
    monkeypatch.setattr("pagedjax.loading.orbax.convert", lambda config, out: seen.append((config, out)))
    out = tmp_path / "out"
    assert cli.main(["convert", "M", str(out), "--dtype", "bfloat16"]) == 0
    assert seen == [(EngineConfig(model="M", dtype="bfloat16"), out)]
    assert capsys.readouterr().out == f"saved M as {out}; run it with: pagedjax serve {out}\n"


def test_convert_needs_to_be_told_where(capsys):
    assert cli.main(["convert", "M"]) == 2
    assert "the directory to make is missing; give it after the model" in capsys.readouterr().err


def test_bench_lists_its_measurements_and_corrects_a_wrong_name(capsys):
    assert cli.main(["bench"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in ("latency", "throughput", "serve", "sweep"))
    assert cli.main(["bench", "latncy"]) == 2
    assert capsys.readouterr().err == "pagedjax bench: error: unknown measurement 'latncy'; did you mean latency?\n"


def test_bench_runs_a_measurement_on_its_flags(monkeypatch, environ):
    from pagedjax.bench import latency

    seen = []
    monkeypatch.setattr(latency, "run", lambda *configs: seen.append(configs) or 0)
    line = "bench latency --model M --batch-size 1 8 64 --input-len 512 --gpu-memory-utilization 0.5"
    assert cli.main(line.split()) == 0
    engine, flags, _ = seen[0]
    assert (engine.model, flags.batch_size, flags.input_len) == ("M", (1, 8, 64), 512)
    assert environ == [0.5]


def test_a_wrong_flag_of_a_measurement_is_one_line(capsys):
    assert cli.main(["bench", "throughput", "--input-len", "9:5"]) == 2
    assert capsys.readouterr().err.startswith("pagedjax bench throughput: error: input_len is '9:5'; give a number")


@pytest.mark.parametrize("module", ["pagedjax", "servers"])
def test_the_modules_run_as_programs(module):
    line = [
        sys.executable,
        "-m",
        module,
        *(["serve"] if module == "pagedjax" else []),
        "M",
        "--tensor-parallel-size",
        "2",
    ]
    ran = subprocess.run(line, capture_output=True, text=True, check=False)
    program = "python -m pagedjax serve" if module == "pagedjax" else "python -m servers"
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == f"{program}: error: tensor_parallel_size=2 is not built yet; leave it at 1\n"
