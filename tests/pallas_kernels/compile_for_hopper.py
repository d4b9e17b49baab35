"""Compile every kernel for an H200 on a machine without one, and print what ptxas says of each, as JSON lines.

    JAX_PLATFORMS= python -m tests.pallas_kernels.compile_for_hopper DIRECTORY

Needs the CUDA plugin's wheels (`pip install "jax[cuda13]"`), no driver and no GPU. DIRECTORY takes the dumps.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

DIRECTORY = Path(sys.argv[1])
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # before JAX is imported: it looks for a driver
os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"
os.environ["MOSAIC_GPU_DUMP_TO"] = str(DIRECTORY)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402
from jax.typing import DTypeLike  # noqa: E402

from pallas_kernels import hopper  # noqa: E402
from pallas_kernels.add_rms_norm import add_rms_norm  # noqa: E402
from pallas_kernels.gated_matmul import gated_matmul  # noqa: E402
from pallas_kernels.matmul import matmul  # noqa: E402
from pallas_kernels.paged_attention import paged_attention  # noqa: E402
from pallas_kernels.rope_and_cache import rope_and_cache  # noqa: E402

# A GpuTargetConfigProto: what an H200 answers when it is asked for its properties.
H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  name: "NVIDIA H200"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448  shared_memory_per_core: 233472
  l2_cache_size: 52428800  memory_bandwidth: 4800000000000
  device_memory_size: 151397597184  device_address_bits: 64
  driver_version: "13.0.0"  runtime_version: "13.0.0"  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}
"""


def main() -> None:
    """Compile one shape of each kind of kernel."""
    hopper.assume_hopper()
    topology = topologies.get_topology_desc(topology_name="h200", platform="cuda", target_config=H200, topology="1x1x1")
    sharding = NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), PartitionSpec())

    def array(*shape: int, dtype: DTypeLike = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return array(*shape, dtype=jnp.int32)

    def attend(head_dim: int, options: dict, dtype: DTypeLike) -> None:
        def run(*arrays: Any) -> jax.Array:
            return paged_attention(*arrays, scale=0.1, backend="mosaic_gpu", **options)

        pool = array(4096, 8, 16, head_dim, dtype=dtype)
        arguments = (array(512, 32, head_dim, dtype=dtype), pool, pool, ints(64, 512), ints(65), ints(64))
        compile_and_print(f"attention {head_dim} {jnp.dtype(dtype).name} {options}", run, *arguments)

    attend(128, {}, jnp.bfloat16)
    attend(64, {}, jnp.float16)
    attend(128, {"window": 100, "soft_cap": 3.0}, jnp.bfloat16)

    def add(x: jax.Array, delta: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        return add_rms_norm(x, delta, scale, eps=1e-5, backend="mosaic_gpu")

    for num_rows, width in ((64, 4096), (256, 4096), (256, 6144), (512, 4096), (512, 6144)):
        x, w = array(num_rows, 4096), array(4096, width)
        compile_and_print(f"matmul {num_rows} x {width}", lambda x, w: matmul(x, w, backend="mosaic_gpu"), x, w)

    for num_rows, act in ((256, "silu"), (8192, "silu"), (8192, "gelu_pytorch_tanh")):
        x, w = array(num_rows, 4096), array(4096, 28672)
        compile_and_print(
            f"gated {act} {num_rows}", lambda x, w, act=act: gated_matmul(x, w, act=act, backend="mosaic_gpu"), x, w
        )

    compile_and_print("norm 8192", add, array(64, 8192), array(64, 8192), array(8192))

    def rope(*arrays: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        heads, cos, sin, k_pool, v_pool, slots, scale = arrays
        scales = (scale, scale)
        return rope_and_cache(heads, cos, sin, k_pool, v_pool, slots, scales, eps=1e-6, backend="mosaic_gpu")

    table, pool = array(64, 64, dtype=jnp.float32), array(4096, 8, 16, 128)
    compile_and_print("rope 128", rope, array(64, 48, 128), table, table, pool, pool, ints(64), array(128))


def compile_and_print(name: str, function: Callable, *arguments: jax.ShapeDtypeStruct) -> None:
    """Print a line for each kernel that the function contains."""
    before = set(DIRECTORY.iterdir())
    jax.jit(function).lower(*arguments).compile()
    for path in sorted(set(DIRECTORY.glob("*.ptxas")) - before):
        text = path.read_text(encoding="utf-8")
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
        registers = re.search(r"Used (\d+) registers", text)
        assert spills is not None, text
        assert registers is not None, text
        figures = {"registers": int(registers[1]), "spill_stores": int(spills[1]), "spill_loads": int(spills[2])}
        print(json.dumps({"shape": name, "kernel": re.sub(r"_\d+$", "", path.stem)} | figures), flush=True)


if __name__ == "__main__":
    main()
