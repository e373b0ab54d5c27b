"""Whatever a checkpoint's files say: the right numbers, a clear error, or a warning.

A short run of the fuzzers; the long ones are started by hand, see the two modules.
"""

import random

from jaxrl_post.pretrained.families import read_config
from tests.pretrained.fuzz_configs import DEFECTS, mutations, try_config
from tests.pretrained.fuzz_files import corrupt, try_corruption

# Few enough that compiling for their shapes takes seconds.
BASES = ("llama_mha", "mixtral_shards_window")


def test_every_mutated_config_is_read_or_refused():
    """All families; nothing but the errors that loading turns into clear ones."""
    refused = 0
    for mutation in mutations(seed=7, count=1000):
        try:
            read_config(mutation.raw)
        except ValueError as error:
            refused += bool(str(error))
    assert 200 < refused < 800


def test_mutated_configs_load_and_run_or_are_refused_by_name(tmp_path):
    for number, mutation in enumerate(mutations(seed=7, count=50, names=BASES)):
        folder = tmp_path / str(number)
        folder.mkdir()
        outcome = try_config(mutation, folder)
        assert outcome.kind not in DEFECTS, (mutation.change, outcome.detail)


def test_corrupted_files_are_refused_or_warned_of_by_name(tmp_path):
    rng, kinds = random.Random(7), []
    for number in range(50):
        folder = tmp_path / str(number)
        folder.mkdir()
        corruption = corrupt(rng, folder, BASES)
        outcome = try_corruption(corruption, folder)
        assert outcome.kind not in DEFECTS, (corruption.change, outcome.detail)
        kinds.append(outcome.kind)
    assert {"refused", "warned"} <= set(kinds)
