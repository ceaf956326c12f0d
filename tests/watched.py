"""A run to be watched. Ray starts before it and ends after it, each at a line on standard input.

python tests/watched.py runs/x 40
"""

import json
import sys

from conftest import small

from overlaprl_ray.runs.monitoring import greeting
from overlaprl_ray.runtime.train import ray_running, train

if __name__ == "__main__":
    folder, steps = sys.argv[1:]
    with ray_running() as context:
        print(json.dumps({"session": context.address_info["session_dir"], "greeting": greeting(context)}), flush=True)
        sys.stdin.readline()
        train(
            small(
                grpo={"num_steps": int(steps), "lr": 3e-3},
                task={"rewards": ["paced_reward:paced"], "reward_timeout_s": 400.0},
                staleness={"kl_fresh": 1e-6, "kl_stale": 2e-4},  # low enough that discards occur
                output={"dir": folder, "eval_every": 10},
            )
        )
        print("done", flush=True)
        sys.stdin.readline()
