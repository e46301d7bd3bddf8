#!/usr/bin/env bash
# Checks a CUDA device: the same bytes as the CPU, for every type that it decodes and every form that it encodes, and how fast.
# Some minutes.
#
#   scripts/gpu-check.sh GGSHARD FIXTURES [DEVICE] > table.md
#
# Needs the program, the folders blocks/ and models/ of fixtures/, and a driver; nothing else is installed or downloaded.
# Prints Markdown; exit status 1 if anything differs or fails. Tells on stderr what it is at.
#
#   SIZE=512M       bytes of output that a kernel makes at a time in measurements
#   MODEL_MB=512    megabytes of the Q4_K tensor that is converted from end to end (3.6 times that is written)
#   WORK=DIR        where it writes (default: TMPDIR or /tmp)
set -euo pipefail

if [ $# -lt 2 ]; then
    sed -n '2,13s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
ggshard=$(readlink -f "$1")
fixtures=$(readlink -f "$2")
device=${3:-cuda:0}
work=$(mktemp -d "${WORK:-${TMPDIR:-/tmp}}/gpu-check.XXXXXX")
trap 'rm -rf "$work"' EXIT
failed=0

say() { echo "gpu-check: $*" >&2; }

# Converts with both and compares every file: same SOURCE ARGUMENTS...
same() {
    local source=$1
    shift
    rm -rf "$work/gpu" "$work/cpu"
    if ! "$ggshard" convert "$source" "$work/gpu" "$@" --device "$device" > "$work/log" 2>&1; then
        say "$source $*: $(tail -n 1 "$work/log")"
        return 1
    fi
    "$ggshard" convert "$source" "$work/cpu" "$@" --device cpu > "$work/log" 2>&1
    if ! diff -rq "$work/gpu" "$work/cpu" >&2; then
        say "$source $*: the bytes differ"
        return 1
    fi
}

# Counts successes and failures: count NAME COMMAND...; the counts are printed by `row`.
declare -A good bad
count() {
    local name=$1
    shift
    if "$@"; then good[$name]=$((${good[$name]:-0} + 1)); else bad[$name]=$((${bad[$name]:-0} + 1)) failed=1; fi
}
row() { echo "| $2 | ${good[$1]:-0} | ${bad[$1]:-0} |"; }

# A policy that gives every matrix a form.
policy() {
    printf 'name = "all"\nversion = 1\nabout = "All of it."\n[[rule]]\ndtype = "%s"\n' "$1" > "$work/$1.toml"
    echo "$work/$1.toml"
}

# A GGUF of one Q4_K tensor of zeros with $1 rows of 4096: a header, and a hole in the file.
zeros() {
    local rows=$1 name=weight key=general.architecture value=zeros
    le() { local n=$1 i; for ((i = 0; i < $2; i++)); do printf "\\x$(printf %02x $((n >> 8 * i & 255)))"; done; }
    text() { le ${#1} 8 && printf %s "$1"; }
    {
        printf GGUF && le 3 4 && le 1 8 && le 1 8
        text $key && le 8 4 && text $value
        text $name && le 2 4 && le 4096 8 && le "$rows" 8 && le 12 4 && le 0 8
    } > "$work/zeros.gguf"
    local header
    header=$(stat -c %s "$work/zeros.gguf")
    truncate -s $(((header + 31) / 32 * 32 + rows * 16 * 144)) "$work/zeros.gguf"
}

# Seconds that a command takes.
seconds() {
    local begin end
    begin=$(date +%s%N)
    "$@" > "$work/log" 2>&1 || { tail -n 1 "$work/log" >&2; return 1; }
    end=$(date +%s%N)
    awk "BEGIN { printf \"%.2f\", ($end - $begin) / 1e9 }"
}

say "devices"
"$ggshard" devices > "$work/devices" || { cat "$work/devices" >&2; exit 1; }
echo "# $device, $(date -u +%Y-%m-%d)"
echo
sed 's/^/    /' "$work/devices"
if command -v nvidia-smi > /dev/null; then
    nvidia-smi --query-gpu=index,name,driver_version,pcie.link.gen.current,pcie.link.width.current --format=csv | sed 's/^/    /'
fi
echo "    $("$ggshard" --version), $(nproc) CPUs"
echo

for file in "$fixtures"/blocks/*.gguf; do
    say "$(basename "$file")"
    for dtype in bf16 f16 f32; do
        count blocks same "$file" --tp 1 --mapping raw --dtype $dtype --allow-nonfinite --mem-limit 16M
    done
    for form in fp8 nvfp4; do
        count encoded same "$file" --tp 1 --mapping raw --policy "$(policy $form)" --allow-nonfinite --mem-limit 16M
    done
done
for model in "$fixtures"/models/*.gguf "$fixtures"/models/*-split; do
    say "$(basename "$model")"
    for tp in 1 2 4; do
        count models same "$model" --tp $tp
        count models same "$model" --tp $tp --dtype f32 --mem-limit 1M
    done
    for tp in 1 2; do
        count low same "$model" --tp $tp --dtype fp8
        count low same "$model" --tp $tp --dtype fp8 --mem-limit 1M
        count low same "$model" --tp $tp --dtype nvfp4
        count low same "$model" --tp $tp --dtype nvfp4 --nvfp4-search
    done
done
echo "| conversions, $device and cpu | same bytes | different or failed |"
echo "|---|---:|---:|"
row blocks "blocks of every type, in bf16, f16 and f32"
row models "models at 1, 2 and 4 ranks"
row encoded "blocks of every type, in fp8 and nvfp4"
row low "models in fp8 and nvfp4, with and without search"

if command -v compute-sanitizer > /dev/null; then
    for dtype in bf16 fp8 nvfp4; do
        say "compute-sanitizer, $dtype"
        rm -rf "$work/gpu"
        count memcheck compute-sanitizer --tool memcheck --error-exitcode 1 --log-file "$work/memcheck" \
            "$ggshard" convert "$(echo "$fixtures"/models/*.gguf)" "$work/gpu" --tp 2 --dtype $dtype --device "$device" > "$work/log"
    done
    row memcheck "compute-sanitizer memcheck, conversions to bf16, fp8 and nvfp4"
else
    echo "| compute-sanitizer is not installed: skipped | | |"
fi
echo

say "rates"
"$ggshard" bench --device "$device" --size "${SIZE:-512M}" --dir "$work" || failed=1
rm -rf "$work/gpu" "$work/cpu"
rows=$((${MODEL_MB:-512} * 1000000 / (16 * 144)))
zeros $rows
for form in bf16 fp8 nvfp4; do
    choice=()
    if [ $form != bf16 ]; then choice=(--policy "$(policy $form)"); fi
    for place in cpu "$device"; do
        say "a conversion to $form, $place"
        for run in warm timed; do
            rm -rf "$work/out"
            time=$(seconds "$ggshard" convert "$work/zeros.gguf" "$work/out" --tp 1 --mapping raw --device "$place" \
                "${choice[@]}") || failed=1
        done
        bytes=$(du -sb "$work/out" | cut -f 1)
        awk "BEGIN { printf \"| $place | convert Q4_K to $form, %.1f GB written, ${time:-0} s | %.2f | |\\n\",
            $bytes / 1e9, $bytes / 1e9 / (${time:-0} + 1e-9) }"
    done
done
echo
echo "$SECONDS seconds."
exit $failed
