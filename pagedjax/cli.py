"""The command line: `pagedjax COMMAND`, also as `python -m pagedjax`; COMMANDS at the end lists what there is.

Each command's flags are the fields of its config dataclasses. An error made on purpose ends it with one line and
status 2. JAX must not have started when a command begins, because its share of the GPU's memory is fixed then.
"""

import dataclasses
import difflib
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pagedjax import bench
from pagedjax.config import EngineConfig, option
from pagedjax.errors import ConfigError, PagedJaxError
from pagedjax.flags import parse_flags
from servers.config import BatchConfig, ServerConfig

LOG_FORMAT = "%(levelname)s %(asctime)s %(message)s"
LOG_DATE_FORMAT = "%m-%d %H:%M:%S"


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Sampling of the terminal commands; what is not given is the model's own default."""

    max_tokens: int | None = option(None, "Longest answer in tokens; up to the context length if unset.")
    temperature: float | None = option(None, "Randomness; 0 is greedy.")
    top_p: float | None = option(None, "Keep the most likely tokens that reach this probability together.")
    top_k: int | None = option(None, "Keep this many of the most likely tokens.")
    min_p: float | None = option(None, "Drop tokens below this share of the most likely one's probability.")
    repetition_penalty: float | None = option(None, "Above 1 makes tokens that were seen less likely.")
    stop: tuple[str, ...] | None = option(None, "End when this text appears; may be repeated.")


@dataclass(frozen=True, kw_only=True)
class GenerateFlags:
    """What to complete."""

    prompt: tuple[str, ...] = option((), "Text to complete; may be repeated. Standard input if unset.")


@dataclass(frozen=True, kw_only=True)
class ChatFlags:
    """How a conversation begins."""

    system: str | None = option(None, "System message.")


@dataclass(frozen=True, kw_only=True)
class ConvertFlags:
    """What to convert, and where it goes."""

    model: str = option("demo", "Hugging Face directory or hub name, .gguf file, or 'demo'.", positional=True)
    output: str = option("", "Directory to make; it must not exist.", positional=True)
    revision: str | None = option(None, "Branch, tag or commit on the hub.")
    download_dir: str | None = option(None, "Where hub files are cached; the hub library's default if unset.")
    dtype: str = option("auto", "Type of the saved weights: auto (keeps every bit), float32, bfloat16 or float16.")


def main(arguments: Sequence[str] | None = None, *, program: str = "pagedjax") -> int:
    """Run the command that the first argument names, and return its exit status."""
    name, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    if name in ("--help", "-h"):
        summaries = {name: command.summary for name, command in COMMANDS.items()}
        print(_overview(program, {**summaries, "bench": "Measure latency, throughput, a server."}))
        return 0
    if name == "--version":
        print(f"pagedjax {importlib.metadata.version('pagedjax')}")
        return 0
    if name == "bench":
        return _bench(rest, program=f"{program} bench")
    if name not in COMMANDS:
        return _fail(program, _unknown("command", name, [*COMMANDS, "bench"]))
    return run_command(name, rest, program=f"{program} {name}")


def run_command(name: str, arguments: Sequence[str], *, program: str) -> int:
    """Run one command on its arguments and return its exit status."""
    return _run(COMMANDS[name], arguments, program)


def _bench(arguments: Sequence[str], *, program: str) -> int:
    """Run the subcommand of `bench` that the first argument names."""
    name, *rest = arguments or ["--help"]
    if name in ("--help", "-h"):
        print(_overview(program, bench.SUBCOMMANDS))
        return 0
    if name not in bench.SUBCOMMANDS:
        return _fail(program, _unknown("measurement", name, list(bench.SUBCOMMANDS)))
    module = bench.load(name)

    def measure(*configs: Any) -> int:
        for config in configs:
            if isinstance(config, EngineConfig):
                _prepare(config, logging.INFO)
        return module.run(*configs)

    return _run(_Command(measure, module.CONFIGS, bench.SUBCOMMANDS[name]), rest, f"{program} {name}")


def _run(command: "_Command", arguments: Sequence[str], program: str) -> int:
    try:
        return command.function(*parse_flags(command.configs, arguments, program=program, summary=command.summary))
    except PagedJaxError as error:
        return _fail(program, str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who read our output left; nothing more is to be written there
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def serve(engine: EngineConfig, server: ServerConfig) -> int:
    """Serve the model over HTTP until a signal comes."""
    from servers import run_server

    _prepare(engine, logging.INFO)
    return run_server(engine, server)


def generate(engine: EngineConfig, flags: GenerateFlags, sampling: SamplingFlags) -> int:
    """Complete each prompt and print the texts, one after another."""
    prompts = list(flags.prompt) or [sys.stdin.read()]
    with _open_llm(engine) as llm:
        for output in llm.generate(prompts, sampling_params(llm, sampling), use_tqdm=sys.stderr.isatty()):
            print(output.outputs[0].text)
    return 0


def chat(engine: EngineConfig, flags: ChatFlags, sampling: SamplingFlags) -> int:
    """Talk to the model in the terminal."""
    from pagedjax.terminal_chat import TerminalChat

    with _open_llm(engine) as llm:
        TerminalChat(llm, sampling_params(llm, sampling), system=flags.system).run()
    return 0


def convert(flags: ConvertFlags) -> int:
    """Save a model and its tokenizer as an Orbax directory, which loads without the original."""
    from pagedjax.loading import orbax

    if not flags.output:
        raise ConfigError("the directory to make is missing; give it after the model, or as --output DIR")
    options = {name: value for name, value in dataclasses.asdict(flags).items() if name != "output"}
    orbax.convert(EngineConfig(**options), Path(flags.output))
    print(f"saved {flags.model} as {flags.output}; run it with: pagedjax serve {flags.output}")
    return 0


def run_batch(engine: EngineConfig, batch: BatchConfig) -> int:
    """Answer a file of requests."""
    from servers.batch import run_batch as run

    _prepare(engine, logging.INFO)
    counts = run(engine, batch)
    print(f"answered {counts.num_lines} lines, {counts.num_failed} of them with an error: {batch.output_file}")
    return 0


def collect_env() -> int:
    """Print what a bug report needs."""
    from pagedjax.collect_env import environment_lines

    for line in environment_lines():
        print(line)
    return 0


def sampling_params(llm: Any, flags: SamplingFlags) -> Any:
    """The model's default sampling parameters, changed by the flags that were given."""
    given = {name: value for name, value in dataclasses.asdict(flags).items() if value is not None}
    return dataclasses.replace(llm.engine.default_params(), **{"max_tokens": None, **given})


def _open_llm(engine: EngineConfig) -> Any:
    from pagedjax.llm import LLM

    _prepare(engine, logging.WARNING)
    options = {field.name: getattr(engine, field.name) for field in dataclasses.fields(engine)}
    return LLM(**options, show_progress=sys.stderr.isatty())


def _prepare(engine: EngineConfig, level: int) -> None:
    """Set up logging, and what must be settled before JAX starts."""
    from pagedjax.device import allow_pinned_memory, reserve_device_memory

    logging.basicConfig(format=LOG_FORMAT, datefmt=LOG_DATE_FORMAT, level=logging.WARNING)
    for name in ("pagedjax", "servers", "aiohttp.access"):
        logging.getLogger(name).setLevel(level)
    reserve_device_memory(engine.gpu_memory_utilization)
    allow_pinned_memory(engine.swap_space)


def _unknown(kind: str, name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"unknown {kind} {name!r}; " + (f"did you mean {close[0]}?" if close else f"{kind}s are {', '.join(known)}")


def _overview(program: str, summaries: Mapping[str, str]) -> str:
    lines = [f"  {name:13}{summary}" for name, summary in summaries.items()]
    return "\n".join(
        [f"usage: {program} COMMAND [flags]", "", *lines, "", f"{program} COMMAND --help lists its flags."]
    )


def _fail(program: str, message: str) -> int:
    print(f"{program}: error: {message}", file=sys.stderr)
    return 2


class _Command(NamedTuple):
    function: Callable[..., int]
    configs: tuple[type, ...]
    summary: str


COMMANDS = {
    "serve": _Command(serve, (EngineConfig, ServerConfig), "Serve a model over HTTP, with OpenAI's interface."),
    "generate": _Command(
        generate, (EngineConfig, GenerateFlags, SamplingFlags), "Complete prompts and print the texts."
    ),
    "chat": _Command(chat, (EngineConfig, ChatFlags, SamplingFlags), "Talk to a model in the terminal."),
    "run-batch": _Command(
        run_batch, (EngineConfig, BatchConfig), "Answer a file of requests in OpenAI's batch format."
    ),
    "collect-env": _Command(collect_env, (), "Print what a bug report needs to know about this machine."),
    "convert": _Command(convert, (ConvertFlags,), "Save a model as an Orbax directory."),
}
