"""How long a client waits for the next part of a stream."""

import time


class Pauses:
    """The longest pause so far, in seconds: by the clock, and of processor time that this process used meanwhile.

    The server runs in the test's process. Whatever holds a stream up by work shows in both; what other programs of a
    busy machine do shows in the clock alone, which is therefore held to a wider limit.
    """

    def __init__(self):
        self.clock = self.processor = 0.0
        self.begin()

    def begin(self):
        self._began = time.monotonic(), time.process_time()

    def end(self):
        """End a pause and begin the next."""
        clock, processor = self._began
        self.clock = max(self.clock, time.monotonic() - clock)
        self.processor = max(self.processor, time.process_time() - processor)
        self.begin()

    def __repr__(self):
        return f"{self.clock:.3f} s, of which {self.processor:.3f} s of this process"

    def check(self):
        assert self.processor < 1, self
        assert self.clock < 10, self
