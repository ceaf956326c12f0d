"""Being asked to end: a signal becomes `Stopped`, also where compiled code disguises it."""

import signal
import subprocess
import sys

import pytest

from overlaprl_ray.runtime.signals import Stopped, reraise_stopped, stoppable


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_ends_the_block_and_the_handler_goes_with_it(number):
    before = signal.getsignal(number)
    with pytest.raises(Stopped, match=number.name), stoppable():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


IMPATIENT = """
import signal
from overlaprl_ray.runtime.signals import Stopped, stoppable
with stoppable():
    try:
        with stoppable():
            signal.raise_signal(signal.SIGINT)
    except Stopped:
        signal.raise_signal(signal.SIGTERM)  # asked already: it is ending
        print("clean-up", flush=True)
        signal.raise_signal(signal.SIGINT)
        print("still there", flush=True)
"""


def test_a_second_sigint_ends_the_process_at_once():
    done = subprocess.run([sys.executable, "-c", IMPATIENT], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "clean-up\n", "")


def test_a_later_block_begins_anew():
    for _ in range(2):
        with pytest.raises(Stopped), stoppable():
            signal.raise_signal(signal.SIGTERM)


def test_a_stop_in_compiled_code_is_reraise_stopped():
    with pytest.raises(Stopped, match="SIGTERM"), reraise_stopped():
        raise SystemError("<cyfunction> returned a result with an exception set") from Stopped("SIGTERM")


def test_other_system_errors_stay_what_they_are():
    with pytest.raises(SystemError, match="bad call"), reraise_stopped():
        raise SystemError("bad call")
