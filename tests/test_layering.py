"""Imports point down or sideways, never up. Read from the source by ast, those inside functions included."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pagedjax

ROOT = Path(__file__).parent.parent
PACKAGES = ("pagedjax", "pallas_kernels", "servers")

# From the ground up. A module belongs to the layer with its longest matching name.
LAYERS = (
    ("pagedjax.config", "pagedjax.errors", "pagedjax.outputs", "pagedjax.sampling_params", "pagedjax.device",
     "pagedjax.structured_outputs", "pagedjax.options", "pagedjax.speculation.config"),
    ("pallas_kernels", "pagedjax.scheduling"),
    ("pagedjax.models", "pagedjax.loading", "pagedjax.text"),
    ("pagedjax.execution", "pagedjax.speculation"),
    ("pagedjax",),  # the rest: llm, engine, async_engine and what is beside them
    ("servers",),
    ("pagedjax.cli", "pagedjax.__main__", "servers.__main__", "pagedjax.flags", "pagedjax.terminal_chat",
     "pagedjax.tables", "pagedjax.bench", "pagedjax.tuning", "pagedjax.simulation"),
)  # fmt: skip
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(modules())


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield every imported name, dotted, with its line. `from a import b` gives a.b where that is a module, else a."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; name the package"
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                yield (dotted if dotted in MODULES else node.module or ""), node.lineno


def level(module: str) -> int:
    while module not in LEVELS:
        module = module.rpartition(".")[0]
    return LEVELS[module]


def is_ours(module: str) -> bool:
    return module.split(".")[0] in PACKAGES


def test_imports_point_down_or_sideways():
    upward = [
        f"{path.relative_to(ROOT)}:{line} imports {imported}"
        for module, path in MODULES.items()
        for imported, line in imports(path)
        if is_ours(imported) and level(imported) > level(module)
    ]
    assert not upward


def test_modules_of_one_level_do_not_import_each_other_in_a_circle():
    ours = {m: {i for i, _ in imports(path) if i in MODULES and i != m} for m, path in MODULES.items()}
    while leaves := {m for m, imported in ours.items() if not imported & ours.keys()}:
        ours = {m: imported for m, imported in ours.items() if m not in leaves}
    assert not ours, f"circle among {sorted(ours)}"


def test_scheduling_needs_no_jax():
    """Not even through what it imports."""
    seen, todo = set(), [module for module in MODULES if module.startswith("pagedjax.scheduling")]
    while todo:
        module = todo.pop()
        seen.add(module)
        found = {imported for imported, _ in imports(MODULES[module])}
        assert not any(name.split(".")[0] in ("jax", "jaxlib", "flax", "numpy") for name in found), module
        todo += [name for name in found if name in MODULES and name not in seen]


def test_kernels_know_only_jax_and_numpy():
    allowed = {"jax", "numpy", "jaxtyping", "pallas_kernels"} | sys.stdlib_module_names
    for module, path in MODULES.items():
        if module.startswith("pallas_kernels"):
            for imported, line in imports(path):
                assert imported.split(".")[0] in allowed, f"{path}:{line} imports {imported}"


def test_servers_use_public_names_only():
    homes = {"pagedjax", *pagedjax._HOMES.values()}
    for module, path in MODULES.items():
        if not module.startswith("servers") or module == "servers.__main__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pagedjax":
                assert node.module in homes, f"{path}:{node.lineno} imports {node.module}"
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert not private, f"{path}:{node.lineno} imports {private}"


def test_jax_internals_and_deprecated_backends_are_not_used():
    for path in MODULES.values():
        for imported, line in imports(path):
            assert not imported.startswith(("jax._src", "jax.experimental.pallas.triton")), f"{path}:{line}"


def test_every_package_with_array_types_is_under_the_type_checker(pytestconfig):
    checked = pytestconfig.getoption("jaxtyping_packages").split(",")[:-1]
    for module, path in MODULES.items():
        if any(imported == "jaxtyping" for imported, _ in imports(path)):
            assert module.startswith(tuple(checked)), (
                f"{module} uses jaxtyping; add its package to --jaxtyping-packages"
            )


def test_no_module_is_named_after_nothing():
    vague = {"utils", "util", "helpers", "helper", "misc", "common", "manager", "base"}
    assert not [module for module in MODULES if module.rpartition(".")[2] in vague]
