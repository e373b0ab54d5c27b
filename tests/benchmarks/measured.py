"""A part of a measurement that needs no device.

    python -m tests.benchmarks.measured JSON NAME ...

measures a line for each name. "wrong" is a line that failed, "error" ends the program,
and "waits" never ends, unless there is a file "free" next to the JSON. Each start of a
line is noted in a file "begun" there.
"""

import sys
import time
from pathlib import Path

from benchmarks.accelerator.lines import Lines


def main(path: Path, *names: str) -> int:
    """Returns the exit status."""
    lines = Lines(path, {}, ("name",))
    for (name,) in lines.missing([(name,) for name in names]):
        lines.begin(name)
        with path.with_name("begun").open("a") as begun:
            begun.write(f"{path.stem} {name}\n")
        if name == "error":
            raise SystemExit("no such kernel")
        while name == "waits" and not path.with_name("free").exists():
            time.sleep(0.05)
        lines.add({"name": name, **({"failed": "wrong"} if name == "wrong" else {})})
    lines.end()
    return bool(lines.failed())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
