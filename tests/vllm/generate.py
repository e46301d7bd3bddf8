#!/usr/bin/env python3
"""Greedy tokens of real vLLM engines on the CPU: one after the other, in one process.

    generate.py JOBS OUT     JOBS: {"tp", "prompts", "tokens", "nvfp4", "engines": [{"model", "load_format", "extra", "tokenizer", "overrides"}, ...]}

OUT becomes a JSON list with one document per engine: tokens (a list per prompt), again (the same asked once more), texts (with
"tokenizer") and seconds; or, where it did not start, refused: the message of the error. The versions are in each. Prompts are
lists of token ids and are sent one at a time: in a batch, other sums are rounded, and a model of random weights has many
near-ties. The tokenizer is not loaded unless asked for.

At tp 1 engine and worker run in this process: vLLM's imports, which take 10 s and more, are paid for once. At larger sizes each
has processes of its own, as when it serves, and what a worker says is only in the log. Memory of an engine that has ended may
come back, values and all, in the next: a parameter that nobody loads is best looked for in the first.
"""
import gc
import json
import os
import sys
import time

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",          # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise tp > 1 is refused where there is one NUMA node
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",                 # sums in one order
}


# Set where the emulation of nvfp4 is wanted.
EMULATES = "EMULATE_NVFP4"


def answers(vllm, job, engine):
    began = time.monotonic()
    llm = vllm.LLM(
        model=engine["model"], tensor_parallel_size=job["tp"], load_format=engine["load_format"],
        model_loader_extra_config=engine["extra"], skip_tokenizer_init=not engine["tokenizer"], enforce_eager=True, dtype="bfloat16",
        hf_overrides=engine["overrides"], max_model_len=128, max_num_seqs=1, max_num_batched_tokens=512, enable_prefix_caching=False, disable_log_stats=True,
    )
    started = time.monotonic()
    greedy = vllm.SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=engine["tokenizer"])

    def ask():
        found = [llm.generate({"prompt_token_ids": ids}, greedy, use_tqdm=False)[0].outputs[0] for ids in job["prompts"]]
        return [list(a.token_ids) for a in found], [a.text for a in found]

    tokens, texts = ask()
    again, _ = ask()
    seconds = {"start": round(started - began, 1), "generate": round(time.monotonic() - started, 1)}
    llm.llm_engine.engine_core.shutdown()
    return {"tokens": tokens, "again": again, "texts": texts, "seconds": seconds}


def emulate_nvfp4():
    """vLLM has arithmetic for nvfp4 that runs anywhere, but lists no kernel for it on CPUs."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
    from vllm.platforms import PlatformEnum

    linear._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CPU] = [EmulationNvFp4LinearKernel]


def told():
    """Processes that vLLM starts read this file again, but none of its arguments."""
    if os.environ.get(EMULATES):
        emulate_nvfp4()


def main():
    jobs, out = sys.argv[1:]
    with open(jobs) as f:
        job = json.load(f)
    os.environ.update(SETTINGS, VLLM_ENABLE_V1_MULTIPROCESSING="0" if job["tp"] == 1 else "1")
    if job.get("nvfp4"):
        os.environ[EMULATES] = "1"

    import torch
    import vllm
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    told()
    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    found = []
    for engine in job["engines"]:
        try:
            found.append(answers(vllm, job, engine))
        except Exception as error:
            found.append({"refused": f"{type(error).__name__}: {error}"})
        found[-1]["versions"] = versions
        gc.collect()
        cleanup_dist_env_and_memory()
    with open(out, "w") as f:
        json.dump(found, f)


if __name__ == "__main__":
    main()
else:
    told()
