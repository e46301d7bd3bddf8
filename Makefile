# make test         everything that must hold: format, lints, Rust tests, Python tests, the Python package, documentation
# make test-package the Python package alone: built as a wheel, installed and tested
# make build        the optimized program, target/release/ggshard
# make kernels      kernels/prebuilt/, anew from the sources of the GPU kernels; downloads 100 MB, needs no GPU
# make example      the program's main job on a small model
# make test-transformers   logits from converted folders; downloads several GB, and needs GGSHARD_CORPUS
# make test-vllm    tokens of a real vLLM from converted folders and from GGUFs; downloads several GB, and needs GGSHARD_CORPUS for most of it
# make test-ray     deploy/ray/convert.py on a real Ray; downloads some 100 MB
# make test-nvfp4  the error of nvfp4 next to that of a public quantizer (MLX); downloads some 100 MB
# make test-crash         every fault at every point of a conversion, a few minutes; as root also full and read-only disks
# make bench-peers        conversions and decoders next to what people use, with packages of PyPI; half an hour, on a quiet machine
# make bench-evidence     conversions next to what the machine can do; some minutes
# make test-browser        the picture of a plan in headless Chromium
#
# Needs cargo (rustup takes the toolchain from rust-toolchain.toml), python3, a C and a C++ compiler; the rest is set up here.
# GGSHARD_CORPUS=FOLDER lets the Python tests run over that corpus as well (needs zstd).
# GGSHARD_WIDE=FILE lets them check the low-bit output of that GGUF, a GLM-5 or DeepSeek-V3, at tp 4, 8 and 16 (tests/python/test_wide.py).
# GGSHARD=PROGRAM has test-vllm and test-ray use a program that is built already.

CARGO  ?= cargo
PYTHON ?= python3
TARGET := $(abspath $(or $(CARGO_TARGET_DIR),target))
VENV   := .venv
TORCH  := .venv-transformers
VLLM   := .venv-vllm
PEERS  := .venv-peers
RAY    := .venv-ray
MLX    := .venv-mlx
NVRTC  := .venv-kernels

# The package as `make wheel` left it.
WHEEL = --quiet --disable-pip-version-check --no-deps --force-reinstall $(TARGET)/wheels/ggshard-*.whl

EXAMPLE_MODEL  := fixtures/models/glm_moe_dsa-UD-IQ2_XXS.gguf
EXAMPLE_FOLDER := $(TARGET)/example

.PHONY: help build kernels test test-format test-lints test-rust test-kernels test-python test-package wheel test-docs test-transformers test-vllm test-ray test-nvfp4 test-crash test-browser bench-peers bench-evidence example clean
.NOTPARALLEL:

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

build:
	$(CARGO) build --locked --release

test: test-format test-lints test-rust test-kernels test-python test-package test-docs
	@echo "make test: all passed"

test-format:
	$(CARGO) fmt --check

test-lints:
	$(CARGO) clippy --locked --all-targets -- -D warnings

test-rust:
	$(CARGO) test --locked

# What is checked in must be what the pinned compiler makes of the sources. That it decodes rightly, test-rust has shown.
test-kernels: $(NVRTC)/.installed
	$(NVRTC)/bin/python -B kernels/build.py --check

kernels: $(NVRTC)/.installed
	$(NVRTC)/bin/python -B kernels/build.py

# Links in *.md files are checked by tests/python/test_docs.py. The program is the one that `cargo test` built: `cargo build`
# would compile everything again, because dependencies have other features without the tests'.
test-python: $(VENV)/.installed
	$(CARGO) test --locked --no-run --quiet
	GGSHARD_BIN=$(TARGET)/debug/ggshard $(VENV)/bin/python -B -m pytest tests/python --basetemp=$(TARGET)/pytest

# The Python package, as a wheel that is installed: its own workspace, so that nothing above needs Python's headers or pyo3.
test-package: $(VENV)/.installed wheel
	$(CARGO) fmt --manifest-path python/Cargo.toml --check
	CARGO_TARGET_DIR=$(TARGET)/python $(CARGO) clippy --locked --manifest-path python/Cargo.toml --all-targets -- -D warnings
	$(VENV)/bin/python -m pip install $(WHEEL)
	$(VENV)/bin/python -B -m pytest python/tests --basetemp=$(TARGET)/pytest-package

wheel: $(VENV)/.installed
	CARGO_TARGET_DIR=$(TARGET)/python $(VENV)/bin/maturin build --quiet --locked --manifest-path python/Cargo.toml --interpreter $(VENV)/bin/python --out $(TARGET)/wheels

test-docs:
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --no-deps

test-transformers: build $(TORCH)/.installed
	GGSHARD_BIN=$(TARGET)/release/ggshard $(TORCH)/bin/python -B -m pytest tests/transformers -rsP -p no:cacheprovider --basetemp=$(TARGET)/pytest-transformers

# Engines take both their time and the machine's: one after the other, and politely.
test-vllm: $(if $(GGSHARD),,build) $(VLLM)/.installed wheel
	$(VLLM)/bin/python -m pip install $(WHEEL)
	$(VLLM)/bin/python -B -m pytest python/tests/test_vllm.py python/tests/test_torch.py -p no:cacheprovider --basetemp=$(TARGET)/pytest-package
	GGSHARD_BIN=$(or $(GGSHARD),$(TARGET)/release/ggshard) nice $(VLLM)/bin/python -B -m pytest tests/vllm -rsP -p no:cacheprovider --basetemp=$(TARGET)/pytest-vllm

test-ray: $(if $(GGSHARD),,build) $(RAY)/.installed
	mkdir -p $(TARGET)
	GGSHARD_BIN=$(or $(GGSHARD),$(TARGET)/release/ggshard) nice $(RAY)/bin/python -B -m pytest tests/ray -rsP -p no:cacheprovider --basetemp=$(TARGET)/pytest-ray

test-nvfp4: $(MLX)/.installed
	$(MLX)/bin/python -B tests/nvfp4/compare.py

test-crash: build
	$(PYTHON) -B tests/crash/harness.py --bin $(TARGET)/release/ggshard

test-browser:
	$(CARGO) build --locked
	$(PYTHON) -B tests/browser/check.py $(TARGET)/debug/ggshard

bench-peers: build $(PEERS)/.installed $(PEERS)/ggml.so
	$(PEERS)/bin/python -B benches/peers/compare.py --ggshard $(TARGET)/release/ggshard
	GGML_LIBRARY=$(abspath $(PEERS)/ggml.so) $(CARGO) bench --locked --bench ggml

# MODEL=FILE measures with another one.
bench-evidence: build $(if $(MODEL),,$(PEERS)/.installed)
	$(if $(MODEL),,test -e $(TARGET)/peers/llama-q4_k_m.gguf || $(PEERS)/bin/python -B benches/peers/model.py $(TARGET)/peers/llama-q4_k_m.gguf)
	$(PYTHON) -B benches/evidence.py $(or $(MODEL),$(TARGET)/peers/llama-q4_k_m.gguf) --ggshard $(TARGET)/release/ggshard

example: build
	rm -rf $(EXAMPLE_FOLDER)
	$(TARGET)/release/ggshard convert $(EXAMPLE_MODEL) $(EXAMPLE_FOLDER) --tp 2
	$(TARGET)/release/ggshard verify $(EXAMPLE_FOLDER)

# Complete or not there: the mark is set last, and an environment without it is made anew.
$(VENV)/.installed: tests/python/requirements.txt
$(TORCH)/.installed: tests/transformers/requirements.txt
$(RAY)/.installed: tests/ray/requirements.txt
$(MLX)/.installed: tests/nvfp4/requirements.txt
$(PEERS)/.installed: benches/peers/requirements.txt
$(NVRTC)/.installed: kernels/requirements.txt
$(VENV)/.installed $(TORCH)/.installed $(RAY)/.installed $(MLX)/.installed $(PEERS)/.installed $(NVRTC)/.installed:
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

# ggml's row functions alone, at this machine's instruction set.
$(PEERS)/ggml.so: $(PEERS)/.installed benches/peers/build_ggml.py
	$(PEERS)/bin/python -B benches/peers/build_ggml.py $@

# pip cannot replace what a package asks for; uv can.
$(VLLM)/.installed: tests/vllm/requirements.txt tests/vllm/overrides.txt
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
	$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python --requirement $< --override tests/vllm/overrides.txt
	touch $@

clean:
	$(CARGO) clean
	rm -rf $(VENV) $(TORCH) $(VLLM) $(PEERS) $(RAY) $(MLX) $(NVRTC)
