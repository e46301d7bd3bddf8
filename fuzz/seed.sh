#!/bin/sh
# Fills fuzz/corpus with what the repository holds: run once before `cargo fuzz run`. Needs the built program.
#   fuzz/seed.sh [target/release/ggshard]
set -eu
cd "$(dirname "$0")/.."
ggshard=${1:-target/release/ggshard}
corpus=fuzz/corpus
for target in gguf plan mapping_toml profile_toml policy_toml safetensors_header manifest; do
    mkdir -p "$corpus/$target"
    for file in fuzz/regressions/"$target"-*; do
        [ -e "$file" ] && cp "$file" "$corpus/$target/"
    done
done
cp fixtures/attacks/*.gguf fixtures/container/*.gguf "$corpus/gguf/"
# Of a model, the header alone: the target puts zeros after it.
for file in fixtures/families/*.gguf; do
    bytes=$("$ggshard" inspect --json "$file" | sed -n 's/^ *"header_bytes": \([0-9]*\).*/\1/p' | head -n 1)
    head -c "$bytes" "$file" > "$corpus/plan/$(basename "$file")"
done
cp mappings/models/*.toml "$corpus/mapping_toml/"
cp mappings/profiles/*.toml "$corpus/profile_toml/"
cp mappings/policies/*.toml "$corpus/policy_toml/"
find fixtures/blocks -name '*.safetensors' -size -8k -exec cp {} "$corpus/safetensors_header/" \;
# A manifest without the digest at its end: the target puts the right one there.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for choice in '--tp 1' '--tp 2 --profile vllm-0.32' '--tp 2 --pp 2 --profile vllm-0.32'; do
    # shellcheck disable=SC2086
    "$ggshard" convert fixtures/families/qwen3.gguf "$work/out" $choice >/dev/null 2>&1
    head -c -79 "$work/out/ggshard.json" > "$corpus/manifest/$(echo "$choice" | tr -c 'a-z0-9' -).json"
    rm -rf "$work/out"
done
