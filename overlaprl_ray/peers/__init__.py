"""This project beside TRL's GRPOTrainer on the same work: same model, prompts, rewards, lengths, optimizer and threads.

An **arm** is one of the two with its settings; each measurement is a process of its own, started by `measure.py`.
`own_arm.py` and `trl_arm.py` run inside that process and leave a `Track`. Both read one and the same
`ExperimentConfig`. scripts/bench_peers.py is the command line.

    python scripts/bench_peers.py tiny --repeats 3
"""
