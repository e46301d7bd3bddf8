#!/usr/bin/env python3
"""Loads a model into real vLLM engines in three ways and compares the tokens; then a folder that does not fit must be refused.

    vllm_engine.py GGUF HF_DIR [--profile vllm-0.32-cpu]

HF_DIR is the checkpoint that GGUF was made from without loss (BF16). Needs vLLM and ggshard in one environment; four engine
starts of a minute or two each. Prompts go one at a time: what else is in a batch changes rounding.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROMPTS = ([1, 2, 3, 4, 5], [7, 9, 11], list(range(40, 60)))


def engine(arguments):
    """One engine in this process: prints the tokens as one line of JSON."""
    from vllm import LLM, SamplingParams

    llm = LLM(skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=128, max_num_seqs=4,
              max_num_batched_tokens=256, **arguments)
    greedy = SamplingParams(temperature=0, max_tokens=16, detokenize=False)
    outputs = [llm.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False) for prompt in PROMPTS]
    print("TOKENS", json.dumps([list(output[0].outputs[0].token_ids) for output in outputs]), flush=True)


def start(**arguments):
    """The tokens of an engine in a process of its own, or None, and what it printed."""
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", **os.environ}
    command = [sys.executable, __file__, "--engine", json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    return json.loads(lines[0].removeprefix("TOKENS ")) if lines else None, done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("gguf")
    parser.add_argument("hf")
    parser.add_argument("--profile", default="vllm-0.32-cpu")
    a = parser.parse_args()
    import ggshard

    expected, output = start(model=a.hf)
    assert expected, output
    with tempfile.TemporaryDirectory() as temp:
        for tp in (1, 2):
            ggshard.convert(a.gguf, Path(temp, str(tp)), tp=tp, profile=a.profile, config=a.hf)
        ways = {
            "a folder": {"model": f"{temp}/1", "load_format": "ggshard"},
            "a GGUF": {"model": a.hf, "load_format": "ggshard", "model_loader_extra_config": {"gguf": a.gguf}},
        }
        for way, arguments in ways.items():
            found, output = start(**arguments)
            assert found == expected, f"{way}: {found}, expected {expected}\n{output}"
            print(f"{way}: the same tokens as the checkpoint")
        found, output = start(model=f"{temp}/2", load_format="ggshard")
        assert found is None and "it was made for tp 2, and vLLM runs with --tensor-parallel-size 1" in output, output
        print("a folder for two ranks: refused on one")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        engine(json.loads(sys.argv[2]))
    else:
        main()
