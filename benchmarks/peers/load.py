"""Measures whether other processes used the CPU during a measurement."""

import os
import time


class Load:
    """CPU seconds of this process and of everything else on the machine."""

    def __init__(self) -> None:
        self.start = self.read()

    @staticmethod
    def read() -> tuple[float, float, float]:
        with open("/proc/stat") as file:
            fields = [int(field) for field in file.readline().split()[1:9]]
        idle = fields[3] + fields[4]
        busy = (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), time.process_time(), busy

    def report(self) -> dict[str, float]:
        wall, own, busy = (b - a for a, b in zip(self.start, self.read(), strict=True))
        cores = os.cpu_count() or 1
        return {
            "own_cores_used": own / wall,
            "others_cores_used": max(0.0, busy - own) / wall,
            "cores": cores,
        }
