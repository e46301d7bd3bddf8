//! Kept blocks of every type that has a decoder, against ggml's own numbers for them.
//!
//! A Llama is made of golden blocks in random order. What a rank holds of them is computed here, so neither the placement nor the
//! decoding is compared with anything of ours.

use ggshard::convert::Request;
use ggshard::dequant::{Dequantizer, FloatType, Simd};
use ggshard::gguf::GgmlType;
use ggshard::gguf::types::TYPES;
use ggshard::runtime::{OpenOptions, RankCheckpoint};

use super::folders::converted_by;
use super::gguf_writer::{GgufBuilder, Random};
use super::golden::{self, Golden};

/// Heads of attention, and of keys and values, which are fewer than ranks; and numbers per head.
const HEADS: [u64; 2] = [8, 2];
const HEAD: u64 = 256;
const HIDDEN: u64 = 256;
/// Columns of what is cut by columns, so that at tp 8 a rank holds one block of 256 per row.
const WIDE: u64 = HEADS[0] * HEAD;
const VOCAB: u64 = 64;

/// Where a matrix of the model is in the checkpoint and in the GGUF.
struct Matrix {
    checkpoint: &'static str,
    gguf: &'static str,
    rows: u64,
    cols: u64,
    /// Heads whose rows the GGUF has in pairs.
    paired: Option<u64>,
    cut: Cut,
}

enum Cut {
    Rows,
    Columns,
    /// Whole heads of keys or values, each on as many ranks as there are to a head.
    Heads,
}

const MATRICES: [Matrix; 9] = [
    matrix("model.embed_tokens", "token_embd", VOCAB, HIDDEN, None, Cut::Rows),
    matrix("model.layers.0.self_attn.q_proj", "blk.0.attn_q", WIDE, HIDDEN, Some(HEADS[0]), Cut::Rows),
    matrix("model.layers.0.self_attn.k_proj", "blk.0.attn_k", HEADS[1] * HEAD, HIDDEN, Some(HEADS[1]), Cut::Heads),
    matrix("model.layers.0.self_attn.v_proj", "blk.0.attn_v", HEADS[1] * HEAD, HIDDEN, None, Cut::Heads),
    matrix("model.layers.0.self_attn.o_proj", "blk.0.attn_output", HIDDEN, WIDE, None, Cut::Columns),
    matrix("model.layers.0.mlp.gate_proj", "blk.0.ffn_gate", WIDE, HIDDEN, None, Cut::Rows),
    matrix("model.layers.0.mlp.up_proj", "blk.0.ffn_up", WIDE, HIDDEN, None, Cut::Rows),
    matrix("model.layers.0.mlp.down_proj", "blk.0.ffn_down", HIDDEN, WIDE, None, Cut::Columns),
    matrix("lm_head", "output", VOCAB, HIDDEN, None, Cut::Rows),
];

const fn matrix(
    checkpoint: &'static str,
    gguf: &'static str,
    rows: u64,
    cols: u64,
    paired: Option<u64>,
    cut: Cut,
) -> Matrix {
    Matrix { checkpoint, gguf, rows, cols, paired, cut }
}

impl Matrix {
    /// The row of the GGUF that is a row of the checkpoint: of a head of `2 n` rows, row `t n + i` is stored as `2 i + t`.
    fn stored(&self, row: u64) -> u64 {
        let Some(heads) = self.paired else { return row };
        let (head, half) = (self.rows / heads, self.rows / heads / 2);
        let within = row % head;
        row - within + within % half * 2 + within / half
    }

    /// The blocks that a rank holds, as indices into those of the GGUF, row by row.
    fn held(&self, tp: u64, rank: u64, block: u64) -> Vec<u64> {
        let per_row = self.cols / block;
        let part = |n: u64, parts: u64, part: u64| n / parts * part..n / parts * (part + 1);
        let (rows, blocks) = match self.cut {
            Cut::Rows => (part(self.rows, tp, rank), 0..per_row),
            Cut::Columns => (0..self.rows, part(per_row, tp, rank)),
            Cut::Heads => {
                let parts = tp.min(HEADS[1]);
                (part(self.rows, parts, rank * parts / tp), 0..per_row)
            }
        };
        rows.flat_map(|row| blocks.clone().map(move |block| self.stored(row) * per_row + block)).collect()
    }
}

/// The blocks of a type in `fixtures/blocks` whose numbers are finite, and the numbers that ggml makes of each.
fn golden_blocks(goldens: &[Golden], ty: GgmlType) -> Vec<(&[u8], &[u8])> {
    let blocks = goldens.iter().filter(|golden| golden.ty == ty).flat_map(|golden| {
        let numbers = golden.expected.chunks_exact(4 * ty.block() as usize);
        golden.blocks.chunks_exact(ty.block_bytes() as usize).zip(numbers)
    });
    let finite = |numbers: &[u8]| numbers.as_chunks().0.iter().all(|bytes| f32::from_le_bytes(*bytes).is_finite());
    blocks.filter(|(_, numbers)| finite(numbers)).collect()
}

/// A Llama without its matrices.
fn llama() -> GgufBuilder {
    let mut model = GgufBuilder::architecture("llama");
    for (key, value) in [
        ("block_count", 1),
        ("embedding_length", HIDDEN),
        ("feed_forward_length", WIDE),
        ("attention.head_count", HEADS[0]),
        ("attention.head_count_kv", HEADS[1]),
        ("attention.key_length", HEAD),
        ("attention.value_length", HEAD),
        ("context_length", 64),
    ] {
        model = model.kv_u32(&format!("llama.{key}"), value as u32);
    }
    model = model.kv_f32("llama.attention.layer_norm_rms_epsilon", 1e-5);
    for norm in ["blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"] {
        model = model.f32s(&format!("{norm}.weight"), &[HIDDEN], &[1.0; HIDDEN as usize]);
    }
    model
}

#[test]
fn every_type_is_kept_in_place_and_decodes_to_what_ggml_makes_of_it() {
    let goldens = golden::read_folder(&golden::fixtures());
    let blocked = TYPES.iter().map(|info| info.ty).filter(|ty| ty.block() > 1);
    let types: Vec<GgmlType> = blocked.filter(|ty| Dequantizer::new(*ty, Simd::Baseline).is_some()).collect();
    assert_eq!(types.len(), 26);
    for ty in types {
        let blocks = golden_blocks(&goldens, ty);
        let mut random = Random(ty as u64);
        let mut model = llama();
        // For each matrix, which golden block each of its blocks is.
        let chosen = MATRICES.each_ref().map(|matrix| -> Vec<usize> {
            (0..matrix.rows * matrix.cols / ty.block()).map(|_| random.below(blocks.len() as u64) as usize).collect()
        });
        for (matrix, chosen) in MATRICES.iter().zip(&chosen) {
            let bytes = chosen.iter().flat_map(|index| blocks[*index].0).copied().collect();
            model = model.tensor(&format!("{}.weight", matrix.gguf), ty, &[matrix.cols, matrix.rows], bytes);
        }
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("model.gguf");
        std::fs::write(&source, model.build()).unwrap();
        for tp in [1, 2, 4, 8] {
            let kept = converted_by(&source, &Request { tp, policy: Some("keep".into()), ..Request::default() });
            for rank in 0..tp {
                let open = RankCheckpoint::open(kept.path(), rank, OpenOptions::default()).unwrap();
                assert_eq!(open.names().filter(|name| open.blocks(name).is_some()).count(), MATRICES.len());
                for (matrix, chosen) in MATRICES.iter().zip(&chosen) {
                    let name = format!("{}.qweight", matrix.checkpoint);
                    let found = open.blocks(&name).unwrap_or_else(|| panic!("{ty}, tp {tp}: no blocks of {name}"));
                    let held = matrix.held(tp.into(), rank.into(), ty.block());
                    let held: Vec<_> = held.iter().map(|index| blocks[chosen[*index as usize]]).collect();
                    let (bytes, numbers): (Vec<&[u8]>, Vec<&[u8]>) = held.into_iter().unzip();
                    assert!(open.get(&name).unwrap().bytes == bytes.concat(), "{ty}, tp {tp}, rank {rank}: {name}");
                    assert_eq!(found.ty, ty);
                    let decoded = open.decode(&name, FloatType::F32).unwrap();
                    assert!(decoded == numbers.concat(), "{ty}, tp {tp}, rank {rank}: {name}, decoded");
                }
            }
        }
    }
}
