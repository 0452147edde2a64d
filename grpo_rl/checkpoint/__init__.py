"""Checkpoints: all that a run depends on, in one file, so that it goes on bit for bit after a stop.

A file is safetensors: arrays, and in its metadata a JSON tree (`codec.py`) with a digest of both. It is taken between
iterations, after an update and before the next rollout, and takes the place of the last one whole or not at all. It
holds the policy, the optimizer, counters, statistics, random numbers, the state of every env and what the sampler
remembers of the last rollout. Settings and code are not in it: build the model as it was, then load.

Where the state of an env cannot be read or written, a checkpoint holds the rest, and that is said when it is loaded:
such a run goes on from a seeded reset, not bit for bit.
"""

from grpo_rl.checkpoint.file import FORMAT, read_file, write_file
from grpo_rl.checkpoint.run import CheckpointEvery, checkpoint_steps, load_checkpoint, resume, save_checkpoint

__all__ = [
    "FORMAT",
    "CheckpointEvery",
    "checkpoint_steps",
    "load_checkpoint",
    "read_file",
    "resume",
    "save_checkpoint",
    "write_file",
]
