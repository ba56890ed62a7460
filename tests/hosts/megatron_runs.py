"""Several runs of launch/pretrain_megatron.py in the same ranks, one after the other: Megatron
takes seconds to import. Called as ``torchrun ... megatron_runs.py '[["--model", ...], ...]'``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(runs: list[list[str]]) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
    import pretrain_megatron

    # A store of its own for each run: what the groups of the last one left would mislead them.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    first_port = int(os.environ["MASTER_PORT"]) + 1
    for number, arguments in enumerate(runs):
        os.environ["MASTER_PORT"] = str(first_port + number)
        sys.argv = ["pretrain_megatron.py", *arguments]
        pretrain_megatron.main()


if __name__ == "__main__":  # not in the process that Megatron spawns for saving
    main(json.loads(sys.argv[1]))
