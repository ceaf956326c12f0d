"""A reward that takes its time, and from the fifth batch on waits for a file: whoever watches the run sets its pace."""

import os
import time
from pathlib import Path

from dense_reward import digits

CALLS = [0]


def paced(prompts, completions, answer, **columns):
    """Half a second per batch; held until the file exists that PACED_RELEASE names, five minutes at most."""
    CALLS[0] += 1
    time.sleep(0.5)
    deadline = time.monotonic() + 300
    while CALLS[0] > 5 and not Path(os.environ["PACED_RELEASE"]).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return digits(prompts, completions, answer, **columns)
