# SPDX-License-Identifier: Apache-2.0
"""The clock of a GPU's SMs while something is timed: a card that was busy before runs slower."""
import statistics
import subprocess
import threading
import time


class Clock:
    """Asks nvidia-smi every few milliseconds, in a process of its own, between `with` and its end."""

    def __init__(self, period_ms=20):
        self._command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "--id=0",
                         f"--loop-ms={period_ms}"]
        self._samples = []  # (seconds, MHz)

    def __enter__(self):
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_):
        self._process.terminate()
        self._process.wait()
        self._reader.join()

    def _read(self):
        for line in self._process.stdout:
            if line.strip().isdigit():
                self._samples.append((time.monotonic(), int(line)))

    def since(self, begin):
        """Median MHz of the samples after time.monotonic() was `begin`; None if there are none."""
        recent = [mhz for at, mhz in self._samples if at >= begin]
        return statistics.median(recent) if recent else None
