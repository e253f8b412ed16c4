"""Settings for all tests: one thread, so that results and times do not depend on the machine's load."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def global_stream_is_left_alone():
    """Nothing in the package may draw from, or seed, the global stream; a test that does so itself restores it."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state()), "the global random stream was touched"
