"""What limits throughput now, and which flag to turn: the rules that operators go by, as one pure function."""

from dataclasses import dataclass

FULL_SEQUENCES = 0.95  # of max_num_seqs
FULL_CACHE = 0.9  # of the blocks
FULL_BUDGET = 0.9  # of max_num_batched_tokens


@dataclass(frozen=True)
class Load:
    """Means over the last seconds; `num_preemptions` and `num_iterations` count what happened in them."""

    num_running: float
    num_waiting: float
    waiting_growth: float  # requests a second
    kv_cache_usage: float  # 0 to 1
    num_preemptions: float
    num_iterations: float
    tokens_per_iteration: float
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True)
class Bottleneck:
    """`limit` is max_num_seqs, max_num_batched_tokens, blocks, arrivals or nothing; `flag` is None if none helps."""

    limit: str
    text: str
    flag: str | None = None


def bottleneck(load: Load) -> Bottleneck:
    """Say what more throughput would need."""
    usage = f"{100 * load.kv_cache_usage:.0f} %"
    if not load.num_iterations and not load.num_waiting:
        return Bottleneck("nothing", "Nothing to do: no request is running.")
    if load.num_preemptions:
        return Bottleneck(
            "blocks",
            f"The KV cache is too small: {load.num_preemptions:.0f} preemptions in the last seconds, {usage} in use. "
            "Requests are computed again or swapped.",
            "--gpu-memory-utilization up, or --max-num-seqs down",
        )
    if load.num_waiting < 0.5:
        return Bottleneck(
            "arrivals",
            f"Arrivals: every request runs at once ({load.num_running:.0f} of {load.max_num_seqs}). "
            "More load would raise throughput.",
        )
    if load.num_running >= FULL_SEQUENCES * load.max_num_seqs:
        has_room = load.kv_cache_usage < FULL_CACHE
        return Bottleneck(
            "max_num_seqs",
            f"max_num_seqs: {load.num_running:.0f} of {load.max_num_seqs} run and {load.num_waiting:.0f} wait. "
            + (f"Healthy saturation, and the KV cache has room ({usage})." if has_room else "Healthy saturation."),
            "--max-num-seqs up" if has_room else None,
        )
    if load.kv_cache_usage >= FULL_CACHE:
        return Bottleneck(
            "blocks",
            f"The KV cache: {usage} of its blocks are in use without preemptions, which is good; "
            f"{load.num_waiting:.0f} requests wait for blocks.",
            "--gpu-memory-utilization up, or --max-model-len down",
        )
    is_full = load.tokens_per_iteration >= FULL_BUDGET * load.max_num_batched_tokens
    if is_full or load.waiting_growth > 0:
        return Bottleneck(
            "max_num_batched_tokens",
            f"The token budget: {load.num_waiting:.0f} wait though only {load.num_running:.0f} of {load.max_num_seqs} "
            f"run; an iteration takes {load.tokens_per_iteration:.0f} of {load.max_num_batched_tokens} tokens.",
            "--max-num-batched-tokens up",
        )
    return Bottleneck("arrivals", "A burst: what waits is being admitted, and nothing is full.")
