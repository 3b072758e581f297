"""Random questions to the planner: is what it offers legal, does it fit when compiled, does it equal one device?

    python -m experiments.planned_plans --count 50 --seed 7

Models of three kinds on 6, 8, 10, 12 and 24 simulated devices, with budgets from too small to ample. Prints a line for
each, and ends with status 1 if anything does not hold.
"""

import argparse
import os
import sys
from itertools import islice

os.environ["JAX_PLATFORMS"] = "cpu"
# Compiles that are 2.7 times faster, and allocate alike. What the user has set comes last: it wins.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=24 --xla_backend_optimization_level=0 " + os.environ.get("XLA_FLAGS", "")
)

import jax

from experiments.planned_table import draws, outcome

DEVICES = (6, 8, 10, 12, 24)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")
    failed = offered = 0
    for i, draw in enumerate(islice(draws(args.seed, DEVICES), args.count), 1):
        found = outcome(draw)
        failed += bool(found.wrong)
        offered += found.offered is not None
        print(f"{i}/{args.count} {draw}\n  {found}", *([f"  WRONG: {found.wrong}"] if found.wrong else []), sep="\n")
        sys.stdout.flush()
    print(f"seed {args.seed}: {args.count} questions, {offered} plans offered and run, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
