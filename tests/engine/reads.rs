//! Every needed source byte is fetched once.

use ggshard::gguf::GgmlType;

use super::*;
use gguf_writer::GgufBuilder;

/// Converts with every fetched range remembered: none came twice, and together they are what the weights need.
fn once(planned: &Planned, tile: u64) {
    let tp = planned.plan.tp;
    let (_, outcome) = run(planned, Options { track_reads: true, ..options(2, tile) });
    assert_eq!(outcome.reads.repeated(), Some(0), "tp {tp}, tiles of {tile} bytes");
    let ignored: Vec<&str> =
        planned.plan.model.ignored.iter().map(|i| planned.set.tensors()[i.source as usize].name.as_str()).collect();
    let weights =
        planned.set.tensors().iter().filter(|t| !ignored.contains(&t.name.as_str()) && !t.name.ends_with(".scale"));
    assert_eq!(outcome.reads.bytes(), weights.map(|t| t.bytes).sum::<u64>(), "tp {tp}, tiles of {tile} bytes");
}

#[test]
fn at_every_tp_and_tile_size() {
    for tile in [1, 1000, 64 << 20] {
        for tp in [1, 2, 4] {
            once(&toy(tp, FloatType::BF16), tile);
        }
    }
    for tp in [1, 2, 4] {
        for tile in [3000, 512 << 10] {
            once(&fixture(GLM, tp, FloatType::BF16), tile);
            once(&fixture(DEEPSEEK, tp, FloatType::BF16), tile);
        }
    }
}

/// A file of one tensor, a rule for it, and the cut.
fn one(ty: GgmlType, ne: &[u64], shape: &str, cut: &str, more: &str, tp: u32) -> Planned {
    let file = GgufBuilder::architecture("one").random("t.weight", ty, ne, 7);
    let set = GgufSet::from_bytes("one.gguf", file.build()).unwrap();
    let text = format!(
        "name = 'one'\n[[weight]]\nname = 'w'\nshape = {shape}\ncut = {cut}\nfrom = {{ gguf = 't.weight' {more} }}\n"
    );
    planned(set, &Mapping::from_texts(&[text]).unwrap(), tp, FloatType::F32)
}

#[test]
fn where_ranks_share_a_block() {
    // Shares of 64 columns of blocks of 256.
    for rows in [1, 2, 5] {
        for tp in [2, 4, 8] {
            for tile in [1, 2000, 1 << 20] {
                once(&one(GgmlType::Q4_K, &[512, rows], &format!("[{rows}, 512]"), "'row'", "", tp), tile);
            }
        }
    }
}

#[test]
fn where_ranks_share_rows_of_many_pieces() {
    // Two pieces per head, 200 of them on each rank.
    for tile in [1, 2000, 1 << 20] {
        once(&one(GgmlType::Q8_0, &[64, 800], "[800, 64]", "'row'", ", unpermute = 100", 4), tile);
    }
}

#[test]
fn where_a_cut_falls_into_transposed_rows() {
    for (cut, tp) in [("'row'", 4), ("'column'", 4), ("'column'", 8)] {
        for tile in [1, 2000, 1 << 20] {
            let more = ", shape = [32, 64], transpose = true";
            once(&one(GgmlType::Q8_0, &[64, 32], "[64, 32]", cut, more, tp), tile);
        }
    }
}
