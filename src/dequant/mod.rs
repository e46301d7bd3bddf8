//! Dequantization of ggml blocks.
