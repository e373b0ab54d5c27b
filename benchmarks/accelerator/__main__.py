"""Measures an accelerator, the most important first, in as many calls as it takes.

    python -m benchmarks.accelerator DIRECTORY [PART ...] [--seconds 520] [--dry]

A call begins no part that may take longer than the time that is left. Each part has a
file DIRECTORY/PART.json with its date, device, versions, status and seconds (took_s),
and what it measured; all that was printed is in DIRECTORY/log, and compiled programs
are in DIRECTORY/compiled. The next call with the same directory leaves out the parts
that are done, continues those that were cut, line by line, and tries those that failed
last. To measure a part again, remove its file.

A dry run (--dry) has the same parts, small and on a CPU. Kernels for GPUs are
interpreted in the part "right"; in all others XLA's programs stand in for them, and
for cuDNN.

Statuses: "done"; "cut", at its limit of time and with new lines; "failed", with an
error, a wrong result, or no new line within its limit. The exit status is 1 if a part
failed, 2 if the command is refused, and else 0.

Results belong to one kind of device: a directory with others is refused. Parts that
were measured with other versions are measured again. If the sources have changed since,
the summary says so, and leaves it to you.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.accelerator.lines import read
from benchmarks.accelerator.parts import PARTS, Part
from jaxrl_post.files import replace_file

ROOT = Path(__file__).parents[2]
# Seconds in which a part may end by itself when its time is over, and those in which
# the device must answer.
GRACE, PROBE = 10, 100
# A dry run may take so many times as long: its machine may be busy.
BUSY = 5
# Lines of a part's output that are printed, and kept in its file.
SHOWN = 30
# A dry run: on a CPU, with programs that are compiled in little time.
DRY = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
}


class RefusedError(Exception):
    """The command cannot be carried out."""


class Measurement:
    """The parts of a device in a directory.

    Args:
        folder: for the files.
        dry: whether parts are small, and run on a CPU.
    """

    def __init__(self, folder: Path, *, dry: bool) -> None:
        self.folder, self.dry = folder, dry
        self._facts: dict[str, Any] = {"dry": dry, "sources": digest()}
        self._environment = {
            # Parts compile some programs that others do, or that a cut one did.
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            **os.environ,
            "JAX_ENABLE_COMPILATION_CACHE": "true",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
            "PYTHONUNBUFFERED": "1",
            **(DRY if dry else {}),
        }

    def look(self) -> None:
        """Asks which device and which versions are here.

        Raises:
            RefusedError: there is no device, or the results are of another one.
        """
        command = [sys.executable, "-m", "benchmarks.machine"]
        try:
            asked = subprocess.run(
                command,
                cwd=ROOT,
                env=self._environment,
                capture_output=True,
                text=True,
                timeout=PROBE,
                check=True,
            )
        except subprocess.TimeoutExpired as error:
            raise RefusedError(f"no device answered within {PROBE} s") from error
        except subprocess.CalledProcessError as error:
            raise RefusedError(f"no device: {error.stderr.strip()}") from error
        self._facts |= json.loads(asked.stdout.splitlines()[-1])
        for path in sorted(self.folder.glob("*.json")):
            found = read(path)
            for name, words in (("device", "{}"), ("dry", "a dry run ({})")):
                if name in found and found[name] != self._facts[name]:
                    theirs, ours = found[name], self._facts[name]
                    raise RefusedError(
                        f"{path} is of {words.format(theirs)}, and this is of "
                        f"{words.format(ours)}: take another directory"
                    )
        print(f"{self._facts['device']}, {self._facts['machine']}", flush=True)

    def record(self, part: Part) -> dict[str, Any]:
        """Content of a part's file; {} if there is none, or one of other versions."""
        found = read(self._path(part))
        return found if found.get("versions") == self._facts["versions"] else {}

    def status(self, part: Part) -> str:
        """The part's status; a file that no call ended is of a cut one."""
        record = self.record(part)
        return record.get("status", "cut" if record else "not begun")

    def limit(self, part: Part) -> int:
        """Seconds that a part is given."""
        return part.seconds * (BUSY if self.dry else 1)

    def run(self, part: Part) -> None:
        """Runs a part within its limit of time, and writes its status into its file."""
        record = self.record(part)
        if not record:
            self._path(part).unlink(missing_ok=True)
            shutil.rmtree(self.folder / part.name, ignore_errors=True)
        command = part.arguments(self.folder, dry=self.dry)
        with (self.folder / "log").open("a+b") as log:
            log.write(f"== {part.name}: {shlex.join(command[1:])}\n".encode())
            log.flush()
            print(f"== {part.name}: at most {self.limit(part)} s", flush=True)
            start, begin = log.tell(), time.monotonic()
            code = None
            try:
                code = self._waited(command, self.limit(part), log)
            finally:
                took = time.monotonic() - begin
                log.seek(start)
                said = log.read().decode(errors="replace").splitlines()[-SHOWN:]
                self._end(part, record, code, took, said)

    def _waited(self, command: list[str], seconds: float, log: Any) -> int | None:
        """Runs a command; returns its exit status, None if it had to be stopped."""
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            return None
        finally:
            # Workers that it started, too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _end(
        self,
        part: Part,
        before: dict[str, Any],
        code: int | None,
        took: float,
        said: list[str],
    ) -> None:
        found = read(self._path(part))
        if code is not None:
            status = "failed" if code else "done"
        else:
            status = "cut" if right_lines(found) > right_lines(before) else "failed"
            said.append(f"stopped after {took:.0f} s of {self.limit(part)} s")
        record = {
            **found,
            **self._facts,
            "part": part.name,
            "asks": part.asks,
            "date": time.strftime("%Y-%m-%d"),
            "status": status,
            "took_s": round(before.get("took_s", 0.0) + took, 1),
            "calls": before.get("calls", 0) + 1,
            "command": shlex.join(part.arguments(Path(), dry=self.dry)[1:]),
            "said": said,
        }
        replace_file(self._path(part), json.dumps(record, indent=1) + "\n")
        print("\n".join(said))
        print(f"== {part.name}: {status} after {took:.0f} s", flush=True)

    def summary(self, parts: Sequence[Part]) -> str:
        """A line for each part."""
        lines = []
        for part in parts:
            record, status = self.record(part), self.status(part)
            told = f"{part.name:<12}{status:<10}"
            if record:
                told += f"{record.get('took_s', 0.0):>7.0f} s"
            if rows := record.get("rows"):
                wrong = len(rows) - right_lines(record)
                told += f"  {len(rows)} lines"
                told += f", {wrong} failed" if wrong else ""
            if record.get("sources", self._facts["sources"]) != self._facts["sources"]:
                told += "  (other sources: remove its file to measure it again)"
            lines.append(told.rstrip())
        return "\n".join(lines)

    def _path(self, part: Part) -> Path:
        return self.folder / f"{part.name}.json"


def main(arguments: Sequence[str], parts: Sequence[Part] = PARTS) -> int:
    """Runs a call; returns the exit status."""
    begin = time.monotonic()
    options = parsed(arguments, parts)
    options.directory.mkdir(parents=True, exist_ok=True)
    measurement = Measurement(options.directory.resolve(), dry=options.dry)
    try:
        chosen = named(options.parts, parts)
        measurement.look()
    except RefusedError as refused:
        print(refused, file=sys.stderr)
        return 2
    status = {part: measurement.status(part) for part in chosen}
    todo = [part for part in chosen if status[part] != "done"]
    # An error that comes again may not take the time of parts that were not begun.
    for part in sorted(todo, key=lambda part: status[part] == "failed"):
        left = options.seconds - (time.monotonic() - begin)
        if measurement.limit(part) + GRACE <= left:
            measurement.run(part)
        else:
            print(f"== {part.name}: not now, {left:.0f} s are left", flush=True)
    print(measurement.summary(chosen))
    print(f"{time.monotonic() - begin:.0f} s of {options.seconds} s")
    records = [measurement.record(part) for part in chosen]
    return int(any(map(is_wrong, records)))


def parsed(arguments: Sequence[str], parts: Sequence[Part]) -> argparse.Namespace:
    """The options of a call."""
    asked = "\n".join(f"  {p.name:<12}{p.seconds:>4} s  {p.asks}" for p in parts)
    parser = argparse.ArgumentParser(
        "benchmarks/accelerator.sh",
        description=__doc__,
        epilog=f"parts, in this order, the longest that each takes, and why:\n{asked}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, help="for results")
    parser.add_argument("parts", nargs="*", help="all without one")
    parser.add_argument("--seconds", type=int, default=520, help="of this call")
    parser.add_argument("--dry", action="store_true", help="small, and on a CPU")
    return parser.parse_args(arguments)


def named(names: Sequence[str], parts: Sequence[Part]) -> Sequence[Part]:
    """The parts of these names, in the given order; all without a name.

    Raises:
        RefusedError: there is no such part.
    """
    by_name = {part.name: part for part in parts}
    for name in names:
        if name not in by_name:
            raise RefusedError(f"no part {name!r}; there are {', '.join(by_name)}")
    return [by_name[name] for name in names] or parts


def right_lines(record: dict[str, Any]) -> int:
    """Number of lines that did not fail."""
    return sum("failed" not in row for row in record.get("rows", ()))


def is_wrong(record: dict[str, Any]) -> bool:
    """Whether a part failed, or one of its lines."""
    failed = record.get("status") == "failed"
    return failed or right_lines(record) < len(record.get("rows", ()))


def digest() -> str:
    """A hash of the sources on which results depend."""
    found = hashlib.sha256()
    for name in ("jaxrl_post", "benchmarks"):
        for path in sorted((ROOT / name).rglob("*.py")):
            found.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:12]


if __name__ == "__main__":
    # The part that is running is stopped, and what it measured is kept.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
