"""The Python of gpu_check.sh: is there a GPU, a model to run, and what the benchmarks found.

python scripts/gpu_check.py gpu                       # prints the GPU; or why there is none, exit code 1
python scripts/gpu_check.py model FOLDER --cpu
python scripts/gpu_check.py report FOLDER --seconds 240
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from overlaprl_ray.config.cli import Parser, run_script
from overlaprl_ray.errors import RunError

# Qwen2.5-0.5B's, and one of two layers
FULL = {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32_768}  # fmt: skip
SMALL = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}  # fmt: skip
LIMIT_S = 480


def find_gpu() -> str:
    """The GPU's name and memory. Raises `RunError` without one."""
    import torch

    if not torch.cuda.is_available():
        raise RunError(f"torch {torch.__version__} sees no GPU here")
    found = torch.cuda.get_device_properties(0)
    return f"{found.name}, {found.total_memory / 1e9:.0f} GB"


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


# ---- what was found ----


def memory_rows(found: dict[str, Any], total_gb: float) -> list[dict[str, Any]]:
    """Peak of each actor over all runs, and what its share of the GPU allows, GB."""
    shares = found["config"]["resources"]
    rows = []
    for actor in ("generator", "reference", "learner"):
        peak = max(run[f"memory/{actor}_gb"] for run in found["runs"])
        cap = shares[f"{actor}_gpu"] * total_gb
        rows.append({"actor": actor, "peak_gb": peak, "cap_gb": cap, "within": peak <= cap})
    return rows


def mode_rows(found: dict[str, Any], mps: bool) -> list[dict[str, Any]]:
    """A row per mode of one benchmark."""
    names = ("step_s", "speed_up", "efficiency", "tokens_per_s", "overlap_fraction")
    return [{"mode": mode["label"], "mps": mps, **{name: mode[name] for name in names}} for mode in found["modes"]]


def collect(folder: Path, total_gb: float | None, seconds: float) -> dict[str, Any]:
    """Everything that gpu_check.json holds; `total_gb` is the GPU's memory, None in a rehearsal."""
    plain = json.loads((folder / "plain" / "benchmark.json").read_text(encoding="utf-8"))
    modes, skipped = mode_rows(plain, mps=False), (folder / "mps.txt").read_text(encoding="utf-8").strip()
    if (folder / "mps" / "benchmark.json").exists() and not skipped:
        modes += mode_rows(json.loads((folder / "mps" / "benchmark.json").read_text(encoding="utf-8")), mps=True)
    memory = memory_rows(plain, total_gb) if total_gb else None
    overlap = next(row for row in modes if row["mode"] == "overlap")
    return {
        "environment": plain["environment"],
        "seconds": seconds,
        "modes": modes,
        "mps_skipped": skipped or None,
        "memory": memory or "no GPU: nothing is capped",
        "timeline": str(folder / "plain" / "r1-overlap" / "timeline.png"),
        "checks": {
            "all four modes ran": [run["mode"] for run in plain["runs"]] == ["sync", "async", "staleness", "overlap"],
            "each actor's peak is within its share": all(row["within"] for row in memory) if memory else None,
            "generation and training overlap": (overlap["overlap_fraction"] or 0.0) > 0.0,
            f"under {LIMIT_S} s": seconds < LIMIT_S,
        },
    }


def table(found: dict[str, Any]) -> list[str]:
    """What a person reads."""
    where = found["environment"]
    lines = [f"{' + '.join(where['gpus'] or [where['cpu']])}; commit {where['git_commit']}; {found['seconds']:.0f} s"]
    lines += [
        "",
        f"{'mode':<12}{'MPS':<5}{'s/step':>8}{'speed-up':>10}{'efficiency':>12}{'overlap':>9}{'tokens/s':>10}",
    ]
    for row in found["modes"]:
        speed, part, share = (
            "-" if row[n] is None else f"{row[n]:.2f}" for n in ("speed_up", "efficiency", "overlap_fraction")
        )
        mps = "on" if row["mps"] else "off"
        text = f"{row['mode']:<12}{mps:<5}{row['step_s']:>8.3f}{speed:>10}{part:>12}{share:>9}"
        lines.append(f"{text}{row['tokens_per_s']:>10,.0f}")
    if found["mps_skipped"]:
        lines.append(f"MPS skipped: {found['mps_skipped']}")
    lines.append("")
    if isinstance(found["memory"], str):
        lines.append(f"memory: {found['memory']}")
    else:
        lines += [f"{row['actor']:<10} peak {row['peak_gb']:.1f} GB of {row['cap_gb']:.1f}" for row in found["memory"]]
    words = {True: "yes", False: "NO", None: "not applicable"}
    lines += ["", f"timeline: {found['timeline']}", *(f"{name}: {words[ok]}" for name, ok in found["checks"].items())]
    return lines


def main(argv: list[str]) -> None:
    """One of the three commands."""
    parser = Parser(prog="gpu_check.py", description="parts of gpu_check.sh")
    parser.add_argument("command", choices=["gpu", "model", "report"])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("."))
    parser.add_argument("--cpu", action="store_true", help="rehearsal without a GPU")
    parser.add_argument("--seconds", type=float, default=0.0, help="how long all of it took")
    args: argparse.Namespace = parser.parse_args(argv)
    if args.command == "gpu":
        try:
            print(find_gpu())
        except RunError as error:
            print(error)
            sys.exit(1)
    elif args.command == "model":
        make_model(args.folder / "model", SMALL if args.cpu else FULL)
    else:
        import torch

        total = None if args.cpu else torch.cuda.get_device_properties(0).total_memory / 1e9
        found = collect(args.folder, total, args.seconds)
        (args.folder / "gpu_check.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        text = "\n".join(table(found))
        (args.folder / "table.txt").write_text(text + "\n", encoding="utf-8")
        print(f"{text}\nfiles: {args.folder}")
        if False in found["checks"].values():
            raise RunError(f"{', '.join(name for name, ok in found['checks'].items() if ok is False)}: no")


if __name__ == "__main__":
    run_script(main)
