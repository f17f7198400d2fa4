"""Run workloads on one engine, in that engine's own environment, and print a line of JSON for each; see bench_engines.

    python engines.py ENGINE MODEL WORKLOADS THREADS DTYPE

WORKLOADS is a JSON file: names, each with a list of {"prompt": [token ids], "max_new_tokens": n}. Nothing is imported
from the project but by the engines that are its own, so that every environment can run this file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

# Everything an engine returns: the tokens of each request, in order.
Run = Callable[[list[dict]], list[list[int]]]
_WARM_UP_TOKENS = 4


def paged(model: str, threads: int, dtype: str, longest: int, quantize: str | None = None) -> Run:
    """This project."""
    import torch
    from transformers import AutoModelForCausalLM

    from paged_backend import Engine, SamplingParams

    torch.set_num_threads(threads)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    engine = Engine(loaded, elastic=True, enable_prefix_caching=False, quantize=quantize)

    def run(work: list[dict]) -> list[list[int]]:
        params = [SamplingParams(max_tokens=request["max_new_tokens"], ignore_eos=True) for request in work]
        return [output.token_ids for output in engine.generate([request["prompt"] for request in work], params)]

    return run


def paged_int8(model: str, threads: int, dtype: str, longest: int) -> Run:
    """This project, with int8 weights."""
    return paged(model, threads, dtype, longest, quantize="int8")


def stock(model: str, threads: int, dtype: str, longest: int) -> Run:
    """transformers' generate, one padded batch."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def run(work: list[dict]) -> list[list[int]]:
        width = max(len(request["prompt"]) for request in work)
        ids = torch.tensor([[0] * (width - len(r["prompt"])) + r["prompt"] for r in work])
        mask = torch.tensor([[0] * (width - len(r["prompt"])) + [1] * len(r["prompt"]) for r in work])
        most = max(request["max_new_tokens"] for request in work)
        out = loaded.generate(
            ids, attention_mask=mask, max_new_tokens=most, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return [row[width : width + r["max_new_tokens"]].tolist() for row, r in zip(out, work, strict=True)]

    return run


def continuous(model: str, threads: int, dtype: str, longest: int) -> Run:
    """transformers' continuous batching."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(threads)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    config = GenerationConfig(max_new_tokens=longest, eos_token_id=-1, pad_token_id=0, do_sample=False)
    manager = loaded.init_continuous_batching(generation_config=config)
    manager.start()

    def run(work: list[dict]) -> list[list[int]]:
        ids = [manager.add_request(r["prompt"], max_new_tokens=r["max_new_tokens"]) for r in work]
        tokens: dict[str, list[int]] = {}
        while len(tokens) < len(ids):
            output = manager.get_result(timeout=5)
            if output is not None and output.is_finished():
                tokens[output.request_id] = list(output.generated_tokens)
        return [tokens[name] for name in ids]

    return run


def vllm(model: str, threads: int, dtype: str, longest: int) -> Run:
    """vLLM's CPU backend, compiled."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, dtype=dtype, max_model_len=longest, max_num_seqs=32, enable_prefix_caching=False)

    def run(work: list[dict]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0, max_tokens=r["max_new_tokens"], ignore_eos=True, detokenize=False)
            for r in work
        ]
        outputs = llm.generate([{"prompt_token_ids": r["prompt"]} for r in work], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return run


def openvino(model: str, threads: int, dtype: str, longest: int) -> Run:
    """OpenVINO GenAI's continuous batching; MODEL is the converted folder."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 2, 32, 1024
    scheduler.enable_prefix_caching = False
    precision = {"bfloat16": "bf16", "float32": "f32"}[dtype]
    device = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision}
    pipe = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", device)

    def config(count: int):
        told = genai.GenerationConfig()
        told.max_new_tokens, told.ignore_eos, told.do_sample = count, True, False
        return told

    def run(work: list[dict]) -> list[list[int]]:
        handles = [
            pipe.add_request(index, ov.Tensor(np.array([r["prompt"]], dtype=np.int64)), config(r["max_new_tokens"]))
            for index, r in enumerate(work)
        ]
        while pipe.has_non_finished_requests():
            pipe.step()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]

    return run


def llama(model: str, threads: int, dtype: str, longest: int) -> Run:
    """llama.cpp, one request at a time; MODEL is a GGUF file, whose weights have the precision that it has."""
    from llama_cpp import Llama

    llm = Llama(model_path=model, n_ctx=longest, n_threads=threads, n_threads_batch=threads, verbose=False)

    def run(work: list[dict]) -> list[list[int]]:
        rows = []
        for request in work:
            llm.reset()
            made = llm.generate(request["prompt"], temp=0.0, top_k=1, repeat_penalty=1.0)
            rows.append([next(made) for _ in range(request["max_new_tokens"])])
        return rows

    return run


ENGINES = {engine.__name__: engine for engine in (paged, paged_int8, stock, continuous, vllm, openvino, llama)}


def main() -> None:
    """Load, warm up on a few tokens, and time each workload whole and to its first tokens."""
    name, model, path, threads, dtype = sys.argv[1:]
    with open(path) as file:
        workloads = json.load(file)
    longest = max(len(r["prompt"]) + r["max_new_tokens"] for work in workloads.values() for r in work)
    run = ENGINES[name](model, int(threads), dtype, longest + 16)
    for label, work in workloads.items():
        first = [{**request, "max_new_tokens": 1} for request in work]
        run([{**work[0], "max_new_tokens": _WARM_UP_TOKENS}])
        times = []
        for part in (first, work):
            start = time.perf_counter()
            tokens = run(part)
            times.append(time.perf_counter() - start)
            wrong = [i for i, (row, r) in enumerate(zip(tokens, part, strict=True)) if len(row) != r["max_new_tokens"]]
            if wrong:
                sys.exit(f"{name} gave other than the asked number of tokens for requests {wrong} of {label}")
        result = {"workload": label, "first_s": times[0], "seconds": times[1], "tokens": tokens}
        print("RESULT " + json.dumps(result), flush=True)
    # Some engines leave threads that would keep the process.
    os._exit(0)


if __name__ == "__main__":
    main()
