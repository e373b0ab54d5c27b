"""Writes compared.json: the gaps to what transformers computed, for the docs.

    python -m tests.parity.compare [CASE ...]

A case that is not named keeps its date. VERSION of transformers wrote the fixtures.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

from tests.parity import test_picture_rows as picture_rows
from tests.parity.test_logits import gap, load, score

HERE = Path(__file__).parent
FILE, VERSION = HERE / "compared.json", "5.24.0"


def main(names: list[str]) -> None:
    """Compares cases, or all of them."""
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    every = sorted(path.name for path in (HERE / "fixtures").iterdir() if path.is_dir())
    for name in names or every:
        case = load(HERE / "fixtures" / name)
        found = np.asarray(score(case.config, case.params, case.tokens))
        known[name] = {
            "date": time.strftime("%Y-%m-%d"),
            "transformers": VERSION,
            "gap": float(f"{gap(found, case.expected):.1e}"),
        }
        load.cache_clear()
        if name in picture_rows.NAMES:
            found = picture_rows.score(*picture_rows.rows_of(name))
            wanted = picture_rows.load(name)[2]["logits"]
            known[name]["pictures"] = float(f"{gap(found, wanted):.1e}")
            picture_rows.load.cache_clear()
    kept = {name: known[name] for name in every}
    FILE.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
