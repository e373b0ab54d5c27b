"""Loads every fixture and saves it again, for check_saved.py to look at.

    python tests/parity/save_ours.py FIXTURES SAVED ROWS

Each checkpoint is saved once in the dtype that it was stored in, in one file, and once
in float32, in several. Models that have rows with pictures in ROWS are saved whole too.
"""

import sys
from pathlib import Path

import jax.numpy as jnp

from jaxrl_post import pretrained


def main(fixtures: Path, saved: Path, rows: Path) -> None:
    """Writes SAVED/as_stored/NAME, SAVED/float32_shards/NAME and SAVED/whole/NAME."""
    for name in sorted(path.stem for path in rows.glob("*.npz")):
        config, params = pretrained.load(fixtures / name, vision=True)
        pretrained.save(saved / "whole" / name, config, params)
    for folder in sorted(path.parent for path in fixtures.glob("*/expected.npz")):
        config, params = pretrained.load(folder)
        pretrained.save(saved / "as_stored" / folder.name, config, params)
        config, params = pretrained.load(folder, dtype=jnp.float32)
        pretrained.save(
            saved / "float32_shards" / folder.name,
            config,
            params,
            max_file_bytes=30_000,
        )


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: save_ours.py FIXTURES SAVED ROWS")
    main(*map(Path, sys.argv[1:]))
