#!/usr/bin/env python3
"""Greedy tokens of a real vLLM on the CPU: one engine, one model.

    generate.py FOLDER OUT --tp N --format auto|sharded_state --prompts JSON [--tokens 16] [--tokenizer]

OUT becomes a JSON document: tokens (a list per prompt), again (the same asked once more), texts (with --tokenizer), versions
and seconds. Prompts are lists of token ids and are sent one at a time: in a batch, other sums are rounded, and a model of
random weights has many near-ties. The tokenizer is not loaded unless asked for.

At tp 1 engine and worker run in this process, which spares two more imports of vLLM, 20 s of CPU time; at larger sizes each has
a process of its own, as when it serves.
"""
import argparse
import json
import os
import time

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",          # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise tp > 1 is refused where there is one NUMA node
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",                 # sums in one order
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("out")
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--format", required=True, choices=["auto", "sharded_state"])
    parser.add_argument("--prompts", type=json.loads, required=True)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--tokenizer", action="store_true")
    args = parser.parse_args()
    os.environ.update(SETTINGS, VLLM_ENABLE_V1_MULTIPROCESSING="0" if args.tp == 1 else "1")
    clock = [time.monotonic()]

    import torch
    import vllm
    clock.append(time.monotonic())
    engine = vllm.LLM(
        model=args.folder, tensor_parallel_size=args.tp, load_format=args.format, skip_tokenizer_init=not args.tokenizer,
        enforce_eager=True, dtype="bfloat16", max_model_len=128, max_num_seqs=1, max_num_batched_tokens=512,
        enable_prefix_caching=False, disable_log_stats=True,
    )
    clock.append(time.monotonic())
    greedy = vllm.SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True, detokenize=args.tokenizer)

    def ask():
        answers = [engine.generate({"prompt_token_ids": ids}, greedy, use_tqdm=False)[0].outputs[0] for ids in args.prompts]
        return [list(a.token_ids) for a in answers], [a.text for a in answers]

    tokens, texts = ask()
    again, _ = ask()
    clock.append(time.monotonic())
    seconds = {name: round(b - a, 1) for name, a, b in zip(("import", "start", "generate"), clock, clock[1:])}
    found = {"tokens": tokens, "again": again, "texts": texts, "seconds": seconds,
             "versions": {"vllm": vllm.__version__, "torch": torch.__version__}}
    with open(args.out, "w") as f:
        json.dump(found, f)


if __name__ == "__main__":
    main()
