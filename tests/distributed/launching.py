"""Runs a worker script on several processes, as a user would, and shows what it said if it failed."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# accelerate starts several processes on a CPU by MPI alone; with this flag it starts them as it does for GPUs.
_LAUNCH = (sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1")
ACCELERATE = (
    *_LAUNCH,
    "--num_processes",
    "2",
    "--mixed_precision",
    "no",
    "--dynamo_backend",
    "no",
    "--main_process_port",
    "0",
)
ALONE = (sys.executable,)


def launch(script: Path, *arguments: str, by: tuple[str, ...] = TORCHRUN) -> None:
    """One thread a process: two processes that each take both cores wait for each other."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [*by, str(script), *arguments], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
