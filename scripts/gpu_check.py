"""The Python of gpu_check.sh: its parts that are no script of their own, and the report of what all parts found.

python scripts/gpu_check.py model runs/x --cpu
python scripts/gpu_check.py engine-vllm runs/x --config scripts/configs/gpu_check.yaml --model.engine vllm
python scripts/gpu_check.py report runs/x --seconds 240
"""

import argparse
import io
import itertools
import json
import time
from pathlib import Path
from typing import Any

import yaml

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.config.cli import parse_command_line, run_script
from overlaprl_ray.errors import RunError

# Qwen2.5-0.5B's, and one of two layers
FULL = {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32_768}  # fmt: skip
SMALL = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}  # fmt: skip
ENGINES = ("engine-hf", "engine-vllm")
PARTS = ("plain", "mps", *ENGINES, "recovery", "trl")
LIMIT_S, KILL_AFTER = 480, 3


def make_model(folder: Path, shape: dict[str, int]) -> None:
    """A Qwen2 of random weights with a tokenizer of as many tokens: the built-in characters, then invented words."""
    import torch
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from overlaprl_ray.models.tiny import tiny_tokenizer

    spec = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    known = spec["model"]["vocab"]
    known.update({f"word{i} ": i for i in range(len(known), shape["vocab_size"])})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(spec)), pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    disable_progress_bar()
    torch.manual_seed(0)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, **ids, tie_word_embeddings=True, rope_theta=1e6))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"model: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters, random", flush=True)


# ---- the parts ----


def measure_engine(config: ExperimentConfig) -> dict[str, float]:
    """An engine's speed on the work's second batch, and how far its logprobs are from the learner's."""
    import torch

    from overlaprl_ray.algorithm.kl import staleness_kl
    from overlaprl_ray.models.loading import load_model
    from overlaprl_ray.models.logprobs import response_logprobs
    from overlaprl_ray.runtime.preflight import preflight
    from overlaprl_ray.runtime.resources import tensor_bytes
    from overlaprl_ray.workers.build import build_sampler

    ready = preflight(config)
    total = ready.plan.device
    device, memory = ("cuda", tensor_bytes(ready.plan.generator_gpu, total)) if total else ("cpu", 0)
    sampler = build_sampler(config, ready.task, config.grpo.model_name, device, memory)
    model = load_model(config.grpo.model_name, config.model.dtype, device)
    sampler.engine.load_weights(0, {name: p.detach() for name, p in model.named_parameters()})
    sampler.rollout(1, 0)  # compiles and allocates
    started = time.perf_counter()
    rollout = sampler.rollout(2, 0)
    seconds = time.perf_counter() - started
    with torch.no_grad():
        difference = response_logprobs(model, rollout, config.grpo.temperature)[0].cpu() - rollout.logprobs
    floor = float(staleness_kl(difference, rollout.completion_mask))
    mean = float(difference[rollout.completion_mask].abs().mean())
    return {"tokens_per_s": rollout.tokens / seconds, "floor": floor, "mean_difference": mean}


def recover(config: ExperimentConfig) -> dict[str, Any]:
    """A run whose learner is killed: how long it stood still, and whether the repeated steps gave the same numbers."""
    import ray
    from rich.console import Console

    from overlaprl_ray.runtime.train import train

    times: list[float] = []

    def kill(row: dict[str, Any]) -> None:
        times.append(time.monotonic())
        if row["step"] == KILL_AFTER:
            ray.kill(ray.get_actor(f"{Path(str(config.output.dir)).name}/learner"))

    said = io.StringIO()
    summary = train(config, Console(file=said, soft_wrap=True), on_row=kill)
    print(said.getvalue())
    longest = max(after - before for before, after in itertools.pairwise(times[KILL_AFTER - 1 :]))
    return {"restarts": summary["restarts"], "seconds": longest, "exact": "not exact" not in said.getvalue()}


# ---- what was found ----


def read(path: Path) -> Any:
    """A part's file; None where the part left none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def memory_rows(found: dict[str, Any], total_gb: float | None) -> list[dict[str, Any]]:
    """The most that each actor's process held over all runs, and what its share of the GPU is, GB."""
    rows = []
    for actor in ("generator", "reference", "learner"):
        peak = max(run[f"memory/{actor}_gb"] for run in found["runs"])
        cap = found["config"]["resources"][f"{actor}_gpu"] * total_gb if total_gb else None
        rows.append({"actor": actor, "peak_gb": peak, "cap_gb": cap, "within": peak <= cap if cap else None})
    return rows


def mode_rows(found: dict[str, Any], mps: bool) -> list[dict[str, Any]]:
    """A row per mode of one benchmark."""
    names = ("speed_up", "efficiency", "overlap_fraction", "tokens_per_s")
    return [
        {"mode": mode["label"], "mps": mps, "steps_per_s": 1 / mode["step_s"], **{name: mode[name] for name in names},
         "publish_s": mode["stages"]["publish"]}
        for mode in found["modes"]
    ]  # fmt: skip


def collect(folder: Path, total_gb: float | None, seconds: float) -> dict[str, Any]:
    """Everything that gpu_check.json holds; `total_gb` is the GPU's memory, None in a rehearsal."""
    from overlaprl_ray.runs.environment import environment

    nothing: dict[str, Any] = {"modes": [], "runs": []}
    plain, mps = (read(folder / name / "benchmark.json") or nothing for name in ("plain", "mps"))
    reasons = {
        name: text.read_text(encoding="utf-8").strip() for name in PARTS if (text := folder / f"{name}.txt").exists()
    }
    modes, memory = mode_rows(plain, mps=False), memory_rows(plain, total_gb) if plain["runs"] else []
    overlap = next((row for row in modes if row["mode"] == "overlap"), None)
    recovery, trl = read(folder / "recovery.json"), read(folder / "trl" / "compare.json")
    return {
        "environment": environment(),
        "rehearsal": total_gb is None,
        "seconds": seconds,
        "modes": modes + mode_rows(mps, mps=True),
        "engines": {name: found for name in ENGINES if (found := read(folder / f"{name}.json"))},
        "memory": memory,
        "recovery": recovery,
        "trl": [{"arm": row["label"], "steps_per_s": 1 / row["step_s"]} for row in trl["table"]] if trl else [],
        "without_result": reasons,
        "checks": {
            "all four modes ran": [row["mode"] for row in modes] == ["sync", "async", "staleness", "overlap"],
            "each process is within its share": all(row["within"] for row in memory) if total_gb and memory else None,
            "generation and training overlap": bool(overlap and overlap["overlap_fraction"]),
            "the killed learner was recovered": recovery["restarts"] == 1 if recovery else None,
            "no part failed": not any(reason.startswith("failed") for reason in reasons.values()),
            f"under {LIMIT_S} s": seconds < LIMIT_S if total_gb else None,
        },
    }


def options(parser: argparse.ArgumentParser) -> None:
    """What a part takes beside the settings of a run."""
    parser.add_argument("part", choices=["model", *ENGINES, "recovery", "report"])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("."))
    parser.add_argument("--cpu", action="store_true", help="rehearsal without a GPU")
    parser.add_argument("--seconds", type=float, default=0.0, help="report: how long all of it took")


def main(argv: list[str]) -> None:
    """One of the parts."""
    config, args = parse_command_line("gpu_check.py", "Parts of gpu_check.sh.", argv, options)
    if args.part == "model":
        make_model(args.folder / "model", SMALL if args.cpu else FULL)
    elif args.part == "report":
        from overlaprl_ray.workers.memory import device_bytes

        size = None if args.cpu else device_bytes()
        found = collect(args.folder, size / 1e9 if size else None, args.seconds)
        text = json.dumps(found, indent=2)
        (args.folder / "gpu_check.json").write_text(text + "\n", encoding="utf-8")
        short = json.loads(text, parse_float=lambda number: float(f"{float(number):.4g}"))
        print(yaml.safe_dump(short, sort_keys=False, default_flow_style=None, width=200))
        if False in found["checks"].values():
            raise RunError(f"{', '.join(name for name, ok in found['checks'].items() if ok is False)}: no")
    else:
        found = recover(config) if args.part == "recovery" else measure_engine(config)
        (args.folder / f"{args.part}.json").write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_script(main)
