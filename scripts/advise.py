"""Which method and schedule a model wants on a network: spardl.advise, for profiles of models.

python scripts/advise.py scripts/profiles/resnet50.json --bandwidth 1gbit --workers 8
python scripts/advise.py scripts/profiles/bert_base.json --bandwidth network.yaml --workers 16 --compute 0.2

A profile is written by scripts/profile_model.py, and a file of a network by scripts/doctor.py. What compressing takes
is measured here, on one core.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import spardl
from spardl.basics.errors import ConfigError
from spardl.clusters.network import PRESETS, Network, parse_network
from spardl.clusters.profile import Profile


def _bandwidth(text: str) -> str | Network:
    return parse_network(text, "--bandwidth") if Path(text).is_file() else text


def main() -> int:
    """Prints what the command line asks for.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path, help="written by profile_model.py")
    parser.add_argument(
        "--bandwidth", default="1gbit", help=f"as 1gbit, or one of {', '.join(PRESETS)}, or a file by doctor.py"
    )
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--compute", type=float, help="seconds of forward and backward pass (default: as measured)")
    parser.add_argument("--density", type=float, default=0.01, help="of sparse methods")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        profile, network = Profile.read(arguments.profile), _bandwidth(arguments.bandwidth)
        options = {"compute_seconds": arguments.compute, "density": arguments.density}
        print(spardl.advise(profile, network, arguments.workers, **options))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
