"""Loads every token classifier and saves it again, for `theirs.py check` to look at.

python tests/parity/classifiers/save_ours.py DIRECTORY SAVED
"""

import sys
from pathlib import Path

from jaxrl_post import pretrained


def main(directory: Path, saved: Path) -> None:
    """Writes SAVED/NAME for every NAME."""
    for folder in sorted(path.parent for path in directory.glob("*/expected.npz")):
        config, params = pretrained.load(folder)
        pretrained.save(saved / folder.name, config, params)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
