"""A stopwatch for a start that has phases: where the seconds went until the engine was ready."""

import time


class PhaseTimes:
    """Seconds of consecutive phases by name, in the order they first ended; together all time since construction."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, name: str) -> None:
        """Book the time since the previous phase ended to `name`; a phase may come again."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def line(self) -> str:
        """Return the line that is logged when everything is ready."""
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"Ready in {sum(self.seconds.values()):.1f} s: {phases}"
